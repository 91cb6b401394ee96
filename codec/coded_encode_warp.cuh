// The encoder of one slice by one warp, in shared memory: encode_block()'s bytes. For kernels that
// find the codes themselves, as the coded store's do; codec/coded_encode.cu is faster where codes
// lie in memory.
#pragma once

#include <cuda_runtime.h>

#include "codec/coded_batch.h"
#include "codec/coded_open.cuh"
#include "codec/warp.cuh"

namespace tierkv {

inline constexpr int32_t kEncodeCodesBytes = kBlockTokens * kSliceDims * 2;
inline constexpr int32_t kEncodeExceptionBits = 8 * kExceptionBytes;
// Digits that are no digits, as in coded_block.cc.
inline constexpr int32_t kOutsideDigit = -1;
inline constexpr int32_t kPaddingDigit = -2;

// What a warp has in shared memory. A block that is coded is smaller than its raw form.
struct BlockMemory {
  int16_t* codes;        // [kBlockTokens][kSliceDims]
  uint32_t* block;       // words of kMaxCodedBlockBytes
  uint32_t* exceptions;  // [kMaxExceptions]
};
inline constexpr int32_t kEncodeWarpBytes =
    kEncodeCodesBytes + kMaxCodedBlockBytes + 4 * kMaxExceptions;

struct EncodeSlice {
  const DeviceCodebook& book;
  const BlockMemory& memory;
  int32_t tokens, dims;
  int32_t most_coded_bytes = kMaxCodedBlockBytes;  // a larger coded form is stored raw

  __device__ __forceinline__ int32_t code(int32_t token, int32_t dim) const {
    return memory.codes[token * kSliceDims + dim];
  }
  __device__ __forceinline__ int32_t digit(int32_t token, int32_t dim) const {
    if (token >= tokens || dim >= dims) return kPaddingDigit;
    const int32_t above = code(token, dim) - book.base;
    return above >= 0 && above < book.levels ? above : kOutsideDigit;
  }
};

// The pair or the single code that a symbol stands for.
struct SymbolPlace {
  int32_t token[2], dim[2], digit[2];
};

// Code word and length of the symbol that stands for `places` digits, and the digits it has.
struct ChosenSymbol {
  uint32_t word;
  int32_t symbol;
  bool exact;  // none of its digits is an exception
};

__device__ __forceinline__ int32_t symbol_cost(const DeviceCodebook& book, int32_t symbol,
                                               const SymbolPlace& at, int32_t places) {
  auto bits = static_cast<int32_t>(book.words[symbol] >> 16);
  for (int32_t i = 0; i < places; ++i, symbol /= book.levels) {
    if (at.digit[i] != kPaddingDigit && at.digit[i] != symbol % book.levels)
      bits += kEncodeExceptionBits;
  }
  return bits;
}

// The present symbol of least cost, ties to the lowest.
__device__ inline int32_t substitute(const DeviceCodebook& book, const SymbolPlace& at,
                                     int32_t places) {
  int32_t best = book.cheapest[0], best_cost = symbol_cost(book, best, at, places);
  for (int32_t i = 0; i < places; ++i) {
    if (at.digit[i] < 0) continue;
    const int32_t kept = book.cheapest[1 + i * book.levels + at.digit[i]];
    if (kept == Codebook::kNoSymbol) continue;
    const int32_t cost = symbol_cost(book, kept, at, places);
    if (cost < best_cost || (cost == best_cost && kept < best)) best = kept, best_cost = cost;
  }
  return best;
}

__device__ __forceinline__ ChosenSymbol choose_symbol(const DeviceCodebook& book,
                                                      const SymbolPlace& at, int32_t places) {
  const int32_t symbol = places == 2 ? at.digit[0] + book.levels * at.digit[1] : at.digit[0];
  const bool inside = at.digit[0] >= 0 && (places == 1 || at.digit[1] >= 0);
  if (inside && book.words[symbol] != 0) return {book.words[symbol], symbol, true};
  const int32_t other = substitute(book, at, places);
  return {book.words[other], other, false};
}

// Symbol by symbol of a lane's stream: visit(place, places).
template <class Visit>
__device__ __forceinline__ void for_each_symbol(const EncodeSlice& slice, int32_t stream,
                                                const Visit& visit) {
  const DeviceCodebook& book = slice.book;
  const bool key = book.component == Component::kKey;
  const int32_t tiles = tile_count(slice.tokens), blocks = dim_block_count(slice.dims);
  for (int32_t tile = 0; tile < tiles; ++tile) {
    for (int32_t f = 0; f < blocks; ++f) {
      for (int32_t r = stream; r < kPairsPerFragment; r += book.streams_per_lane) {
        const PairPosition p = pair_position(book.component, tile, f, r, lane_index());
        SymbolPlace at{{p.token, p.token + !key}, {p.dim, p.dim + key}, {0, 0}};
        at.digit[0] = slice.digit(at.token[0], at.dim[0]);
        at.digit[1] = slice.digit(at.token[1], at.dim[1]);
        if (book.mode == BlockMode::kPair) {
          visit(at, 2);
          continue;
        }
        visit(at, 1);
        visit(SymbolPlace{{at.token[1], 0}, {at.dim[1], 0}, {at.digit[1], 0}}, 1);
      }
    }
  }
}

// Sizes of a slice in the codebook's mode: bits of the streams before each of the lane's own, and
// all exceptions, unordered, in memory.
struct SlicePlan {
  int32_t start[2];
  int32_t payload_bits, exceptions;
  bool possible;
};

__device__ __forceinline__ int32_t sum_before(int32_t x, int32_t* total) {
  int32_t sum = x;
#pragma unroll
  for (int32_t i = 1; i < kWarpLanes; i *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, sum, i);
    if (lane_index() >= i) sum += other;
  }
  *total = __shfl_sync(kAllLanes, sum, kWarpLanes - 1);
  return sum - x;
}

__device__ inline SlicePlan plan_slice(const EncodeSlice& slice, int32_t* counter) {
  SlicePlan plan{};
  bool possible = true;
  if (lane_index() == 0) *counter = 0;
  __syncwarp();
  for (int32_t stream = 0; stream < slice.book.streams_per_lane; ++stream) {
    int32_t bits = 0, total = 0;
    for_each_symbol(slice, stream, [&](const SymbolPlace& at, int32_t places) {
      const ChosenSymbol chosen = choose_symbol(slice.book, at, places);
      bits += static_cast<int32_t>(chosen.word >> 16);
      if (chosen.exact) return;
      int32_t symbol = chosen.symbol;
      for (int32_t i = 0; i < places; ++i, symbol /= slice.book.levels) {
        const int32_t digit = symbol % slice.book.levels;
        if (at.digit[i] == kPaddingDigit || at.digit[i] == digit) continue;
        const int32_t delta = slice.code(at.token[i], at.dim[i]) - slice.book.base - digit;
        possible &= delta >= INT16_MIN && delta <= INT16_MAX;
        const int32_t n = atomicAdd(counter, 1);
        if (n >= kMaxExceptions) continue;
        slice.memory.exceptions[n] = static_cast<uint32_t>(at.token[i] * kSliceDims + at.dim[i]) |
                                     static_cast<uint32_t>(delta) << 16;
      }
    });
    plan.start[stream] = plan.payload_bits + sum_before(bits, &total);
    plan.payload_bits += total;
  }
  __syncwarp();
  plan.exceptions = *counter;
  plan.possible = __all_sync(kAllLanes, possible) && plan.exceptions <= kMaxExceptions &&
                  plan.payload_bits <= kMaxPayloadBits;
  return plan;
}

// Adds `length` bits at bit `at` of zeroed words. Neighbouring streams share words.
__device__ __forceinline__ void put_bits(uint32_t* words, int32_t at, uint32_t bits,
                                         int32_t length) {
  atomicOr(words + at / 32, bits << (at % 32));
  if (at % 32 + length > 32) atomicOr(words + at / 32 + 1, bits >> (32 - at % 32));
}

__device__ inline void write_coded(const EncodeSlice& slice, const SlicePlan& plan,
                                   const CodedBlockLayout& at) {
  const int32_t lane = lane_index();
  auto* starts = reinterpret_cast<uint16_t*>(slice.memory.block) + at.starts / 2;
  uint32_t* payload = slice.memory.block + at.payload / 4;
  for (int32_t stream = 0; stream < slice.book.streams_per_lane; ++stream) {
    int32_t bit = plan.start[stream];
    starts[stream * kWarpLanes + lane] = static_cast<uint16_t>(bit);
    for_each_symbol(slice, stream, [&](const SymbolPlace& place, int32_t places) {
      const uint32_t word = choose_symbol(slice.book, place, places).word;
      const auto length = static_cast<int32_t>(word >> 16);
      put_bits(payload, bit, word & 0xffffu, length);
      bit += length;
    });
  }
  // Indices are different, so an exception's rank is the number of lower ones.
  for (int32_t i = lane; i < plan.exceptions; i += kWarpLanes) {
    const uint32_t mine = slice.memory.exceptions[i];
    int32_t rank = 0;
    for (int32_t j = 0; j < plan.exceptions; ++j) {
      rank += (slice.memory.exceptions[j] & 0xffffu) < (mine & 0xffffu);
    }
    slice.memory.block[at.exceptions / 4 + rank] = mine;
  }
}

__device__ inline void write_raw(const EncodeSlice& slice, const CodedBlockHeader& h) {
  const int32_t bits = raw_bits(h.mode);
  const TileLayout layout = raw_tile(bits, dim_block_count(slice.dims));
  for (int32_t t = 0; t < slice.tokens; ++t) {
    for (int32_t d = lane_index(); d < slice.dims; d += kWarpLanes) {
      const CodePosition at = code_position(layout, h.component, t % kTileTokens, d);
      const int32_t byte = kCodedBlockHeaderBytes + t / kTileTokens * layout.bytes() + at.byte;
      const uint32_t code = static_cast<uint32_t>(slice.code(t, d) - h.base) & ((1u << bits) - 1u);
      atomicOr(slice.memory.block + byte / 4, code << at.bit);
    }
  }
}

// As the host's raw_header().
__device__ inline CodedBlockHeader raw_header(const EncodeSlice& slice) {
  int32_t low = INT16_MAX, high = INT16_MIN;
#pragma unroll 4
  for (int32_t t = 0; t < slice.tokens; ++t) {
    for (int32_t d = lane_index(); d < slice.dims; d += kWarpLanes) {
      low = min(low, slice.code(t, d));
      high = max(high, slice.code(t, d));
    }
  }
  low = __reduce_min_sync(kAllLanes, low);
  high = __reduce_max_sync(kAllLanes, high);
  CodedBlockHeader h;
  h.mode = high - low < 4     ? BlockMode::kRaw2
           : high - low < 16  ? BlockMode::kRaw4
           : high - low < 256 ? BlockMode::kRaw8
                              : BlockMode::kRaw16;
  h.component = slice.book.component;
  h.tokens = static_cast<uint8_t>(slice.tokens);
  h.dims = static_cast<uint8_t>(slice.dims);
  h.base = h.mode == BlockMode::kRaw16 ? int16_t{0} : static_cast<int16_t>(low);
  return h;
}

// One slice into shared memory; its size in bytes.
__device__ inline int32_t encode_slice(const EncodeSlice& slice, int32_t* counter) {
  const DeviceCodebook& book = slice.book;
  CodedBlockHeader header = raw_header(slice);
  CodedBlockLayout at = block_layout(header);
  const SlicePlan plan = plan_slice(slice, counter);
  bool coded = false;
  if (plan.possible) {
    CodedBlockHeader h = header;
    h.mode = book.mode;
    h.streams_per_lane = static_cast<uint8_t>(book.streams_per_lane);
    h.table_id = book.table_id;
    h.base = static_cast<int16_t>(book.base);
    h.payload_bits = static_cast<uint16_t>(plan.payload_bits);
    h.exceptions = static_cast<uint16_t>(plan.exceptions);
    const CodedBlockLayout coded_at = block_layout(h);
    coded = coded_at.bytes < at.bytes && coded_at.bytes <= slice.most_coded_bytes;
    if (coded) header = h, at = coded_at;
  }
  header.units = static_cast<uint16_t>(at.bytes / kBlockAlignment);
  for (int32_t i = lane_index(); i < at.bytes / 4; i += kWarpLanes) slice.memory.block[i] = 0;
  __syncwarp();
  if (coded) {
    write_coded(slice, plan, at);
  } else {
    write_raw(slice, header);
  }
  __syncwarp();
  auto* bytes = reinterpret_cast<uint8_t*>(slice.memory.block);
  if (lane_index() == 0) store_header(header, bytes);
  __syncwarp();
  const uint32_t checksum = warp_checksum(bytes, at.bytes);
  __syncwarp();
  if (lane_index() == 0) store_u16(bytes + 14, checksum);
  __syncwarp();
  return at.bytes;
}

}  // namespace tierkv

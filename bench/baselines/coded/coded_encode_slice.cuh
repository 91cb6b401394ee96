// SPDX-License-Identifier: Apache-2.0
// The encoder of one slice by one warp, in shared memory: encode_block()'s bytes.
//
// Two passes over the codes: the first puts symbols in their place and adds up the bits of the
// lanes' streams, the second writes them where they begin. Bound: the lookups of code words in
// shared memory.
#pragma once

#include "codec/gpu/coded/coded_form.cuh"
#include "codec/gpu/coded/coded_symbols.cuh"

namespace tierkv {

// As the host's raw_header().
__device__ inline CodedBlockHeader raw_header(Component component, int32_t tokens, int32_t dims,
                                              const CodeRange& range) {
  const RawForm raw = raw_form(range);
  CodedBlockHeader h;
  h.mode = raw.mode;
  h.component = component;
  h.tokens = static_cast<uint8_t>(tokens);
  h.dims = static_cast<uint8_t>(dims);
  h.base = raw.base;
  return h;
}

using BlockForm = FormOf<CodedBlockHeader, CodedBlockLayout>;
// Coded where that is possible, smaller than the raw form and not beyond the limit.
__device__ inline BlockForm choose_form(const DeviceCodebook& book, const CodedBlockHeader& raw,
                                        const SlicePlan& plan, int32_t most_coded_bytes) {
  BlockForm form{raw, block_layout(raw), false};
  if (plan.possible) {
    CodedBlockHeader h = raw;
    h.mode = book.mode;
    h.streams_per_lane = static_cast<uint8_t>(book.streams_per_lane);
    h.table_id = book.table_id;
    h.base = static_cast<int16_t>(book.base);
    h.payload_bits = static_cast<uint16_t>(plan.payload_bits);
    h.exceptions = static_cast<uint16_t>(plan.exceptions);
    const CodedBlockLayout at = block_layout(h);
    if (at.bytes < form.at.bytes && at.bytes <= most_coded_bytes) form = {h, at, true};
  }
  form.header.units = static_cast<uint16_t>(form.at.bytes / kBlockAlignment);
  return form;
}

// Codes from one token to the next: lanes of eight tokens meet in no bank.
inline constexpr int32_t kCodeStride = kSliceDims + 8;

// What a warp has in shared memory. A block that is coded is smaller than its raw form.
struct SliceMemory {
  int16_t* codes;        // [kBlockTokens][kCodeStride]
  uint32_t* block;       // words of kMaxCodedBlockBytes
  uint32_t* exceptions;  // [kMaxExceptions]
};

struct Slice {
  const DeviceCodebook& book;
  const uint32_t* words;  // of the codebook, in shared memory
  const SliceMemory& memory;
  int32_t tokens, dims;
  int32_t most_coded_bytes = kMaxCodedBlockBytes;  // a larger coded form is stored raw

  __device__ __forceinline__ int32_t code(int32_t token, int32_t dim) const {
    return memory.codes[token * kCodeStride + dim];
  }
  // No padding in its tiles and dim blocks.
  __device__ __forceinline__ bool is_whole() const {
    return tokens % kTileTokens == 0 && dims % kDimBlock == 0;
  }
  __device__ __forceinline__ int32_t digit(int32_t code) const {
    const int32_t above = code - book.base;
    return static_cast<uint32_t>(above) < static_cast<uint32_t>(book.levels) ? above
                                                                             : kOutsideAlphabet;
  }
};

// Shared memory of a warp, one SliceMemory.
inline constexpr int32_t kSliceCodesBytes = kBlockTokens * kCodeStride * 2;
inline constexpr int32_t kSliceBytes = kSliceCodesBytes + kMaxCodedBlockBytes + 4 * kMaxExceptions;
static_assert(kSliceBytes % 16 == 0);

__device__ __forceinline__ SliceMemory slice_memory(uint8_t* shared, int32_t warp) {
  uint8_t* mine = shared + warp * kSliceBytes;
  return {reinterpret_cast<int16_t*>(mine), reinterpret_cast<uint32_t*>(mine + kSliceCodesBytes),
          reinterpret_cast<uint32_t*>(mine + kSliceCodesBytes + kMaxCodedBlockBytes)};
}

// The pairs of a lane's stream, in order: visit(at, place), where `at` points to the first code and
// place(&p) fills in tokens and channels.
template <class Visit>
__device__ __forceinline__ void for_each_pair(const Slice& slice, int32_t stream,
                                              const Visit& visit) {
  const bool key = slice.book.component == Component::kKey;
  const PairPosition lane = pair_position(slice.book.component, 0, 0, 0, lane_index());
  int16_t* const codes = slice.memory.codes + lane.token * kCodeStride + lane.dim;
  const int32_t row = key ? 8 * kCodeStride : 8, column = key ? 8 : 8 * kCodeStride;
  const int32_t tiles = tile_count(slice.tokens), blocks = dim_block_count(slice.dims);
  const bool both = slice.book.streams_per_lane == 1;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    for (int32_t f = 0; f < blocks; ++f) {
      int16_t* const at = codes + tile * kTileTokens * kCodeStride + f * kDimBlock;
#pragma unroll
      for (int32_t r = 0; r < kPairsPerFragment; ++r) {
        if (!both && r % 2 != stream) continue;
        visit(at + r % 2 * row + r / 2 * column, [&](Place* p) {
          p->token[0] = tile * kTileTokens + lane.token + (key ? r % 2 : r / 2) * 8;
          p->dim[0] = f * kDimBlock + lane.dim + (key ? r / 2 : r % 2) * 8;
          p->token[1] = p->token[0] + !key;
          p->dim[1] = p->dim[0] + key;
        });
      }
    }
  }
}

// What the symbol's digits leave; false where a difference does not fit.
__device__ inline bool add_exceptions(const Slice& slice, const Place& at, int32_t places,
                                      int32_t symbol, int32_t* counter) {
  const int2 digits = symbol_digits(slice.book, symbol, places);
  bool possible = true;
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t digit = i == 0 ? digits.x : digits.y;
    if (i >= places || at.digit[i] == kPaddingCode || at.digit[i] == digit) continue;
    const int32_t delta = slice.code(at.token[i], at.dim[i]) - slice.book.base - digit;
    possible &= delta >= INT16_MIN && delta <= INT16_MAX;
    const int32_t n = atomicAdd(counter, 1);
    if (n >= kMaxExceptions) continue;
    slice.memory.exceptions[n] = static_cast<uint32_t>(at.token[i] * kSliceDims + at.dim[i]) |
                                 static_cast<uint32_t>(delta) << 16;
  }
  return possible;
}

// A lane's pass over its streams that puts symbols in the place of codes.
struct SymbolPass {
  const Slice& slice;
  int32_t* counter;  // of the warp's exceptions
  int32_t bits = 0;  // of the stream
  bool possible = true;

  template <class Find>
  __device__ __forceinline__ void take_pair(int16_t* at, const Find& find) {
    const bool key = slice.book.component == Component::kKey;
    int16_t* const other = at + (key ? 1 : kCodeStride);
    int2 d = {slice.digit(at[0]), slice.digit(*other)};
    if (!slice.is_whole()) {
      Place p;
      find(&p);
      if (p.token[0] >= slice.tokens || p.dim[0] >= slice.dims) d.x = kPaddingCode;
      if (p.token[1] >= slice.tokens || p.dim[1] >= slice.dims) d.y = kPaddingCode;
    }
    if (slice.book.mode == BlockMode::kPair) {
      const int32_t symbol = (d.x | d.y) < 0 ? kOutsideAlphabet : d.x + slice.book.levels * d.y;
      at[0] = static_cast<int16_t>(take(symbol, d, 0, 2, find));
    } else {
      at[0] = static_cast<int16_t>(take(d.x, {d.x, 0}, 0, 1, find));
      *other = static_cast<int16_t>(take(d.y, {d.y, 0}, 1, 1, find));
    }
  }

 private:
  // The symbol, or what takes its place where it is absent. Its codes begin with the pair's
  // `first`.
  template <class Find>
  __device__ __forceinline__ int32_t take(int32_t symbol, int2 digits, int32_t first,
                                          int32_t places, const Find& find) {
    uint32_t word = symbol < 0 ? 0u : slice.words[symbol];
    if (word == 0) {
      Place p;
      find(&p);
      if (first == 1) p.token[0] = p.token[1], p.dim[0] = p.dim[1];
      p.digit[0] = digits.x, p.digit[1] = digits.y;
      const ChosenSymbol chosen = choose_substitute(slice.book, slice.words, p, places);
      possible &= add_exceptions(slice, p, places, chosen.symbol, counter);
      word = chosen.word;
      symbol = chosen.symbol;
    }
    bits += static_cast<int32_t>(word >> 16);
    return symbol;
  }
};

// Leaves symbols where the codes were.
__device__ inline SlicePlan plan_slice(const Slice& slice, int32_t* counter) {
  SlicePlan plan{};
  bool possible = true;
  if (lane_index() == 0) *counter = 0;
  __syncwarp();
  for (int32_t stream = 0; stream < slice.book.streams_per_lane; ++stream) {
    SymbolPass pass{slice, counter};
    for_each_pair(slice, stream, [&](int16_t* at, const auto& find) { pass.take_pair(at, find); });
    int32_t total = 0;
    plan.start[stream] = plan.payload_bits + sum_before(pass.bits, &total);
    plan.payload_bits += total;
    possible &= pass.possible;
  }
  __syncwarp();
  plan.exceptions = *counter;
  plan.possible = __all_sync(kFullWarp, possible) && plan.exceptions <= kMaxExceptions &&
                  plan.payload_bits <= kMaxPayloadBits;
  return plan;
}

// Bits of a stream into zeroed words. Neighbouring streams share their first and last words.
struct StreamWriter {
  uint32_t* word;
  uint64_t bits;   // not written yet
  int32_t filled;  // of them
  bool shared = true;

  __device__ __forceinline__ StreamWriter(uint32_t* words, int32_t begin)
      : word(words + begin / 32), bits(0), filled(begin % 32) {}
  // entry: as in DeviceCodebook::words.
  __device__ __forceinline__ void put(uint32_t entry) {
    bits |= static_cast<uint64_t>(entry & 0xffffu) << filled;
    filled += static_cast<int32_t>(entry >> 16);
    if (filled < 32) return;
    if (shared) {
      atomicOr(word, static_cast<uint32_t>(bits));
    } else {
      *word = static_cast<uint32_t>(bits);
    }
    shared = false;
    ++word;
    bits >>= 32;
    filled -= 32;
  }
  __device__ __forceinline__ void finish() const {
    if (bits != 0) atomicOr(word, static_cast<uint32_t>(bits));
  }
};

__device__ inline void write_coded(const Slice& slice, const SlicePlan& plan,
                                   const CodedBlockLayout& at) {
  const int32_t lane = lane_index();
  const int32_t second = slice.book.component == Component::kKey ? 1 : kCodeStride;
  auto* starts = reinterpret_cast<uint16_t*>(slice.memory.block) + at.starts / 2;
  uint32_t* payload = slice.memory.block + at.payload / 4;
  for (int32_t stream = 0; stream < slice.book.streams_per_lane; ++stream) {
    starts[stream * kWarpLanes + lane] = static_cast<uint16_t>(plan.start[stream]);
    StreamWriter out(payload, plan.start[stream]);
    for_each_pair(slice, stream, [&](const int16_t* pair, const auto&) {
      out.put(slice.words[pair[0]]);
      if (slice.book.mode == BlockMode::kSingle) out.put(slice.words[pair[second]]);
    });
    out.finish();
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

__device__ inline void write_raw(const Slice& slice, const CodedBlockHeader& h) {
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

// One slice into memory.block; its size in bytes. load() puts its codes into memory.codes, all
// lanes together, and returns the range of those that the lane has put there; it is called again
// where the block stays raw.
template <class Load>
__device__ int32_t encode_slice(const Slice& slice, const Load& load, int32_t* counter) {
  const CodeRange range = load();
  __syncwarp();
  const CodedBlockHeader raw = raw_header(slice.book.component, slice.tokens, slice.dims, range);
  const SlicePlan plan = plan_slice(slice, counter);
  const BlockForm form = choose_form(slice.book, raw, plan, slice.most_coded_bytes);
  clear_block(slice.memory.block, form.at.bytes);
  if (form.coded) {
    write_coded(slice, plan, form.at);
  } else {
    load();  // symbols have taken the codes' place
    __syncwarp();
    write_raw(slice, form.header);
  }
  finish_block(form, reinterpret_cast<uint8_t*>(slice.memory.block));
  return form.at.bytes;
}

}  // namespace tierkv

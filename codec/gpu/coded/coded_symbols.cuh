// The symbols of a slice of codes in the order of a lane's streams, as an encoder meets them.
#pragma once

#include "codec/gpu/coded/coded_batch.h"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kBitsOfException = 8 * kExceptionBytes;
// Digits that are no digits, as in coded_block.cc.
inline constexpr int32_t kOutsideAlphabet = -1;
inline constexpr int32_t kPaddingCode = -2;

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

// The pair or the single code that a symbol stands for.
struct Place {
  int32_t token[2], dim[2], digit[2];
};

// Code word and length of the symbol that stands for `places` digits, and the digits it has.
struct ChosenSymbol {
  uint32_t word;
  int32_t symbol;
};

// The digits of a symbol of kPair, less than 1024 with at most 32 levels: the quotient is exact.
__device__ __forceinline__ int2 symbol_digits(const DeviceCodebook& book, int32_t symbol,
                                              int32_t places) {
  if (places == 1) return {symbol, 0};
  const int32_t inverse = (0x10000 + book.levels - 1) / book.levels;
  const int32_t second = symbol * inverse >> 16;
  return {symbol - second * book.levels, second};
}

__device__ __forceinline__ int32_t cost_of_symbol(const DeviceCodebook& book, const uint32_t* words,
                                                  int32_t symbol, const Place& at, int32_t places) {
  const int2 d = symbol_digits(book, symbol, places);
  auto bits = static_cast<int32_t>(words[symbol] >> 16);
  if (at.digit[0] != kPaddingCode && at.digit[0] != d.x) bits += kBitsOfException;
  if (places == 2 && at.digit[1] != kPaddingCode && at.digit[1] != d.y) bits += kBitsOfException;
  return bits;
}

// Of a symbol that is absent: the present one of least cost, ties to the lowest.
__device__ __noinline__ inline ChosenSymbol choose_substitute(const DeviceCodebook& book,
                                                              const uint32_t* words, Place at,
                                                              int32_t places) {
  int32_t best = book.cheapest[0], best_cost = cost_of_symbol(book, words, best, at, places);
  for (int32_t i = 0; i < places; ++i) {
    if (at.digit[i] < 0) continue;
    const int32_t kept = book.cheapest[1 + i * book.levels + at.digit[i]];
    if (kept == Codebook::kNoSymbol) continue;
    const int32_t cost = cost_of_symbol(book, words, kept, at, places);
    if (cost < best_cost || (cost == best_cost && kept < best)) best = kept, best_cost = cost;
  }
  return {words[best], best};
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

}  // namespace tierkv

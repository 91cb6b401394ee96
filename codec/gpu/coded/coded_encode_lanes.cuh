// SPDX-License-Identifier: Apache-2.0
// The encoder of a block by one warp, where each lane is given its codes in the order of its
// streams, as the words of raw tiles are: encode_block()'s bytes, for codebooks of kPair and whole
// dim blocks.
//
// The codes are asked for twice: the first pass adds up the bits of the lanes' streams, which is
// all that the size takes; the second writes each stream where it begins. Bound: instructions,
// about 30 a pair and pass.
//
// Source, what a block's codes come from:
//   fetch(i)              what codes() takes of fragment i = tile * dim blocks + dim block
//   codes(x, f, &codes)   of x in dim block f: 16-bit integers
#pragma once

#include "codec/gpu/coded/coded_form.cuh"
#include "codec/gpu/coded/coded_symbols.cuh"

namespace tierkv {

// Codes of a lane in one dim block of a tile.
using FragmentCodes = int32_t[kPairsPerFragment][2];

// Numbers from here on stand for no token; their low half is that of some code of the block.
inline constexpr int32_t kPaddingCodes = 0x100000;

// A codebook as the loops of a lane take it.
struct LaneBook {
  const uint32_t* words;     // in shared memory
  const uint16_t* cheapest;  // global memory
  int32_t base, levels;

  // 0 where the symbol is absent.
  __device__ __forceinline__ uint32_t word_of(const int32_t (&pair)[2]) const {
    const auto x = static_cast<uint32_t>(pair[0] - base), y = static_cast<uint32_t>(pair[1] - base);
    const auto all = static_cast<uint32_t>(levels);
    return x < all && y < all ? words[x + all * y] : 0u;
  }
};

struct LaneEncoder {
  LaneBook only;
  const DeviceCodebook* codebook;
  int32_t streams;
  Component component;
  int32_t dims;  // a multiple of kDimBlock, at most kSliceDims
  int32_t most_coded_bytes;

  __device__ __forceinline__ int32_t dim_blocks() const { return dims / kDimBlock; }
  __device__ __forceinline__ int32_t fragments() const {
    return kBlockTokens / kTileTokens * dim_blocks();
  }
  __device__ __forceinline__ BlockForm choose(const CodeRange& range, const SlicePlan& plan) const {
    return choose_form(*codebook, raw_header(component, kBlockTokens, dims, range), plan,
                       most_coded_bytes);
  }
  __device__ __forceinline__ void write_bounds(const BlockForm& form, const SlicePlan& plan,
                                               uint32_t* block) const {
    if (!form.coded) return;
    auto* starts = reinterpret_cast<uint16_t*>(block) + form.at.starts / 2;
#pragma unroll
    for (int32_t s = 0; s < 2; ++s) {
      if (s < streams) starts[s * kWarpLanes + lane_index()] = static_cast<uint16_t>(plan.start[s]);
    }
  }
};
__device__ __forceinline__ LaneEncoder lane_encoder(const DeviceCodebook& book,
                                                    const uint32_t* words, int32_t dims,
                                                    int32_t most_coded_bytes) {
  return {{words, book.cheapest, book.base, book.levels},
          &book,
          book.streams_per_lane,
          book.component,
          dims,
          most_coded_bytes};
}

// visit(i, f, codes) of every fragment i, in dim block f, in the order of the streams.
template <class Source, class Visit>
__device__ __forceinline__ void for_each_fragment(const LaneEncoder& e, Source& source,
                                                  const Visit& visit) {
  constexpr int32_t kAhead = 4;  // divides the number of tiles of 64 tokens
  const int32_t fragments = e.fragments(), blocks = e.dim_blocks();
  int32_t next = 0;  // of the tile's dim blocks
#pragma unroll 1
  for (int32_t i = 0; i < fragments; i += kAhead) {
    decltype(source.fetch(0)) x[kAhead];
    int32_t f[kAhead], fragment[kAhead];
#pragma unroll
    for (int32_t j = 0; j < kAhead; ++j) {
      f[j] = next;
      fragment[j] = i + j;
      x[j] = source.fetch(fragment[j]);
      next = next + 1 == blocks ? 0 : next + 1;
    }
#pragma unroll
    for (int32_t j = 0; j < kAhead; ++j) {
      FragmentCodes codes;
      source.codes(x[j], f[j], codes);
      visit(fragment[j], f[j], codes);
    }
  }
}

// Bits of a lane's streams into zeroed words. Words that a stream begins or fills are stored, what
// is left of the last one is added when all lanes have stored theirs: so neighbouring streams may
// share a word.
struct LaneWriter {
  uint32_t* word;
  uint32_t pending = 0;
  int32_t filled;  // bits of the word, those of streams before included

  __device__ __forceinline__ LaneWriter(uint32_t* words, int32_t begin)
      : word(words + begin / 32), filled(begin % 32) {}
  // length: at most 32.
  __device__ __forceinline__ void put(uint32_t code, int32_t length) {
    const uint64_t bits = static_cast<uint64_t>(code) << filled;
    pending |= static_cast<uint32_t>(bits);
    filled += length;
    if (filled >= 32) {
      *word = pending;
      ++word;
      pending = static_cast<uint32_t>(bits >> 32);
      filled -= 32;
    }
  }
  // After a __syncwarp().
  __device__ __forceinline__ void finish() const {
    if (pending != 0) atomicOr(word, pending);
  }
};

// In place of a pair whose symbol is absent.
struct Substitute {
  uint32_t word;
  int32_t delta[2];  // 0: right
  __device__ __forceinline__ int32_t exceptions() const {
    return (delta[0] != 0) + (delta[1] != 0);
  }
  __device__ __forceinline__ bool fits() const {
    return static_cast<int16_t>(delta[0]) == delta[0] && static_cast<int16_t>(delta[1]) == delta[1];
  }
};
// What has a call in it gets copies: registers whose address is known elsewhere are no registers.
__device__ __noinline__ inline Substitute find_substitute(LaneBook from, int32_t first,
                                                          int32_t second) {
  DeviceCodebook book;
  book.levels = from.levels;
  book.cheapest = from.cheapest;
  const int32_t code[2] = {first, second};
  Place p{};
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t above = code[i] - from.base;
    const bool inside = above >= 0 && above < from.levels;
    p.digit[i] = code[i] >= kPaddingCodes ? kPaddingCode : inside ? above : kOutsideAlphabet;
  }
  const ChosenSymbol chosen = choose_substitute(book, from.words, p, 2);
  const int2 digits = symbol_digits(book, chosen.symbol, 2);
  Substitute other{chosen.word, {0, 0}};
  for (int32_t i = 0; i < 2; ++i) {
    if (p.digit[i] == kPaddingCode) continue;
    other.delta[i] = code[i] - from.base - (i == 0 ? digits.x : digits.y);
  }
  return other;
}

// What the first pass finds.
struct LanePlan {
  SlicePlan slice;
  int32_t exceptions_before;  // of the lanes before this one
  BlockForm form;
};

template <class Source>
__device__ __forceinline__ LanePlan plan_block(const LaneEncoder& e, Source& source) {
  int32_t bits[2] = {0, 0}, exceptions = 0;
  bool possible = true;
  CodeRange range;
  for_each_fragment(e, source, [&](int32_t, int32_t, const FragmentCodes& codes) {
    const LaneBook& book = e.only;
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      range.add((static_cast<uint32_t>(codes[r][0]) & 0xffffu) | static_cast<uint32_t>(codes[r][1])
                                                                     << 16);
      uint32_t word = book.word_of(codes[r]);
      if (word == 0) {
        const Substitute other = find_substitute(book, codes[r][0], codes[r][1]);
        exceptions += other.exceptions();
        possible &= other.fits();
        word = other.word;
      }
      bits[r % 2] += static_cast<int32_t>(word >> 16);
    }
  });
  LanePlan plan{};
  plan.exceptions_before = sum_before(exceptions, &plan.slice.exceptions);
  if (e.streams == 1) bits[0] += bits[1], bits[1] = 0;
  plan.slice.bits[0] = bits[0], plan.slice.bits[1] = bits[1];
  int32_t first = 0, second = 0;
  plan.slice.start[0] = sum_before(bits[0], &first);
  plan.slice.start[1] = first + sum_before(bits[1], &second);
  plan.slice.payload_bits = first + second;
  plan.slice.possible = __all_sync(kFullWarp, possible) &&
                        plan.slice.exceptions <= kMaxExceptions &&
                        plan.slice.payload_bits <= kMaxPayloadBits;
  plan.form = e.choose(range, plan.slice);
  return plan;
}

// Into ascending order, in place: indices are different, so an exception's rank is the number of
// lower ones.
__device__ inline void sort_exceptions(uint32_t* exceptions, int32_t count) {
  constexpr int32_t kMine = kMaxExceptions / kWarpLanes;
  uint32_t mine[kMine] = {};
  int32_t rank[kMine];
  __syncwarp();
#pragma unroll
  for (int32_t k = 0; k < kMine; ++k) {
    const int32_t i = k * kWarpLanes + lane_index();
    rank[k] = 0;
    if (i >= count) continue;
    mine[k] = exceptions[i];
    for (int32_t j = 0; j < count; ++j) {
      rank[k] += (exceptions[j] & 0xffffu) < (mine[k] & 0xffffu);
    }
  }
  __syncwarp();
#pragma unroll
  for (int32_t k = 0; k < kMine; ++k) {
    if (k * kWarpLanes + lane_index() < count) exceptions[rank[k]] = mine[k];
  }
}

// The exceptions of a pair behind those at `to`; where they end.
__device__ __noinline__ inline uint32_t* put_exceptions(Component component, int32_t blocks,
                                                        int32_t fragment, int32_t r,
                                                        const Substitute& other, uint32_t* to) {
  const bool key = component == Component::kKey;
  const PairPosition p =
      pair_position(component, fragment / blocks, fragment % blocks, r, lane_index());
  const int32_t first = p.token * kSliceDims + p.dim;
  const int32_t index[2] = {first, first + (key ? 1 : kSliceDims)};
  for (int32_t i = 0; i < 2; ++i) {
    if (other.delta[i] == 0) continue;
    *to++ = static_cast<uint32_t>(index[i]) | static_cast<uint32_t>(other.delta[i]) << 16;
  }
  return to;
}

template <int32_t kStreams, class Source>
__device__ __forceinline__ void write_streams(const LaneEncoder& e, Source& source,
                                              const LanePlan& plan, uint32_t* block) {
  const auto& at = plan.form.at;
  uint32_t* const payload = block + at.payload / 4;
  uint32_t* exception = block + at.exceptions / 4 + plan.exceptions_before;
  LaneWriter out[2] = {{payload, plan.slice.start[0]}, {payload, plan.slice.start[1]}};
  for_each_fragment(e, source, [&](int32_t i, int32_t, const FragmentCodes& codes) {
    const LaneBook& book = e.only;
    uint32_t word[kPairsPerFragment];
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      word[r] = book.word_of(codes[r]);
      if (word[r] == 0) {
        const Substitute other = find_substitute(book, codes[r][0], codes[r][1]);
        if (other.exceptions() > 0) {
          exception = put_exceptions(e.component, e.dim_blocks(), i, r, other, exception);
        }
        word[r] = other.word;
      }
    }
    // Two words at a time: they have at most 28 bits.
#pragma unroll
    for (int32_t n = 0; n < 2; ++n) {
      const uint32_t a = word[kStreams == 2 ? n : 2 * n],
                     b = word[kStreams == 2 ? n + 2 : 2 * n + 1];
      const auto length = static_cast<int32_t>(a >> 16);
      out[kStreams == 2 ? n : 0].put((a & 0xffffu) | (b & 0xffffu) << length,
                                     length + static_cast<int32_t>(b >> 16));
    }
  });
  __syncwarp();
#pragma unroll
  for (int32_t s = 0; s < kStreams; ++s) out[s].finish();
  sort_exceptions(block + at.exceptions / 4, plan.slice.exceptions);
}

// The tiles of a raw block whose bytes are zero. Each of their words has codes of one lane.
template <class Source>
__device__ inline void write_raw_tiles(const LaneEncoder& e, Source& source, const BlockForm& form,
                                       uint8_t* to) {
  const int32_t bits = raw_bits(form.header.mode), blocks = e.dim_blocks();
  const TileLayout layout = raw_tile(bits, blocks);
  const uint32_t mask = (1u << bits) - 1u;
  for (int32_t i = 0; i < e.fragments(); ++i) {
    FragmentCodes codes;
    source.codes(source.fetch(i), i % blocks, codes);
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const PairPosition p = pair_position(e.component, 0, i % blocks, r, lane_index());
      const CodePosition at = code_position(layout, e.component, p.token, p.dim);
      auto* word =
          reinterpret_cast<uint32_t*>(to + form.at.payload + i / blocks * layout.bytes() + at.byte);
      uint32_t field[2];
      for (int32_t h = 0; h < 2; ++h) {
        field[h] = static_cast<uint32_t>(codes[r][h] - form.header.base) & mask;
      }
      *word |= (field[0] | field[1] << 16) << at.bit;
    }
  }
}

// The block of the plan to `to`, 16-byte aligned. shared: memory of the warp, likewise, that holds
// a coded block.
template <class Source>
__device__ __forceinline__ void write_block(const LaneEncoder& e, Source& source,
                                            const LanePlan& plan, uint32_t* shared, uint8_t* to) {
  if (!plan.form.coded) {
    clear_block(to, plan.form.at.bytes);
    e.write_bounds(plan.form, plan.slice, reinterpret_cast<uint32_t*>(to));
    write_raw_tiles(e, source, plan.form, to);
    finish_block(plan.form, to);
    return;
  }
  clear_block(shared, plan.form.at.bytes);
  e.write_bounds(plan.form, plan.slice, shared);
  if (e.streams == 1) {
    write_streams<1>(e, source, plan, shared);
  } else {
    write_streams<2>(e, source, plan, shared);
  }
  finish_block(plan.form, reinterpret_cast<uint8_t*>(shared));
  for (int32_t i = lane_index(); i < plan.form.at.bytes / 16; i += kWarpLanes) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(shared)[i];
  }
  __syncwarp();
}

}  // namespace tierkv

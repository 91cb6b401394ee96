// The encoder of a block of 64 tokens by one warp, where each lane is given its codes in the order
// of its streams, as the words of raw tiles are: encode_block()'s bytes, for codebooks of kPair and
// whole dim blocks.
//
// No code goes through shared memory. They are asked for twice: the first pass adds up the bits of
// the lanes' streams, which is all that the size takes; the second writes each stream where it
// begins. Bound: instructions, about 30 a pair and pass.
#pragma once

#include "codec/gpu/coded/coded_form.cuh"
#include "codec/gpu/coded/coded_symbols.cuh"

namespace tierkv {

// Codes of a lane in one dim block of a tile.
using FragmentCodes = int32_t[kPairsPerFragment][2];

// Source, what a block's codes come from:
//   fetch(i)              what codes() takes of fragment i = tile * dim blocks + dim block
//   codes(x, f, &codes)   of x in dim block f: 16-bit integers
struct LaneEncoder {
  const uint32_t* words;     // of the codebook, in shared memory
  const uint16_t* cheapest;  // of the codebook
  int32_t base, levels, streams;
  Component component;
  int32_t dims;  // a multiple of kDimBlock, at most kSliceDims
  int32_t most_coded_bytes;

  __device__ __forceinline__ int32_t dim_blocks() const { return dims / kDimBlock; }
  __device__ __forceinline__ int32_t fragments() const {
    return kBlockTokens / kTileTokens * dim_blocks();
  }
  // 0 where the symbol is absent.
  __device__ __forceinline__ uint32_t word_of(const int32_t (&pair)[2]) const {
    const auto x = static_cast<uint32_t>(pair[0] - base), y = static_cast<uint32_t>(pair[1] - base);
    const auto all = static_cast<uint32_t>(levels);
    return x < all && y < all ? words[x + all * y] : 0u;
  }
};
__device__ __forceinline__ LaneEncoder lane_encoder(const DeviceCodebook& book,
                                                    const uint32_t* words, int32_t dims,
                                                    int32_t most_coded_bytes) {
  return {words,          book.cheapest, book.base,       book.levels, book.streams_per_lane,
          book.component, dims,          most_coded_bytes};
}

// visit(i, codes) of every fragment i.
template <class Source, class Visit>
__device__ __forceinline__ void for_each_fragment(const LaneEncoder& e, Source& source,
                                                  const Visit& visit) {
  constexpr int32_t kAhead = 4;  // divides the number of tiles
  int32_t f = 0;
  const int32_t fragments = e.fragments(), blocks = e.dim_blocks();
#pragma unroll 1
  for (int32_t i = 0; i < fragments; i += kAhead) {
    decltype(source.fetch(0)) x[kAhead];
#pragma unroll
    for (int32_t j = 0; j < kAhead; ++j) x[j] = source.fetch(i + j);
#pragma unroll
    for (int32_t j = 0; j < kAhead; ++j) {
      FragmentCodes codes;
      source.codes(x[j], f, codes);
      visit(i + j, codes);
      f = f + 1 == blocks ? 0 : f + 1;
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
__device__ __noinline__ inline Substitute find_substitute(LaneEncoder e, int32_t first,
                                                          int32_t second) {
  DeviceCodebook book;
  book.levels = e.levels;
  book.cheapest = e.cheapest;
  const int32_t above[2] = {first - e.base, second - e.base};
  Place p{};
  for (int32_t i = 0; i < 2; ++i) {
    const bool inside = above[i] >= 0 && above[i] < e.levels;
    p.digit[i] = inside ? above[i] : kOutsideAlphabet;
  }
  const ChosenSymbol chosen = choose_substitute(book, e.words, p, 2);
  const int2 digits = symbol_digits(book, chosen.symbol, 2);
  return {chosen.word, {above[0] - digits.x, above[1] - digits.y}};
}

// What the first pass finds.
struct LanePlan {
  SlicePlan slice;
  int32_t exceptions_before;  // of the lanes before this one
  BlockForm form;
};

// book: that of the encoder.
template <class Source>
__device__ __forceinline__ LanePlan plan_block(const LaneEncoder& e, const DeviceCodebook& book,
                                               Source& source) {
  int32_t bits[2] = {0, 0}, exceptions = 0;
  bool possible = true;
  CodeRange range;
  for_each_fragment(e, source, [&](int32_t, const FragmentCodes& codes) {
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      range.add((static_cast<uint32_t>(codes[r][0]) & 0xffffu) | static_cast<uint32_t>(codes[r][1])
                                                                     << 16);
      uint32_t word = e.word_of(codes[r]);
      if (word == 0) {
        const Substitute other = find_substitute(e, codes[r][0], codes[r][1]);
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
  int32_t first = 0, second = 0;
  plan.slice.start[0] = sum_before(bits[0], &first);
  plan.slice.start[1] = first + sum_before(bits[1], &second);
  plan.slice.payload_bits = first + second;
  plan.slice.possible = __all_sync(kFullWarp, possible) &&
                        plan.slice.exceptions <= kMaxExceptions &&
                        plan.slice.payload_bits <= kMaxPayloadBits;
  plan.form = choose_form(book, raw_header(e.component, kBlockTokens, e.dims, range), plan.slice,
                          e.most_coded_bytes);
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
__device__ __noinline__ inline uint32_t* put_exceptions(LaneEncoder e, int32_t fragment, int32_t r,
                                                        const Substitute& other, uint32_t* to) {
  const bool key = e.component == Component::kKey;
  const int32_t blocks = e.dim_blocks();
  const PairPosition p =
      pair_position(e.component, fragment / blocks, fragment % blocks, r, lane_index());
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
  const CodedBlockLayout& at = plan.form.at;
  auto* starts = reinterpret_cast<uint16_t*>(block) + at.starts / 2;
  uint32_t* const payload = block + at.payload / 4;
  uint32_t* exception = block + at.exceptions / 4 + plan.exceptions_before;
  LaneWriter out[2] = {{payload, plan.slice.start[0]}, {payload, plan.slice.start[1]}};
#pragma unroll
  for (int32_t s = 0; s < kStreams; ++s) {
    starts[s * kWarpLanes + lane_index()] = static_cast<uint16_t>(plan.slice.start[s]);
  }
  for_each_fragment(e, source, [&](int32_t i, const FragmentCodes& codes) {
    uint32_t word[kPairsPerFragment];
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      word[r] = e.word_of(codes[r]);
      if (word[r] == 0) {
        const Substitute other = find_substitute(e, codes[r][0], codes[r][1]);
        if (other.exceptions() > 0) exception = put_exceptions(e, i, r, other, exception);
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

// A raw block at `to`. Each of its words has codes of one lane.
template <class Source>
__device__ inline void write_raw_block(const LaneEncoder& e, Source& source, const BlockForm& form,
                                       uint8_t* to) {
  const CodedBlockHeader& h = form.header;
  const int32_t bits = raw_bits(h.mode), blocks = e.dim_blocks();
  const TileLayout layout = raw_tile(bits, blocks);
  const uint32_t mask = (1u << bits) - 1u;
  clear_block(to, form.at.bytes);
  for (int32_t i = 0; i < e.fragments(); ++i) {
    FragmentCodes codes;
    source.codes(source.fetch(i), i % blocks, codes);
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const PairPosition p = pair_position(h.component, 0, i % blocks, r, lane_index());
      const CodePosition at = code_position(layout, h.component, p.token, p.dim);
      auto* word = reinterpret_cast<uint32_t*>(to + kCodedBlockHeaderBytes +
                                               i / blocks * layout.bytes() + at.byte);
      const uint32_t first = static_cast<uint32_t>(codes[r][0] - h.base) & mask,
                     second = static_cast<uint32_t>(codes[r][1] - h.base) & mask;
      *word |= (first | second << 16) << at.bit;
    }
  }
}

// The block of the plan to `to`, 16-byte aligned. shared: most_coded_bytes of the warp, likewise.
template <class Source>
__device__ __forceinline__ void write_block(const LaneEncoder& e, Source& source,
                                            const LanePlan& plan, uint32_t* shared, uint8_t* to) {
  if (!plan.form.coded) {
    write_raw_block(e, source, plan.form, to);
    finish_block(plan.form, to);
    return;
  }
  clear_block(shared, plan.form.at.bytes);
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

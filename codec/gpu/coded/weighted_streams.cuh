// SPDX-License-Identifier: Apache-2.0
// The streams of a slice, by a warp: each lane's bits go to words of its own in shared memory, and
// when all lengths are known to the block, shifted to where the stream begins.
#pragma once

#include "codec/gpu/coded/weighted_form.cuh"
#include "codec/gpu/coded/weighted_tiles.cuh"

namespace tierkv {

// A slice's exceptions in any order.
struct alignas(16) ExceptionList {
  int32_t count;  // may exceed what the list holds
  uint32_t at[kMaxExceptions];
};
// Rows of words, one of each lane: a slice's streams of the longest code words, and what is left of
// a word.
TKV_HD constexpr int32_t stream_rows(int32_t head_dim, int32_t max_length) {
  const int32_t pairs = head_dim < kSliceDims ? head_dim : kSliceDims;  // of a lane
  return pairs * max_length / 32 + 2;
}
// max_length: the most bits of a code word of the call's codebooks.
TKV_HD constexpr int32_t encode_warp_bytes(int32_t head_dim, int32_t max_length) {
  return tile_warp_bytes(head_dim) + static_cast<int32_t>(sizeof(ExceptionList)) +
         stream_rows(head_dim, max_length) * kWarpLanes * 4;
}
// What a warp works with in shared memory.
struct WeightedMemory {
  const uint32_t* words;  // of the CTA
  TileMemory tile;
  ExceptionList* exceptions;
  uint32_t* rows;  // of the streams, from this lane's words on

  // of: encode_warp_bytes().
  __device__ __forceinline__ WeightedMemory(const uint32_t* of_cta, uint8_t* of, int32_t head_dim)
      : words(of_cta),
        tile(of, head_dim),
        exceptions(reinterpret_cast<ExceptionList*>(of + tile_warp_bytes(head_dim))),
        rows(rows_behind(exceptions)) {}
  __device__ __forceinline__ static uint32_t* rows_behind(ExceptionList* list) {
    return reinterpret_cast<uint32_t*>(list + 1) + lane_index();
  }
};

// Bits of a stream into a lane's words.
struct LaneBits {
  uint32_t* word;  // that is filled
  uint32_t pending = 0;
  int32_t filled = 0, words = 0;

  __device__ __forceinline__ explicit LaneBits(uint32_t* first) : word(first) {}
  // length: at most 28, the bits of `code`.
  __device__ __forceinline__ void put(uint32_t code, int32_t length) {
    const uint64_t bits = static_cast<uint64_t>(code) << filled;
    pending |= static_cast<uint32_t>(bits);
    *word = pending;
    filled += length;
    const bool is_full = filled >= 32;
    pending = is_full ? static_cast<uint32_t>(bits >> 32) : pending;
    word += is_full ? kWarpLanes : 0;
    words += is_full ? 1 : 0;
    filled &= 31;
  }
  // The bits that were put.
  __device__ __forceinline__ int32_t finish() {
    *word = pending;
    return 32 * words + filled;
  }
};

// A pair without sure codes, or whose symbol the codebook lacks.
struct SettledPair {
  uint32_t word, codes;
  bool possible;
  StatusCode status;
};
__device__ __noinline__ inline SettledPair settle_pair(const EncodeWarp* warp, LaneBook book,
                                                       uint32_t first_bits, uint32_t second_bits,
                                                       int32_t slice, int32_t tile, int32_t f,
                                                       int32_t r, ExceptionList* list) {
  int32_t code[2] = {quick_code(first_bits), quick_code(second_bits)};
  SettledPair settled{0, 0, true, StatusCode::kOk};
  if (!is_sure_code(first_bits) || !is_sure_code(second_bits)) {
    const ExactPair exact = exact_pair(warp, slice, tile, f, r);
    code[0] = exact.code[0], code[1] = exact.code[1];
    settled.status = exact.status;
  }
  settled.word = book.word_of(code);
  settled.codes = (static_cast<uint32_t>(code[0]) & 0xffffu) | static_cast<uint32_t>(code[1]) << 16;
  if (settled.word != 0) return settled;
  const Substitute other = find_substitute(book, code[0], code[1]);
  settled.word = other.word;
  settled.possible = other.fits();
  const Component component = warp->job.component;
  const PairPosition p = pair_position(component, tile, f, r, lane_index());
  const int32_t first = p.token * kSliceDims + p.dim;
#pragma unroll 1
  for (int32_t h = 0; h < 2; ++h) {
    if (other.delta[h] == 0) continue;
    const int32_t index = first + (h == 0 ? 0 : component == Component::kKey ? 1 : kSliceDims);
    const int32_t i = atomicAdd(&list->count, 1);
    if (i >= kMaxExceptions) continue;
    list->at[i] = static_cast<uint32_t>(index) | static_cast<uint32_t>(other.delta[h]) << 16;
  }
  return settled;
}

// A slice's codes to streams.
template <int32_t kDims>
struct StreamSink {
  const WeightedMemory& memory;
  const SharedBook& of_book;
  int32_t slice, streams;
  WeightedFaults& faults;
  LaneBits out[2];
  CodeRange range;
  bool possible = true;

  __device__ __forceinline__ StreamSink(const WeightedMemory& of, const SharedBook& from,
                                        int32_t of_slice, WeightedFaults& worst)
      : memory(of),
        of_book(from),
        slice(of_slice),
        streams(from.streams),
        faults(worst),
        out{LaneBits(of.rows), LaneBits(of.rows + from.second_row * kWarpLanes)} {
    __syncwarp();  // the slice before has read its count
    if (lane_index() == 0) memory.exceptions->count = 0;
    __syncwarp();
  }

  __device__ __forceinline__ void take(int32_t tile, int32_t f, const QuickFragment& codes) {
    const SharedBook book = of_book;
    const uint32_t* const words = memory.words + book.words;
    const uint32_t first = kQuickBits + static_cast<uint32_t>(book.base);
    const auto levels = static_cast<uint32_t>(book.quick_levels);
    uint32_t word[kPairsPerFragment], both[kPairsPerFragment];
    bool all = true;
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const uint32_t a = codes[r][0] - first, b = codes[r][1] - first;
      word[r] = a < levels && b < levels ? words[a + levels * b] : 0u;
      both[r] = __byte_perm(codes[r][0], codes[r][1], 0x5410);
      all &= word[r] != 0;
    }
    // Padding gets the shortest word. The lowest codes that the lane has had leave its range alone.
    if (!all && range.low != CodeRange().low) {
      all = true;
#pragma unroll
      for (int32_t r = 0; r < kPairsPerFragment; ++r) {
        if (codes[r][0] == kPaddingBits && codes[r][1] == kPaddingBits) {
          word[r] = words[book.cheapest[0]], both[r] = range.low;
        }
        all &= word[r] != 0;
      }
    }
    // Little code, because it is seldom in the instruction cache.
#pragma unroll 1
    while (!all) {
      int32_t of = kPairsPerFragment - 1;
      uint32_t a = codes[of][0], b = codes[of][1];
#pragma unroll
      for (int32_t r = kPairsPerFragment - 2; r >= 0; --r) {
        if (word[r] == 0) of = r, a = codes[r][0], b = codes[r][1];
      }
      const SettledPair settled =
          settle_pair(memory.tile.warp, {words, book.cheapest, book.base, book.levels}, a, b, slice,
                      tile, f, of, memory.exceptions);
      all = true;
#pragma unroll
      for (int32_t r = 0; r < kPairsPerFragment; ++r) {
        if (r == of) word[r] = settled.word, both[r] = settled.codes;
        all &= word[r] != 0;
      }
      possible &= settled.possible;
      add_fault(settled.status, faults);
    }
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) range.add(both[r]);
    if (streams == 1) {
      put_two(out[0], word[0], word[1]);
      put_two(out[0], word[2], word[3]);
    } else {
      put_two(out[0], word[0], word[2]);
      put_two(out[1], word[1], word[3]);
    }
  }
  __device__ __forceinline__ static void put_two(LaneBits& to, uint32_t a, uint32_t b) {
    const auto length = static_cast<int32_t>(a >> 16);
    to.put((a & 0xffffu) | (b & 0xffffu) << length, length + static_cast<int32_t>(b >> 16));
  }

  __device__ __forceinline__ SlicePlan finish() {
    SlicePlan plan{};
#pragma unroll
    for (int32_t s = 0; s < 2; ++s) plan.bits[s] = s < streams ? out[s].finish() : 0;
    int32_t ahead = 0, behind = 0;
    plan.start[0] = sum_before(plan.bits[0], &ahead);
    plan.start[1] = ahead + sum_before(plan.bits[1], &behind);
    plan.payload_bits = ahead + behind;
    __syncwarp();
    plan.exceptions = memory.exceptions->count;
    plan.possible = __all_sync(kFullWarp, possible) && plan.exceptions <= kMaxExceptions &&
                    plan.payload_bits <= kMaxPayloadBits;
    return plan;
  }
};

// A lane's stream to bit `start` of the payload, whose words are zero. Neighbouring streams may
// share the first and the last word.
__device__ __forceinline__ void place_stream(const uint32_t* rows, int32_t bits, int32_t start,
                                             uint32_t* payload) {
  if (bits == 0) return;
  const int32_t skip = start % 32, words = (bits + 31) / 32, last = (skip + bits - 1) / 32;
  uint32_t* const to = payload + start / 32;
  uint32_t before = 0;
  for (int32_t i = 0; i <= last; ++i) {
    const uint32_t word = i < words ? rows[i * kWarpLanes] : 0u;
    const auto shifted =
        static_cast<uint32_t>((static_cast<uint64_t>(word) << 32 | before) << skip >> 32);
    before = word;
    if (i > 0 && i < last) {
      to[i] = shifted;
    } else {
      atomicOr(to + i, shifted);
    }
  }
}

// In ascending order: indices are different, so an exception's rank is the number of lower ones.
__device__ __forceinline__ void place_exceptions(const ExceptionList& list, uint32_t* to) {
  for (int32_t i = lane_index(); i < list.count; i += kWarpLanes) {
    const uint32_t mine = list.at[i];
    int32_t rank = 0;
    for (int32_t j = 0; j < list.count; ++j) rank += (list.at[j] & 0xffffu) < (mine & 0xffffu);
    to[rank] = mine;
  }
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// The warps that decode ranges of tokens of coded blocks to fp16 or bf16.
//
// A slice is opened once its own fields are checked, and decoded tile by tile.
// Keys are turned as a tile is written: a lane has both channels of a pair. Where a pair reaches
// into the second slice, the first slice's codes wait in shared memory. Bound: instructions.
#pragma once

#include "codec/gpu/coded/coded_decode.cuh"
#include "codec/gpu/coded/weighted_form.cuh"
#include "codec/gpu/coded/weighted_write.cuh"

namespace tierkv {

// The codebook in the shared memory of a CTA; its table is in the region.
struct DecodeBook {
  DeviceCodebook codebook;
  bool usable;
};
inline constexpr int32_t kDecodeBookBytes = (sizeof(DecodeBook) + 15) / 16 * 16;

// Keys of two slices that are turned: the codes of the first one are kept.
TKV_HD bool keeps_first_slice(const WeightedDecode& call) {
  return call.component == Component::kKey && call.rows.rope.pairs > 0 &&
         call.rows.head_dim > kSliceDims;
}
inline constexpr int32_t kFirstSliceBytes = kBlockTokens * kTileStride * 2;
inline constexpr int32_t kFactorBytes = kBlockTokens * 4;

// What a warp knows of its block and of the slice that it decodes: loops over codes need the
// registers.
struct WarpState {
  RangeTarget target;
  BlockHeader header;  // of the slice
  BlockLayout at;
};
inline constexpr int32_t kWarpStateBytes = (sizeof(WarpState) + 15) / 16 * 16;

// Bytes of a warp: its state, factors, codes of a tile, codes of the first slice, the block.
TKV_HD int32_t weighted_decode_warp_bytes(const WeightedDecode& call) {
  return kWarpStateBytes + kFactorBytes + kCodesTileBytes +
         (keeps_first_slice(call) ? kFirstSliceBytes : 0) +
         (call.max_block_bytes + kPayloadSlackBytes + 15) / 16 * 16;
}
// Bytes of the table, a power of two; the region begins at a multiple of itself.
TKV_HD int32_t weighted_region_bytes(const WeightedDecode& call) {
  return 4 << call.book.max_length;
}

// The turns of 64 places, of the CTA; wider heads leave no room for them, and warps read them from
// memory.
TKV_HD int32_t places_bytes(const WeightedDecode& call) {
  const bool kept = call.component == Component::kKey && call.rows.head_dim <= kSliceDims;
  const int32_t turns = kBlockTokens * PlaceTurns::padded(call.rows.rope.pairs);
  return kept ? (turns * static_cast<int32_t>(sizeof(Turn)) + 15) / 16 * 16 : 0;
}
// Bytes of the CTA, without those that align the region and without its warps.
TKV_HD int32_t weighted_decode_cta_bytes(const WeightedDecode& call) {
  return weighted_region_bytes(call) + kDecodeBookBytes + places_bytes(call);
}

// What a warp has: its memory in the order above.
struct WeightedDecodeWarp {
  PlaceTurns places;
  WarpState* state;
  float* factors;  // [tokens]
  int16_t* tile;   // [kTileTokens][kTileStride]
  int16_t* first;  // [kBlockTokens][kTileStride]; null where it is not kept
  uint8_t* block;

  // of: weighted_decode_warp_bytes().
  __device__ __forceinline__ WeightedDecodeWarp(const WeightedDecode& call, const PlaceTurns& turns,
                                                uint8_t* of)
      : places(turns),
        state(reinterpret_cast<WarpState*>(of)),
        factors(reinterpret_cast<float*>(of + kWarpStateBytes)),
        tile(reinterpret_cast<int16_t*>(of + kWarpStateBytes + kFactorBytes)),
        first(nullptr),
        block(of + kWarpStateBytes + kFactorBytes + kCodesTileBytes) {
    if (!keeps_first_slice(call)) return;
    first = reinterpret_cast<int16_t*>(block);
    block += kFirstSliceBytes;
  }
};

__device__ __forceinline__ uint32_t load_word_field(const uint8_t* part, int32_t i, int32_t bits) {
  if (bits == 0) return 0;
  const auto* words = reinterpret_cast<const uint32_t*>(part) + i * bits / 32;
  const int32_t skip = i * bits % 32;
  uint32_t x = words[0] >> skip;
  if (skip + bits > 32) x |= words[1] << (32 - skip);
  return x & ((1u << bits) - 1u);
}

// Where a slice lies: `size` bytes are left from there on.
struct SliceBytes {
  const uint8_t* from;
  int64_t size;
  int32_t first_dim;
};

// The bounds of the streams from their lengths; the bits of all.
__device__ __forceinline__ int32_t find_bounds(const BlockHeader& h, const BlockLayout& at,
                                               const uint8_t* block, BlockStreams* streams) {
  int32_t before = 0;
  for (int32_t s = 0; s < 2; ++s) {
    if (s == streams->count) break;
    const int32_t bits =
        h.least_length + static_cast<int32_t>(load_word_field(
                             block + at.lengths, s * kWarpLanes + lane_index(), h.length_bits));
    int32_t all = 0;
    streams->first[s] = before + sum_before(bits, &all);
    streams->last[s] = streams->first[s] + bits;
    before += all;
  }
  return before;
}

// Factors of the tokens; false where an exponent that the lane looks at is none.
__device__ inline bool load_factors(const BlockHeader& h, const BlockLayout& at,
                                    const uint8_t* block, bool first_slice, float* factors) {
  if (!first_slice) return h.exponent_bits == 0 && h.least_exponent == 0;
  bool valid = true;
#pragma unroll 1
  for (int32_t t = lane_index(); t < h.tokens; t += kWarpLanes) {
    const int32_t e = h.least_exponent + static_cast<int32_t>(load_word_field(block + at.exponents,
                                                                              t, h.exponent_bits));
    valid &= e <= kMostExponent && (h.component != Component::kKey || is_importance_exponent(e));
    factors[t] = exponent_factor(valid ? e : 0);
  }
  // Where no token has it the least one can still be wrong.
  return valid && (h.component != Component::kKey || is_importance_exponent(h.least_exponent));
}

// Copies what there is of a slice and judges it: kOk, kCorrupt or kOutOfRange. The warp's state
// has its header and layout then.
__device__ inline StatusCode open_slice(const WeightedDecode& call, const RangeTarget& target,
                                        const DeviceCodebook& book, const SliceBytes& slice,
                                        const WeightedDecodeWarp& memory, BlockStreams* streams) {
  if (slice.size < kCodedBlockHeaderBytes) return StatusCode::kCorrupt;
  // All that the slice can take: its header need not come first.
  const bool fits = slice.size < call.max_block_bytes;
  copy_block(slice.from, fits ? static_cast<int32_t>(slice.size) : call.max_block_bytes,
             memory.block);
  BlockHeader h = load_header(memory.block);
  const int32_t dims = min(kSliceDims, call.rows.head_dim - slice.first_dim);
  if (!header_is_valid(h, target.tokens, dims, call.component, book)) {
    return StatusCode::kCorrupt;
  }
  const int32_t bytes = h.units * kBlockAlignment;
  BlockLayout at = block_layout(h);
  if (at.bytes > bytes || bytes > slice.size || bytes > kMaxCodedBlockBytes) {
    return StatusCode::kCorrupt;
  }
  if (bytes > call.max_block_bytes) return StatusCode::kOutOfRange;
  const bool raw = is_raw_mode(h.mode);
  *streams = {nullptr, raw ? 0 : h.streams_per_lane, {0, 0}, {0, 0}};
  const int32_t payload_bits = find_bounds(h, at, memory.block, streams);
  if (payload_bits > kMaxPayloadBits) return StatusCode::kCorrupt;
  h.payload_bits = static_cast<uint16_t>(payload_bits);
  at = block_layout(h);
  if (at.bytes != bytes) return StatusCode::kCorrupt;
  streams->payload = memory.block + at.payload;
  if (lane_index() == 0) memory.state->header = h, memory.state->at = at;

  const int32_t lengths_end = 8 * at.lengths + kWarpLanes * h.streams_per_lane * h.length_bits;
  bool valid = warp_checksum(memory.block, at.bytes) == h.checksum;
  valid &= gap_is_zero(memory.block, 8 * at.exponents + h.tokens * h.exponent_bits, at.lengths);
  valid &= gap_is_zero(memory.block, lengths_end, at.payload);
  valid &= raw || gap_is_zero(memory.block, 8 * at.payload + payload_bits, at.exceptions);
  valid &= gap_is_zero(memory.block, 8 * at.end, at.bytes);
  valid &= exceptions_are_valid(h, at, memory.block);
  valid &= load_factors(h, at, memory.block, slice.first_dim == 0, memory.factors);
  __syncwarp();
  return __all_sync(kFullWarp, valid) ? StatusCode::kOk : StatusCode::kCorrupt;
}

// finish(slice's first channel, its channels, tile, codes of the tile) for each tile of each slice;
// factors and, until the second slice, the first one's header are in memory meanwhile.
template <class Finish>
__device__ __forceinline__ StatusCode
decode_block_tiles(const WeightedDecode& call, const RangeTarget& target,
                   const WeightedPlace& place, const DeviceCodebook& book, TableReader& reader,
                   const WeightedDecodeWarp& memory, const Finish& finish_tile) {
  const int64_t offset = int64_t{place.unit} * kBlockAlignment;
  const int64_t left = int64_t{place.units} * kBlockAlignment;
  if (offset > call.size || left > call.size - offset) return StatusCode::kCorrupt;
  SliceBytes slice{call.bytes + offset, left, 0};
  for (; slice.first_dim < call.rows.head_dim; slice.first_dim += kSliceDims) {
    BlockStreams streams;
    const StatusCode code = open_slice(call, target, book, slice, memory, &streams);
    if (code != StatusCode::kOk) return code;
    const bool keep = memory.first != nullptr && slice.first_dim == 0;
    const BlockHeader& header = memory.state->header;
    const BlockLayout& at = memory.state->at;
    if (!is_raw_mode(header.mode)) reader.open(streams);
    bool valid = true;
    for (int32_t tile = 0; tile < tile_count(header.tokens); ++tile) {
      int16_t* const codes = keep ? memory.first + tile * kTileTokens * kTileStride : memory.tile;
      if (is_raw_mode(header.mode)) {
        read_raw_tile(header, memory.block + at.payload, tile, codes);
      } else if (call.component == Component::kKey) {
        decode_pair_tile<true>(reader, header.dims, {book.base}, codes);
      } else {
        decode_pair_tile<false>(reader, header.dims, {book.base}, codes);
      }
      __syncwarp();
      valid &= add_exceptions(header, at, memory.block, tile, codes);
      __syncwarp();
      if (!keep) finish_tile(slice.first_dim, header.dims, tile, codes);
      __syncwarp();
    }
    if (!is_raw_mode(header.mode)) valid &= reader.ends(streams);
    if (!__all_sync(kFullWarp, valid)) return StatusCode::kCorrupt;
    slice.from += memory.state->at.bytes;
    slice.size -= memory.state->at.bytes;
    __syncwarp();
  }
  return slice.size == 0 ? StatusCode::kOk : StatusCode::kCorrupt;
}
__device__ inline void write_zeros(const WeightedDecode& call, const RangeTarget& target) {
  for (int32_t t = target.from; t < target.end; ++t) {
    for (int32_t d = lane_index(); d < call.rows.head_dim; d += kWarpLanes) {
      target.to[t * target.token_stride + d] = 0;
    }
  }
}

// What block `index` of a range gives; kInvalidArgument for the range itself.
__device__ inline StatusCode open_target(const WeightedDecode& call, const WeightedRange& r,
                                         int32_t index, RangeTarget* target) {
  if (!is_valid_range(r, call.rows.num_rows, call.most_blocks) || r.body_first < 0 ||
      r.first < r.body_first || r.last > r.body_last ||
      (r.token_stride != 0 && r.token_stride < call.rows.head_dim) ||
      (r.first < r.last && r.out == nullptr && call.out == nullptr)) {
    return StatusCode::kInvalidArgument;
  }
  *target = {};
  if (r.first == r.last) return StatusCode::kOk;
  const int32_t block = r.first / kBlockTokens + index, begin = block * kBlockTokens;
  if (block > (r.last - 1) / kBlockTokens) return StatusCode::kOk;
  const int32_t first = max(r.body_first, begin);
  target->tokens = min(r.body_last, begin + kBlockTokens) - first;
  target->from = max(r.first, first) - first;
  target->end = min(r.last, begin + kBlockTokens) - first;
  target->token_stride = r.token_stride != 0 ? r.token_stride : call.token_stride;
  target->to = (r.out != nullptr ? r.out : call.out + r.at) +
               (int64_t{first} - r.first) * target->token_stride;
  target->row = r.row;
  target->block = block;
  target->place_of_first = first - begin;
  return StatusCode::kOk;
}

// The codebook and its table into the CTA's memory, by all of its threads.
__device__ inline void load_book(const WeightedDecode& call, DecodeBook* to, uint8_t* region) {
  const auto thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  const DeviceCodebook& book = *call.book.codebook;
  const bool usable = book.mode == BlockMode::kPair && book.component == call.component &&
                      (book.streams_per_lane == 1 || book.streams_per_lane == 2) &&
                      book.max_length >= 1 && book.max_length <= call.book.max_length;
  const PairBase base{book.base};
  const uint32_t* const table = book.table;
  const int32_t entries = usable ? 1 << book.max_length : 0;
  // Loads that stores do not hold back.
#pragma unroll 8
  for (int32_t i = thread; i < entries; i += threads) {
    reinterpret_cast<uint32_t*>(region)[i] = base.shared_entry(__ldg(table + i));
  }
  if (thread == 0) *to = {book, usable};
  __syncthreads();
}

// What a warp of a CTA has once the CTA's memory is laid out and the codebook is there.
struct WeightedDecodeCta {
  DecodeBook* book;
  uint8_t* region;
  WeightedDecodeWarp memory;
};

// By a CTA of whole warps. shared: the region at a multiple of its size, the codebook, the places,
// and weighted_decode_warp_bytes() of each warp.
__device__ __forceinline__ WeightedDecodeCta open_weighted_decode(const WeightedDecode& call,
                                                                  uint8_t* shared) {
  const auto region_bytes = static_cast<uint32_t>(weighted_region_bytes(call));
  const uint32_t start = shared_address(shared);
  uint8_t* const region =
      shared + ((start + region_bytes - 1) / region_bytes * region_bytes - start);
  auto* const book = reinterpret_cast<DecodeBook*>(region + region_bytes);
  auto* const places = reinterpret_cast<Turn*>(region + region_bytes + kDecodeBookBytes);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const bool shares_places = places_bytes(call) > 0;
  const int32_t pairs = call.rows.rope.pairs;
  for (int32_t place = warp; shares_places && place < kBlockTokens;
       place += static_cast<int32_t>(blockDim.x / 32u)) {
    for (int32_t i = lane_index(); i < pairs; i += kWarpLanes) {
      places[place * PlaceTurns::padded(pairs) + PlaceTurns::padded(i)] =
          load_turn(call.rows.rope.place + place * pairs + i);
    }
  }
  load_book(call, book, region);
  uint8_t* const mine =
      region + weighted_decode_cta_bytes(call) + warp * weighted_decode_warp_bytes(call);
  const PlaceTurns turns{shares_places ? places : call.rows.rope.place, shares_places};
  return {book, region, WeightedDecodeWarp(call, turns, mine)};
}

// `count` blocks, a warp each: block_of(i, &place) gives the tokens that block i must have. Returns
// how many of this warp's blocks do not decode. shared as in decode_weighted_items().
template <class BlockOf>
__device__ __forceinline__ int32_t count_damaged(const WeightedDecode& call, uint8_t* shared,
                                                 int32_t count, const BlockOf& block_of) {
  const WeightedDecodeCta cta = open_weighted_decode(call, shared);
  TableReader reader(cta.book->codebook, cta.region);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  int32_t damaged = 0;
  for (int32_t i = static_cast<int32_t>(blockIdx.x) * warps + warp; i < count;
       i += static_cast<int32_t>(gridDim.x) * warps) {
    RangeTarget target = {};
    WeightedPlace place = {};
    target.tokens = block_of(i, &place);
    const bool decodes =
        cta.book->usable &&
        decode_block_tiles(call, target, place, cta.book->codebook, reader, cta.memory,
                           [](int32_t, int32_t, int32_t, const int16_t*) {}) == StatusCode::kOk;
    damaged += decodes ? 0 : 1;
    __syncwarp();
  }
  return damaged;
}

__device__ __forceinline__ void decode_weighted_items(const WeightedDecode& call, uint8_t* shared) {
  const WeightedDecodeCta cta = open_weighted_decode(call, shared);
  const DecodeBook* const book = cta.book;
  const WeightedDecodeWarp& memory = cta.memory;
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  TableReader reader(book->codebook, cta.region);
  const int64_t items = int64_t{call.num_ranges} * call.most_blocks;
  const int64_t stride = int64_t{gridDim.x} * warps;
  for (int64_t i = int64_t{blockIdx.x} * warps + warp; i < items; i += stride) {
    const WeightedRange range = call.ranges[i / call.most_blocks];
    RangeTarget& target = memory.state->target;
    RangeTarget opened = {};
    StatusCode code = open_target(call, range, static_cast<int32_t>(i % call.most_blocks), &opened);
    if (lane_index() == 0) target = opened;
    __syncwarp();
    if (code == StatusCode::kOk && target.tokens > 0) {
      const bool turned = call.component == Component::kKey && call.rows.rope.pairs > 0;
      if (!book->usable) {
        code = StatusCode::kUnsupported;
      } else if (turned && target.block >= call.rows.rope.blocks) {
        code = StatusCode::kOutOfRange;
      } else {
        const WeightedPlace place = call.places[range.first_block + target.block];
        const WriteWay way(call, target);
        const auto write = [&](int32_t first_dim, int32_t dims, int32_t tile,
                               const int16_t* codes) {
          const int16_t* kept =
              memory.first == nullptr ? nullptr : memory.first + tile * kTileTokens * kTileStride;
          write_tile({call, target, memory.places, memory.factors, codes, kept, tile, first_dim},
                     dims, way);
        };
        code = decode_block_tiles(call, target, place, book->codebook, reader, memory, write);
      }
      if (code != StatusCode::kOk) write_zeros(call, target);
    }
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

}  // namespace tierkv

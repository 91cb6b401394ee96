// SPDX-License-Identifier: Apache-2.0
// The warps that decode ranges of tokens of weighted blocks to fp16 or bf16.
//
// A block is opened as one of version 1 once its own fields are checked, and decoded tile by tile.
// Keys are turned as a tile is written: a lane has both channels of a pair. Where a pair reaches
// into the second slice, the first slice's codes wait in shared memory. Bound: instructions.
#pragma once

#include "codec/gpu/coded/coded_decode.cuh"
#include "codec/gpu/coded/coded_form.cuh"
#include "codec/gpu/coded/weighted_pairs.cuh"
#include "codec/gpu/coded/weighted_write.cuh"

namespace tierkv {

// The family in the shared memory of a CTA; its tables follow one another in the region.
struct DecodeFamily {
  DeviceCodebook books[kMaxFamilyBooks];
  bool usable;
};
inline constexpr int32_t kDecodeFamilyBytes = (sizeof(DecodeFamily) + 15) / 16 * 16;

// Keys of two slices that are turned: the codes of the first one are kept.
TKV_HD bool keeps_first_slice(const WeightedDecode& call) {
  return call.component == Component::kKey && call.rows.rope.pairs > 0 &&
         call.rows.head_dim > kSliceDims;
}
inline constexpr int32_t kFirstSliceBytes = kBlockTokens * kTileStride * 2;
inline constexpr int32_t kFactorBytes = kBlockTokens * 4;
// Bytes of a warp: factors, codes of a tile, codes of the first slice, the block.
TKV_HD int32_t weighted_decode_warp_bytes(const WeightedDecode& call) {
  return kFactorBytes + kCodesTileBytes + (keeps_first_slice(call) ? kFirstSliceBytes : 0) +
         (call.max_block_bytes + kDecodeSlackBytes + 15) / 16 * 16;
}
// Bytes of the tables, a power of two; the region begins at a multiple of itself.
TKV_HD int32_t weighted_region_bytes(const WeightedDecode& call) {
  int32_t books = 1;
  while (books < call.family.count) books *= 2;
  return books * 4 << call.family.max_length;
}

// The turns of 64 places, of the CTA; wider heads leave no room for them, and read them from
// memory.
TKV_HD int32_t places_bytes(const WeightedDecode& call) {
  const bool kept = call.component == Component::kKey && call.rows.head_dim <= kSliceDims;
  return kept ? (kBlockTokens * call.rows.rope.pairs * static_cast<int32_t>(sizeof(Turn)) + 15) /
                    16 * 16
              : 0;
}
// Bytes of the CTA, without those that align the region and without its warps.
TKV_HD int32_t weighted_decode_cta_bytes(const WeightedDecode& call) {
  return weighted_region_bytes(call) + kDecodeFamilyBytes + places_bytes(call);
}

// What a warp has: its memory in the order above.
struct WeightedDecodeWarp {
  const Turn* places;  // [64][pairs], of the CTA or in memory
  float* factors;      // [tokens]
  int16_t* tile;       // [kTileTokens][kTileStride]
  int16_t* first;      // [kBlockTokens][kTileStride]; null where it is not kept
  uint8_t* block;
};

__device__ __forceinline__ uint32_t load_word_field(const uint8_t* part, int32_t i, int32_t bits) {
  if (bits == 0) return 0;
  const auto* words = reinterpret_cast<const uint32_t*>(part) + i * bits / 32;
  const int32_t skip = i * bits % 32;
  uint32_t x = words[0] >> skip;
  if (skip + bits > 32) x |= words[1] << (32 - skip);
  return x & ((1u << bits) - 1u);
}

// Fields that can be judged by the header and the family alone.
__device__ inline bool header_is_valid(const WeightedBlockHeader& h, int32_t tokens, int32_t dims,
                                       Component component, const DecodeFamily& family,
                                       int32_t books) {
  if (h.version != kWeightedBlockVersion || static_cast<int32_t>(h.mode) >= kNumBlockModes ||
      h.component != component || h.tokens != tokens || h.dims != dims ||
      h.exponent_bits > kMaxExponentBits || h.length_bits > kMaxLengthBits) {
    return false;
  }
  if (is_raw_mode(h.mode)) {
    return h.streams_per_lane == 1 && h.table_id == 0 && h.least_length == 0 &&
           h.length_bits == 0 && h.exceptions == 0 &&
           (h.mode != BlockMode::kRaw16 || h.base_or_books == 0);
  }
  const DeviceCodebook& first = family.books[0];
  if (h.mode != first.mode || h.table_id != first.table_id ||
      h.streams_per_lane != first.streams_per_lane ||
      h.base_or_books >> (2 * dim_block_count(dims)) != 0) {
    return false;
  }
  bool known = true;
  for (int32_t f = 0; f < dim_block_count(dims); ++f) known &= h.book(f) < books;
  return known;
}

// Zeros from a bit on to a byte, both inside whole words.
__device__ __forceinline__ bool gap_is_zero(const uint8_t* block, int32_t from_bit,
                                            int32_t to_byte) {
  bool zero = true;
  for (int32_t i = from_bit / 32 + lane_index(); 4 * i < to_byte; i += kWarpLanes) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(block)[i];
    zero &= (i == from_bit / 32 ? word >> from_bit % 32 : word) == 0;
  }
  return __all_sync(kFullWarp, zero);
}

// Where a slice lies: `size` bytes are left from there on.
struct SliceBytes {
  const uint8_t* from;
  int64_t size;
  int32_t first_dim;
};

// What a slice is, as version 1 would say it.
struct OpenWeightedSlice {
  CodedBlockHeader header;
  CodedBlockLayout at;
  BlockStreams streams;
  uint32_t book_field;
};

// The bounds of the streams from their lengths; the bits of all.
__device__ __forceinline__ int32_t find_bounds(const WeightedBlockHeader& h,
                                               const WeightedBlockLayout& at, const uint8_t* block,
                                               BlockStreams* streams) {
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

// Factors of the tokens; false where an exponent is none.
__device__ inline bool load_factors(const WeightedBlockHeader& h, const WeightedBlockLayout& at,
                                    const uint8_t* block, bool first_slice, float* factors) {
  if (!first_slice) return h.exponent_bits == 0 && h.least_exponent == 0;
  bool valid = true;
  for (int32_t t = lane_index(); t < h.tokens; t += kWarpLanes) {
    const int32_t e = h.least_exponent + static_cast<int32_t>(load_word_field(block + at.exponents,
                                                                              t, h.exponent_bits));
    valid &= e <= kMostExponent && (h.component != Component::kKey || is_importance_exponent(e));
    factors[t] = exponent_factor(valid ? e : 0);
  }
  // Where no token has it the least one can still be wrong.
  valid &= h.component != Component::kKey || is_importance_exponent(h.least_exponent);
  return __all_sync(kFullWarp, valid);
}

// Copies what there is of a slice and judges it: kOk, kCorrupt or kOutOfRange.
__device__ inline StatusCode open_slice(const WeightedDecode& call, const RangeTarget& target,
                                        const DecodeFamily& family, const SliceBytes& slice,
                                        const WeightedDecodeWarp& memory, OpenWeightedSlice* open) {
  if (slice.size < kCodedBlockHeaderBytes) return StatusCode::kCorrupt;
  const WeightedBlockHeader h = load_weighted_header(slice.from);
  const int32_t dims = min(kSliceDims, call.rows.head_dim - slice.first_dim);
  if (!header_is_valid(h, target.tokens, dims, call.component, family, call.family.count)) {
    return StatusCode::kCorrupt;
  }
  const int32_t bytes = h.units * kBlockAlignment;
  WeightedBlockLayout at = weighted_layout(h, 0);
  if (at.bytes > bytes || bytes > slice.size || bytes > kMaxWeightedBlockBytes) {
    return StatusCode::kCorrupt;
  }
  if (bytes > call.max_block_bytes) return StatusCode::kOutOfRange;
  copy_block(slice.from, bytes, memory.block);

  const bool raw = is_raw_mode(h.mode);
  open->streams = {nullptr, raw ? 0 : h.streams_per_lane, {0, 0}, {0, 0}, 0};
  const int32_t payload_bits = find_bounds(h, at, memory.block, &open->streams);
  if (payload_bits > kMaxPayloadBits) return StatusCode::kCorrupt;
  at = weighted_layout(h, payload_bits);
  if (at.bytes != bytes) return StatusCode::kCorrupt;
  open->streams.payload = memory.block + at.payload;
  open->streams.codes = tile_count(h.tokens) * dim_block_count(dims) * 2 * kPairsPerFragment;
  open->book_field = raw ? 0u : h.base_or_books;
  open->header.mode = h.mode;
  open->header.streams_per_lane = h.streams_per_lane;
  open->header.component = h.component;
  open->header.tokens = h.tokens;
  open->header.dims = h.dims;
  open->header.base = static_cast<int16_t>(h.base_or_books);
  open->header.payload_bits = static_cast<uint16_t>(payload_bits);
  open->header.exceptions = h.exceptions;
  open->at.low_plane = at.low_plane;
  open->at.payload = at.payload;
  open->at.exceptions = at.exceptions;
  open->at.end = at.end;
  open->at.bytes = at.bytes;

  const int32_t fields = raw ? 0 : kWarpLanes * h.streams_per_lane * h.length_bits;
  bool valid = warp_checksum(memory.block, at.bytes) == h.checksum;
  valid &= gap_is_zero(memory.block, 8 * at.exponents + h.tokens * h.exponent_bits, at.lengths);
  valid &= gap_is_zero(memory.block, 8 * at.lengths + fields, raw ? at.payload : at.low_plane);
  valid &= padding_is_zero(open->header, open->at, memory.block);
  valid &= exceptions_are_valid(open->header, open->at, memory.block);
  valid &= load_factors(h, at, memory.block, slice.first_dim == 0, memory.factors);
  __syncwarp();
  return valid ? StatusCode::kOk : StatusCode::kCorrupt;
}

// The tables of a family, the reader of its current book, and bases.
struct FamilyReader {
  TableReader reader;
  const DecodeFamily& family;
  const uint8_t* region;
  int32_t table_bytes;  // of each book

  __device__ __forceinline__ FamilyReader(const DecodeFamily& family_, const uint8_t* region_,
                                          int32_t table_bytes_)
      : reader(family_.books[0], region_),
        family(family_),
        region(region_),
        table_bytes(table_bytes_) {}
  // For the codes that come next; the base of the book.
  __device__ __forceinline__ int32_t select(int32_t book) {
    const DeviceCodebook& of = family.books[book];
    reader.table =
        SharedTable<0>(shared_address(region + book * table_bytes), table_mask(of.max_length, 0));
    return of.base;
  }
};

// finish(slice's first channel, its channels, tile, codes of the tile) for each tile of each slice;
// factors and, until the second slice, the first one's header are in memory meanwhile.
template <class Finish>
__device__ __forceinline__ StatusCode decode_block_tiles(
    const WeightedDecode& call, const RangeTarget& target, const WeightedPlace& place,
    FamilyReader& tables, const WeightedDecodeWarp& memory, const Finish& finish_tile) {
  const int64_t offset = int64_t{place.unit} * kBlockAlignment;
  const int64_t left = int64_t{place.units} * kBlockAlignment;
  if (offset > call.size || left > call.size - offset) return StatusCode::kCorrupt;
  SliceBytes slice{call.bytes + offset, left, 0};
  const bool keeps = memory.first != nullptr;
  for (; slice.first_dim < call.rows.head_dim; slice.first_dim += kSliceDims) {
    OpenWeightedSlice open;
    const StatusCode code = open_slice(call, target, tables.family, slice, memory, &open);
    if (code != StatusCode::kOk) return code;
    const bool raw = is_raw_mode(open.header.mode), keep = keeps && slice.first_dim == 0;
    const WarpMemory warp{memory.block, keep ? memory.first : memory.tile, nullptr,
                          keep ? kTileTokens * kTileStride : 0};
    const auto base_of = [&](int32_t f) -> int32_t {
      if (raw) return open.header.base;
      if (call.family.count == 1) return tables.family.books[0].base;
      return tables.select(static_cast<int32_t>(open.book_field >> (2 * f) & 3u));
    };
    const auto finish = [&](int32_t tile, const int16_t* codes) {
      if (!keep) finish_tile(slice.first_dim, open.header.dims, tile, codes);
    };
    const OpenTiles tiles{open.header, open.at, open.streams, weighted_order(call.component)};
    const auto decode = [&](int32_t tile, int16_t* codes) {
      if (open.header.mode != BlockMode::kPair) {
        decode_tile(tiles, tables.reader, warp, tile, base_of, codes);
      } else if (call.component == Component::kKey) {
        decode_pair_tile<true>(tables.reader, open.header.dims, base_of, codes);
      } else {
        decode_pair_tile<false>(tables.reader, open.header.dims, base_of, codes);
      }
    };
    if (!decode_tiles(tiles, tables.reader, warp, decode, finish)) return StatusCode::kCorrupt;
    slice.from += open.at.bytes;
    slice.size -= open.at.bytes;
  }
  return slice.size == 0 ? StatusCode::kOk : StatusCode::kCorrupt;
}
__device__ inline StatusCode decode_range_block(const WeightedDecode& call,
                                                const RangeTarget& target,
                                                const WeightedPlace& place, FamilyReader& tables,
                                                const WeightedDecodeWarp& memory) {
  const auto finish = [&](int32_t first_dim, int32_t dims, int32_t tile, const int16_t* codes) {
    const int16_t* kept =
        memory.first == nullptr ? nullptr : memory.first + tile * kTileTokens * kTileStride;
    write_tile(
        TileTokens{call, target, memory.places, memory.factors, codes, kept, tile, first_dim},
        dims);
  };
  return decode_block_tiles(call, target, place, tables, memory, finish);
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

// The family and its tables into the CTA's memory, by all of its threads.
__device__ inline void load_family(const WeightedDecode& call, DecodeFamily* family,
                                   uint8_t* region) {
  const auto thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  const int32_t stride = 1 << call.family.max_length;
  const DeviceCodebook& first = call.family.books[0];
  bool usable = !is_raw_mode(first.mode) && first.component == call.component &&
                (first.streams_per_lane == 1 || first.streams_per_lane == 2);
  for (int32_t b = 0; b < call.family.count; ++b) {
    const DeviceCodebook& book = call.family.books[b];
    usable &= book.mode == first.mode && book.component == first.component &&
              book.streams_per_lane == first.streams_per_lane && book.max_length >= 1 &&
              book.max_length <= call.family.max_length && book.table_id == first.table_id + b;
    if (!usable) break;
    if (thread == 0) family->books[b] = book;
    for (int32_t i = thread; i < 1 << book.max_length; i += threads) {
      reinterpret_cast<uint32_t*>(region)[b * stride + i] = book.table[i];
    }
  }
  if (thread == 0) family->usable = usable;
  __syncthreads();
}

// By a CTA of whole warps. shared: the region at a multiple of its size, the family, the places,
// and weighted_decode_warp_bytes() of each warp.
__device__ __forceinline__ void decode_weighted_items(const WeightedDecode& call, uint8_t* shared) {
  const auto region_bytes = static_cast<uint32_t>(weighted_region_bytes(call));
  const uint32_t start = shared_address(shared);
  uint8_t* const region =
      shared + ((start + region_bytes - 1) / region_bytes * region_bytes - start);
  auto* const family = reinterpret_cast<DecodeFamily*>(region + region_bytes);
  auto* const places = reinterpret_cast<uint2*>(region + region_bytes + kDecodeFamilyBytes);
  const int32_t turns = places_bytes(call) > 0 ? kBlockTokens * call.rows.rope.pairs : 0;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < turns;
       i += static_cast<int32_t>(blockDim.x)) {
    places[i] = reinterpret_cast<const uint2*>(call.rows.rope.place)[i];
  }
  load_family(call, family, region);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  uint8_t* const mine =
      region + weighted_decode_cta_bytes(call) + warp * weighted_decode_warp_bytes(call);
  uint8_t* const after_tile = mine + kFactorBytes + kCodesTileBytes;
  const bool keeps = keeps_first_slice(call);
  const WeightedDecodeWarp memory{
      turns > 0 ? reinterpret_cast<const Turn*>(places) : call.rows.rope.place,
      reinterpret_cast<float*>(mine), reinterpret_cast<int16_t*>(mine + kFactorBytes),
      keeps ? reinterpret_cast<int16_t*>(after_tile) : nullptr,
      after_tile + (keeps ? kFirstSliceBytes : 0)};
  FamilyReader tables(*family, region, 4 << call.family.max_length);
  const int64_t items = int64_t{call.num_ranges} * call.most_blocks;
  const int64_t stride = int64_t{gridDim.x} * warps;
  for (int64_t i = int64_t{blockIdx.x} * warps + warp; i < items; i += stride) {
    const WeightedRange range = call.ranges[i / call.most_blocks];
    RangeTarget target;
    StatusCode code = open_target(call, range, static_cast<int32_t>(i % call.most_blocks), &target);
    if (code == StatusCode::kOk && target.tokens > 0) {
      const bool turned = call.component == Component::kKey && call.rows.rope.pairs > 0;
      if (!family->usable) {
        code = StatusCode::kUnsupported;
      } else if (turned && target.block >= call.rows.rope.blocks) {
        code = StatusCode::kOutOfRange;
      } else {
        const WeightedPlace place = call.places[range.first_block + target.block];
        code = decode_range_block(call, target, place, tables, memory);
      }
      if (code != StatusCode::kOk) write_zeros(call, target);
    }
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

}  // namespace tierkv

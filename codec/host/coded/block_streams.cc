// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/block_streams.h"

#include <algorithm>
#include <cstring>

#include "codec/host/coded/lane_pairs.h"

namespace tierkv {
namespace {

// Adds the values of a raw tile to the codes, modulo 2^16.
void add_raw_tile(const OpenSlice& h, int32_t bits, const uint8_t* tile, TilePlanes* planes) {
  const TileLayout layout = raw_tile(bits, dim_block_count(h.dims));
  const uint32_t mask = (1u << bits) - 1u;
  const auto place = [&](int32_t f, int32_t r, int32_t lane) {
    const PairPosition p = pair_position(h.component, 0, f, r, lane);
    return code_position(layout, h.component, p.token, p.dim);
  };
  for (int32_t f = 0; f < dim_block_count(h.dims); ++f) {
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const CodePosition at = place(f, r, 0);
      const int32_t lane_stride = place(f, r, 1).byte - at.byte;
      const uint8_t* word = tile + at.byte;
      uint16_t* first = planes->first + (f * kPairsPerFragment + r) * kWarpLanes;
      uint16_t* second = planes->second + (f * kPairsPerFragment + r) * kWarpLanes;
      for (int32_t lane = 0; lane < kWarpLanes; ++lane, word += lane_stride) {
        // The second code of a pair lies 16 bits above the first.
        const uint32_t pair = load_u32(word) >> at.bit;
        first[lane] = static_cast<uint16_t>(first[lane] + (pair & mask));
        second[lane] = static_cast<uint16_t>(second[lane] + (pair >> 16 & mask));
      }
    }
  }
}

SliceCodes tile_of(const SliceCodes& slice, int32_t tile) {
  const int32_t first = tile * kTileTokens;
  return {slice.codes + first * slice.stride, std::min(kTileTokens, slice.tokens - first),
          slice.dims, slice.stride};
}

bool apply_exceptions(const OpenSlice& slice, const SliceCodes& out) {
  int32_t previous = -1;
  for (int32_t i = 0; i < slice.exception_count; ++i) {
    const uint32_t e = load_u32(slice.exceptions + kExceptionBytes * i);
    const auto index = static_cast<int32_t>(e & 0xffffu);
    const int32_t token = index / kSliceDims, dim = index % kSliceDims;
    const int32_t delta = static_cast<int16_t>(e >> 16);
    if (index <= previous || token >= out.tokens || dim >= out.dims || delta == 0) return false;
    int16_t* code = out.codes + token * out.stride + dim;
    if (*code + delta < INT16_MIN || *code + delta > INT16_MAX) return false;
    *code = static_cast<int16_t>(*code + delta);
    previous = index;
  }
  return true;
}

// The rows of a tile from its entries.
void finish_tile(const OpenSlice& slice, const SliceBooks& books, DecodePath path, int32_t tile,
                 const uint16_t* entries, const SliceCodes& out) {
  if (slice.mode == BlockMode::kPair && path == DecodePath::kTable) {
    return scatter_pair_entries(books, entries, out);
  }
  TilePlanes planes;
  const int32_t blocks = dim_block_count(slice.dims);
  expand_entries(books, blocks, entries, &planes);
  if (slice.mode == BlockMode::kSplit) {
    add_raw_tile(slice, 4, slice.low_plane + tile * raw_tile(4, blocks).bytes(), &planes);
  }
  if (path == DecodePath::kTree) {
    scatter_tile_reference(planes, slice.component, out);
  } else {
    scatter_tile(planes, slice.component, out);
  }
}

const char* decode_coded(const OpenSlice& slice, const SliceBooks& books, DecodePath path,
                         const SliceCodes& out) {
  const int32_t blocks = dim_block_count(slice.dims), tiles = tile_count(slice.tokens);
  const int32_t tile_symbols = blocks * books.symbols_per_fragment();
  StreamSet set;
  set.streams = books.streams();
  set.symbols = tiles * tile_symbols;
  set.dim_blocks = blocks;
  std::copy_n(slice.bounds, set.streams + 1, set.bounds);
  // In memory of its own with zeros behind it, so that no lookup reads past the block.
  uint8_t payload[(kMaxPayloadBits + 31) / 32 * 4 + kPayloadSlackBytes];
  const size_t used = (set.bounds[set.streams] + 31) / 32 * 4;
  memcpy(payload, slice.payload, used);
  memset(payload + used, 0, kPayloadSlackBytes);
  set.payload = payload;
  alignas(64) uint16_t entries[kMaxBlockEntries];
  const bool whole = path == DecodePath::kTree ? decode_streams_reference(books, set, entries)
                                               : decode_streams(books, set, entries);
  if (!whole) return "a stream does not end where the next one starts";
  for (int32_t tile = 0; tile < tiles; ++tile) {
    finish_tile(slice, books, path, tile, entries + tile * tile_symbols * set.streams,
                tile_of(out, tile));
  }
  return nullptr;
}

void decode_raw(const OpenSlice& slice, const SliceCodes& out) {
  const int32_t bits = raw_bits(slice.mode);
  const int32_t bytes = raw_tile(bits, dim_block_count(slice.dims)).bytes();
  for (int32_t tile = 0; tile < tile_count(slice.tokens); ++tile) {
    TilePlanes planes;
    std::fill_n(planes.first, kTilePairs, static_cast<uint16_t>(slice.base));
    std::fill_n(planes.second, kTilePairs, static_cast<uint16_t>(slice.base));
    add_raw_tile(slice, bits, slice.payload + tile * bytes, &planes);
    scatter_tile(planes, slice.component, tile_of(out, tile));
  }
}

}  // namespace

const char* check_padding(const OpenSlice& slice, const uint8_t* end, const uint8_t* block_end) {
  for (; end < block_end; ++end) {
    if (*end != 0) return "padding is not zero";
  }
  if (is_raw_mode(slice.mode)) return nullptr;
  const uint32_t bits = slice.bounds[kWarpLanes * slice.streams_per_lane];
  if (bits % 32 != 0 && load_u32(slice.payload + bits / 32 * 4) >> bits % 32 != 0) {
    return "bits after the last stream";
  }
  return nullptr;
}

const char* decode_open_slice(const OpenSlice& slice, const SliceBooks& books, DecodePath path,
                              const SliceCodes& out) {
  if (is_raw_mode(slice.mode)) {
    decode_raw(slice, out);
    return nullptr;
  }
  if (const char* wrong = decode_coded(slice, books, path, out)) return wrong;
  return apply_exceptions(slice, out) ? nullptr : "bad exception";
}

}  // namespace tierkv

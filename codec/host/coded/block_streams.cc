// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/block_streams.h"

#include <algorithm>
#include <cstring>

#include "codec/host/coded/stream_decode.h"

namespace tierkv {
namespace {

// Adds the values of raw tiles to the codes, modulo 2^16.
void add_raw_tiles(const OpenSlice& h, int32_t bits, const uint8_t* tiles, const SliceCodes& out) {
  const TileLayout layout = raw_tile(bits, dim_block_count(h.dims));
  CodePosition at[kSliceDims];
  for (int32_t in_tile = 0; in_tile < std::min(kTileTokens, out.tokens); ++in_tile) {
    for (int32_t d = 0; d < out.dims; ++d) at[d] = code_position(layout, h.component, in_tile, d);
    for (int32_t t = in_tile; t < out.tokens; t += kTileTokens) {
      const uint8_t* tile = tiles + t / kTileTokens * layout.bytes();
      int16_t* row = out.codes + t * out.stride;
      for (int32_t d = 0; d < out.dims; ++d) {
        row[d] = static_cast<int16_t>(row[d] + load_code(tile, at[d], bits));
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

const char* decode_coded(const OpenSlice& slice, const SliceBooks& books, const SliceCodes& out) {
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
  alignas(64) uint16_t entries[kMaxBlockCodes];
  if (!decode_streams(books, set, entries)) {
    return "a stream does not end where the next one starts";
  }
  const auto scatter = slice.mode == BlockMode::kPair ? scatter_pairs : scatter_entries;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    scatter(books, entries + tile * tile_symbols * set.streams, tile_of(out, tile));
  }
  if (slice.mode == BlockMode::kSplit) add_raw_tiles(slice, 4, slice.low_plane, out);
  return nullptr;
}

void decode_raw(const OpenSlice& slice, const SliceCodes& out) {
  for (int32_t t = 0; t < out.tokens; ++t) {
    std::fill_n(out.codes + t * out.stride, out.dims, slice.base);
  }
  add_raw_tiles(slice, raw_bits(slice.mode), slice.payload, out);
}

}  // namespace

void scatter_entries(const SliceBooks& books, const uint16_t* entries, const SliceCodes& out) {
  const bool key = books.first().component == Component::kKey;
  const bool split = books.first().mode == BlockMode::kSplit;
  const int32_t blocks = dim_block_count(out.dims), places = books.first().codes_per_symbol();
  const int32_t width = digit_bits(books.first().mode), streams = books.streams();
  for (int32_t i = 0; i < blocks; ++i) {
    const int32_t f = dim_block_at(books.order, blocks, i), base = books.of[f]->base;
    for (int32_t c = 0; c < books.codes_per_fragment(); ++c) {
      const int32_t shift = 6 + c % places * width;
      for (int32_t s = 0; s < streams; s += kWarpLanes) {
        const int32_t in_lane = books.lane_code(s, c);
        const uint16_t* of_lanes = entries + c / places * streams + s;
        for (int32_t lane = 0; lane < kWarpLanes; ++lane) {
          PairPosition at = pair_position(books.first().component, 0, f, in_lane / 2, lane);
          (key ? at.dim : at.token) += in_lane % 2;
          if (at.token >= out.tokens || at.dim >= out.dims) continue;
          const int32_t digit = of_lanes[lane] >> shift & ((1 << width) - 1);
          out.codes[at.token * out.stride + at.dim] =
              static_cast<int16_t>(base + (split ? 16 * digit : digit));
        }
      }
    }
    entries += books.symbols_per_fragment() * streams;
  }
}

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

const char* decode_open_slice(const OpenSlice& slice, const SliceBooks& books,
                              const SliceCodes& out) {
  if (is_raw_mode(slice.mode)) {
    decode_raw(slice, out);
    return nullptr;
  }
  if (const char* wrong = decode_coded(slice, books, out)) return wrong;
  return apply_exceptions(slice, out) ? nullptr : "bad exception";
}

}  // namespace tierkv

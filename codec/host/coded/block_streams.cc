// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/block_streams.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "codec/format/coded_block_format.h"
#include "codec/format/weighted_step.h"

namespace tierkv {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded as they are stored");

// A slice of a block that has all the bytes it stands for.
struct OpenSlice {
  const uint8_t* bytes = nullptr;
  BlockHeader header;  // payload_bits, too
  BlockLayout at;
  uint32_t bounds[2 * kWarpLanes + 1] = {};  // coded modes, as in StreamSet, ascending
};

// ---- validation: functions return what is wrong, or null ----

// Fields that are wrong whatever the codebooks.
const char* check_fields(const BlockHeader& h) {
  if (static_cast<int32_t>(h.mode) >= kNumBlockModes) return "unknown mode";
  if (static_cast<int32_t>(h.component) > 1) return "unknown component";
  if (h.tokens < 1 || h.tokens > kBlockTokens) return "tokens out of range";
  if (h.dims < 1 || h.dims > kSliceDims) return "channels out of range";
  if (h.exponent_bits > kMaxExponentBits) return "exponents of more than 8 bits";
  if (is_raw_mode(h.mode)) {
    const bool clear = h.streams_per_lane == 1 && h.table_id == 0 && h.least_length == 0 &&
                       h.length_bits == 0 && h.exceptions == 0 &&
                       (h.mode != BlockMode::kRaw16 || h.base_or_books == 0);
    return clear ? nullptr : "a raw block with fields of a coded one";
  }
  if (h.streams_per_lane != 1 && h.streams_per_lane != 2) return "streams per lane must be 1 or 2";
  if (h.length_bits > kMaxLengthBits) return "stream lengths of more than 12 bits";
  if (h.base_or_books >> (2 * dim_block_count(h.dims)) != 0) return "books of channels beyond";
  return nullptr;
}

// As load_field() of 0 .. count - 1, at most 64 fields, without a branch a field.
void load_fields(const uint8_t* part, int32_t count, int32_t bits, uint16_t* fields) {
  uint8_t padded[64 * kMaxLengthBits / 8 + 8] = {};
  memcpy(padded, part, static_cast<size_t>(field_bytes(count, bits)));
  const uint32_t mask = (1u << bits) - 1u;
  for (int32_t i = 0, from = 0; i < count; ++i, from += bits) {
    uint32_t word;
    memcpy(&word, padded + from / 8, sizeof(word));
    fields[i] = static_cast<uint16_t>(word >> from % 8 & mask);
  }
}

// The bounds of the streams from their lengths, which the rest of the layout follows from.
const char* find_bounds(OpenSlice* slice) {
  BlockHeader& h = slice->header;
  uint32_t* const bounds = slice->bounds;
  const int32_t streams = kWarpLanes * h.streams_per_lane;
  uint16_t fields[2 * kWarpLanes];
  load_fields(slice->bytes + slice->at.lengths, streams, h.length_bits, fields);
  for (int32_t i = 0; i < streams; ++i) bounds[i + 1] = bounds[i] + h.least_length + fields[i];
  if (bounds[streams] > kMaxPayloadBits) return "streams of more than 65535 bits";
  h.payload_bits = static_cast<uint16_t>(bounds[streams]);
  slice->at = block_layout(h);
  return nullptr;
}

const char* open_slice(const BlockSource& from, OpenSlice* slice) {
  if (from.size < kCodedBlockHeaderBytes) return "shorter than a header";
  BlockHeader& h = slice->header;
  h = load_header(from.bytes);
  if (h.version != kCodedBlockVersion) return "version is not 2";
  if (const char* wrong = check_fields(h)) return wrong;
  const int32_t bytes_said = h.units * kBlockAlignment;
  if (bytes_said > from.size) return "cut short";
  slice->bytes = from.bytes;
  slice->at = block_layout(h);
  if (slice->at.bytes > bytes_said) return "size disagrees with the fields";
  if (!is_raw_mode(h.mode)) {
    if (const char* wrong = find_bounds(slice)) return wrong;
  }
  if (slice->at.bytes != bytes_said) return "size disagrees with the fields";
  return block_checksum(from.bytes, bytes_said) == h.checksum ? nullptr : "checksum";
}

const char* match_books(const BlockHeader& h, std::span<const Codebook> family, SliceBooks* books) {
  const Codebook& first = family.front();
  if (h.component != first.component) return "not of the codebook's component";
  if (is_raw_mode(h.mode)) return nullptr;
  if (h.mode != first.mode || h.table_id != first.table_id ||
      h.streams_per_lane != first.streams_per_lane) {
    return "made with another codebook";
  }
  for (int32_t f = 0; f < dim_block_count(h.dims); ++f) {
    const auto book = static_cast<size_t>(h.book(f));
    if (book >= family.size()) return "a book that the family does not have";
    books->of[f] = &family[book];
  }
  return nullptr;
}

// Zeros between the parts, behind the last field and the last stream, and behind the exceptions.
const char* check_gaps(const OpenSlice& slice) {
  const BlockHeader& h = slice.header;
  const BlockLayout& at = slice.at;
  // The parts are whole words.
  const auto clear = [&](int32_t from_bit, int32_t to_byte) {
    int32_t word = from_bit / 32 * 4;
    if (word >= to_byte) return true;
    uint32_t bits = load_u32(slice.bytes + word) >> from_bit % 32;
    for (word += 4; word < to_byte; word += 4) bits |= load_u32(slice.bytes + word);
    return bits == 0;
  };
  const bool raw = is_raw_mode(h.mode);
  const int32_t lengths = 8 * at.lengths + kWarpLanes * h.streams_per_lane * h.length_bits;
  if (!clear(8 * at.exponents + h.tokens * h.exponent_bits, at.lengths)) {
    return "bits after the exponents";
  }
  if (!clear(lengths, raw ? at.payload : at.low_plane) || !clear(8 * at.end, at.bytes)) {
    return "padding is not zero";
  }
  if (raw || clear(8 * at.payload + h.payload_bits, at.exceptions)) return nullptr;
  return "bits after the last stream";
}

// Those of the first slice to `exponents`; the others have none.
const char* read_exponents(const OpenSlice& slice, bool first, int8_t* exponents) {
  const BlockHeader& h = slice.header;
  if (!first) {
    return h.exponent_bits == 0 && h.least_exponent == 0 ? nullptr
                                                         : "exponents behind the first slice";
  }
  uint16_t above[kBlockTokens], most = 0;
  load_fields(slice.bytes + slice.at.exponents, h.tokens, h.exponent_bits, above);
  for (int32_t t = 0; t < h.tokens; ++t) {
    most = std::max(most, above[t]);
    exponents[t] = static_cast<int8_t>(h.least_exponent + above[t]);
  }
  const int32_t highest = h.least_exponent + most;
  if (highest > kMostExponent) return "an exponent beyond 127";
  if (h.component == Component::kKey &&
      !(is_importance_exponent(h.least_exponent) && is_importance_exponent(highest))) {
    return "a key's exponent is outside -8 to 4";
  }
  return nullptr;
}

// ---- codes ----

// Adds the values of raw tiles to the codes, modulo 2^16.
void add_raw_tiles(const BlockHeader& h, int32_t bits, const uint8_t* tiles,
                   const SliceCodes& out) {
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
  for (int32_t i = 0; i < slice.header.exceptions; ++i) {
    const uint32_t e = load_u32(slice.bytes + slice.at.exceptions + kExceptionBytes * i);
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
  const int32_t blocks = dim_block_count(out.dims), tiles = tile_count(out.tokens);
  const int32_t tile_symbols = blocks * books.symbols_per_fragment();
  StreamSet set;
  set.streams = books.streams();
  set.symbols = tiles * tile_symbols;
  set.dim_blocks = blocks;
  std::copy_n(slice.bounds, set.streams + 1, set.bounds);
  // In memory of its own with zeros behind it, so that no lookup reads past the block.
  uint8_t payload[(kMaxPayloadBits + 31) / 32 * 4 + kPayloadSlackBytes];
  const size_t used = (set.bounds[set.streams] + 31) / 32 * 4;
  memcpy(payload, slice.bytes + slice.at.payload, used);
  memset(payload + used, 0, kPayloadSlackBytes);
  set.payload = payload;
  alignas(64) uint16_t entries[kMaxBlockCodes];
  if (!decode_streams(books, set, entries)) {
    return "a stream does not end where the next one starts";
  }
  const auto scatter = slice.header.mode == BlockMode::kPair ? scatter_pairs : scatter_entries;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    scatter(books, entries + tile * tile_symbols * set.streams, tile_of(out, tile));
  }
  if (slice.header.mode == BlockMode::kSplit) {
    add_raw_tiles(slice.header, 4, slice.bytes + slice.at.low_plane, out);
  }
  return apply_exceptions(slice, out) ? nullptr : "bad exception";
}

void decode_raw(const OpenSlice& slice, const SliceCodes& out) {
  for (int32_t t = 0; t < out.tokens; ++t) {
    std::fill_n(out.codes + t * out.stride, out.dims, slice.header.base());
  }
  add_raw_tiles(slice.header, raw_bits(slice.header.mode), slice.bytes + slice.at.payload, out);
}

}  // namespace

void scatter_entries(const SliceBooks& books, const uint16_t* entries, const SliceCodes& out) {
  const bool key = books.first().component == Component::kKey;
  const bool split = books.first().mode == BlockMode::kSplit;
  const int32_t blocks = dim_block_count(out.dims), places = books.first().codes_per_symbol();
  const int32_t width = symbol_shape(books.first().mode).digit_bits, streams = books.streams();
  for (int32_t i = 0; i < blocks; ++i) {
    const int32_t f = dim_block_at(books.first().component, blocks, i), base = books.of[f]->base;
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

const char* decode_slices(const BlockSource& from, const SliceCodes& out, int8_t* exponents) {
  const Codebook& book = from.family.front();
  BlockSource left = from;
  for (int32_t first = 0; first < out.dims; first += kSliceDims) {
    const SliceCodes codes{out.codes + first, out.tokens, std::min(kSliceDims, out.dims - first),
                           out.stride};
    OpenSlice slice;
    SliceBooks books(book);
    if (const char* wrong = open_slice(left, &slice)) return wrong;
    const BlockHeader& h = slice.header;
    if (h.tokens != codes.tokens || h.dims != codes.dims) {
      return "not the expected tokens or channels";
    }
    if (const char* wrong = match_books(h, from.family, &books)) return wrong;
    if (const char* wrong = check_gaps(slice)) return wrong;
    if (const char* wrong = read_exponents(slice, first == 0, exponents)) return wrong;
    if (is_raw_mode(h.mode)) {
      decode_raw(slice, codes);
    } else if (const char* wrong = decode_coded(slice, books, codes)) {
      return wrong;
    }
    left.bytes += slice.at.bytes;
    left.size -= slice.at.bytes;
  }
  return left.size == 0 ? nullptr : "bytes after the last slice";
}

}  // namespace tierkv

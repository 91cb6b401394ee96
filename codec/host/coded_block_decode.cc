// decode_block: validation, the table decoder and the tree walk. The encoder is in coded_block.cc.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "codec/format/coded_block.h"
#include "codec/format/huffman.h"
#include "codec/host/lane_pairs.h"
#include "tierkv/layout.h"

namespace tierkv {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded as they are stored");

Status corrupt(const char* what) {
  return Status(StatusCode::kCorrupt, std::string("coded block: ") + what);
}

// A block whose header, sizes and starts have been checked.
struct Block {
  CodedBlockHeader header;
  CodedBlockLayout at;
  const uint8_t* bytes = nullptr;

  int32_t streams() const { return kWarpLanes * header.streams_per_lane; }
  // Of one stream.
  int32_t symbols_per_tile(const Codebook& c) const {
    const int32_t codes = 2 * kPairsPerFragment * dim_block_count(header.dims);
    return codes / c.codes_per_symbol() / c.streams_per_lane;
  }
};

// Fields that are wrong whatever the codebook.
Status check_fields(const CodedBlockHeader& h) {
  if (h.version != kCodedBlockVersion) return corrupt("version is not 1");
  if (static_cast<int32_t>(h.mode) >= kNumBlockModes) return corrupt("unknown mode");
  if (h.component != Component::kKey && h.component != Component::kValue) {
    return corrupt("unknown component");
  }
  if (h.tokens < 1 || h.tokens > kBlockTokens) return corrupt("tokens out of range");
  if (h.dims < 1 || h.dims > kSliceDims) return corrupt("channels out of range");
  if (h.exceptions > kMaxExceptions) return corrupt("too many exceptions");
  if (is_raw_mode(h.mode)) {
    const bool clear = h.streams_per_lane == 1 && h.table_id == 0 && h.payload_bits == 0 &&
                       h.exceptions == 0 && (h.mode != BlockMode::kRaw16 || h.base == 0);
    if (!clear) return corrupt("a raw block with fields of a coded one");
  } else if (h.streams_per_lane != 1 && h.streams_per_lane != 2) {
    return corrupt("streams per lane must be 1 or 2");
  }
  return Status::ok();
}

Status open_block(const uint8_t* bytes, int64_t size, Block* block) {
  if (size < kCodedBlockHeaderBytes) return corrupt("shorter than a header");
  block->bytes = bytes;
  block->header = load_header(bytes);
  if (Status s = check_fields(block->header); !s) return s;
  block->at = block_layout(block->header);
  if (block->at.bytes != block->header.units * kBlockAlignment) {
    return corrupt("size disagrees with the fields");
  }
  if (block->at.bytes > size) return corrupt("cut short");
  if (block_checksum_fast(bytes, block->at.bytes) != block->header.checksum)
    return corrupt("checksum");
  return Status::ok();
}

Status check_padding(const Block& block) {
  for (int32_t i = block.at.end; i < block.at.bytes; ++i) {
    if (block.bytes[i] != 0) return corrupt("padding is not zero");
  }
  if (is_raw_mode(block.header.mode)) return Status::ok();
  const int32_t used = block.header.payload_bits % 32;
  if (used != 0 && load_u32(block.bytes + block.at.exceptions - 4) >> used != 0) {
    return corrupt("bits after the last stream");
  }
  return Status::ok();
}

Status check_match(const CodedBlockHeader& h, int32_t tokens, int32_t dims, const Codebook& c) {
  if (h.component != c.component) return corrupt("not of the codebook's component");
  if (h.tokens != tokens || h.dims != dims) return corrupt("not the expected tokens or channels");
  const bool same = h.mode == c.mode && h.base == c.base && h.table_id == c.table_id &&
                    h.streams_per_lane == c.streams_per_lane;
  if (!is_raw_mode(h.mode) && !same) return corrupt("made with another codebook");
  return Status::ok();
}

// The payload of a coded block in memory of its own with zeros behind it, so that no lookup reads
// past the block, and its streams.
struct Payload {
  uint8_t bytes[(kMaxPayloadBits + 31) / 32 * 4 + kPayloadSlackBytes];
  StreamSet set;

  Payload(const Block& block, const Codebook& codebook) {
    const auto used = static_cast<size_t>(block.at.exceptions - block.at.payload);
    memcpy(bytes, block.bytes + block.at.payload, used);
    memset(bytes + used, 0, kPayloadSlackBytes);
    set.payload = bytes;
    set.streams = block.streams();
    uint16_t starts[2 * kWarpLanes];
    memcpy(starts, block.bytes + block.at.starts, 2 * static_cast<size_t>(set.streams));
    std::copy_n(starts, set.streams, set.bounds);
    set.bounds[set.streams] = block.header.payload_bits;
    set.symbols = tile_count(block.header.tokens) * block.symbols_per_tile(codebook);
  }

  Status check_bounds() const {
    if (set.bounds[0] != 0) return corrupt("the first stream does not start at 0");
    bool ascending = true;
    for (int32_t i = 0; i < set.streams; ++i) ascending &= set.bounds[i] <= set.bounds[i + 1];
    return ascending ? Status::ok() : corrupt("stream starts descend");
  }
};

// Adds the values of a raw tile to the codes, modulo 2^16.
void add_raw_tile(const CodedBlockHeader& h, int32_t bits, const uint8_t* tile,
                  TilePlanes* planes) {
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

bool apply_exceptions(const Block& block, const SliceCodes& out) {
  int32_t previous = -1;
  for (int32_t i = 0; i < block.header.exceptions; ++i) {
    const uint32_t e = load_u32(block.bytes + block.at.exceptions + kExceptionBytes * i);
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
void finish_tile(const Block& block, const Codebook& codebook, DecodePath path, int32_t tile,
                 const uint16_t* entries, const SliceCodes& out) {
  const CodedBlockHeader& h = block.header;
  if (h.mode == BlockMode::kPair && path == DecodePath::kTable) {
    return scatter_pair_entries(codebook, entries, out);
  }
  TilePlanes planes;
  expand_entries(codebook, block.symbols_per_tile(codebook), entries, &planes);
  if (h.mode == BlockMode::kSplit) {
    const int32_t bytes = raw_tile(4, dim_block_count(h.dims)).bytes();
    add_raw_tile(h, 4, block.bytes + block.at.low_plane + tile * bytes, &planes);
  }
  if (path == DecodePath::kTree) {
    scatter_tile_reference(planes, h.component, out);
  } else {
    scatter_tile(planes, h.component, out);
  }
}

Status decode_coded(const Block& block, const Codebook& codebook, DecodePath path,
                    const SliceCodes& out) {
  const Payload payload(block, codebook);
  if (Status s = payload.check_bounds(); !s) return s;
  const StreamSet& set = payload.set;
  alignas(64) uint16_t entries[kMaxBlockEntries];
  const bool whole = path == DecodePath::kTree ? decode_streams_reference(codebook, set, entries)
                                               : decode_streams(codebook, set, entries);
  if (!whole) return corrupt("a stream does not end where the next one starts");
  const int32_t tile_entries = block.symbols_per_tile(codebook) * set.streams;
  for (int32_t tile = 0; tile < tile_count(block.header.tokens); ++tile) {
    finish_tile(block, codebook, path, tile, entries + tile * tile_entries, tile_of(out, tile));
  }
  return Status::ok();
}

void decode_raw(const Block& block, const SliceCodes& out) {
  const CodedBlockHeader& h = block.header;
  const int32_t bits = raw_bits(h.mode), bytes = raw_tile(bits, dim_block_count(h.dims)).bytes();
  for (int32_t tile = 0; tile < tile_count(h.tokens); ++tile) {
    TilePlanes planes;
    std::fill_n(planes.first, kTilePairs, static_cast<uint16_t>(h.base));
    std::fill_n(planes.second, kTilePairs, static_cast<uint16_t>(h.base));
    add_raw_tile(h, bits, block.bytes + block.at.payload + tile * bytes, &planes);
    scatter_tile(planes, h.component, tile_of(out, tile));
  }
}

Status decode_slice(const Block& block, const Codebook& codebook, DecodePath path,
                    const SliceCodes& out) {
  if (is_raw_mode(block.header.mode)) {
    decode_raw(block, out);
    return Status::ok();
  }
  if (Status s = decode_coded(block, codebook, path, out); !s) return s;
  return apply_exceptions(block, out) ? Status::ok() : corrupt("bad exception");
}

Status decode_slices(const uint8_t* bytes, int64_t size, const SliceCodes& all,
                     const Codebook& codebook, DecodePath path) {
  for (int32_t first = 0; first < all.dims; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, all.dims - first);
    Block block;
    if (Status s = open_block(bytes, size, &block); !s) return s;
    if (Status s = check_match(block.header, all.tokens, dims, codebook); !s) return s;
    if (Status s = check_padding(block); !s) return s;
    const SliceCodes slice{all.codes + first, all.tokens, dims, all.stride};
    if (Status s = decode_slice(block, codebook, path, slice); !s) return s;
    bytes += block.at.bytes;
    size -= block.at.bytes;
  }
  return size == 0 ? Status::ok() : corrupt("bytes after the last slice");
}

}  // namespace

Status decode_block(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, int16_t* codes, DecodePath path) {
  if (tokens < 1 || tokens > kBlockTokens) {
    return Status(StatusCode::kInvalidArgument, "a block has 1 to 64 tokens");
  }
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    return Status(StatusCode::kInvalidArgument, "head_dim must be 1 to 4096");
  }
  Status s = decode_slices(bytes, size, {codes, tokens, head_dim, head_dim}, codebook, path);
  if (!s) std::fill_n(codes, static_cast<int64_t>(tokens) * head_dim, int16_t{0});
  return s;
}

Status add_block_stats(const uint8_t* bytes, int64_t size, CodedBlockStats* stats) {
  while (size > 0) {
    Block block;
    if (Status s = open_block(bytes, size, &block); !s) return s;
    const CodedBlockLayout& at = block.at;
    const int32_t payload = is_raw_mode(block.header.mode)
                                ? 8 * (at.exceptions - at.payload)
                                : 8 * (at.payload - at.low_plane) + block.header.payload_bits;
    const int32_t header =
        is_raw_mode(block.header.mode) ? 8 * kCodedBlockHeaderBytes : 8 * at.low_plane;
    ++stats->blocks[static_cast<int32_t>(block.header.mode)];
    stats->header_bits += header;
    stats->payload_bits += payload;
    stats->exceptions += block.header.exceptions;
    stats->exception_bits += 8 * kExceptionBytes * block.header.exceptions;
    stats->padding_bits +=
        8 * at.bytes - header - payload - 8 * kExceptionBytes * block.header.exceptions;
    bytes += at.bytes;
    size -= at.bytes;
  }
  return Status::ok();
}

}  // namespace tierkv

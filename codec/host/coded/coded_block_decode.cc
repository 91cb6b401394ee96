// SPDX-License-Identifier: Apache-2.0
// decode_block: validation. The decoder is in codec/host/coded/block_streams.cc, the encoder is in
// coded_block.cc.
#include <algorithm>
#include <bit>
#include <string>

#include "codec/format/coded_block.h"
#include "codec/host/coded/block_streams.h"

namespace tierkv {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded as they are stored");

Status corrupt(const char* what) {
  return Status(StatusCode::kCorrupt, std::string("coded block: ") + what);
}

// A block whose header and sizes have been checked.
struct Block {
  CodedBlockHeader header;
  CodedBlockLayout at;
  const uint8_t* bytes = nullptr;
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
  if (block_checksum(bytes, block->at.bytes) != block->header.checksum) return corrupt("checksum");
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

OpenSlice open_slice(const Block& block) {
  const CodedBlockHeader& h = block.header;
  OpenSlice slice;
  slice.mode = h.mode;
  slice.component = h.component;
  slice.tokens = h.tokens;
  slice.dims = h.dims;
  slice.streams_per_lane = h.streams_per_lane;
  slice.base = h.base;
  slice.low_plane = block.bytes + block.at.low_plane;
  slice.payload = block.bytes + block.at.payload;
  slice.exceptions = block.bytes + block.at.exceptions;
  slice.exception_count = h.exceptions;
  if (is_raw_mode(h.mode)) return slice;
  const int32_t streams = kWarpLanes * h.streams_per_lane;
  for (int32_t i = 0; i < streams; ++i) {
    slice.bounds[i] = load_u16(block.bytes + block.at.starts + 2 * i);
  }
  slice.bounds[streams] = h.payload_bits;
  return slice;
}

const char* check_bounds(const OpenSlice& slice) {
  if (slice.bounds[0] != 0) return "the first stream does not start at 0";
  bool ascending = true;
  for (int32_t i = 0; i < kWarpLanes * slice.streams_per_lane; ++i) {
    ascending &= slice.bounds[i] <= slice.bounds[i + 1];
  }
  return ascending ? nullptr : "stream starts descend";
}

Status decode_slice(const Block& block, const Codebook& codebook, const SliceCodes& out) {
  const OpenSlice slice = open_slice(block);
  const uint8_t* end = block.bytes + block.at.end;
  if (const char* wrong = check_padding(slice, end, block.bytes + block.at.bytes)) {
    return corrupt(wrong);
  }
  if (!is_raw_mode(slice.mode)) {
    if (const char* wrong = check_bounds(slice)) return corrupt(wrong);
  }
  const char* wrong = decode_open_slice(slice, SliceBooks(codebook), out);
  return wrong == nullptr ? Status::ok() : corrupt(wrong);
}

Status decode_slices(const uint8_t* bytes, int64_t size, const SliceCodes& all,
                     const Codebook& codebook) {
  for (int32_t first = 0; first < all.dims; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, all.dims - first);
    Block block;
    if (Status s = open_block(bytes, size, &block); !s) return s;
    if (Status s = check_match(block.header, all.tokens, dims, codebook); !s) return s;
    const SliceCodes slice{all.codes + first, all.tokens, dims, all.stride};
    if (Status s = decode_slice(block, codebook, slice); !s) return s;
    bytes += block.at.bytes;
    size -= block.at.bytes;
  }
  return size == 0 ? Status::ok() : corrupt("bytes after the last slice");
}

}  // namespace

Status decode_block(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, int16_t* codes) {
  if (Status s = check_block_shape(tokens, head_dim); !s) return s;
  Status s = decode_slices(bytes, size, {codes, tokens, head_dim, head_dim}, codebook);
  if (!s) std::fill_n(codes, static_cast<int64_t>(tokens) * head_dim, int16_t{0});
  return s;
}

}  // namespace tierkv

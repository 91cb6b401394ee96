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

// A block whose header and sizes have been checked.
struct Block {
  CodedBlockHeader header;
  CodedBlockLayout at;
  const uint8_t* bytes = nullptr;
};

// Fields that are wrong whatever the codebook.
const char* check_fields(const CodedBlockHeader& h) {
  if (h.version != kCodedBlockVersion) return "version is not 1";
  if (const char* wrong = check_block_fields(h)) return wrong;
  if (h.exceptions > kMaxExceptions) return "too many exceptions";
  if (is_raw_mode(h.mode)) {
    const bool clear = h.streams_per_lane == 1 && h.table_id == 0 && h.payload_bits == 0 &&
                       h.exceptions == 0 && (h.mode != BlockMode::kRaw16 || h.base == 0);
    return clear ? nullptr : "a raw block with fields of a coded one";
  }
  const bool known = h.streams_per_lane == 1 || h.streams_per_lane == 2;
  return known ? nullptr : "streams per lane must be 1 or 2";
}

const char* open_block(const uint8_t* bytes, int64_t size, Block* block) {
  if (size < kCodedBlockHeaderBytes) return "shorter than a header";
  block->bytes = bytes;
  block->header = load_header(bytes);
  if (const char* wrong = check_fields(block->header)) return wrong;
  block->at = block_layout(block->header);
  if (block->at.bytes != block->header.units * kBlockAlignment) {
    return "size disagrees with the fields";
  }
  if (block->at.bytes > size) return "cut short";
  return block_checksum(bytes, block->at.bytes) == block->header.checksum ? nullptr : "checksum";
}

const char* check_match(const CodedBlockHeader& h, int32_t tokens, int32_t dims,
                        const Codebook& c) {
  if (h.component != c.component) return "not of the codebook's component";
  if (h.tokens != tokens || h.dims != dims) return "not the expected tokens or channels";
  const bool same = h.mode == c.mode && h.base == c.base && h.table_id == c.table_id &&
                    h.streams_per_lane == c.streams_per_lane;
  return is_raw_mode(h.mode) || same ? nullptr : "made with another codebook";
}

// The bounds of the streams of a coded block, which must ascend.
const char* load_bounds(const Block& block, OpenSlice* slice) {
  const int32_t streams = kWarpLanes * slice->streams_per_lane;
  for (int32_t i = 0; i < streams; ++i) {
    slice->bounds[i] = load_u16(block.bytes + block.at.starts + 2 * i);
  }
  slice->bounds[streams] = block.header.payload_bits;
  if (slice->bounds[0] != 0) return "the first stream does not start at 0";
  const bool ascend = std::is_sorted(slice->bounds, slice->bounds + streams + 1);
  return ascend ? nullptr : "stream starts descend";
}

const char* decode_slice(const Block& block, const Codebook& codebook, const SliceCodes& out) {
  OpenSlice slice;
  open_parts(block.header, block.at, block.bytes, &slice);
  slice.base = block.header.base;
  const char* descends = is_raw_mode(slice.mode) ? nullptr : load_bounds(block, &slice);
  const uint8_t* end = block.bytes + block.at.end;
  if (const char* wrong = check_padding(slice, end, block.bytes + block.at.bytes)) return wrong;
  if (descends != nullptr) return descends;
  return decode_open_slice(slice, SliceBooks(codebook), out);
}

const char* decode_slices(const uint8_t* bytes, int64_t size, const SliceCodes& all,
                          const Codebook& codebook) {
  for (int32_t first = 0; first < all.dims; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, all.dims - first);
    Block block;
    if (const char* wrong = open_block(bytes, size, &block)) return wrong;
    if (const char* wrong = check_match(block.header, all.tokens, dims, codebook)) return wrong;
    const SliceCodes slice{all.codes + first, all.tokens, dims, all.stride};
    if (const char* wrong = decode_slice(block, codebook, slice)) return wrong;
    bytes += block.at.bytes;
    size -= block.at.bytes;
  }
  return size == 0 ? nullptr : "bytes after the last slice";
}

}  // namespace

Status decode_block(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, int16_t* codes) {
  if (Status s = check_block_shape(tokens, head_dim); !s) return s;
  const SliceCodes all = {codes, tokens, head_dim, head_dim};
  const char* wrong = decode_slices(bytes, size, all, codebook);
  if (wrong == nullptr) return Status::ok();
  std::fill_n(codes, static_cast<int64_t>(tokens) * head_dim, int16_t{0});
  return Status(StatusCode::kCorrupt, std::string("coded block: ") + wrong);
}

}  // namespace tierkv

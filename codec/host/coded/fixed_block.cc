// SPDX-License-Identifier: Apache-2.0
#include "codec/format/fixed_block.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace tierkv {
namespace {

// One token of one slice: dims numbers.
struct SliceToken {
  const uint16_t* y;
  int32_t token;  // of the block
  int32_t dims;
};

void put_code(const FixedBlockLayout& at, Component c, int32_t token, int32_t dim, int32_t code,
              uint8_t* slice) {
  const CodePosition p = code_position(at.tile, c, token % kTileTokens, dim);
  uint8_t* word = slice + at.codes_byte(token / kTileTokens) + p.byte;
  store_u32(word, load_u32(word) | static_cast<uint32_t>(code) << p.bit);
}

int32_t get_code(const FixedBlockLayout& at, Component c, int32_t token, int32_t dim,
                 const uint8_t* slice) {
  const CodePosition p = code_position(at.tile, c, token % kTileTokens, dim);
  const uint8_t* word = slice + at.codes_byte(token / kTileTokens) + p.byte;
  return static_cast<int32_t>(load_u32(word) >> p.bit & ((1u << at.tile.type.bits()) - 1u));
}

int32_t params_byte(const FixedBlockLayout& at, int32_t token) {
  return at.metadata_byte(token / kTileTokens) + token_metadata_byte(0, token % kTileTokens);
}

void encode_token(const FixedBlockLayout& at, Component c, const SliceToken& x, uint8_t* slice) {
  float lo = half_to_float(x.y[0]), hi = lo;
  for (int32_t d = 1; d < x.dims; ++d) {
    lo = std::min(lo, half_to_float(x.y[d]));
    hi = std::max(hi, half_to_float(x.y[d]));
  }
  const int32_t levels = at.tile.type.levels();
  const QuantParams params = minmax_params(lo, hi, levels);
  const float scale = half_to_float(params.scale), zero_point = half_to_float(params.zero_point);
  for (int32_t d = 0; d < x.dims; ++d) {
    put_code(at, c, x.token, d, minmax_code(half_to_float(x.y[d]), scale, zero_point, levels),
             slice);
  }
  store_u16(slice + params_byte(at, x.token), params.scale);
  store_u16(slice + params_byte(at, x.token) + 2, params.zero_point);
}

Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, "fixed-rate block: " + std::move(why));
}

// The slice at `bytes`, of channels first_dim and following.
Status decode_slice(const uint8_t* bytes, const CodedBlockHeader& expected, int32_t bits,
                    int32_t head_dim, int32_t first_dim, uint16_t* y) {
  const FixedBlockLayout at = fixed_block_layout(bits, expected.dims);
  uint8_t header[kCodedBlockHeaderBytes];
  store_header(expected, header);
  if (!std::equal(header, header + 14, bytes)) return corrupt("header");
  if (block_checksum_fast(bytes, at.bytes) != load_header(bytes).checksum) {
    return corrupt("checksum");
  }
  for (int32_t t = 0; t < kBlockTokens; ++t) {
    const QuantParams params = {static_cast<uint16_t>(load_u16(bytes + params_byte(at, t))),
                                static_cast<uint16_t>(load_u16(bytes + params_byte(at, t) + 2))};
    if (!params_in_range(params) || (params.scale & 0x8000u) != 0) return corrupt("a scale");
    const float scale = half_to_float(params.scale), zero_point = half_to_float(params.zero_point);
    for (int32_t d = 0; d < expected.dims; ++d) {
      y[t * head_dim + first_dim + d] =
          fixed_value(get_code(at, expected.component, t, d, bytes), scale, zero_point);
    }
  }
  return Status::ok();
}

}  // namespace

void encode_fixed_block(const uint16_t* y, int32_t head_dim, Component c, int32_t bits,
                        std::vector<uint8_t>* out) {
  for (int32_t first = 0; first < head_dim; first += kSliceDims) {
    const int32_t dims = std::min(head_dim - first, kSliceDims);
    const FixedBlockLayout at = fixed_block_layout(bits, dims);
    const size_t begin = out->size();
    out->resize(begin + static_cast<size_t>(at.bytes));
    uint8_t* slice = out->data() + begin;
    store_header(fixed_header(c, bits, dims), slice);
    for (int32_t t = 0; t < kBlockTokens; ++t) {
      encode_token(at, c, {y + int64_t{t} * head_dim + first, t, dims}, slice);
    }
    store_u16(slice + 14, block_checksum_fast(slice, at.bytes));
  }
}

Status decode_fixed_block(const uint8_t* bytes, int64_t size, int32_t head_dim, Component c,
                          int32_t bits, uint16_t* y) {
  Status status = Status::ok();
  if (size != int64_t{fixed_block_units(bits, head_dim)} * kBlockAlignment) {
    status = corrupt("size");
  }
  for (int32_t first = 0; first < head_dim && status; first += kSliceDims) {
    const CodedBlockHeader expected = fixed_header(c, bits, std::min(head_dim - first, kSliceDims));
    status = decode_slice(bytes, expected, bits, head_dim, first, y);
    bytes += int64_t{expected.units} * kBlockAlignment;
  }
  if (!status) std::fill_n(y, kBlockTokens * head_dim, uint16_t{0});
  return status;
}

}  // namespace tierkv

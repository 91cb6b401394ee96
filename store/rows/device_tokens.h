// SPDX-License-Identifier: Apache-2.0
// Raw tokens of a row in device memory: those of its ring and, behind them, those of the call's
// chunk. What RawTokens (store/place/raw_tokens.h) is in host memory.
#pragma once

#include <cstdint>

#include "codec/format/element.h"
#include "store/place/raw_tokens.h"
#include "store/rows/device_row_format.h"

namespace tierkv::store {

// Pairs of bf16 elements as pairs of fp16.
TKV_HD uint32_t bfloats_to_halves(uint32_t x) {
  const uint32_t low = float_to_half(bfloat16_to_float(static_cast<uint16_t>(x)));
  return low |
         static_cast<uint32_t>(float_to_half(bfloat16_to_float(static_cast<uint16_t>(x >> 16))))
             << 16;
}
template <class FourWords>
TKV_HD FourWords four_bfloats_to_halves(FourWords x) {
  return {bfloats_to_halves(x.x), bfloats_to_halves(x.y), bfloats_to_halves(x.z),
          bfloats_to_halves(x.w)};
}

// The largest magnitude among eight elements: their bits without the sign.
template <class FourWords>
TKV_HD int32_t largest_magnitude(const FourWords& x) {
  int32_t bits = 0;
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  for (const uint32_t word : words) {
    bits = most(bits, static_cast<int32_t>(word & 0x7fffu));
    bits = most(bits, static_cast<int32_t>(word >> 16 & 0x7fffu));
  }
  return bits;
}
// What is wrong with elements whose largest magnitude this is, where they become fp16.
TKV_HD StatusCode code_of_magnitude(DType dtype, int32_t bits) {
  const bool is_half = dtype == DType::kFloat16;
  if (bits >= (is_half ? 0x7c00 : 0x7f80)) return StatusCode::kNonFinite;
  // 65536, the smallest bf16 that fp16 does not hold.
  return !is_half && bits >= 0x4780 ? StatusCode::kOutOfRange : StatusCode::kOk;
}

struct DeviceTokens {
  RawLayout layout;
  const uint8_t* raw = nullptr;  // the row's
  int32_t held = 0;              // tokens before those of the chunk
  // This row's elements of the chunk's first token.
  const uint16_t* k = nullptr;
  const uint16_t* v = nullptr;
  int64_t token_stride = 0;             // elements
  const float* significance = nullptr;  // [tokens]; null: unknown
  DType dtype = DType::kFloat16;

  // fp16. The position is in the ring or in the chunk.
  TKV_HD uint16_t half_at(Component c, int32_t position, int32_t dim) const {
    if (position < held) {
      return *reinterpret_cast<const uint16_t*>(raw + layout.ring_byte(c, position, dim));
    }
    const uint16_t x =
        (c == Component::kKey ? k : v)[(position - held) * token_stride + int64_t{dim}];
    return dtype == DType::kFloat16 ? x : float_to_half(bfloat16_to_float(x));
  }
  TKV_HD Importance importance(int32_t position) const {
    if (position < held) {
      return ring_importance(*reinterpret_cast<const RawScore*>(raw + layout.score_byte(position)));
    }
    if (significance == nullptr) return {};
    return chunk_importance(held, significance[position - held]);
  }
};

TKV_HD DeviceTokens device_tokens(const DeviceStoreView& view, const DeviceWorks& works,
                                  int32_t entry, int32_t kv_head) {
  const auto [sequence, slot, layer] = works.entry(entry);
  DeviceTokens t;
  t.layout = view.raw;
  t.raw = view.slots.raw(slot, layer) + int64_t{kv_head} * view.raw.row_bytes;
  t.held = works.from[entry].tokens;
  t.dtype = works.chunk.dtype;
  t.token_stride = int64_t{view.num_kv_heads} * view.head_dim;
  if (works.chunk.k == nullptr) return t;
  const int64_t first =
      sequence * works.chunk.tokens * t.token_stride + int64_t{kv_head} * view.head_dim;
  t.k = works.chunk.k + first;
  t.v = works.chunk.v + first;
  if (works.chunk.significance != nullptr) {
    t.significance = works.chunk.significance +
                     (int64_t{sequence} * view.num_kv_heads + kv_head) * works.chunk.stride;
  }
  return t;
}

}  // namespace tierkv::store

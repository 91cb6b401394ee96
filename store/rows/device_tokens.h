// SPDX-License-Identifier: Apache-2.0
// What kernels of row formats need beside RawTokens (store/place/raw_tokens.h): elements of chunks,
// several at once.
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

// Those of a row of an entry of a call.
TKV_HD RawTokens device_tokens(const DeviceStoreView& view, const DeviceWorks& works, int32_t entry,
                               int32_t kv_head) {
  const auto [sequence, slot, layer] = works.entry(entry);
  return raw_tokens(view.raw, view.raw_row(slot, layer, kv_head), works.from[entry].tokens,
                    works.chunk, {sequence, kv_head, view.num_kv_heads});
}

}  // namespace tierkv::store

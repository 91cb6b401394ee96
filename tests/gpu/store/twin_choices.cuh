// SPDX-License-Identifier: Apache-2.0
// Choices of twins that several tests make.
#pragma once

#include <cstdint>
#include <utility>

#include "tests/gpu/store/kv_store_twins.cuh"

namespace tierkv::testing {

inline TwinChoice with(BodyFormat format, int32_t head_dim, int32_t kv_heads, int32_t group) {
  TwinChoice c;
  c.format = std::move(format);
  c.head_dim = head_dim;
  c.num_kv_heads = kv_heads;
  c.group = group;
  return c;
}
inline CodedFormat coded(int32_t unit_tokens) {
  CodedFormat format;
  format.unit_tokens = unit_tokens;
  return format;
}
// Nothing leaves the window.
inline TwinChoice without_bodies(int32_t head_dim, int32_t group) {
  TwinChoice c = with(TiersFormat{}, head_dim, 2, group);
  c.window = 160;
  return c;
}

}  // namespace tierkv::testing

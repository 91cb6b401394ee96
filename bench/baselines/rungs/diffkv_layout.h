// SPDX-License-Identifier: Apache-2.0
// DiffKV's page layout (section 6.2): where the codes of a page lie when CUDA cores read them.
//
//   keys    [F / (Kvec * Kgroup), N, Kgroup, Kvec]    F = 128 dims, N = tokens of a page
//   values  [F / Vgroup, N / Vvec, Vgroup, Vvec]
//
// Here Kvec is what 16 bytes hold and Kgroup 4, so a warp reads 8 tokens' 16-byte pieces at once;
// Vgroup is 8 and Vvec 16 tokens (8 of raw values), so a warp reads four times 8 dims. Codes are
// packed lowest bit first. Scale and zero point of token r are the halves at bytes 4r and 4r + 2 of
// their segment. The segments are those of our pages, byte for byte as long: PageLayout says where.
#pragma once

#include <cstdint>

#include "codec/format/page_layout.h"

namespace tierkv {

inline constexpr int32_t kDiffkvKeyGroup = 4;
inline constexpr int32_t kDiffkvValueGroup = 8;
inline constexpr int32_t kDiffkvMaxPageTokens = 512;  // the scores of a page lie in shared memory

TKV_HD constexpr int32_t diffkv_key_vector(int32_t bits) {
  return 128 / bits;
}
TKV_HD constexpr int32_t diffkv_value_vector(int32_t bits) {
  return bits == 16 ? 8 : 16;
}
// Keys of 16, 8 and 4 bits, values of 16, 8, 4 and 2: 128 dims must be whole groups of vectors.
TKV_HD constexpr bool has_diffkv_layout(const PageLayout& page) {
  return page.head_dim() == 128 && page.k_tile.type.bits() >= 4 && page.k_groups <= 1 &&
         page.v_groups <= 1 && page.tokens <= kDiffkvMaxPageTokens;
}

// A token and a dim of a page.
struct DiffkvPlace {
  int32_t token, dim;
};

// The place of element i of a page of `tokens` tokens; its code is at bit i * bits of the segment.
TKV_HD constexpr DiffkvPlace diffkv_key_place(int32_t bits, int32_t tokens, int32_t i) {
  const int32_t vector = diffkv_key_vector(bits), group = kDiffkvKeyGroup;
  const int32_t chunk = i / (tokens * group * vector), in_chunk = i % (group * vector);
  return {i / (group * vector) % tokens, chunk * group * vector + in_chunk};
}
TKV_HD constexpr DiffkvPlace diffkv_value_place(int32_t bits, int32_t tokens, int32_t i) {
  const int32_t vector = diffkv_value_vector(bits), group = kDiffkvValueGroup;
  const int32_t chunk = i / (tokens * group), dim = i / vector % group;
  return {i / (vector * group) % (tokens / vector) * vector + i % vector, chunk * group + dim};
}

// Rewrites a page of ours in this layout, code by code: `from` and `to` are different memory of
// page.scores bytes. Every token of the page is rewritten, whether it is in use or not.
void transcode_page(const PageLayout& page, const uint8_t* from, uint8_t* to);

}  // namespace tierkv

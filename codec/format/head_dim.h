// SPDX-License-Identifier: Apache-2.0
// The head_dims that pages, blocks and kernels have.
#pragma once

#include <cstdint>
#include <type_traits>

#include "tierkv/half.h"

namespace tierkv {

TKV_HD constexpr bool is_known_head_dim(int32_t head_dim) {
  return head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

// call(head_dim as a constant); one that is none of them counts as 256.
template <class Call>
auto with_head_dim(int32_t head_dim, const Call& call) {
  switch (head_dim) {
    case 64:
      return call(std::integral_constant<int32_t, 64>{});
    case 96:
      return call(std::integral_constant<int32_t, 96>{});
    case 128:
      return call(std::integral_constant<int32_t, 128>{});
    default:
      return call(std::integral_constant<int32_t, 256>{});
  }
}

}  // namespace tierkv

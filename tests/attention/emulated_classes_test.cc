// SPDX-License-Identifier: Apache-2.0
// Rows of several classes of heads, and codes clipped at the norm, by the decode kernel's source on
// the host.
#include <gtest/gtest.h>

#include "tests/attention/emulated_decode.h"

namespace tierkv {
namespace {

using test::check;
using test::tier;
using test::WorldShape;

// Clipped at the norm, 2 bits are read as any others: their scale and zero point say all.
TEST(EmulatedDecode, TwoBitsClippedAtTheNorm) {
  for (const char* format : {"k2nv2n", "k4v2n", "k2nv4"}) {
    SCOPED_TRACE(format);
    WorldShape shape;
    shape.tiers = {{0, *parse_tier_format(format)}, tier(2, 16, 16)};
    shape.tokens = {{37, 20}, {196, 0}};
    check(shape, 3);
  }
}

// With three and four classes the rows of a launch differ in formats, and so may the tokens of an
// item.
TEST(EmulatedDecode, ClassesOfHeads) {
  const TierFormat k4v2 = *parse_tier_format("k4v2n"), k2v2 = *parse_tier_format("k2nv2n");
  const TierFormat k4v4 = token_wise_tier(4, 4), k8v4 = token_wise_tier(8, 4);
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 4, 5, 16}) {
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " group " << group);
      WorldShape shape;
      shape.head_dim = head_dim;
      shape.group = group;
      shape.num_kv_heads = 7;
      shape.page_records = false;
      if (head_dim == 128) shape.page_bytes = 13312;
      shape.tiers = {{0, k8v4}, {1, k8v4}, tier(2, 16, 16)};
      shape.classes = {{k4v4, k4v2, raw_tier()}, {k4v2, k2v2, raw_tier()}};
      shape.tokens = {{70, 150, 20}, {0, 0, 0}, {0, 177, 3}};
      check(shape, group == 5 ? 3 : 1);
    }
  }
}

// What only the full kernels do: several queries, learned sinks, bfloat16.
TEST(EmulatedDecode, ClassesOfHeadsInEveryMode) {
  const TierFormat k2v2 = *parse_tier_format("k2nv2n");
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const int32_t q_len : {1, 3, 8}) {
        SCOPED_TRACE(::testing::Message()
                     << "head_dim " << head_dim << " " << dtype_name(dtype) << " q_len " << q_len);
        WorldShape shape;
        shape.head_dim = head_dim;
        shape.dtype = dtype;
        shape.q_len = q_len;
        shape.group = 3;
        shape.num_kv_heads = 4;
        shape.sink_scale = q_len == 3 ? 3 : 0;
        shape.jitter = 9;
        shape.page_records = q_len != 8;
        shape.tiers = {tier(0, 8, 8), tier(1, 8, 2), tier(2, 16, 16)};
        shape.classes = {{token_wise_tier(4, 4), k2v2, raw_tier()},
                         {token_wise_tier(2, 2), k2v2, raw_tier()},
                         {raw_tier(), token_wise_tier(8, 4), raw_tier()}};
        shape.tokens = {{40, 60, 20}, {0, 33, 17}};
        check(shape, 2);
      }
    }
  }
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// The reference of attention over channel blocks against softmax written out over the values that
// came in, where they are kept exactly.
#include "bench/baselines/channel/channel_attention.h"

#include <gtest/gtest.h>

#include <cmath>

#include "attention/channel/channel_plan.h"
#include "tests/baselines/channel_world.h"

namespace tierkv::testing {
namespace {

// Values that 4 bits keep exactly: every channel of a block, and every token, holds 0 and 15 times
// its power of two and multiples between.
std::vector<uint16_t> exact_values(std::mt19937* rng, int32_t tokens, int32_t dim,
                                   bool by_channel) {
  std::uniform_int_distribution<int32_t> code(0, 15);
  std::vector<uint16_t> x(tokens * dim);
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t d = 0; d < dim; ++d) {
      const int32_t in_group = by_channel ? t % 64 : d, unit = by_channel ? d : t;
      const int32_t c = in_group == 3 ? 0 : in_group == 9 ? 15 : code(*rng);
      x[t * dim + d] = float_to_half(std::ldexp(static_cast<float>(c), unit % 3 - 5));
    }
  }
  return x;
}

TEST(ChannelAttentionReference, IsTheSoftmaxOverBlocksAndResidual) {
  const uint32_t seed = std::random_device{}();
  std::mt19937 rng(seed);
  const int32_t dim = 64, tokens = 2 * 64 + 21, group = 3;
  const ChannelLayout layout = *make_channel_layout(channel_format(4, 4, 64), dim);
  ChannelWorld w(&rng, layout, 1, 3);
  const std::vector<uint16_t> k = exact_values(&rng, tokens, dim, true);
  const std::vector<uint16_t> v = exact_values(&rng, tokens, dim, false);
  const std::vector<int32_t> indptr = {0, tokens};
  ASSERT_TRUE(
      fill_channel_host(w.cache(), {k.data(), v.data(), indptr.data(), 1, w.status.data()}));
  ASSERT_EQ(w.status[0], StatusCode::kOk);
  std::normal_distribution<float> normal(0, 0.3f);
  std::vector<uint16_t> q(group * dim);
  for (uint16_t& x : q) x = float_to_half(normal(rng));
  ChannelAttention call;
  call.group = group;
  call.sm_scale = 0.2;
  // 16-byte aligned, as the kernel wants it.
  alignas(16) uint16_t queries[3 * 64];
  std::copy_n(q.begin(), group * dim, queries);
  call.q = queries;
  const Result<ChannelOutput> found = attend_channel_reference(w.cache(), call);
  ASSERT_TRUE(found.is_ok()) << found.status().message();
  for (int32_t h = 0; h < group; ++h) {
    std::vector<double> p(tokens), out(dim, 0.0);
    double sum = 0;
    for (int32_t t = 0; t < tokens; ++t) {
      double dot = 0;
      for (int32_t d = 0; d < dim; ++d) {
        dot += static_cast<double>(half_to_float(q[h * dim + d])) * half_to_float(k[t * dim + d]);
      }
      sum += p[t] = std::exp(call.sm_scale * dot);
    }
    for (int32_t t = 0; t < tokens; ++t) {
      for (int32_t d = 0; d < dim; ++d) out[d] += p[t] / sum * half_to_float(v[t * dim + d]);
    }
    EXPECT_NEAR(found->lse[h], std::log(sum), 1e-12 * (1 + std::fabs(std::log(sum)))) << seed;
    for (int32_t d = 0; d < dim; ++d) EXPECT_NEAR(found->out[h * dim + d], out[d], 1e-12) << seed;
  }
}

TEST(ChannelAttentionReference, EmptyRowsAndCorruptOnes) {
  std::mt19937 rng(std::random_device{}());
  const ChannelLayout layout = *make_channel_layout(channel_format(2, 2, 128), 128);
  ChannelWorld w(&rng, layout, 2, 2);
  alignas(16) uint16_t q[2 * 128] = {};
  ChannelAttention call;
  call.sm_scale = 1;
  call.q = q;
  const Result<ChannelOutput> empty = attend_channel_reference(w.cache(), call);
  ASSERT_TRUE(empty.is_ok());
  EXPECT_EQ(empty->lse[1], -INFINITY);
  EXPECT_EQ(empty->out, std::vector<double>(2 * 128, 0.0));
  const auto code = [&] { return attend_channel_reference(w.cache(), call).status().code(); };
  w.block_count[1] = 3;
  EXPECT_EQ(code(), StatusCode::kCorrupt);
  w.block_count[1] = 1;
  w.table[2] = -1;
  EXPECT_EQ(code(), StatusCode::kCorrupt);
  w.block_count[1] = 0;
  w.residual_tokens[0] = 128;
  EXPECT_EQ(code(), StatusCode::kCorrupt);
  w.residual_tokens[0] = 0;
  call.group = 17;
  EXPECT_EQ(code(), StatusCode::kUnsupported);
  call.group = 1;
  call.sm_scale = 0;
  EXPECT_EQ(code(), StatusCode::kInvalidArgument);
  call.sm_scale = 1;
  call.q = q + 1;
  EXPECT_EQ(code(), StatusCode::kInvalidArgument);
}

TEST(ChannelPlan, GroupsOfQueryHeads) {
  EXPECT_TRUE(validate_channel_group(16));
  EXPECT_EQ(validate_channel_group(17).code(), StatusCode::kUnsupported);
  EXPECT_EQ(validate_channel_group(0).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv::testing

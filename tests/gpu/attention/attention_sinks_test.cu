// SPDX-License-Identifier: Apache-2.0
// Learned sinks on a GPU: in the attention kernels, and added to finished results.
#include "attention/core/merge.h"

#include "codec/format/element.h"
#include "tests/gpu/attention/attention_world.cuh"

namespace tierkv {
namespace {

using test::check;
using test::DeviceArray;
using test::three_tiers;
using test::WorldShape;

// Rows without tokens, of one item and of many CTAs.
std::vector<std::vector<int32_t>> ragged() {
  return {{65, 17, 40}, {0, 0, 0}, {0, 200, 3}, {0, 0, 1}, {64, 3000, 900}};
}

TEST(Sinks, SmallRowsOfEveryHeadDimAndGroup) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 4, 5, 8, 16}) {
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        SCOPED_TRACE(::testing::Message()
                     << "head_dim " << head_dim << " group " << group << " " << dtype_name(dtype));
        WorldShape shape;
        shape.sink_scale = 3;
        shape.head_dim = head_dim;
        shape.group = group;
        shape.dtype = dtype;
        shape.tiers = three_tiers();
        shape.tokens = ragged();
        check(shape);
      }
    }
  }
}

TEST(Sinks, OfSeveralQueries) {
  for (const int32_t q_len : {2, 8}) {
    WorldShape shape;
    shape.sink_scale = 3;
    shape.q_len = q_len;
    shape.group = 5;
    shape.tiers = three_tiers();
    shape.tail.tier = 0;
    shape.tokens = ragged();
    check(shape);
  }
}

// The host's bits but for exp2 and log2: a unit in the last place of the result.
TEST(Sinks, SmallApplyIsThatOfTheHost) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  constexpr int32_t kRows = 9, kHeads = 5, kDim = 96;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const bool is_bfloat16 = dtype == DType::kBFloat16;
    std::vector<uint16_t> out(kRows * kHeads * kDim);
    for (uint16_t& x : out) {
      x = is_bfloat16 ? float_to_bfloat16(normal(rng)) : float_to_half(normal(rng));
    }
    std::vector<float> lse(kRows * kHeads);
    for (float& x : lse) x = 3 * normal(rng);
    lse[3] = lse[11] = -INFINITY;
    const std::vector<float> sinks = {normal(rng), 4 * normal(rng), -INFINITY, 1e4f, -1e4f};
    DeviceArray<uint16_t> device_out(out);
    DeviceArray<float> device_lse(lse), device_sinks(sinks);
    ASSERT_TRUE(apply_sinks_host({out.data(), lse.data(), sinks.data(), kRows, kHeads, kDim, dtype})
                    .is_ok());
    const Status s = apply_sinks(
        {device_out.get(), device_lse.get(), device_sinks.get(), kRows, kHeads, kDim, dtype},
        nullptr);
    ASSERT_TRUE(s.is_ok()) << s.message();
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<uint16_t> got = device_out.read();
    const std::vector<float> got_lse = device_lse.read();
    for (size_t i = 0; i < lse.size(); ++i) {
      if (lse[i] == -INFINITY) {
        EXPECT_EQ(got_lse[i], -INFINITY);
      } else {
        EXPECT_NEAR(got_lse[i], lse[i], 1e-6 + 3e-7 * std::fabs(lse[i])) << i;
      }
    }
    const double unit = is_bfloat16 ? 0x1p-7 : 0x1p-10;
    for (size_t i = 0; i < out.size(); ++i) {
      const double want = raw_to_float(dtype, out[i]);
      ASSERT_NEAR(raw_to_float(dtype, got[i]), want, unit * std::fabs(want) + 0x1p-24) << i;
    }
  }
}

TEST(Sinks, NothingToDo) {
  std::vector<float> x = {1};
  DeviceArray<float> memory(x);
  EXPECT_TRUE(
      apply_sinks({memory.get(), memory.get(), memory.get(), 0, 1, 64, DType::kFloat16}, nullptr)
          .is_ok());
  EXPECT_FALSE(
      apply_sinks({memory.get(), memory.get(), nullptr, 1, 1, 64, DType::kFloat16}, nullptr)
          .is_ok());
}

}  // namespace
}  // namespace tierkv

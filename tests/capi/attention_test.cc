// SPDX-License-Identifier: Apache-2.0
// Attention through the C ABI, as far as it needs no device: configurations, merge on the host,
// refusals.
#include "tierkv/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/support/c_structs.h"
#include "tests/support/random_input.h"

namespace tierkv::test {
namespace {

using testing::RandomInput;

class CapiAttention : public ::testing::Test {
 protected:
  CapiAttention() {
    for (int32_t t = 0; t < 2; ++t) {
      formats_[t] = make<tkv_tier_format>();
      formats_[t].k_bits = 8 >> t;
      formats_[t].v_bits = 4 >> t;
      tiers_[t] = make<tkv_attention_tier>();
      tiers_[t].side = t;
      tiers_[t].format = &formats_[t];
    }
    config_ = make<tkv_attention_config>();
    config_.num_q_heads = 32;
    config_.num_kv_heads = 8;
    config_.head_dim = 128;
    config_.page_bytes = 13312;
    config_.tiers = tiers_;
    config_.num_tiers = 2;
  }
  void refused(const tkv_attention_config& config, tkv_status status, const char* word) {
    tkv_error error = make<tkv_error>();
    EXPECT_EQ(tkv_attention_validate(&config, &error), status) << error.message;
    EXPECT_NE(std::strstr(error.message, word), nullptr) << error.message;
    tkv_attention* attention = nullptr;
    EXPECT_EQ(tkv_attention_create(&config, &attention, &error), status) << error.message;
    EXPECT_EQ(attention, nullptr);
  }

  tkv_tier_format formats_[2];
  tkv_attention_tier tiers_[2];
  tkv_attention_config config_;
};

TEST_F(CapiAttention, ConfigsAreRefusedByName) {
  EXPECT_EQ(tkv_attention_validate(&config_, nullptr), TKV_OK);
  tkv_attention_config c = config_;
  c.head_dim = 80;
  refused(c, TKV_UNSUPPORTED, "head_dim");
  c = config_;
  c.sm_scale = -1;
  refused(c, TKV_INVALID_ARGUMENT, "sm_scale");
  c = config_;
  c.sliding_window_tokens = 5;
  refused(c, TKV_UNSUPPORTED, "sliding_window_tokens");
  c = config_;
  c.num_tiers = 4;
  refused(c, TKV_INVALID_ARGUMENT, "num_tiers");
  c = config_;
  c.tiers = nullptr;
  refused(c, TKV_INVALID_ARGUMENT, "tiers is null");
  c = config_;
  c.dtype = 3;
  refused(c, TKV_INVALID_ARGUMENT, "dtype");
  tiers_[1].format = nullptr;
  refused(config_, TKV_INVALID_ARGUMENT, "format is null");
  tiers_[1].format = &formats_[1];
  tiers_[1].side = 0;
  refused(config_, TKV_INVALID_ARGUMENT, "side is used twice");
  tiers_[1].struct_size -= 1;
  refused(config_, TKV_INVALID_ARGUMENT, "tiers differ in struct_size");
}

TEST_F(CapiAttention, TiersOfALaterVersionAreReadWithTheirOwnSize) {
  struct Later {
    tkv_attention_tier tier;
    int64_t new_field;
  } later[2] = {{tiers_[0], 0}, {tiers_[1], 0}};
  for (Later& t : later) t.tier.struct_size = sizeof(Later);
  config_.tiers = &later[0].tier;
  EXPECT_EQ(tkv_attention_validate(&config_, nullptr), TKV_OK);
  later[1].tier.side = 0;
  refused(config_, TKV_INVALID_ARGUMENT, "side is used twice");
  later[1].tier.side = 1;
  later[1].new_field = 1;
  refused(config_, TKV_UNSUPPORTED, "newer");
}

TEST_F(CapiAttention, ABuildWithoutCudaRefusesToRunByName) {
  tkv_error error = make<tkv_error>();
  tkv_attention* attention = nullptr;
  const tkv_status status = tkv_attention_create(&config_, &attention, &error);
  tkv_merge_call merge = make<tkv_merge_call>();
  merge.head_dim = 2;
  std::vector<uint16_t> out(2);
  float lse = 0;
  merge.a_out = merge.b_out = merge.out = out.data();
  merge.a_lse = merge.b_lse = merge.lse = &lse;
  if (TIERKV_HAVE_CUDA) {
    EXPECT_TRUE(status == TKV_OK || status == TKV_CUDA) << tkv_status_string(status);
  } else {
    EXPECT_EQ(status, TKV_UNSUPPORTED);
    EXPECT_NE(std::strstr(error.message, "without CUDA"), nullptr) << error.message;
    EXPECT_EQ(tkv_merge_attention(&merge, nullptr, &error), TKV_UNSUPPORTED);
  }
  tkv_attention_destroy(attention);
}

TEST(CapiMerge, IsThatOfTheCppApi) {
  RandomInput input;
  constexpr int32_t kRows = 9, kDim = 128;
  const auto a = input.values(DType::kFloat16, kRows, kDim),
             b = input.values(DType::kFloat16, kRows, kDim);
  std::vector<float> a_lse(kRows), b_lse(kRows), lse(kRows, -77), other_lse(kRows, -77);
  for (int32_t r = 0; r < kRows; ++r) {
    a_lse[r] = input.real(-3, 3);
    b_lse[r] = input.real(-3, 3);
  }
  a_lse[4] = -std::numeric_limits<float>::infinity();
  std::vector<uint8_t> out(a.size(), 0x5a), other(a.size(), 0x5a);
  tkv_merge_call c = make<tkv_merge_call>();
  c.a_out = a.data();
  c.a_lse = a_lse.data();
  c.b_out = b.data();
  c.b_lse = b_lse.data();
  c.out = out.data();
  c.lse = lse.data();
  c.rows = kRows;
  c.head_dim = kDim;
  tkv_error error = make<tkv_error>();
  ASSERT_EQ(tkv_merge_attention_host(&c, &error), TKV_OK) << error.message;
  ASSERT_TRUE(merge_attention_host({{a.data(), a_lse.data()},
                                    {b.data(), b_lse.data()},
                                    other.data(),
                                    other_lse.data(),
                                    kRows,
                                    kDim,
                                    DType::kFloat16}));
  EXPECT_EQ(out, other);
  EXPECT_EQ(lse, other_lse);
  EXPECT_EQ(std::memcmp(&out[4 * kDim * 2], &b[4 * kDim * 2], kDim * 2), 0);
  c.head_dim = 3;
  EXPECT_EQ(tkv_merge_attention_host(&c, &error), TKV_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(error.message, "head_dim"), nullptr) << error.message;
}

TEST(CapiSinks, AreThoseOfTheCppApi) {
  RandomInput input;
  constexpr int32_t kRows = 5, kHeads = 3, kDim = 96;
  const auto x = input.values(DType::kFloat16, kRows * kHeads, kDim);
  std::vector<float> sinks(kHeads), start(kRows * kHeads);
  for (float& s : sinks) s = input.real(-4, 4);
  for (float& l : start) l = input.real(-3, 3);
  start[4] = -std::numeric_limits<float>::infinity();
  std::vector<uint8_t> out = x, other = x;
  std::vector<float> lse = start, other_lse = start;
  tkv_sink_call c = make<tkv_sink_call>();
  c.out = out.data();
  c.lse = lse.data();
  c.sinks = sinks.data();
  c.rows = kRows;
  c.num_q_heads = kHeads;
  c.head_dim = kDim;
  tkv_error error = make<tkv_error>();
  ASSERT_EQ(tkv_apply_sinks_host(&c, &error), TKV_OK) << error.message;
  ASSERT_TRUE(apply_sinks_host(
      {other.data(), other_lse.data(), sinks.data(), kRows, kHeads, kDim, DType::kFloat16}));
  EXPECT_EQ(out, other);
  EXPECT_EQ(lse, other_lse);
  EXPECT_NE(out, x);
  EXPECT_FLOAT_EQ(lse[4], sinks[1]);  // through log2 units and back: two roundings
  c.sinks = nullptr;
  EXPECT_EQ(tkv_apply_sinks_host(&c, &error), TKV_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(error.message, "sinks"), nullptr) << error.message;
  EXPECT_EQ(tkv_apply_sinks(&c, nullptr, &error),
            TIERKV_HAVE_CUDA ? TKV_INVALID_ARGUMENT : TKV_UNSUPPORTED);
}

}  // namespace
}  // namespace tierkv::test

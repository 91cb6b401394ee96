// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "attention/core/workspace.h"
#include "tierkv/attention.h"

namespace tierkv {
namespace {

using ::testing::HasSubstr;

AttentionConfig good_config() {
  AttentionConfig config;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.sm_scale = 0.088;
  config.page_bytes = 13312;
  config.num_tiers = 2;
  config.tiers[0] = {0, token_wise_tier(8, 4)};
  config.tiers[1] = {1, token_wise_tier(4, 2)};
  return config;
}

struct BadConfig {
  const char* name;  // what the message must mention
  StatusCode code;
  std::function<void(AttentionConfig&)> spoil;
};

TEST(AttentionConfig, GoodOneIsAccepted) {
  const Status s = good_config().validate();
  EXPECT_TRUE(s.is_ok()) << s.message();
}

TEST(AttentionConfig, WhatIsNotSupportedIsNamed) {
  const auto invalid = StatusCode::kInvalidArgument, unsupported = StatusCode::kUnsupported;
  const BadConfig cases[] = {
      {"num_layers", invalid, [](auto& c) { c.num_layers = 0; }},
      {"num_kv_heads", invalid, [](auto& c) { c.num_kv_heads = 0; }},
      {"num_q_heads", invalid, [](auto& c) { c.num_q_heads = 33; }},
      {"group of 18", unsupported, [](auto& c) { c.num_q_heads = 144; }},
      {"head_dim 80", unsupported, [](auto& c) { c.head_dim = 80; }},
      {"q_len", invalid, [](auto& c) { c.q_len = 0; }},
      {"q_len 9", unsupported, [](auto& c) { c.q_len = 9; }},
      {"float32", unsupported, [](auto& c) { c.dtype = DType::kFloat32; }},
      {"sm_scale", invalid, [](auto& c) { c.sm_scale = std::numeric_limits<double>::quiet_NaN(); }},
      {"sliding_window", unsupported, [](auto& c) { c.sliding_window_tokens = 100; }},
      {"num_tiers", invalid, [](auto& c) { c.num_tiers = 4; }},
      {"page", invalid, [](auto& c) { c.page_bytes = 1000; }},
      {"side", invalid, [](auto& c) { c.tiers[0].side = 4; }},
      {"side is used twice", invalid, [](auto& c) { c.tiers[1].side = 0; }},
      {"1 bit", unsupported, [](auto& c) { c.tiers[1].format = token_wise_tier(4, 1); }},
      {"sub-groups", unsupported, [](auto& c) { c.tiers[1].format.k.group = 64; }},
      {"basis", unsupported, [](auto& c) { c.tiers[1].format.v.basis = BasisKind::kHadamard; }},
      {"entropy", unsupported, [](auto& c) { c.tiers[0].format.k.entropy = Entropy::kHuffman; }},
  };
  for (const BadConfig& bad : cases) {
    AttentionConfig config = good_config();
    bad.spoil(config);
    const Status s = config.validate();
    EXPECT_EQ(s.code(), bad.code) << bad.name;
    EXPECT_THAT(s.message(), HasSubstr(bad.name));
  }
}

struct BadTail {
  const char* name;  // what the message must mention
  std::function<void(AttentionTail&)> spoil;
};

TEST(AttentionConfig, ClassesThatAreNotSupportedAreNamed) {
  const auto invalid = StatusCode::kInvalidArgument, unsupported = StatusCode::kUnsupported;
  static const std::vector<uint8_t> kOfHead(128 * 64 * 2, 1);
  const auto good = [] {
    AttentionConfig c = good_config();
    c.classes.count = 2;
    c.classes.of_head = kOfHead.data();
    c.classes.format[0][0] = token_wise_tier(4, 4);
    c.classes.format[0][1] = *parse_tier_format("k2nv2n");
    return c;
  };
  EXPECT_TRUE(good().validate()) << good().validate().message();
  static const std::vector<uint8_t> kStray = [] {
    std::vector<uint8_t> classes(8, 0);
    classes[7] = 2;
    return classes;
  }();
  const BadConfig cases[] = {
      {"classes.count", invalid, [](auto& c) { c.classes.count = 5; }},
      {"classes.count", invalid, [](auto& c) { c.classes.count = 0; }},
      {"classes.of_head is null", invalid, [](auto& c) { c.classes.of_head = nullptr; }},
      {"classes.of_head[7]", invalid, [](auto& c) { c.classes.of_head = kStray.data(); }},
      {"64 kv_heads", unsupported, [](auto& c) { c.num_q_heads = c.num_kv_heads = 65; }},
      {"128 layers", unsupported, [](auto& c) { c.num_layers = 129; }},
      {"class 1: tier 0", unsupported,
       [](auto& c) { c.classes.format[0][0] = token_wise_tier(2, 4); }},
      {"class 1: tier 1", unsupported,
       [](auto& c) { c.classes.format[0][1] = token_wise_tier(16, 4); }},
      {"class 0: tier 1", unsupported, [](auto& c) { c.tiers[1].format = token_wise_tier(2, 8); }},
      {"class 1: tier 0", unsupported, [](auto& c) { c.classes.format[0][0].k.group = 64; }},
  };
  for (const BadConfig& bad : cases) {
    AttentionConfig c = good();
    bad.spoil(c);
    const Status s = c.validate();
    EXPECT_EQ(s.code(), bad.code) << bad.name << ": " << s.message();
    EXPECT_NE(std::string(s.message()).find(bad.name), std::string::npos) << s.message();
  }
}

TEST(AttentionTail, OneOutOfRangeIsNamed) {
  AttentionConfig config = good_config();
  config.q_len = 3;
  const int32_t newest = 0;
  const auto tail = [&](int32_t tier, int32_t first, int32_t tokens) {
    return AttentionTail{tier, &newest, first, tokens};
  };
  for (const AttentionTail& good :
       {tail(-1, 0, 0), tail(1, kMaxTierTokens, kMaxTierTokens), tail(0, 4, 3)}) {
    const Status s = validate_tail(config, good);
    EXPECT_TRUE(s.is_ok()) << s.message();
  }
  const BadTail cases[] = {
      {"tail.tier", [](auto& t) { t.tier = -2; }},
      {"tail.tier", [](auto& t) { t.tier = 2; }},
      {"tail.ring_first", [](auto& t) { t.ring_first = -1; }},
      {"tail.ring_first", [](auto& t) { t.ring_first = kMaxTierTokens + 1; }},
      {"tail.ring_tokens is out of range", [](auto& t) { t.ring_tokens = -1; }},
      {"tail.ring_tokens is out of range", [](auto& t) { t.ring_tokens = kMaxTierTokens + 1; }},
      {"tail.ring_tokens is below q_len", [](auto& t) { t.ring_tokens = 2; }},
      {"tail.newest", [](auto& t) { t.newest = nullptr; }},
  };
  for (const BadTail& bad : cases) {
    AttentionTail spoiled = tail(0, 4, 8);
    bad.spoil(spoiled);
    config.q_len = 3;
    const Status s = validate_tail(config, spoiled);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument) << bad.name;
    EXPECT_THAT(s.message(), HasSubstr(bad.name));
    config.q_len = 1;  // has no tail
    EXPECT_TRUE(validate_tail(config, spoiled).is_ok()) << bad.name;
  }
}

TEST(AttentionWorkspace, PartsDoNotOverlap) {
  AttentionConfig config = good_config();
  config.num_layers = 3;
  AttentionGrid grid;
  grid.num_ctas = 132;
  const WorkspaceLayout w = workspace_layout(config, grid, 5);
  EXPECT_GE(w.part_states, w.items + 3 * 133 * sizeof(WorkItem));
  EXPECT_GE(w.parts, w.part_states + 2 * 132 * 4 * sizeof(SoftmaxState));
  EXPECT_GE(w.row_status, w.parts + 2 * 132 * 4 * 128 * 4);
  EXPECT_GE(w.bytes, w.row_status + 3 * 5 * 8 * 4);
  EXPECT_EQ(attention_workspace_bytes(config, grid, 5), w.bytes);
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// What a call of coded attention may ask for; its kernels are tested on a GPU.
#include "attention/coded/coded_attention.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tierkv {
namespace {

DeviceCodebook book(Component component, int32_t table_id) {
  DeviceCodebook b;
  b.max_length = 10;
  b.levels = 16;
  b.streams_per_lane = 2;
  b.component = component;
  b.table_id = static_cast<uint8_t>(table_id);
  return b;
}

struct Call {
  std::vector<DeviceCodebook> others[2];
  CodedAttention call;

  Call() {
    for (int32_t i = 1; i < 3; ++i) {
      others[0].push_back(book(Component::kKey, i));
      others[1].push_back(book(Component::kValue, i));
    }
    call.keys.codebook = book(Component::kKey, 0);
    call.values.codebook = book(Component::kValue, 0);
    call.num_rows = 6;
    call.columns = 4;
    call.head_dim = 128;
    call.sm_scale = 1;
    call.max_block_bytes = 5120;
  }
  void use_families() {
    call.keys.others = others[0].data();
    call.values.others = others[1].data();
    call.keys.num_others = static_cast<int32_t>(others[0].size());
    call.values.num_others = static_cast<int32_t>(others[1].size());
  }
};

TEST(CodedAttentionCall, IsPlainUnlessItAsksForMore) {
  Call c;
  EXPECT_TRUE(c.call.validate());
  EXPECT_TRUE(c.call.is_plain());
  c.call.columns = 40;
  EXPECT_TRUE(c.call.validate());
  EXPECT_TRUE(c.call.is_plain());
  c.call.q_len = 8;
  c.call.num_kv_heads = 3;
  EXPECT_TRUE(c.call.validate());
  EXPECT_FALSE(c.call.is_plain());
  EXPECT_TRUE(c.call.is_uniform());
  EXPECT_EQ(c.call.all_columns(), 320);
  c = Call();
  c.call.dtype = DType::kBFloat16;
  EXPECT_TRUE(c.call.validate());
  EXPECT_FALSE(c.call.is_plain());
  EXPECT_TRUE(c.call.is_uniform());
  c = Call();
  c.call.head_dim = 256;
  EXPECT_TRUE(c.call.validate());
  EXPECT_FALSE(c.call.is_uniform());
  c = Call();
  c.use_families();
  EXPECT_TRUE(c.call.validate());
  EXPECT_FALSE(c.call.is_uniform());
  EXPECT_EQ(c.call.num_tables(), 6);
}

TEST(CodedAttentionCall, NamesWhatItRefuses) {
  const struct {
    void (*change)(Call*);
    StatusCode code;
    const char* name;
  } kCases[] = {
      {[](Call* c) { c->call.head_dim = 80; }, StatusCode::kUnsupported, "head_dim"},
      {[](Call* c) { c->call.columns = 0; }, StatusCode::kInvalidArgument, "columns"},
      {[](Call* c) { c->call.q_len = 0; }, StatusCode::kInvalidArgument, "q_len"},
      {[](Call* c) { c->call.q_len = 9; }, StatusCode::kInvalidArgument, "q_len"},
      {[](Call* c) { c->call.q_len = 2, c->call.num_kv_heads = 4; }, StatusCode::kInvalidArgument,
       "num_kv_heads"},
      {[](Call* c) { c->call.dtype = DType::kFloat32; }, StatusCode::kUnsupported, "dtype"},
      {[](Call* c) { c->call.keys.others = nullptr; }, StatusCode::kInvalidArgument,
       "keys.num_others"},
      {[](Call* c) { c->call.values.num_others = -1; }, StatusCode::kInvalidArgument,
       "values.num_others"},
      {[](Call* c) { c->call.keys.num_others = 16; }, StatusCode::kUnsupported,
       "keys: more than 16"},
      {[](Call* c) { c->others[0][1].table_id = 0; }, StatusCode::kInvalidArgument,
       "keys: two codebooks with one table id"},
      {[](Call* c) { c->others[1][0].table_id = 2; }, StatusCode::kInvalidArgument,
       "values: two codebooks with one table id"},
      {[](Call* c) { c->others[1][0].mode = BlockMode::kSingle; }, StatusCode::kUnsupported,
       "values: codebooks of different modes"},
      {[](Call* c) { c->others[0][0].streams_per_lane = 1; }, StatusCode::kUnsupported,
       "keys: codebooks with different streams"},
      {[](Call* c) { c->others[1][1].component = Component::kKey; }, StatusCode::kInvalidArgument,
       "values.codebook"},
      {[](Call* c) { c->others[1][1].levels = 64; }, StatusCode::kUnsupported, "32 levels"},
  };
  for (const auto& refused : kCases) {
    Call c;
    c.use_families();
    refused.change(&c);
    const Status status = c.call.validate();
    EXPECT_EQ(status.code(), refused.code) << refused.name << ": " << status.message();
    EXPECT_NE(status.message().find(refused.name), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace tierkv

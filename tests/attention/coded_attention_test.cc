// SPDX-License-Identifier: Apache-2.0
// What a call of coded attention may ask for; its kernels are tested on a GPU.
#include "attention/coded/coded_attention.h"

#include <gtest/gtest.h>

#include <string>

namespace tierkv {
namespace {

DeviceCodebook book(Component component) {
  DeviceCodebook b;
  b.max_length = 10;
  b.levels = 16;
  b.streams_per_lane = 2;
  b.component = component;
  return b;
}

CodedAttention valid_call() {
  alignas(16) static const float kScales[128] = {};
  alignas(16) static const uint16_t kMeans[128] = {};
  CodedAttention call;
  call.keys.codebook = book(Component::kKey);
  call.values.codebook = book(Component::kValue);
  call.num_rows = 6;
  call.columns = 4;
  call.head_dim = 128;
  call.sm_scale = 1;
  call.max_block_bytes = 5120;
  call.weighted.key_scales = kScales;
  call.weighted.key_means = kMeans;
  return call;
}

TEST(CodedAttentionCall, TakesSeveralQueriesAndRawBlocks) {
  CodedAttention call = valid_call();
  EXPECT_TRUE(call.validate());
  call.q_len = 8;
  call.num_kv_heads = 3;
  call.dtype = DType::kBFloat16;
  EXPECT_TRUE(call.validate());
  EXPECT_EQ(call.all_columns(), 32);
  call.keys.codebook = {};
  EXPECT_FALSE(call.validate());
  call.raw_blocks = true;
  EXPECT_TRUE(call.validate());
}

TEST(CodedAttentionCall, NamesWhatItRefuses) {
  const struct {
    void (*change)(CodedAttention*);
    StatusCode code;
    const char* name;
  } kCases[] = {
      {[](CodedAttention* c) { c->head_dim = 80; }, StatusCode::kUnsupported, "head_dim"},
      {[](CodedAttention* c) { c->columns = 0; }, StatusCode::kInvalidArgument, "columns"},
      {[](CodedAttention* c) { c->q_len = 0; }, StatusCode::kInvalidArgument, "q_len"},
      {[](CodedAttention* c) { c->q_len = 9; }, StatusCode::kInvalidArgument, "q_len"},
      {[](CodedAttention* c) { c->q_len = 2, c->num_kv_heads = 4; }, StatusCode::kInvalidArgument,
       "num_kv_heads"},
      {[](CodedAttention* c) { c->dtype = DType::kFloat32; }, StatusCode::kUnsupported, "dtype"},
      {[](CodedAttention* c) { c->values.codebook.mode = BlockMode::kSingle; },
       StatusCode::kUnsupported, "values.codebook: only pairs"},
      {[](CodedAttention* c) { c->keys.codebook.streams_per_lane = 1; }, StatusCode::kUnsupported,
       "different streams"},
      {[](CodedAttention* c) { c->values.codebook.component = Component::kKey; },
       StatusCode::kInvalidArgument, "values.codebook"},
      {[](CodedAttention* c) { c->values.codebook.levels = 64; }, StatusCode::kUnsupported,
       "32 levels"},
      {[](CodedAttention* c) { c->weighted.key_scales = nullptr; }, StatusCode::kInvalidArgument,
       "weighted.key_scales"},
  };
  for (const auto& refused : kCases) {
    CodedAttention call = valid_call();
    refused.change(&call);
    const Status status = call.validate();
    EXPECT_EQ(status.code(), refused.code) << refused.name << ": " << status.message();
    EXPECT_NE(status.message().find(refused.name), std::string::npos) << status.message();
  }
}

}  // namespace
}  // namespace tierkv

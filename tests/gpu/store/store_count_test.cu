// Queries that attend() counts, on the device beside the host's; and attention to bfloat16 stores.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/gpu/store/store_attend_twins.cuh"
#include "tests/support/named_config.h"

namespace tierkv::testing {
namespace {

KvStoreConfig counting_config(int32_t head_dim, int32_t group) {
  KvStoreConfig c = small_config();
  c.layout.head_dim = head_dim;
  c.layout.num_q_heads = c.layout.num_kv_heads * group;
  c.layout.sm_scale = 1.0 / std::sqrt(head_dim);
  c.page_bytes = 0;
  c.max_tokens = 300;
  c.num_pages = 200;
  return c;
}

// A live sequence of `tokens` tokens, the last of which came in a step.
SequenceId live_sequence(Twins* twins, int32_t tokens) {
  SequenceId id;
  EXPECT_TRUE(twins->add(&id));
  const SequenceList l = {&id, 1};
  EXPECT_TRUE(twins->begin_prompt(l, tokens - 1));
  EXPECT_TRUE(twins->append_all(l, tokens - 1));
  for (int32_t layer = 0; layer < 2; ++layer) EXPECT_TRUE(twins->score_prompt(l, layer));
  EXPECT_TRUE(twins->end_prompt(l));
  EXPECT_TRUE(twins->begin_step(l, 1));
  EXPECT_TRUE(twins->append_all(l, 1));
  return id;
}

// Counted without anything else that asks for log-sum-exps.
AttendRequest counted(AttendRequest request) {
  request.lse = nullptr;
  request.probabilities = nullptr;
  return request;
}

TEST(StoreCount, AttendCountsItsQueryAsTheHostDoes) {
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const int32_t group : {1, 4, 5, 16}) {
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " group " << group);
      RandomInput input;
      Twins twins(counting_config(head_dim, group), &input);
      std::vector<SequenceId> ids;
      for (const int32_t tokens : {2, 9, 60, 250}) ids.push_back(live_sequence(&twins, tokens));
      BothAttend both(&twins, ids, 1, DType::kFloat16, &input);
      const AttendRequest host = counted(both.host(true)), device = counted(both.device(true));
      for (int32_t repeat = 0; repeat < 2; ++repeat) {
        ASSERT_TRUE(twins.host().attend(host));
        const Status s = twins.device().attend(device);
        ASSERT_TRUE(s) << s.message();
        ASSERT_TRUE(twins.device().take_status());
      }
      both.expect_equal_outputs(4e-3);
      expect_near_scores(&twins, ids);
    }
  }
}

TEST(StoreCount, OnlyTheQueriesOfTheIntervalCount) {
  RandomInput input;
  KvStoreConfig c = counting_config(64, 2);
  c.score_interval = 2;
  Twins twins(c, &input);
  const SequenceId id = live_sequence(&twins, 40);  // the first of a pair: not counted
  const std::string before = twins.difference();
  EXPECT_EQ(before, "");
  BothAttend both(&twins, {id}, 1, DType::kFloat16, &input);
  AttendRequest device = counted(both.device(true));
  ASSERT_TRUE(twins.device().attend(device));
  ASSERT_TRUE(twins.device().take_status());
  EXPECT_EQ(twins.difference(), "");
}

TEST(StoreCount, TooLittleScratchIsRefused) {
  RandomInput input;
  Twins twins(counting_config(64, 2), &input);
  const SequenceId id = live_sequence(&twins, 200);
  BothAttend both(&twins, {id}, 1, DType::kFloat16, &input);
  AttendRequest device = counted(both.device(true));
  device.scratch_bytes = count_scratch_bytes(twins.config(), 1, 100);
  EXPECT_EQ(twins.device().attend(device).code(), StatusCode::kBufferTooSmall);
  device.scratch = nullptr;
  EXPECT_FALSE(twins.device().attend(device));
}

TEST(StoreCount, BFloat16QueriesAndRawPages) {
  for (const bool raw : {false, true}) {
    RandomInput input;
    KvStoreConfig c = counting_config(128, 4);
    c.layout.dtype = DType::kBFloat16;
    if (raw) c.window_format = raw_tier();
    Twins twins(c, &input);
    const std::vector<SequenceId> ids = {live_sequence(&twins, 5), live_sequence(&twins, 120)};
    BothAttend both(&twins, ids, 1, DType::kBFloat16, &input);
    const AttendRequest host = counted(both.host(true)), device = counted(both.device(true));
    ASSERT_TRUE(twins.host().attend(host));
    const Status s = twins.device().attend(device);
    ASSERT_TRUE(s) << s.message();
    ASSERT_TRUE(twins.device().take_status());
    // Both round to 8 bits: each up to 2^-8 of a value.
    both.expect_equal_outputs(6e-3);
    expect_near_scores(&twins, ids);
  }
}

}  // namespace
}  // namespace tierkv::testing

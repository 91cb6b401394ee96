// Several queries of a sequence in one call, on the device beside the host's: outputs,
// probabilities, counted queries, and a captured step that is replayed.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/gpu/store/store_attend_twins.cuh"
#include "tests/support/named_config.h"

namespace tierkv::testing {
namespace {

KvStoreConfig queries_config(int32_t head_dim, int32_t group) {
  KvStoreConfig c = small_config();
  c.layout.head_dim = head_dim;
  c.layout.num_q_heads = c.layout.num_kv_heads * group;
  // Logits of some hundreds at most, so that fp32 sums leave the tolerances to the kernels.
  c.layout.sm_scale = 1.0 / (16 * std::sqrt(head_dim));
  c.policy.sink_tokens = 3;
  c.policy.window_tokens = 11;
  c.page_bytes = 0;
  c.max_tokens = 300;
  c.num_pages = 200;
  return c;
}

SequenceId prompt_of(Twins* twins, int32_t tokens) {
  SequenceId id;
  EXPECT_TRUE(twins->add(&id));
  EXPECT_TRUE(twins->begin_prompt({&id, 1}, tokens));
  EXPECT_TRUE(twins->append_all({&id, 1}, tokens));
  for (int32_t layer = 0; layer < 2; ++layer) EXPECT_TRUE(twins->score_prompt({&id, 1}, layer));
  return id;
}
void step(Twins* twins, SequenceId id, int32_t tokens) {
  EXPECT_TRUE(twins->begin_step({&id, 1}, tokens));
  EXPECT_TRUE(twins->append_all({&id, 1}, tokens));
}
// Past its prompt, the last tokens from steps.
SequenceId live_sequence(Twins* twins, int32_t prompt, int32_t steps, int32_t each) {
  const SequenceId id = prompt_of(twins, prompt);
  EXPECT_TRUE(twins->end_prompt({&id, 1}));
  for (int32_t i = 0; i < steps; ++i) step(twins, id, each);
  return id;
}

TEST(StoreQueries, SeeWhatTheHostsSee) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 4, 5, 16}) {
      RandomInput input;
      Twins twins(queries_config(head_dim, group), &input);
      // In its prompt; with a ring that is not full, just full, worn.
      const std::vector<SequenceId> ids = {prompt_of(&twins, 70), live_sequence(&twins, 8, 1, 2),
                                           live_sequence(&twins, 30, 1, 8),
                                           live_sequence(&twins, 200, 5, 5)};
      for (const int32_t q_len : {1, 2, 3, 8}) {
        SCOPED_TRACE(::testing::Message()
                     << "head_dim " << head_dim << " group " << group << " q_len " << q_len);
        BothAttend both(&twins, ids, q_len, DType::kFloat16, &input);
        both.attend(false);
        both.expect_equal(4e-3);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(StoreQueries, BFloat16WithARawWindow) {
  RandomInput input;
  KvStoreConfig c = queries_config(128, 4);
  c.layout.dtype = DType::kBFloat16;
  c.window_format = raw_tier();
  Twins twins(c, &input);
  const std::vector<SequenceId> ids = {live_sequence(&twins, 5, 2, 3),
                                       live_sequence(&twins, 120, 4, 3)};
  BothAttend both(&twins, ids, 3, DType::kBFloat16, &input);
  both.attend(true);
  // Both round to 8 bits: each up to 2^-8 of a value.
  both.expect_equal(6e-3);
  expect_near_scores(&twins, ids);
}

TEST(StoreQueries, AreCountedAsTheHostCounts) {
  for (const int32_t head_dim : {64, 256}) {
    for (const int32_t group : {1, 3, 5, 16}) {
      for (const int32_t interval : {1, 3}) {
        RandomInput input;
        KvStoreConfig c = queries_config(head_dim, group);
        c.score_interval = interval;
        Twins twins(c, &input);
        const std::vector<SequenceId> ids = {live_sequence(&twins, 9, 1, 5),
                                             live_sequence(&twins, 90, 3, 5),
                                             live_sequence(&twins, 200, 5, 5)};
        SCOPED_TRACE(::testing::Message()
                     << "head_dim " << head_dim << " group " << group << " interval " << interval);
        BothAttend both(&twins, ids, 5, DType::kFloat16, &input);
        both.attend(true);
        expect_near_scores(&twins, ids);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Plans of calls with other numbers of queries and sequences follow each other in one workspace,
// and a plan does not outlive the calls that change what it was made of.
TEST(StoreQueries, PlansAreMadeAnew) {
  RandomInput input;
  Twins twins(queries_config(64, 4), &input);
  const std::vector<SequenceId> ids = {live_sequence(&twins, 150, 2, 4),
                                       live_sequence(&twins, 20, 2, 4)};
  const SequenceId growing = prompt_of(&twins, 8);
  const SequenceList list = {&growing, 1};
  const auto check = [&](const std::vector<SequenceId>& of, int32_t q_len) {
    BothAttend both(&twins, of, q_len, DType::kFloat16, &input);
    both.attend(false);
    both.expect_equal(4e-3);
  };
  for (const int32_t q_len : {4, 1, 2, 2, 8, 1}) {
    check(ids, q_len);
    check({ids[1]}, q_len);
    if (HasFatalFailure()) return;
  }
  for (int32_t chunk = 0; chunk < 3; ++chunk) {  // of a prompt
    check({growing}, 3);
    ASSERT_TRUE(twins.begin_prompt(list, 40));
    ASSERT_TRUE(twins.append_all(list, 40));
  }
  check({growing}, 3);
  ASSERT_TRUE(twins.end_prompt(list));
  check({growing}, 3);
}

TEST(StoreQueries, RefusedByName) {
  RandomInput input;
  Twins twins(queries_config(64, 2), &input);
  const SequenceId id = live_sequence(&twins, 60, 1, 2), few = prompt_of(&twins, 2);
  const auto code = [&](const SequenceId& of, int32_t q_len) {
    BothAttend both(&twins, {of}, std::clamp(q_len, 1, 8), DType::kFloat16, &input);
    AttendRequest r = both.device(false);
    r.q_len = q_len;
    return twins.device().attend(r).code();
  };
  EXPECT_EQ(code(id, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(id, 9), StatusCode::kUnsupported);
  EXPECT_EQ(code(few, 3), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(few, 2), StatusCode::kOk);
  ASSERT_TRUE(twins.truncate(id, 40));
  EXPECT_EQ(code(id, 2), StatusCode::kInvalidArgument);
  BothAttend both(&twins, {few}, 2, DType::kFloat16, &input);
  AttendRequest r = both.device(true);
  EXPECT_EQ(twins.device().attend(r).code(), StatusCode::kInvalidArgument) << "in its prompt";
}

// A captured step of three tokens with three queries, replayed while the ring turns.
TEST(StoreQueries, ACapturedStepIsReplayed) {
  RandomInput input;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  {
    const KvStoreConfig config = queries_config(64, 4);
    Twins twins(config, &input, stream);
    const SequenceId id = live_sequence(&twins, 50, 1, 3);
    const SequenceList list = {&id, 1};
    BothAttend both(&twins, {id}, 3, DType::kFloat16, &input);
    const AttendRequest request = both.device(false);
    const CallValues values(&input, config.layout, 1, 3);
    Buffer k, v;
    const void *device_k = k.put(values.k_bytes()), *device_v = v.put(values.v_bytes());
    const auto capture = [&]() -> Status {
      if (Status s = twins.device().begin_step(list, 3); !s) return s;
      for (int32_t layer = 0; layer < 2; ++layer) {
        if (Status s = twins.device().append({list, layer, 3, device_k, device_v}); !s) return s;
      }
      return twins.device().attend(request);
    };
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    const Status s = capture();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_TRUE(s) << s.message();
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (int32_t replay = 0; replay < 9; ++replay) {
      if (replay > 0) ASSERT_TRUE(twins.device().note_replay(list, 3));
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_TRUE(twins.device().take_status());
      ASSERT_TRUE(twins.host().begin_step(list, 3));
      for (int32_t layer = 0; layer < 2; ++layer) {
        ASSERT_TRUE(twins.host().append({list, layer, 3, values.k(), values.v()}));
      }
      ASSERT_TRUE(twins.host().attend(both.host(false)));
      both.expect_equal(4e-3);
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(twins.difference(), "");
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace tierkv::testing

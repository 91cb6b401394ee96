// Several queries of a sequence in one call, on the device beside the host's: outputs,
// probabilities, counted queries, and a captured step that is replayed.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/gpu/store_twins.cuh"
#include "tests/store/named_config.h"

namespace tierkv::testing {
namespace {

KvStoreConfig queries_config(int32_t head_dim, int32_t group) {
  KvStoreConfig c = small_config();
  c.layout.head_dim = head_dim;
  c.layout.num_q_heads = c.layout.num_kv_heads * group;
  c.layout.sm_scale = 1.0 / std::sqrt(head_dim);
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

// The same queries at layer 1 to both stores, and their results.
class BothAttend {
 public:
  BothAttend(Twins* twins, std::vector<SequenceId> ids, int32_t q_len, DType dtype,
             RandomInput* input)
      : twins_(twins), ids_(std::move(ids)) {
    const CacheLayout& layout = twins->config().layout;
    const size_t lines = ids_.size() * q_len;
    q_ = input->values(dtype, static_cast<int64_t>(lines) * layout.num_q_heads, layout.head_dim);
    out_.assign(lines * layout.num_q_heads * layout.head_dim, 0x7e00);
    lse_.assign(lines * layout.num_q_heads, NAN);
    seen_.assign(lines * layout.num_kv_heads * twins->config().max_tokens, -7.0f);
    scratch_.assign(count_scratch_bytes(twins->config(), static_cast<int32_t>(ids_.size()),
                                        twins->config().max_tokens, q_len),
                    0xff);
    request_.sequences = {ids_.data(), static_cast<int32_t>(ids_.size())};
    request_.layer = 1;
    request_.dtype = dtype;
    request_.q_len = q_len;
    request_.stride = twins->config().max_tokens;
  }
  AttendRequest host(bool counts) {
    AttendRequest r = request_;
    r.q = q_.data();
    r.out = out_.data();
    r.lse = lse_.data();
    r.probabilities = seen_.data();
    r.count_query = counts;
    return r;
  }
  AttendRequest device(bool counts) {
    AttendRequest r = request_;
    r.q = device_q_.put(q_);
    r.out = device_out_.put(std::vector<uint16_t>(out_.size(), 0x7e00));
    r.lse = device_lse_.put(std::vector<float>(lse_.size(), NAN));
    r.probabilities = device_seen_.put(std::vector<float>(seen_.size(), -7.0f));
    r.count_query = counts;
    r.scratch = device_scratch_.put(scratch_);
    r.scratch_bytes = scratch_.size();
    return r;
  }
  void attend(bool counts) {
    const Status a = twins_->host().attend(host(counts));
    ASSERT_TRUE(a) << a.message();
    const Status b = twins_->device().attend(device(counts));
    ASSERT_TRUE(b) << b.message();
    const Status later = twins_->device().take_status();
    ASSERT_TRUE(later) << later.message();
  }
  // Tolerances of docs/ATTENTION.md, twice that of the outputs: the host's are rounded, too.
  void expect_equal(double tolerance) {
    const auto got = device_out_.read<uint16_t>(out_.size());
    const auto lse = device_lse_.read<float>(lse_.size());
    const auto seen = device_seen_.read<float>(seen_.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < out_.size(); ++i) {
      const double want = value(out_[i]), x = value(got[i]);
      difference += (x - want) * (x - want);
      norm += want * want;
    }
    EXPECT_LT(std::sqrt(difference / norm), tolerance);
    for (size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], lse_[i], 2e-3) << i;
    for (size_t i = 0; i < seen.size(); ++i) {
      ASSERT_NEAR(seen[i], seen_[i], 4e-3 * std::fabs(seen_[i]) + 1e-6) << i;
    }
  }

 private:
  double value(uint16_t bits) const {
    return request_.dtype == DType::kBFloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
  }
  Twins* twins_;
  std::vector<SequenceId> ids_;
  AttendRequest request_;
  std::vector<uint8_t> q_, scratch_;
  std::vector<uint16_t> out_;
  std::vector<float> lse_, seen_;
  Buffer device_q_, device_out_, device_lse_, device_seen_, device_scratch_;
};

// All scores of layer 1: the device's near the host's, and every record that of its page's scores.
void expect_near_scores(Twins* twins, const std::vector<SequenceId>& ids) {
  const Result<StoreView> view = twins->device().download();
  ASSERT_TRUE(view);
  const StoreView &host = twins->host().view(), &device = *view;
  for (const SequenceId id : ids) {
    for (int32_t r = 0; r < 2 * kStoreSides; ++r) {
      const int32_t row = host.row_of(id.slot, 1, r % 2), side = r / 2;
      const int32_t tokens = host.allocator.tokens[row].of[side];
      ASSERT_EQ(tokens, device.allocator.tokens[row].of[side]);
      float least = INFINITY;
      for (int32_t i = 0; i < tokens; ++i) {
        const TokenPlace a = place_of(host, row, side, i), b = place_of(device, row, side, i);
        const float want = score_at(host, side, a), got = score_at(device, side, b);
        // The codes' half step and the kernel's scores, whose sums round to fp32.
        ASSERT_NEAR(got, want, 2e-3f * want + 1e-6f) << "side " << side << " token " << i;
        least = b.slot == 0 ? got : std::fmin(least, got);
        const bool last = i + 1 == tokens || (i + 1) % host.page_tokens(side) == 0;
        if (!last || side == kWindowSide) continue;
        const int32_t page = device.page_id(row, side, i / host.page_tokens(side));
        EXPECT_EQ(device.allocator.records[page].min_score, least);
      }
    }
  }
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
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    Status s = twins.device().begin_step(list, 3);
    for (int32_t layer = 0; layer < 2 && s; ++layer) {
      s = twins.device().append({list, layer, 3, device_k, device_v});
    }
    if (s) s = twins.device().attend(request);
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

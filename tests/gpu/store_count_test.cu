// Queries that attend() counts, on the device beside the host's; and attention to bfloat16 stores.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/gpu/store_twins.cuh"
#include "tests/store/named_config.h"

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

// One query to both stores.
class BothAttend {
 public:
  BothAttend(Twins* twins, std::vector<SequenceId> ids, DType dtype, RandomInput* input)
      : twins_(twins), ids_(std::move(ids)) {
    const CacheLayout& layout = twins->config().layout;
    const auto count = static_cast<int64_t>(ids_.size());
    q_ = input->values(dtype, count * layout.num_q_heads, layout.head_dim);
    out_.assign(count * layout.num_q_heads * layout.head_dim, 0x7e00);
    request_.sequences = {ids_.data(), static_cast<int32_t>(count)};
    request_.layer = 1;
    request_.dtype = dtype;
    scratch_.assign(
        count_scratch_bytes(twins->config(), request_.sequences.count, twins->config().max_tokens),
        0xff);
  }
  AttendRequest host() {
    AttendRequest r = request_;
    r.q = q_.data();
    r.out = out_.data();
    return r;
  }
  AttendRequest device() {
    AttendRequest r = request_;
    r.q = device_q_.put(q_);
    r.out = const_cast<uint16_t*>(device_out_.put(std::vector<uint16_t>(out_.size(), 0x7e00)));
    r.scratch = const_cast<uint8_t*>(device_scratch_.put(scratch_));
    r.scratch_bytes = scratch_.size();
    return r;
  }
  // Within the tolerance of attention.
  void expect_equal_outputs(double tolerance) {
    const auto got = device_out_.read<uint16_t>(out_.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < out_.size(); ++i) {
      const double want = value(out_[i]), x = value(got[i]);
      difference += (x - want) * (x - want);
      norm += want * want;
    }
    EXPECT_LT(std::sqrt(difference / norm), tolerance);
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
  Buffer device_q_, device_out_, device_scratch_;
};

// All scores of layer 1: the device's near the host's, other rows untouched, and every record that
// of its page's scores.
void expect_near_scores(Twins* twins, const std::vector<SequenceId>& ids, bool moved) {
  const Result<StoreView> view = twins->device().download();
  ASSERT_TRUE(view);
  const StoreView &host = twins->host().view(), &device = *view;
  bool any = false;
  for (const SequenceId id : ids) {
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t row = host.row_of(id.slot, 1, h);
      for (int32_t side = 0; side < kStoreSides; ++side) {
        const int32_t tokens = host.allocator.tokens[row].of[side];
        ASSERT_EQ(tokens, device.allocator.tokens[row].of[side]);
        float least = INFINITY;
        for (int32_t i = 0; i < tokens; ++i) {
          const TokenPlace a = place_of(host, row, side, i), b = place_of(device, row, side, i);
          const float want = score_at(host, side, a), got = score_at(device, side, b);
          // The codes' half step and the kernel's scores, whose sums round to fp32.
          ASSERT_NEAR(got, want, 2e-3f * want + 1e-6f) << "side " << side << " token " << i;
          any |= want != 0;
          least = b.slot == 0 ? got : std::fmin(least, got);
          const bool last = i + 1 == tokens || (i + 1) % host.page_tokens(side) == 0;
          if (!last || side == kWindowSide) continue;
          const int32_t page = device.page_id(row, side, i / host.page_tokens(side));
          EXPECT_EQ(device.allocator.records[page].min_score, least);
        }
      }
    }
  }
  EXPECT_EQ(any, moved);
}

TEST(StoreCount, AttendCountsItsQueryAsTheHostDoes) {
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const int32_t group : {1, 4, 5, 16}) {
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " group " << group);
      RandomInput input;
      Twins twins(counting_config(head_dim, group), &input);
      std::vector<SequenceId> ids;
      for (const int32_t tokens : {2, 9, 60, 250}) ids.push_back(live_sequence(&twins, tokens));
      BothAttend both(&twins, ids, DType::kFloat16, &input);
      AttendRequest host = both.host(), device = both.device();
      host.count_query = device.count_query = true;
      for (int32_t repeat = 0; repeat < 2; ++repeat) {
        ASSERT_TRUE(twins.host().attend(host));
        const Status s = twins.device().attend(device);
        ASSERT_TRUE(s) << s.message();
        ASSERT_TRUE(twins.device().take_status());
      }
      both.expect_equal_outputs(4e-3);
      expect_near_scores(&twins, ids, true);
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
  BothAttend both(&twins, {id}, DType::kFloat16, &input);
  AttendRequest device = both.device();
  device.count_query = true;
  ASSERT_TRUE(twins.device().attend(device));
  ASSERT_TRUE(twins.device().take_status());
  EXPECT_EQ(twins.difference(), "");
}

TEST(StoreCount, TooLittleScratchIsRefused) {
  RandomInput input;
  Twins twins(counting_config(64, 2), &input);
  const SequenceId id = live_sequence(&twins, 200);
  BothAttend both(&twins, {id}, DType::kFloat16, &input);
  AttendRequest device = both.device();
  device.count_query = true;
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
    BothAttend both(&twins, ids, DType::kBFloat16, &input);
    AttendRequest host = both.host(), device = both.device();
    host.count_query = device.count_query = true;
    ASSERT_TRUE(twins.host().attend(host));
    const Status s = twins.device().attend(device);
    ASSERT_TRUE(s) << s.message();
    ASSERT_TRUE(twins.device().take_status());
    // Both round to 8 bits: each up to 2^-8 of a value.
    both.expect_equal_outputs(6e-3);
    expect_near_scores(&twins, ids, true);
  }
}

}  // namespace
}  // namespace tierkv::testing

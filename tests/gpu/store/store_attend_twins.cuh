// The same queries to a host and a device store, and the comparison of what they find and count.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

#include "tests/gpu/store/store_twins.cuh"

namespace tierkv::testing {

// Queries at layer 1, and their results.
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
  // Tolerances of docs/internals/attention.md, twice that of the outputs: the host's are rounded,
  // too.
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
  void expect_equal(double tolerance) {
    expect_equal_outputs(tolerance);
    const auto lse = device_lse_.read<float>(lse_.size());
    const auto seen = device_seen_.read<float>(seen_.size());
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

// All scores of layer 1: the device's near the host's, some of them not 0, and every record that of
// its page's scores.
inline void expect_near_scores(Twins* twins, const std::vector<SequenceId>& ids) {
  const Result<StoreView> view = twins->device().download();
  ASSERT_TRUE(view);
  const StoreView &host = twins->host().view(), &device = *view;
  bool any = false;
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
        any |= want != 0;
        least = b.slot == 0 ? got : std::fmin(least, got);
        const bool last = i + 1 == tokens || (i + 1) % host.page_tokens(side) == 0;
        if (!last || side == kWindowSide) continue;
        const int32_t page = device.page_id(row, side, i / host.page_tokens(side));
        EXPECT_EQ(device.allocator.records[page].min_score, least);
      }
    }
  }
  EXPECT_TRUE(any);
}

}  // namespace tierkv::testing

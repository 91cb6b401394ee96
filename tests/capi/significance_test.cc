// SPDX-License-Identifier: Apache-2.0
// Significance and log-sum-exp of prompts through the C ABI, on the host, against their definition.
#include "tierkv/significance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/support/c_structs.h"
#include "tests/support/random_input.h"

namespace tierkv::test {
namespace {

using testing::RandomInput;

constexpr int32_t kQHeads = 6, kKvHeads = 2, kDim = 20;

class CapiSignificance : public ::testing::Test {
 protected:
  // `extra` elements lie behind each row.
  void make_call(const std::vector<int32_t>& lengths, int32_t stride, int32_t extra = 0) {
    starts_ = {0};
    for (const int32_t n : lengths) starts_.push_back(starts_.back() + n);
    const int32_t tokens = starts_.back();
    width_ = kDim + extra;
    q_.resize(static_cast<size_t>(tokens) * kQHeads * width_);
    k_.resize(static_cast<size_t>(tokens) * kKvHeads * width_);
    for (std::vector<float>* x : {&q_, &k_}) {
      for (float& value : *x) value = input_.real(-2, 2);
    }
    lse_.assign(static_cast<size_t>(kQHeads) * tokens, NAN);
    significance_.assign(static_cast<size_t>(kKvHeads) * tokens, NAN);
    call_ = make<tkv_significance_call>();
    call_.q = q_.data(), call_.k = k_.data(), call_.starts = starts_.data();
    if (extra > 0) {
      call_.q_head_stride = call_.k_head_stride = width_;
      call_.q_token_stride = kQHeads * width_, call_.k_token_stride = kKvHeads * width_;
    }
    call_.num_sequences = static_cast<int32_t>(lengths.size());
    call_.total_tokens = tokens;
    call_.num_q_heads = kQHeads, call_.num_kv_heads = kKvHeads, call_.head_dim = kDim;
    call_.dtype = TKV_FLOAT32;
    call_.query_stride = stride;
    call_.lse = lse_.data(), call_.significance = significance_.data();
  }
  double score(int32_t first, int32_t head, int32_t query, int32_t token) const {
    const float* q = &q_[(static_cast<size_t>(first + query) * kQHeads + head) * width_];
    const float* k = &k_[(static_cast<size_t>(first + token) * kKvHeads + head / 3) * width_];
    double sum = 0;
    for (int32_t d = 0; d < kDim; ++d) sum += static_cast<double>(q[d]) * k[d];
    return sum / std::sqrt(static_cast<double>(kDim));
  }
  double log_sum(int32_t first, int32_t head, int32_t query) const {
    double sum = 0;
    for (int32_t t = 0; t <= query; ++t) sum += std::exp(score(first, head, query, t));
    return std::log(sum);
  }
  double expected(int32_t sequence, int32_t kv_head, int32_t token, int32_t stride) const {
    const int32_t first = starts_[sequence], n = starts_[sequence + 1] - first;
    double sum = 0;
    int32_t count = 0;
    for (int32_t j = n - 1; j > token; j -= stride, ++count) {
      double most = 0;
      for (int32_t h = 3 * kv_head; h < 3 * kv_head + 3; ++h) {
        most = std::max(most, std::exp(score(first, h, j, token) - log_sum(first, h, j)));
      }
      sum += most;
    }
    return count == 0 ? 0 : sum / count;
  }
  // Doubles, rounded to float once: 2^-24 of the value, and the sums' 1e-13.
  void compare(int32_t stride) const {
    for (int32_t s = 0; s < call_.num_sequences; ++s) {
      const int32_t first = starts_[s], n = starts_[s + 1] - first;
      for (int32_t t = 0; t < n; ++t) {
        for (int32_t h = 0; h < kKvHeads; ++h) {
          const double want = expected(s, h, t, stride);
          ASSERT_NEAR(significance_[h * call_.total_tokens + first + t], want, 1e-7 * want)
              << "token " << t << " of " << n;
          ASSERT_EQ(want > 0, t < n - 1);
        }
        for (int32_t h = 0; h < kQHeads; ++h) {
          const float lse = lse_[h * call_.total_tokens + first + t];
          ASSERT_EQ(std::isnan(lse), (n - 1 - t) % stride != 0) << "query " << t << " of " << n;
          if (std::isnan(lse)) continue;
          const double want = log_sum(first, h, t);
          ASSERT_NEAR(lse, want, 1e-7 * std::abs(want) + 1e-12) << "query " << t << " of " << n;
        }
      }
    }
  }
  void refused(tkv_status status, const char* word) {
    for (const auto call : {tkv_prompt_significance_host, tkv_prompt_lse_host}) {
      tkv_error error = make<tkv_error>();
      EXPECT_EQ(call(&call_, &error), status) << error.message;
      EXPECT_NE(std::strstr(error.message, word), nullptr) << error.message;
    }
    make_call({9, 3}, 1);
  }

  RandomInput input_;
  int32_t width_ = kDim;
  std::vector<int32_t> starts_;
  std::vector<float> q_, k_, lse_, significance_;
  tkv_significance_call call_;
};

TEST_F(CapiSignificance, IsItsDefinition) {
  for (const int32_t stride : {1, 2, 5, 16}) {
    make_call({1, 0, 2, 15, 16, 17, 40}, stride, stride == 5 ? 4 : 0);
    tkv_error error = make<tkv_error>();
    ASSERT_EQ(tkv_prompt_lse_host(&call_, &error), TKV_OK) << error.message;
    ASSERT_EQ(tkv_prompt_significance_host(&call_, &error), TKV_OK) << error.message;
    compare(stride);
    if (HasFatalFailure()) return;
  }
}

TEST_F(CapiSignificance, EverySixteenthQueryIsTheDefault) {
  make_call({50}, 0);
  call_.starts = nullptr;  // one sequence
  ASSERT_EQ(tkv_prompt_lse_host(&call_, nullptr), TKV_OK);
  ASSERT_EQ(tkv_prompt_significance_host(&call_, nullptr), TKV_OK);
  compare(16);
}

TEST_F(CapiSignificance, NothingIsNoError) {
  make_call({}, 1);
  EXPECT_EQ(tkv_prompt_significance_host(&call_, nullptr), TKV_OK);
  EXPECT_EQ(tkv_prompt_lse_host(&call_, nullptr), TKV_OK);
}

TEST_F(CapiSignificance, BadCallsAreRefusedByName) {
  make_call({9, 3}, 1);
  call_.q = nullptr;
  refused(TKV_INVALID_ARGUMENT, "q or k");
  call_.num_sequences = 0;
  refused(TKV_INVALID_ARGUMENT, "num_sequences");
  call_.num_sequences = 2;
  call_.starts = nullptr;
  refused(TKV_INVALID_ARGUMENT, "starts is null");
  call_.lse = call_.significance = nullptr;
  refused(TKV_INVALID_ARGUMENT, "is null");
  call_.query_stride = -1;
  refused(TKV_INVALID_ARGUMENT, "query_stride");
  call_.query_stride = kMaxQueryStride + 1;
  refused(TKV_INVALID_ARGUMENT, "query_stride");
  call_.num_kv_heads = 4;
  refused(TKV_INVALID_ARGUMENT, "num_q_heads");
  call_.head_dim = 0;
  refused(TKV_INVALID_ARGUMENT, "head_dim");
  call_.dtype = 3;
  refused(TKV_INVALID_ARGUMENT, "dtype");
  call_.sm_scale = -1;
  refused(TKV_INVALID_ARGUMENT, "sm_scale");
  call_.sm_scale = 1e300;  // no float
  refused(TKV_INVALID_ARGUMENT, "sm_scale");
  call_.num_q_heads = 65536;
  call_.num_kv_heads = 1;
  refused(TKV_INVALID_ARGUMENT, "num_q_heads");
  call_.k_token_stride = kDim - 1;
  refused(TKV_INVALID_ARGUMENT, "stride");
  call_.total_tokens = 13;
  refused(TKV_INVALID_ARGUMENT, "starts");
  starts_[1] = 14;
  refused(TKV_INVALID_ARGUMENT, "starts");
  starts_[0] = -1;
  refused(TKV_INVALID_ARGUMENT, "starts");
  call_.struct_size = 3;
  refused(TKV_INVALID_ARGUMENT, "struct_size");
  q_[5] = std::numeric_limits<float>::infinity();
  refused(TKV_NON_FINITE, "not finite");
}

TEST_F(CapiSignificance, TheDeviceRefusesWhatItHasNoKernelFor) {
  make_call({9, 3}, 1);
  call_.max_tokens = 9;
  for (const auto call : {tkv_prompt_significance, tkv_prompt_lse}) {
    tkv_error error = make<tkv_error>();
    EXPECT_EQ(call(&call_, nullptr, &error), TKV_UNSUPPORTED);
    const char* word = TIERKV_HAVE_CUDA ? "head_dim" : "without CUDA";
    EXPECT_NE(std::strstr(error.message, word), nullptr) << error.message;
  }
}

}  // namespace
}  // namespace tierkv::test

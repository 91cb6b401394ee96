// The kernels of a prompt's significance and log-sum-exp by mma.sync, on the host, against the
// reference in double.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "codec/format/element.h"
#include "codec/gpu/score_mma.cuh"
#include "codec/policy/significance.h"

namespace tierkv {

__align__(128) uint8_t score_stages[MmaShape<256>::kSharedBytes];

namespace {

// As tests/gpu/codec/codec_scores_test.cu has it.
constexpr double kTolerance = 5e-4;

struct Prompts {
  PromptScores p;
  std::vector<int32_t> starts = {0};
  std::vector<uint16_t> q, k;
  std::vector<float> lse, significance;

  int32_t group() const { return p.num_q_heads / p.num_kv_heads; }
};

Prompts make_prompts(std::mt19937& rng, int32_t head_dim, int32_t group, DType dtype,
                     const std::vector<int32_t>& lengths) {
  Prompts x;
  PromptScores& p = x.p;
  for (const int32_t n : lengths) {
    x.starts.push_back(x.starts.back() + n);
    p.max_tokens = std::max(p.max_tokens, n);
  }
  p.num_sequences = static_cast<int32_t>(lengths.size());
  p.total_tokens = x.starts.back();
  p.num_kv_heads = 1, p.num_q_heads = group;
  p.head_dim = head_dim, p.dtype = dtype;
  p.sm_scale = 1 / std::sqrt(head_dim);
  p.q_head_stride = p.k_head_stride = p.k_token_stride = head_dim + 8;
  p.q_token_stride = p.q_head_stride * group;
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<uint16_t>* to, int64_t stride) {
    to->resize(static_cast<size_t>(p.total_tokens * stride) + 8);
    for (uint16_t& bits : *to) bits = float_to_raw(dtype, normal(rng));
  };
  fill(&x.q, p.q_token_stride);
  fill(&x.k, p.k_token_stride);
  x.lse.assign(static_cast<size_t>(group) * p.total_tokens, NAN);
  x.significance.assign(p.total_tokens, NAN);
  p.q = x.q.data(), p.k = x.k.data(), p.starts = x.starts.data();
  return x;
}

template <class Kernel>
void launch(Kernel kernel, const Prompts& x, const ScoreTask& task, int32_t heads, int32_t rows) {
  const emulator::Index grid = {heads, x.p.num_sequences, (x.p.max_tokens + rows - 1) / rows};
  emulator::Index at;
  for (at.z = 0; at.z < grid.z; ++at.z) {
    for (at.y = 0; at.y < grid.y; ++at.y) {
      for (at.x = 0; at.x < grid.x; ++at.x) {
        std::fill(std::begin(score_stages), std::end(score_stages), uint8_t{0xff});
        emulator::cta().run(
            at, kMathThreads, [&] { kernel(task); }, grid);
      }
    }
  }
}
template <int32_t kHeadDim, DType kDtype>
void score(Prompts* x) {
  constexpr int32_t kRows = MmaShape<kHeadDim>::kRows;
  launch(mma_lse<kHeadDim, kDtype>, *x, {x->p, nullptr, x->lse.data()}, x->p.num_q_heads, kRows);
  launch(mma_significance<kHeadDim, kDtype>, *x, {x->p, x->lse.data(), x->significance.data()},
         x->p.num_kv_heads, kRows);
}
template <DType kDtype>
void score_dtype(Prompts* x) {
  switch (x->p.head_dim) {
    case 64:
      return score<64, kDtype>(x);
    case 96:
      return score<96, kDtype>(x);
    case 128:
      return score<128, kDtype>(x);
    default:
      return score<256, kDtype>(x);
  }
}

void compare(const Prompts& x, int32_t sequence) {
  const PromptScores& p = x.p;
  const int32_t first = x.starts[sequence], n = x.starts[sequence + 1] - first, dims = p.head_dim;
  const int32_t group = x.group();
  std::vector<float> q(static_cast<size_t>(group) * n * dims), k(static_cast<size_t>(n) * dims);
  for (int32_t t = 0; t < n; ++t) {
    for (int32_t d = 0; d < dims; ++d) {
      k[t * dims + d] = raw_to_float(p.dtype, x.k[(first + t) * p.k_token_stride + d]);
      for (int32_t h = 0; h < group; ++h) {
        q[(h * n + t) * dims + d] =
            raw_to_float(p.dtype, x.q[(first + t) * p.q_token_stride + h * p.q_head_stride + d]);
      }
    }
  }
  AttentionRow row;
  row.q = q.data(), row.k = k.data();
  row.group_size = group, row.num_queries = n, row.num_tokens = n, row.head_dim = dims;
  row.sm_scale = p.sm_scale;
  std::vector<double> expected(n);
  ASSERT_TRUE(exact_significance(row, expected.data(), nullptr));
  for (int32_t t = 0; t < n; ++t) {
    ASSERT_NEAR(x.significance[first + t], expected[t], kTolerance * expected[t])
        << "token " << t << " of " << n;
  }
  for (int32_t i = 0; i < group * n; ++i) {
    const int32_t h = i / n, j = i % n;
    double sum = 0;
    for (int32_t t = 0; t <= j; ++t) {
      double s = 0;
      for (int32_t d = 0; d < dims; ++d) s += double{q[i * dims + d]} * k[t * dims + d];
      sum += std::exp(s * p.sm_scale);
    }
    ASSERT_NEAR(x.lse[h * p.total_tokens + first + j], std::log(sum), kTolerance)
        << "head " << h << " query " << j << " of " << n;
  }
}

TEST(EmulatedScores, EveryHeadDimIsTheHosts) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    const auto group = static_cast<int32_t>(1 + rng() % 5);
    const DType dtype = rng() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
    const auto length = static_cast<int32_t>(257 + rng() % 60);
    SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " group " + std::to_string(group) + " " +
                 dtype_name(dtype) + " tokens " + std::to_string(length));
    Prompts x = make_prompts(rng, head_dim, group, dtype, {70, 0, 1, length});
    if (dtype == DType::kFloat16) {
      score_dtype<DType::kFloat16>(&x);
    } else {
      score_dtype<DType::kBFloat16>(&x);
    }
    for (int32_t s = 0; s < x.p.num_sequences; ++s) {
      compare(x, s);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace tierkv

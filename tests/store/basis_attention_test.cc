// Attention of stores in a basis is that of the decoded cache mapped back, in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "codec/format/element.h"
#include "tests/store/support/basis_store.h"

namespace tierkv::testing {
namespace {

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}
double absolute_dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::fabs(static_cast<double>(a[i]) * b[i]);
  return sum;
}

struct HeadOutput {
  const uint16_t* out;  // fp16 [head_dim]
  float lse;
};

// One query head [head_dim] against the softmax over a row in double.
void expect_attention(double sm_scale, const DecodedRow& row, const Basis& keys,
                      const Basis& values, const std::vector<float>& q, const HeadOutput& got) {
  const auto dim = static_cast<int32_t>(q.size());
  std::vector<float> mapped = q;
  keys.apply_to_queries(mapped.data(), 1);
  std::vector<double> logits;
  double most = -INFINITY, error = 0;
  for (size_t i = 0; i < row.k.size(); ++i) {
    logits.push_back(sm_scale * dot(q, row.k[i]));
    most = std::max(most, logits.back());
    // q is rounded to fp16 in the basis: 2^-11 of each product. What is mapped back is rounded to
    // fp32, which 2^-20 of both sums covers for a condition of 16.
    error = std::max(error, sm_scale * (absolute_dot(mapped, row.coordinates[i]) * 0x1p-11 +
                                        absolute_dot(q, row.k[i]) * 0x1p-20));
  }
  double sum = 0;
  for (const double x : logits) sum += std::exp(x - most);
  EXPECT_NEAR(got.lse, most + std::log(sum), error + 1e-6 * (1 + std::fabs(most)));
  std::vector<double> expected(dim, 0.0), spread(dim, 0.0);
  for (size_t i = 0; i < row.v.size(); ++i) {
    const double p = std::exp(logits[i] - most) / sum;
    for (int32_t d = 0; d < dim; ++d) {
      expected[d] += p * row.v[i][d];
      spread[d] += p * std::fabs(row.v[i][d]);
    }
  }
  // Probabilities are off by exp(2 error) at most. The output is rounded to fp16 as coordinates,
  // 2^-11 of each that it is made of, and once more.
  std::vector<float> coordinates(expected.begin(), expected.end());
  values.apply(coordinates.data(), 1);
  for (int32_t d = 0; d < dim; ++d) {
    double rounded = std::fabs(expected[d]);
    for (int32_t i = 0; i < dim; ++i) {
      if (values.kind != BasisKind::kMatrix) break;
      rounded += std::fabs(coordinates[i] * values.inverse[i * dim + d]);
    }
    if (values.kind == BasisKind::kHadamard) {
      for (const float y : coordinates) rounded += std::fabs(y) / std::sqrt(dim);
    }
    if (values.kind == BasisKind::kMean) rounded += std::fabs(coordinates[d]);
    EXPECT_NEAR(half_to_float(got.out[d]), expected[d],
                spread[d] * std::expm1(2 * error) * 2 + rounded * 0x1p-10 + 1e-6)
        << "channel " << d;
  }
}

class StoreBasisAttention : public ::testing::Test {
 protected:
  StoreBasisAttention() : seed_(std::random_device{}()), rng_(seed_) {}
  std::vector<float> query(const std::vector<uint8_t>& q, int32_t head, int32_t dim) const {
    std::vector<float> x(dim);
    for (int32_t d = 0; d < dim; ++d)
      x[d] = load_element(q.data(), DType::kFloat16, head * dim + d);
    return x;
  }
  RandomInput input_;
  uint32_t seed_;
  std::mt19937 rng_;
};

TEST_F(StoreBasisAttention, AttendsToTheDecodedCacheMappedBack) {
  for (const BasisKind keys : kBasisKinds) {
    for (const BasisKind values : kBasisKinds) {
      SCOPED_TRACE(std::to_string(static_cast<int32_t>(keys)) + " " +
                   std::to_string(static_cast<int32_t>(values)) + " seed " + std::to_string(seed_));
      const KvStoreConfig config = basis_config(&rng_, keys, values);
      const CacheLayout& layout = config.layout;
      const auto store = make_basis_store(config);
      const SequenceId id = *store->add_sequence();
      fill(store.get(), &input_, id, 70, 9);
      if (HasFatalFailure()) return;
      const std::vector<uint8_t> q =
          input_.values(DType::kFloat16, layout.num_q_heads, layout.head_dim);
      const Attended a = attend(store.get(), id, 1, q);
      const StoreView& view = store->inner().view();
      for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
        const int32_t within = layout.num_kv_heads + h;
        const Basis &k = config.basis->keys[within], &v = config.basis->values[within];
        const DecodedRow row = decode(view, view.row_of(id.slot, 1, h), k, v);
        ASSERT_GT(row.k.size(), 8u);
        std::vector<double> largest(kProbabilityStride, 0.0);
        double tolerance = 0;
        for (int32_t g = 2 * h; g < 2 * h + 2; ++g) {
          const std::vector<float> x = query(q, g, layout.head_dim);
          expect_attention(layout.sm_scale, row, k, v, x, {&a.out[g * layout.head_dim], a.lse[g]});
          std::vector<float> mapped = x;
          k.apply_to_queries(mapped.data(), 1);
          for (size_t i = 0; i < row.k.size(); ++i) {
            const double p = std::exp(layout.sm_scale * dot(x, row.k[i]) - a.lse[g]);
            largest[row.positions[i]] = std::max(largest[row.positions[i]], p);
            tolerance = std::max(tolerance, 1e-5 + layout.sm_scale * 0x1p-10 *
                                                       absolute_dot(mapped, row.coordinates[i]));
          }
        }
        for (int32_t p = 0; p < 79; ++p) {
          EXPECT_NEAR(a.probabilities[h * kProbabilityStride + p], std::min(largest[p], 1.0),
                      std::expm1(2 * tolerance) * (largest[p] + 1e-6) + 1e-6)
              << p;
        }
      }
    }
  }
}

// The same queries in bfloat16: as exact in fp16, so the LSE is the same and the output is rounded
// once more.
TEST_F(StoreBasisAttention, TakesQueriesOfTheLayoutsType) {
  const KvStoreConfig config = basis_config(&rng_, BasisKind::kMatrix, BasisKind::kMatrix);
  const auto store = make_basis_store(config);
  const SequenceId id = *store->add_sequence();
  fill(store.get(), &input_, id, 30, 2);
  std::vector<uint16_t> halves(4 * 64), bfloats(4 * 64);
  for (size_t i = 0; i < halves.size(); ++i) {
    bfloats[i] = float_to_bfloat16(input_.real(0.5f, 2) * (input_.chance(0.5) ? 1 : -1));
    halves[i] = float_to_half(bfloat16_to_float(bfloats[i]));
  }
  std::vector<uint16_t> out[2] = {std::vector<uint16_t>(4 * 64), std::vector<uint16_t>(4 * 64)};
  std::vector<float> lse[2] = {std::vector<float>(4), std::vector<float>(4)};
  for (const int32_t b : {0, 1}) {
    AttendRequest request;
    request.sequences = {&id, 1};
    request.dtype = b == 0 ? DType::kFloat16 : DType::kBFloat16;
    request.q = b == 0 ? halves.data() : bfloats.data();
    request.out = out[b].data();
    request.lse = lse[b].data();
    ASSERT_TRUE(store->attend(request));
    request.dtype = DType::kFloat32;
    EXPECT_EQ(store->attend(request).code(), StatusCode::kUnsupported);
  }
  EXPECT_EQ(lse[0], lse[1]);
  for (size_t i = 0; i < halves.size(); ++i) {
    const float expected = half_to_float(out[0][i]);
    ASSERT_NEAR(bfloat16_to_float(out[1][i]), expected, 0x1.2p-8f * std::fabs(expected) + 1e-6f);
  }
  KvStoreConfig other = config;
  other.layout.dtype = DType::kFloat16;
  const auto fp16_store = make_basis_store(other);
  const SequenceId there = *fp16_store->add_sequence();
  fill(fp16_store.get(), &input_, there, 30, 2);
  AttendRequest request;
  request.sequences = {&there, 1};
  request.dtype = DType::kBFloat16;
  request.q = bfloats.data();
  request.out = out[0].data();
  EXPECT_EQ(fp16_store->attend(request).code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace tierkv::testing

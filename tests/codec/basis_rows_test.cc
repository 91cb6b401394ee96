// Bases of queries and of whole caches, what validate() refuses, and the parts of a matrix.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "codec/format/basis_parts.h"
#include "codec/gpu/basis_batch.h"
#include "tests/support/basis_source.h"
#include "tests/support/fresh_random.h"

namespace tierkv::testing {
namespace {

class BasisRows : public RandomTest {};

constexpr BasisKind kKinds[] = {BasisKind::kNone, BasisKind::kMean, BasisKind::kHadamard,
                                BasisKind::kMatrix};

TEST_F(BasisRows, ProductsWithQueriesSurviveEveryBasis) {
  for (const BasisKind kind : kKinds) {
    for (const int32_t d : {32, 64, 96, 128, 256}) {
      const Basis basis = random_basis(&rng_, kind, d);
      ASSERT_TRUE(basis.validate()) << basis.validate().message() << " seed " << seed_;
      const std::vector<float> x = random_values(&rng_, d, 1, 2), q = random_values(&rng_, d, 0, 1);
      std::vector<float> y = x, mapped = q;
      basis.apply(y.data(), 1);
      basis.apply_to_queries(mapped.data(), 1);
      double expected = 0, found = basis.mean_product(q.data()), size = 0;
      for (int32_t i = 0; i < d; ++i) {
        expected += static_cast<double>(x[i]) * q[i];
        found += static_cast<double>(y[i]) * mapped[i];
        size += std::fabs(static_cast<double>(y[i]) * mapped[i]);
      }
      // Coordinates and queries are rounded to fp32 after log2 d additions in fp32 at most, and
      // the inverse of a matrix is one to fp32's precision times its condition, at most 16.
      EXPECT_NEAR(found, expected, (size + std::fabs(expected)) * 0x1p-24 * 16 * 16) << seed_;
    }
  }
}

TEST_F(BasisRows, ValidateNamesWhatIsWrong) {
  const Basis matrix = random_matrix_basis(&rng_, 64);
  const Basis hadamard = Basis::hadamard(64), mean = Basis::mean_removed({1, 2});
  struct Case {
    Basis basis;
    const char* text;
    std::function<void(Basis*)> change;
  };
  const Case cases[] = {
      {hadamard, "head_dim", [](Basis* b) { b->head_dim = 0; }},
      {hadamard, "signs has 63", [](Basis* b) { b->signs.pop_back(); }},
      {hadamard, "signs must be", [](Basis* b) { b->signs[5] = 0; }},
      {hadamard, "signs is not finite", [](Basis* b) { b->signs[5] = NAN; }},
      {hadamard, "forward has 4", [](Basis* b) { b->forward.assign(4, 1.0f); }},
      {mean, "mean has 0", [](Basis* b) { b->mean.clear(); }},
      {mean, "mean is not finite", [](Basis* b) { b->mean[1] = INFINITY; }},
      {mean, "mean exceeds", [](Basis* b) { b->mean[1] = 65536; }},
      {mean, "a mean without", [](Basis* b) { b->kind = BasisKind::kNone; }},
      {mean, "unknown kind", [](Basis* b) { b->kind = static_cast<BasisKind>(7); }},
      {matrix, "forward has 4095", [](Basis* b) { b->forward.pop_back(); }},
      {matrix, "inverse has 0", [](Basis* b) { b->inverse.clear(); }},
      {matrix, "inverse is not finite", [](Basis* b) { b->inverse[9] = NAN; }},
      {matrix, "not the identity", [](Basis* b) { b->inverse[64 * 3 + 4] += 1; }},
      // Two equal rows: nothing is its inverse.
      {matrix, "not the identity",
       [](Basis* b) { std::copy_n(b->forward.begin(), 64, b->forward.begin() + 64); }},
      {matrix, "not the identity", [](Basis* b) { b->forward.assign(64 * 64, 0.0f); }},
  };
  for (const Case& c : cases) {
    ASSERT_TRUE(c.basis.validate()) << c.text;
    Basis changed = c.basis;
    c.change(&changed);
    const Status status = changed.validate();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << c.text;
    EXPECT_NE(status.message().find(c.text), std::string::npos) << status.message();
  }
}

TEST_F(BasisRows, ACacheHasOneKindPerComponentAndAnIdentity) {
  CacheLayout layout;
  layout.num_layers = 2;
  layout.num_q_heads = layout.num_kv_heads = 3;
  layout.head_dim = 64;
  layout.sm_scale = 1;
  const CacheBasis basis =
      random_cache_basis(&rng_, layout, BasisKind::kMatrix, BasisKind::kHadamard);
  ASSERT_TRUE(basis.validate(layout)) << basis.validate(layout).message();
  const auto refused = [&](const char* text, const std::function<void(CacheBasis*)>& change) {
    CacheBasis changed = basis;
    change(&changed);
    EXPECT_NE(changed.validate(layout).message().find(text), std::string::npos)
        << changed.validate(layout).message();
    EXPECT_NE(changed.identity(), basis.identity()) << text;
  };
  refused("keys: 5 bases", [](CacheBasis* b) { b->keys.pop_back(); });
  refused("values: layer 1, kv_head 2: kind differs",
          [](CacheBasis* b) { b->values[5] = Basis::none(64); });
  refused("keys: layer 1, kv_head 0: means of some",
          [](CacheBasis* b) { b->keys[3].mean.clear(); });
  refused("keys: layer 0, kv_head 1: inverse", [](CacheBasis* b) { b->keys[1].inverse.clear(); });
  refused("values: layer 0, kv_head 0: head_dim",
          [](CacheBasis* b) { b->values.assign(6, Basis::hadamard(128)); });
  refused("bases of 3 layers", [](CacheBasis* b) { b->num_layers = 3; });
  CacheBasis other = basis;
  EXPECT_EQ(other.identity(), basis.identity());
  other.keys[4].mean[63] = std::nextafter(other.keys[4].mean[63], 100.0f);
  EXPECT_NE(other.identity(), basis.identity());
  other = basis;
  std::swap(other.keys, other.values);
  EXPECT_NE(other.identity(), basis.identity());
  layout.head_dim = 80;
  EXPECT_EQ(CacheBasis::hadamard(layout).validate(layout).code(), StatusCode::kUnsupported);
  layout.head_dim = 512;
  EXPECT_EQ(CacheBasis::hadamard(layout).validate(layout).code(), StatusCode::kUnsupported);
}

// Every element of the matrix is in exactly one place, and its parts add up to it.
TEST_F(BasisRows, PartsAddUpToTheMatrix) {
  for (const int32_t n : {64, 96, 256}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      Basis basis = random_matrix_basis(&rng_, n);
      basis.forward[n + 3] = 1e-9f;
      const PackedBasis packed = pack_basis({basis, basis}, BasisUse::kApply, dtype);
      const int32_t parts = basis_parts(dtype == DType::kBFloat16);
      ASSERT_EQ(packed.parts.size(), size_t(n) * n * parts);
      const uint32_t* second = packed.parts.data() + packed.parts.size() / 2;
      std::vector<double> sum(n * n, 0.0);
      std::vector<int32_t> seen(n * n, 0);
      for (int32_t block = 0; block < n * n / 128 * parts; ++block) {
        const int32_t step = block / parts / (n / 8), tile = block / parts % (n / 8);
        for (int32_t lane = 0; lane < 32; ++lane) {
          for (int32_t i = 0; i < 4; ++i) {
            const auto bits =
                static_cast<uint16_t>(second[block * 64 + 2 * lane + i / 2] >> (16 * (i % 2)));
            const int32_t at = part_row(step, lane, i / 2, i % 2) * n + part_column(tile, lane);
            sum[at] += dtype == DType::kFloat16 ? half_to_float(bits) : bfloat16_to_float(bits);
            ++seen[at];
          }
        }
      }
      for (int32_t i = 0; i < n * n; ++i) {
        ASSERT_EQ(seen[i], parts);
        // 22 bits of the element and 2^-25 beside a largest element of 2^13 at least.
        ASSERT_NEAR(sum[i] * packed.unscale[1], basis.forward[i],
                    std::fabs(basis.forward[i]) * 0x1p-22 + 0x1p-25 * packed.unscale[1])
            << seed_;
      }
    }
  }
}

}  // namespace
}  // namespace tierkv::testing

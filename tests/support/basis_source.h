// Random bases for tests, of any kind.
#pragma once

#include <cmath>
#include <random>
#include <vector>

#include "tierkv/basis.h"

namespace tierkv::testing {

inline std::vector<float> random_values(std::mt19937* rng, int64_t n, float offset, float scale) {
  std::normal_distribution<float> normal(offset, scale);
  std::vector<float> x(n);
  for (float& v : x) v = normal(*rng);
  return x;
}

// A diagonal of powers of two between 1/4 and 4 and rotations of pairs of coordinates: invertible,
// not orthogonal, and its inverse is known without a solver.
inline Basis random_matrix_basis(std::mt19937* rng, int32_t n) {
  std::vector<double> forward(n * n, 0.0), inverse(n * n, 0.0);
  std::uniform_real_distribution<double> exponent(-2, 2), angle(0, 6.28);
  std::uniform_int_distribution<int32_t> index(0, n - 1);
  for (int32_t i = 0; i < n; ++i) {
    const double x = std::exp2(exponent(*rng));
    forward[i * n + i] = x;
    inverse[i * n + i] = 1 / x;
  }
  // Rotations of two coordinates: of forward's columns, and of inverse's rows.
  for (int32_t round = 0; round < 8 * n; ++round) {
    const int32_t a = index(*rng), b = (a + 1 + index(*rng) % (n - 1)) % n;
    const double c = std::cos(angle(*rng)), s = std::sqrt(1 - c * c);
    for (int32_t i = 0; i < n; ++i) {
      double &x = forward[i * n + a], &y = forward[i * n + b];
      const double rotated = c * x + s * y;
      y = c * y - s * x;
      x = rotated;
      double &p = inverse[a * n + i], &q = inverse[b * n + i];
      const double turned = c * p + s * q;
      q = c * q - s * p;
      p = turned;
    }
  }
  return Basis::matrix(random_values(rng, n, 0, 3),
                       std::vector<float>(forward.begin(), forward.end()),
                       std::vector<float>(inverse.begin(), inverse.end()));
}

inline Basis random_basis(std::mt19937* rng, BasisKind kind, int32_t n) {
  if (kind == BasisKind::kMatrix) return random_matrix_basis(rng, n);
  if (kind == BasisKind::kMean) return Basis::mean_removed(random_values(rng, n, 0, 3));
  if (kind == BasisKind::kNone) return Basis::none(n);
  Basis b = Basis::hadamard(n);
  std::bernoulli_distribution coin;
  for (float& sign : b.signs) sign = coin(*rng) ? 1.0f : -1.0f;
  return b;
}

inline CacheBasis random_cache_basis(std::mt19937* rng, const CacheLayout& layout, BasisKind keys,
                                     BasisKind values) {
  CacheBasis basis;
  basis.num_layers = layout.num_layers;
  basis.num_kv_heads = layout.num_kv_heads;
  for (int32_t r = 0; r < layout.num_layers * layout.num_kv_heads; ++r) {
    basis.keys.push_back(random_basis(rng, keys, layout.head_dim));
    basis.values.push_back(random_basis(rng, values, layout.head_dim));
  }
  return basis;
}

}  // namespace tierkv::testing

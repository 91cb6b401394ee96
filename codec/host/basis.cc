// SPDX-License-Identifier: Apache-2.0
#include "tierkv/basis.h"

#include <cmath>
#include <utility>

#include "codec/format/rotation.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

constexpr uint64_t kSignSeed = 0x7469657264;

uint64_t splitmix64(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::vector<float> rounded_to_half(std::vector<float> x) {
  for (float& v : x) v = half_to_float(float_to_half(v));
  return x;
}

}  // namespace

std::vector<float> hadamard_signs(int32_t head_dim) {
  std::vector<float> signs(head_dim);
  uint64_t state = kSignSeed;
  for (float& s : signs) s = (splitmix64(&state) >> 63) != 0 ? -1.0f : 1.0f;
  return signs;
}

Basis Basis::none(int32_t head_dim) {
  Basis b;
  b.head_dim = head_dim;
  return b;
}

Basis Basis::mean_removed(std::vector<float> mean) {
  Basis b;
  b.kind = BasisKind::kMean;
  b.head_dim = static_cast<int32_t>(mean.size());
  b.mean = rounded_to_half(std::move(mean));
  return b;
}

Basis Basis::hadamard(int32_t head_dim, std::vector<float> mean) {
  Basis b;
  b.mean = rounded_to_half(std::move(mean));
  b.kind = BasisKind::kHadamard;
  b.head_dim = head_dim;
  b.signs = hadamard_signs(head_dim);
  return b;
}

void Basis::apply(float* x, int64_t tokens) const {
  for (int64_t t = 0; t < tokens; ++t, x += head_dim) {
    for (size_t d = 0; d < mean.size(); ++d) x[d] -= mean[d];
    if (kind == BasisKind::kHadamard) apply_to_queries(x, 1);
  }
}

void Basis::undo(float* x, int64_t tokens) const {
  for (int64_t t = 0; t < tokens; ++t, x += head_dim) {
    if (kind == BasisKind::kHadamard) {
      ::tierkv::hadamard(x, head_dim);
      for (int32_t d = 0; d < head_dim; ++d) x[d] *= signs[d];
    }
    for (size_t d = 0; d < mean.size(); ++d) x[d] += mean[d];
  }
}

void Basis::apply_to_queries(float* q, int64_t queries) const {
  for (int64_t t = 0; t < queries; ++t, q += head_dim) {
    if (kind == BasisKind::kHadamard) {
      for (int32_t d = 0; d < head_dim; ++d) q[d] *= signs[d];
      ::tierkv::hadamard(q, head_dim);
    }
  }
}

int64_t Basis::stored_bytes() const {
  return 2 * static_cast<int64_t>(mean.size());
}

}  // namespace tierkv

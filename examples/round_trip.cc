// SPDX-License-Identifier: Apache-2.0
// Compress the keys and values of 64 tokens into one unified page (8-bit keys, 4-bit values), read
// them back, and measure the error.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "tierkv/tierkv.h"

int main() {
  using namespace tierkv;
  constexpr int kHeadDim = 128, kTokens = 64;
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  std::vector<float> k(kTokens * kHeadDim), v(k.size()), scores(kTokens, 1.0f);
  std::vector<int32_t> positions(kTokens);
  for (float& x : k) x = normal(rng);
  for (float& x : v) x = normal(rng);
  for (int i = 0; i < kTokens; ++i) positions[i] = i;

  // [readme]
  const TierFormat format = token_wise_tier(8, 4);  // K8V4; any bits of {16, 8, 4, 2} for each
  const Result<PageChoice> size = choose_page_size({format, token_wise_tier(4, 2)}, kHeadDim);
  if (!size) return 1;
  std::vector<uint8_t> page(size->page_bytes);  // 13312: 64 tokens of K8V4 or 112 of K4V2
  const PageFormat page_format{format, kHeadDim, size->page_bytes, DType::kFloat16};

  TokenBatch in;
  in.k = k.data();
  in.v = v.data();
  in.scores = scores.data();
  in.positions = positions.data();
  in.count = kTokens;
  in.dtype = DType::kFloat32;
  if (!encode_page(page_format, page.data(), 0, in)) return 1;

  std::vector<float> k_back(k.size()), v_back(v.size());
  TokenOutput out;
  out.k = k_back.data();
  out.v = v_back.data();
  out.count = kTokens;
  if (!decode_page(page_format, page.data(), 0, out)) return 1;
  // [readme]

  double error = 0, norm = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    error += std::pow(v[i] - v_back[i], 2);
    norm += v[i] * v[i];
  }
  std::printf("%d tokens in %d bytes instead of %d; relative error of the values %.3f\n", kTokens,
              size->page_bytes, 2 * 2 * kTokens * kHeadDim, std::sqrt(error / norm));
  // 4-bit min-max codes of normal values: about a tenth of their norm.
  return std::sqrt(error / norm) < 0.15 ? 0 : 1;
}

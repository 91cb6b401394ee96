// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string>

#include "codec/format/rope_turn.h"

namespace tierkv {
namespace {

constexpr int64_t kMostPositions = int64_t{1} << 31;
constexpr double kMostAngle = 0x1p32;
// pi / 2 in three parts. The first two have 21 bits, so that their products with a quarter count
// below 2^32 are exact.
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
constexpr double kHalfPi[3] = {0x1.921fbp+0, 0x1.5110ap-22, 0x1.4611a62633146p-42};

struct CosSin {
  double cos, sin;
};

// |x| <= 0.8: the first neglected terms are below 2^-70.
CosSin small_turn(double x) {
  const double x2 = x * x;
  double cosine = 1, sine = 1;
  for (int32_t n = 20; n >= 2; n -= 2) {
    cosine = 1 - cosine * x2 / (n * (n - 1));
    sine = 1 - sine * x2 / (n * (n + 1));
  }
  return {cosine, sine * x};
}

}  // namespace

Turn rope_turn(int64_t position, float frequency) {
  // The angle as an unevaluated sum: both products are exact, and so is the error of their sum.
  const double f = frequency;
  const double high = static_cast<double>(position >> 16 << 16) * f;
  const double low = static_cast<double>(position & 0xffff) * f;
  const double angle = high + low, error = low - (angle - high);
  const double quarters = std::floor(angle * kTwoOverPi + 0.5);
  double x = angle;
  for (const double part : kHalfPi) x -= quarters * part;
  const CosSin turn = small_turn(x + error);
  const auto c = static_cast<float>(turn.cos), s = static_cast<float>(turn.sin);
  switch (static_cast<int64_t>(quarters) % 4) {
    case 0:
      return {c, s};
    case 1:
      return {-s, c};
    case 2:
      return {-c, -s};
    default:
      return {s, -c};
  }
}

Result<RopeTable> make_rope_table(const Rope& rope, int32_t head_dim, int64_t positions) {
  if (Status s = rope.validate(head_dim); !s) return s;
  if (positions < 1 || positions > kMostPositions) {
    return Status(StatusCode::kOutOfRange, "rope: a table has 1 to 2^31 positions");
  }
  RopeTable table;
  table.pairing = rope.pairing;
  table.pairs = rope.rotary_dims / 2;
  table.blocks = static_cast<int32_t>((positions + kBlockTokens - 1) / kBlockTokens);
  const int64_t last = std::max<int64_t>(table.positions() - kBlockTokens, kBlockTokens - 1);
  for (const float f : rope.inv_freq) {
    if (static_cast<double>(last) * f > kMostAngle) {
      return Status(StatusCode::kOutOfRange,
                    "rope: position " + std::to_string(last) + " turns by more than 2^32");
    }
  }
  for (int64_t i = 0; i < kBlockTokens; ++i) {
    for (const float f : rope.inv_freq) table.place.push_back(rope_turn(i, f));
  }
  for (int64_t i = 0; i < table.blocks; ++i) {
    for (const float f : rope.inv_freq) table.block.push_back(rope_turn(kBlockTokens * i, f));
  }
  return table;
}

}  // namespace tierkv

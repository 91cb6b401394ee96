// Changes of coordinates before quantisation: y = T (x - mean). Exact up to single-precision
// rounding, applied to K (and to q at read) and to V (undone on the output).
//
//   mean      static channel means removed; free at read, because q . mean is the same for every
//   token of a row hadamard  y = H diag(signs) x / sqrt(n), seeded signs; head_dim that is no power
//   of two is cut into powers of two
//             in descending order (96 = 64 + 32)
//   matrix    a calibrated head_dim x head_dim matrix and its inverse (a profile), means removed
//   first
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/format.h"

namespace tierkv {

// +1 or -1 per channel: bit 63 of the i-th output of splitmix64 with the library's fixed seed; set
// means -1.
std::vector<float> hadamard_signs(int32_t head_dim);

struct Basis {
  BasisKind kind = BasisKind::kNone;
  int32_t head_dim = 0;
  std::vector<float> mean;     // [head_dim] for kMean and kMatrix, as stored (fp16 values)
  std::vector<float> signs;    // [head_dim] for kHadamard
  std::vector<float> forward;  // [head_dim, head_dim] for kMatrix, y_j = sum_i x_i forward[i][j]
  std::vector<float> inverse;  // [head_dim, head_dim] for kMatrix

  static Basis none(int32_t head_dim);
  static Basis mean_removed(std::vector<float> mean);  // rounds the means to fp16
  static Basis hadamard(int32_t head_dim);
  static Basis matrix(std::vector<float> mean, std::vector<float> forward,
                      std::vector<float> inverse);

  // x [tokens, head_dim], in place.
  void apply(float* x, int64_t tokens) const;
  void undo(float* x, int64_t tokens) const;
  // What a sequence that carries its own basis pays for it: fp16 means, fp16 matrices.
  int64_t stored_bytes() const;
};

}  // namespace tierkv

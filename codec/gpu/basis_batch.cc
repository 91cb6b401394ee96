#include "codec/gpu/basis_batch.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "codec/format/basis_parts.h"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

// What the vectors are multiplied by from the right.
std::vector<float> matrix_of(const Basis& basis, BasisUse use) {
  if (use == BasisUse::kApply) return basis.forward;
  if (use == BasisUse::kUndo) return basis.inverse;
  const int32_t n = basis.head_dim;
  std::vector<float> transposed(basis.inverse.size());
  for (int32_t i = 0; i < n; ++i) {
    for (int32_t j = 0; j < n; ++j) transposed[i * n + j] = basis.inverse[j * n + i];
  }
  return transposed;
}

std::vector<float> mean_of(const Basis& basis, BasisUse use) {
  std::vector<float> mean = basis.mean;
  if (basis.kind != BasisKind::kMatrix || use != BasisUse::kApply || mean.empty()) return mean;
  const int32_t n = basis.head_dim;
  for (int32_t j = 0; j < n; ++j) {
    double sum = 0;
    for (int32_t i = 0; i < n; ++i) {
      sum += static_cast<double>(basis.mean[i]) * basis.forward[i * n + j];
    }
    mean[j] = static_cast<float>(sum);
  }
  return mean;
}

// The power of two that brings the largest element to 2^13 .. 2^14: parts of all but the least
// elements are then normal numbers, and sums stay far from fp32's ends.
float scale_of(const std::vector<float>& matrix) {
  float largest = 0;
  for (const float x : matrix) largest = std::max(largest, std::fabs(x));
  return largest == 0 ? 1.0f : std::ldexp(1.0f, 13 - std::ilogb(largest));
}

void append_parts(const std::vector<float>& matrix, int32_t n, DType dtype,
                  std::vector<uint32_t>* words) {
  const bool bfloat16 = dtype == DType::kBFloat16;
  const int32_t parts = basis_parts(bfloat16);
  const float scale = scale_of(matrix);
  const size_t first = words->size();
  words->resize(first + static_cast<size_t>(n) * n / 2 * parts);
  uint32_t* out = words->data() + first;
  for (int32_t step = 0; step < n / 16; ++step) {
    for (int32_t tile = 0; tile < n / 8; ++tile) {
      for (int32_t lane = 0; lane < 32; ++lane) {
        for (int32_t i = 0; i < 4; ++i) {
          const int32_t row = part_row(step, lane, i / 2, i % 2);
          float rest = matrix[row * n + part_column(tile, lane)] * scale;
          for (int32_t p = 0; p < parts; ++p) {
            const uint16_t bits = bfloat16 ? float_to_bfloat16(rest) : float_to_half(rest);
            rest -= bfloat16 ? bfloat16_to_float(bits) : half_to_float(bits);
            const int64_t block = (static_cast<int64_t>(step) * (n / 8) + tile) * parts + p;
            out[(block * 32 + lane) * 2 + i / 2] |= static_cast<uint32_t>(bits) << (16 * (i % 2));
          }
        }
      }
    }
  }
}

}  // namespace

PackedBasis pack_basis(const std::vector<Basis>& rows, BasisUse use, DType dtype) {
  PackedBasis packed;
  packed.kind = rows[0].kind;
  packed.use = use;
  packed.head_dim = rows[0].head_dim;
  for (const Basis& basis : rows) {
    packed.signs.insert(packed.signs.end(), basis.signs.begin(), basis.signs.end());
    const std::vector<float> mean = mean_of(basis, use);
    packed.mean.insert(packed.mean.end(), mean.begin(), mean.end());
    if (basis.kind != BasisKind::kMatrix) continue;
    const std::vector<float> matrix = matrix_of(basis, use);
    packed.unscale.push_back(1.0f / scale_of(matrix));
    if (dtype == DType::kFloat32) {
      packed.matrix.insert(packed.matrix.end(), matrix.begin(), matrix.end());
    } else {
      append_parts(matrix, basis.head_dim, dtype, &packed.parts);
    }
  }
  return packed;
}

Status BasisVectors::validate() const {
  if (operand.head_dim < 32 || operand.head_dim > 256 || operand.head_dim % 32 != 0) {
    return Status(StatusCode::kUnsupported, "a basis of this head_dim on the device");
  }
  if (tokens < 0 || tokens > INT32_MAX / 32) return invalid("tokens");
  if (kv_heads < 1 || heads < kv_heads || heads % kv_heads != 0 || heads > 16384) {
    return invalid("heads");
  }
  if (first_row < 0) return invalid("first_row");
  if (x == nullptr || y == nullptr || !is_aligned(x) || !is_aligned(y)) {
    return invalid("x or y is null or misaligned");
  }
  if (operand.use == BasisUse::kQuery && dtype == DType::kFloat32) {
    return invalid("queries are fp16 or bfloat16");
  }
  if (operand.use == BasisUse::kUndo &&
      (dtype != DType::kFloat16 || out_dtype == DType::kFloat32)) {
    return invalid("coordinates of outputs are fp16, outputs fp16 or bfloat16");
  }
  if (operand.kind == BasisKind::kHadamard && operand.signs == nullptr) return invalid("signs");
  if (operand.kind == BasisKind::kMatrix) {
    const bool single = dtype == DType::kFloat32;
    if (single ? operand.matrix == nullptr : operand.parts == nullptr) return invalid("matrix");
    if (operand.unscale == nullptr) return invalid("unscale");
  }
  if (operand.use == BasisUse::kQuery && operand.mean != nullptr && lse_shift == nullptr) {
    return invalid("lse_shift");
  }
  if (operand.use == BasisUse::kUndo && (lse_in == nullptr || lse_out == lse_in)) {
    return invalid("lse_in");
  }
  return Status::ok();
}

}  // namespace tierkv

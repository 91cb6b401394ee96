// Bases on the device: the vectors of one layer, of all its tokens and heads, mapped by one launch.
//
// Keys and values of new tokens are mapped to coordinates in single precision, which quantise and
// pack then read as they read any input; coordinates of queries and outputs are fp16. Means and
// Hadamard give the host's bits (codec/host/basis.cc). A coordinate sum_i x_i m_i of a matrix is
// within 2^-16 (sum_i |x_i m_i| + |mean_j|) of the host's, before it is rounded to its type
// (codec/gpu/basis_product.cuh says why).
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/basis.h"
#include "tierkv/half.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

enum class BasisUse : int32_t {
  kApply = 0,  // keys or values to coordinates: y is fp32
  kQuery = 1,  // queries to the keys' coordinates: fp16 or bfloat16 to fp16
  kUndo = 2,   // outputs from the values' coordinates: fp16 to fp16 or bfloat16
};

// The bases of one component as kernels read them, rows (layer, kv_head); 16-byte aligned.
struct BasisOperand {
  BasisKind kind = BasisKind::kNone;
  BasisUse use = BasisUse::kApply;
  int32_t head_dim = 0;
  const float* signs = nullptr;  // [rows, head_dim] of kHadamard
  const float* mean = nullptr;   // [rows, head_dim]; null: none. kMatrix with kApply: mean forward
  // kMatrix, for 16-bit input (codec/format/basis_parts.h); of fp32 input instead the product's
  // matrix.
  const uint32_t* parts = nullptr;
  const float* unscale = nullptr;  // [rows] what a product of parts is multiplied by
  const float* matrix = nullptr;   // [rows, head_dim, head_dim] y_j = sum_i x_i matrix[i][j]

  TKV_HD int64_t part_words(int32_t parts_of_value) const {  // of one row
    return static_cast<int64_t>(head_dim) * head_dim / 2 * parts_of_value;
  }
};
// The host's copy of what an operand points to.
struct PackedBasis {
  BasisKind kind = BasisKind::kNone;
  BasisUse use = BasisUse::kApply;
  int32_t head_dim = 0;
  std::vector<float> signs, mean, unscale, matrix;
  std::vector<uint32_t> parts;
};
// Of valid bases of one kind; dtype is that of the vectors to be mapped.
PackedBasis pack_basis(const std::vector<Basis>& rows, BasisUse use, DType dtype);

// One component of one layer. Vectors that share a row lie in `heads / kv_heads` neighbours, as
// query heads do.
struct BasisVectors {
  BasisOperand operand;   // of all rows
  int32_t first_row = 0;  // of the layer: layer * kv_heads
  int32_t kv_heads = 0;
  int32_t heads = 0;  // a multiple of kv_heads
  int64_t tokens = 0;
  DType dtype = DType::kFloat16;      // of x
  DType out_dtype = DType::kFloat16;  // of y, with kUndo
  const void* x = nullptr;            // [tokens, heads, head_dim], 16-byte aligned
  void* y = nullptr;                  // likewise, fp32 with kApply, fp16 with kQuery
  // kQuery: sm_scale q . mean(K), what lse lacks. kUndo reads it.
  float* lse_shift = nullptr;  // [tokens, heads]; null where keys have no means
  float sm_scale = 1;
  // kUndo: an lse of minus infinity makes the output 0.
  const float* lse_in = nullptr;  // [tokens, heads]
  float* lse_out = nullptr;       // lse_in + lse_shift; not lse_in; may be null

  // kInvalidArgument, kUnsupported.
  Status validate() const;
};
// One or two components (keys and values of the same tokens) in the fewest launches. Zero tokens
// are nothing to do.
struct BasisBatch {
  BasisVectors part[2];
  int32_t count = 0;
};
Status map_basis(const BasisBatch& batch, GpuStream stream);

}  // namespace tierkv

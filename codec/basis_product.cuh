// The matrix basis on tensor cores: y = x M, x of 16 bits, M split into 16-bit parts
// (codec/basis_parts.h), sums in fp32.
//
// Error against the exact sum, in units of magnitude = sum_i |x_i m_i|: x is exact. A part is
// rounded to 11 bits of what the parts before it left (8 for bf16), so two of fp16 leave 2^-22 |m|
// and, where the second is subnormal, 2^-25 against a largest element of 2^13; three of bf16
// 2^-24 |m|. A tensor core adds 16 products to the sum and cuts it to 24 bits; products within are
// aligned to the largest and cut, too: at most 2^-22 of magnitude for each of the parts * D / 16
// instructions, 2^-22 * 32 for D = 256. Together less than 2^-16, half of it in the worst case. The
// host's sum in double, rounded once, has 2^-24. Removing the mean as mean M, rounded to fp32,
// after the product adds 2^-24 of |mean M| twice.
#pragma once

#include "codec/basis_parts.h"
#include "codec/basis_vectors.cuh"
#include "codec/element.h"

namespace tierkv {

inline constexpr int32_t kTileVectors = 16;  // of a warp

template <DType kDtype>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
  if constexpr (kDtype == DType::kBFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  }
}

// kSteps = head_dim / 16; a CTA makes kTiles * 8 columns, its warps 16 vectors each at a time.
template <int32_t kSteps, int32_t kTiles, DType kDtype>
struct BasisProduct {
  static constexpr int32_t kDim = 16 * kSteps;
  static constexpr int32_t kParts = basis_parts(kDtype == DType::kBFloat16);
  static constexpr int32_t kColumnBlocks = kDim / (8 * kTiles);
  static constexpr int32_t kStepWords = kTiles * kParts * 64;  // of shared memory
  static constexpr int32_t kSharedBytes = kSteps * kStepWords * 4;

  // Two of the tile's vectors, g and g + 8.
  struct Pair {
    int64_t vector[2];
    bool is_there[2];
  };

  static __device__ void load_matrix(const BasisOperand& o, int64_t row, int32_t block,
                                     uint4* shared) {
    constexpr int32_t kRowWords = kDim / 8 * kParts * 64;
    const uint32_t* from =
        o.parts + row * o.part_words(kParts) + static_cast<int64_t>(block) * kStepWords;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kSteps * kStepWords / 4;
         i += static_cast<int32_t>(blockDim.x)) {
      const int32_t step = i / (kStepWords / 4), word = i % (kStepWords / 4);
      shared[i] =
          reinterpret_cast<const uint4*>(from + static_cast<int64_t>(step) * kRowWords)[word];
    }
  }

  static __device__ void load_vectors(const BasisVectors& v, const Pair& pair,
                                      uint4 (&x)[2][kSteps / 2]) {
    const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      const auto* from = static_cast<const uint16_t*>(v.x) + pair.vector[r] * kDim + 8 * t;
#pragma unroll
      for (int32_t s = 0; s < kSteps / 2; ++s) {
        x[r][s] = pair.is_there[r] ? *reinterpret_cast<const uint4*>(from + 32 * s)
                                   : make_uint4(0, 0, 0, 0);
      }
    }
  }

  static __device__ void multiply(const uint4 (&x)[2][kSteps / 2], const uint2* shared,
                                  float (&sum)[kTiles][4]) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      const uint4 low = x[0][step / 2], high = x[1][step / 2];
      const uint32_t a[4] = {step % 2 == 0 ? low.x : low.z, step % 2 == 0 ? high.x : high.z,
                             step % 2 == 0 ? low.y : low.w, step % 2 == 0 ? high.y : high.w};
#pragma unroll
      for (int32_t tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int32_t p = 0; p < kParts; ++p) {
          const int32_t block = (step * kTiles + tile) * kParts + p;
          multiply_add<kDtype>(sum[tile], a, shared[block * 32 + lane]);
        }
      }
    }
  }

  // Each query's product with the keys' mean, by the four lanes that hold it.
  static __device__ void write_shift(const BasisVectors& v, int64_t row, const Pair& pair,
                                     const uint4 (&x)[2][kSteps / 2]) {
    const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
    const float* mean = v.operand.mean + row * kDim + 8 * t;
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      float sum = 0;
#pragma unroll
      for (int32_t i = 0; i < 4 * kSteps; ++i) {
        const uint4 w = x[r][i / 8];
        const uint32_t word = i % 8 / 2 == 0   ? w.x
                              : i % 8 / 2 == 1 ? w.y
                              : i % 8 / 2 == 2 ? w.z
                                               : w.w;
        sum += raw_to_float(kDtype, static_cast<uint16_t>(word >> (16 * (i % 2)))) *
               mean[32 * (i / 8) + i % 8];
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (t == 0 && pair.is_there[r]) v.lse_shift[pair.vector[r]] = sum * v.sm_scale;
    }
  }

  // Four columns of one vector.
  static __device__ void store(const BasisVectors& v, int64_t vector, int32_t column, float4 y) {
    const int64_t at = vector * kDim + column;
    if (v.operand.use == BasisUse::kApply) {
      *reinterpret_cast<float4*>(static_cast<float*>(v.y) + at) = y;
    } else {
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(v.y) + at) =
          make_uint2(two_values(v, y.x, y.y), two_values(v, y.z, y.w));
    }
  }

  static __device__ void write(const BasisVectors& v, int64_t row, const Pair& pair,
                               const float (&sum)[kTiles][4]) {
    const BasisOperand& o = v.operand;
    const int32_t t = static_cast<int32_t>(threadIdx.x) % 4;
    const int32_t first = static_cast<int32_t>(blockIdx.y) * 8 * kTiles + 4 * t;
    const float unscale = o.unscale[row];
    // A query's mean belongs to the LSE alone.
    const float sign = o.use == BasisUse::kApply ? -1.0f : 1.0f;
    const bool has_mean = o.mean != nullptr && o.use != BasisUse::kQuery;
#pragma unroll
    for (int32_t m = 0; m < kTiles / 2; ++m) {
      float4 mean = make_float4(0, 0, 0, 0);
      if (has_mean) {
        mean = *reinterpret_cast<const float4*>(o.mean + row * kDim + first + 16 * m);
      }
#pragma unroll
      for (int32_t r = 0; r < 2; ++r) {
        if (!pair.is_there[r]) continue;
        float4 y = make_float4(fmaf(sign, mean.x, sum[2 * m][2 * r] * unscale),
                               fmaf(sign, mean.y, sum[2 * m][2 * r + 1] * unscale),
                               fmaf(sign, mean.z, sum[2 * m + 1][2 * r] * unscale),
                               fmaf(sign, mean.w, sum[2 * m + 1][2 * r + 1] * unscale));
        if (o.use == BasisUse::kUndo && is_empty_output(v, pair.vector[r])) {
          y = make_float4(0, 0, 0, 0);
        }
        store(v, pair.vector[r], first + 16 * m, y);
      }
    }
  }
};

// Grid: CTAs over the vectors of a head, column blocks, heads of both components.
template <int32_t kSteps, int32_t kTiles, DType kDtype>
__global__ void __launch_bounds__(256, kSteps <= 8 ? 2 : 1)
    basis_product_kernel(const __grid_constant__ BasisBatch batch) {
  using Product = BasisProduct<kSteps, kTiles, kDtype>;
  extern __shared__ uint4 matrix[];
  const auto heads = static_cast<uint32_t>(batch.part[0].kv_heads);
  const BasisVectors& v = batch.part[blockIdx.z / heads];
  const HeadVectors of_head(v, static_cast<int32_t>(blockIdx.z % heads));
  const auto column_block = static_cast<int32_t>(blockIdx.y);
  Product::load_matrix(v.operand, of_head.row, column_block, matrix);
  __syncthreads();
  const int32_t warps = static_cast<int32_t>(blockDim.x) / 32;
  const int32_t warp =
      static_cast<int32_t>(blockIdx.x) * warps + static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t g = static_cast<int32_t>(threadIdx.x) % 32 / 4;
  const int32_t step = static_cast<int32_t>(gridDim.x) * warps * kTileVectors;
  for (int32_t first = warp * kTileVectors; first < of_head.count; first += step) {
    typename Product::Pair pair;
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      const int32_t i = first + g + 8 * r;
      pair.is_there[r] = i < of_head.count;
      pair.vector[r] = of_head.index(v, pair.is_there[r] ? i : 0);
    }
    uint4 x[2][kSteps / 2];
    float sum[kTiles][4] = {};
    Product::load_vectors(v, pair, x);
    Product::multiply(x, reinterpret_cast<const uint2*>(matrix), sum);
    Product::write(v, of_head.row, pair, sum);
    if (column_block != 0) continue;
    if (v.operand.use == BasisUse::kQuery && v.operand.mean != nullptr) {
      Product::write_shift(v, of_head.row, pair, x);
    }
    if (v.operand.use != BasisUse::kUndo || threadIdx.x % 4 != 0) continue;
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      if (pair.is_there[r]) write_lse(v, pair.vector[r]);
    }
  }
}

// The plain form, for fp32 input: a CTA per vector and head, a thread per column.
__global__ void basis_matrix_kernel(const __grid_constant__ BasisBatch batch) {
  extern __shared__ float vector[];
  const auto heads = static_cast<uint32_t>(batch.part[0].kv_heads);
  const BasisVectors& v = batch.part[blockIdx.y / heads];
  const HeadVectors of_head(v, static_cast<int32_t>(blockIdx.y % heads));
  const int32_t dim = v.operand.head_dim, j = static_cast<int32_t>(threadIdx.x);
  const int64_t at = of_head.index(v, static_cast<int32_t>(blockIdx.x)) * dim;
  vector[j] = static_cast<const float*>(v.x)[at + j];
  __syncthreads();
  const float* matrix = v.operand.matrix + of_head.row * dim * dim;
  float sum = 0;
  for (int32_t i = 0; i < dim; ++i) sum = fmaf(vector[i], matrix[i * dim + j], sum);
  if (v.operand.mean != nullptr) sum -= v.operand.mean[of_head.row * dim + j];
  static_cast<float*>(v.y)[at + j] = sum;
}

}  // namespace tierkv

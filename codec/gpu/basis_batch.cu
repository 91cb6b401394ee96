#include "codec/gpu/basis_batch.h"

#include <algorithm>

#include "codec/gpu/basis_product.cuh"
#include "codec/gpu/basis_rotate.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

constexpr int32_t kStepVectors = 512;  // of a head: fewer fill the device only by columns
constexpr int32_t kStepTiles = 2;      // 16 columns of a CTA then

int32_t ctas_for(int64_t items, int64_t per_cta, int64_t most) {
  return static_cast<int32_t>(std::clamp<int64_t>((items + per_cta - 1) / per_cta, 1, most));
}

Status launched(const char* what) {
  return cuda_status(cudaGetLastError(), what);
}

Status rotate(const BasisBatch& batch, int32_t sms, GpuStream stream) {
  int32_t lanes = 4;
  while (8 * lanes < batch.part[0].operand.head_dim) lanes *= 2;
  const int64_t vectors = batch.part[0].tokens * batch.part[0].heads;
  const dim3 grid(ctas_for(vectors * lanes, kRotateThreads, 32 * sms),
                  static_cast<uint32_t>(batch.count));
  const DType dtype = batch.part[0].dtype;
  if (dtype == DType::kFloat16) {
    rotate_kernel<DType::kFloat16><<<grid, kRotateThreads, 0, stream>>>(batch, lanes);
  } else if (dtype == DType::kBFloat16) {
    rotate_kernel<DType::kBFloat16><<<grid, kRotateThreads, 0, stream>>>(batch, lanes);
  } else {
    rotate_kernel<DType::kFloat32><<<grid, kRotateThreads, 0, stream>>>(batch, lanes);
  }
  return launched("basis");
}

template <int32_t kSteps, int32_t kTiles, DType kDtype>
Status multiply(const BasisBatch& batch, int32_t sms, GpuStream stream) {
  using Product = BasisProduct<kSteps, kTiles, kDtype>;
  const auto kernel = basis_product_kernel<kSteps, kTiles, kDtype>;
  const BasisVectors& v = batch.part[0];
  const int64_t vectors = v.tokens * (v.heads / v.kv_heads);
  const uint32_t heads = static_cast<uint32_t>(batch.count * v.kv_heads);
  const int32_t warps = ctas_for(vectors, kTileVectors, 8);
  // A CTA takes several tiles for one copy of the matrix.
  const int64_t most = std::max<int64_t>(1, 2 * sms / (heads * Product::kColumnBlocks));
  const dim3 grid(ctas_for(vectors, warps * kTileVectors, most), Product::kColumnBlocks, heads);
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Product::kSharedBytes);
  if (error != cudaSuccess) return cuda_status(error, "basis");
  kernel<<<grid, 32 * warps, Product::kSharedBytes, stream>>>(batch);
  return launched("basis");
}

template <int32_t kSteps>
Status multiply_dim(const BasisBatch& batch, int32_t sms, GpuStream stream) {
  const BasisVectors& v = batch.part[0];
  const bool few = v.tokens * (v.heads / v.kv_heads) <= kStepVectors;
  constexpr int32_t kTiles = std::min(2 * kSteps, 16);
  if (v.dtype == DType::kBFloat16) {
    return few ? multiply<kSteps, kStepTiles, DType::kBFloat16>(batch, sms, stream)
               : multiply<kSteps, kTiles, DType::kBFloat16>(batch, sms, stream);
  }
  return few ? multiply<kSteps, kStepTiles, DType::kFloat16>(batch, sms, stream)
             : multiply<kSteps, kTiles, DType::kFloat16>(batch, sms, stream);
}

Status multiply_any(const BasisBatch& batch, int32_t sms, GpuStream stream) {
  const BasisVectors& v = batch.part[0];
  const int32_t dim = v.operand.head_dim;
  if (v.dtype == DType::kFloat32) {
    const dim3 grid(static_cast<uint32_t>(v.tokens * (v.heads / v.kv_heads)),
                    static_cast<uint32_t>(batch.count * v.kv_heads));
    basis_matrix_kernel<<<grid, dim, dim * sizeof(float), stream>>>(batch);
    return launched("basis");
  }
  if (dim == 64) return multiply_dim<4>(batch, sms, stream);
  if (dim == 96) return multiply_dim<6>(batch, sms, stream);
  if (dim == 128) return multiply_dim<8>(batch, sms, stream);
  if (dim == 256) return multiply_dim<16>(batch, sms, stream);
  return Status(StatusCode::kUnsupported, "a matrix basis of this head_dim on the device");
}

bool go_together(const BasisVectors& a, const BasisVectors& b) {
  const bool multiplies = a.operand.kind == BasisKind::kMatrix;
  return multiplies == (b.operand.kind == BasisKind::kMatrix) && a.operand.use == b.operand.use &&
         a.operand.head_dim == b.operand.head_dim && a.heads == b.heads &&
         a.kv_heads == b.kv_heads && a.tokens == b.tokens && a.dtype == b.dtype;
}

}  // namespace

Status map_basis(const BasisBatch& batch, GpuStream stream) {
  if (batch.count < 1 || batch.count > 2) {
    return Status(StatusCode::kInvalidArgument, "a basis batch has one or two components");
  }
  for (int32_t i = 0; i < batch.count; ++i) {
    if (Status s = batch.part[i].validate(); !s) return s;
  }
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  if (batch.count == 2 && !go_together(batch.part[0], batch.part[1])) {
    if (Status s = map_basis({{batch.part[0], {}}, 1}, stream); !s) return s;
    return map_basis({{batch.part[1], {}}, 1}, stream);
  }
  if (batch.part[0].tokens == 0) return Status::ok();
  return batch.part[0].operand.kind == BasisKind::kMatrix ? multiply_any(batch, limits->sms, stream)
                                                          : rotate(batch, limits->sms, stream);
}

}  // namespace tierkv

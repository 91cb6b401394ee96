// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "codec/gpu/coded/codebook_kernels.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

__global__ void __launch_bounds__(kBookThreads)
    summary_kernel(const __grid_constant__ CodebookBuild call) {
  __shared__ SummaryShared shared;
  const int64_t first = int64_t{blockIdx.x} * kHistogramCounts;
  summarise_counts(call.pairs + first, call.wide + first, &shared,
                   book_workspace(call).summaries + blockIdx.x);
}

__global__ void __launch_bounds__(kBookThreads)
    try_kernel(const __grid_constant__ CodebookBuild call) {
  extern __shared__ __align__(16) uint8_t shared[];
  try_alphabet(call, static_cast<int32_t>(blockIdx.x), reinterpret_cast<TryShared*>(shared));
}

__global__ void __launch_bounds__(kBookThreads)
    finish_kernel(const __grid_constant__ CodebookBuild call) {
  __shared__ FinishShared shared;
  finish_book(call, static_cast<int32_t>(blockIdx.x), &shared);
}

}  // namespace

int64_t codebook_workspace_bytes(int32_t num_books) {
  constexpr int64_t kBytes = sizeof(CodeSummary) + kTries * sizeof(BookTry);
  return (num_books * kBytes + 15) / 16 * 16;
}

Status build_codebooks(const CodebookBuild& call, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  if (call.num_books == 0) return Status::ok();
  const auto books = static_cast<uint32_t>(call.num_books);
  if (Status s =
          cuda_status(cudaFuncSetAttribute(try_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           sizeof(TryShared)),
                      "shared memory");
      !s) {
    return s;
  }
  summary_kernel<<<books, kBookThreads, 0, stream>>>(call);
  if (Status s = cuda_status(cudaGetLastError(), "build_codebooks"); !s) return s;
  try_kernel<<<books * kTries, kBookThreads, sizeof(TryShared), stream>>>(call);
  if (Status s = cuda_status(cudaGetLastError(), "build_codebooks"); !s) return s;
  finish_kernel<<<books, kBookThreads, 0, stream>>>(call);
  return cuda_status(cudaGetLastError(), "build_codebooks");
}

}  // namespace tierkv

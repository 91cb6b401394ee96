// SPDX-License-Identifier: Apache-2.0
#include "store/rows/coded/device_coded_rows.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "attention/coded/coded_attention.h"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"
#include "store/rows/coded/device_coded_format.cuh"

namespace tierkv::store {
namespace {

template <class Body>
__global__ void __launch_bounds__(Body::kThreads) run_body(const __grid_constant__ Body body) {
  extern __shared__ __align__(1024) uint8_t shared[];
  wait_for_previous_kernel();
  body(shared);
}
template <class Body>
__global__ void __launch_bounds__(Body::kThreads, Body::kCtas)
    run_dense_body(const __grid_constant__ Body body) {
  extern __shared__ __align__(1024) uint8_t shared[];
  wait_for_previous_kernel();
  body(shared);
}

class CudaMachine {
 public:
  explicit CudaMachine(const DeviceLimits& limits) : limits_(limits) {}

  void set_stream(GpuStream stream) { stream_ = stream; }
  int32_t sms() const { return limits_.sms; }
  int32_t shared_bytes() const { return limits_.shared_bytes; }

  Status allocate(int64_t bytes, const char* what, void** memory) const {
    return device_allocate(static_cast<size_t>(bytes), what, memory);
  }
  void free(void* memory) const {
    if (memory != nullptr) (void)cudaFree(memory);
  }
  Status upload(void* to, const void* from, int64_t bytes) const {
    if (bytes == 0) return Status::ok();
    return cuda_status(
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_),
        "coded rows: upload");
  }
  Status download(void* to, const void* from, int64_t bytes) const {
    Status s = cuda_status(
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
        "coded rows: download");
    return s ? cuda_status(cudaStreamSynchronize(stream_), "coded rows: download") : s;
  }
  Status clear(void* memory, int64_t bytes) const {
    return cuda_status(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream_),
                       "coded rows: clear");
  }
  int64_t attention_workspace(const CodedAttention& call, const CodedAttentionGrid& grid) const {
    return static_cast<int64_t>(coded_attention_workspace_bytes(call, grid));
  }
  Status attend(const CodedAttention& call) const {
    const Result<CodedAttentionGrid> grid = coded_attention_grid(call);
    return grid ? attend_coded(call, *grid, stream_) : grid.status();
  }
  template <class Body>
  Status launch(const Body& body, MachineGrid grid, int32_t shared, int32_t threads) const {
    void (*kernel)(const Body);
    if constexpr (requires { Body::kCtas; }) {
      kernel = run_dense_body<Body>;
    } else {
      kernel = run_body<Body>;
    }
    if (shared > 0) {
      Status s = cuda_status(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
          "coded rows: shared memory");
      if (!s) return s;
    }
    return launch_after_previous(
        kernel, dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y)),
        static_cast<unsigned>(threads), static_cast<size_t>(shared), stream_, body);
  }

 private:
  DeviceLimits limits_;
  GpuStream stream_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<DeviceRowFormat>> make_device_coded_rows(const StoreConfig& config,
                                                                RowFormat* host) {
  auto* const coded = static_cast<CodedRows*>(host);
  if (coded->format().key_books > 1) {
    return Status(StatusCode::kUnsupported, "format.key_books: a device takes 1");
  }
  for (int32_t l = 0; l < config.layout.num_layers; ++l) {
    if (coded->is_raw_layer(l) || coded->needs_tokens(l)) continue;
    for (int32_t h = 0; h < config.layout.num_kv_heads; ++h) {
      const Result<WeightedRow> row = coded->fit_row(l, h, {});
      const Status s = row ? weighted_key_channels(*row).status() : row.status();
      if (!s) {
        return s.with_context("profile, layer " + std::to_string(l) + ", kv_head " +
                              std::to_string(h));
      }
    }
  }
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  return std::unique_ptr<DeviceRowFormat>(
      std::make_unique<DeviceCodedRows<CudaMachine>>(config, coded, CudaMachine(*limits)));
}

}  // namespace tierkv::store

// SPDX-License-Identifier: Apache-2.0
// What bench_matvec measures: one product of one shape in one kernel, in several, and in cuBLAS.
#pragma once

#include <cublas_v2.h>

#include <memory>
#include <string>

#include "bench/gpu/coded_runs.cuh"
#include "bench/gpu/matvec_cache.cuh"

namespace tierkv::bench {

inline constexpr int32_t kMatvecDims = 128;
inline constexpr int32_t kMostLaunches = 16;  // in a graph

struct MatvecSetting {
  const char* name;
  int32_t sequences, kv_heads, columns;
};
struct MatvecSize {
  MatvecSetting setting;
  int32_t tokens;
  int32_t rows() const { return setting.sequences * setting.kv_heads; }
  int32_t blocks() const { return rows() * (tokens / kBlockTokens); }
  // Calls that read different bytes.
  int32_t sets() const { return std::max(1, kMostItems / blocks()); }
  int32_t launches() const { return std::min(std::max(sets(), 2), kMostLaunches); }
  size_t x_count(Component c) const {
    return static_cast<size_t>(rows()) * setting.columns *
           (c == Component::kKey ? kMatvecDims : tokens);
  }
  size_t y_count(Component c) const {
    return static_cast<size_t>(rows()) * setting.columns *
           (c == Component::kKey ? tokens : kMatvecDims);
  }
  double fp16_bytes() const { return 2.0 * rows() * tokens * kMatvecDims; }
};

inline void check_blas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) fail(std::string(what) + ": cuBLAS says no");
}

struct MatvecBench {
  cudaStream_t stream = nullptr;
  cublasHandle_t blas = nullptr;
  int replays = 9;
  // Of one size at most.
  std::unique_ptr<Device<int16_t>> codes;     // decoded
  std::unique_ptr<Device<uint16_t>> decoded;  // dequantised
  std::unique_ptr<Device<uint16_t>> blas_y;

  template <class Launch>
  Timing time(const MatvecSize& size, Launch&& launch) const {
    return time_graph(stream, size.launches(), replays, [&](int i) { launch(i % size.sets()); });
  }
};

// ---- cuBLAS over an fp16 matrix [rows, tokens, 128] ----

// `form`: 0 a batched matrix product, 1 a batched matrix-vector product (one column).
inline void blas_multiply(const MatvecBench& b, const MatvecSize& size, Component component,
                          const uint16_t* matrix, const uint16_t* x, int form) {
  const bool is_key = component == Component::kKey;
  const int d = kMatvecDims, t = size.tokens, n = size.setting.columns, rows = size.rows();
  const float one = 1.0f, zero = 0.0f;
  const auto* a = reinterpret_cast<const __half*>(matrix);
  const auto* from = reinterpret_cast<const __half*>(x);
  auto* to = reinterpret_cast<__half*>(b.blas_y->get());
  // Column by column the matrix is [128, tokens].
  const cublasOperation_t form_of_a = is_key ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int m = is_key ? t : d, k = is_key ? d : t;
  if (form == 1) {
    check_blas(cublasHSHgemvStridedBatched(b.blas, form_of_a, d, t, &one, a, d, int64_t{d} * t,
                                           from, 1, k, &zero, to, 1, m, rows),
               "gemv");
    return;
  }
  check_blas(cublasGemmStridedBatchedEx(b.blas, form_of_a, CUBLAS_OP_N, m, n, k, &one, a,
                                        CUDA_R_16F, d, int64_t{d} * t, from, CUDA_R_16F, k,
                                        int64_t{k} * n, &zero, to, CUDA_R_16F, m, int64_t{m} * n,
                                        rows, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
             "gemm");
}

struct BlasTiming {
  Timing best;
  int form = 0;
};
inline BlasTiming time_blas(const MatvecBench& b, const MatvecSize& size, Component component,
                            const uint16_t* matrix, const uint16_t* x) {
  BlasTiming best;
  const int64_t stride = int64_t{size.blocks()} * kBlockTokens * kMatvecDims;
  for (int form = 0; form < (size.setting.columns == 1 ? 2 : 1); ++form) {
    const Timing t = b.time(
        size, [&](int set) { blas_multiply(b, size, component, matrix + set * stride, x, form); });
    if (form == 0 || t.median < best.best.median) best = {t, form};
  }
  return best;
}

// ---- one kernel ----

struct MatvecCase {
  Component component;
  const Blocks& blocks;
  const DeviceBlocks& device;
  const Device<uint16_t>& units;  // of all blocks
  const Rung& rung;
};

// The rows of all sets, one set after the other.
inline std::vector<CodedMatvecRow> matvec_rows(const MatvecSize& size) {
  const int32_t per_row = size.tokens / kBlockTokens;
  std::vector<CodedMatvecRow> rows;
  for (int32_t i = 0; i < size.rows() * size.sets(); ++i) {
    rows.push_back({i % size.rows() * per_row, i * per_row, size.tokens});
  }
  return rows;
}

// Fills in y of the last set.
inline Timing time_fused(const MatvecBench& b, const MatvecSize& size, const MatvecCase& c,
                         const uint16_t* x, std::vector<float>* y) {
  const Device<CodedMatvecRow> rows(matvec_rows(size));
  const Device<float> out(size.y_count(c.component));
  const bool is_key = c.component == Component::kKey;
  const Device<StatusCode> status(static_cast<size_t>(is_key ? size.blocks() : size.rows()));
  CodedMatvec call;
  call.bytes = c.device.component.bytes;
  call.blocks = c.device.component.blocks;
  call.units = c.units.get();
  call.x = x;
  call.y = out.get();
  call.status = status.get();
  call.codebook = c.device.component.codebook;
  call.size = c.device.component.size;
  call.token_stride = size.tokens;
  call.num_rows = size.rows();
  call.num_items = size.blocks();
  call.num_blocks = kMostItems;
  call.columns = size.setting.columns;
  call.head_dim = kMatvecDims;
  call.max_block_bytes = std::max(c.blocks.largest, 16);
  if (c.rung.tree) call.tree = c.device.walked();
  const auto grid = coded_matvec_grid(call);
  if (!grid.is_ok()) fail(grid.status().message());
  const Device<uint8_t> workspace(coded_matvec_workspace_bytes(call, *grid) + 16);
  call.workspace = workspace.get();
  const Timing t = b.time(size, [&](int set) {
    call.rows = rows.get() + int64_t{set} * size.rows();
    const Status s = multiply_coded(call, *grid, b.stream);
    if (!s) fail(s.message());
  });
  for (StatusCode code : status.read()) {
    if (code != StatusCode::kOk) fail("a block was refused");
  }
  *y = out.read();
  return t;
}

// ---- several kernels: decode, dequantise, multiply ----

struct PipelineTiming {
  Timing total, decode;
};
// blas_y holds the product of the last set.
inline PipelineTiming time_pipeline(const MatvecBench& b, const MatvecSize& size,
                                    const MatvecCase& c, const uint16_t* x, int form) {
  const int32_t blocks = size.blocks();
  std::vector<CodedGroup> groups = c.blocks.groups;
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].codes = static_cast<int64_t>(i) % blocks * kBlockTokens * kMatvecDims;
  }
  const Device<CodedGroup> device_groups(groups);
  const Device<StatusCode> status(static_cast<size_t>(blocks));
  CodedDecode decode;
  decode.bytes = c.device.component.bytes;
  decode.codes = b.codes->get();
  decode.status = status.get();
  decode.codebook = c.device.component.codebook;
  decode.size = c.device.component.size;
  decode.token_stride = kMatvecDims;
  decode.num_groups = blocks;
  decode.head_dim = kMatvecDims;
  decode.max_block_bytes = std::max(c.blocks.raw > 0 ? 8208 : 16, c.blocks.largest);
  const auto run_decode = [&](int set) {
    decode.groups = device_groups.get() + int64_t{set} * blocks;
    const Status s = tierkv::bench::decode(decode, c.device, c.rung, b.stream);
    if (!s) fail(s.message());
  };
  const int32_t unit_count = block_unit_count(c.component, kMatvecDims);
  PipelineTiming t;
  t.decode = b.time(size, run_decode);
  t.total = b.time(size, [&](int set) {
    run_decode(set);
    const Dequantise d{b.codes->get(), c.units.get() + int64_t{set} * blocks * unit_count,
                       b.decoded->get(), kMatvecDims, c.component == Component::kKey};
    dequantise_kernel<<<static_cast<unsigned>(blocks), 256, 0, b.stream>>>(d);
    blas_multiply(b, size, c.component, b.decoded->get(), x, form);
  });
  for (StatusCode code : status.read()) {
    if (code != StatusCode::kOk) fail("a block was refused");
  }
  return t;
}

// The root of the mean squared difference of one kernel's result and the pipeline's, relative to
// the latter; both of the same set. The pipeline rounds values and results to fp16.
inline double relative_difference(const std::vector<float>& one,
                                  const std::vector<uint16_t>& many) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    const double x = half_to_float(many[i]);
    difference += (one[i] - x) * (one[i] - x);
    norm += x * x;
  }
  return std::sqrt(difference / norm);
}

}  // namespace tierkv::bench

// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "bench/baselines/matvec/coded_matvec_kernel.cuh"
#include "bench/baselines/matvec/coded_outputs.cuh"
#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {
namespace {

constexpr int32_t kJoinThreads = 512, kJoinParts = kJoinThreads / 128;

// Adds the partials of one (row, column), always in the same order.
__global__ void __launch_bounds__(kJoinThreads)
    join_outputs_kernel(const __grid_constant__ MatvecParams params) {
  __shared__ float parts[kJoinThreads];
  const CodedMatvec& call = params.call;
  const int32_t row = blockIdx.x, column = blockIdx.y, thread = threadIdx.x;
  const int32_t dim = thread % 128, part = thread / 128;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int32_t begin = call.rows[row].first_item, per_warp = params.grid.items_per_warp;
  const int32_t end = row + 1 < call.num_rows ? call.rows[row + 1].first_item : call.num_items;
  const int32_t first = begin / per_warp,
                count = end <= begin ? 0 : (end - 1) / per_warp - first + 1;
  const int64_t stride = output_partial_floats(call);
  const float* partials =
      static_cast<const float*>(call.workspace) + (int64_t{first} + row) * stride;
  bool corrupt = false;
  for (int32_t i = thread; i < count; i += kJoinThreads) {
    corrupt |= partials[i * stride + call.columns * call.head_dim] != 0.0f;
  }
  float total = 0.0f;
  if (dim < call.head_dim) {
    const float* from = partials + column * call.head_dim + dim;
#pragma unroll 8
    for (int32_t i = part; i < count; i += kJoinParts) total += from[i * stride];
  }
  parts[thread] = total;
  corrupt = __syncthreads_or(corrupt) != 0;
  if (part == 0 && dim < call.head_dim) {
    for (int32_t i = 1; i < kJoinParts; ++i) total += parts[dim + 128 * i];
    const int64_t to = (int64_t{row} * params.row_columns + column) * call.head_dim + dim;
    call.y[to] = corrupt ? 0.0f : call.scale * total;
  }
  if (thread == 0 && column == 0) {
    call.status[row] = corrupt ? StatusCode::kCorrupt : StatusCode::kOk;
  }
}

bool is_key(const CodedMatvec& call) {
  return call.codebook.component == Component::kKey;
}
MatvecKernel find_kernel(const CodedMatvec& call, int32_t copies_log) {
  return is_key(call) ? find_score_kernel(call, copies_log) : find_output_kernel(call, copies_log);
}

// The columns from `first` on.
Status launch_pass(MatvecKernel kernel, const CodedMatvec& call, const CodedMatvecGrid& grid,
                   int32_t first, GpuStream stream) {
  MatvecParams params{call, grid, expected_header(call.codebook, call.head_dim),
                      table_mask(call.codebook.max_length, grid.copies_log), call.columns};
  const int64_t x = is_key(call) ? call.head_dim : call.token_stride;
  const int64_t y = is_key(call) ? call.token_stride : call.head_dim;
  params.call.columns = std::min(call.columns - first, kCodedColumns);
  if (call.x != nullptr) params.call.x = call.x + first * x;
  params.call.y = call.y + first * y;
  if (call.num_items > 0) {
    if (Status s =
            launch_after_previous(kernel, static_cast<unsigned>(grid.num_ctas), kCodedWarps * 32,
                                  static_cast<size_t>(grid.shared_bytes), stream, params);
        !s) {
      return s;
    }
  }
  if (is_key(call)) return Status::ok();
  const dim3 rows(static_cast<unsigned>(call.num_rows), static_cast<unsigned>(params.call.columns));
  return launch_after_previous(join_outputs_kernel, rows, kJoinThreads, 0, stream, params);
}

}  // namespace

Result<CodedMatvecGrid> coded_matvec_grid(const CodedMatvec& call, int32_t most_copies_log) {
  if (Status s = call.validate(); !s) return s;
  Result<DeviceLimits> limits = device_limits();
  if (!limits.is_ok()) return limits.status();
  CodedMatvecGrid grid;
  grid.num_ctas = limits->sms;
  const int64_t warps = int64_t{grid.num_ctas} * kCodedWarps;
  grid.items_per_warp =
      std::max(1, static_cast<int32_t>((int64_t{call.num_items} + warps - 1) / warps));
  grid.slot_bytes = (call.max_block_bytes + 127) / 128 * 128 +
                    block_unit_bytes(call.codebook.component, call.head_dim);
  grid.slot_bytes = (grid.slot_bytes + 127) / 128 * 128;
  const auto start = static_cast<uint32_t>(limits->reserved_bytes);
  for (int32_t copies_log : kMatvecCopies) {
    // An index, its copy and two code words share a word.
    const bool fits_word = 2 + copies_log + 2 * call.codebook.max_length <= 32;
    if (copies_log > most_copies_log || !fits_word || find_kernel(call, copies_log) == nullptr) {
      continue;
    }
    for (int32_t slots = 2; slots > 0; --slots) {
      const CodedSharedLayout at = coded_shared_layout(
          start, static_cast<uint32_t>(decoder_region_bytes(call, copies_log)),
          static_cast<uint32_t>(grid.slot_bytes), static_cast<uint32_t>(kCodedWarps * slots), 1);
      const uint32_t bytes = at.end - start;
      if (bytes > static_cast<uint32_t>(limits->shared_bytes)) continue;
      grid.copies_log = copies_log;
      grid.slots_per_warp = slots;
      grid.shared_bytes = static_cast<int32_t>(bytes);
      return grid;
    }
  }
  return Status(StatusCode::kUnsupported,
                "coded product: max_block_bytes and the table exceed shared memory");
}

size_t coded_matvec_workspace_bytes(const CodedMatvec& call, const CodedMatvecGrid& grid) {
  if (is_key(call)) return 0;
  const int64_t partials = int64_t{grid.num_ctas} * kCodedWarps + call.num_rows;
  return static_cast<size_t>(partials *
                             (std::min(call.columns, kCodedColumns) * call.head_dim + 4)) *
         sizeof(float);
}

Status multiply_coded(const CodedMatvec& call, const CodedMatvecGrid& grid, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  if (call.num_rows == 0) return Status::ok();
  if (Status s = call.validate_arrays(); !s) return s;
  const auto missing = [](const char* what) {
    return Status(StatusCode::kInvalidArgument, std::string("coded product: ") + what);
  };
  if (!is_key(call) && call.workspace == nullptr) return missing("workspace is needed");
  if (call.tree.entries == 0 && call.codebook.table == nullptr) {
    return missing("codebook.table is needed");
  }
  const MatvecKernel kernel = find_kernel(call, grid.copies_log);
  if (kernel == nullptr || grid.slots_per_warp < 1 || grid.slots_per_warp > 2 ||
      grid.num_ctas < 1 || grid.items_per_warp < 1 ||
      int64_t{grid.num_ctas} * kCodedWarps * grid.items_per_warp < call.num_items) {
    return missing("not a grid of this call");
  }
  if (Status s =
          cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           grid.shared_bytes),
                      "shared memory");
      !s) {
    return s;
  }
  for (int32_t first = 0; first < call.columns; first += kCodedColumns) {
    if (Status s = launch_pass(kernel, call, grid, first, stream); !s) return s;
  }
  return Status::ok();
}

}  // namespace tierkv

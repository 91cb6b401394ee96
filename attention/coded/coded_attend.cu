// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "attention/coded/coded_join.cuh"
#include "attention/coded/raw_rows.cuh"
#include "attention/core/workspace.h"
#include "codec/format/head_dim.h"
#include "codec/gpu/coded/coded_stream.cuh"
#include "gpu/launch.cuh"

namespace tierkv {
namespace {

template <KeyTurning kTurning>
CodedKernel weighted_kernel(const CodedAttention& call, int32_t copies_log) {
  return with_head_dim(call.head_dim, [&](auto dim) {
    return find_weighted_kernel<kTurning, dim>(call, copies_log);
  });
}

// The parameters that all passes share.
CodedKernelParams kernel_params(const CodedAttention& call, const CodedAttentionGrid& grid,
                                const ConvertedQueries& queries) {
  CodedKernelParams params{};
  params.call = call;
  if (queries.halves != nullptr) params.call.q = queries.halves;
  params.grid = grid;
  params.headers = {expected_header(call.keys.codebook, call.head_dim),
                    expected_header(call.values.codebook, call.head_dim)};
  params.key_mask = table_mask(call.keys.codebook.max_length, grid.copies_log);
  params.value_mask = table_mask(call.values.codebook.max_length, grid.copies_log);
  params.row_columns = call.all_columns();
  params.queries = coded_columns(call);
  params.units = queries.units;
  params.tables_are_settled = queries.halves != nullptr || call.q_is_settled;
  params.table_bytes =
      static_cast<uint32_t>(table_region_bytes(longest_word(call), grid.copies_log));
  return params;
}

// Both kernels of a pass.
Status launch_pass(CodedKernel kernel, const CodedKernelParams& params, GpuStream stream) {
  const CodedAttention& call = params.call;
  const CodedAttentionGrid& grid = params.grid;
  if (Status s = launch_after_previous(kernel, static_cast<unsigned>(grid.num_ctas),
                                       static_cast<unsigned>(grid.warps * 32),
                                       static_cast<size_t>(grid.shared_bytes), stream, params);
      !s) {
    return s;
  }
  const JoinLaunch join = join_launch(call, grid.num_ctas * grid.warps / call.num_rows);
  return launch_after_previous(join.kernel, static_cast<unsigned>(join.ctas),
                               static_cast<unsigned>(join.warps * 32),
                               static_cast<size_t>(join.shared_bytes), stream, params);
}

// The columns of the pass from `first` on.
CodedKernelParams pass_params(CodedKernelParams params, int32_t first) {
  CodedAttention& call = params.call;
  params.first_column = first;
  call.columns = std::min(params.row_columns - first, kCodedColumns);
  call.q = static_cast<const uint16_t*>(call.q) + int64_t{first} * call.head_dim;
  return params;
}

Status allow_shared(CodedKernel kernel, const CodedAttentionGrid& grid) {
  return cuda_status(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, grid.shared_bytes),
      "shared memory");
}

// Byte offsets: partials, then what ConvertedQueries has.
struct CodedWorkspace {
  size_t halves, units, bytes;
};
CodedWorkspace coded_workspace(const CodedAttention& call, const CodedAttentionGrid& grid) {
  const int64_t partials = int64_t{grid.num_ctas} * grid.warps + call.num_rows;
  const auto rows = static_cast<size_t>(call.num_rows), dims = static_cast<size_t>(call.head_dim);
  CodedAttention pass = call;
  pass.columns = std::min(call.all_columns(), kCodedColumns);
  const bool converts = needs_conversion(call);
  WorkspaceCarving carving;
  CodedWorkspace at{};
  carving.take(static_cast<size_t>(partials * coded_partial_floats(pass)) * sizeof(float));
  at.halves =
      carving.take(converts ? rows * static_cast<size_t>(call.all_columns()) * dims * 2 : 0);
  at.units = carving.bytes;
  at.bytes = at.units + (converts ? rows * sizeof(float) : 0);
  return at;
}

}  // namespace

CodedKernel find_coded_kernel(const CodedAttention& call, int32_t copies_log) {
  if (call.raw_blocks) {
    return with_head_dim(call.head_dim,
                         [](auto dim) -> CodedKernel { return raw_rows_kernel<dim / kDimBlock>; });
  }
  switch (key_turning(call.weighted, call.head_dim)) {
    case KeyTurning::kHalves:
      return weighted_kernel<KeyTurning::kHalves>(call, copies_log);
    case KeyTurning::kNeighbours:
      return weighted_kernel<KeyTurning::kNeighbours>(call, copies_log);
    case KeyTurning::kPartHalves:
      return weighted_kernel<KeyTurning::kPartHalves>(call, copies_log);
    default:
      return weighted_kernel<KeyTurning::kNone>(call, copies_log);
  }
}

size_t coded_attention_workspace_bytes(const CodedAttention& call, const CodedAttentionGrid& grid) {
  return coded_workspace(call, grid).bytes;
}

Status attend_coded(const CodedAttention& call, const CodedAttentionGrid& grid, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  if (call.num_rows == 0) return Status::ok();
  if (Status s = call.validate_arrays(); !s) return s;
  const CodedKernel kernel = find_coded_kernel(call, grid.copies_log);
  const int64_t warps = int64_t{grid.num_ctas} * grid.warps;
  if (kernel == nullptr || grid.num_ctas < 1 || grid.warps < 1 ||
      grid.warps > coded_warps(call.head_dim) || warps > kMaxPartials) {
    return Status(StatusCode::kInvalidArgument, "coded attention: not a grid of this call");
  }
  if (Status s = allow_shared(kernel, grid); !s) return s;
  ConvertedQueries queries;
  if (needs_conversion(call)) {
    const CodedWorkspace at = coded_workspace(call, grid);
    auto* memory = static_cast<uint8_t*>(call.workspace);
    queries.halves = reinterpret_cast<uint16_t*>(memory + at.halves);
    queries.units = reinterpret_cast<float*>(memory + at.units);
    if (Status s = convert_queries(call, queries, stream); !s) return s;
  }
  const CodedKernelParams params = kernel_params(call, grid, queries);
  for (int32_t first = 0; first < call.all_columns(); first += kCodedColumns) {
    if (Status s = launch_pass(kernel, pass_params(params, first), stream); !s) return s;
  }
  return Status::ok();
}

}  // namespace tierkv

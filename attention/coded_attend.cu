#include <cuda_runtime.h>

#include <algorithm>

#include "attention/coded_kernel.cuh"
#include "attention/launch.cuh"
#include "attention/merge.h"
#include "codec/coded_block.h"
#include "codec/element.h"

namespace tierkv {
namespace {

constexpr int32_t kMaxPartials = 4096;  // of a row: no device has as many warps
constexpr size_t kWorkspaceAlignment = 256;
constexpr int32_t kThreadsOfSm = 2048;

// The partials of a row.
struct RowPartials {
  const float* first;
  int64_t stride;
  int32_t count;
};
__device__ RowPartials row_partials(const CodedKernelParams& params, int32_t row) {
  const CodedAttention& call = params.call;
  const int32_t begin = call.rows[row].first_item;
  const ItemShares shares = item_shares(params, coded_warps(call.head_dim));
  const int32_t end = row + 1 < call.num_rows ? call.rows[row + 1].first_item : shares.items;
  if (end <= begin) return {nullptr, 0, 0};
  const int32_t first = shares.warp_of(begin);
  const int64_t stride = coded_partial_floats(call);
  return {static_cast<const float*>(call.workspace) + (int64_t{first} + row) * stride, stride,
          min(shares.warp_of(end - 1) - first + 1, kMaxPartials)};
}

// What a column's partials amount to; by each warp, the same in all lanes.
struct ColumnSum {
  float top, sum;
  bool corrupt;
};
// A partial whose warp found no token to score has no reference.
__device__ __forceinline__ float partial_share(float2 state, float top) {
  return state.y <= 0.0f ? 0.0f : exp2_fast(state.x - top);
}
__device__ ColumnSum column_sum(const RowPartials& partials, const float* states) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const auto state_of = [&](int32_t i) {
    return *reinterpret_cast<const float2*>(states + i * partials.stride);
  };
  ColumnSum column{-INFINITY, 0.0f, false};
  for (int32_t i = lane; i < partials.count; i += 32) {
    const float2 state = state_of(i);
    column.top = fmaxf(column.top, state.x);
    column.corrupt |= state.y < 0.0f;
  }
  column.corrupt = __any_sync(kFullWarp, column.corrupt);
  for (int32_t i = 16; i > 0; i /= 2) {
    column.top = fmaxf(column.top, __shfl_xor_sync(kFullWarp, column.top, i));
  }
  for (int32_t i = lane; i < partials.count; i += 32) {
    const float2 state = state_of(i);
    column.sum += partial_share(state, column.top) * state.y;
  }
  for (int32_t i = 16; i > 0; i /= 2) {
    column.sum += __shfl_xor_sync(kFullWarp, column.sum, i);
  }
  return column;
}

// Joins the partials of one (row, column): a thread for a dim and, of its partials, every kParts-th
// one. One part is for large calls: in few registers, so that their CTAs are resident all at once.
template <int kDims, int kParts, bool kSinks>
__global__ void __launch_bounds__(kDims* kParts, kParts == 1 ? kThreadsOfSm / kDims : 1)
    join_kernel(const __grid_constant__ CodedKernelParams params) {
  __shared__ float totals[kParts][kDims], products[kDims / 32];
  const CodedAttention& call = params.call;
  const auto row = static_cast<int32_t>(blockIdx.x), column = static_cast<int32_t>(blockIdx.y);
  const int32_t dim = static_cast<int32_t>(threadIdx.x) % kDims,
                part = static_cast<int32_t>(threadIdx.x) / kDims;
  // The kernel before has waited for all that this one reads but its partials.
  const RowPartials partials = row_partials(params, row);
  const int64_t from = (int64_t{row} * params.row_columns + column) * call.head_dim + dim;
  const int64_t place = params.queries.place(row, params.first_column + column);
  const int32_t mean_index = call.rows[row].mean;
  const bool writes = part == 0 && dim < call.head_dim;
  const bool centred = writes && mean_index >= 0 && mean_index < call.num_means;
  const int64_t mean = int64_t{mean_index} * call.head_dim + dim;
  const float value_mean = centred && call.values.means != nullptr ? call.values.means[mean] : 0.0f;
  const float sink =
      kSinks ? call.sinks[params.queries.head(row, params.first_column + column)] : -INFINITY;
  float product = 0.0f;  // of q and the mean of the keys
  if (centred && call.keys.means != nullptr) {
    product = half_to_float(static_cast<const uint16_t*>(call.q)[from]) * call.keys.means[mean];
    if (params.units != nullptr) product *= params.units[row];
  }
  for (int32_t i = 16; i > 0; i /= 2) product += __shfl_xor_sync(kFullWarp, product, i);
  if (part == 0 && dim % 32 == 0) products[dim / 32] = product;
  wait_for_previous_kernel();
  let_next_kernel_start();

  const float* states = partials.first + call.columns * call.head_dim + 2 * column;
  const ColumnSum found = column_sum(partials, states);
  // Of several queries the oldest may see no token.
  const bool present = found.sum > 0.0f && !found.corrupt;
  float total = 0.0f;
  if (dim < call.head_dim && present) {
    const float* values = partials.first + column * call.head_dim + dim;
#pragma unroll 8
    for (int32_t i = part; i < partials.count; i += kParts) {
      const auto state = *reinterpret_cast<const float2*>(states + i * partials.stride);
      total = fmaf(partial_share(state, found.top), values[i * partials.stride], total);
    }
  }
  totals[part][dim] = total;
  __syncthreads();
  const auto lse_of_tokens = [&] {
    product = 0.0f;
    for (const float x : products) product += x;
    return present ? kLn2 * (found.top + log2_fast(found.sum)) + call.sm_scale * product
                   : -INFINITY;
  };
  MergedRow with_sink = {1.0f, 0.0f, -INFINITY};
  if constexpr (kSinks) {
    if (!found.corrupt) with_sink = merge_row(lse_of_tokens(), sink);
  }
  if (writes) {
    for (int32_t i = 1; i < kParts; ++i) total += totals[i][dim];
    const float x = present ? with_sink.a * (total / found.sum + value_mean) : 0.0f;
    static_cast<uint16_t*>(call.out)[place * call.head_dim + dim] = float_to_raw(call.dtype, x);
  }
  if (threadIdx.x != 0) return;
  if (call.lse != nullptr) call.lse[place] = kSinks ? with_sink.lse : lse_of_tokens();
  if (column == 0) call.row_status[row] = found.corrupt ? StatusCode::kCorrupt : StatusCode::kOk;
}

// Parts for rows of about so many partials: one where CTAs fill the device by their number.
struct JoinLaunch {
  void (*kernel)(CodedKernelParams);
  unsigned threads;
};
template <bool kSinks>
JoinLaunch join_launch(const CodedAttention& call, const CodedAttentionGrid& grid) {
  const int32_t partials = grid.num_ctas * coded_warps(call.head_dim) / call.num_rows;
  constexpr int kDims = kSliceDims;
  if (call.head_dim > kDims) {
    if (partials <= 8) return {join_kernel<2 * kDims, 1, kSinks>, 2 * kDims};
    return {join_kernel<2 * kDims, 4, kSinks>, 8 * kDims};
  }
  if (partials <= 8) return {join_kernel<kDims, 1, kSinks>, kDims};
  if (partials <= 64) return {join_kernel<kDims, 4, kSinks>, 4 * kDims};
  return {join_kernel<kDims, 8, kSinks>, 8 * kDims};
}

template <int kDimBlocks, BlockMode kMode, int kCopiesLog>
CodedKernel kernel_of_streams(int32_t streams) {
  constexpr auto kPlain = CodedBreadth::kPlain;
  return streams == 1 ? coded_attention_kernel<kDimBlocks, BlockCode<kMode, 1, kCopiesLog>, kPlain>
                      : coded_attention_kernel<kDimBlocks, BlockCode<kMode, 2, kCopiesLog>, kPlain>;
}

template <BlockMode kMode>
CodedKernel kernel_of_copies(const CodedAttention& call, int32_t copies_log) {
  const int32_t streams = call.keys.codebook.streams_per_lane;
  if (call.head_dim == 64) {
    return copies_log == 0 ? kernel_of_streams<4, kMode, 0>(streams) : nullptr;
  }
  if (call.head_dim == 96) {
    return copies_log == 0 ? kernel_of_streams<6, kMode, 0>(streams) : nullptr;
  }
  if (copies_log == 0) return kernel_of_streams<8, kMode, 0>(streams);
  if (copies_log == 5) return kernel_of_streams<8, kMode, 5>(streams);
  if constexpr (kMode == BlockMode::kPair) {
    if (copies_log == 3) return kernel_of_streams<8, kMode, 3>(streams);
    if (copies_log == 4) return kernel_of_streams<8, kMode, 4>(streams);
  }
  return nullptr;
}

CodedFamily coded_family(const CodedComponent& c, int32_t head_dim, int32_t copies_log) {
  CodedFamily family{};
  family.count = c.num_others;
  for (int32_t i = 0; i < c.num_others; ++i) {
    const DeviceCodebook& book = c.others[i];
    family.headers[i] = expected_header(book, head_dim);
    family.masks[i] = table_mask(book.max_length, copies_log);
    family.tables[i] = book.table;
    family.entries[i] = 1u << book.max_length;
  }
  return family;
}

// Of all passes but for what a pass has of its own.
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
  params.table_bytes =
      static_cast<uint32_t>(table_region_bytes(longest_word(call), grid.copies_log));
  params.key_family = coded_family(call.keys, call.head_dim, grid.copies_log);
  params.value_family = coded_family(call.values, call.head_dim, grid.copies_log);
  return params;
}

// Both kernels of a pass.
Status launch_pass(CodedKernel kernel, const CodedKernelParams& params, GpuStream stream) {
  const CodedAttention& call = params.call;
  const CodedAttentionGrid& grid = params.grid;
  if (Status s = launch_after_previous(kernel, static_cast<unsigned>(grid.num_ctas),
                                       static_cast<unsigned>(coded_warps(call.head_dim) * 32),
                                       static_cast<size_t>(grid.shared_bytes), stream, params);
      !s) {
    return s;
  }
  const dim3 joins(static_cast<unsigned>(call.num_rows), static_cast<unsigned>(call.columns));
  const JoinLaunch join =
      call.sinks == nullptr ? join_launch<false>(call, grid) : join_launch<true>(call, grid);
  return launch_after_previous(join.kernel, joins, join.threads, 0, stream, params);
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

// The probabilities of a call that has been attended to.
Status launch_probabilities(const CodedAttention& call, const ConvertedQueries& queries,
                            GpuStream stream) {
  const Result<CodedAttentionGrid> grid = coded_probability_grid(call);
  if (!grid) return grid.status();
  const CodedKernel kernel = find_probability_kernel(call);
  if (Status s = allow_shared(kernel, *grid); !s) return s;
  if (Status s = clear_probabilities(call, stream); !s) return s;
  const CodedKernelParams params = kernel_params(call, *grid, queries);
  for (int32_t first = 0; first < call.all_columns(); first += kCodedColumns) {
    if (Status s = launch_after_previous(kernel, static_cast<unsigned>(grid->num_ctas),
                                         static_cast<unsigned>(coded_warps(call.head_dim) * 32),
                                         static_cast<size_t>(grid->shared_bytes), stream,
                                         pass_params(params, first));
        !s) {
      return s;
    }
  }
  return Status::ok();
}

// Byte offsets: partials, then what ConvertedQueries has.
struct CodedWorkspace {
  size_t halves, units, bytes;
};
CodedWorkspace coded_workspace(const CodedAttention& call, const CodedAttentionGrid& grid) {
  const auto after = [](size_t bytes) {
    return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  };
  const int64_t partials = int64_t{grid.num_ctas} * coded_warps(call.head_dim) + call.num_rows;
  const auto rows = static_cast<size_t>(call.num_rows);
  const auto dims = static_cast<size_t>(call.head_dim);
  CodedWorkspace at{};
  at.halves = after(static_cast<size_t>(partials * std::min(call.all_columns(), kCodedColumns) *
                                        (call.head_dim + 2)) *
                    sizeof(float));
  at.units = at.bytes = at.halves;
  if (!needs_conversion(call)) return at;
  at.units = at.halves + after(rows * static_cast<size_t>(call.all_columns()) * dims * 2);
  at.bytes = at.units + rows * sizeof(float);
  return at;
}

}  // namespace

CodedKernel find_coded_kernel(const CodedAttention& call, int32_t copies_log) {
  if (call.is_raw()) return find_raw_kernel(call, copies_log);
  if (call.fixed.any()) return find_fixed_kernel(call, copies_log);
  if (!call.is_uniform()) return find_slices_kernel(call, copies_log);
  if (!call.is_plain()) return find_queries_kernel(call, copies_log);
  return call.keys.codebook.mode == BlockMode::kPair
             ? kernel_of_copies<BlockMode::kPair>(call, copies_log)
             : kernel_of_copies<BlockMode::kSingle>(call, copies_log);
}

size_t coded_attention_workspace_bytes(const CodedAttention& call, const CodedAttentionGrid& grid) {
  return coded_workspace(call, grid).bytes;
}

Status attend_coded(const CodedAttention& call, const CodedAttentionGrid& grid, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  if (call.num_rows == 0) return Status::ok();
  if (Status s = call.validate_arrays(); !s) return s;
  const CodedKernel kernel = find_coded_kernel(call, grid.copies_log);
  const int64_t warps = int64_t{grid.num_ctas} * coded_warps(call.head_dim);
  if (kernel == nullptr || grid.slots_per_warp < 1 || grid.slots_per_warp > 2 ||
      grid.num_ctas < 1 || warps > kMaxPartials) {
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
  return call.probabilities == nullptr ? Status::ok() : launch_probabilities(call, queries, stream);
}

}  // namespace tierkv

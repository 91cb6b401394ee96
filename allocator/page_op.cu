// SPDX-License-Identifier: Apache-2.0
// The plan stage and the launch of an operation. allocator/page_take.cu, page_fill.cu and
// page_drop.cu hold the stages after it.

#include "allocator/page_plan.cuh"
#include "gpu/launch.cuh"

namespace tierkv {
namespace {

// Keep, release: pages that the row drops. All of them return unless one may be shared, which is
// noted; a sequence that was never forked shares none.
__device__ int32_t survey_drop(const PageAllocator& a, const PageOp& op, const BatchRow& r) {
  const RowDrop drop = drop_row(a, op, r, drop_input(a, op, r), false);
  if (a.sequences[r.sequence].shares != 0 && drops_recorded(drop)) a.state->shares = 1;
  return drop.total;
}

// Pages that batch row i takes or gives back; its faults are noted.
__device__ int32_t survey_row(const OpLaunch& x, const PageOp& op, int32_t i) {
  const PageAllocator& a = x.a;
  const BatchRow r = batch_row_at(a, op, i);
  if (r.sequence == kPaddingSequence) return 0;
  if (!is_sequence(a, r.sequence)) {
    fault(a, i, StatusCode::kOutOfRange);
    return 0;
  }
  if (r.within == 0) {
    const int32_t repeated = name_sequence(a, r);
    if (repeated >= 0) fault(a, repeated, StatusCode::kInvalidArgument);
    if (drops_pages(op.kind)) x.scratch.reserved[r.entry] = a.sequences[r.sequence].reserved;
  }
  const StatusCode status = check_sequence(a, op, r);
  if (status != StatusCode::kOk) {
    fault(a, i, status);
    return 0;
  }
  const RowPlan plan = plan_row(a, op, r);
  if (plan.status != StatusCode::kOk) {
    fault(a, i, plan.status);
    return 0;
  }
  const bool only_drops = op.kind == PageOpKind::kKeep || op.kind == PageOpKind::kRelease;
  return only_drops ? survey_drop(a, op, r) : plan.fresh_total;
}

template <PageOpKind kKind>
__global__ void __launch_bounds__(kRowThreads) plan_kernel(const __grid_constant__ OpLaunch x) {
  // In this order: the next stage reads what kernels before this one wrote.
  wait_for_stage();
  let_next_stage_start();
  const PageOp op = op_of_kind<kKind>(x);
  const int32_t i = static_cast<int32_t>(blockIdx.x * kRowThreads + threadIdx.x);
  const int32_t group_pages = warp_sum(i < x.rows ? survey_row(x, op, i) : 0);
  if (i % kGroupRows == 0 && i < x.rows) x.scratch.group_offsets[i / kGroupRows] = group_pages;
  if (!is_last_cta(&x.a.state->arrived, gridDim.x)) return;
  const int64_t pages = scan_groups<kRowThreads>(x.scratch.group_offsets, x.groups);
  if (threadIdx.x == 0) decide_op(x, op.kind, pages);
  constexpr bool kStaysLive =
      kKind == PageOpKind::kAppend || kKind == PageOpKind::kGrow || kKind == PageOpKind::kTruncate;
  if (kStaysLive) return;
  __syncthreads();
  if (!goes_ahead(x)) return;
  for (int32_t e = threadIdx.x; e < op.batch.count; e += kRowThreads) close_sequence(x.a, op, e);
}

template <PageOpKind kKind>
cudaError_t launch_plan(const OpLaunch& x, cudaStream_t stream) {
  const auto ctas = static_cast<uint32_t>((x.rows + kRowThreads - 1) / kRowThreads);
  return launch_stage(plan_kernel<kKind>, static_cast<int32_t>(ctas), kRowThreads, x, stream);
}

template <PageOpKind kKind>
cudaError_t launch_op(const OpLaunch& x, cudaStream_t stream) {
  cudaError_t status = launch_plan<kKind>(x, stream);
  constexpr bool kTakes = kKind == PageOpKind::kAppend || kKind == PageOpKind::kTruncate;
  constexpr bool kFills =
      kKind == PageOpKind::kGrow || kKind == PageOpKind::kReserve || kKind == PageOpKind::kFork;
  if (status == cudaSuccess && kTakes) status = launch_take(x, stream);
  if (status == cudaSuccess && kFills) status = launch_fill(x, stream);
  if (status == cudaSuccess && drops_pages(kKind)) status = launch_drop(x, stream);
  return status;
}

cudaError_t launch_op_of_kind(const OpLaunch& x, cudaStream_t stream) {
  switch (x.op.kind) {
    case PageOpKind::kOpen:
      return launch_op<PageOpKind::kOpen>(x, stream);
    case PageOpKind::kReserve:
      return launch_op<PageOpKind::kReserve>(x, stream);
    case PageOpKind::kKeep:
      return launch_op<PageOpKind::kKeep>(x, stream);
    case PageOpKind::kAppend:
      return launch_op<PageOpKind::kAppend>(x, stream);
    case PageOpKind::kGrow:
      return launch_op<PageOpKind::kGrow>(x, stream);
    case PageOpKind::kTruncate:
      return launch_op<PageOpKind::kTruncate>(x, stream);
    case PageOpKind::kRelease:
      return launch_op<PageOpKind::kRelease>(x, stream);
    case PageOpKind::kFork:
      return launch_op<PageOpKind::kFork>(x, stream);
  }
  return cudaErrorInvalidValue;
}

size_t padded(size_t bytes) {
  return (bytes + kAllocatorAlignment - 1) / kAllocatorAlignment * kAllocatorAlignment;
}

int64_t groups_of(int64_t rows) {
  return (rows + kGroupRows - 1) / kGroupRows;
}

}  // namespace

cudaError_t overlapping_launches(bool* supported) {
  int32_t architecture = 0;
  const cudaError_t status = image_architecture(&architecture);
  *supported = architecture >= 90;
  return status;
}

cudaError_t launch_stage(StageKernel kernel, int32_t ctas, int32_t threads, const OpLaunch& x,
                         cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(ctas));
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = x.overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, x);
}

size_t page_op_workspace_bytes(const AllocatorShape& shape, int32_t max_batch) {
  const int64_t rows = int64_t{max_batch} * shape.table.rows_per_sequence;
  return padded(sizeof(OpDecision)) + padded(max_batch * sizeof(SideCounts)) +
         padded(groups_of(rows) * sizeof(int32_t));
}

Status run_page_op_device(const PageAllocator& a, const PageOp& op,
                          const DeviceWorkspace& workspace, GpuStream stream) {
  if (Status s = validate_op(a, op); !s) return s;
  if (workspace.memory == nullptr ||
      reinterpret_cast<uintptr_t>(workspace.memory) % kAllocatorAlignment != 0) {
    return {StatusCode::kInvalidArgument, "workspace is null or not aligned to 256 bytes"};
  }
  if (workspace.bytes < page_op_workspace_bytes(a.shape, op.batch.count)) {
    return {StatusCode::kBufferTooSmall, "workspace is smaller than page_op_workspace_bytes()"};
  }
  char* base = static_cast<char*>(workspace.memory);
  OpLaunch x;
  x.a = a;
  x.op = op;
  x.rows = batch_rows(a, op);
  x.groups = static_cast<int32_t>(groups_of(x.rows));
  x.scratch.decision = reinterpret_cast<OpDecision*>(base);
  base += padded(sizeof(OpDecision));
  x.scratch.reserved = reinterpret_cast<SideCounts*>(base);
  base += padded(op.batch.count * sizeof(SideCounts));
  x.scratch.group_offsets = reinterpret_cast<int32_t*>(base);
  cudaError_t status = overlapping_launches(&x.overlaps);
  if (status == cudaSuccess) status = launch_op_of_kind(x, stream);
  if (status != cudaSuccess) return {StatusCode::kCuda, cudaGetErrorString(status)};
  return Status::ok();
}

}  // namespace tierkv

// Kernels that decide an operation and take its pages; allocator/page_drop.cu gives pages back.

#include "allocator/page_op.cuh"

namespace tierkv {
namespace {

__device__ void fault(const PageAllocator& a, int32_t batch_row, StatusCode status) {
  atomicMin(reinterpret_cast<long long*>(&a.state->first_error),
            static_cast<long long>(error_key(batch_row, status)));
}

// As the host's name_sequence(); the order in which threads come does not matter.
__device__ void name_sequence(const PageAllocator& a, const BatchRow& r) {
  const int64_t number = a.state->op_number;
  const auto before = static_cast<int64_t>(
      atomicMax(reinterpret_cast<long long*>(&a.sequences[r.sequence].last_named),
                static_cast<long long>(naming(number, r.entry))));
  const int32_t repeated = repeated_entry(before, number, r.entry);
  if (repeated >= 0) {
    fault(a, repeated * a.shape.table.rows_per_sequence, StatusCode::kInvalidArgument);
  }
}

// Pages that batch row i takes; its faults are noted.
__device__ int32_t survey_row(const PageAllocator& a, const PageOp& op, int32_t i) {
  const BatchRow r = batch_row_at(a, op, i);
  if (r.sequence == kPaddingSequence) return 0;
  const StatusCode status = check_sequence(a, op, r);
  if (status != StatusCode::kOk) {
    fault(a, i, status);
    return 0;
  }
  if (r.within == 0) name_sequence(a, r);
  const RowPlan plan = plan_row(a, op, r);
  if (plan.status != StatusCode::kOk) fault(a, i, plan.status);
  return plan.fresh_total;
}

__device__ void decide_op(const OpLaunch& x, int64_t needed) {
  const PageAllocator& a = x.a;
  const auto first_error =
      static_cast<int64_t>(atomicExch(reinterpret_cast<unsigned long long*>(&a.state->first_error),
                                      static_cast<unsigned long long>(kNoError)));
  const RingCursors cursors = *a.ring.cursors;
  const OpReport report = decide(cursors, first_error, needed);
  *x.scratch.decision = {report.status, ring_index(cursors.start, a.ring.num_pages),
                         ring_index(cursors.end, a.ring.num_pages), 0};
  if (report.status == StatusCode::kOk) a.ring.cursors->start = cursors.start + needed;
  a.state->op_number += 1;
  *x.op.report = report;
}

// The kind is a template argument so that each kernel holds the plan of one operation.
template <PageOpKind kKind>
__device__ PageOp op_of_kind(const OpLaunch& x) {
  PageOp op = x.op;
  op.kind = kKind;
  return op;
}

template <PageOpKind kKind>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ OpLaunch x) {
  const int32_t i = static_cast<int32_t>(blockIdx.x * kPlanThreads + threadIdx.x);
  const int32_t pages = i < x.rows ? survey_row(x.a, op_of_kind<kKind>(x), i) : 0;
  if (i < x.rows) x.scratch.row_pages[i] = pages;
  const int32_t group_pages = warp_sum(pages);
  if (i % kGroupRows == 0 && i < x.rows) x.scratch.group_offsets[i / kGroupRows] = group_pages;
  if (!is_last_cta(&x.a.state->arrived)) return;
  const int64_t needed = scan_groups<kPlanThreads>(x.scratch.group_offsets, x.groups);
  if (threadIdx.x == 0) decide_op(x, needed);
}

__device__ int32_t take_at(const OpLaunch& x, int32_t offset) {
  const FreeRing& ring = x.a.ring;
  const int32_t page =
      ring.ids[ring_advance(x.scratch.decision->take_index, offset, ring.num_pages)];
  const PageRecord record = fresh_record();
  static_assert(sizeof(PageRecord) == sizeof(int4));
  *reinterpret_cast<int4*>(x.a.records + page) =
      make_int4(record.reference_count, __float_as_int(record.min_score), record.min_slot,
                record.min_position);
  return page;
}

__device__ PageCopy* copies_of(const PageOp& op, int32_t batch_row) {
  return op.copies + static_cast<int64_t>(batch_row) * kMaxSides;
}

__device__ void clear_copies(const PageOp& op, int32_t batch_row) {
  for (int32_t s = 0; s < kMaxSides; ++s) copies_of(op, batch_row)[s] = {kNoPage, kNoPage};
}

__device__ void append_row(const OpLaunch& x, const BatchRow& r, const RowPlan& plan,
                           int32_t offset) {
  const PageAllocator& a = x.a;
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (plan.fresh.of[s] == 0) continue;
    const int32_t slot = a.shape.table.slot_of(s, plan.pages.of[s] - 1);
    a.slots[line_start(a, r.row) + slot] = take_at(x, offset++);
  }
  a.tokens[r.row] = plan.tokens;
  if (plan.fresh_total > 0) a.pages[r.row] = plan.pages;
}

__device__ void exchange_row(const OpLaunch& x, const BatchRow& r, const RowPlan& plan,
                             int32_t offset) {
  clear_copies(x.op, r.batch_row);
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (plan.fresh.of[s] == 0) continue;
    const int32_t source = page_at(x.a, r.row, s, plan.pages.of[s] - 1);
    copies_of(x.op, r.batch_row)[s] = {source, take_at(x, offset++)};
  }
}

// Open, append, truncate: a thread per row takes a page or two.
template <PageOpKind kKind>
__global__ void __launch_bounds__(kPlanThreads) take_kernel(const __grid_constant__ OpLaunch x) {
  if (!goes_ahead(x)) return;
  const PageOp op = op_of_kind<kKind>(x);
  const int32_t i = static_cast<int32_t>(blockIdx.x * kPlanThreads + threadIdx.x);
  const BatchRow r = batch_row_at(x.a, op, i < x.rows ? i : 0);
  const bool is_real = i < x.rows && r.sequence != kPaddingSequence;
  const RowPlan plan = is_real ? plan_row(x.a, op, r) : RowPlan{};
  int32_t offset = warp_exclusive_sum(plan.fresh_total);
  if (i >= x.rows) return;
  if (!is_real) {
    if (kKind == PageOpKind::kTruncate) clear_copies(op, i);
    return;
  }
  offset += x.scratch.group_offsets[i / kGroupRows];
  if (kKind == PageOpKind::kAppend) append_row(x, r, plan, offset);
  if (kKind == PageOpKind::kTruncate) exchange_row(x, r, plan, offset);
  if (kKind == PageOpKind::kOpen && r.within == 0) {
    x.a.sequences[r.sequence].state = SequenceState::kLive;
  }
}

// Reserve: a warp per row; page k of side s is the next of the row's part of the ring.
__device__ void reserve_row(const OpLaunch& x, const BatchRow& r, int32_t offset) {
  const PageAllocator& a = x.a;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31;
  const RowPlan plan = plan_reserve(a, x.op, r);
  __syncwarp();  // every lane has read the counts
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const int32_t first = plan.pages.of[s] - plan.fresh.of[s];
    for (int32_t k = lane; k < plan.fresh.of[s]; k += 32) {
      const int32_t slot = a.shape.table.slot_of(s, first + k);
      a.slots[line_start(a, r.row) + slot] = take_at(x, offset + k);
    }
    offset += plan.fresh.of[s];
  }
  if (lane == 0) a.pages[r.row] = plan.pages;
}

__device__ void fork_row(const OpLaunch& x, const BatchRow& r, int32_t offset) {
  const PageAllocator& a = x.a;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31;
  const RowPlan plan = plan_fork(a, x.op, r);
  const int32_t source_row = x.op.sources[r.entry] * a.shape.table.rows_per_sequence + r.within;
  const int32_t* source = a.slots + line_start(a, source_row);
  int32_t* line = a.slots + line_start(a, r.row);
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const int32_t shared = plan.pages.of[s] - plan.fresh.of[s];
    for (int32_t k = lane; k < shared; k += 32) {
      const int32_t slot = a.shape.table.slot_of(s, k);
      line[slot] = source[slot];
      atomicAdd(&a.records[source[slot]].reference_count, 1);
    }
    if (lane != 0) continue;
    PageCopy& copy = copies_of(x.op, r.batch_row)[s];
    copy = {kNoPage, kNoPage};
    if (plan.fresh.of[s] == 0) continue;
    const int32_t slot = a.shape.table.slot_of(s, shared);
    line[slot] = take_at(x, offset++);
    copy = {source[slot], line[slot]};
  }
  if (lane != 0) return;
  a.tokens[r.row] = plan.tokens;
  a.pages[r.row] = plan.pages;
}

template <PageOpKind kKind>
__global__ void __launch_bounds__(kWarpRowThreads, 4)
    fill_kernel(const __grid_constant__ OpLaunch x) {
  if (!goes_ahead(x)) return;
  const PageOp op = op_of_kind<kKind>(x);
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31;
  const int32_t i = static_cast<int32_t>((blockIdx.x * kWarpRowThreads + threadIdx.x) / 32);
  if (i >= x.rows) return;
  const int32_t offset = row_offset(x, i);
  const BatchRow r = batch_row_at(x.a, op, i);
  if (r.sequence == kPaddingSequence) {
    if (kKind == PageOpKind::kFork && lane == 0) clear_copies(op, i);
    return;
  }
  if (kKind == PageOpKind::kFork) {
    fork_row(x, r, offset);
  } else {
    reserve_row(x, r, offset);
  }
  if (lane == 0 && r.within == 0) x.a.sequences[r.sequence].state = state_after(kKind);
}

uint32_t ctas(int64_t threads, int32_t per_cta) {
  return static_cast<uint32_t>((threads + per_cta - 1) / per_cta);
}

template <PageOpKind kKind>
cudaError_t launch_plan(const OpLaunch& x, cudaStream_t stream) {
  plan_kernel<kKind><<<ctas(x.rows, kPlanThreads), kPlanThreads, 0, stream>>>(x);
  return cudaGetLastError();
}

template <PageOpKind kKind>
cudaError_t launch_take(const OpLaunch& x, cudaStream_t stream) {
  const cudaError_t planned = launch_plan<kKind>(x, stream);
  if (planned != cudaSuccess) return planned;
  take_kernel<kKind><<<ctas(x.rows, kPlanThreads), kPlanThreads, 0, stream>>>(x);
  return cudaGetLastError();
}

template <PageOpKind kKind>
cudaError_t launch_fill(const OpLaunch& x, cudaStream_t stream) {
  const cudaError_t planned = launch_plan<kKind>(x, stream);
  if (planned != cudaSuccess) return planned;
  fill_kernel<kKind>
      <<<ctas(int64_t{x.rows} * 32, kWarpRowThreads), kWarpRowThreads, 0, stream>>>(x);
  return cudaGetLastError();
}

cudaError_t launch_op(const OpLaunch& x, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  switch (x.op.kind) {
    case PageOpKind::kOpen:
      return launch_take<PageOpKind::kOpen>(x, stream);
    case PageOpKind::kAppend:
      return launch_take<PageOpKind::kAppend>(x, stream);
    case PageOpKind::kReserve:
      return launch_fill<PageOpKind::kReserve>(x, stream);
    case PageOpKind::kFork:
      return launch_fill<PageOpKind::kFork>(x, stream);
    case PageOpKind::kKeep:
      status = launch_plan<PageOpKind::kKeep>(x, stream);
      break;
    case PageOpKind::kRelease:
      status = launch_plan<PageOpKind::kRelease>(x, stream);
      break;
    case PageOpKind::kTruncate:
      status = launch_take<PageOpKind::kTruncate>(x, stream);
      break;
  }
  return status == cudaSuccess ? launch_drop(x, stream) : status;
}

struct ScratchPlacement {
  size_t row_pages, group_offsets, total;
};

ScratchPlacement place_scratch(const AllocatorShape& shape, int32_t batch) {
  const auto padded = [](size_t bytes) {
    return (bytes + kAllocatorAlignment - 1) / kAllocatorAlignment * kAllocatorAlignment;
  };
  const size_t rows = static_cast<size_t>(batch) * shape.table.rows_per_sequence;
  ScratchPlacement p{};
  p.row_pages = padded(sizeof(OpDecision));
  p.group_offsets = p.row_pages + padded(rows * sizeof(int32_t));
  p.total = p.group_offsets + padded((rows + kGroupRows - 1) / kGroupRows * sizeof(int32_t));
  return p;
}

}  // namespace

size_t page_op_workspace_bytes(const AllocatorShape& shape, int32_t max_batch) {
  return place_scratch(shape, max_batch).total;
}

Status run_page_op_device(const PageAllocator& a, const PageOp& op,
                          const DeviceWorkspace& workspace, GpuStream stream) {
  if (Status s = validate_op(a, op); !s) return s;
  const ScratchPlacement p = place_scratch(a.shape, op.batch.count);
  if (workspace.memory == nullptr ||
      reinterpret_cast<uintptr_t>(workspace.memory) % kAllocatorAlignment != 0) {
    return {StatusCode::kInvalidArgument, "workspace is null or not aligned to 256 bytes"};
  }
  if (workspace.bytes < p.total) {
    return {StatusCode::kBufferTooSmall, "workspace is smaller than page_op_workspace_bytes()"};
  }
  char* base = static_cast<char*>(workspace.memory);
  OpLaunch x;
  x.a = a;
  x.op = op;
  x.scratch = {reinterpret_cast<OpDecision*>(base), reinterpret_cast<int32_t*>(base + p.row_pages),
               reinterpret_cast<int32_t*>(base + p.group_offsets)};
  x.rows = batch_rows(a, op);
  x.groups = (x.rows + kGroupRows - 1) / kGroupRows;
  const cudaError_t status = launch_op(x, stream);
  if (status != cudaSuccess) return {StatusCode::kCuda, cudaGetErrorString(status)};
  return Status::ok();
}

}  // namespace tierkv

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
  if (!is_sequence(a, r.sequence)) {
    fault(a, i, StatusCode::kOutOfRange);
    return 0;
  }
  if (r.within == 0) name_sequence(a, r);
  const StatusCode status = check_sequence(a, op, r);
  if (status != StatusCode::kOk) {
    fault(a, i, status);
    return 0;
  }
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
__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ OpLaunch x) {
  let_next_stage_start();
  const int32_t i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  const int32_t pages = i < x.rows ? survey_row(x.a, op_of_kind<kKind>(x), i) : 0;
  const int32_t group_pages = warp_sum(pages);
  if (i % kGroupRows == 0 && i < x.rows) x.scratch.group_offsets[i / kGroupRows] = group_pages;
  if (!is_last_cta(&x.a.state->arrived)) return;
  const int64_t needed = scan_groups(x.scratch.group_offsets, x.groups);
  if (threadIdx.x == 0) decide_op(x, needed);
}

__device__ int32_t id_at(const OpLaunch& x, int32_t offset) {
  const FreeRing& ring = x.a.ring;
  return ring.ids[ring_advance(x.scratch.decision->take_index, offset, ring.num_pages)];
}

__device__ int32_t take_at(const OpLaunch& x, int32_t offset) {
  const int32_t page = id_at(x, offset);
  write_record(x.a, page);
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

// Open, append, truncate: a thread per row takes a page or two. The plan needs nothing from the
// stage before it, so it is made again while that stage ends.
template <PageOpKind kKind>
__global__ void __launch_bounds__(kThreads) take_kernel(const __grid_constant__ OpLaunch x) {
  const PageOp op = op_of_kind<kKind>(x);
  if (kKind == PageOpKind::kTruncate) let_next_stage_start();
  const int32_t i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  const BatchRow r = batch_row_at(x.a, op, i < x.rows ? i : 0);
  const bool is_real = i < x.rows && is_sequence(x.a, r.sequence);
  const RowPlan plan = is_real ? plan_row(x.a, op, r) : RowPlan{};
  const int32_t before = warp_exclusive_sum(plan.fresh_total);
  wait_for_stage();
  if (i >= x.rows || !goes_ahead(x)) return;
  if (!is_real) {
    if (kKind == PageOpKind::kTruncate) clear_copies(op, i);
    return;
  }
  const int32_t offset = x.scratch.group_offsets[i / kGroupRows] + before;
  if (kKind == PageOpKind::kAppend) append_row(x, r, plan, offset);
  if (kKind == PageOpKind::kTruncate) exchange_row(x, r, plan, offset);
  if (kKind == PageOpKind::kOpen && r.within == 0) close_sequence(x.a, op, r.entry);
}

// The plans of a group and the list of their pages.
struct GroupPlans {
  GroupItems pages;  // reserve: new ones. fork: all, shared and new
  int32_t row[kGroupRows];
  int32_t source_row[kGroupRows];
  int32_t offset[kGroupRows];  // of the row's new pages among those of the operation
  RowPlan plans[kGroupRows];
};

template <PageOpKind kKind>
__device__ void load_plans(const OpLaunch& x, GroupPlans* group) {
  const PageOp op = op_of_kind<kKind>(x);
  if (threadIdx.x < kGroupRows) {
    const int32_t lane = lane_id(), i = static_cast<int32_t>(blockIdx.x) * kGroupRows + lane;
    const BatchRow r = batch_row_at(x.a, op, i < x.rows ? i : 0);
    const bool is_real = i < x.rows && r.sequence != kPaddingSequence;
    const RowPlan plan = is_real ? plan_row(x.a, op, r) : RowPlan{};
    const int32_t* pages = plan.pages.of;
    const bool is_fork = kKind == PageOpKind::kFork;
    group->pages.set(is_fork ? pages[0] + pages[1] + pages[2] + pages[3] : plan.fresh_total);
    group->row[lane] = is_real ? r.row : -1;
    group->source_row[lane] =
        is_real && is_fork ? op.sources[r.entry] * x.a.shape.table.rows_per_sequence + r.within : 0;
    group->offset[lane] =
        x.scratch.group_offsets[blockIdx.x] + warp_exclusive_sum(plan.fresh_total);
    group->plans[lane] = plan;
  }
  __syncthreads();
}

// New page j of the row: side by side, each from its end on.
__device__ void reserve_item(const OpLaunch& x, const GroupPlans& group, int32_t row, int32_t j) {
  const RowPlan& plan = group.plans[row];
  const int32_t page = id_at(x, group.offset[row] + j);
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const int32_t fresh = plan.fresh.of[s];
    if (j >= 0 && j < fresh) {
      const int32_t slot = x.a.shape.table.slot_of(s, plan.pages.of[s] - fresh + j);
      x.a.slots[line_start(x.a, group.row[row]) + slot] = page;
    }
    j -= fresh;
  }
}

// Page j of the new row: shared, or the new page for an open one.
__device__ void fork_item(const OpLaunch& x, const GroupPlans& group, int32_t row, int32_t j) {
  const RowPlan& plan = group.plans[row];
  const int32_t* source = x.a.slots + line_start(x.a, group.source_row[row]);
  int32_t* line = x.a.slots + line_start(x.a, group.row[row]);
  const int32_t batch_row = static_cast<int32_t>(blockIdx.x) * kGroupRows + row;
  int32_t offset = group.offset[row];
  for (int32_t s = 0; s < kMaxSides; ++s) {
    if (j >= 0 && j < plan.pages.of[s]) {
      const int32_t slot = x.a.shape.table.slot_of(s, j);
      const bool is_open = plan.fresh.of[s] != 0 && j == plan.pages.of[s] - 1;
      line[slot] = is_open ? take_at(x, offset) : source[slot];
      if (is_open) {
        copies_of(x.op, batch_row)[s] = {source[slot], line[slot]};
      } else {
        atomicAdd(&x.a.records[line[slot]].reference_count, 1);
      }
    }
    j -= plan.pages.of[s];
    offset += plan.fresh.of[s];
  }
}

// Reserve, fork: a CTA per group.
template <PageOpKind kKind>
__global__ void __launch_bounds__(kThreads, 4) fill_kernel(const __grid_constant__ OpLaunch x) {
  __shared__ GroupPlans group;
  wait_for_stage();
  if (!goes_ahead(x)) return;
  load_plans<kKind>(x, &group);
  const int32_t first_row = static_cast<int32_t>(blockIdx.x) * kGroupRows;
  const int32_t i = first_row + lane_id();
  const bool owns_row = threadIdx.x < kGroupRows && i < x.rows;
  if (kKind == PageOpKind::kFork) {
    if (owns_row) clear_copies(x.op, i);
    __syncthreads();
  }
  for (int32_t item = threadIdx.x; item < group.pages.total(); item += kThreads) {
    const int32_t row = group.pages.row_of(item), j = item - group.pages.first[row];
    if (kKind == PageOpKind::kFork) {
      fork_item(x, group, row, j);
    } else {
      reserve_item(x, group, row, j);
    }
  }
  if (!owns_row || group.row[lane_id()] < 0) return;
  x.a.tokens[group.row[lane_id()]] = group.plans[lane_id()].tokens;
  x.a.pages[group.row[lane_id()]] = group.plans[lane_id()].pages;
  const BatchRow r = batch_row_at(x.a, x.op, i);
  if (r.within == 0) close_sequence(x.a, op_of_kind<kKind>(x), r.entry);
}

int32_t row_ctas(const OpLaunch& x) {
  return (x.rows + kThreads - 1) / kThreads;
}

template <PageOpKind kKind>
cudaError_t launch_plan(const OpLaunch& x, cudaStream_t stream) {
  plan_kernel<kKind><<<static_cast<uint32_t>(row_ctas(x)), kThreads, 0, stream>>>(x);
  return cudaGetLastError();
}

template <PageOpKind kKind>
cudaError_t launch_take(const OpLaunch& x, cudaStream_t stream) {
  const cudaError_t planned = launch_plan<kKind>(x, stream);
  return planned == cudaSuccess ? launch_stage(take_kernel<kKind>, row_ctas(x), x, stream)
                                : planned;
}

template <PageOpKind kKind>
cudaError_t launch_fill(const OpLaunch& x, cudaStream_t stream) {
  const cudaError_t planned = launch_plan<kKind>(x, stream);
  return planned == cudaSuccess ? launch_stage(fill_kernel<kKind>, x.groups, x, stream) : planned;
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

size_t padded(size_t bytes) {
  return (bytes + kAllocatorAlignment - 1) / kAllocatorAlignment * kAllocatorAlignment;
}

int64_t groups_of(int64_t rows) {
  return (rows + kGroupRows - 1) / kGroupRows;
}

}  // namespace

cudaError_t launch_stage(void (*kernel)(OpLaunch), int32_t ctas, const OpLaunch& x,
                         cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(ctas));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = x.overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, x);
}

size_t page_op_workspace_bytes(const AllocatorShape& shape, int32_t max_batch) {
  const int64_t rows = int64_t{max_batch} * shape.table.rows_per_sequence;
  return padded(sizeof(OpDecision)) + padded(groups_of(rows) * sizeof(int32_t));
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
  int device = 0, major = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (status == cudaSuccess) {
    char* base = static_cast<char*>(workspace.memory);
    OpLaunch x;
    x.a = a;
    x.op = op;
    x.scratch = {reinterpret_cast<OpDecision*>(base),
                 reinterpret_cast<int32_t*>(base + padded(sizeof(OpDecision)))};
    x.rows = batch_rows(a, op);
    x.groups = static_cast<int32_t>(groups_of(x.rows));
    x.overlaps = major >= 9;
    status = launch_op(x, stream);
  }
  if (status != cudaSuccess) return {StatusCode::kCuda, cudaGetErrorString(status)};
  return Status::ok();
}

}  // namespace tierkv

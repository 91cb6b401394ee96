// SPDX-License-Identifier: Apache-2.0
// The device's operations against the host reference: the same bytes after every operation.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "allocator/invariants.h"
#include "tests/support/host_state.h"
#include "tests/support/page_trace.h"

namespace tierkv::testing {
namespace {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&memory_, bytes), cudaSuccess);
    poison();
  }
  ~DeviceMemory() { cudaFree(memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  // Not under initcheck (TIERKV_GPU_NO_POISON), which would take the pattern for a value.
  void poison() {
    if (std::getenv("TIERKV_GPU_NO_POISON") != nullptr) return;
    EXPECT_EQ(cudaMemset(memory_, 0xa5, bytes_), cudaSuccess);
  }
  void* get() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  void* memory_ = nullptr;
  size_t bytes_;
};

// Where an operation's arrays lie on the device.
struct DevicePlaces {
  size_t sequences, sources, counts, copies, report, total;
};

class DeviceState {
 public:
  explicit DeviceState(const AllocatorShape& shape)
      : memory_(allocator_bytes(shape).total),
        workspace_(page_op_workspace_bytes(shape, shape.table.num_sequences)),
        arrays_(places(shape, shape.table.num_sequences).total) {
    auto made = make_page_allocator(shape, memory_.get(), memory_.bytes());
    EXPECT_TRUE(made.is_ok()) << made.status().message();
    view_ = *made;
    EXPECT_TRUE(initialize_device(view_, nullptr).is_ok());
  }

  const PageAllocator& operator*() const { return view_; }
  DeviceWorkspace workspace() const { return {workspace_.get(), workspace_.bytes()}; }
  void upload(const HostState& host) {
    EXPECT_EQ(cudaMemcpy(memory_.get(), host.memory(), host.bytes(), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  void download(HostState* host) const {
    EXPECT_EQ(cudaMemcpy(host->memory(), memory_.get(), host->bytes(), cudaMemcpyDeviceToHost),
              cudaSuccess);
  }

  // The operation with its arrays on the device; valid until the next call.
  PageOp upload(const OwnedOp& op) {
    const DevicePlaces p = places(view_.shape, static_cast<int32_t>(op.sequences.size()));
    arrays_.poison();
    workspace_.poison();
    put(p.sequences, op.sequences);
    put(p.sources, op.sources);
    put(p.counts, op.counts);
    return {op.kind,
            {at<int32_t>(p.sequences), static_cast<int32_t>(op.sequences.size())},
            op.kind == PageOpKind::kFork ? at<int32_t>(p.sources) : nullptr,
            op.counts.empty() ? nullptr : at<SideCounts>(p.counts),
            op.copies.empty() ? nullptr : at<PageCopy>(p.copies),
            at<OpReport>(p.report)};
  }
  // Its results, back in `op`.
  void download(const PageOp& device_op, OwnedOp* op) const {
    EXPECT_EQ(cudaMemcpy(&op->report, device_op.report, sizeof(OpReport), cudaMemcpyDeviceToHost),
              cudaSuccess);
    if (op->copies.empty() || op->report.status != StatusCode::kOk) return;
    EXPECT_EQ(cudaMemcpy(op->copies.data(), device_op.copies, op->copies.size() * sizeof(PageCopy),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
  }

 private:
  static DevicePlaces places(const AllocatorShape& shape, int32_t count) {
    const auto padded = [](size_t n) { return (n + 255) / 256 * 256; };
    const size_t entries = count, rows = entries * shape.table.rows_per_sequence;
    DevicePlaces p{};
    p.sources = padded(entries * sizeof(int32_t));
    p.counts = p.sources + padded(entries * sizeof(int32_t));
    p.copies = p.counts + padded(rows * sizeof(SideCounts));
    p.report = p.copies + padded(rows * kMaxSides * sizeof(PageCopy));
    p.total = p.report + sizeof(OpReport);
    return p;
  }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(arrays_.get()) + offset);
  }
  template <class T>
  void put(size_t offset, const std::vector<T>& values) const {
    if (values.empty()) return;
    EXPECT_EQ(
        cudaMemcpy(at<T>(offset), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
        cudaSuccess);
  }

  DeviceMemory memory_, workspace_, arrays_;
  PageAllocator view_;
};

bool same_results(const OwnedOp& a, const OwnedOp& b) {
  return std::memcmp(&a.report, &b.report, sizeof(OpReport)) == 0 &&
         (a.report.status != StatusCode::kOk || a.copies.empty() ||
          std::memcmp(a.copies.data(), b.copies.data(), a.copies.size() * sizeof(PageCopy)) == 0);
}

// Runs one operation on both and compares everything.
void run_both(const HostState& host, DeviceState* device, HostState* downloaded, OwnedOp op) {
  OwnedOp device_side = op;
  ASSERT_TRUE(run_page_op_host(*host, op.view()).is_ok());
  const PageOp device_op = device->upload(device_side);
  const Status s = run_page_op_device(**device, device_op, device->workspace(), nullptr);
  ASSERT_TRUE(s.is_ok()) << s.message();
  ASSERT_CUDA(cudaDeviceSynchronize());
  device->download(device_op, &device_side);
  device->download(downloaded);
  ASSERT_EQ(static_cast<int>(device_side.report.status), static_cast<int>(op.report.status));
  ASSERT_EQ(device_side.report.batch_row, op.report.batch_row);
  ASSERT_TRUE(same_results(device_side, op));
  ASSERT_TRUE(*downloaded == host);
}

struct TraceCase {
  AllocatorShape shape;
  int32_t steps;
  TraceOptions options;
};

AllocatorShape large_shape(int32_t sequences, int32_t rows, int32_t pages) {
  AllocatorShape shape = with_sides(4, sequences, rows, pages);
  shape.table.table_slots[0] = 75;
  shape.table.table_slots[1] = 42;
  return shape;
}

class GpuTraceTest : public ::testing::TestWithParam<TraceCase> {};

TEST_P(GpuTraceTest, MatchesTheHostStateForState) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const AllocatorShape& shape = GetParam().shape;
  HostState host(shape), downloaded(shape);
  DeviceState device(shape);
  // Many turns of the ring later, and not at its beginning.
  const int64_t turned = (int64_t{1} << 40) / shape.num_pages * shape.num_pages;
  host->ring.cursors->start += turned;
  host->ring.cursors->end += turned;
  device.upload(host);
  TraceMaker maker(seed, GetParam().options);
  InvariantChecker laws;
  for (int32_t step = 0; step < GetParam().steps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    OwnedOp op = maker.next(*host);
    SCOPED_TRACE("kind " + std::to_string(static_cast<int>(op.kind)));
    ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, std::move(op)));
    const Status law = laws.check(*downloaded);
    ASSERT_TRUE(law.is_ok()) << law.message();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, GpuTraceTest,
    ::testing::Values(TraceCase{with_sides(1, 5, 2, 40), 1000, {}},
                      TraceCase{with_sides(2, 6, 7, 200), 1000, {}},
                      TraceCase{with_sides(3, 5, 33, 900), 1000, {}},
                      TraceCase{with_sides(4, 9, 29, 1500), 1000, {}},
                      TraceCase{large_shape(24, 256, 90000), 120, {0.05, 3, 40}},
                      TraceCase{large_shape(61, 77, 100001), 120, {0.05, 3, 41}}));

// More groups than one round of the scan: 40001 sequences of one row.
TEST(GpuAllocator, ScansManyGroups) {
  const AllocatorShape shape = with_sides(2, 40001, 1, 50000);
  HostState host(shape), downloaded(shape);
  DeviceState device(shape);
  device.upload(host);
  OwnedOp op;
  for (int32_t q = 0; q < 40001; ++q) op.sequences.push_back((q * 7919) % 40001);
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, op));
  op.kind = PageOpKind::kAppend;
  std::mt19937 rng(std::random_device{}());
  for (int32_t q = 0; q < 40001; ++q) {
    op.counts.push_back({{static_cast<int32_t>(rng() % 3), static_cast<int32_t>(rng() % 2), 0, 0}});
  }
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, op));  // 46,667 pages or so
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, op));  // mostly within pages
  op.sequences[40000] = op.sequences[17];
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, op));  // repeated
  op.sequences.resize(30011);
  op.counts.clear();
  op.kind = PageOpKind::kRelease;
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, op));
  EXPECT_EQ(downloaded->sequences[op.sequences[0]].state, SequenceState::kFree);
}

OwnedOp named(PageOpKind kind, std::vector<int32_t> sequences) {
  OwnedOp op;
  op.kind = kind;
  op.sequences = std::move(sequences);
  return op;
}

// One source, many forks, all dropped in one batch: every page has as many competing last owners as
// there are.
TEST(GpuAllocator, ReturnsAPageSharedByManyOnce) {
  const int32_t rows = 64, forks = 40;
  const AllocatorShape shape = large_shape(forks + 1, rows, 30000);
  HostState host(shape), downloaded(shape);
  DeviceState device(shape);
  device.upload(host);
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, named(PageOpKind::kOpen, {7})));
  OwnedOp op = named(PageOpKind::kReserve, {7});
  op.counts = {{{70, 0, 40, 0}}};
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, op));
  op = named(PageOpKind::kKeep, {7});
  for (int32_t r = 0; r < rows; ++r)
    op.counts.push_back({{2 * r, std::max(0, 4 * (63 - r) - r % 4), 20, r % 50}});
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, op));
  op = named(PageOpKind::kFork, {});
  for (int32_t q = 0; q <= forks; ++q) {
    if (q == 7) continue;
    op.sequences.push_back(q);
    op.sources.push_back(7);
  }
  op.copies.resize(forks * rows * kMaxSides);
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, op));
  EXPECT_EQ(host->sequences[forks].state, SequenceState::kLive);
  op.kind = PageOpKind::kRelease;
  op.copies.clear();
  op.sequences.push_back(7);
  ASSERT_NO_FATAL_FAILURE(run_both(host, &device, &downloaded, op));
  EXPECT_EQ(free_pages(*downloaded->ring.cursors), shape.num_pages);
}

TEST(GpuAllocator, InitializesAsTheHostDoes) {
  const AllocatorShape shape = with_sides(3, 5, 33, 901);
  HostState host(shape), downloaded(shape);
  DeviceState device(shape);
  ASSERT_CUDA(cudaDeviceSynchronize());
  device.download(&downloaded);
  EXPECT_TRUE(downloaded == host);
}

// A generation loop captured once: each replay appends the same tokens, then forks, truncates and
// releases a guest.
TEST(GpuAllocator, ReplaysACapturedGraph) {
  const AllocatorShape shape = large_shape(6, 100, 40000);
  HostState host(shape), downloaded(shape);
  DeviceState device(shape);
  device.upload(host);
  std::mt19937 rng(std::random_device{}());
  ASSERT_NO_FATAL_FAILURE(
      run_both(host, &device, &downloaded, named(PageOpKind::kOpen, {0, 3, 5, 1})));
  std::vector<OwnedOp> step = {
      named(PageOpKind::kAppend, {5, -1, 0, 3, 1}), named(PageOpKind::kFork, {4, 2}),
      named(PageOpKind::kTruncate, {4, 2}), named(PageOpKind::kRelease, {2, 4})};
  for (int32_t i = 0; i < 500; ++i) {
    step[0].counts.push_back({{static_cast<int32_t>(rng() % 3), static_cast<int32_t>(rng() % 3),
                               static_cast<int32_t>(rng() % 2), static_cast<int32_t>(rng() % 2)}});
  }
  step[1].sources = {0, 3};
  step[1].copies.resize(200 * kMaxSides);
  step[2].counts.resize(200);
  for (int32_t i = 0; i < 200; ++i) step[2].counts[i] = {{0, 0, 0, 0}};
  step[2].copies.resize(200 * kMaxSides);

  std::vector<std::unique_ptr<DeviceState>> arrays;  // a place for each operation's arrays
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  std::vector<PageOp> device_ops;
  for (OwnedOp& op : step) {
    arrays.push_back(std::make_unique<DeviceState>(shape));
    device_ops.push_back(arrays.back()->upload(op));
  }
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaDeviceSynchronize());
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (const PageOp& op : device_ops) {
    ASSERT_TRUE(run_page_op_device(*device, op, device.workspace(), stream).is_ok());
  }
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  int32_t failures = 0;
  for (int32_t replay = 0; replay < 60; ++replay) {
    SCOPED_TRACE("replay " + std::to_string(replay));
    ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    device.download(&downloaded);
    for (size_t k = 0; k < step.size(); ++k) {
      OwnedOp device_side = step[k];
      ASSERT_TRUE(run_page_op_host(*host, step[k].view()).is_ok());
      arrays[k]->download(device_ops[k], &device_side);
      ASSERT_TRUE(same_results(device_side, step[k])) << "operation " << k;
      failures += step[k].report.status != StatusCode::kOk ? 1 : 0;
    }
    ASSERT_TRUE(downloaded == host);
  }
  EXPECT_GT(failures, 0);  // the tables end up full: from then on every append fails alike
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(GpuAllocator, RefusesMalformedCallsBeforeALaunch) {
  const AllocatorShape shape = with_sides(2, 3, 4, 50);
  DeviceState device(shape);
  const PageOp op = device.upload(named(PageOpKind::kOpen, {1}));
  const DeviceWorkspace good = device.workspace();
  const auto refused = [&](const PageOp& bad, const DeviceWorkspace& w, StatusCode code) {
    EXPECT_EQ(run_page_op_device(*device, bad, w, nullptr).code(), code);
  };
  refused(op, {nullptr, good.bytes}, StatusCode::kInvalidArgument);
  refused(op, {static_cast<char*>(good.memory) + 64, good.bytes}, StatusCode::kInvalidArgument);
  refused(op, {good.memory, 256}, StatusCode::kBufferTooSmall);
  refused(PageOp::open({op.batch.sequences, 0}, op.report), good, StatusCode::kInvalidArgument);
  refused(PageOp::open({nullptr, 1}, op.report), good, StatusCode::kInvalidArgument);
  refused(PageOp::open(op.batch, nullptr), good, StatusCode::kInvalidArgument);
  refused(PageOp::append(op.batch, nullptr, op.report), good, StatusCode::kInvalidArgument);
  EXPECT_EQ(run_page_op_device({}, op, good, nullptr).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(initialize_device({}, nullptr).code(), StatusCode::kInvalidArgument);
  HostState host(shape), downloaded(shape);
  ASSERT_CUDA(cudaDeviceSynchronize());
  device.download(&downloaded);
  EXPECT_TRUE(downloaded == host);
}

}  // namespace
}  // namespace tierkv::testing

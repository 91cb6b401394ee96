// SPDX-License-Identifier: Apache-2.0
// Memory management alone: 128 sequences x 32 layers x 8 kv heads = 32,768 rows, 64 high or 112 low
// tokens a page. Rows named "batch" are DiffKV's Figure 13: 1 to 128 of these sequences at 1024
// tokens, by the page manager on the GPU and by threads on the CPU.
//
//   bench_allocator --out FILE.json --commit HASH [--threads N] [--only TEXT]
//
// --threads 0 leaves the CPU out, --only keeps the cases whose name holds the text.
//
// GPU times are graph replays between two events that are queued behind other work, so the host's
// launch is not in them; L2 is cold (flushed) except where a row says chain: 16 steps in one graph,
// time of one. The CPU manager runs the same operations on the same states on this machine's cores,
// warm, threads awake, best of several thread counts. Every state is compared with the host
// reference's before it is timed.

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cub/device/device_scan.cuh>
#include <functional>
#include <string>
#include <thread>

#include "bench/baselines/cpu_manager/cpu_manager.h"
#include "bench/gpu/allocator_state.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kRepeats = 41, kCpuRepeats = 15, kChain = 16;
constexpr size_t kFlushBytes = size_t{256} << 20;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "bench_allocator: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

void require(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "bench_allocator: %s\n", what.c_str());
  std::exit(1);
}

struct Times {
  double median, low, high;  // us; low and high: 10th and 90th percentile
};

Times summarize(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  const auto at = [&us](double q) { return us[static_cast<size_t>(q * (us.size() - 1) + 0.5)]; };
  return {at(0.5), at(0.1), at(0.9)};
}

struct Result {
  std::string name, where, cache;
  int32_t threads;
  int64_t pages;  // taken and given back
  Times times;
  int32_t batch = kSequences, tokens = 0;  // tokens 0: the name says
};

std::vector<Result> results;
std::string only;

void report(const Result& r) {
  std::printf("%-44s %-4s %-6s %3d threads %9lld pages %10.2f us  [%.2f, %.2f]\n", r.name.c_str(),
              r.where.c_str(), r.cache.c_str(), r.threads, static_cast<long long>(r.pages),
              r.times.median, r.times.low, r.times.high);
  std::fflush(stdout);
  results.push_back(r);
}

__global__ void empty_kernel() {}

class Gpu {
 public:
  Gpu() {
    check(cudaStreamCreate(&stream), "stream");
    check(cudaEventCreate(&start_), "event");
    check(cudaEventCreate(&stop_), "event");
    check(cudaMalloc(&flush_, kFlushBytes), "flush buffer");
  }

  // Times one replay of what `body` launches, after `prepare` and, when cold, a flush of L2.
  Times time(const std::function<void()>& prepare, const std::function<void()>& body, bool cold) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    body();
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    std::vector<double> us;
    for (int32_t i = 0; i < kRepeats + 3; ++i) {
      prepare();
      // Also what hides the launch: it takes longer than queueing the graph.
      check(cudaMemsetAsync(flush_, i, cold ? kFlushBytes : kFlushBytes / 16, stream), "flush");
      if (!cold) prepare();
      check(cudaEventRecord(start_, stream), "event");
      check(cudaGraphLaunch(exec, stream), "launch");
      check(cudaEventRecord(stop_, stream), "event");
      check(cudaStreamSynchronize(stream), "run");
      float ms = 0;
      check(cudaEventElapsedTime(&ms, start_, stop_), "event");
      if (i >= 3) us.push_back(ms * 1e3);
    }
    check(cudaGraphExecDestroy(exec), "graph");
    check(cudaGraphDestroy(graph), "graph");
    return summarize(us);
  }

  cudaStream_t stream;

 private:
  cudaEvent_t start_, stop_;
  void* flush_;
};

template <class T>
T* to_device(const std::vector<T>& values) {
  if (values.empty()) return nullptr;
  void* p = nullptr;
  check(cudaMalloc(&p, values.size() * sizeof(T)), "arrays");
  check(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "arrays");
  return static_cast<T*>(p);
}

// A state on the device, its snapshot, and operations to run on it.
class DeviceCase {
 public:
  DeviceCase(Gpu* gpu, const HostMemory& start, const std::vector<BatchOp>& ops)
      : gpu_(gpu), bytes_(start.bytes) {
    check(cudaMalloc(&memory_, bytes_), "state");
    check(cudaMalloc(&snapshot_, bytes_), "snapshot");
    check(cudaMemcpy(snapshot_, start.memory.get(), bytes_, cudaMemcpyHostToDevice), "snapshot");
    workspace_.bytes = page_op_workspace_bytes(start.a.shape, kSequences);
    check(cudaMalloc(&workspace_.memory, workspace_.bytes), "workspace");
    a_ = *make_page_allocator(start.a.shape, memory_, bytes_);
    for (const BatchOp& op : ops) {
      ops_.push_back({op.kind,
                      {to_device(op.sequences), static_cast<int32_t>(op.sequences.size())},
                      nullptr,
                      to_device(op.counts),
                      nullptr,
                      to_device(std::vector<OpReport>(1))});
    }
  }
  ~DeviceCase() {
    for (const PageOp& op : ops_) {
      cudaFree(const_cast<int32_t*>(op.batch.sequences));
      cudaFree(const_cast<SideCounts*>(op.counts));
      cudaFree(op.report);
    }
    cudaFree(memory_);
    cudaFree(snapshot_);
    cudaFree(workspace_.memory);
  }

  void restore() const {
    check(cudaMemcpyAsync(memory_, snapshot_, bytes_, cudaMemcpyDeviceToDevice, gpu_->stream),
          "restore");
  }
  void run() const {
    for (const PageOp& op : ops_) {
      const Status s = run_page_op_device(a_, op, workspace_, gpu_->stream);
      require(s.is_ok(), s.message());
    }
  }
  void expect(const HostMemory& expected) const {
    restore();
    run();
    HostMemory after(expected.a.shape);
    check(
        cudaMemcpyAsync(after.memory.get(), memory_, bytes_, cudaMemcpyDeviceToHost, gpu_->stream),
        "download");
    check(cudaStreamSynchronize(gpu_->stream), "run");
    require(after == expected, "the device's state is not the reference's");
  }
  Times time(bool cold) const {
    return gpu_->time([this] { restore(); }, [this] { run(); }, cold);
  }

 private:
  Gpu* gpu_;
  size_t bytes_;
  void *memory_ = nullptr, *snapshot_ = nullptr;
  DeviceWorkspace workspace_;
  PageAllocator a_;
  std::vector<PageOp> ops_;
};

double now_us() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

using RunOp = std::function<Status(const PageAllocator&, const PageOp&)>;

Times time_host(const HostMemory& start, const HostMemory& expected, std::vector<BatchOp> ops,
                const RunOp& run) {
  HostMemory state(start.a.shape);
  BatchOp wake{
      PageOpKind::kAppend, {kPaddingSequence}, std::vector<SideCounts>(kRows / kSequences), {}};
  std::vector<double> us;
  for (int32_t i = 0; i < kCpuRepeats + 1; ++i) {
    state.copy(start);
    require(run(state.a, wake.view()).is_ok(), "wake");
    state.a.state->op_number -= 1;  // as if it had not been
    const double begin = now_us();
    for (BatchOp& op : ops) require(run(state.a, op.view()).is_ok(), "CPU manager");
    if (i > 0) us.push_back(now_us() - begin);
  }
  require(state == expected, "the CPU manager's state is not the reference's");
  return summarize(us);
}

struct Case {
  std::string name;
  HostMemory* start;
  std::vector<BatchOp> ops;
  bool is_chain = false;
  int32_t tokens = 0;
};

void divide(Times* t, double by) {
  *t = {t->median / by, t->low / by, t->high / by};
}

void run_case(Gpu* gpu, const Case& c, int32_t max_threads) {
  if (c.name.find(only) == std::string::npos) return;
  HostMemory expected(c.start->a.shape);
  expected.copy(*c.start);
  int64_t pages = 0;
  for (BatchOp op : c.ops) {
    require(run_page_op_host(expected.a, op.view()).is_ok(), c.name);
    require(op.report.status == StatusCode::kOk, c.name + ": the operation failed");
    pages += op.report.pages_needed + op.report.pages_returned;
  }
  const double steps = c.is_chain ? static_cast<double>(c.ops.size()) : 1;
  const auto add = [&](const char* where, const char* cache, int32_t threads, Times t) {
    divide(&t, steps);
    report({c.name, where, cache, threads, static_cast<int64_t>(pages / steps), t,
            static_cast<int32_t>(c.ops[0].sequences.size()), c.tokens});
  };
  DeviceCase device(gpu, *c.start, c.ops);
  device.expect(expected);
  if (!c.is_chain) add("gpu", "cold", 0, device.time(true));
  add("gpu", "warm", 0, device.time(false));
  if (max_threads == 0) return;
  add("cpu", "warm", 0, time_host(*c.start, expected, c.ops, run_page_op_host));
  for (int32_t threads : {max_threads / 4, max_threads / 2, max_threads}) {
    if (threads < 1) continue;
    CpuManager manager(threads);
    add("cpu", "warm", threads,
        time_host(*c.start, expected, c.ops, [&manager](const PageAllocator& a, const PageOp& op) {
          return manager.run(a, op);
        }));
  }
}

void run_generation(Gpu* gpu, StateMaker* maker, int32_t max_threads) {
  HostMemory state(llama3_shape(3 << 20));
  require(maker->open_all(&state, true), "open");
  require(StateMaker::run(&state, maker->reserve(3072)), "reserve");
  require(StateMaker::run(&state, maker->keep(3072)), "keep");
  for (bool is_worst : {false, true}) {
    const std::string name = is_worst ? "generation step, two pages a row" : "generation step";
    std::vector<BatchOp> steps;
    for (int32_t i = 0; i < kChain; ++i) steps.push_back(maker->append(is_worst));
    run_case(gpu, {name, &state, {steps[0]}}, max_threads);
    run_case(gpu, {name + ", chain", &state, steps, true}, max_threads);
  }
}

void run_prompt(Gpu* gpu, StateMaker* maker, int32_t tokens, int32_t max_threads) {
  const int32_t worst = worst_case_pages(tokens, kHighTokens, kLowTokens);
  const std::string length = ", " + std::to_string(tokens) + " tokens";
  const BatchOp reserve = maker->reserve(tokens), keep = maker->keep(tokens);
  HostMemory state(llama3_shape(worst * kRows + 4096));
  require(maker->open_all(&state, false), "open");
  run_case(gpu, {"prompt coordination, new pool" + length, &state, {reserve, keep}}, 0);
  require(maker->open_all(&state, true), "open");
  run_case(gpu, {"prompt coordination" + length, &state, {reserve, keep}}, max_threads);
  run_case(gpu, {"of it the reservation" + length, &state, {reserve}}, 0);
  require(StateMaker::run(&state, reserve), "reserve");
  run_case(gpu, {"of it the return of the surplus" + length, &state, {keep}}, 0);
  require(StateMaker::run(&state, keep), "keep");
  run_case(gpu, {"release" + length, &state, {maker->op(PageOpKind::kRelease)}}, max_threads);
}

// DiffKV's Figure 13: a prompt's pages, then a generation step's, by batch size. The figure's axis
// is not in the paper's text; powers of two cover what a GPU holds.
void run_batches(Gpu* gpu, uint32_t seed, int32_t max_threads) {
  constexpr int32_t kTokens = 1024;
  const int32_t worst = worst_case_pages(kTokens, kHighTokens, kLowTokens);
  for (int32_t batch = 1; batch <= kSequences; batch *= 2) {
    StateMaker maker(seed + static_cast<uint32_t>(batch), batch);
    HostMemory state(llama3_shape((worst + 2) * batch * kLayers * kKvHeads));
    require(maker.open_all(&state, true), "open");
    const BatchOp reserve = maker.reserve(kTokens), keep = maker.keep(kTokens);
    const std::string of = "batch " + std::to_string(batch) + ", ";
    run_case(gpu, {of + "prompt", &state, {reserve, keep}, false, kTokens}, max_threads);
    require(StateMaker::run(&state, reserve) && StateMaker::run(&state, keep), "prompt");
    run_case(gpu, {of + "step", &state, {maker.append(false)}, false, kTokens}, max_threads);
  }
}

// What the times above cannot go below, and what a device-wide scan alone costs.
void run_floors(Gpu* gpu) {
  for (int32_t kernels : {1, 2, 6}) {
    const Times t = gpu->time([] {},
                              [&] {
                                for (int32_t k = 0; k < kernels; ++k) {
                                  empty_kernel<<<128, 256, 0, gpu->stream>>>();
                                }
                              },
                              true);
    report({"empty graph, " + std::to_string(kernels) + " kernels", "gpu", "cold", 0, 0, t});
  }
  int32_t *in = nullptr, *out = nullptr;
  void* temporary = nullptr;
  size_t bytes = 0;
  check(cudaMalloc(&in, kRows * sizeof(int32_t)), "scan");
  check(cudaMalloc(&out, kRows * sizeof(int32_t)), "scan");
  check(cudaMemset(in, 1, kRows * sizeof(int32_t)), "scan");
  check(cub::DeviceScan::ExclusiveSum(nullptr, bytes, in, out, kRows), "scan");
  check(cudaMalloc(&temporary, bytes), "scan");
  const Times t = gpu->time(
      [] {},
      [&] {
        check(cub::DeviceScan::ExclusiveSum(temporary, bytes, in, out, kRows, gpu->stream), "scan");
      },
      true);
  report({"cub::DeviceScan of 32,768 numbers alone", "gpu", "cold", 0, 0, t});
}

// What a manager on the host adds to its own time: the step's counts come down, the new slots go
// up.
void run_transfers() {
  void *host = nullptr, *device = nullptr;
  const size_t down = kRows * sizeof(SideCounts);
  check(cudaMallocHost(&host, down), "pinned memory");
  check(cudaMalloc(&device, down), "device memory");
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  for (int64_t pages : {int64_t{kRows} / 64, int64_t{2} * kRows}) {
    const size_t up = std::min(down, static_cast<size_t>(pages) * 8);  // slot and id
    std::vector<double> us;
    for (int32_t i = 0; i < kRepeats; ++i) {
      const double begin = now_us();
      check(cudaMemcpyAsync(host, device, down, cudaMemcpyDeviceToHost, stream), "down");
      check(cudaStreamSynchronize(stream), "down");
      check(cudaMemcpyAsync(device, host, up, cudaMemcpyHostToDevice, stream), "up");
      check(cudaStreamSynchronize(stream), "up");
      us.push_back(now_us() - begin);
    }
    report({"transfers of a host manager", "both", "warm", 1, pages, summarize(us)});
  }
}

void write_json(const char* path, const char* commit, uint32_t seed) {
  cudaDeviceProp gpu{};
  check(cudaGetDeviceProperties(&gpu, 0), "properties");
  std::FILE* f = std::fopen(path, "w");
  require(f != nullptr, std::string("cannot write ") + path);
  std::fprintf(f, "{\"schema\":\"tierkv.bench.allocator/1\",\"commit\":\"%s\",\"gpu\":\"%s\",",
               commit, gpu.name);
  std::fprintf(f, "\"cpu_threads\":%u,\"seed\":%u,\"rows\":%d,\"repeats\":%d,\"cpu_repeats\":%d,\n",
               std::thread::hardware_concurrency(), seed, kRows, kRepeats, kCpuRepeats);
  const AllocatorBytes b = allocator_bytes(llama3_shape(1));
  const AllocatorBytes more = allocator_bytes(llama3_shape(1 + 64));
  std::fprintf(
      f,
      "\"table_bytes\":%zu,\"count_bytes\":%zu,\"sequence_bytes\":%zu,"
      "\"bytes_per_page\":{\"ring\":%zu,\"record\":%zu,\"drop_mark\":%zu},\n\"results\":[\n",
      b.slots, b.counts, b.sequences, (more.ring - b.ring) / 64,
      (more.references - b.references) / 64, (more.drop_marks - b.drop_marks) / 64);
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    std::fprintf(
        f,
        "{\"name\":\"%s\",\"where\":\"%s\",\"cache\":\"%s\",\"threads\":%d,\"pages\":%lld,"
        "\"batch\":%d,\"tokens\":%d,\"median_us\":%.3f,\"p10_us\":%.3f,\"p90_us\":%.3f}%s\n",
        r.name.c_str(), r.where.c_str(), r.cache.c_str(), r.threads,
        static_cast<long long>(r.pages), r.batch, r.tokens, r.times.median, r.times.low,
        r.times.high, i + 1 < results.size() ? "," : "");
  }
  std::fprintf(f, "]}\n");
  require(std::fclose(f) == 0, std::string("cannot write ") + path);
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv::bench;
  const char *out = nullptr, *commit = "unknown";
  auto threads = static_cast<int32_t>(std::thread::hardware_concurrency());
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--out") out = argv[i + 1];
    if (flag == "--commit") commit = argv[i + 1];
    if (flag == "--threads") threads = std::atoi(argv[i + 1]);
    if (flag == "--only") only = argv[i + 1];
  }
  if (out == nullptr || threads < 0) {
    std::fprintf(stderr,
                 "usage: bench_allocator --out FILE.json --commit HASH [--threads N] "
                 "[--only TEXT]\n");
    return 2;
  }
  const uint32_t seed = std::random_device{}();
  Gpu gpu;
  StateMaker maker(seed);
  if (only.empty()) run_floors(&gpu);
  run_generation(&gpu, &maker, threads);
  for (int32_t tokens : {1024, 4096, 8192}) run_prompt(&gpu, &maker, tokens, threads);
  run_batches(&gpu, seed, threads);
  if (only.empty()) run_transfers();
  write_json(out, commit, seed);
  return 0;
}

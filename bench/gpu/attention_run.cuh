// SPDX-License-Identifier: Apache-2.0
// What benchmarks of attention over pages run on, and the calls of one cache. Replays take one set
// of pages after another, so many that none is in L2 when its turn comes again.
#pragma once

#include <random>

#include "bench/gpu/attention_cache.cuh"

namespace tierkv::bench {

inline constexpr int64_t kPoolBytes = 4ll << 30;
inline constexpr int64_t kCeilingBytes = 2ll << 30;
inline constexpr int64_t kColdBytes = 192ll << 20;  // several times the L2 cache
inline constexpr size_t kWorkspaceBytes = 512ull << 20;

inline void expect_ok(const Status& s, const char* what) {
  if (s.is_ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, s.message().c_str());
  std::exit(1);
}

template <class T>
T* device_alloc(size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  check(cudaMemset(memory, 0, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}

// Device memory of all cases, which live as long as the process.
struct AttentionBench {
  int replays = 0;
  cudaDeviceProp device{};
  cudaStream_t stream{};
  uint8_t *pool = nullptr, *workspaces = nullptr;  // [kPoolBytes], [kWorkspaceBytes]
  uint32_t* sink = nullptr;
  uint16_t *q = nullptr, *out = nullptr;  // fp16 [most_query_values]; q is random
  float* lse = nullptr;                   // null: not asked for
  double ceiling_gbps = 0;
};

inline void prepare(AttentionBench& b, int replays, size_t most_query_values) {
  b.replays = replays;
  check(cudaGetDeviceProperties(&b.device, 0), "cudaGetDeviceProperties");
  check(cudaStreamCreate(&b.stream), "cudaStreamCreate");
  b.pool = device_alloc<uint8_t>(kPoolBytes);
  b.workspaces = device_alloc<uint8_t>(kWorkspaceBytes);
  b.sink = device_alloc<uint32_t>(1);
  b.q = device_alloc<uint16_t>(most_query_values);
  b.out = device_alloc<uint16_t>(most_query_values);
  std::mt19937_64 rng(std::random_device{}());
  std::normal_distribution<float> normal;
  std::vector<uint16_t> q(most_query_values);
  for (uint16_t& x : q) x = float_to_half(normal(rng));
  check(cudaMemcpy(b.q, q.data(), q.size() * 2, cudaMemcpyHostToDevice), "upload q");
  const Timing t = time_graph(b.stream, 1, replays, [&](int) {
    launch_read_only(b.pool, kCeilingBytes, b.device.multiProcessorCount, b.sink, b.stream);
  });
  b.ceiling_gbps = static_cast<double>(kCeilingBytes) / t.median / 1e3;
}

// Call i takes set i % sets() of the cache's pages, and a workspace of its own. Plans are made.
class AttentionRun {
 public:
  // Both must outlive it.
  AttentionRun(const AttentionBench& bench, const CacheShape& shape, const AttentionGrid& grid)
      : b_(bench),
        config_(shape.config),
        grid_(grid),
        count_(static_cast<int32_t>(shape.sequences.size())),
        cache_(shape, bench.pool, kPoolBytes, 3, kColdBytes, bench.stream) {
    space_ = (attention_workspace_bytes(config_, grid_, count_) + 255) / 256 * 256;
    sets_ = std::min<int>(cache_.sets(), static_cast<int>(kWorkspaceBytes / space_));
    check(cudaMemset(b_.workspaces, 0, sets_ * space_), "cudaMemset");
    for (int i = 0; i < sets_; ++i) plan(i);
  }

  const AttentionConfig& config() const { return config_; }
  int32_t count() const { return count_; }  // of sequences
  int sets() const { return sets_; }
  int64_t bytes() const { return cache_.bytes(); }  // that a call must read

  AttendCall call(int i) const {
    AttendCall call;
    call.table = cache_.table(i % sets_);
    call.pages = cache_.pages();
    call.batch = {nullptr, count_};
    call.q = b_.q;
    call.out = b_.out;
    call.lse = b_.lse;
    call.plan_is_settled = true;
    return call;
  }
  void plan(int i) const {
    const Status s = plan_attention(config_, grid_, cache_.table(i % sets_), {nullptr, count_},
                                    workspace(i), b_.stream);
    expect_ok(s, "plan_attention");
  }
  void attend_set(int i, bool plan_is_settled, Settled pages) const {
    AttendCall c = call(i);
    c.plan_is_settled = plan_is_settled;
    std::fill_n(c.settled, kMaxAttentionTiers, pages);
    expect_ok(attend(config_, grid_, c, workspace(i), b_.stream), "attend");
  }
  template <class Launch>
  Timing time(Launch&& launch) const {
    return time_graph(b_.stream, std::max(sets_, 12), b_.replays, launch);
  }
  // A kernel that only reads as many bytes.
  Timing time_floor() const {
    return time([&](int i) {
      const int64_t offset = i % sets_ * (bytes() / 256 * 256);
      launch_read_only(b_.pool + offset, bytes(), b_.device.multiProcessorCount, b_.sink,
                       b_.stream);
    });
  }
  // With its plan settled, and of the pages what is named.
  Timing time_attend(Settled pages) const {
    return time([&](int i) { attend_set(i, true, pages); });
  }
  // Plan and attend.
  Timing time_step() const {
    return time([&](int i) {
      plan(i);
      attend_set(i, false, Settled::kNothing);
    });
  }

 private:
  AttentionWorkspace workspace(int i) const { return {b_.workspaces + i % sets_ * space_, space_}; }

  const AttentionBench& b_;
  const AttentionConfig& config_;
  AttentionGrid grid_;
  int32_t count_;
  Cache cache_;
  size_t space_ = 0;
  int sets_ = 0;
};

inline AttentionGrid grid_of(const AttentionConfig& config) {
  const Result<AttentionGrid> grid = attention_grid(config);
  expect_ok(grid.status(), "attention_grid");
  return *grid;
}

}  // namespace tierkv::bench

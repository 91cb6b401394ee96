// SPDX-License-Identifier: Apache-2.0
// Runs a CUDA kernel's source on the host: every thread of a CTA is a fiber, switched at barriers
// and warp exchanges.
//
// Slow and deterministic; meant for small launches in tests on machines without a GPU. Kernels are
// compiled against stand-ins of the headers that hold their instructions (gpu/). CTAs run one after
// another, in any order the caller likes, so only kernels in which no CTA waits for another can be
// run.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace emulator {

inline constexpr int32_t kLanes = 32;
inline constexpr size_t kStackBytes = 256 << 10;

struct Index {
  int32_t x = 0, y = 0, z = 0;
};

struct Barrier {
  int32_t expected = 0, arrived = 0;
  int64_t generation = 0;
};

// What the lanes of a warp show each other in one instruction.
struct Warp {
  Barrier barrier{kLanes};
  uint32_t words[kLanes][8];
};

class Cta {
 public:
  // Runs `thread` once per thread, to the end. blocks: of the whole grid.
  void run(int32_t block, int32_t threads, const std::function<void()>& thread,
           int32_t blocks = 1) {
    run(Index{block}, threads, thread, Index{blocks});
  }
  void run(Index block, int32_t threads, const std::function<void()>& thread, Index grid = {1}) {
    block_ = block;
    block_size_.x = threads;
    grid_ = grid;
    barrier_ = {threads};
    warps_.assign(threads / kLanes, Warp{});
    thread_ = &thread;
    while (static_cast<int32_t>(fibers_.size()) < threads) {
      fibers_.push_back(std::make_unique<Fiber>());
    }
    for (int32_t i = 0; i < threads; ++i) begin_fiber(*fibers_[i]);
    for (int32_t left = threads; left > 0;) {
      for (int32_t i = 0; i < threads; ++i) {
        if (fibers_[i]->done) continue;
        index_.x = i;
        swapcontext(&scheduler_, &fibers_[i]->context);
        if (fibers_[i]->done) --left;
      }
    }
  }

  const Index& thread_index() const { return index_; }
  const Index& block_index() const { return block_; }
  const Index& block_size() const { return block_size_; }
  const Index& grid() const { return grid_; }
  int32_t lane() const { return index_.x % kLanes; }
  Warp& warp() { return warps_[index_.x / kLanes]; }
  void yield() { swapcontext(&fibers_[index_.x]->context, &scheduler_); }
  void sync_cta() { sync(barrier_); }
  void sync_warp() { sync(warp().barrier); }

  // Shows `mine` to the warp and calls read() when all lanes have done so.
  template <class Read>
  auto exchange(const std::vector<uint32_t>& mine, Read read) {
    Warp& w = warp();
    for (size_t i = 0; i < mine.size(); ++i) w.words[lane()][i] = mine[i];
    sync_warp();
    auto result = read(w);
    sync_warp();
    return result;
  }

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
    bool done = false;
  };

  void begin_fiber(Fiber& fiber) {
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, &Cta::enter, 0);
  }

  static void enter();

  void sync(Barrier& barrier) {
    const int64_t generation = barrier.generation;
    if (++barrier.arrived == barrier.expected) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    while (barrier.generation == generation) yield();
  }

  ucontext_t scheduler_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  Barrier barrier_;
  Index index_, block_, block_size_, grid_;
  const std::function<void()>* thread_ = nullptr;
};

inline Cta& cta() {
  static Cta instance;
  return instance;
}

inline void Cta::enter() {
  (*cta().thread_)();
  cta().fibers_[cta().index_.x]->done = true;
}

}  // namespace emulator

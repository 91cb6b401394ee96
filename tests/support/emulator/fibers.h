// SPDX-License-Identifier: Apache-2.0
// Runs a CUDA kernel's source on the host: every thread of a CTA is a fiber, switched at barriers
// and warp exchanges.
//
// Slow and deterministic; meant for small launches in tests on machines without a GPU. Kernels are
// compiled against stand-ins of the headers that hold their instructions (gpu/). CTAs run one after
// another, in any order the caller likes, so only kernels in which no CTA waits for another can be
// run.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
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
  uint32_t words[kLanes][12];
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
    for (int32_t i = 0; i < threads; ++i) fibers_[i]->done = false;
    for (int32_t left = threads; left > 0;) {
      bool has_run = false;
      for (index_.x = 0; index_.x < threads; ++index_.x) {
        Fiber& fiber = *fibers_[index_.x];
        if (fiber.done || fiber.waits_for_others()) continue;
        resume(fiber);
        has_run = true;
        if (fiber.done) --left;
      }
      if (!has_run) refuse("threads wait at a barrier that others never reach");
    }
  }

  const Index& thread_index() const { return index_; }
  const Index& block_index() const { return block_; }
  const Index& block_size() const { return block_size_; }
  const Index& grid() const { return grid_; }
  int32_t lane() const { return index_.x % kLanes; }
  Warp& warp() { return warps_[index_.x / kLanes]; }
  void sync_cta() { sync(barrier_); }
  void sync_warp() { sync(warp().barrier); }

  // Shows `mine` to the warp and calls read() when all lanes have done so.
  template <class T, class Read>
  auto exchange(const T& mine, Read read) {
    Warp& w = warp();
    static_assert(sizeof(T) <= sizeof(w.words[0]));
    std::memcpy(w.words[lane()], &mine, sizeof(T));
    sync_warp();
    auto result = read(w);
    sync_warp();
    return result;
  }

 private:
  struct Fiber {
    jmp_buf at;
    std::unique_ptr<char[]> stack;  // none before its first thread
    const Barrier* barrier = nullptr;
    int64_t generation = 0;
    bool done = false;

    bool waits_for_others() const {
      return barrier != nullptr && barrier->generation == generation;
    }
  };

  [[noreturn]] static void refuse(const char* what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    std::abort();
  }

  // Jumps, because swapcontext() makes a system call each time.
  void resume(Fiber& fiber) {
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.stack) _longjmp(fiber.at, 1);
    fiber.stack = std::make_unique<char[]>(kStackBytes);
    ucontext_t first;
    getcontext(&first);
    first.uc_stack.ss_sp = fiber.stack.get();
    first.uc_stack.ss_size = kStackBytes;
    makecontext(&first, &Cta::enter, 0);
    setcontext(&first);
  }
  void leave(Fiber& fiber) {
    if (_setjmp(fiber.at) == 0) _longjmp(scheduler_, 1);
  }
  // A fiber runs one thread after another.
  static void enter();

  void sync(Barrier& barrier) {
    if (++barrier.arrived == barrier.expected) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    Fiber& fiber = *fibers_[index_.x];
    fiber.barrier = &barrier;
    fiber.generation = barrier.generation;
    leave(fiber);
    fiber.barrier = nullptr;
  }

  jmp_buf scheduler_;
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
  for (;;) {
    (*cta().thread_)();
    Fiber& fiber = *cta().fibers_[cta().index_.x];
    fiber.done = true;
    cta().leave(fiber);
  }
}

}  // namespace emulator

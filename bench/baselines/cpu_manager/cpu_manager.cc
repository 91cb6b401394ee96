// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/cpu_manager/cpu_manager.h"

#include <algorithm>

#include "allocator/host_rows.h"
#include "allocator/page_op.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tierkv {
namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Spins while `value` is `old`, soon leaving the core to others, and sleeps at last: between two
// steps of a decoder a thread does not fall asleep.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  constexpr int32_t kSpins = 2000, kYields = 20000;
  for (int32_t i = 0; i < kSpins + kYields; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    if (i < kSpins) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
  value.wait(old, std::memory_order_acquire);
}

// A thread's own part of the ring.
struct RingPart {
  const FreeRing& ring;
  int32_t index;

  int32_t& next() {
    int32_t& id = ring.ids[index];
    index = ring_advance(index, 1, ring.num_pages);
    return id;
  }
};

// Calls visit(slot, is_recorded) for every dropped page of the row, in order.
template <class Visit>
void visit_dropped(const PageAllocator& a, const RowDrop& drop, Visit visit) {
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const bool is_left = (s & 1) == 0;
    const int32_t last = drop.first[s] + drop.length[s] - 1;
    for (int32_t k = 0; k < drop.length[s]; ++k) {
      const int32_t index = is_left ? drop.first[s] + k : last - k;
      visit(a.shape.table.slot_of(s, index), index < drop.recorded[s]);
    }
  }
}

void give_row(const PageAllocator& a, const PageOp& op, const BatchRow& r, RingPart* part) {
  const RowDrop drop = drop_row(a, op, r);
  int32_t* line = a.slots + line_start(a, r.row);
  visit_dropped(a, drop, [&](int32_t slot, bool) {
    part->next() = line[slot];
    line[slot] = kNoPage;
  });
  finish_drop(a, op, r, drop);
}

}  // namespace

SpinPool::SpinPool(int32_t threads) {
  for (int32_t t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
}

SpinPool::~SpinPool() {
  stop_.store(true, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void SpinPool::barrier() {
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size())) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1, std::memory_order_release);
    phase_.notify_all();
    return;
  }
  wait_while(phase_, phase);
}

void SpinPool::work(int32_t thread) {
  for (uint32_t generation = 0;;) {
    wait_while(generation_, generation);
    generation = generation_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    (*job_)(thread);
    barrier();
  }
}

void SpinPool::run(const std::function<void(int32_t)>& job) {
  job_ = &job;
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  job(0);
  barrier();
}

int32_t CpuManager::first_row(const PageAllocator& a, const PageOp& op, int32_t thread) const {
  return static_cast<int32_t>(int64_t{batch_rows(a, op)} * thread / pool_.size());
}

CpuManager::Part CpuManager::survey(const PageAllocator& a, const PageOp& op,
                                    int32_t thread) const {
  Part part{kNoError, 0, false};
  const int32_t end = first_row(a, op, thread + 1);
  for (int32_t i = first_row(a, op, thread); i < end; ++i) {
    const BatchRow r = batch_row_at(a, op, i);
    if (r.sequence == kPaddingSequence) continue;
    RowPlan plan;
    StatusCode status =
        is_sequence(a, r.sequence) ? check_sequence(a, op, r) : StatusCode::kOutOfRange;
    if (status == StatusCode::kOk) {
      plan = plan_row(a, op, r);
      status = plan.status;
    }
    if (status != StatusCode::kOk) {
      part.first_error = std::min(part.first_error, error_key(i, status));
      continue;
    }
    part.pages += plan.fresh_total;
    if (!drops_pages(op.kind)) continue;
    const RowDrop drop = drop_row(a, op, r);
    part.pages += drop.total;
    if (a.sequences[r.sequence].shares == 0) continue;
    const int32_t* line = a.slots + line_start(a, r.row);
    visit_dropped(a, drop, [&](int32_t slot, bool is_recorded) {
      part.shared |= is_recorded && is_frozen(a, line[slot]);
    });
  }
  return part;
}

void CpuManager::apply(const PageAllocator& a, const PageOp& op, int32_t thread) const {
  const RingCursors& c = *a.ring.cursors;
  const bool drops = drops_pages(op.kind);
  const int64_t position = (drops ? c.end : c.start) + sum(thread).pages;
  RingPart part{a.ring, ring_index(position, a.ring.num_pages)};
  const int32_t end = first_row(a, op, thread + 1);
  for (int32_t i = first_row(a, op, thread); i < end; ++i) {
    const BatchRow r = batch_row_at(a, op, i);
    if (r.sequence == kPaddingSequence) continue;
    if (drops) {
      give_row(a, op, r, &part);
    } else {
      grow_row(a, r, plan_row(a, op, r), [&part] { return part.next(); });
    }
  }
}

CpuManager::Part CpuManager::sum(int32_t threads) const {
  Part all{kNoError, 0, false};
  for (int32_t t = 0; t < threads; ++t) {
    all.first_error = std::min(all.first_error, parts_[t].first_error);
    all.pages += parts_[t].pages;
    all.shared |= parts_[t].shared;
  }
  return all;
}

bool CpuManager::repeats_a_sequence(const PageAllocator& a, const PageOp& op) {
  named_.resize(static_cast<size_t>(a.shape.table.num_sequences), 0);
  ++runs_;
  bool repeats = false;
  for (int32_t e = 0; e < op.batch.count; ++e) {
    const int32_t sequence = op.batch.sequences[e];
    if (sequence < 0 || sequence >= a.shape.table.num_sequences) continue;
    repeats |= named_[sequence] == runs_;
    named_[sequence] = runs_;
  }
  return repeats;
}

Status CpuManager::run(const PageAllocator& a, const PageOp& op) {
  if (Status s = validate_op(a, op); !s) return s;
  const bool parallel = op.kind == PageOpKind::kAppend || op.kind == PageOpKind::kReserve ||
                        op.kind == PageOpKind::kKeep || op.kind == PageOpKind::kRelease;
  if (!parallel || repeats_a_sequence(a, op)) return run_page_op_host(a, op);

  OpReport report{};
  bool fallback = false;
  pool_.run([&](int32_t thread) {
    parts_[thread] = survey(a, op, thread);
    pool_.barrier();
    const Part all = sum(pool_.size());
    const bool drops = drops_pages(op.kind);
    const OpReport decided = decide(*a.ring.cursors, all.first_error, drops ? 0 : all.pages);
    if (thread == 0) {
      report = decided;
      fallback = all.shared || decided.status != StatusCode::kOk;
    }
    if (!all.shared && decided.status == StatusCode::kOk) apply(a, op, thread);
  });
  if (fallback) return run_page_op_host(a, op);

  const Part all = sum(pool_.size());
  RingCursors& c = *a.ring.cursors;
  if (drops_pages(op.kind)) {
    c.end += all.pages;
    report.pages_returned = all.pages;
  } else {
    c.start += all.pages;
  }
  report.pages_free = free_pages(c);
  for (int32_t e = 0; e < op.batch.count; ++e) {
    const int32_t sequence = op.batch.sequences[e];
    if (sequence == kPaddingSequence) continue;
    a.sequences[sequence].last_named = naming(a.state->op_number, e);
    close_sequence(a, op, e);
  }
  a.state->op_number += 1;
  *op.report = report;
  return Status::ok();
}

}  // namespace tierkv

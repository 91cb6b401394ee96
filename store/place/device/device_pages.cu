// SPDX-License-Identifier: Apache-2.0
// Counts and page operations of a place in device memory: whether there are pages, growth, fork and
// truncate.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "store/place/device/count_kernels.cuh"
#include "store/place/device/device_place.h"

namespace tierkv::store {
namespace {

IdChunk ids_from(const std::vector<int32_t>& slots, int32_t first) {
  IdChunk ids = {};
  std::copy_n(slots.begin() + first, std::min<size_t>(kIdChunk, slots.size() - first), ids.slots);
  return ids;
}

}  // namespace

Status DevicePlace::put_ids(const Slots& values, int32_t* to) const {
  const auto count = static_cast<int32_t>(values.size());
  for (int32_t first = 0; first < count; first += kIdChunk) {
    Status s = launch_after_previous(put_ids_kernel, 1, std::min(kIdChunk, count - first), 0,
                                     stream_, ids_from(values, first), first, to);
    if (!s) return s;
  }
  return Status::ok();
}

Status DevicePlace::write_counts(CountLaw law, int32_t tokens, const Slots& slots, Positions layers,
                                 bool plans) {
  CountCall call;
  call.batch = batch();
  call.counts = counts_;
  call.laws = layout_.laws;
  call.law = law;
  call.tokens = tokens;
  call.first_layer = layers.first;
  call.layers = layers.count();
  call.num_layers = config_.layout.num_layers;
  call.max_sequences = config_.max_sequences;
  call.rows = plans ? rows_per_sequence() : 0;
  call.held = view_.pages.allocator.tokens;
  call.row_counts = row_counts();
  call.total = static_cast<int32_t>(slots.size());
  if (book_.is_captured() && law == CountLaw::kBegin) {
    call.replayed = replayed_;
    call.capture = book_.captures();
  }
  call.fault = fault_;
  for (; call.first < call.total; call.first += kIdChunk) {
    call.count = std::min(kIdChunk, call.total - call.first);
    const IdChunk ids = ids_from(slots, call.first);
    const uint32_t ctas = ctas_for(int64_t{call.count} * call.threads_of_sequence(), kCountThreads);
    Status s = launch_after_previous(count_kernel, ctas, kCountThreads, 0, stream_, call, ids);
    if (!s) return s;
  }
  return Status::ok();
}

Status DevicePlace::commit(const DeviceWorks& works) {
  const int64_t entries = works.commit.counts == nullptr ? 1 : works.entries();
  return launch_after_previous(commit_kernel, ctas_for(entries, kCountThreads), kCountThreads, 0,
                               stream_, works);
}

Status DevicePlace::commit_op(bool is_reported) {
  DeviceWorks none;
  none.report = is_reported ? report_ : nullptr;
  none.commit = commit_of(nullptr);
  return commit(none);
}

Result<bool> DevicePlace::has_pages(int64_t at_most) {
  const bool fits = free_.at_least() >= at_most;
  if (book_.is_captured() || (fits && !was_captured_)) return fits;
  if (Status s = commit_op(false); !s) return s;
  if (Status s = wait(); !s) return s;
  free_.settle();
  was_captured_ = false;
  return free_.at_least() >= at_most;
}

Status DevicePlace::run(const PageOp& op, int64_t at_most) {
  free_.enqueue(at_most);
  was_captured_ |= book_.is_captured();
  return run_page_op_device(view_.pages.allocator, op, op_workspace_, stream_);
}

// For operations that the bound does not admit: what becomes of them is known afterwards.
Status DevicePlace::run_and_wait(const PageOp& op, int64_t at_most) {
  if (Status s = run(op, at_most); !s) return s;
  if (Status s = commit_op(false); !s) return s;
  OpReport report;
  if (Status s = copy(&report, op.report, sizeof(report)); !s) return s;
  if (Status s = wait(); !s) return s;
  if (report.status == StatusCode::kOk) return Status::ok();
  if (report.status == StatusCode::kOutOfPages) return refuse_pages(report.pages_needed);
  return Status(report.status, "table row " + std::to_string(report.batch_row));
}

Status DevicePlace::require_needs(const DeviceWorks& works) {
  if (Status s = zero(needs_, sizeof(PageNeeds)); !s) return s;
  Status launched = launch_after_previous(
      needs_kernel, ctas_for(works.count * rows_per_sequence(), kCountThreads), kCountThreads, 0,
      stream_, view_.pages.allocator, SequenceBatch{works.slots, works.count}, row_counts(),
      needs_);
  if (!launched) return launched;
  PageNeeds needs = {};
  if (Status s = copy(&needs, needs_, sizeof(needs)); !s) return s;
  if (Status s = wait(); !s) return s;
  if (needs.beyond > 0) {
    return Status(StatusCode::kOutOfRange, "a sequence takes more pages than its table has");
  }
  const int64_t needed =
      std::max(static_cast<int64_t>(needs.fresh), static_cast<int64_t>(needs.exchanged));
  return needed <= free_.at_least() ? Status::ok() : refuse_pages(needed);
}

int64_t DevicePlace::most_pages(const DeviceWorks& works, bool rewrites) const {
  const int64_t rows = int64_t{works.entries()} * view_.pages.rows_per_layer;
  const int64_t exchanged = rewrites ? rows * layout_.allocator.table.num_sides : 0;
  return format_->most_pages(works) + exchanged;
}

Status DevicePlace::compress_works(const DeviceWorks& works, const LayerMoves& moves) {
  DeviceWorks known = works;
  known.moves = moves.data();
  if (book_.is_captured()) {
    if (Status s = format_->require_capturable(known); !s) return s;
  }
  const bool rewrites = !book_.is_captured() && format_->may_rewrite(works);
  const int64_t at_most = most_pages(known, rewrites);
  const Result<bool> fits = has_pages(at_most);
  if (!fits) return fits.status();
  if (!*fits && book_.is_captured()) return refuse_pages(at_most);
  if (Status s = format_->plan(works, row_counts()); !s) return s;
  if (!*fits) {
    if (Status s = require_needs(works); !s) return s;
  }
  const SequenceBatch batch = {works.slots, works.count};
  if (rewrites) {
    if (Status s = run(PageOp::truncate(batch, kept_, copies_, report_), 0); !s) return s;
    if (Status s = copy_pages(works.count); !s) return s;
  }
  if (Status s = run(PageOp::grow(batch, target_, report_), at_most); !s) return s;
  return format_->write(works, rewrites ? copies_ : nullptr);
}

Status DevicePlace::copy_pages(int32_t count) {
  return launch_after_previous(page_copy_kernel, static_cast<uint32_t>(count * rows_per_sequence()),
                               kCountThreads, 0, stream_, view_.pages, copies_);
}

Status DevicePlace::note_replay(const LayerMoves& moves, int32_t tokens) {
  if (Status s = enter("note_replay", false); !s) return s;
  if (Status s = require_alike(moves); !s) return s;
  const DeviceWorks works = works_of(moves, {0, config_.layout.num_layers}, tokens);
  if (Status s = format_->require_capturable(works); !s) return s;
  const int64_t at_most = most_pages(works, false);
  if (free_.at_least() < at_most) {
    const Result<bool> fits = has_pages(at_most);
    if (!fits) return fits.status();
    if (!*fits) return refuse_pages(at_most);
  }
  Slots replayed = slots_of(moves, config_.layout.num_layers);
  const auto count = static_cast<int32_t>(replayed.size());
  replayed.insert(replayed.begin(), {book_.captures(), count});
  if (Status s = put_ids(replayed, replayed_); !s) return s;
  free_.enqueue(at_most);
  book_.forget();
  return Status::ok();
}

Status DevicePlace::open(int32_t slot) {
  if (Status s = enter("add_sequence", false); !s) return s;
  book_.forget();
  if (Status s = put_ids({slot}, op_slots_); !s) return s;
  if (Status s = run(PageOp::open({op_slots_, 1}, report_), 0); !s) return s;
  if (Status s = commit_op(true); !s) return s;
  if (Status s = zero(view_.slots.raw(slot, 0), layout_.slot_bytes); !s) return s;
  const int64_t layers = config_.layout.num_layers;
  return zero(counts_ + slot * layers, layers * int64_t{sizeof(LayerTokens)});
}

Status DevicePlace::release(int32_t slot) {
  if (Status s = enter("release", false); !s) return s;
  book_.forget();
  if (Status s = put_ids({slot}, op_slots_); !s) return s;
  if (Status s = run(PageOp::release({op_slots_, 1}, report_), 0); !s) return s;
  format_->released(slot);
  return commit_op(true);
}

Status DevicePlace::fork(int32_t from, int32_t to, const LayerMoves& layers) {
  if (Status s = enter("fork", false); !s) return s;
  book_.forget();
  const int64_t at_most = int64_t{rows_per_sequence()} * layout_.allocator.table.num_sides;
  const Result<bool> fits = has_pages(at_most);
  if (!fits) return fits.status();
  const PageOp op = PageOp::fork({op_slots_, 1}, op_slots_ + 1, copies_, report_);
  if (Status s = put_ids({to, from}, op_slots_); !s) return s;
  if (Status s = *fits ? run(op, at_most) : run_and_wait(op, at_most); !s) return s;
  const Positions all = {0, config_.layout.num_layers};
  const int64_t counts_bytes = all.end * int64_t{sizeof(LayerTokens)};
  if (Status s = copy(view_.slots.raw(to, 0), view_.slots.raw(from, 0), layout_.slot_bytes); !s) {
    return s;
  }
  if (Status s =
          copy(counts_ + int64_t{to} * all.end, counts_ + int64_t{from} * all.end, counts_bytes);
      !s) {
    return s;
  }
  if (Status s = copy_pages(1); !s) return s;
  if (Status s = write_counts(CountLaw::kHeld, 0, {to}, all, false); !s) return s;
  const DeviceWorks works = works_of(layers, all, 0);
  if (Status s = format_->forked(from, to); !s) return s;
  if (Status s = format_->cut(works, copies_); !s) return s;
  return commit_op(true);
}

Status DevicePlace::truncate(const LayerMoves& layers) {
  if (Status s = enter("truncate", false); !s) return s;
  book_.forget();
  const Positions all = {0, config_.layout.num_layers};
  const int32_t tokens = layers[0].to.tokens;
  const bool cuts = any_moves_body(layers);
  if (Status s = write_counts(CountLaw::kTruncate, tokens, {layers[0].slot}, all, cuts); !s) {
    return s;
  }
  DeviceWorks works = works_of(layers, all, 0);
  works.commit.counts = counts_;
  if (cuts) {
    if (Status s = cut_bodies(works, layers); !s) return s;
  } else {
    works.report = nullptr;
  }
  return commit(works);
}

// The ring's tokens all go, so what comes back may take their places before the pages are cut.
Status DevicePlace::cut_bodies(const DeviceWorks& works, const LayerMoves& layers) {
  if (Status s = format_->cut_counts(works, row_counts()); !s) return s;
  const int64_t rows = rows_per_sequence();
  const int64_t at_most = rows * layout_.allocator.table.num_sides;
  const Result<bool> fits = has_pages(at_most);
  if (!fits) return fits.status();
  if (!*fits) {
    if (Status s = copy(kept_, target_, rows * int64_t{sizeof(SideCounts)}); !s) return s;
    if (Status s = require_needs(works); !s) return s;
  }
  for (const LayerMove& move : layers) {
    if (!move.moves_body()) continue;
    const Positions range = {std::min(ring_first(layout_.laws, move.to), move.to.tokens),
                             move.to.tokens};
    if (range.count() <= 0) continue;
    if (Status s = format_->restore(move, range); !s) return s;
  }
  const PageOp op = PageOp::truncate({works.slots, 1}, target_, copies_, report_);
  if (Status s = run(op, at_most); !s) return s;
  if (Status s = copy_pages(1); !s) return s;
  return format_->cut(works, copies_);
}

}  // namespace tierkv::store

// SPDX-License-Identifier: Apache-2.0
// Page operations of a store in host memory: growth, fork and truncate.
#include <algorithm>
#include <cstring>
#include <string>

#include "codec/format/element.h"
#include "store/place/host_place.h"

namespace tierkv::store {

Status out_of_pages(int64_t needed, int64_t free, int64_t page_bytes, Shortage* shortage) {
  *shortage = {needed - free, (needed - free) * page_bytes};
  return Status(StatusCode::kOutOfPages,
                std::to_string(needed) + " pages needed, " + std::to_string(free) + " are free; " +
                    std::to_string(shortage->bytes) + " bytes are missing");
}

Status HostPlace::run(const PageOp& op) {
  if (Status s = run_page_op_host(pages_.allocator, op); !s) return s;
  const OpReport& report = *op.report;
  const int64_t in_use = pages_.allocator.shape.num_pages - report.pages_free;
  if (report.status == StatusCode::kOk) {
    most_pages_ = std::max(most_pages_, in_use);
    return Status::ok();
  }
  if (report.status == StatusCode::kOutOfPages) return require_pages(report.pages_needed);
  return Status(report.status, "table row " + std::to_string(report.batch_row));
}

Status HostPlace::require_pages(int64_t needed) {
  const RingCursors& cursors = *pages_.allocator.ring.cursors;
  const int64_t free = cursors.end - cursors.start;
  return needed <= free ? Status::ok() : out_of_pages(needed, free, pages_.page_bytes, &shortage_);
}

std::vector<SideCounts> HostPlace::counts_of(int32_t slot) const {
  const int32_t rows = pages_.allocator.shape.table.rows_per_sequence;
  const SideCounts* first = pages_.allocator.tokens + int64_t{slot} * rows;
  return {first, first + rows};
}

Status HostPlace::take_pages(const std::vector<HostLayer>& layers,
                             const std::vector<LayerPlan>& plans) {
  std::vector<int32_t> slots;
  std::vector<SideCounts> kept, target;  // of all table rows of the slots
  std::vector<size_t> first_rows;        // of each layer, among them
  PageDemand needed;
  bool cuts = false;
  for (size_t i = 0; i < layers.size(); ++i) {
    const int32_t slot = layers[i].slot, layer = layers[i].layer;
    const std::vector<SideCounts> held = counts_of(slot);
    if (slots.empty() || slots.back() != slot) {
      slots.push_back(slot);
      for (auto* of : {&kept, &target}) of->insert(of->end(), held.begin(), held.end());
    }
    const size_t first = kept.size() - held.size() + size_t{1} * layer * pages_.rows_per_layer;
    first_rows.push_back(first);
    cuts |= !plans[i].kept.empty();
    std::ranges::copy(plans[i].kept, kept.begin() + static_cast<int64_t>(first));
    std::ranges::copy(plans[i].tokens, target.begin() + static_cast<int64_t>(first));
    for (int32_t r = 0; r < pages_.rows_per_layer; ++r) {
      const PageDemand of_row = page_demand(pages_.allocator, pages_.row(slot, layer, r),
                                            kept[first + r], target[first + r]);
      needed.fresh += of_row.fresh;
      needed.exchanged += of_row.exchanged;
      if (of_row.is_beyond) {
        return Status(StatusCode::kOutOfRange, "a sequence takes more pages than its table has");
      }
    }
  }
  if (Status s = require_pages(std::max(needed.fresh, needed.exchanged)); !s) return s;
  std::vector<PageCopy> copies(cuts ? kept.size() * kMaxSides : 0);
  // Nothing fails from here on, and nothing is allocated.
  const SequenceBatch batch = {slots.data(), static_cast<int32_t>(slots.size())};
  OpReport report;
  if (cuts) {
    Status s = run(PageOp::truncate(batch, kept.data(), copies.data(), &report));
    if (!s) return s;
    copy_pages(copies);
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    if (plans[i].kept.empty()) continue;
    format_->relocate(layers[i], copies.data() + first_rows[i] * kMaxSides);
  }
  return run(PageOp::grow(batch, target.data(), &report));
}

void HostPlace::copy_pages(const std::vector<PageCopy>& copies) const {
  for (const PageCopy& copy : copies) {
    if (copy.source == kNoPage) continue;
    std::memcpy(pages_.bytes(copy.target), pages_.bytes(copy.source),
                static_cast<size_t>(pages_.page_bytes));
  }
}

const PageCopy* HostPlace::copies_of(const std::vector<PageCopy>& copies, int32_t layer) const {
  return copies.data() + int64_t{layer} * pages_.rows_per_layer * kMaxSides;
}

Status HostPlace::fork(int32_t from, int32_t to, const LayerMoves& layers) {
  std::vector<PageCopy> copies(counts_of(from).size() * kMaxSides);
  OpReport report;
  if (Status s = run(PageOp::fork({&to, 1}, &from, copies.data(), &report)); !s) return s;
  std::memcpy(slot_bytes(to), slot_bytes(from), static_cast<size_t>(layout_.slot_bytes));
  copy_pages(copies);
  for (const LayerMove& move : layers) {
    format_->relocate(layer_of(move), copies_of(copies, move.layer));
  }
  return Status::ok();
}

HostPlace::Returned HostPlace::read_returned(const LayerMove& move) const {
  const int32_t end = move.to.tokens, first = std::min(ring_first(layout_.laws, move.to), end);
  const int64_t count = end - first, dim = config_.layout.head_dim;
  const int64_t heads = config_.layout.num_kv_heads;
  Returned r = {move, first, {}, {}, std::vector<RawScore>(heads * count)};
  for (std::vector<float>* x : {&r.k, &r.v}) x->resize(heads * count * dim);
  for (int32_t h = 0; count > 0 && h < heads; ++h) {
    const int64_t at = h * count * dim;
    format_->read(layer_of(move), h, first, end, r.k.data() + at, r.v.data() + at, nullptr);
    format_->read_decided(layer_of(move), h, first, end, r.scores.data() + h * count);
  }
  return r;
}

// The ring's tokens all go.
void HostPlace::restore(const Returned& r) const {
  const int32_t end = r.move.to.tokens, dim = config_.layout.head_dim;
  uint16_t token[kMaxHeadDim];
  int64_t at = 0;
  for (int32_t h = 0; h < config_.layout.num_kv_heads; ++h) {
    for (int32_t p = r.first; p < end; ++p, ++at) {
      for (const Component c : {Component::kKey, Component::kValue}) {
        const float* x = (c == Component::kKey ? r.k : r.v).data() + at * dim;
        std::transform(x, x + dim, token,
                       [](float value) { return float_to_half(saturate_to_half_range(value)); });
        write_raw(layout_, raw_row(r.move, h), c, p, token);
      }
      write_score(layout_, raw_row(r.move, h), p, r.scores[at]);
    }
  }
}

Status HostPlace::truncate(const LayerMoves& layers) {
  const int32_t slot = layers[0].slot;
  std::vector<SideCounts> counts = counts_of(slot);
  std::vector<Returned> cut;
  for (const LayerMove& move : layers) {
    if (!move.moves_body()) continue;
    cut.push_back(read_returned(move));
    const std::vector<SideCounts> left = format_->cut_counts(layer_of(move), move.to.body_end);
    std::copy(left.begin(), left.end(), counts.begin() + move.layer * pages_.rows_per_layer);
  }
  int64_t exchanged = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    const int32_t row = pages_.row(slot, 0, static_cast<int32_t>(r));
    exchanged += page_demand(pages_.allocator, row, counts[r], counts[r]).exchanged;
  }
  if (Status s = require_pages(exchanged); !s) return s;
  std::vector<PageCopy> copies(counts.size() * kMaxSides);
  OpReport report;
  for (const Returned& r : cut) restore(r);
  if (Status s = run(PageOp::truncate({&slot, 1}, counts.data(), copies.data(), &report)); !s) {
    return s;
  }
  copy_pages(copies);
  for (const auto& [move, first, k, v, scores] : cut) {
    format_->cut(layer_of(move), move.to.body_end);
    format_->relocate(layer_of(move), copies_of(copies, move.layer));
  }
  return Status::ok();
}

Result<int64_t> HostPlace::bytes_held(int32_t slot) const {
  const int64_t rows = pages_.allocator.shape.table.rows_per_sequence;
  int64_t pages = 0;
  for (int64_t r = slot * rows; r < (slot + 1) * rows; ++r) {
    for (const int32_t of_side : pages_.allocator.pages[r].of) pages += of_side;
  }
  return pages * layout_.page_bytes + layout_.slot_bytes;
}

}  // namespace tierkv::store

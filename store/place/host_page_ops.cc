// SPDX-License-Identifier: Apache-2.0
// Page operations of a store in host memory: growth, fork and truncate.
#include <algorithm>
#include <cstring>
#include <map>
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
  std::map<int32_t, std::vector<SideCounts>> kept, target;  // by slot; kept where it is not all
  PageDemand needed;
  for (size_t i = 0; i < layers.size(); ++i) {
    const int32_t slot = layers[i].slot;
    const bool cuts = !plans[i].kept.empty();
    if (target.count(slot) == 0) target[slot] = counts_of(slot);
    if (cuts && kept.count(slot) == 0) kept[slot] = counts_of(slot);
    for (size_t r = 0; r < plans[i].tokens.size(); ++r) {
      const auto in_slot = static_cast<size_t>(layers[i].layer * pages_.rows_per_layer) + r;
      const int32_t row = pages_.row(slot, layers[i].layer, static_cast<int32_t>(r));
      const SideCounts& after = target[slot][in_slot] = plans[i].tokens[r];
      if (cuts) kept[slot][in_slot] = plans[i].kept[r];
      const PageDemand of_row =
          page_demand(pages_.allocator, row, cuts ? plans[i].kept[r] : pages_.tokens(row), after);
      needed.fresh += of_row.fresh;
      needed.exchanged += of_row.exchanged;
      if (of_row.is_beyond) {
        return Status(StatusCode::kOutOfRange, "a sequence takes more pages than its table has");
      }
    }
  }
  if (Status s = require_pages(std::max(needed.fresh, needed.exchanged)); !s) return s;
  std::map<int32_t, std::vector<PageCopy>> copies;
  for (const auto& [slot, tokens] : kept) {
    OpReport report;
    copies[slot].resize(tokens.size() * kMaxSides);
    Status s = run(PageOp::truncate({&slot, 1}, tokens.data(), copies[slot].data(), &report));
    if (!s) return s;
    copy_pages(copies[slot]);
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    if (plans[i].kept.empty()) continue;
    format_->relocate(layers[i], copies_of(copies[layers[i].slot], layers[i].layer));
  }
  for (const auto& [slot, tokens] : target) {
    OpReport report;
    if (Status s = run(PageOp::grow({&slot, 1}, tokens.data(), &report)); !s) return s;
  }
  return Status::ok();
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

// What is behind the cut goes back to the ring, whose tokens all go.
void HostPlace::restore(const LayerMove& move) const {
  const int32_t end = move.to.tokens, first = std::min(ring_first(layout_.laws, move.to), end);
  const int32_t count = end - first, dim = config_.layout.head_dim;
  std::vector<float> k(int64_t{count} * dim), v(k.size());
  std::vector<RawScore> scores(count);
  std::vector<uint16_t> token(dim);
  for (int32_t h = 0; count > 0 && h < config_.layout.num_kv_heads; ++h) {
    format_->read(layer_of(move), h, first, end, k.data(), v.data(), nullptr);
    format_->read_decided(layer_of(move), h, first, end, scores.data());
    for (int32_t p = first; p < end; ++p) {
      for (const Component c : {Component::kKey, Component::kValue}) {
        const float* x = (c == Component::kKey ? k : v).data() + int64_t{p - first} * dim;
        std::transform(x, x + dim, token.begin(),
                       [](float value) { return float_to_half(saturate_to_half_range(value)); });
        write_raw(layout_, raw_row(move, h), c, p, token.data());
      }
      write_score(layout_, raw_row(move, h), p, scores[p - first]);
    }
  }
}

Status HostPlace::truncate(const LayerMoves& layers) {
  const int32_t slot = layers[0].slot;
  std::vector<SideCounts> counts = counts_of(slot);
  LayerMoves cut;
  for (const LayerMove& move : layers) {
    if (!move.moves_body()) continue;
    cut.push_back(move);
    const std::vector<SideCounts> left = format_->cut_counts(layer_of(move), move.to.body_end);
    std::copy(left.begin(), left.end(), counts.begin() + move.layer * pages_.rows_per_layer);
  }
  int64_t exchanged = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    const int32_t row = pages_.row(slot, 0, static_cast<int32_t>(r));
    exchanged += page_demand(pages_.allocator, row, counts[r], counts[r]).exchanged;
  }
  if (Status s = require_pages(exchanged); !s) return s;
  for (const LayerMove& move : cut) restore(move);
  std::vector<PageCopy> copies(counts.size() * kMaxSides);
  OpReport report;
  if (Status s = run(PageOp::truncate({&slot, 1}, counts.data(), copies.data(), &report)); !s) {
    return s;
  }
  copy_pages(copies);
  for (const LayerMove& move : cut) {
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

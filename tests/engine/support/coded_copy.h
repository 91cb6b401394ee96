// SPDX-License-Identifier: Apache-2.0
// A copy of what a store in host memory holds, as a device would hold it, and the calls of the rows
// of a device over it.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "store/rows/coded/device_coded_rows.cuh"
#include "tests/engine/support/feed.h"

namespace tierkv::store::test {

// A copy of what a store in host memory holds, as a device would hold it.
class Copy {
 public:
  Copy(const StoreConfig& config, const RowFormat& format, HostPlace* place)
      : layout_(*store_layout(config, format)), place_(place) {
    slots_.resize(static_cast<size_t>(layout_.slot_bytes) * config.max_sequences / 16 + 1);
    pages_.resize(static_cast<size_t>(layout_.page_bytes) * layout_.allocator.num_pages / 16);
    tables_.resize(allocator_bytes(layout_.allocator).total / 256 + 1);
    view_.pages.allocator = *make_page_allocator(layout_.allocator, tables_.data(),
                                                 tables_.size() * sizeof(tables_[0]));
    view_.pages.base = reinterpret_cast<uint8_t*>(pages_.data());
    view_.pages.page_bytes = layout_.page_bytes;
    view_.pages.rows_per_layer = format.sizes().rows_per_layer;
    view_.slots = {reinterpret_cast<uint8_t*>(slots_.data()), layout_.slot_bytes,
                   layout_.layer_bytes, layout_.raw_bytes};
    view_.laws = layout_.laws;
    view_.raw = layout_.raw;
    view_.num_layers = config.layout.num_layers;
    view_.num_kv_heads = config.layout.num_kv_heads;
    view_.head_dim = config.layout.head_dim;
    sync();
  }
  const DeviceStoreView& view() const { return view_; }
  uint8_t* state(int32_t slot, int32_t layer) const { return view_.slots.state(slot, layer); }

  void sync() {
    const uint8_t* slots = place_->layer_of({0, 0, {}, {}}).raw;
    std::memcpy(slots_.data(), slots,
                static_cast<size_t>(layout_.slot_bytes) * layout_.allocator.table.num_sequences);
    const PagesView& from = place_->pages();
    std::memcpy(pages_.data(), from.base, pages_.size() * 16);
    const PageAllocator &a = from.allocator, &b = view_.pages.allocator;
    const AllocatorShape& shape = layout_.allocator;
    const auto copy = [](auto* to, const auto* x, int64_t count) { std::copy_n(x, count, to); };
    const int64_t rows = shape.table.num_rows();
    copy(b.ring.ids, a.ring.ids, shape.num_pages);
    copy(b.ring.cursors, a.ring.cursors, 1);
    copy(b.slots, a.slots, rows * shape.table.row_stride());
    copy(b.tokens, a.tokens, rows);
    copy(b.pages, a.pages, rows);
    copy(b.references, a.references, shape.num_pages);
    copy(b.drop_marks, a.drop_marks, shape.num_pages);
    copy(b.sequences, a.sequences, shape.table.num_sequences);
    copy(b.state, a.state, 1);
  }

  // What a device place does between plan() and write().
  void take_pages(const std::vector<int32_t>& batch, const std::vector<SideCounts>& kept,
                  const std::vector<SideCounts>& target, bool cuts, std::vector<PageCopy>* copies) {
    const PageAllocator& a = view_.pages.allocator;
    const int32_t rows = a.shape.table.rows_per_sequence, units = a.shape.table.tokens_per_page[0];
    const SequenceBatch sequences = {batch.data(), static_cast<int32_t>(batch.size())};
    OpReport report;
    if (cuts) {
      copies->resize(kept.size() * kMaxSides);
      ASSERT_TRUE(
          run_page_op_host(a, PageOp::truncate(sequences, kept.data(), copies->data(), &report)));
      ASSERT_EQ(report.status, StatusCode::kOk);
      for (const PageCopy& copy : *copies) {
        if (copy.source == kNoPage) continue;
        std::memcpy(view_.pages.base + copy.target * layout_.page_bytes,
                    view_.pages.base + copy.source * layout_.page_bytes,
                    static_cast<size_t>(layout_.page_bytes));
      }
    }
    for (bool more = true; more;) {
      more = false;
      std::vector<SideCounts> added(target.size());
      for (size_t i = 0; i < target.size(); ++i) {
        const auto row = batch[i / rows] * rows + static_cast<int32_t>(i % rows);
        const int64_t room = (int64_t{a.pages[row].of[0]} + 1) * units;
        const int64_t next = std::min<int64_t>(target[i].of[0], room);
        added[i].of[0] = static_cast<int32_t>(next - a.tokens[row].of[0]);
        more |= added[i].of[0] != 0;
      }
      if (!more) break;
      ASSERT_TRUE(run_page_op_host(a, PageOp::append(sequences, added.data(), &report)));
      ASSERT_EQ(report.status, StatusCode::kOk);
    }
  }

 private:
  StoreLayout layout_;
  HostPlace* place_;
  DeviceStoreView view_;
  struct alignas(256) Piece {
    uint8_t bytes[256];
  };
  std::vector<uint4> slots_, pages_;
  std::vector<Piece> tables_;
};

// The call of a device place that a call of CodedRows is.
struct Call {
  std::vector<int32_t> batch;
  std::vector<LayerTokens> from, to;
  std::vector<LayerMove> moves;
  std::vector<uint16_t> k, v;
  std::vector<float> significance;
  std::vector<SideCounts> kept, target;
  DeviceWorks works;

  Call(const StoreConfig& config, const std::vector<BodyWork>& list, const PageAllocator& a) {
    int32_t first = INT32_MAX, last = 0, chunk = 0;
    for (const BodyWork& work : list) {
      const int32_t slot = work.layer.slot;
      if (std::count(batch.begin(), batch.end(), slot) == 0) batch.push_back(slot);
      first = std::min(first, work.layer.layer), last = std::max(last, work.layer.layer);
      chunk = std::max(chunk, work.body_end - work.layer.at.tokens);
      works.most_leaving = std::max(works.most_leaving, work.body_end - work.layer.at.body_end);
    }
    works.count = static_cast<int32_t>(batch.size());
    works.first_layer = first, works.num_layers = last - first + 1;
    from.resize(works.entries()), to.resize(works.entries()), moves.resize(works.entries());
    const int32_t heads = config.layout.num_kv_heads, dim = config.layout.head_dim;
    if (chunk > 0) {
      works.chunk.tokens = static_cast<int32_t>(works.chunk.stride = chunk);
      k.resize(static_cast<size_t>(works.count) * chunk * heads * dim), v = k;
      significance.resize(static_cast<size_t>(works.count) * heads * chunk);
    }
    for (int32_t e = 0; e < works.entries(); ++e) {
      moves[e].slot = batch[e / works.num_layers];
      moves[e].layer = first + e % works.num_layers;
    }
    bool known = false;
    for (const BodyWork& work : list) {
      const auto i = std::find(batch.begin(), batch.end(), work.layer.slot) - batch.begin();
      const auto e = i * works.num_layers + work.layer.layer - first;
      from[e] = work.layer.at;
      to[e] = {std::max(work.body_end, work.layer.at.tokens), work.body_end};
      moves[e].from = from[e], moves[e].to = to[e];
      for (int32_t p = from[e].tokens; p < work.body_end; ++p) {
        const int64_t t = p - from[e].tokens;
        for (int32_t h = 0; h < heads; ++h) {
          const int64_t at = ((i * chunk + t) * heads + h) * dim;
          if (p < config.sink_tokens) continue;
          std::vector<float> x(dim);
          work.tokens[h].read(Component::kKey, p, 1, x.data());
          std::transform(x.begin(), x.end(), k.begin() + at, float_to_half);
          work.tokens[h].read(Component::kValue, p, 1, x.data());
          std::transform(x.begin(), x.end(), v.begin() + at, float_to_half);
          const Importance importance = work.tokens[h].importance(p);
          significance[(i * heads + h) * chunk + t] = importance.value;
          known |= importance.kind != ImportanceKind::kUnknown;
        }
      }
    }
    works.slots = batch.data(), works.from = from.data(), works.to = to.data();
    works.moves = moves.data();
    works.chunk.dtype = config.layout.dtype;
    // fp16 that were bfloat16 are again without a loss.
    for (std::vector<uint16_t>* x : {&k, &v}) {
      if (works.chunk.dtype == DType::kFloat16) break;
      for (uint16_t& bits : *x) bits = float_to_bfloat16(half_to_float(bits));
    }
    if (chunk > 0) works.chunk.k = k.data(), works.chunk.v = v.data();
    if (known) works.chunk.significance = significance.data();
    for (const int32_t slot : batch) {
      const int32_t rows = a.shape.table.rows_per_sequence;
      const SideCounts* of = a.tokens + int64_t{slot} * rows;
      kept.insert(kept.end(), of, of + rows);
    }
    target = kept;
  }
};

}  // namespace tierkv::store::test

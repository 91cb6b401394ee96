// SPDX-License-Identifier: Apache-2.0
// Memory laid out as a store has it on a device, beside a store in host memory: what belongs to the
// place (raw rows, tables) is taken from the host, what belongs to a format its kernels write.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "store/place/host_place.h"
#include "store/rows/device_row_format.h"

namespace tierkv::store::test {

// Memory that the test and the format under test see, until the object goes.
class TwinMemory {
 public:
  virtual ~TwinMemory() = default;
  virtual void* take(size_t bytes) = 0;  // aligned to kPageAlignment, zeros
  virtual void wait() {}                 // for the format's work
};
class HostTwinMemory final : public TwinMemory {
 public:
  void* take(size_t bytes) override {
    taken_.emplace_back(bytes / sizeof(Line) + 1);
    return taken_.back().data();
  }

 private:
  struct alignas(kPageAlignment) Line {
    uint8_t bytes[kPageAlignment] = {};
  };
  std::vector<std::vector<Line>> taken_;
};

// An array there.
template <class T>
class TwinArray {
 public:
  explicit TwinArray(TwinMemory* memory) : memory_(memory) {}
  T* assign(const std::vector<T>& from) {
    reserve(from.size());
    std::copy(from.begin(), from.end(), data_);
    return data_;
  }
  T* reserve(size_t count) {
    if (count > capacity_) {
      capacity_ = 2 * count;
      data_ = static_cast<T*>(memory_->take(capacity_ * sizeof(T)));
    }
    return data_;
  }
  T* data() const { return data_; }
  std::vector<T> read(size_t count) const { return {data_, data_ + count}; }

 private:
  TwinMemory* memory_;
  T* data_ = nullptr;
  size_t capacity_ = 0;
};

class DeviceTwin {
 public:
  DeviceTwin(const StoreConfig& config, HostPlace* host, TwinMemory* memory)
      : config_(config), host_(host) {
    const PagesView& pages = host->pages();
    const HostLayer first = host->layer_of({0, 0, {}, {}});
    DeviceSlots& slots = view_.slots;
    slots.raw_bytes = first.state - first.raw;
    slots.layer_bytes = host->layer_of({0, 1, {}, {}}).raw - first.raw;
    slots.slot_bytes = host->layer_of({1, 0, {}, {}}).raw - first.raw;
    slots.base = static_cast<uint8_t*>(memory->take(slots.slot_bytes * config.max_sequences));
    const int64_t page_memory = pages.page_bytes * pages.allocator.shape.num_pages;
    view_.pages = {pages.allocator, static_cast<uint8_t*>(memory->take(page_memory)),
                   pages.page_bytes, pages.rows_per_layer};
    std::memset(view_.pages.base, 0xe7, page_memory);
    const size_t rows = pages.allocator.shape.table.num_rows();
    PageAllocator& a = view_.pages.allocator;
    a.slots = static_cast<int32_t*>(memory->take(4 * table_slots()));
    a.tokens = static_cast<SideCounts*>(memory->take(sizeof(SideCounts) * rows));
    a.pages = static_cast<SideCounts*>(memory->take(sizeof(SideCounts) * rows));
    view_.laws = host->laws();
    view_.raw = RawLayout(host->laws(), config.layout.head_dim);
    view_.num_layers = config.layout.num_layers;
    view_.num_kv_heads = config.layout.num_kv_heads;
    view_.head_dim = config.layout.head_dim;
    take_tables();
  }

  const DeviceStoreView& view() const { return view_; }
  const TokenLaws& laws() const { return view_.laws; }

  // The raw rows as they are on the host.
  void take_raw() {
    for (int32_t s = 0; s < config_.max_sequences; ++s) {
      for (int32_t l = 0; l < config_.layout.num_layers; ++l) {
        std::memcpy(view_.slots.raw(s, l), host_->layer_of({s, l, {}, {}}).raw,
                    view_.slots.raw_bytes);
      }
    }
  }
  // The page tables, after a page operation. Pages that were exchanged are copied.
  void take_tables() {
    const PagesView& host = host_->pages();
    const PageAllocator &a = host.allocator, &mine = view_.pages.allocator;
    for (int32_t row = 0; row < a.shape.table.num_rows(); ++row) {
      for (int32_t side = 0; side < a.shape.table.num_sides; ++side) {
        for (int32_t p = 0; p < least(mine.pages[row].of[side], a.pages[row].of[side]); ++p) {
          copy_page(page_at(mine, row, side, p), host.page(row, side, p));
        }
      }
    }
    std::copy_n(a.slots, table_slots(), mine.slots);
    std::copy_n(a.tokens, a.shape.table.num_rows(), mine.tokens);
    std::copy_n(a.pages, a.shape.table.num_rows(), mine.pages);
  }
  // After a fork in host memory.
  void fork(int32_t from, int32_t to) {
    const PagesView& host = host_->pages();
    const int32_t rows = host.allocator.shape.table.rows_per_sequence;
    take_tables();
    for (int32_t r = 0; r < rows; ++r) {
      for (int32_t side = 0; side < host.allocator.shape.table.num_sides; ++side) {
        for (int32_t p = 0; p < host.allocator.pages[to * rows + r].of[side]; ++p) {
          copy_page(host.page(from * rows + r, side, p), host.page(to * rows + r, side, p));
        }
      }
    }
    std::memcpy(view_.slots.raw(to, 0), view_.slots.raw(from, 0), view_.slots.slot_bytes);
  }
  // What the rows of these sequences hold, as a call's counts lie.
  std::vector<SideCounts> counts_of(const std::vector<int32_t>& slots) const {
    const int32_t rows = view_.pages.allocator.shape.table.rows_per_sequence;
    std::vector<SideCounts> counts;
    for (const int32_t s : slots) {
      const SideCounts* first = view_.pages.allocator.tokens + int64_t{s} * rows;
      counts.insert(counts.end(), first, first + rows);
    }
    return counts;
  }
  int64_t pages_in_use() const {
    const RingCursors& cursors = *host_->pages().allocator.ring.cursors;
    return host_->pages().allocator.shape.num_pages - (cursors.end - cursors.start);
  }

  void compare_state(int32_t slot, int32_t layer) const {
    const uint8_t* host = host_->layer_of({slot, layer, {}, {}}).state;
    const uint8_t* device = view_.slots.state(slot, layer);
    for (int64_t i = 0; i < view_.slots.layer_bytes - view_.slots.raw_bytes; ++i) {
      ASSERT_EQ(int{device[i]}, int{host[i]})
          << "byte " << i << " of the state of slot " << slot << ", layer " << layer;
    }
  }
  // Keys, values and scores of positions of the rings.
  void compare_raw(int32_t slot, int32_t layer, Positions range) const {
    const uint8_t* host = host_->layer_of({slot, layer, {}, {}}).raw;
    const uint8_t* device = view_.slots.raw(slot, layer);
    for (int32_t h = 0; h < view_.num_kv_heads; ++h) {
      for (int32_t p = range.first; p < range.end; ++p) {
        const int64_t row = int64_t{h} * view_.raw.row_bytes;
        const auto same = [&](int32_t byte, int32_t bytes) {
          return std::memcmp(host + row + byte, device + row + byte, bytes) == 0;
        };
        ASSERT_TRUE(same(view_.raw.score_byte(p), sizeof(RawScore))) << "score " << p;
        const int32_t bytes = 2 * view_.head_dim;
        ASSERT_TRUE(same(view_.raw.token_byte(Component::kKey, p), bytes)) << "key " << p;
        ASSERT_TRUE(same(view_.raw.token_byte(Component::kValue, p), bytes)) << "value " << p;
      }
    }
  }
  // The first bytes(side, page) bytes of every page of a table row.
  template <class Bytes>
  void compare_pages(int32_t slot, int32_t layer, int32_t i, const Bytes& bytes) const {
    const PagesView& host = host_->pages();
    const int32_t row = host.row(slot, layer, i);
    for (int32_t side = 0; side < host.allocator.shape.table.num_sides; ++side) {
      for (int32_t p = 0; p < host.allocator.pages[row].of[side]; ++p) {
        const int32_t id = host.page(row, side, p);
        const uint8_t* a = host.bytes(id);
        const uint8_t* b = view_.pages.base + id * view_.pages.page_bytes;
        const int64_t count = bytes(side, p);
        for (int64_t at = 0; at < count; ++at) {
          ASSERT_EQ(int{b[at]}, int{a[at]})
              << "byte " << at << " of page " << p << ", side " << side << ", slot " << slot
              << ", layer " << layer << ", row " << i;
        }
      }
    }
  }

 private:
  size_t table_slots() const {
    const PageTableShape& table = host_->pages().allocator.shape.table;
    return size_t{1} * table.num_rows() * table.row_stride();
  }
  void copy_page(int32_t from, int32_t to) {
    if (from == to) return;
    std::memcpy(view_.pages.base + to * view_.pages.page_bytes,
                view_.pages.base + from * view_.pages.page_bytes, view_.pages.page_bytes);
  }

  StoreConfig config_;
  HostPlace* host_;
  DeviceStoreView view_;
};

}  // namespace tierkv::store::test

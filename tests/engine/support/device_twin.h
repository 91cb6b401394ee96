// Memory laid out as a store has it on a device, beside a store in host memory: what belongs to the
// place (raw rows, tables) is taken from the host, what belongs to a format its kernels write.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "store/place/host_place.h"
#include "store/rows/device_row_format.h"

namespace tierkv::store::test {

class DeviceTwin {
 public:
  DeviceTwin(const StoreConfig& config, HostPlace* host) : config_(config), host_(host) {
    const HostPagesView& pages = host->pages();
    const HostLayer first = host->layer_of({0, 0, {}, {}});
    DeviceSlots& slots = view_.slots;
    slots.raw_bytes = first.state - first.raw;
    slots.layer_bytes = host->layer_of({0, 1, {}, {}}).raw - first.raw;
    slots.slot_bytes = slots.layer_bytes * config.layout.num_layers;
    if (config.max_sequences > 1) slots.slot_bytes = host->layer_of({1, 0, {}, {}}).raw - first.raw;
    slot_memory_.resize(slots.slot_bytes * config.max_sequences / sizeof(Line));
    slots.base = reinterpret_cast<uint8_t*>(slot_memory_.data());
    page_memory_.resize(pages.page_bytes * pages.allocator.shape.num_pages / sizeof(Line));
    for (Line& line : page_memory_) std::memset(line.bytes, 0xe7, sizeof(line.bytes));
    view_.pages = {pages.allocator, reinterpret_cast<uint8_t*>(page_memory_.data()),
                   pages.page_bytes, pages.rows_per_layer};
    const PageTableShape& table = pages.allocator.shape.table;
    table_slots_.resize(size_t{1} * table.num_rows() * table.row_stride());
    tokens_.resize(table.num_rows());
    pages_.resize(table.num_rows());
    view_.pages.allocator.slots = table_slots_.data();
    view_.pages.allocator.tokens = tokens_.data();
    view_.laws = host->laws();
    view_.raw = host->raw_rows().layout;
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
    const HostPagesView& host = host_->pages();
    const PageAllocator& a = host.allocator;
    for (int32_t row = 0; row < a.shape.table.num_rows(); ++row) {
      for (int32_t side = 0; side < a.shape.table.num_sides; ++side) {
        for (int32_t p = 0; p < least(pages_[row].of[side], a.pages[row].of[side]); ++p) {
          copy_page(page_at(view_.pages.allocator, row, side, p), host.page(row, side, p));
        }
      }
    }
    std::copy_n(a.slots, table_slots_.size(), table_slots_.begin());
    std::copy_n(a.tokens, tokens_.size(), tokens_.begin());
    std::copy_n(a.pages, pages_.size(), pages_.begin());
  }
  // After a fork in host memory.
  void fork(int32_t from, int32_t to) {
    const HostPagesView& host = host_->pages();
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
  void open(int32_t slot) { std::memset(view_.slots.raw(slot, 0), 0, view_.slots.slot_bytes); }
  // What the rows of these sequences hold, as a call's counts lie.
  std::vector<SideCounts> counts_of(const std::vector<int32_t>& slots) const {
    const int32_t rows = view_.pages.allocator.shape.table.rows_per_sequence;
    std::vector<SideCounts> counts;
    for (const int32_t s : slots) {
      counts.insert(counts.end(), tokens_.begin() + s * rows, tokens_.begin() + (s + 1) * rows);
    }
    return counts;
  }

  void compare_state(int32_t slot, int32_t layer) const {
    const uint8_t* host = host_->layer_of({slot, layer, {}, {}}).state;
    const uint8_t* device = view_.slots.state(slot, layer);
    for (int64_t i = 0; i < view_.slots.layer_bytes - view_.slots.raw_bytes; ++i) {
      ASSERT_EQ(int{device[i]}, int{host[i]})
          << "byte " << i << " of the state of slot " << slot << ", layer " << layer;
    }
  }
  // The first bytes of every page of a table row, by side.
  void compare_pages(int32_t slot, int32_t layer, int32_t i, std::vector<int32_t> bytes) const {
    const HostPagesView& host = host_->pages();
    const int32_t row = host.row(slot, layer, i);
    for (size_t side = 0; side < bytes.size(); ++side) {
      for (int32_t p = 0; p < host.allocator.pages[row].of[side]; ++p) {
        const int32_t id = host.page(row, static_cast<int32_t>(side), p);
        const uint8_t* a = host.bytes(id);
        const uint8_t* b = view_.pages.base + id * view_.pages.page_bytes;
        for (int32_t at = 0; at < bytes[side]; ++at) {
          ASSERT_EQ(int{b[at]}, int{a[at]})
              << "byte " << at << " of page " << p << ", side " << side << ", slot " << slot
              << ", layer " << layer << ", row " << i;
        }
      }
    }
  }

 private:
  struct alignas(kPageAlignment) Line {
    uint8_t bytes[kPageAlignment] = {};
  };
  void copy_page(int32_t from, int32_t to) {
    if (from == to) return;
    std::memcpy(view_.pages.base + to * view_.pages.page_bytes,
                view_.pages.base + from * view_.pages.page_bytes, view_.pages.page_bytes);
  }

  StoreConfig config_;
  HostPlace* host_;
  DeviceStoreView view_;
  std::vector<Line> slot_memory_, page_memory_;
  std::vector<int32_t> table_slots_;
  std::vector<SideCounts> tokens_, pages_;
};

}  // namespace tierkv::store::test

// SPDX-License-Identifier: Apache-2.0
// What a place in device memory tells of itself through host memory: usage, export and import.
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda_device.cuh"
#include "store/place/device/device_kernels.h"
#include "store/place/device/device_place.h"

namespace tierkv::store {

Status DevicePlace::add_usage(const LayerMoves& layers, StoreUsage* usage) const {
  const PageAllocator& a = view_.pages.allocator;
  RingCursors cursors = {};
  int64_t least_free = 0;
  std::vector<PageRecord> records(static_cast<size_t>(a.shape.num_pages));
  if (Status s = copy(&cursors, a.ring.cursors, sizeof(cursors)); !s) return s;
  if (Status s = copy(&least_free, least_free_, sizeof(least_free)); !s) return s;
  const auto bytes = static_cast<int64_t>(records.size() * sizeof(PageRecord));
  if (Status s = copy(records.data(), a.records, bytes); !s) return s;
  if (Status s = wait(); !s) return s;
  usage->pages = a.shape.num_pages;
  usage->pages_free = cursors.end - cursors.start;
  usage->most_pages = a.shape.num_pages - least_free;
  usage->page_bytes = layout_.page_bytes;
  usage->slot_bytes = layout_.slot_bytes;
  for (const PageRecord& record : records) usage->pages_shared += record.reference_count > 1;
  return add_nominal(layers, usage);
}

// From the states of the open sequences, which the format in host memory reads.
Status DevicePlace::add_nominal(const LayerMoves& layers, StoreUsage* usage) const {
  const auto bytes = static_cast<size_t>(layout_.layer_bytes - layout_.raw_bytes);
  const auto num_layers = static_cast<size_t>(config_.layout.num_layers);
  std::vector<uint8_t> states(bytes * num_layers);
  for (size_t i = 0; i < layers.size(); ++i) {
    const size_t layer = i % num_layers;
    if (layer == 0) {
      const cudaError_t error = cudaMemcpy2DAsync(
          states.data(), bytes, view_.slots.state(layers[i].slot, 0),
          static_cast<size_t>(layout_.layer_bytes), bytes, num_layers, cudaMemcpyDefault, stream_);
      if (Status s = cuda_status(error, "usage"); !s) return s;
      if (Status s = wait(); !s) return s;
    }
    uint8_t* state = states.data() + layer * bytes;
    usage->nominal_bytes += host_format_->nominal_bytes(
        {layers[i].slot, layers[i].layer, layers[i].from, nullptr, state});
  }
  return Status::ok();
}

Result<int64_t> DevicePlace::pages_of(int32_t slot) const {
  std::vector<SideCounts> pages(static_cast<size_t>(rows_per_sequence()));
  const SideCounts* from = view_.pages.allocator.pages + int64_t{slot} * rows_per_sequence();
  const auto bytes = static_cast<int64_t>(pages.size() * sizeof(SideCounts));
  if (Status s = copy(pages.data(), from, bytes); !s) return s;
  if (Status s = wait(); !s) return s;
  int64_t sum = 0;
  for (const SideCounts& row : pages) sum = std::accumulate(row.of, row.of + kMaxSides, sum);
  return sum;
}

namespace {

// Pinned, so that copies reach the speed of the link.
Result<HostPlace::Memory> pinned_memory(int64_t bytes) {
  void* at = nullptr;
  const cudaError_t error = cudaHostAlloc(&at, static_cast<size_t>(bytes), cudaHostAllocMapped);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Status(StatusCode::kOutOfMemory,
                  "no pinned host memory of " + std::to_string(bytes) + " bytes");
  }
  return HostPlace::Memory(at, [](void* memory) { (void)cudaFreeHost(memory); });
}

}  // namespace

Status DevicePlace::open_mirror() {
  if (mirror_ == nullptr) {
    Result<std::unique_ptr<RowFormat>> format = make_row_format(config_);
    if (!format) return format.status();
    const Result<HostPlace::Memory> slot = pinned_memory(layout_.slot_bytes);
    if (!slot) return slot.status();
    Result<std::unique_ptr<HostPlace>> mirror =
        HostPlace::make_mirror(config_, layout_, std::move(*format), *slot);
    if (!mirror) return mirror.status();
    mirror_ = std::move(*mirror);
  }
  mirror_->clear();
  return format_->download_shared(mirror_->format());
}

// Table rows of a slot, to the mirror.
Status DevicePlace::copy_tables(int32_t slot) const {
  const PageAllocator &a = view_.pages.allocator, &to = mirror_->pages().allocator;
  const int64_t rows = rows_per_sequence(), first = slot * rows;
  const int64_t line = a.shape.table.row_stride();
  if (Status s = copy(to.tokens, a.tokens + first, rows * int64_t{sizeof(SideCounts)}); !s) {
    return s;
  }
  if (Status s = copy(to.pages, a.pages + first, rows * int64_t{sizeof(SideCounts)}); !s) return s;
  return copy(to.slots, a.slots + first * line, rows * line * int64_t{sizeof(int32_t)});
}

// Pages that lie one behind the other are copied at once, so the mirror has them by id.
Status DevicePlace::place_pages(std::vector<Positions>* runs) {
  const PageAllocator& a = mirror_->pages().allocator;
  std::vector<int32_t> pages;
  for (int32_t row = 0; row < a.shape.table.rows_per_sequence; ++row) {
    for (int32_t side = 0; side < a.shape.table.num_sides; ++side) {
      for (int32_t i = 0; i < a.pages[row].of[side]; ++i) {
        pages.push_back(page_at(a, row, side, i));
      }
    }
  }
  std::sort(pages.begin(), pages.end());
  for (const int32_t page : pages) {
    if (runs->empty() || runs->back().end != page) runs->push_back({page, page});
    ++runs->back().end;
  }
  const int64_t bytes = static_cast<int64_t>(pages.size()) * layout_.page_bytes;
  if (bytes > mirror_bytes_) {
    constexpr int64_t kStep = int64_t{32} << 20;
    mirror_->place_pages({}, nullptr);
    mirror_pages_ = nullptr;
    mirror_bytes_ = 0;
    const Result<HostPlace::Memory> memory = pinned_memory(round_up(bytes, kStep));
    if (!memory) return memory.status();
    mirror_pages_ = *memory;
    mirror_bytes_ = round_up(bytes, kStep);
  }
  mirror_->place_pages(pages, mirror_pages_);
  return Status::ok();
}

Result<SequenceSource> DevicePlace::export_parts(const LayerMoves& layers) {
  if (Status s = enter("export_sequence", false); !s) return s;
  if (Status s = open_mirror(); !s) return s;
  const int32_t slot = layers[0].slot;
  if (Status s = copy_tables(slot); !s) return s;
  if (Status s = copy(mirror_->slot_memory(), view_.slots.raw(slot, 0), layout_.slot_bytes); !s) {
    return s;
  }
  if (Status s = wait(); !s) return s;
  std::vector<Positions> runs;
  if (Status s = place_pages(&runs); !s) return s;
  for (const Positions& run : runs) {
    const uint8_t* from = view_.pages.base + run.first * layout_.page_bytes;
    Status s = copy(mirror_->pages().bytes(run.first), from, run.count() * layout_.page_bytes);
    if (!s) return s;
  }
  if (Status s = wait(); !s) return s;
  LayerMoves moves = layers;
  for (LayerMove& move : moves) move.slot = 0;
  return mirror_->export_parts(moves);
}

Status DevicePlace::import_parts(int32_t slot, const SequenceParts& parts) {
  if (Status s = open(slot); !s) return s;
  Status s = import_opened(slot, parts);
  if (!s) {
    mirror_ = nullptr;
    (void)release(slot);
  }
  return s;
}

Status DevicePlace::import_opened(int32_t slot, const SequenceParts& parts) {
  if (Status s = open_mirror(); !s) return s;
  std::vector<Positions> runs;
  const Status s = mirror_->import_parts(
      0, parts, [&](const std::vector<HostLayer>&, const std::vector<LayerPlan>& plans) {
        if (Status taken = take_pages(slot, plans); !taken) return taken;
        if (Status copied = copy_tables(slot); !copied) return copied;
        if (Status waited = wait(); !waited) return waited;
        return place_pages(&runs);
      });
  return s ? copy_up(slot, parts, runs) : s;
}

// For all layers of an empty slot.
Status DevicePlace::take_pages(int32_t slot, const std::vector<LayerPlan>& plans) {
  const PageTableShape& table = layout_.allocator.table;
  std::vector<SideCounts> counts;
  int64_t needed = 0;
  for (const LayerPlan& plan : plans) {
    for (const SideCounts& row : plan.tokens) {
      counts.push_back(row);
      int32_t pages[kMaxTables] = {};
      for (int32_t side = 0; side < table.num_sides; ++side) {
        pages[side / 2] += pages_for(row.of[side], table.tokens_per_page[side]);
      }
      if (pages[0] > table.table_slots[0] || pages[1] > table.table_slots[1]) {
        return Status(StatusCode::kOutOfRange, "the sequence takes more pages than its table has");
      }
      needed += pages[0] + pages[1];
    }
  }
  const Result<bool> fits = has_pages(needed);
  if (!fits) return fits.status();
  if (!*fits) return refuse_pages(needed);
  const auto bytes = static_cast<int64_t>(counts.size() * sizeof(SideCounts));
  if (Status s = copy(target_, counts.data(), bytes); !s) return s;
  if (Status s = launch_ids({slot}, op_slots_, stream_); !s) return s;
  if (Status s = run(PageOp::grow({op_slots_, 1}, target_, report_), needed); !s) return s;
  return commit(nullptr, true);
}

Status DevicePlace::copy_up(int32_t slot, const SequenceParts& parts,
                            const std::vector<Positions>& runs) {
  for (const Positions& run : runs) {
    uint8_t* to = view_.pages.base + run.first * layout_.page_bytes;
    Status s = copy(to, mirror_->pages().bytes(run.first), run.count() * layout_.page_bytes);
    if (!s) return s;
  }
  if (Status s = copy(view_.slots.raw(slot, 0), mirror_->slot_memory(), layout_.slot_bytes); !s) {
    return s;
  }
  const int64_t num_layers = config_.layout.num_layers;
  Status s = copy(counts_ + slot * num_layers, parts.layers.data(),
                  num_layers * int64_t{sizeof(LayerTokens)});
  if (!s) return s;
  std::vector<HostLayer> layers;
  for (int32_t l = 0; l < num_layers; ++l) {
    layers.push_back(mirror_->layer_of({0, l, parts.layers[l], {}}));
    layers[l].slot = slot;
  }
  if (s = format_->upload_shared(*mirror_->format(), layers); !s) return s;
  return wait();
}

}  // namespace tierkv::store

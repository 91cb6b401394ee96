// SPDX-License-Identifier: Apache-2.0
// What a place in device memory tells of itself through host memory: usage, export and import.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "store/place/device/count_kernels.cuh"
#include "store/place/device/device_place.h"

namespace tierkv::store {

Status launch_staged_layer(const PagesView& pages, const StagedLayer& call, GpuStream stream) {
  constexpr int32_t kLeastCtas = 64, kMostCtas = 1024;
  const int32_t ctas = std::clamp(call.count, kLeastCtas, kMostCtas);
  return launch_after_previous(staged_layer_kernel, static_cast<uint32_t>(ctas), kStagedThreads, 0,
                               stream, pages, call);
}

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

cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

// Runs on another thread what calls CUDA there: it uses the device of the thread that made this.
class OnDevice {
 public:
  OnDevice() : error_(cudaGetDevice(&device_)) {}
  template <class Call>
  Status operator()(const Call& call) const {
    const cudaError_t error = error_ == cudaSuccess ? cudaSetDevice(device_) : error_;
    Status s = cuda_status(error, "device");
    return s ? call() : s;
  }

 private:
  int device_ = 0;
  cudaError_t error_;
};

}  // namespace

Status DevicePlace::open_mirror() {
  // An export that was given up may still be on its way there.
  if (Status s = wait(); !s) return s;
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
  while (arrived_.size() < static_cast<size_t>(config_.layout.num_layers)) {
    cudaEvent_t event = nullptr;
    const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (Status s = cuda_status(error, "event"); !s) return s;
    arrived_.emplace_back(event, [](void* e) { (void)cudaEventDestroy(event_of(e)); });
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

Status DevicePlace::place_pages() {
  const PageAllocator& a = mirror_->pages().allocator;
  const PageTableShape& table = a.shape.table;
  std::vector<int32_t> pages;
  layer_pages_.assign(config_.layout.num_layers, {});
  for (int32_t row = 0; row < table.rows_per_sequence; ++row) {
    Positions& of_layer = layer_pages_[row / view_.pages.rows_per_layer];
    if (row % view_.pages.rows_per_layer == 0) of_layer.first = static_cast<int32_t>(pages.size());
    for (int32_t side = 0; side < table.num_sides; ++side) {
      for (int32_t i = 0; i < a.pages[row].of[side]; ++i) {
        pages.push_back(page_at(a, row, side, i));
      }
    }
    of_layer.end = static_cast<int32_t>(pages.size());
  }
  const auto count = static_cast<int64_t>(pages.size());
  const int64_t bytes = count * (layout_.page_bytes + int64_t{sizeof(int32_t)});
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
  if (count > 0) {
    auto* const memory = static_cast<uint8_t*>(mirror_pages_.get());
    std::memcpy(memory + count * layout_.page_bytes, pages.data(), pages.size() * sizeof(int32_t));
  }
  mirror_->place_pages(pages, mirror_pages_);
  return Status::ok();
}

Status DevicePlace::move_layer(int32_t slot, int32_t layer, int64_t slot_bytes, bool comes) const {
  const Positions of = layer_pages_[layer];
  auto* const memory = static_cast<uint8_t*>(mirror_pages_.get());
  StagedLayer call;
  if (of.count() > 0) {
    const int64_t ids = int64_t{layer_pages_.back().end} * layout_.page_bytes;
    call.ids = reinterpret_cast<const int32_t*>(memory + ids) + of.first;
    call.staged = memory + of.first * layout_.page_bytes;
    call.count = of.count();
  }
  call.slot = view_.slots.raw(slot, layer);
  call.staged_slot = mirror_->layer_of({0, layer, {}, {}}).raw;
  call.slot_bytes = slot_bytes;
  call.comes = comes;
  return launch_staged_layer(view_.pages, call, stream_);
}

// States come first, for they say what there is. The threads that write a layer's rows wait for
// that layer, while the link carries the next ones.
Result<SequenceSource> DevicePlace::export_parts(const LayerMoves& layers) {
  if (Status s = enter("export_sequence", false); !s) return s;
  if (Status s = open_mirror(); !s) return s;
  const int32_t slot = layers[0].slot, num_layers = config_.layout.num_layers;
  if (Status s = copy_tables(slot); !s) return s;
  const auto pitch = static_cast<size_t>(layout_.layer_bytes);
  const cudaError_t error = cudaMemcpy2DAsync(
      mirror_->slot_memory() + layout_.raw_bytes, pitch, view_.slots.state(slot, 0), pitch,
      pitch - static_cast<size_t>(layout_.raw_bytes), num_layers, cudaMemcpyDefault, stream_);
  if (Status s = cuda_status(error, "export_sequence"); !s) return s;
  if (Status s = wait(); !s) return s;
  if (Status s = place_pages(); !s) return s;
  for (int32_t l = 0; l < num_layers; ++l) {
    if (Status s = move_layer(slot, l, layout_.raw_bytes, false); !s) return s;
    const cudaError_t recorded = cudaEventRecord(event_of(arrived_[l].get()), stream_);
    if (Status s = cuda_status(recorded, "export_sequence"); !s) return s;
  }
  LayerMoves moves = layers;
  for (LayerMove& move : moves) move.slot = 0;
  Result<SequenceSource> source = mirror_->export_parts(moves);
  if (!source) return source.status();
  const int32_t heads = config_.layout.num_kv_heads;
  auto there = std::make_shared<std::atomic<int64_t>>(0);  // so many layers, at least
  source->write = [this, heads, there, on_device = OnDevice(), write = std::move(source->write)](
                      int64_t row, uint8_t* raw, uint8_t* body) {
    const int64_t layer = row / heads;
    if (layer >= *there) {
      Status s = on_device([&] {
        return cuda_status(cudaEventSynchronize(event_of(arrived_[layer].get())), "export");
      });
      if (!s) return s;
      *there = layer + 1;
    }
    return write(row, raw, body);
  };
  return source;
}

Status DevicePlace::import_parts(int32_t slot, const SequenceParts& parts) {
  if (Status s = open(slot); !s) return s;
  Status s = without_bad_alloc([&] { return import_opened(slot, parts); });
  if (!s) {
    (void)wait();  // layers that went up may still be read there
    mirror_ = nullptr;
    (void)release(slot);
  }
  return s;
}

// Layers go up as they are written. Blocks that the device decodes as they are it looks at itself,
// at the end; where one is damaged the host finds out which, and how.
Status DevicePlace::import_opened(int32_t slot, const SequenceParts& parts) {
  if (Status s = open_mirror(); !s) return s;
  HostPlace::ImportSteps steps;
  steps.decodes_later = true;
  steps.take = [&](const std::vector<HostLayer>&, const std::vector<LayerPlan>& plans) {
    if (Status s = take_pages(slot, plans); !s) return s;
    if (Status s = copy_tables(slot); !s) return s;
    if (Status s = wait(); !s) return s;
    return place_pages();
  };
  steps.written = [&, on_device = OnDevice()](int32_t layer) {
    return on_device([&] { return move_layer(slot, layer, layout_.layer_bytes, true); });
  };
  if (Status s = mirror_->import_parts(0, parts, steps); !s) return s;
  const Status finished = finish_import(slot, parts);
  if (finished.code() != StatusCode::kCorrupt) return finished;
  if (Status s = open_mirror(); !s) return s;
  steps.decodes_later = false;
  steps.take = [&](const auto&, const auto&) { return finished; };
  return mirror_->import_parts(0, parts, steps);
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

Status DevicePlace::finish_import(int32_t slot, const SequenceParts& parts) {
  const int64_t num_layers = config_.layout.num_layers;
  LayerTokens* const counts = counts_ + slot * num_layers;
  Status s = copy(counts, parts.layers.data(), num_layers * int64_t{sizeof(LayerTokens)});
  if (!s) return s;
  std::vector<HostLayer> layers;
  for (int32_t l = 0; l < num_layers; ++l) {
    layers.push_back(mirror_->layer_of({0, l, parts.layers[l], {}}));
    layers[l].slot = slot;
  }
  if (s = format_->check_imported(layers, counts); !s) return s;
  if (s = format_->upload_shared(*mirror_->format(), layers); !s) return s;
  return wait();
}

}  // namespace tierkv::store

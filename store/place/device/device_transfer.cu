// SPDX-License-Identifier: Apache-2.0
// What a place in device memory tells of itself through host memory: usage, export and import.
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "codec/file/container_format.h"
#include "codec/host/parallel.h"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "store/place/device/count_kernels.cuh"
#include "store/place/device/device_place.h"

namespace tierkv::store {

Status DevicePlace::add_usage(const LayerMoves& layers, StoreUsage* usage) const {
  if (const auto capture = capture_of("usage", false); !capture) return capture.status();
  const PageAllocator& a = view_.pages.allocator;
  RingCursors cursors = {};
  int64_t least_free = 0;
  std::vector<int32_t> references(static_cast<size_t>(a.shape.num_pages));
  if (Status s = copy(&cursors, a.ring.cursors, sizeof(cursors)); !s) return s;
  if (Status s = copy(&least_free, least_free_, sizeof(least_free)); !s) return s;
  const auto bytes = static_cast<int64_t>(references.size() * sizeof(int32_t));
  if (Status s = copy(references.data(), a.references, bytes); !s) return s;
  if (Status s = wait(); !s) return s;
  usage->pages = a.shape.num_pages;
  usage->pages_free = cursors.end - cursors.start;
  usage->most_pages = a.shape.num_pages - least_free;
  usage->page_bytes = layout_.page_bytes;
  usage->slot_bytes = layout_.slot_bytes;
  for (const int32_t count : references) usage->pages_shared += count > 1;
  // The format in host memory reads the states of the open sequences.
  const auto state = static_cast<size_t>(state_bytes());
  const auto num_layers = static_cast<size_t>(config_.layout.num_layers);
  std::vector<uint8_t> states(state * num_layers);
  for (size_t i = 0; i < layers.size(); ++i) {
    const size_t layer = i % num_layers;
    if (layer == 0) {
      if (Status s = copy_states(layers[i].slot, states.data()); !s) return s;
      if (Status s = wait(); !s) return s;
    }
    usage->nominal_bytes += host_format_->nominal_bytes(
        {layers[i].slot, layers[i].layer, layers[i].from, nullptr, states.data() + layer * state});
  }
  return Status::ok();
}

Status DevicePlace::copy_states(int32_t slot, uint8_t* to) const {
  const auto bytes = static_cast<size_t>(state_bytes());
  const cudaError_t error = cudaMemcpy2DAsync(
      to, bytes, view_.slots.state(slot, 0), static_cast<size_t>(layout_.layer_bytes), bytes,
      config_.layout.num_layers, cudaMemcpyDefault, stream_);
  return cuda_status(error, "states");
}

Result<int64_t> DevicePlace::bytes_held(int32_t slot) const {
  if (const auto capture = capture_of("bytes_held", false); !capture) return capture.status();
  std::vector<SideCounts> pages(static_cast<size_t>(rows_per_sequence()));
  const SideCounts* from = view_.pages.allocator.pages + int64_t{slot} * rows_per_sequence();
  const auto bytes = static_cast<int64_t>(pages.size() * sizeof(SideCounts));
  if (Status s = copy(pages.data(), from, bytes); !s) return s;
  if (Status s = wait(); !s) return s;
  int64_t sum = 0;
  for (const SideCounts& row : pages) sum = std::accumulate(row.of, row.of + kMaxSides, sum);
  return sum * layout_.page_bytes + layout_.slot_bytes;
}

namespace {

// Runs call() on any thread, which then uses this device.
template <class Call>
Status on_device(int device, const Call& call) {
  Status s = cuda_status(cudaSetDevice(device), "device");
  return s ? call() : s;
}

int64_t padded_bytes(std::span<const int64_t> parts) {
  int64_t bytes = 0;
  for (const int64_t part : parts) bytes += round_up(part, 16);
  return bytes;
}

}  // namespace

Status DevicePlace::open_mirror() {
  if (link_ == nullptr) {
    Result<std::unique_ptr<SequenceLink>> link = SequenceLink::make(view_, stream_);
    if (!link) return link.status();
    link_ = std::move(*link);
  }
  if (mirror_ == nullptr) {
    Result<std::unique_ptr<RowFormat>> format = make_row_format(config_);
    if (!format) return format.status();
    const int64_t line = layout_.allocator.table.row_stride() * int64_t{sizeof(int32_t)};
    const int64_t tables = rows_per_sequence() * (2 * int64_t{sizeof(SideCounts)} + line);
    const Result<PinnedMemory> slot =
        pinned_memory(state_bytes() * config_.layout.num_layers + tables);
    if (!slot) return slot.status();
    Result<std::unique_ptr<HostPlace>> mirror =
        HostPlace::make_mirror(config_, layout_, std::move(*format), *slot, view_.pages.base);
    if (!mirror) return mirror.status();
    mirror_ = std::move(*mirror);
  }
  if (Status s = mirror_->clear(); !s) return s;
  return format_->download_shared(mirror_->format());
}

// Table rows of a slot, to the mirror, by pinned memory behind its states. Waits.
Status DevicePlace::copy_tables(int32_t slot) const {
  const PageAllocator &a = view_.pages.allocator, &to = mirror_->pages().allocator;
  const int64_t rows = rows_per_sequence(), first = slot * rows;
  const int64_t line = a.shape.table.row_stride(),
                counts_bytes = rows * int64_t{sizeof(SideCounts)};
  auto* const tokens = reinterpret_cast<SideCounts*>(mirror_->slot_memory() +
                                                     state_bytes() * config_.layout.num_layers);
  SideCounts* const pages = tokens + rows;
  auto* const slots = reinterpret_cast<int32_t*>(pages + rows);
  if (Status s = copy(tokens, a.tokens + first, counts_bytes); !s) return s;
  if (Status s = copy(pages, a.pages + first, counts_bytes); !s) return s;
  if (Status s = copy(slots, a.slots + first * line, rows * line * int64_t{sizeof(int32_t)}); !s) {
    return s;
  }
  if (Status s = wait(); !s) return s;
  std::copy_n(tokens, rows, to.tokens);
  std::copy_n(pages, rows, to.pages);
  std::copy_n(slots, rows * line, to.slots);
  return Status::ok();
}

// States come first, for they say what there is.
Result<SequenceSource> DevicePlace::export_parts(const LayerMoves& layers) {
  if (Status s = enter("export_sequence", false); !s) return s;
  if (Status s = open_mirror(); !s) return s;
  if (Status s = copy_states(layers[0].slot, mirror_->slot_memory()); !s) return s;
  if (Status s = copy_tables(layers[0].slot); !s) return s;
  LayerMoves moves = layers;
  for (LayerMove& move : moves) move.slot = 0;
  SequenceSource source = mirror_->describe(moves);
  source.write = [this, slot = layers[0].slot, moves, sizes = source.part_bytes](
                     const std::vector<uint8_t*>& parts, std::vector<uint64_t>* checksums) {
    Status s = without_bad_alloc([&] { return send_layers(slot, moves, sizes, parts); });
    if (!s) (void)link_->finish();
    for (size_t i = 0; s && i < parts.size(); ++i) {
      (*checksums)[i] = checksum_of(static_cast<int64_t>(i), sizes[i], parts[i]);
    }
    return s;
  };
  return source;
}

// Memory that is not pinned gets its bytes from such as is, by several threads.
Status DevicePlace::send_layers(int32_t slot, const LayerMoves& layers,
                                const std::vector<int64_t>& sizes,
                                const std::vector<uint8_t*>& parts) {
  const int32_t heads = config_.layout.num_kv_heads;
  const int64_t bytes = padded_bytes(sizes);
  uint8_t* pinned = parts[0];
  if (!is_pinned(parts[0], bytes)) {
    const Result<uint8_t*> memory = link_->host_memory(bytes);
    if (!memory) return memory.status();
    pinned = *memory;
  }
  if (Status s = link_->begin(sizes, pinned, false, false); !s) return s;
  std::vector<ExportedBody> bodies(heads);
  for (const LayerMove& move : layers) {
    for (int32_t h = 0; h < heads; ++h) {
      bodies[h] = mirror_->format()->export_body(mirror_->layer_of(move), h);
    }
    if (Status s = link_->send(slot, move.from, bodies); !s) return s;
  }
  if (pinned != parts[0]) {
    Status s =
        try_parallel_for(static_cast<int64_t>(parts.size()), threads_for(bytes), [&](int64_t part) {
          const auto layer = static_cast<int32_t>(part / (2 * heads));
          if (Status arrived = on_device(device_, [&] { return link_->wait_for(layer); });
              !arrived) {
            return arrived;
          }
          std::copy_n(pinned + (parts[part] - parts[0]), round_up(sizes[part], 16), parts[part]);
          return Status::ok();
        });
    if (!s) return s;
  }
  return link_->finish();
}

Status DevicePlace::import_parts(int32_t slot, const SequenceParts& parts) {
  if (Status s = enter("import_sequence", false); !s) return s;
  bool is_open = false;
  Status s = without_bad_alloc([&] { return bring_or_name(slot, parts, &is_open); });
  if (s) return s;
  if (link_ != nullptr) (void)link_->finish();  // which may still read the caller's memory
  mirror_ = nullptr;                            // it may have codebooks that the store does not
  if (is_open) (void)release(slot);
  return parts.why_failed(s);
}

// Sizes that no sequence has must not take memory. Where anything is damaged the host finds out
// what.
Status DevicePlace::bring_or_name(int32_t slot, const SequenceParts& parts, bool* is_open) {
  if (Status s = open_mirror(); !s) return s;
  const bool fits = may_fit(parts);
  const Status brought =
      fits ? bring(slot, parts, is_open)
           : Status(StatusCode::kOutOfRange, "a body is larger than its table's pages");
  if (fits && brought.code() != StatusCode::kCorrupt) return brought;
  if (Status s = link_->finish(); !s) return s;  // which may still read states of the mirror
  const auto named = mirror_->plan_imports(0, parts, false);
  return named ? brought : named.status();
}

// The link carries the first layers while the slot is made, heads of bodies are read and pages are
// dealt. Blocks that the device decodes as they are it looks at itself.
Status DevicePlace::bring(int32_t slot, const SequenceParts& parts, bool* is_open) {
  Incoming from;
  for (size_t row = 0; row < parts.raw.size(); ++row) {
    from.sizes.push_back(static_cast<int64_t>(parts.raw[row].size()));
    from.sizes.push_back(static_cast<int64_t>(parts.bodies[row].size()));
  }
  const int64_t bytes = padded_bytes(from.sizes);
  const uint8_t* const first = parts.raw[0].data();
  from.is_direct = is_pinned(first, bytes);
  const Result<uint8_t*> memory =  // the link reads it
      from.is_direct ? const_cast<uint8_t*>(first) : link_->host_memory(bytes);
  if (!memory) return memory.status();
  from.pinned = *memory;
  Status begun = link_->begin(from.sizes, from.pinned, true, from.is_direct);
  if (!begun) return begun;
  if (Status s = open(slot); !s) return s;
  *is_open = true;
  Result<std::vector<HostPlace::LayerImport>> imports = mirror_->plan_imports(0, parts, true);
  if (!imports) return imports.status();
  from.imports = std::move(*imports);
  std::vector<LayerPlan> plans;
  for (const HostPlace::LayerImport& import : from.imports) {
    plans.push_back(import.plan->layers[0]);
    HostLayer& layer = from.layers.emplace_back(import.layer);
    layer.slot = slot, layer.at = parts.layers[layer.layer];
  }
  if (Status s = take_pages(slot, plans, parts.layers); !s) return s;
  if (Status s = copy_tables(slot); !s) return s;
  if (Status s = receive_layers(slot, parts, from); !s) return s;
  for (const auto& import : from.imports) mirror_->format()->finish(*import.plan);
  return format_->upload_shared(*mirror_->format(), from.layers);
}

bool DevicePlace::may_fit(const SequenceParts& parts) const {
  const PageTableShape& table = layout_.allocator.table;
  const int64_t heads = config_.layout.num_kv_heads;
  // A body begins with less than its part of the state.
  const int64_t most_bytes = int64_t{view_.pages.rows_per_layer} *
                                 (table.table_slots[0] + table.table_slots[1]) *
                                 layout_.page_bytes +
                             layout_.layer_bytes + heads * int64_t{kMaxHeadDim} * 4;
  for (size_t row = 0; row < parts.raw.size(); ++row) {
    const auto raw = static_cast<int64_t>(parts.raw[row].size());
    const auto body = static_cast<int64_t>(parts.bodies[row].size());
    if (raw > layout_.raw_bytes || body > most_bytes) return false;
  }
  return true;
}

// Memory that is not pinned is copied to such as is, by several threads. The one that completes the
// next layer gives it to the link, with its state. Layers that are enqueued are checked while the
// link carries others.
Status DevicePlace::receive_layers(int32_t slot, const SequenceParts& parts, const Incoming& from) {
  const int64_t heads = config_.layout.num_kv_heads, num_layers = config_.layout.num_layers;
  const std::span<const int64_t> sizes = from.sizes;
  const uint8_t* const first = parts.raw[0].data();
  const int32_t threads = from.is_direct ? 1 : threads_for(padded_bytes(sizes));
  std::mutex mutex;
  std::vector<PageRanges> ranges(num_layers);
  std::vector<bool> is_placed(num_layers);
  int64_t next = 0;
  const auto give = [&](int64_t layer) {
    const int32_t checked = link_->end_layer();
    const uint8_t* const at = parts.raw[layer * heads].data();
    const PageRange state = {from.imports[layer].layer.state,
                             view_.slots.state(slot, static_cast<int32_t>(layer)), state_bytes()};
    Status sent = link_->receive(slot, parts.layers[layer], at, std::move(ranges[layer]), state);
    const int32_t count = link_->end_layer() - checked;
    if (!sent || count == 0) return sent;
    return format_->check_imported(std::span(from.layers).subspan(checked, count),
                                   counts_ + slot * num_layers, link_->device_fault());
  };
  Status s = try_parallel_for(num_layers, threads, [&](int64_t layer) {
    const HostPlace::LayerImport& import = from.imports[layer];
    PageRanges placed = mirror_->format()->place(import.layer, *import.plan, 0);
    const uint8_t* const bytes = parts.raw[layer * heads].data();
    const int64_t size = padded_bytes(sizes.subspan(2 * layer * heads, 2 * heads));
    if (!from.is_direct) std::copy_n(bytes, size, from.pinned + (bytes - first));
    const std::lock_guard<std::mutex> lock(mutex);
    ranges[layer] = std::move(placed);
    is_placed[layer] = true;
    while (next < num_layers && is_placed[next]) {
      const int64_t given = std::exchange(next, num_layers);  // the last one where it fails
      if (Status sent = on_device(device_, [&] { return give(given); }); !sent) return sent;
      next = given + 1;
    }
    return Status::ok();
  });
  if (!s) return s;
  if (Status finished = link_->finish(); !finished) return finished;
  for (size_t i = 0; i < parts.checksums.size(); ++i) {
    const uint8_t* part = i % 2 == 0 ? parts.raw[i / 2].data() : parts.bodies[i / 2].data();
    if (checksum_of(static_cast<int64_t>(i), sizes[i], part) != parts.checksums[i]) {
      return Status(StatusCode::kCorrupt, "checksum");
    }
  }
  return link_->fault();
}

// The device leaves out short parts.
uint64_t DevicePlace::checksum_of(int64_t part, int64_t bytes, const uint8_t* at) const {
  const int64_t padded = round_up(bytes, 16);
  return padded > kXxh3ShortBytes ? link_->checksum(part) : xxh3(at, static_cast<size_t>(padded));
}

// For all layers of an empty slot, which then counts `layers` tokens. What kernels read of it here
// does not wait for the link's copies.
Status DevicePlace::take_pages(int32_t slot, const std::vector<LayerPlan>& plans,
                               const std::vector<LayerTokens>& layers) {
  std::vector<SideCounts> counts;
  int64_t needed = 0;
  for (const LayerPlan& plan : plans) {
    for (const SideCounts& row : plan.tokens) {
      const auto index = static_cast<int32_t>(counts.size());
      counts.push_back(row);
      const PageDemand demand = page_demand(mirror_->pages().allocator, index, {}, row);
      if (demand.is_beyond) {
        return Status(StatusCode::kOutOfRange, "the sequence takes more pages than its table has");
      }
      needed += demand.fresh;
    }
  }
  const Result<bool> fits = has_pages(needed);
  if (!fits) return fits.status();
  if (!*fits) return refuse_pages(needed);
  const Result<const uint8_t*> target =
      link_->mapped(counts.data(), static_cast<int64_t>(counts.size() * sizeof(SideCounts)));
  const Result<const uint8_t*> tokens =
      link_->mapped(layers.data(), static_cast<int64_t>(layers.size() * sizeof(LayerTokens)));
  if (!target || !tokens) return target ? tokens.status() : target.status();
  if (Status s = put_ids({slot}, op_slots_); !s) return s;
  const auto* const rows = reinterpret_cast<const SideCounts*>(*target);
  if (Status s = run(PageOp::grow({op_slots_, 1}, rows, report_), needed); !s) return s;
  DeviceWorks works;
  works.slots = op_slots_;
  works.to = reinterpret_cast<const LayerTokens*>(*tokens);
  works.count = 1, works.num_layers = config_.layout.num_layers;
  works.report = report_;
  works.commit = commit_of(counts_);
  return commit(works);
}

}  // namespace tierkv::store

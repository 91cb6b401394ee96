// SPDX-License-Identifier: Apache-2.0
#include "store/place/device/sequence_link.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"

namespace tierkv::store {
namespace {

constexpr int64_t kListBytes = int64_t{1} << 20;
constexpr int64_t kHostStep = int64_t{32} << 20;
constexpr int64_t kRangeBytes = int64_t{16} << 10;  // that a CTA takes

cudaEvent_t event_of(const std::shared_ptr<void>& event) {
  return static_cast<cudaEvent_t>(event.get());
}

// As ranges that a CTA each takes.
void add_range(const uint8_t* from, uint8_t* to, int64_t bytes, RangeCheck check,
               std::vector<LinkRange>* ranges) {
  for (int64_t at = 0; at < bytes; at += kRangeBytes) {
    ranges->push_back({from == nullptr ? nullptr : from + at, to + at,
                       static_cast<int32_t>(std::min(kRangeBytes, bytes - at)), check});
  }
}

}  // namespace

Result<PinnedMemory> pinned_memory(int64_t bytes) {
  void* at = nullptr;
  const cudaError_t error = cudaHostAlloc(&at, static_cast<size_t>(bytes), cudaHostAllocMapped);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return Status(StatusCode::kOutOfMemory,
                  "no pinned host memory of " + std::to_string(bytes) + " bytes");
  }
  return PinnedMemory(at, [](void* memory) { (void)cudaFreeHost(memory); });
}

bool is_pinned(const uint8_t* from, int64_t bytes) {
  for (const uint8_t* at : {from, from + bytes - 1}) {
    cudaPointerAttributes attributes{};
    const cudaError_t error = cudaPointerGetAttributes(&attributes, at);
    if (error != cudaSuccess) (void)cudaGetLastError();
    if (error != cudaSuccess || attributes.type != cudaMemoryTypeHost) return false;
  }
  return true;
}

Result<std::unique_ptr<SequenceLink>> SequenceLink::make(const DeviceStoreView& view,
                                                         cudaStream_t stream) {
  std::unique_ptr<SequenceLink> link(new SequenceLink(view, stream));
  const cudaError_t error = cudaStreamCreateWithFlags(&link->copies_, cudaStreamNonBlocking);
  if (Status s = cuda_status(error, "stream"); !s) return s;
  return Result<std::unique_ptr<SequenceLink>>(std::move(link));
}

SequenceLink::~SequenceLink() {
  if (copies_ == nullptr) return;
  (void)cudaStreamSynchronize(copies_);
  (void)cudaStreamDestroy(copies_);
}

Status SequenceLink::begin(int32_t num_layers, int32_t parts_of_layer, int64_t layer_bytes) {
  if (Status s = finish(); !s) return s;
  list_ = 0;
  list_bytes_ = 0;
  layer_ = 0;
  if (layer_bytes > layer_bytes_ || memory_ == nullptr) {
    memory_ = std::make_unique<DeviceMemory>("a layer of a sequence that is exported or imported");
    layer_bytes_ = 0;
    for (uint8_t*& staged : staged_) {
      if (Status s = memory_->take(layer_bytes, &staged); !s) return s;
    }
    num_blocks_ = layer_bytes / kChecksumBlock + parts_of_layer;
    if (Status s = memory_->take(num_blocks_ * kChecksumLanes, &sums_); !s) return s;
    if (Status s = memory_->take(1, &device_fault_); !s) return s;
    layer_bytes_ = layer_bytes;
  }
  for (std::vector<Event>* events : {&staged_events_, &done_events_}) {
    while (events->size() < static_cast<size_t>(num_layers)) {
      cudaEvent_t event = nullptr;
      const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
      if (Status s = cuda_status(error, "event"); !s) return s;
      events->emplace_back(event, [](void* e) {
        if (e != nullptr) (void)cudaEventDestroy(static_cast<cudaEvent_t>(e));
      });
    }
  }
  const Result<uint64_t*> checksums = take<uint64_t>(int64_t{num_layers} * parts_of_layer);
  if (!checksums) return checksums.status();
  checksums_ = *checksums;
  static_assert(kNoLinkFault == 0x7f7f7f7f);
  return cuda_status(cudaMemsetAsync(device_fault_, 0x7f, sizeof(int32_t), stream_), "link");
}

Result<uint8_t*> SequenceLink::host_memory(int64_t bytes) {
  if (bytes > host_bytes_) {
    host_ = nullptr;
    host_bytes_ = 0;
    const Result<PinnedMemory> memory = pinned_memory(round_up(bytes, kHostStep));
    if (!memory) return memory.status();
    host_ = *memory;
    host_bytes_ = round_up(bytes, kHostStep);
  }
  return static_cast<uint8_t*>(host_.get());
}

template <class T>
Result<T*> SequenceLink::take(int64_t count) {
  const int64_t bytes = round_up(count * static_cast<int64_t>(sizeof(T)), 16);
  while (list_ < lists_.size() && list_bytes_ + bytes > lists_[list_].second) {
    ++list_;
    list_bytes_ = 0;
  }
  if (list_ == lists_.size()) {
    const int64_t size = std::max(bytes, kListBytes);
    const Result<PinnedMemory> memory = pinned_memory(size);
    if (!memory) return memory.status();
    lists_.emplace_back(*memory, size);
  }
  auto* const at = static_cast<uint8_t*>(lists_[list_].first.get()) + list_bytes_;
  list_bytes_ += bytes;
  return reinterpret_cast<T*>(at);
}

Status SequenceLink::order(cudaStream_t before, const Event& event, cudaStream_t after) const {
  cudaError_t error = cudaEventRecord(event_of(event), before);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(after, event_of(event), 0);
  return cuda_status(error, "link");
}

Result<SequenceLink::Staged> SequenceLink::stage(const LinkLayer& layer) {
  const auto count = static_cast<int64_t>(layer.part_bytes.size());
  const Result<ChecksumChunk*> parts = take<ChecksumChunk>(count);
  if (!parts) return parts.status();
  Staged staged = {staged_[layer_ % 2], *parts, 0};
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) {
    const ChecksumChunk part = {staged.size, round_up(layer.part_bytes[i], 16), blocks};
    staged.parts[i] = part;
    staged.size += part.bytes;
    blocks += part.bytes / kChecksumBlock + 1;
  }
  return staged;
}

Status SequenceLink::move_raw(const LinkLayer& layer, const Staged& staged, bool comes,
                              bool can_prune) const {
  LinkRaw call;
  call.raw = view_.raw;
  call.laws = view_.laws;
  call.at = layer.at;
  call.rows = view_.slots.raw(layer.slot, layer.layer);
  call.bytes = staged.bytes;
  call.parts = staged.parts;
  call.layer = layer.layer;
  call.comes = comes;
  call.can_prune = can_prune;
  call.fault = device_fault_;
  const int64_t tokens = sink_count(call.laws, call.at) + ring_count(call.laws, call.at);
  if (tokens == 0) return Status::ok();
  constexpr int64_t kOfThread = 16, kMostCtas = 256;
  const int64_t ctas = std::min(
      kMostCtas, tokens * 2 * call.raw.head_dim / (kOfThread * kLinkThreads) + 1);
  const dim3 grid(static_cast<uint32_t>(ctas), static_cast<uint32_t>(view_.num_kv_heads));
  return launch_after_previous(link_raw_kernel, grid, kLinkThreads, 0, stream_, call);
}

Status SequenceLink::copy_ranges(const std::vector<LinkRange>& ranges) {
  if (ranges.empty()) return Status::ok();
  const Result<LinkRange*> list = take<LinkRange>(static_cast<int64_t>(ranges.size()));
  if (!list) return list.status();
  std::copy(ranges.begin(), ranges.end(), *list);
  const LinkRanges call = {*list, layer_, device_fault_};
  return launch_after_previous(link_ranges_kernel, static_cast<uint32_t>(ranges.size()),
                               kLinkThreads, 0, stream_, call);
}

Status SequenceLink::find_checksums(const LinkLayer& layer, const Staged& staged) const {
  const auto count = static_cast<uint32_t>(layer.part_bytes.size());
  ChecksumCall call;
  call.bytes = staged.bytes;
  call.chunks = staged.parts;
  call.sums = sums_;
  call.checksums = checksums_ + int64_t{layer_} * count;
  call.keys = xxh3_keys();
  int64_t most_blocks = 0;
  for (uint32_t i = 0; i < count; ++i) {
    most_blocks = std::max(most_blocks, staged.parts[i].bytes / kChecksumBlock + 1);
  }
  constexpr int64_t kOfWarp = 4, kMostCtas = 128;
  const int64_t ctas = std::min(kMostCtas, most_blocks / (kOfWarp * kChecksumWarps) + 1);
  const dim3 grid(static_cast<uint32_t>(ctas), count);
  Status s = launch_after_previous(sum_blocks_kernel, grid, 32 * kChecksumWarps, 0, stream_, call);
  return s ? launch_after_previous(chunk_checksum_kernel, count, 32, 0, stream_, call) : s;
}

Status SequenceLink::send(const LinkLayer& layer, std::span<const ExportedBody> bodies) {
  const Result<Staged> staged = stage(layer);
  if (!staged) return staged.status();
  std::vector<LinkRange> ranges;
  for (size_t h = 0; h < bodies.size(); ++h) {
    const std::vector<uint8_t>& head = bodies[h].head;
    uint8_t* to = staged->bytes + staged->parts[2 * h + 1].first;
    if (!head.empty()) {
      const Result<uint8_t*> mapped = take<uint8_t>(static_cast<int64_t>(head.size()));
      if (!mapped) return mapped.status();
      std::copy(head.begin(), head.end(), *mapped);
      add_range(*mapped, to, static_cast<int64_t>(head.size()), RangeCheck::kNone, &ranges);
      to += head.size();
    }
    for (const PageRange& range : bodies[h].pages) {
      add_range(range.page, to, range.bytes, RangeCheck::kNone, &ranges);
      to += range.bytes;
    }
  }
  if (layer_ >= 2) {
    const cudaError_t error = cudaStreamWaitEvent(stream_, event_of(done_events_[layer_ - 2]), 0);
    if (Status s = cuda_status(error, "link"); !s) return s;
  }
  if (Status s = move_raw(layer, *staged, false, false); !s) return s;
  if (Status s = copy_ranges(ranges); !s) return s;
  if (Status s = find_checksums(layer, *staged); !s) return s;
  if (Status s = order(stream_, staged_events_[layer_], copies_); !s) return s;
  cudaError_t error =
      cudaMemcpyAsync(layer.host, staged->bytes, static_cast<size_t>(staged->size),
                      cudaMemcpyDeviceToHost, copies_);
  if (error == cudaSuccess) error = cudaEventRecord(event_of(done_events_[layer_]), copies_);
  ++layer_;
  return cuda_status(error, "link");
}

Status SequenceLink::receive(const LinkLayer& layer, const uint8_t* from,
                             const PageRanges& ranges, bool can_prune) {
  const Result<Staged> staged = stage(layer);
  if (!staged) return staged.status();
  std::vector<LinkRange> to;
  for (const PageRange& range : ranges) {
    const uint8_t* at = range.from;
    if (at != nullptr && at >= from && at < from + staged->size) {
      at = staged->bytes + (at - from);
    } else if (at != nullptr) {
      const Result<uint8_t*> mapped = take<uint8_t>(range.bytes);
      if (!mapped) return mapped.status();
      at = std::copy_n(at, range.bytes, *mapped) - range.bytes;
    }
    add_range(at, range.page, range.bytes, range.check, &to);
  }
  if (layer_ >= 2) {
    const cudaError_t error = cudaStreamWaitEvent(copies_, event_of(done_events_[layer_ - 2]), 0);
    if (Status s = cuda_status(error, "link"); !s) return s;
  }
  const cudaError_t error =
      cudaMemcpyAsync(staged->bytes, layer.host, static_cast<size_t>(staged->size),
                      cudaMemcpyHostToDevice, copies_);
  if (Status s = cuda_status(error, "link"); !s) return s;
  if (Status s = order(copies_, staged_events_[layer_], stream_); !s) return s;
  if (Status s = find_checksums(layer, *staged); !s) return s;
  if (Status s = move_raw(layer, *staged, true, can_prune); !s) return s;
  if (Status s = copy_ranges(to); !s) return s;
  const cudaError_t done = cudaEventRecord(event_of(done_events_[layer_]), stream_);
  ++layer_;
  return cuda_status(done, "link");
}

Status SequenceLink::wait_for(int32_t layer) const {
  return cuda_status(cudaEventSynchronize(event_of(done_events_[layer])), "link");
}

Status SequenceLink::finish() {
  if (device_fault_ == nullptr) return Status::ok();
  int32_t fault = kNoLinkFault;
  cudaError_t error = cudaMemcpyAsync(&fault, device_fault_, sizeof(fault),
                                      cudaMemcpyDeviceToHost, stream_);
  for (const cudaStream_t stream : {stream_, copies_}) {
    const cudaError_t waited = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) error = waited;
  }
  const bool sound = fault == kNoLinkFault;
  fault_kind_ = sound ? ImportFault::kNone : static_cast<ImportFault>(fault % 4);
  fault_layer_ = fault / 4;
  return cuda_status(error, "link");
}

}  // namespace tierkv::store

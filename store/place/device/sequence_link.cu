// SPDX-License-Identifier: Apache-2.0
#include "store/place/device/sequence_link.h"

#include <algorithm>
#include <string>
#include <utility>

#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"

namespace tierkv::store {
namespace {

constexpr int64_t kGroupBytes = int64_t{4} << 20;  // that layers go in at least
constexpr int64_t kListBytes = int64_t{1} << 20;
constexpr int64_t kHostStep = int64_t{32} << 20;
constexpr int64_t kRangeBytes = int64_t{16} << 10;  // that a CTA takes

cudaEvent_t event_of(const std::shared_ptr<void>& event) {
  return static_cast<cudaEvent_t>(event.get());
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

Status SequenceLink::begin(std::span<const int64_t> part_bytes, uint8_t* host, bool comes) {
  moves_.clear();
  if (Status s = finish(); !s) return s;
  const int64_t of_layer = int64_t{2} * view_.num_kv_heads;
  int64_t most = 0, bytes = 0;
  for (size_t i = 0; i < part_bytes.size(); ++i) {
    if (i % of_layer == 0) bytes = 0;
    bytes += round_up(part_bytes[i], 16);
    most = std::max(most, bytes);
  }
  const auto num_parts = static_cast<int64_t>(part_bytes.size());
  if (Status s = allocate(most + kGroupBytes, num_parts); !s) return s;
  list_ = 0;
  list_bytes_ = 0;
  const Result<ChecksumChunk*> parts = take<ChecksumChunk>(num_parts);
  const Result<uint64_t*> checksums = take<uint64_t>(num_parts);
  if (!parts || !checksums) return parts ? checksums.status() : parts.status();
  parts_ = *parts;
  checksums_ = *checksums;
  for (int64_t i = 0; i < num_parts; ++i) parts_[i] = {0, round_up(part_bytes[i], 16), 0};
  host_ = host;
  comes_ = comes;
  group_of_.clear();
  group_ = 0;
  first_part_ = group_bytes_ = group_blocks_ = 0;
  return cuda_status(cudaMemsetAsync(device_fault_, 0x7f, sizeof(int32_t), stream_), "link");
}

Status SequenceLink::allocate(int64_t group_bytes, int64_t num_parts) {
  if (group_bytes > staged_bytes_) {
    memory_ = std::make_unique<DeviceMemory>("layers of a sequence that is exported or imported");
    staged_bytes_ = 0;
    device_fault_ = nullptr;
    for (uint8_t*& staged : staged_) {
      if (Status s = memory_->take(group_bytes, &staged); !s) return s;
    }
    // Every part has one block that is not full.
    const int64_t blocks = group_bytes / kChecksumBlock + num_parts;
    if (Status s = memory_->take(blocks * kChecksumLanes, &sums_); !s) return s;
    if (Status s = memory_->take(1, &device_fault_); !s) return s;
    staged_bytes_ = group_bytes;
  }
  for (std::vector<Event>* events : {&between_, &done_}) {
    while (static_cast<int32_t>(events->size()) < view_.num_layers) {
      cudaEvent_t event = nullptr;
      const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
      if (Status s = cuda_status(error, "event"); !s) return s;
      events->emplace_back(event, [](void* e) {
        if (e != nullptr) (void)cudaEventDestroy(static_cast<cudaEvent_t>(e));
      });
    }
  }
  return Status::ok();
}

Result<uint8_t*> SequenceLink::host_memory(int64_t bytes) {
  if (bytes > host_bytes_) {
    host_memory_ = nullptr;
    host_bytes_ = 0;
    const Result<PinnedMemory> memory = pinned_memory(round_up(bytes, kHostStep));
    if (!memory) return memory.status();
    host_memory_ = *memory;
    host_bytes_ = round_up(bytes, kHostStep);
  }
  return static_cast<uint8_t*>(host_memory_.get());
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

template <class T>
Result<const T*> SequenceLink::put(const T* from, int64_t count) {
  const Result<T*> to = take<T>(count);
  if (!to) return to.status();
  std::copy_n(from, count, *to);
  return static_cast<const T*>(*to);
}

Status SequenceLink::order(cudaStream_t before, const Event& event, cudaStream_t after) const {
  cudaError_t error = cudaEventRecord(event_of(event), before);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(after, event_of(event), 0);
  return cuda_status(error, "link");
}

Result<uint8_t*> SequenceLink::join(int32_t slot, LayerTokens at) {
  const auto layer = static_cast<int32_t>(group_of_.size());
  const int64_t of_layer = int64_t{2} * view_.num_kv_heads, part = layer * of_layer;
  uint8_t* const staged = staged_[group_ % 2] + group_bytes_;
  for (int64_t i = part; i < part + of_layer; ++i) {
    parts_[i].first = group_bytes_;
    parts_[i].first_block = group_blocks_;
    group_bytes_ += parts_[i].bytes;
    group_blocks_ += parts_[i].bytes / kChecksumBlock + 1;
  }
  group_of_.push_back(group_);
  LinkRaw raw;
  raw.raw = view_.raw;
  raw.laws = view_.laws;
  raw.at = at;
  raw.rows = view_.slots.raw(slot, layer);
  raw.bytes = staged_[group_ % 2];
  raw.parts = parts_ + part;
  raw.layer = layer;
  raw.comes = comes_;
  raw.fault = device_fault_;
  moves_.push_back({raw, {nullptr, layer, device_fault_}, 0});
  return staged;
}

// Ranges that are not checked may be long.
Status SequenceLink::add_ranges(const PageRanges& ranges) {
  const auto pieces_of = [](const PageRange& range) {
    const bool is_checked = range.keys.end > 0 || range.values.end > 0;
    return is_checked ? 1 : (range.bytes + kRangeBytes - 1) / kRangeBytes;
  };
  int64_t count = 0;
  for (const PageRange& range : ranges) count += pieces_of(range);
  const Result<PageRange*> list = take<PageRange>(count);
  if (!list) return list.status();
  PageRange* to = *list;
  for (const PageRange& range : ranges) {
    const int64_t pieces = pieces_of(range);
    for (int64_t i = 0; i < pieces; ++i, ++to) {
      *to = range;
      if (pieces == 1) continue;
      if (range.from != nullptr) to->from += i * kRangeBytes;
      to->to += i * kRangeBytes;
      to->bytes = std::min(kRangeBytes, range.bytes - i * kRangeBytes);
    }
  }
  moves_.back().ranges.ranges = *list;
  moves_.back().num_ranges = count;
  return group_bytes_ >= kGroupBytes ? flush() : Status::ok();
}

Status SequenceLink::move_layers() const {
  const auto heads = static_cast<uint32_t>(view_.num_kv_heads);
  for (const Move& move : moves_) {
    const int64_t tokens = sink_count(view_.laws, move.raw.at) + ring_count(view_.laws, move.raw.at);
    constexpr int64_t kOfThread = 16, kMostCtas = 256;
    const int64_t ctas =
        std::min(kMostCtas, tokens * 2 * view_.raw.head_dim / (kOfThread * kLinkThreads) + 1);
    if (tokens > 0) {
      const dim3 grid(static_cast<uint32_t>(ctas), heads);
      Status s = launch_after_previous(link_raw_kernel, grid, kLinkThreads, 0, stream_, move.raw);
      if (!s) return s;
    }
    if (move.num_ranges > 0) {
      Status s = launch_after_previous(link_ranges_kernel, static_cast<uint32_t>(move.num_ranges),
                                       kLinkThreads, 0, stream_, move.ranges);
      if (!s) return s;
    }
  }
  return Status::ok();
}

Status SequenceLink::find_checksums() const {
  const int64_t count = static_cast<int64_t>(moves_.size()) * 2 * view_.num_kv_heads;
  ChecksumCall call;
  call.bytes = staged_[group_ % 2];
  call.chunks = parts_ + first_part_;
  call.sums = sums_;
  call.checksums = checksums_ + first_part_;
  call.keys = xxh3_keys();
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, call.chunks[i].bytes);
  constexpr int64_t kOfWarp = 4, kMostCtas = 128;
  const int64_t ctas = std::min(kMostCtas, most / (kChecksumBlock * kOfWarp * kChecksumWarps) + 1);
  const dim3 grid(static_cast<uint32_t>(ctas), static_cast<uint32_t>(count));
  Status s = launch_after_previous(sum_blocks_kernel, grid, 32 * kChecksumWarps, 0, stream_, call);
  return s ? launch_after_previous(chunk_checksum_kernel, static_cast<uint32_t>(count), 32, 0,
                                   stream_, call)
           : s;
}

Status SequenceLink::send(int32_t slot, LayerTokens at, std::span<const ExportedBody> bodies) {
  const Result<uint8_t*> staged = join(slot, at);
  if (!staged) return staged.status();
  const ChecksumChunk* const parts = moves_.back().raw.parts;
  PageRanges ranges;
  size_t count = bodies.size();
  for (const ExportedBody& body : bodies) count += body.pages.size();
  ranges.reserve(count);
  for (size_t h = 0; h < bodies.size(); ++h) {
    uint8_t* to = staged_[group_ % 2] + parts[2 * h + 1].first;
    const std::vector<uint8_t>& head = bodies[h].head;
    const Result<const uint8_t*> mapped = put(head.data(), static_cast<int64_t>(head.size()));
    if (!mapped) return mapped.status();
    if (!head.empty()) ranges.push_back({*mapped, to, static_cast<int64_t>(head.size())});
    to += head.size();
    for (const PageRange& range : bodies[h].pages) {
      ranges.push_back({range.from, to, range.bytes});
      to += range.bytes;
    }
  }
  return add_ranges(ranges);
}

Status SequenceLink::receive(int32_t slot, LayerTokens at, const uint8_t* from,
                             PageRanges ranges, bool can_prune) {
  const int64_t first = group_bytes_;
  const Result<uint8_t*> staged = join(slot, at);
  if (!staged) return staged.status();
  moves_.back().raw.can_prune = can_prune;
  for (PageRange& range : ranges) {
    if (range.from == nullptr) continue;
    if (range.from >= from && range.from < from + (group_bytes_ - first)) {
      range.from = *staged + (range.from - from);
    } else {
      const Result<const uint8_t*> mapped = put(range.from, range.bytes);
      if (!mapped) return mapped.status();
      range.from = *mapped;
    }
  }
  return add_ranges(ranges);
}

Status SequenceLink::flush() {
  if (moves_.empty()) return Status::ok();
  const Event &between = between_[group_], &done = done_[group_];
  const cudaStream_t first = comes_ ? copies_ : stream_, second = comes_ ? stream_ : copies_;
  if (group_ >= 2) {
    const cudaError_t error = cudaStreamWaitEvent(first, event_of(done_[group_ - 2]), 0);
    if (Status s = cuda_status(error, "link"); !s) return s;
  }
  uint8_t* const staged = staged_[group_ % 2];
  const auto copy = [&] {
    const auto bytes = static_cast<size_t>(group_bytes_);
    return cuda_status(
        cudaMemcpyAsync(comes_ ? staged : host_, comes_ ? host_ : staged, bytes,
                        comes_ ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, copies_),
        "link");
  };
  const auto work = [&] {
    Status s = comes_ ? find_checksums() : move_layers();
    if (!s) return s;
    return comes_ ? move_layers() : find_checksums();
  };
  if (Status s = comes_ ? copy() : work(); !s) return s;
  if (Status s = order(first, between, second); !s) return s;
  if (Status s = comes_ ? work() : copy(); !s) return s;
  if (Status s = cuda_status(cudaEventRecord(event_of(done), second), "link"); !s) return s;
  host_ += group_bytes_;
  first_part_ += static_cast<int64_t>(moves_.size()) * 2 * view_.num_kv_heads;
  moves_.clear();
  group_bytes_ = group_blocks_ = 0;
  ++group_;
  return Status::ok();
}

Status SequenceLink::wait_for(int32_t layer) const {
  return cuda_status(cudaEventSynchronize(event_of(done_[group_of_[layer]])), "link");
}

Status SequenceLink::finish() {
  Status flushed = flush();
  if (device_fault_ == nullptr) return flushed;
  int32_t fault = kNoLinkFault;
  cudaError_t error =
      cudaMemcpyAsync(&fault, device_fault_, sizeof(fault), cudaMemcpyDeviceToHost, stream_);
  for (const cudaStream_t stream : {stream_, copies_}) {
    const cudaError_t waited = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) error = waited;
  }
  fault_kind_ =
      fault == kNoLinkFault ? ImportFault::kNone : static_cast<ImportFault>(fault % kLinkFaults);
  fault_layer_ = fault / kLinkFaults;
  return flushed ? cuda_status(error, "link") : flushed;
}

}  // namespace tierkv::store

// SPDX-License-Identifier: Apache-2.0
#include "store/place/device/sequence_link.h"

#include <algorithm>
#include <string>
#include <utility>

#include "codec/file/container_format.h"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"

namespace tierkv::store {
namespace {

constexpr int64_t kGroupBytes = int64_t{4} << 20;  // that layers go in at least
constexpr int64_t kMostParts = 65535;              // of a group: lines of a grid
// As many groups are staged at once as these bytes hold, within the bounds behind them.
constexpr int64_t kStagedBytes = int64_t{32} << 20, kLeastRing = 4, kMostRing = 8;
constexpr int64_t kListBytes = int64_t{1} << 20;
constexpr int64_t kHostStep = int64_t{32} << 20;
constexpr int64_t kRangeBytes = int64_t{16} << 10;  // that a warp takes

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
  for (const std::vector<cudaEvent_t>* events : {&between_, &done_}) {
    for (const cudaEvent_t event : *events) (void)cudaEventDestroy(event);
  }
  (void)cudaStreamDestroy(copies_);
}

Status SequenceLink::begin(std::span<const int64_t> part_bytes, uint8_t* host, bool comes,
                           bool is_there) {
  list_ = 0;
  list_bytes_ = 0;
  moves_.clear();
  layer_ = group_ = 0;
  host_ = host;
  comes_ = comes;
  is_there_ = is_there;
  if (Status s = make_groups(part_bytes); !s) return s;
  if (Status s = allocate(); !s) return s;
  cudaError_t error = cudaMemsetAsync(device_fault_, 0x7f, sizeof(int32_t), stream_);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(device_parts_, parts_, part_bytes.size() * sizeof(ChecksumChunk),
                            cudaMemcpyHostToDevice, comes ? copies_ : stream_);
  }
  if (Status s = cuda_status(error, "link"); !s) return s;
  for (int32_t g = 0; is_there && g < std::min<int32_t>(ring(), groups_.size()); ++g) {
    if (Status s = copy_group(g); !s) return s;
  }
  return Status::ok();
}

Status SequenceLink::make_groups(std::span<const int64_t> part_bytes) {
  const auto num_parts = static_cast<int64_t>(part_bytes.size());
  const Result<ChecksumChunk*> parts = take<ChecksumChunk>(num_parts);
  const Result<uint64_t*> checksums = take<uint64_t>(num_parts);
  if (!parts || !checksums) return parts ? checksums.status() : parts.status();
  parts_ = *parts;
  checksums_ = *checksums;
  groups_.clear();
  group_of_.clear();
  Group group;
  for (int64_t i = 0; i < num_parts; ++i) {
    parts_[i] = {group.bytes, round_up(part_bytes[i], 16), group.blocks};
    group.bytes += parts_[i].bytes;
    group.blocks += parts_[i].bytes / kChecksumBlock + 1;
    if ((i + 1) % parts_of_layer() != 0) continue;
    group_of_.push_back(static_cast<int32_t>(groups_.size()));
    group.end_layer = static_cast<int32_t>(group_of_.size());
    const int64_t layers = group.end_layer - group.first_layer + 1;
    const bool takes_more = layers <= kLinkLayers && layers * parts_of_layer() <= kMostParts;
    if (group.bytes < kGroupBytes && takes_more && i + 1 < num_parts) continue;
    groups_.push_back(group);
    group = {group.end_layer, group.end_layer, 0, 0, group.host_byte + group.bytes};
  }
  return Status::ok();
}

Status SequenceLink::allocate() {
  int64_t bytes = 0, blocks = 0;
  for (const Group& group : groups_) {
    bytes = std::max(bytes, group.bytes);
    blocks = std::max(blocks, group.blocks);
  }
  if (bytes > staged_bytes_ || blocks > num_sums_) {
    memory_ = nullptr;
    staged_bytes_ = num_sums_ = 0;
    device_fault_ = nullptr;
    staged_.resize(std::clamp(kStagedBytes / std::max(bytes, kGroupBytes), kLeastRing, kMostRing));
    auto memory =
        std::make_unique<DeviceMemory>("layers of a sequence that is exported or imported");
    for (uint8_t*& staged : staged_) memory->take(bytes, &staged);
    int32_t* fault = nullptr;
    memory->take(view_.num_layers * parts_of_layer(), &device_parts_);
    memory->take(blocks * kChecksumLanes, &sums_);
    memory->take(1, &fault);
    if (!memory->status()) return memory->status();
    memory_ = std::move(memory);
    device_fault_ = fault;
    staged_bytes_ = bytes;
    num_sums_ = blocks;
  }
  for (std::vector<cudaEvent_t>* events : {&between_, &done_}) {
    while (events->size() < groups_.size()) {
      cudaEvent_t event = nullptr;
      const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
      if (Status s = cuda_status(error, "event"); !s) return s;
      events->push_back(event);
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

Result<const uint8_t*> SequenceLink::mapped(const void* from, int64_t bytes) {
  const Result<uint8_t*> to = take<uint8_t>(bytes);
  if (!to) return to.status();
  std::copy_n(static_cast<const uint8_t*>(from), bytes, *to);
  return static_cast<const uint8_t*>(*to);
}

const ChecksumChunk* SequenceLink::join(int32_t slot, LayerTokens at) {
  constexpr int32_t kOfThread = 16, kMostCtas = 256;
  LinkLayer layer;
  layer.at = at;
  layer.rows = view_.slots.raw(slot, layer_);
  layer.layer = layer_;
  const int32_t tokens = sink_count(view_.laws, at) + ring_count(view_.laws, at);
  const int32_t ctas = tokens * 2 * view_.raw.head_dim / (kOfThread * kLinkThreads) + 1;
  layer.raw_ctas = tokens > 0 ? least(kMostCtas, ctas) : 0;
  moves_.push_back(layer);
  return parts_ + parts_of_layer() * layer_++;
}

// Ranges that are not checked may be long.
Status SequenceLink::add_ranges(const PageRanges& ranges, const PageRange& last) {
  const auto pieces_of = [](const PageRange& range) {
    const bool is_checked = range.keys.end > 0 || range.values.end > 0;
    return is_checked ? 1 : (range.bytes + kRangeBytes - 1) / kRangeBytes;
  };
  int64_t count = pieces_of(last);
  for (const PageRange& range : ranges) count += pieces_of(range);
  const Result<PageRange*> list = take<PageRange>(count);
  if (!list) return list.status();
  PageRange* to = *list;
  const auto add = [&](const PageRange& range) {
    const int64_t pieces = pieces_of(range);
    for (int64_t i = 0; i < pieces; ++i, ++to) {
      *to = range;
      if (pieces == 1) continue;
      if (range.from != nullptr) to->from += i * kRangeBytes;
      to->to += i * kRangeBytes;
      to->bytes = std::min(kRangeBytes, range.bytes - i * kRangeBytes);
    }
  };
  for (const PageRange& range : ranges) add(range);
  add(last);
  moves_.back().ranges = *list;
  moves_.back().num_ranges = static_cast<int32_t>(count);
  return layer_ == groups_[group_].end_layer ? enqueue_group() : Status::ok();
}

Status SequenceLink::move_layers() const {
  LinkCall call;
  static_cast<RawRows&>(call) = view_;
  call.bytes = staged(group_);
  call.parts = device_parts_;
  call.num_kv_heads = view_.num_kv_heads;
  call.comes = comes_;
  call.fault = device_fault_;
  std::copy(moves_.begin(), moves_.end(), call.layers);
  int32_t ctas = 0;
  for (const LinkLayer& layer : moves_) ctas = most(ctas, layer.ctas(view_.num_kv_heads));
  if (ctas == 0) return Status::ok();
  const dim3 grid(static_cast<uint32_t>(ctas), static_cast<uint32_t>(moves_.size()));
  return launch_after_previous(link_layers_kernel, grid, kLinkThreads, 0, stream_, call);
}

Status SequenceLink::find_checksums() const {
  const int64_t first = groups_[group_].first_layer * parts_of_layer();
  const int64_t count = groups_[group_].end_layer * parts_of_layer() - first;
  ChecksumCall call;
  call.bytes = staged(group_);
  call.chunks = device_parts_ + first;
  call.sums = sums_;
  call.checksums = checksums_ + first;
  call.keys = xxh3_keys();
  int64_t most = 0;
  for (int64_t i = 0; i < count; ++i) most = std::max(most, parts_[first + i].bytes);
  constexpr int64_t kOfWarp = 4, kMostCtas = 128;
  const int64_t ctas = std::min(kMostCtas, most / (kChecksumBlock * kOfWarp * kChecksumWarps) + 1);
  const dim3 grid(static_cast<uint32_t>(ctas), static_cast<uint32_t>(count));
  Status s = launch_after_previous(sum_blocks_kernel, grid, 32 * kChecksumWarps, 0, stream_, call);
  return s ? launch_after_previous(chunk_checksum_kernel, static_cast<uint32_t>(count), 32, 0,
                                   stream_, call)
           : s;
}

Status SequenceLink::send(int32_t slot, LayerTokens at, std::span<const ExportedBody> bodies) {
  const ChecksumChunk* const parts = join(slot, at);
  PageRanges ranges;
  size_t count = bodies.size();
  for (const ExportedBody& body : bodies) count += body.pages.size();
  ranges.reserve(count);
  for (size_t h = 0; h < bodies.size(); ++h) {
    uint8_t* to = staged(group_) + parts[2 * h + 1].first;
    const std::vector<uint8_t>& head = bodies[h].head;
    const auto head_bytes = static_cast<int64_t>(head.size());
    const Result<const uint8_t*> copy = mapped(head.data(), head_bytes);
    if (!copy) return copy.status();
    if (!head.empty()) ranges.push_back({*copy, to, head_bytes});
    to += head.size();
    for (const PageRange& range : bodies[h].pages) {
      ranges.push_back({range.from, to, range.bytes});
      to += range.bytes;
    }
  }
  return add_ranges(ranges, {});
}

Status SequenceLink::receive(int32_t slot, LayerTokens at, const uint8_t* from, PageRanges ranges,
                             const PageRange& state) {
  const ChecksumChunk* const parts = join(slot, at);
  const ChecksumChunk& last = parts[parts_of_layer() - 1];
  const int64_t bytes = last.first + last.bytes - parts[0].first;
  uint8_t* const to = staged(group_) + parts[0].first;
  for (PageRange& range : ranges) {
    if (range.from == nullptr) continue;
    if (range.from >= from && range.from < from + bytes) {
      range.from = to + (range.from - from);
    } else {
      const Result<const uint8_t*> copy = mapped(range.from, range.bytes);
      if (!copy) return copy.status();
      range.from = *copy;
    }
  }
  return add_ranges(ranges, state);
}

// The copy of a group: the first half of what comes, the second half of what leaves.
Status SequenceLink::copy_group(int32_t group) {
  const Group& of = groups_[group];
  const cudaEvent_t* before = nullptr;
  if (!comes_) before = &between_[group];
  if (comes_ && group >= ring()) before = &done_[group - ring()];
  cudaError_t error = cudaSuccess;
  if (before != nullptr) error = cudaStreamWaitEvent(copies_, *before, 0);
  uint8_t* const host = host_ + of.host_byte;
  if (error == cudaSuccess && of.bytes > 0) {
    error = cudaMemcpyAsync(comes_ ? staged(group) : host, comes_ ? host : staged(group),
                            static_cast<size_t>(of.bytes),
                            comes_ ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, copies_);
  }
  if (error == cudaSuccess) {
    error = cudaEventRecord(comes_ ? between_[group] : done_[group], copies_);
  }
  return cuda_status(error, "link");
}

Status SequenceLink::enqueue_group() {
  if (comes_ && !is_there_) {
    if (Status s = copy_group(group_); !s) return s;
  }
  cudaError_t error = cudaSuccess;
  if (comes_) error = cudaStreamWaitEvent(stream_, between_[group_], 0);
  if (!comes_ && group_ >= ring()) {
    error = cudaStreamWaitEvent(stream_, done_[group_ - ring()], 0);
  }
  if (Status s = cuda_status(error, "link"); !s) return s;
  if (Status s = comes_ ? find_checksums() : move_layers(); !s) return s;
  if (Status s = comes_ ? move_layers() : find_checksums(); !s) return s;
  error = cudaEventRecord(comes_ ? done_[group_] : between_[group_], stream_);
  if (Status s = cuda_status(error, "link"); !s) return s;
  const int32_t ahead = group_ + (comes_ ? ring() : 0);
  ++group_;
  moves_.clear();
  const bool copies = comes_ ? is_there_ && ahead < static_cast<int32_t>(groups_.size()) : true;
  return copies ? copy_group(ahead) : Status::ok();
}

Status SequenceLink::wait_for(int32_t layer) const {
  return cuda_status(cudaEventSynchronize(done_[group_of_[layer]]), "link");
}

Status SequenceLink::finish() {
  if (device_fault_ == nullptr) return Status::ok();
  cudaError_t error =
      cudaMemcpyAsync(&fault_, device_fault_, sizeof(fault_), cudaMemcpyDeviceToHost, stream_);
  for (const cudaStream_t stream : {stream_, copies_}) {
    const cudaError_t waited = cudaStreamSynchronize(stream);
    if (error == cudaSuccess) error = waited;
  }
  return cuda_status(error, "link");
}

}  // namespace tierkv::store

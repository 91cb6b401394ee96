// SPDX-License-Identifier: Apache-2.0
// The layers of one sequence on their way between a pool in device memory and pinned host memory.
// Kernels gather layers in device memory, or scatter them from there, and find the checksums of
// their parts, while one copy carries other layers at the speed of the link. Small layers go
// together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "store/place/device/link_kernels.cuh"
#include "store/rows/device_memory.cuh"
#include "store/rows/row_format.h"
#include "tierkv/status.h"

namespace tierkv::store {

using PinnedMemory = std::shared_ptr<void>;
// Mapped, so that kernels read it. kOutOfMemory.
Result<PinnedMemory> pinned_memory(int64_t bytes);
// By both ends; the rest is the caller's promise (tierkv/kv_store.h).
bool is_pinned(const uint8_t* from, int64_t bytes);

class SequenceLink {
 public:
  // kOutOfMemory, kCuda.
  static Result<std::unique_ptr<SequenceLink>> make(const DeviceStoreView& view,
                                                    cudaStream_t stream);
  ~SequenceLink();

  // Before the layers of a sequence, which then come in their order; the one before is finished.
  // part_bytes: of all its parts (SequenceSource), which lie one behind the other in pinned memory.
  // is_there: that memory holds what comes already, and keeps it until finish(); the first copies
  // are then under way. Copies to the device on other streams may wait for them, so whoever needs
  // host memory there before finish() has kernels read it. kOutOfMemory, kCuda.
  Status begin(std::span<const int64_t> part_bytes, uint8_t* host, bool comes, bool is_there);
  // Pinned memory of that size that stays until more is asked for: what other memory goes through.
  Result<uint8_t*> host_memory(int64_t bytes);
  // A copy of this in memory that kernels read, until the next begin().
  Result<const uint8_t*> mapped(const void* from, int64_t bytes);
  // bodies: [num_kv_heads].
  Status send(int32_t slot, LayerTokens at, std::span<const ExportedBody> bodies);
  // `from`: where the caller has the layer's parts, whose ranges come over the link; what ranges
  // find elsewhere is copied. state: of the layer, in pinned memory that stays until finish().
  Status receive(int32_t slot, LayerTokens at, const uint8_t* from, PageRanges ranges,
                 const PageRange& state);
  // The layers before this one are enqueued; where they come, what the stream does next finds them.
  int32_t end_layer() const { return group_ == 0 ? 0 : groups_[group_ - 1].end_layer; }
  // Where kernels that look at what came tell the least import_fault() until finish(). Device
  // memory.
  int32_t* device_fault() const { return device_fault_; }
  // Until a layer is in host memory, after all were sent. Any thread.
  Status wait_for(int32_t layer) const;
  // Waits for all that was enqueued.
  Status finish();

  // Afterwards: the checksum of a part, 0 where it is shorter than the device takes; and what is
  // wrong with the numbers that came in.
  uint64_t checksum(int64_t part) const { return checksums_[part]; }
  Status fault() const { return import_status(fault_); }

 private:
  SequenceLink(const DeviceStoreView& view, cudaStream_t stream) : view_(view), stream_(stream) {}

  struct Group {
    int32_t first_layer = 0, end_layer = 0;
    int64_t bytes = 0, blocks = 0;
    int64_t host_byte = 0;
  };
  Status make_groups(std::span<const int64_t> part_bytes);
  Status allocate();
  // `count` of T in mapped memory that stays until the next begin().
  template <class T>
  Result<T*> take(int64_t count);
  // Takes the next layer; returns its parts, by their places in the group.
  const ChecksumChunk* join(int32_t slot, LayerTokens at);
  // Sets what the layer that has joined moves, and enqueues its group where it is the last one.
  Status add_ranges(const PageRanges& ranges, const PageRange& last);
  Status enqueue_group();
  Status copy_group(int32_t group);
  Status move_layers() const;
  Status find_checksums() const;
  int32_t ring() const { return static_cast<int32_t>(staged_.size()); }
  uint8_t* staged(int32_t group) const { return staged_[group % ring()]; }
  int64_t parts_of_layer() const { return int64_t{2} * view_.num_kv_heads; }

  DeviceStoreView view_;
  cudaStream_t stream_, copies_ = nullptr;
  std::unique_ptr<DeviceMemory> memory_;
  int64_t staged_bytes_ = 0, num_sums_ = 0;
  std::vector<uint8_t*> staged_;  // groups whose bytes are staged at once
  uint64_t* sums_ = nullptr;
  int32_t* device_fault_ = nullptr;
  ChecksumChunk* device_parts_ = nullptr;    // parts_
  std::vector<cudaEvent_t> between_, done_;  // [groups]: the second half may begin; both are over
  std::vector<std::pair<PinnedMemory, int64_t>> lists_;
  size_t list_ = 0;         // that is being filled
  int64_t list_bytes_ = 0;  // of it
  PinnedMemory host_memory_;
  int64_t host_bytes_ = 0;

  // About the sequence that is being moved.
  uint8_t* host_ = nullptr;
  bool comes_ = false, is_there_ = false;
  ChecksumChunk* parts_ = nullptr;  // [parts], by their places in a group; pinned
  uint64_t* checksums_ = nullptr;   // [parts], mapped
  std::vector<Group> groups_;
  std::vector<int32_t> group_of_;  // [layers]
  int32_t layer_ = 0, group_ = 0;  // the next, and its group
  std::vector<LinkLayer> moves_;   // the layers of the group that is being filled
  int32_t fault_ = kNoImportFault;
};

}  // namespace tierkv::store

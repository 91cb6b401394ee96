// SPDX-License-Identifier: Apache-2.0
// The layers of one sequence on their way between a pool in device memory and pinned host memory.
// Kernels gather a layer's parts in device memory, or scatter them from there, and find their
// checksums, while one copy carries another layer at the speed of the link.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "store/place/device/link_kernels.cuh"
#include "store/rows/device_memory.cuh"
#include "store/rows/row_format.h"
#include "tierkv/status.h"

namespace tierkv::store {

using PinnedMemory = std::shared_ptr<void>;
// Mapped, so that kernels read it. kOutOfMemory.
Result<PinnedMemory> pinned_memory(int64_t bytes);
bool is_pinned(const uint8_t* from, int64_t bytes);

struct LinkLayer {
  // Pinned: the layer's parts (SequenceSource), one behind the other.
  uint8_t* host = nullptr;
  std::span<const int64_t> part_bytes;  // [2 * num_kv_heads]
  int32_t slot = 0, layer = 0;
  LayerTokens at;
};

// Layers are numbered in the order in which they are given.
class SequenceLink {
 public:
  // kOutOfMemory, kCuda.
  static Result<std::unique_ptr<SequenceLink>> make(const DeviceStoreView& view,
                                                    cudaStream_t stream);
  ~SequenceLink();

  // Before the layers of a sequence, each of `layer_bytes` at most. Waits. kOutOfMemory, kCuda.
  Status begin(int32_t num_layers, int32_t parts_of_layer, int64_t layer_bytes);
  // Pinned memory that stays until the next begin(): what callers' memory goes through that is not.
  Result<uint8_t*> host_memory(int64_t bytes);
  Status send(const LinkLayer& layer, std::span<const ExportedBody> bodies);
  // `from`: where the caller has the layer's parts, whose ranges come over the link; what ranges
  // find elsewhere is copied.
  Status receive(const LinkLayer& layer, const uint8_t* from, const PageRanges& ranges,
                 bool can_prune);
  // Until a layer that was sent is in host memory. Any thread.
  Status wait_for(int32_t layer) const;
  // Waits for all layers.
  Status finish();

  // Afterwards: the checksum of a part, 0 where it is shorter than the device takes; and what is
  // wrong with the numbers that came in.
  uint64_t checksum(int64_t part) const { return checksums_[part]; }
  Status fault() const { return import_status(fault_kind_, fault_layer_); }

 private:
  using Event = std::shared_ptr<void>;
  SequenceLink(const DeviceStoreView& view, cudaStream_t stream) : view_(view), stream_(stream) {}

  // `count` of T in mapped memory that stays until the next begin().
  template <class T>
  Result<T*> take(int64_t count);
  Status order(cudaStream_t before, const Event& event, cudaStream_t after) const;
  // The staged bytes of the next layer, and its parts there.
  struct Staged {
    uint8_t* bytes = nullptr;
    ChecksumChunk* parts = nullptr;
    int64_t size = 0;
  };
  Result<Staged> stage(const LinkLayer& layer);
  Status move_raw(const LinkLayer& layer, const Staged& staged, bool comes, bool can_prune) const;
  Status copy_ranges(const std::vector<LinkRange>& ranges);
  Status find_checksums(const LinkLayer& layer, const Staged& staged) const;

  DeviceStoreView view_;
  cudaStream_t stream_, copies_ = nullptr;
  std::unique_ptr<DeviceMemory> memory_;
  int64_t layer_bytes_ = 0, num_blocks_ = 0;
  uint8_t* staged_[2] = {};
  uint64_t* sums_ = nullptr;
  int32_t* device_fault_ = nullptr;
  std::vector<Event> staged_events_, done_events_;  // [num_layers]
  std::vector<std::pair<PinnedMemory, int64_t>> lists_;
  size_t list_ = 0;         // that is being filled
  int64_t list_bytes_ = 0;  // of it
  PinnedMemory host_;
  int64_t host_bytes_ = 0;
  uint64_t* checksums_ = nullptr;  // mapped, [parts]
  int32_t layer_ = 0;              // the next
  ImportFault fault_kind_ = ImportFault::kNone;
  int32_t fault_layer_ = 0;
};

}  // namespace tierkv::store

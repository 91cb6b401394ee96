// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/rungs/kv_as_a_kernel.cuh"
#include "bench/baselines/rungs/rung_kernel.h"

namespace tierkv {
namespace {

constexpr int32_t kSlotAlignment = 128;

template <Loads kLoads, Sharing kSharing, Merge kMerge>
RungKernel kernel_of(const RungShape& shape) {
  RungKernel k;
  k.kernel = kv_as_a_kernel<kLoads, kSharing, kMerge>;
  k.threads = kKvThreads;
  k.chunk_tiles = kAnyTiles;
  k.merges = kMerge == Merge::kLastToArrive;
  const KvShared without_rings = kv_shared(kLoads, shape.group, 0);
  const int32_t room = shape.device_shared_bytes - (without_rings.bytes - without_rings.full);
  const int32_t stride = room / (kKvWarps * kv_slots(kLoads));
  const int32_t most = (stride - kv_slot_stride(kLoads, 0)) / kSlotAlignment * kSlotAlignment;
  const int32_t page = ceil_div(shape.page_bytes, kSlotAlignment) * kSlotAlignment;
  k.slot_bytes = smaller(most, page);
  k.shared_bytes = kv_shared(kLoads, shape.group, k.slot_bytes).bytes;
  return k;
}

}  // namespace

RungKernel kv_as_a_rung(Rung rung, const RungShape& shape) {
  switch (rung) {
    case Rung::kSyncLoads:
      return kernel_of<Loads::kThroughRegisters, Sharing::kWarpItems, Merge::kLastToArrive>(shape);
    case Rung::kCtaRounds:
      return kernel_of<Loads::kBulkCopies, Sharing::kCtaRounds, Merge::kLastToArrive>(shape);
    case Rung::kSecondMerge:
      return kernel_of<Loads::kBulkCopies, Sharing::kWarpItems, Merge::kSecondKernel>(shape);
    case Rung::kFixedSplit:
      return kernel_of<Loads::kBulkCopies, Sharing::kWarpItems, Merge::kLastToArrive>(shape);
    default:
      return kernel_of<Loads::kBulkCopies, Sharing::kCtaRounds, Merge::kSecondKernel>(shape);
  }
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// The fast form of block_checksum(), compiled once per instruction set and chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/host/coded/block_checksum.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "codec/format/coded_block_format.h"

HWY_BEFORE_NAMESPACE();
namespace tierkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Prefix sums of the words 4 g + j, j = 0..3, and their sums, in 64 bits each.
uint16_t checksum(const uint8_t* block, int32_t bytes) {
#if HWY_TARGET == HWY_SCALAR
  return block_checksum(block, bytes);
#else
  const hn::CappedTag<uint64_t, 4> d64;
  constexpr int32_t kLanes = static_cast<int32_t>(hn::MaxLanes(d64));
  const hn::Rebind<uint32_t, decltype(d64)> d32;
  constexpr int32_t kParts = 4 / kLanes;
  using V = hn::Vec<decltype(d64)>;
  V prefix[kParts], sum[kParts];
  for (int32_t p = 0; p < kParts; ++p) prefix[p] = sum[p] = hn::Zero(d64);
  for (int32_t i = 0; i < bytes; i += kBlockAlignment) {
    for (int32_t p = 0; p < kParts; ++p) {
      const auto* words = reinterpret_cast<const uint32_t*>(block + i) + p * kLanes;
      prefix[p] = hn::Add(prefix[p], hn::PromoteTo(d64, hn::LoadU(d32, words)));
      sum[p] = hn::Add(sum[p], prefix[p]);
    }
  }
  ChecksumSums sums;
  for (int32_t p = 0; p < kParts; ++p) {
    hn::StoreU(prefix[p], d64, sums.prefix + p * kLanes);
    hn::StoreU(sum[p], d64, sums.sum + p * kLanes);
  }
  return finish_checksum(sums, block, bytes);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace tierkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tierkv {

HWY_EXPORT(checksum);

uint16_t block_checksum_fast(const uint8_t* block, int32_t bytes) {
  return HWY_DYNAMIC_DISPATCH(checksum)(block, bytes);
}

}  // namespace tierkv
#endif

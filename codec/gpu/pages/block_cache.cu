// SPDX-License-Identifier: Apache-2.0
#include "codec/format/block_cache.h"

#include "codec/format/head_dim.h"
#include "codec/gpu/pages/block_decode.cuh"
#include "codec/gpu/pages/block_tiles.cuh"
#include "gpu/launch.cuh"

namespace tierkv {
namespace {

constexpr int32_t kMaxRanges = 65535;  // of a grid's second dimension

// Fewer tokens may be a decode step, whose tokens fill no tiles.
constexpr int64_t kMinTileTokens = 512;

template <int32_t kDim>
Status encode_tiles(const SlotEncode& e, GpuStream stream) {
  const int64_t windows = (e.count + kWindowTokens - 1) / kWindowTokens;
  const auto ctas = static_cast<uint32_t>(windows * e.cache.num_kv_heads);
  return launch_kernel(encode_tiles_kernel<kDim>, ctas, kBlockThreads, kTilesSharedBytes<kDim>,
                       stream, e);
}

template <int32_t kDim>
Status decode_tiles(const BlockDecode& d, GpuStream stream) {
  const dim3 grid(ctas_for(decode_warps(d), kBlockDecodeWarps), static_cast<uint32_t>(d.count));
  const size_t shared = kBlockDecodeWarps * kBlockDecodeWarpBytes<kDim>;
  return launch_kernel(decode_blocks_kernel<kDim>, grid, kBlockDecodeThreads, shared, stream, d);
}

}  // namespace

Status encode_slots(const SlotEncode& e, GpuStream stream) {
  if (Status s = e.validate(); !s) return s;
  if (e.count == 0) return Status::ok();
  const bool by_tiles = e.count >= kMinTileTokens && has_aligned_rows(e);
  return with_head_dim(e.cache.layout.head_dim(), [&](auto dim) {
    if (by_tiles) return encode_tiles<dim>(e, stream);
    const uint32_t ctas = ctas_for(e.count * e.cache.num_kv_heads, kBlockWarps * kWarpTokens<dim>);
    return launch_kernel(encode_slots_kernel<dim>, ctas, kBlockThreads, 0, stream, e);
  });
}

Status decode_blocks(const BlockDecode& d, GpuStream stream) {
  if (Status s = d.validate(); !s) return s;
  if (d.count == 0 || d.max_tokens == 0) return Status::ok();
  if (d.count > kMaxRanges) {
    return Status(StatusCode::kInvalidArgument, "a call decodes at most 65535 ranges");
  }
  return with_head_dim(d.cache.layout.head_dim(),
                       [&](auto dim) { return decode_tiles<dim>(d, stream); });
}

}  // namespace tierkv

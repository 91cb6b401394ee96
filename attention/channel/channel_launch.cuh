// SPDX-License-Identifier: Apache-2.0
// The launches of attention over channel blocks.
#pragma once

#include "attention/channel/channel_kernel.cuh"
#include "gpu/launch.cuh"

namespace tierkv {

// num_items > 0; joins: rows may have several.
template <class Cache>
Status launch_channel(const ChannelLaunch<Cache>& p, int32_t num_items, bool joins,
                      GpuStream stream) {
  const int32_t head_dim = p.cache.layout.head_dim();
  const auto ctas = static_cast<uint32_t>(num_items) * static_cast<uint32_t>(p.ctas.groups);
  const int32_t bytes = channel_cta_bytes(head_dim, p.ctas.passes);
  const Status s = launch_after_previous(channel_kernel<Cache>(p.cache.layout), ctas,
                                         32 * p.ctas.warps, bytes, stream, p);
  if (!s || !joins) return s;
  const int64_t tasks =
      int64_t{p.num_rows} * p.ctas.all_columns() * slices_of(head_dim, kChannelJoinDims);
  const auto join_ctas = static_cast<uint32_t>((tasks + kChannelJoinWarps - 1) / kChannelJoinWarps);
  return launch_after_previous(join_channel_kernel, join_ctas, 32 * kChannelJoinWarps, 0, stream,
                               channel_join(p));
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "attention/channel/channel_plan.h"

#include <string>

namespace tierkv {
namespace {

int32_t ceil_of(int64_t a, int64_t b) {
  return static_cast<int32_t>((a + b - 1) / b);
}

}  // namespace

ChannelCtas channel_ctas(int32_t group, int32_t q_len, int32_t num_kv_heads, int32_t head_dim) {
  ChannelCtas ctas;
  ctas.columns.group = group;
  ctas.columns.q_len = q_len;
  ctas.columns.num_kv_heads = num_kv_heads;
  ctas.columns.passes = ceil_of(group * q_len, kBlockColumns);
  ctas.columns.of_row = ceil_of(group * q_len, ctas.columns.passes);
  const int32_t most = head_dim > 128 ? kChannelWarps / 2 : kChannelWarps;
  ctas.groups = ceil_of(ctas.columns.passes, most);
  ctas.passes = ceil_of(ctas.columns.passes, ctas.groups);
  ctas.team = kChannelWarps / ctas.passes;
  ctas.warps = ctas.team * ctas.passes;
  return ctas;
}

// Rounds of resident CTAs times what a warp of one does.
int32_t choose_channel_splits(const ChannelCtas& ctas, const ChannelRows& rows,
                              int32_t resident_ctas) {
  int32_t best = 1;
  int64_t least = INT64_MAX;
  for (int32_t splits = 1; splits <= rows.most_splits; ++splits) {
    const int64_t ctas_here = int64_t{rows.num_rows} * splits * ctas.groups;
    const int64_t rounds = ceil_of(ctas_here, resident_ctas);
    const int64_t of_warp = ceil_of(ceil_of(rows.units, splits), ctas.team);
    if (rounds * of_warp >= least) continue;
    least = rounds * of_warp;
    best = splits;
  }
  return best;
}

Status validate_channel_group(int32_t group) {
  if (group < 1) return Status(StatusCode::kInvalidArgument, "group must be positive");
  if (group <= kMaxChannelGroup) return Status::ok();
  return Status(
      StatusCode::kUnsupported,
      "groups of more than " + std::to_string(kMaxChannelGroup) + " q heads over channel blocks");
}

}  // namespace tierkv

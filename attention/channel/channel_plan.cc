// SPDX-License-Identifier: Apache-2.0
#include "attention/channel/channel_plan.h"

#include <algorithm>

namespace tierkv {
namespace {

constexpr double kItemShare =
    1;  // units of a warp that an item's beginning and end take as long as
constexpr int32_t kMostRounds = 8;

Status invalid(const char* why) {
  return Status(StatusCode::kInvalidArgument, why);
}

int32_t ceil_of(int64_t a, int64_t b) {
  return static_cast<int32_t>((a + b - 1) / b);
}

// For rows of any lengths: the last item of each is smaller than the others by half of one.
int32_t choose_ragged_items(double shares, int32_t num_rows, int32_t most, int32_t resident) {
  int32_t best = num_rows;
  double least = INFINITY;
  for (int32_t rounds = 1; rounds <= kMostRounds; ++rounds) {
    const int32_t items = std::min(rounds * resident, most);
    if (items < num_rows) continue;
    const double share = std::max(1.0, shares / (items - 0.5 * num_rows));
    const double cost = rounds * (share + kItemShare);
    if (cost >= least) continue;
    least = cost;
    best = items;
  }
  return best;
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

int32_t choose_channel_items(const ChannelCtas& ctas, const ChannelLengths& lengths,
                             int32_t num_rows, int32_t resident_ctas) {
  if (num_rows == 0) return 0;
  const int32_t most = ctas.most_items(num_rows);
  const double units = static_cast<double>(lengths.units) * ctas.columns.num_kv_heads;
  if (units * 16 >= static_cast<double>(lengths.most) * num_rows * 15) {
    const ChannelRows rows = {num_rows, lengths.most, most / num_rows};
    return num_rows * choose_channel_splits(ctas, rows, resident_ctas);
  }
  const double shares = units / ctas.team;
  const double all = std::min(static_cast<double>(most), num_rows + std::ceil(shares));
  return choose_ragged_items(shares, num_rows, static_cast<int32_t>(all),
                             std::max(1, resident_ctas / ctas.groups));
}

Status validate_channel_plan(const ChannelPlanCall& c) {
  if (c.num_sequences < 0 || c.num_kv_heads < 1 || c.num_table_rows < 0) {
    return invalid("a count is negative");
  }
  if (c.team < 1 || c.most_blocks < 0 || c.most_raw_tokens < 0 || c.least_raw_tokens < 0) {
    return invalid("a count of the plan is negative");
  }
  if (int64_t{c.num_sequences} * c.num_kv_heads > c.plan.num_items) {
    return invalid("the plan has less than an item for each row");
  }
  if (int64_t{c.most_blocks} + c.most_raw_tokens / kTileTokens > INT32_MAX / 8) {
    return invalid("a sequence may be too long");
  }
  if (c.num_sequences == 0) return Status::ok();
  if (c.sequences == nullptr || c.status == nullptr || c.plan.parts == nullptr ||
      c.plan.items == nullptr || reinterpret_cast<uintptr_t>(c.plan.items) % 16 != 0) {
    return invalid("sequences, status, items or parts is null, or items misaligned");
  }
  return Status::ok();
}

}  // namespace tierkv

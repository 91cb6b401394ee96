// SPDX-License-Identifier: Apache-2.0
// Joining two finished partial results (merge_attention() of tierkv/attention.h), or a result and
// learned sinks, which are parts without values (apply_sinks()): what host and device share.
#pragma once

#include "attention/core/online_softmax.h"
#include "tierkv/attention.h"

namespace tierkv {

// Weights of the two parts of a row, which add up to 1; both 0 where neither has tokens.
struct MergedRow {
  float a, b;
  float lse;
};

TKV_HD MergedRow merge_row(float lse_a, float lse_b) {
  const SoftmaxState a = state_of_lse(lse_a), b = state_of_lse(lse_b), whole = join(a, b);
  const float scale = output_scale(whole);
  return {share(a, whole) * scale, share(b, whole) * scale, natural_lse(whole)};
}

// A part without tokens is not looked at: its output may be anything.
TKV_HD float merge_value(const MergedRow& row, float a, float b) {
  return (row.a == 0.0f ? 0.0f : row.a * a) + (row.b == 0.0f ? 0.0f : row.b * b);
}

// A validated call as a merge. Where the second part is sinks, `b` has no output, and its lse holds
// one number for each head.
struct PartsMerge {
  MergeCall call;
  int32_t heads = 0;  // that have sinks; 0: b has an lse for every row
};
// kInvalidArgument, kUnsupported with the field's name.
Result<PartsMerge> parts_merge(const MergeCall& call);
Result<PartsMerge> parts_merge(const SinkCall& call);

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/channel/channel_attention.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "attention/channel/channel_plan.h"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

// Token t of a row as it was stored; the row is sound.
void read_token(const ChannelCache& cache, int32_t row, int32_t t, Component c, double* x) {
  const ChannelLayout& l = cache.layout;
  const bool in_block = t < cache.block_count[row] * l.tokens;
  for (int32_t d = 0; d < l.head_dim(); ++d) {
    x[d] = in_block ? channel_value(l, cache.block(cache.block_id(row, t / l.tokens)), c,
                                    t % l.tokens, d)
                    : residual_value(l, cache.residual_of(row), c, t % l.tokens, d);
  }
}

bool is_sound(const ChannelCache& cache, int32_t row) {
  const int32_t blocks = cache.block_count[row], raw = cache.residual_tokens[row];
  if (blocks < 0 || blocks > cache.max_blocks || raw < 0 || raw >= cache.layout.tokens) {
    return false;
  }
  for (int32_t b = 0; b < blocks; ++b) {
    if (cache.block_id(row, b) < 0) return false;
  }
  return true;
}

void attend_head(const ChannelCache& cache, const ChannelAttention& call, int32_t row, int32_t head,
                 ChannelOutput* output) {
  const int32_t dim = cache.layout.head_dim();
  const int32_t tokens = cache.block_count[row] * cache.layout.tokens + cache.residual_tokens[row];
  const int64_t at = static_cast<int64_t>(row) * call.group + head;
  std::vector<double> x(dim), logits(tokens);
  double most = -INFINITY, sum = 0;
  for (int32_t t = 0; t < tokens; ++t) {
    read_token(cache, row, t, Component::kKey, x.data());
    for (int32_t d = 0; d < dim; ++d) logits[t] += x[d] * half_to_float(call.q[at * dim + d]);
    logits[t] *= call.sm_scale;
    most = std::max(most, logits[t]);
  }
  double* out = output->out.data() + at * dim;
  for (int32_t t = 0; t < tokens; ++t) {
    const double p = std::exp(logits[t] - most);
    sum += p;
    read_token(cache, row, t, Component::kValue, x.data());
    for (int32_t d = 0; d < dim; ++d) out[d] += p * x[d];
  }
  for (int32_t d = 0; d < dim; ++d) out[d] = tokens == 0 ? 0 : out[d] / sum;
  output->lse[at] = tokens == 0 ? -INFINITY : most + std::log(sum);
}

}  // namespace

Status ChannelAttention::validate(const ChannelCache& cache) const {
  if (Status s = cache.validate(); !s) return s.with_context("cache");
  if (Status s = validate_channel_group(group); !s) return s;
  if (!(sm_scale > 0) || !std::isfinite(sm_scale)) return invalid("sm_scale must be positive");
  if (q == nullptr || reinterpret_cast<uintptr_t>(q) % 16 != 0) {
    return invalid("q is null or misaligned");
  }
  return Status::ok();
}

size_t channel_workspace_bytes(const ChannelCache& cache, int32_t group) {
  const ChannelCtas ctas = channel_ctas(group, 1, 1, cache.layout.head_dim());
  const size_t parts = static_cast<size_t>(cache.num_rows) * ctas.all_columns() * kMaxChannelSplits;
  return parts * (8 + static_cast<size_t>(cache.layout.head_dim()) * 4);
}

Result<ChannelOutput> attend_channel_reference(const ChannelCache& cache,
                                               const ChannelAttention& call) {
  if (Status s = call.validate(cache); !s) return s;
  ChannelOutput output;
  const size_t heads = static_cast<size_t>(cache.num_rows) * call.group;
  output.out.assign(heads * cache.layout.head_dim(), 0.0);
  output.lse.assign(heads, -INFINITY);
  for (int32_t row = 0; row < cache.num_rows; ++row) {
    if (!is_sound(cache, row)) {
      return Status(StatusCode::kCorrupt, "row " + std::to_string(row));
    }
    for (int32_t head = 0; head < call.group; ++head) {
      attend_head(cache, call, row, head, &output);
    }
  }
  return output;
}

}  // namespace tierkv

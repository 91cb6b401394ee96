// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/channel/channel_cache.h"

#include <cstring>
#include <string>
#include <vector>

#include "codec/format/sound_halves.h"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}
bool is_aligned(const void* p, uintptr_t to) {
  return reinterpret_cast<uintptr_t>(p) % to == 0;
}

void put_residual(const ChannelLayout& l, uint8_t* residual, Component c, int32_t token,
                  const uint16_t* x) {
  for (int32_t d = 0; d < l.head_dim(); ++d) {
    std::memcpy(residual + residual_byte(l, c, token, d), x + d, 2);
  }
}

using Values = std::vector<float>;  // [tokens, head_dim]

StatusCode append_row(const ChannelCache& cache, int32_t row, const uint16_t* k,
                      const uint16_t* v) {
  const ChannelLayout& l = cache.layout;
  const int32_t dim = l.head_dim(), at = cache.residual_tokens[row];
  if (at < 0 || at >= l.tokens || cache.block_count[row] < 0) return StatusCode::kCorrupt;
  const bool fills = at + 1 == l.tokens;
  const int32_t id = fills ? cache.block_id(row, cache.block_count[row]) : 0;
  if (id < 0) return StatusCode::kOutOfPages;
  if (!are_finite(k, 2 * dim) || !are_finite(v, 2 * dim)) return StatusCode::kNonFinite;
  uint8_t* residual = cache.residual_of(row);
  put_residual(l, residual, Component::kKey, at, k);
  put_residual(l, residual, Component::kValue, at, v);
  cache.residual_tokens[row] = fills ? 0 : at + 1;
  if (!fills) return StatusCode::kOk;
  Values x[2] = {Values(l.tokens * dim), Values(l.tokens * dim)};
  for (int32_t i = 0; i < l.tokens * dim; ++i) {
    x[0][i] = residual_value(l, residual, Component::kKey, i / dim, i % dim);
    x[1][i] = residual_value(l, residual, Component::kValue, i / dim, i % dim);
  }
  encode_channel_block(l, x[0].data(), x[1].data(), cache.block(id));
  ++cache.block_count[row];
  return StatusCode::kOk;
}

StatusCode fill_row(const ChannelCache& cache, const ChannelPrompt& p, int32_t row) {
  const ChannelLayout& l = cache.layout;
  const int32_t sequence = row / p.num_kv_heads, head = row % p.num_kv_heads, dim = l.head_dim();
  const int32_t first = p.indptr[sequence], end = p.indptr[sequence + 1];
  cache.block_count[row] = cache.residual_tokens[row] = 0;
  if (first < 0 || end < first) return StatusCode::kCorrupt;  // before their difference overflows
  const int32_t tokens = end - first, blocks = tokens / l.tokens;
  if (blocks > cache.max_blocks) return StatusCode::kCorrupt;
  const auto token = [&](const uint16_t* x, int32_t t) {
    return x + ((static_cast<int64_t>(first) + t) * p.num_kv_heads + head) * dim;
  };
  for (int32_t b = 0; b < blocks; ++b) {
    if (cache.block_id(row, b) < 0) return StatusCode::kOutOfPages;
  }
  for (int32_t t = 0; t < tokens; ++t) {
    if (!are_finite(token(p.k, t), 2 * dim) || !are_finite(token(p.v, t), 2 * dim)) {
      return StatusCode::kNonFinite;
    }
  }
  Values x[2] = {Values(l.tokens * dim), Values(l.tokens * dim)};
  for (int32_t b = 0; b < blocks; ++b) {
    for (int32_t i = 0; i < l.tokens * dim; ++i) {
      const int32_t t = b * l.tokens + i / dim;
      x[0][i] = half_to_float(token(p.k, t)[i % dim]);
      x[1][i] = half_to_float(token(p.v, t)[i % dim]);
    }
    encode_channel_block(l, x[0].data(), x[1].data(), cache.block(cache.block_id(row, b)));
  }
  for (int32_t t = blocks * l.tokens; t < tokens; ++t) {
    put_residual(l, cache.residual_of(row), Component::kKey, t % l.tokens, token(p.k, t));
    put_residual(l, cache.residual_of(row), Component::kValue, t % l.tokens, token(p.v, t));
  }
  cache.block_count[row] = blocks;
  cache.residual_tokens[row] = tokens % l.tokens;
  return StatusCode::kOk;
}

}  // namespace

float residual_value(const ChannelLayout& l, const uint8_t* residual, Component component,
                     int32_t token, int32_t dim) {
  uint16_t x;
  std::memcpy(&x, residual + residual_byte(l, component, token, dim), 2);
  return half_to_float(x);
}

Status ChannelCache::validate() const {
  TierFormat format = token_wise_tier(layout.k_tile.type.bits(), layout.v_tile.type.bits());
  format.k.unit = Unit::kChannel;
  format.k.group = layout.tokens;
  const Result<ChannelLayout> expected = make_channel_layout(format, layout.head_dim());
  if (!expected || std::memcmp(&*expected, &layout, sizeof(layout)) != 0) {
    return invalid("layout is not one of make_channel_layout()");
  }
  if (num_rows < 0 || max_blocks < 0 || num_blocks < 0) return invalid("a count is negative");
  if (max_blocks > (1 << 24)) return invalid("max_blocks exceeds 2^24");
  if (num_rows == 0) return Status::ok();
  if (pool == nullptr || !is_aligned(pool, 128)) return invalid("pool is null or misaligned");
  if (residual == nullptr || !is_aligned(residual, 16)) {
    return invalid("residual is null or misaligned");
  }
  if (table == nullptr || block_count == nullptr || residual_tokens == nullptr) {
    return invalid("table, block_count or residual_tokens is null");
  }
  return Status::ok();
}

Status append_channel_host(const ChannelCache& cache, const ChannelAppend& append) {
  if (Status s = cache.validate(); !s) return s;
  if (append.k == nullptr || append.v == nullptr || append.status == nullptr) {
    return invalid("k, v or status is null");
  }
  for (int32_t row = 0; row < cache.num_rows; ++row) {
    const int64_t at = static_cast<int64_t>(row) * cache.layout.head_dim();
    append.status[row] = append_row(cache, row, append.k + at, append.v + at);
  }
  return Status::ok();
}

Status fill_channel_host(const ChannelCache& cache, const ChannelPrompt& prompt) {
  if (Status s = cache.validate(); !s) return s;
  if (prompt.k == nullptr || prompt.v == nullptr || prompt.status == nullptr ||
      prompt.indptr == nullptr) {
    return invalid("k, v, indptr or status is null");
  }
  if (prompt.num_kv_heads < 1 || cache.num_rows % prompt.num_kv_heads != 0) {
    return invalid("num_kv_heads");
  }
  for (int32_t row = 0; row < cache.num_rows; ++row) {
    prompt.status[row] = fill_row(cache, prompt, row);
  }
  return Status::ok();
}

}  // namespace tierkv

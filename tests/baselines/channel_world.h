// SPDX-License-Identifier: Apache-2.0
// Caches of channel blocks in host memory, for tests.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "bench/baselines/channel/channel_cache.h"

namespace tierkv::testing {

struct alignas(128) ChannelLine {
  uint8_t bytes[128];
};

inline TierFormat channel_format(int32_t k_bits, int32_t v_bits, int32_t tokens) {
  TierFormat f = token_wise_tier(k_bits, v_bits);
  f.k.unit = Unit::kChannel;
  f.k.group = tokens;
  return f;
}

struct ChannelWorld {
  ChannelLayout layout;
  int32_t num_rows, max_blocks, num_blocks;
  std::vector<ChannelLine> pool, residual;
  std::vector<int32_t> table, block_count, residual_tokens;
  std::vector<StatusCode> status;

  // Blocks lie anywhere in a pool with some to spare, which is poisoned.
  ChannelWorld(std::mt19937* rng, const ChannelLayout& l, int32_t rows, int32_t blocks)
      : layout(l), num_rows(rows), max_blocks(blocks), num_blocks(rows * blocks + 3) {
    pool.resize(static_cast<size_t>(num_blocks) * l.bytes / 128);
    residual.resize(static_cast<size_t>(rows) * residual_bytes(l) / 128);
    std::fill_n(pool.data()->bytes, pool.size() * 128, uint8_t{0xa5});
    std::fill_n(residual.data()->bytes, residual.size() * 128, uint8_t{0});
    std::vector<int32_t> ids(num_blocks);
    for (int32_t i = 0; i < num_blocks; ++i) ids[i] = i;
    std::shuffle(ids.begin(), ids.end(), *rng);
    table.assign(ids.begin(), ids.begin() + rows * blocks);
    block_count.assign(rows, 0);
    residual_tokens.assign(rows, 0);
    status.assign(rows, StatusCode::kOutOfRange);
  }

  ChannelCache cache() {
    ChannelCache c;
    c.layout = layout;
    c.num_rows = num_rows;
    c.max_blocks = max_blocks;
    c.num_blocks = num_blocks;
    c.pool = pool.data()->bytes;
    c.table = table.data();
    c.residual = residual.data()->bytes;
    c.block_count = block_count.data();
    c.residual_tokens = residual_tokens.data();
    return c;
  }
};

// Channels of very different sizes, one far off, as keys have them; fp16.
inline std::vector<uint16_t> channel_values(std::mt19937* rng, int64_t tokens, int32_t head_dim,
                                            float size) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(tokens * head_dim);
  for (int64_t i = 0; i < tokens * head_dim; ++i) {
    const auto d = static_cast<int32_t>(i % head_dim);
    const float spread = size * (0.2f + static_cast<float>(d % 5)), offset = d == 7 ? 8 * size : 0;
    x[i] = float_to_half(offset + spread * normal(*rng));
  }
  return x;
}

}  // namespace tierkv::testing

// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/support/store_configs.h"

#include <gtest/gtest.h>

#include <cmath>

#include "codec/policy/profile.h"
#include "store/engine/engine.h"
#include "store/rows/row_format.h"

namespace tierkv {

void give_pages(int32_t pages, StoreConfig* config) {
  config->memory_bytes = int64_t{1} << 33;
  const auto format = store::make_row_format(*config);
  ASSERT_TRUE(format) << format.status().message();
  const auto layout = store::store_layout(*config, **format);
  ASSERT_TRUE(layout) << layout.status().message();
  const int64_t per_page = layout->page_bytes + 28;
  config->memory_bytes -= (int64_t{layout->allocator.num_pages} - pages) * per_page;
}

StoreConfig make_config(const ConfigChoice& choice) {
  StoreConfig config;
  config.layout.num_layers = choice.num_layers;
  config.layout.num_kv_heads = choice.num_kv_heads;
  config.layout.num_q_heads = choice.num_kv_heads * choice.group;
  config.layout.head_dim = choice.head_dim;
  config.layout.sm_scale = 1 / std::sqrt(choice.head_dim);
  config.rope = {Rope::plain(10000, choice.head_dim)};
  config.max_sequences = choice.max_sequences;
  config.max_tokens = choice.max_tokens;
  config.memory_bytes = int64_t{1} << 40;
  if (choice.with_profile) {
    std::mt19937 rng(1);
    config.profile = random_profile(config.layout, config.rope, &rng);
  }
  give_pages(choice.pages, &config);
  return config;
}

std::shared_ptr<const Profile> random_profile(const CacheLayout& layout,
                                              const std::vector<Rope>& rope, std::mt19937* rng) {
  std::uniform_real_distribution<float> uniform(0, 1);
  auto profile = std::make_shared<Profile>();
  profile->model_id = "random";
  profile->num_layers = layout.num_layers;
  profile->num_q_heads = layout.num_q_heads;
  profile->num_kv_heads = layout.num_kv_heads;
  profile->head_dim = layout.head_dim;
  profile->sm_scale = layout.sm_scale;
  profile->rope = rope;
  for (int32_t r = 0; r < layout.num_layers * layout.num_kv_heads; ++r) {
    RowProfile row;
    for (int32_t d = 0; d < layout.head_dim; ++d) {
      row.key_mean.push_back(uniform(*rng) - 0.5f);
      row.value_mean.push_back(0);
      row.key_mean_before_rope.push_back(uniform(*rng) - 0.5f);
    }
    // Both dims of a pair of halves have the same energy.
    for (int32_t d = 0; d < layout.head_dim / 2; ++d) {
      row.query_energy.push_back(0.25f + uniform(*rng));
    }
    for (int32_t d = 0; d < layout.head_dim / 2; ++d) {
      row.query_energy.push_back(row.query_energy[d]);
    }
    for (const float e : row.query_energy) row.query_trace += static_cast<double>(e);
    row.value_signal = layout.head_dim;
    row.key_scale = 0.5 + static_cast<double>(uniform(*rng));
    row.value_scale = 0.5 + static_cast<double>(uniform(*rng));
    profile->rows.push_back(row);
  }
  if (uniform(*rng) < 0.2f) {
    for (RowProfile& row : profile->rows) row.query_energy.clear();
  }
  if (uniform(*rng) < 0.5f) profile->key_sensitivity.assign(profile->rows.size(), 1.0);
  return profile;
}

StoreConfig random_config(std::mt19937* rng) {
  const auto pick = [&](int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(*rng);
  };
  ConfigChoice choice;
  const int32_t dims[] = {64, 64, 96, 128, 256};
  choice.head_dim = dims[pick(0, 4)];
  choice.num_kv_heads = pick(1, choice.head_dim > 96 ? 1 : 3);
  choice.group = pick(1, 4);
  choice.num_layers = pick(1, 2);
  choice.max_sequences = pick(1, 4);
  choice.max_tokens = pick(300, 900);
  choice.pages = pick(0, 1) == 0 ? pick(3, 30) : 400;
  StoreConfig config = make_config(choice);
  config.layout.dtype = pick(0, 1) == 0 ? DType::kFloat16 : DType::kBFloat16;
  config.sink_tokens = pick(0, 2) == 0 ? pick(0, 16) : pick(0, 3) == 0 ? 16 : 4;
  config.window_tokens = pick(0, 2) == 0 ? pick(8, 100) : 8;
  if (pick(0, 3) == 0) config.rope.clear();
  if (pick(0, 3) == 0) config.raw_layers = {config.layout.num_layers - 1};
  if (pick(0, 2) == 0) {
    config.profile = random_profile(config.layout, config.rope, rng);
  }
  if (pick(0, 3) == 0) {
    const int32_t block = choice.head_dim < 256 && pick(0, 1) == 0 ? 128 : 64;
    config.format = ChannelFormat{2 * pick(1, 2), 2 * pick(1, 2), block};
    give_pages(choice.pages, &config);
    return config;
  }
  auto& format = std::get<CodedFormat>(config.format);
  // Pages that blocks of two kv_heads fill exactly.
  if (choice.head_dim == 64 && choice.num_kv_heads == 2) config.page_bytes = pick(0, 1) * 8448;
  format.unit_tokens = 16 << pick(0, 2);
  format.key_books = pick(1, 4);
  format.max_length = pick(8, 11);
  format.streams_per_lane = pick(1, 2);
  give_pages(choice.pages, &config);
  return config;
}

}  // namespace tierkv

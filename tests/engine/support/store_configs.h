// SPDX-License-Identifier: Apache-2.0
// Configs and profiles of small stores, chosen or random.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "tierkv/kv_store.h"

namespace tierkv {

struct ConfigChoice {
  int32_t head_dim = 64, num_kv_heads = 2, group = 2, num_layers = 2;
  int32_t max_sequences = 4, max_tokens = 700;
  int32_t pages = 200;
  bool with_profile = false;
};
// Sets memory_bytes.
void give_pages(int32_t pages, StoreConfig* config);
StoreConfig make_config(const ConfigChoice& choice);
StoreConfig random_config(std::mt19937* rng);
// Means, energies and head scales of a shape; random.
std::shared_ptr<const Profile> random_profile(const CacheLayout& layout,
                                              const std::vector<Rope>& rope, std::mt19937* rng);

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// Random caches on the device for the attention benchmark: a pool filled with plausible pages, and
// page tables of several disjoint sets of sequences over it, so that replays find none of their
// pages in L2.
#pragma once

#include <random>
#include <vector>

#include "attention/core/workspace.h"
#include "bench/gpu/gpu_timing.cuh"
#include "tierkv/attention.h"

namespace tierkv::bench {

// Tokens of every row of one sequence, by tier.
struct SequenceTokens {
  int32_t tier[kMaxAttentionTiers] = {0, 0, 0};
};

struct CacheShape {
  AttentionConfig config;
  std::vector<SequenceTokens> sequences;
  bool contiguous = false;  // pages of a row one after another, otherwise at random
};

__device__ inline uint32_t hash_word(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x ^ x >> 33);
}
__device__ inline float unit_float(uint64_t x) {
  return static_cast<float>(hash_word(x) >> 8) * 0x1p-24f;
}
__device__ inline uint32_t half_pair(float low, float high) {
  return float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
}

// A word of a component's segments: random codes, ranges of 2 to 5 around 0, raw values in [-2, 2).
__device__ inline uint32_t code_word(int32_t bits, uint64_t i) {
  if (bits != 16) return hash_word(i);
  return half_pair(4 * unit_float(2 * i) - 2, 4 * unit_float(2 * i + 1) - 2);
}
__device__ inline uint32_t metadata_word(int32_t bits, uint64_t i) {
  const float range = 2 + 3 * unit_float(2 * i), middle = 0.6f * (unit_float(2 * i + 1) - 0.5f);
  return half_pair(range / static_cast<float>((1 << bits) - 1), middle - range / 2);
}

struct FillParams {
  uint8_t* pool;               // [num_pages][page_bytes]
  const int32_t* page_layout;  // [num_pages]
  int64_t page_bytes;
  int32_t num_pages;
  PageLayout layouts[kMaxAttentionClasses * kMaxAttentionTiers];  // by class, then tier
};

// One CTA per page.
__global__ void fill_pages(const __grid_constant__ FillParams p) {
  const PageLayout& layout = p.layouts[p.page_layout[blockIdx.x]];
  auto* page = reinterpret_cast<uint32_t*>(p.pool + blockIdx.x * p.page_bytes);
  for (int32_t byte = 4 * threadIdx.x; byte < layout.scores; byte += 4 * blockDim.x) {
    const uint64_t i = blockIdx.x * static_cast<uint64_t>(p.page_bytes) + byte;
    uint32_t word;
    if (byte < layout.k_metadata) {
      word = code_word(layout.k_tile.type.bits(), i);
    } else if (byte < layout.v_codes) {
      word = metadata_word(layout.k_tile.type.bits(), i);
    } else if (byte < layout.v_metadata) {
      word = code_word(layout.v_tile.type.bits(), i);
    } else {
      word = metadata_word(layout.v_tile.type.bits(), i);
    }
    page[byte / 4] = word;
  }
}

class Cache {
 public:
  Cache(const CacheShape& shape, uint8_t* pool, int64_t pool_bytes, int min_sets,
        int64_t cold_bytes, cudaStream_t stream);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  int sets() const { return static_cast<int>(tables_.size()); }
  int64_t bytes() const { return bytes_; }  // attention must read, of one set
  PageTableView table(int set) const { return tables_[set]; }
  PageView pages() const { return pages_; }

 private:
  template <class T>
  T* upload(const std::vector<T>& from) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, from.size() * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(memory, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
    owned_.push_back(memory);
    return static_cast<T*>(memory);
  }

  std::vector<PageTableView> tables_;
  std::vector<void*> owned_;
  PageView pages_;
  int64_t bytes_ = 0;
};

inline Cache::~Cache() {
  for (void* memory : owned_) cudaFree(memory);
}

inline Cache::Cache(const CacheShape& shape, uint8_t* pool, int64_t pool_bytes, int min_sets,
                    int64_t cold_bytes, cudaStream_t stream) {
  const AttentionConfig& config = shape.config;
  FillParams fill{};
  PageTableShape table;
  table.num_sequences = static_cast<int32_t>(shape.sequences.size());
  table.rows_per_sequence = config.num_kv_heads;
  int64_t pages_per_set = 0;
  const auto layout_index = [&](int32_t row, int32_t tier) {
    const int32_t head_class = head_class_of(config, 0, row % config.num_kv_heads);
    return head_class * kMaxAttentionTiers + tier;
  };
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    for (int32_t c = 0; c < config.classes.count; ++c) {
      fill.layouts[c * kMaxAttentionTiers + t] = *tier_layout(config, t, c);
    }
    const int32_t side = config.tiers[t].side;
    table.num_sides = std::max(table.num_sides, side + 1);
    table.tokens_per_page[side] = fill.layouts[t].tokens;
    int32_t most = 1;
    for (int32_t row = 0; row < table.num_rows(); ++row) {
      const PageLayout& layout = fill.layouts[layout_index(row, t)];
      const int32_t tokens = shape.sequences[row / config.num_kv_heads].tier[t];
      most = std::max(most, pages_for(tokens, layout.tokens));
      pages_per_set += pages_for(tokens, layout.tokens);
      const int64_t tile_bytes = layout.scores / layout.tiles();
      bytes_ += tile_bytes * pages_for(tokens, kTileTokens);
    }
    table.table_slots[side / 2] += most;
  }
  const auto num_pages = static_cast<int32_t>(pool_bytes / config.page_bytes);
  const int64_t wanted = std::max<int64_t>(min_sets, (cold_bytes + bytes_ - 1) / bytes_);
  const auto sets = static_cast<int>(std::min(wanted, num_pages / pages_per_set));
  if (sets < min_sets) {
    std::fprintf(stderr, "the pool holds %d sets, %d are needed\n", sets, min_sets);
    std::exit(1);
  }
  std::vector<int32_t> ids(num_pages), page_layout(num_pages, 0);
  for (int32_t i = 0; i < num_pages; ++i) ids[i] = i;
  std::mt19937_64 rng(std::random_device{}());
  if (!shape.contiguous) std::shuffle(ids.begin(), ids.end(), rng);
  size_t next = 0;
  for (int set = 0; set < sets; ++set) {
    std::vector<int32_t> slots(static_cast<size_t>(table.num_rows()) * table.row_stride(), kNoPage);
    std::vector<SideCounts> tokens(table.num_rows());
    for (int32_t row = 0; row < table.num_rows(); ++row) {
      for (int32_t t = 0; t < config.num_tiers; ++t) {
        const int32_t side = config.tiers[t].side;
        const int32_t n = shape.sequences[row / config.num_kv_heads].tier[t];
        tokens[row].of[side] = n;
        const int32_t layout = layout_index(row, t);
        for (int32_t i = 0; i < pages_for(n, fill.layouts[layout].tokens); ++i) {
          page_layout[ids[next]] = layout;
          slots[static_cast<size_t>(row) * table.row_stride() + table.slot_of(side, i)] =
              ids[next++];
        }
      }
    }
    tables_.push_back({table, upload(slots), upload(tokens), nullptr});
  }
  fill.pool = pool;
  fill.page_layout = upload(page_layout);
  fill.page_bytes = config.page_bytes;
  fill.num_pages = num_pages;
  fill_pages<<<num_pages, 256, 0, stream>>>(fill);
  check(cudaStreamSynchronize(stream), "fill_pages");
  pages_ = {pool, config.page_bytes, num_pages};
}

}  // namespace tierkv::bench

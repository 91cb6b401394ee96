// SPDX-License-Identifier: Apache-2.0
// The cases of bench_rungs: BitDecoding's settings and ragged lengths, every format.
#pragma once

#include <cstring>
#include <string>

#include "bench/baselines/rungs/rung_params.h"
#include "bench/gpu/attention_cache.cuh"
#include "bench/gpu/tensor_rates.cuh"

namespace tierkv::bench {

struct RungCase {
  std::string setting, heads, shape, format;
  CacheShape cache;

  std::string name() const { return setting + " " + heads + " " + shape + " " + format; }
};

struct Shape {
  int32_t batch, tokens;
};

struct Format {
  const char* name;
  std::vector<Bits> tiers;
};

inline const Format kFormats[] = {{"fp16", {{16, 16}}},
                                  {"k8v4", {{8, 4}}},
                                  {"k4v4", {{4, 4}}},
                                  {"k4v2", {{4, 2}}},
                                  {"mixed", {{8, 4}, {4, 2}}}};

// 30% of the tokens of a mixed row are high, 50% low, the others pruned.
inline SequenceTokens tokens_of(int32_t tokens, size_t tiers) {
  if (tiers == 1) return {{tokens, 0, 0}};
  return {{tokens * 3 / 10, tokens / 2, 0}};
}

inline RungCase make_case(const char* setting, Shape s, const Format& format, int32_t kv_heads) {
  RungCase c;
  c.setting = setting;
  c.heads = "32/" + std::to_string(kv_heads);
  c.shape = std::to_string(s.batch) + "x" + std::to_string(s.tokens);
  c.format = format.name;
  AttentionConfig& config = c.cache.config;
  config.num_q_heads = 32;
  config.num_kv_heads = kv_heads;
  config.head_dim = kRungHeadDim;
  config.sm_scale = 0.08838834764831845;
  std::vector<TierFormat> formats;
  for (const Bits bits : format.tiers) {
    formats.push_back(token_wise_tier(bits.k, bits.v));
    config.tiers[config.num_tiers] = {config.num_tiers, formats.back()};
    ++config.num_tiers;
  }
  config.page_bytes = choose_page_size(formats, kRungHeadDim)->page_bytes;
  c.cache.sequences.assign(s.batch, tokens_of(s.tokens, formats.size()));
  c.cache.contiguous = c.setting == "Single" || c.setting == "Batches";
  return c;
}

// Four sequences each of 256, 512, ... 32768 tokens: about as many as 8 of 32768.
inline RungCase ragged_case(const Format& format) {
  RungCase c = make_case("Ragged", {1, 1}, format, 8);
  c.shape = "32 of 256..32768";
  c.cache.sequences.clear();
  for (int32_t i = 0; i < 32; ++i) {
    c.cache.sequences.push_back(tokens_of(256 << i % 8, format.tiers.size()));
  }
  return c;
}

inline std::vector<RungCase> rung_cases() {
  struct Setting {
    const char* name;
    Shape shape;
    int32_t kv_heads;
  };
  const Setting settings[] = {
      {"Single", {1, 32768}, 8},  {"Single", {1, 131072}, 8},  {"Batches", {32, 4096}, 8},
      {"Batches", {8, 32768}, 8}, {"Page", {32, 4096}, 8},     {"Page", {8, 32768}, 8},
      {"Single", {1, 32768}, 32}, {"Batches", {16, 4096}, 32}, {"Page", {16, 4096}, 32}};
  std::vector<RungCase> cases;
  for (const Setting& s : settings) {
    for (const Format& format : kFormats) {
      const bool is_mixed = format.tiers.size() > 1;
      if (is_mixed && std::strcmp(s.name, "Page") != 0) continue;
      cases.push_back(make_case(s.name, s.shape, format, s.kv_heads));
    }
  }
  for (const Format& format : kFormats) cases.push_back(ragged_case(format));
  return cases;
}

}  // namespace tierkv::bench

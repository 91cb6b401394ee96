// SPDX-License-Identifier: Apache-2.0
// How the tokens of a row are stored, as plain data: what a preset's text is parsed into (preset.h)
// and what a container is written by.
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/format.h"
#include "tierkv/policy.h"

namespace tierkv::analysis {

// What is done to the codes after quantisation, or to the raw bytes of a scheme that does not
// quantise.
enum class Coder : int32_t {
  kNone = 0,     // fixed width
  kHuffman = 1,  // coded blocks, codec/host/coded/coded_block.h
  kZstd = 2,     // one byte a code (raw bytes where the format is raw), zstd: the CPU baseline
  // Baselines by blocks of 64 tokens, tools/analysis/baselines.
  kFse = 3,         // tANS
  kFixed = 4,       // one width per token
  kBitshuffle = 5,  // transposed bits, zstd
};

// What is taken off the codes before they are coded: Predictor, tools/analysis/baselines.
enum class Prediction : int32_t { kNone = 0, kToken = 1, kChannel = 2, kPlane = 3 };

// Pruning to the same share of tokens in every head, tools/analysis/baselines/eviction.h.
enum class Eviction : int32_t { kNone = 0, kH2o = 1, kSnapKv = 2 };

// Heads that share their formats. Rows take classes by the sensitivity of their heads: the first
// class the most sensitive ones (assign_classes() in codec/policy/profile.h).
struct HeadClass {
  double share = 1;      // of all rows; those of a scheme's classes sum to 1
  TierFormat high, low;  // equal: the class has no tiers
  double alpha_high = 1, alpha_low = 0;

  bool tiered() const { return high != low || alpha_low > 0; }
  friend bool operator==(const HeadClass& a, const HeadClass& b) {
    return a.share == b.share && a.same_formats(b);
  }
  bool same_formats(const HeadClass& o) const {
    return high == o.high && low == o.low && alpha_high == o.alpha_high && alpha_low == o.alpha_low;
  }
};
inline constexpr size_t kMaxHeadClasses = 4;

struct Scheme {
  TierFormat window;  // the newest policy.window_tokens and the first policy.sink_tokens
  TierFormat high;    // every other token, or those above alpha_high where `tiered`
  TierFormat low;     // tiered only
  bool tiered = false;
  TierPolicy policy;
  // Empty: all rows alike. Otherwise a row is stored as of_class() of its class says; high, low and
  // the alphas are those of the first class, tiered is set where any class has tiers.
  std::vector<HeadClass> classes;
  bool key_means = false;  // rotated keys: means are removed first
  Coder coder = Coder::kNone;
  int32_t zstd_level = 3;
  Prediction prediction = Prediction::kNone;
  Eviction eviction = Eviction::kNone;
  double keep = 1;  // share of tokens that an eviction keeps, recent ones included
  // Weighted steps only. high.k.step and high.v.step are for rows whose query energies are known;
  // the others take these, and keys' is then a share of their root mean square.
  double own_k = 0, own_v = 0;
  bool default_steps = false;  // none was asked for: those of a profile need its head scales
  int32_t books = 1;           // codebooks of a (layer, component)
  bool importance = false;     // a token's step follows its significance, where that is known

  bool weighted() const {
    return high.k.step_rule == StepRule::kWeighted || high.v.step_rule == StepRule::kWeighted;
  }

  // The scheme of the rows of a class; it keeps `classes`, whose pages have one size.
  Scheme of_class(int32_t c) const;
  // Which class a row has follows from a profile's sensitivities.
  bool has_unlike_classes() const;
  // Pages carry scores and positions: DiffKV's Algorithm 1. Rows of classes have none; a map of 2
  // bits a token says the tiers.
  bool has_records() const { return tiered && classes.empty(); }
  bool prunes() const {
    for (const HeadClass& c : classes) {
      if (c.alpha_low > 0) return true;
    }
    return eviction != Eviction::kNone ? keep < 1 : tiered && policy.alpha_low > 0;
  }
  // Coded by a BlockCoder other than the library's own.
  bool has_baseline_coder() const {
    return coder >= Coder::kFse || prediction != Prediction::kNone;
  }
  // Raw values or an eviction: no window and no sinks beside what is compressed.
  bool keeps_all_alike() const {
    return eviction != Eviction::kNone || (high == raw_tier() && !tiered);
  }
  bool needs_significance() const { return tiered || eviction == Eviction::kH2o; }
  bool needs_queries() const { return high.k.step_rule == StepRule::kAbsolute; }
  // Means or steps of the rows.
  bool needs_statistics() const {
    return needs_queries() || high.v.step_rule == StepRule::kAbsolute || key_means ||
           high.k.basis == BasisKind::kMean || high.v.basis == BasisKind::kMean;
  }
  // Presets whose tokens fit unified pages of fixed-width tiles.
  bool has_fixed_pages() const;
  // Presets whose body is coded blocks of a shared step, as coded pages hold them.
  bool has_coded_pages() const {
    return !tiered && coder == Coder::kHuffman && prediction == Prediction::kNone &&
           high.k.type.bits() == 0 && high.v.type.bits() == 0;
  }
  // The scheme for a head of this size: KIVI's groups of channels end with the head.
  Scheme for_head_dim(int32_t head_dim) const;
  Status validate(int32_t head_dim) const;
};

}  // namespace tierkv::analysis

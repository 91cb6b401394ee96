// How the tokens of a row are stored, as plain data: what a preset's text is parsed into
// (tools/presets/preset.h) and what a container is written by.
#pragma once

#include <cstdint>

#include "tierkv/format.h"
#include "tierkv/policy.h"

namespace tierkv {

// What is done to the codes after quantisation, or to the raw bytes of a scheme that does not
// quantise.
enum class Coder : int32_t {
  kNone = 0,     // fixed width
  kHuffman = 1,  // coded blocks, codec/format/coded_block.h
  kZstd = 2,     // one byte a code (raw bytes where the format is raw), zstd: the CPU baseline
  // Baselines of the analysis by blocks of 64 tokens, tools/analysis.
  kFse = 3,         // tANS
  kFixed = 4,       // one width per token
  kBitshuffle = 5,  // transposed bits, zstd
};

// What is taken off the codes before they are coded: Predictor, tools/analysis.
enum class Prediction : int32_t { kNone = 0, kToken = 1, kChannel = 2, kPlane = 3 };

// Pruning to the same share of tokens in every head, tools/analysis/baselines/eviction.h.
enum class Eviction : int32_t { kNone = 0, kH2o = 1, kSnapKv = 2 };

struct Scheme {
  TierFormat window;  // the newest policy.window_tokens and the first policy.sink_tokens
  TierFormat high;    // every other token, or those above alpha_high where `tiered`
  TierFormat low;     // tiered only
  bool tiered = false;
  TierPolicy policy;
  Coder coder = Coder::kNone;
  int32_t zstd_level = 3;
  Prediction prediction = Prediction::kNone;
  Eviction eviction = Eviction::kNone;
  double keep = 1;  // share of tokens that an eviction keeps, recent ones included
  // Weighted steps only. high.k.step and high.v.step are for rows whose query energies are known;
  // the others take these, and keys' is then a share of their root mean square.
  double own_k = 0, own_v = 0;
  int32_t books = 1;        // codebooks of a (layer, component)
  bool importance = false;  // a token's step follows its significance, where that is known

  bool weighted() const {
    return high.k.step_rule == StepRule::kWeighted || high.v.step_rule == StepRule::kWeighted;
  }

  bool prunes() const {
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
  // Means, steps or matrices of the rows.
  bool needs_statistics() const {
    const auto basis = [](BasisKind b) { return b == BasisKind::kMean || b == BasisKind::kMatrix; };
    return needs_queries() || basis(high.k.basis) || basis(high.v.basis);
  }
  // Presets whose tokens fit unified pages of fixed-width tiles.
  bool has_fixed_pages() const;
  // Presets whose body is coded blocks of a shared step, as coded pages hold them.
  bool has_coded_pages() const {
    return !tiered && coder == Coder::kHuffman && prediction == Prediction::kNone &&
           high.k.bits == 0 && high.v.bits == 0;
  }
  // The scheme for a head of this size: KIVI's groups of channels end with the head.
  Scheme for_head_dim(int32_t head_dim) const;
  Status validate(int32_t head_dim) const;
};

}  // namespace tierkv

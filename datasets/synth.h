// SPDX-License-Identifier: Apache-2.0
// Synthetic caches that have what real ones have: outlier key channels, attention sinks,
// heavy-tailed attention, recency and a spread of value norms. The same spec gives the same k, v
// and q on every machine (kExact significance up to its last bit); one row is in memory at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "datasets/dump.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv::datasets {

enum class SignificanceKind : int32_t {
  kNone = 0,
  kExact = 1,    // from the queries of all positions; time grows with tokens^2
  kSampled = 2,  // from 64 query positions spread over the sequence; the dump says so
};

inline constexpr int64_t kMaxSynthTokens = kMaxSequenceTokens;

struct SynthSpec {
  CacheLayout layout;           // sm_scale 0: 1 / sqrt(head_dim)
  std::vector<int64_t> tokens;  // one sequence each
  int64_t num_queries = 64;     // the newest positions whose q is written, at most the sequence
  uint64_t seed = 1;
  int32_t outlier_channels = 4;  // key channels of large, nearly constant value
  double outlier_scale = 8;  // typical size in standard deviations; channels vary from 1/2 to 2x
  int32_t sink_tokens = 4;   // first tokens that draw attention from everywhere
  double heavy_fraction = 0.02;  // tokens many queries look for
  SignificanceKind significance = SignificanceKind::kSampled;

  // kInvalidArgument naming the field.
  Status validate() const;
};

// Writes to a temporary name that is renamed at the end; `progress` (may be empty) is called with
// the fraction done. Without `overwrite`: kIo where a file is at the path at the end.
Status synthesize(const SynthSpec& spec, const std::string& path,
                  const std::function<void(double)>& progress, bool overwrite = true);

}  // namespace tierkv::datasets

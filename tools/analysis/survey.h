// SPDX-License-Identifier: Apache-2.0
// What dumps look like before anything is compressed: who is attended to, and how long the vectors
// are. DiffKV section 3, Figures 2 to 5.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/analysis/analyze.h"

namespace tierkv::analysis {

// Counts of positive numbers by decade.
struct LogHistogram {
  static constexpr int32_t kFirstDecade = -10, kLastDecade = 4, kBinsPerDecade = 24;
  static constexpr int32_t kBins = (kLastDecade - kFirstDecade) * kBinsPerDecade;
  std::array<int64_t, kBins> bins{};  // numbers outside count in the first or last bin
  int64_t zeros = 0;

  void add(double x);
  void add(const LogHistogram& other);
  int64_t total() const;  // without zeros
};

// Mean and spread over sequences.
struct Spread {
  double sum = 0, squares = 0;
  int64_t count = 0;

  void add(double x);
  void add(const Spread& other);
  double mean() const { return count > 0 ? sum / static_cast<double>(count) : 0; }
  double deviation() const;
};

// How significant the tokens of one row are, in groups of neighbours.
struct SignificanceTrace {
  std::string file, seq;
  int32_t layer = 0, kv_head = 0;
  int64_t tokens = 0;
  struct Group {
    int64_t first = 0;  // token
    double median = 0, max = 0;
  };
  std::vector<Group> groups;
};

struct Survey {
  static constexpr double kCritical = 0.95;      // share of the attention that counts
  static constexpr int32_t kQueriesPerRow = 64;  // looked at, evenly spread over the dumped ones
  static constexpr int32_t kTraceGroups = 256;

  int32_t num_layers = 0, num_kv_heads = 0;
  std::vector<LogHistogram> significance, value_norm, key_norm;  // [layers]
  // Per (layer, kv_head), over sequences: the share of tokens that hold kCritical of the attention
  // of one query (mean over queries and query heads), and of all attention received.
  std::vector<Spread> critical_of_query, critical_received;
  SignificanceTrace trace;  // of the middle layer of the first sequence that has significance

  // Both are of the same shape.
  void add(const Survey& other);
};

// Layers and sequences as the options say; presets are not looked at. What a dump does not hold
// (q, significance) is left empty.
Result<Survey> survey(datasets::DumpReader& reader, const AnalyzeOptions& options);

// Adds the survey to the one of its shape, or behind all others where there is none.
void join_survey(Survey survey, std::vector<Survey>* all);

}  // namespace tierkv::analysis

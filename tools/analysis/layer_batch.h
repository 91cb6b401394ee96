// SPDX-License-Identifier: Apache-2.0
// A few layers of a dump in memory, analysed in parallel under all presets at once.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "tools/analysis/analyze.h"
#include "tools/analysis/scheme/layer_scheme.h"
#include "tools/analysis/scheme/row_measure.h"

namespace tierkv::analysis {

// What batches add to.
struct BatchSums {
  std::vector<Tally>* tallies = nullptr;         // [presets][sequences of the dump]
  std::vector<PresetDetail>* details = nullptr;  // [presets], empty: none
  std::function<void(double)> progress;          // fraction of the batch, one call at a time
  // [presets]: a preset that fails is left out from then on, and its sums are void. [1]: the first
  // failure ends the batch.
  std::vector<Status>* failures = nullptr;
};

class LayerBatch {
 public:
  // run() adds to the sums. Failures name the file, the layer and the preset.
  LayerBatch(const datasets::DumpInfo& info, const AnalyzeOptions& options,
             std::vector<LayerData> layers, const BatchSums& sums);
  void run();

 private:
  int64_t rows() const { return static_cast<int64_t>(layers_.size()) * heads_; }
  const Scheme& scheme(int64_t p) const { return options_.presets[p].scheme; }
  LayerScheme& shared(int64_t layer, int64_t p) { return schemes_[layer * presets_ + p]; }
  Tally& tally(const LayerData& l, int64_t p) {
    return tallies_[p * static_cast<int64_t>(info_.sequences.size()) + l.seq];
  }
  Status& failure(int64_t p) { return failures_[failures_.size() == 1 ? 0 : p]; }
  bool failed(int64_t p);
  bool all_failed() const;
  void fail(const Status& status, const LayerData& l, int64_t p);

  void prepare();
  void prepare_scheme(int64_t layer, int64_t p, const std::vector<RowProfile>& statistics);
  void attend_exactly(int64_t first, int64_t count);
  void measure(bool first_tile);
  void measure_row(int64_t row, int64_t p, bool first_tile);
  // In a fixed order, so that the sums do not depend on the threads, to the last bit.
  void add_up();

  const datasets::DumpInfo& info_;
  const AnalyzeOptions& options_;
  const CacheLayout& layout_;
  std::vector<LayerData> layers_;
  int64_t heads_;
  int64_t presets_;
  std::function<void(double)> progress_;
  int64_t measured_ = 0, to_measure_ = 1;  // (row, preset, tile of queries)
  std::vector<Tally>& tallies_;
  std::vector<PresetDetail>& details_;
  std::vector<LayerScheme> schemes_;  // [layers][presets]
  struct RowSums {
    Tally tally;
    PositionErrors errors;
  };
  std::vector<RowSums> rows_;          // [rows][presets]
  std::vector<ExactAttention> exact_;  // per row, of the queries looked at now
  std::vector<Status>& failures_;
  std::mutex mutex_;  // of the failures and of what is measured
};

}  // namespace tierkv::analysis

// SPDX-License-Identifier: Apache-2.0
// What each scheme would do to a dumped cache: size, tiers, error of keys, values and attention
// output, coder, speed. Definitions of every number: docs/reference/presets-and-metrics.md.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "codec/policy/profile.h"
#include "datasets/dump.h"
#include "tools/analysis/detail.h"
#include "tools/analysis/scheme/block_stats.h"
#include "tools/presets/preset.h"

namespace tierkv::analysis {

// Sums from which every metric of one (file, preset, sequence) follows; adding two gives those of
// their union.
struct Tally {
  int64_t values = 0;  // 2 * tokens * num_kv_heads * head_dim over layers
  int64_t stored_bytes = 0;
  int64_t page_bytes = 0;  // pages * page_bytes, 0 where the scheme has no pages
  std::array<int64_t, kNumTiers> tokens{};
  struct PerComponent {
    double error_squared = 0, norm_squared = 0;  // over kept tokens
    double entropy_bits = 0, coded_bits = 0;     // summed over symbols
    int64_t symbols = 0;                         // coded symbols
  };
  PerComponent component[2];
  struct Attention {
    double error = 0, error_online = 0, cosine = 0;  // summed over queries
    int64_t queries = 0;
  } attention;
  // By {file, layer, kv_head}: squares of online attention outputs and of their errors, summed over
  // queries and the heads of the group. The file counts where tallies of several are added.
  struct RowError {
    double error_squared = 0, norm_squared = 0;
    double sensitivity = 0;  // the profile's; 0 without
  };
  std::map<std::array<int32_t, 3>, RowError> rows;
  BlockStats blocks;      // of weighted steps
  int64_t row_bytes = 0;  // of stored_bytes: means and steps of the sequences' own
  double encode_seconds = 0, decode_seconds = 0;  // thread time
  int64_t input_fp16_bytes = 0;

  void add(const Tally& other);
};

struct AnalyzeResult {
  std::string file, preset;
  std::string seq;  // "all" or the sequence's id
  Tally tally;
  std::shared_ptr<const PresetDetail> detail;  // of totals, where asked for
};

struct AnalyzeOptions {
  std::vector<Preset> presets;
  int32_t first_layer = 0;
  int32_t last_layer = -1;    // inclusive; -1: the last one
  std::string only_sequence;  // empty: all
  int32_t threads = 1;
  bool details = false;              // AnalyzeResult::detail: codes are counted in one more pass
  const Profile* profile = nullptr;  // means and steps; null: each sequence's own
  std::function<void(double)> progress;  // fraction done, one call at a time

  int32_t end_layer(const CacheLayout& layout) const {
    return last_layer < 0 ? layout.num_layers : last_layer + 1;
  }
};

// default_presets(), less those that need sensitivities which the profile, null where there is
// none, does not hold.
std::vector<Preset> default_comparison(const Profile* profile);

// The layers asked for exist and the profile is of the same shape of model.
Status check_options(const datasets::DumpInfo& info, const AnalyzeOptions& options);
// Whether the preset can be measured on the dump under these options (`presets` is not looked at):
// kOk, or what is missing, naming file, preset and dataset.
Status suits(const datasets::DumpInfo& info, const Preset& preset, const AnalyzeOptions& options);

// Leaves out presets that the dump cannot serve, and gives their names. Where none is left: why the
// first one is not served.
Status keep_served(const datasets::DumpInfo& info, AnalyzeOptions* options, std::string* left_out);

// Results in the order of presets; for each the total first, then each sequence. Reads one
// (sequence, layer) at a time. A preset that cannot hold a value of the dump ends the analysis.
// With `failures` it is only left out: they become [presets], kOk or why.
Result<std::vector<AnalyzeResult>> analyze(datasets::DumpReader& reader,
                                           const AnalyzeOptions& options,
                                           std::vector<Status>* failures = nullptr);

// Derived metrics; nullopt where a quantity does not exist for the preset or the dump.
double bits_per_value(const Tally& t);
double compression_ratio(const Tally& t);
std::optional<double> page_ratio(const Tally& t);
std::optional<double> relative_error(const Tally& t, Component c);
std::optional<double> entropy_bits(const Tally& t, Component c);
std::optional<double> coded_bits(const Tally& t, Component c);
std::optional<double> attention_error(const Tally& t);
std::optional<double> attention_error_online(const Tally& t);
// Per layer the norm of all errors by the norm of all outputs; mean over the layers.
std::optional<double> attention_error_pooled(const Tally& t);
// Root of the mean over (layer, kv_head), weighted by the profile's sensitivities, of the squared
// error by the squared output; nullopt without sensitivities.
std::optional<double> attention_error_weighted(const Tally& t);
// What schemes are ranked by: the weighted error, else the pooled one; nullopt without queries.
std::optional<double> ranking_error(const Tally& t);
const char* ranking_error_name(const Tally& t);  // "weighted error" or "pooled error"
std::optional<double> attention_cosine(const Tally& t);
std::optional<double> encode_gbps(const Tally& t);  // of one thread
std::optional<double> decode_gbps(const Tally& t);

}  // namespace tierkv::analysis

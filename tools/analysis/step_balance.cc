#include "tools/analysis/step_balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "codec/parallel.h"
#include "tools/analysis/layer_data.h"
#include "tools/analysis/layer_scheme.h"
#include "tools/analysis/row_measure.h"

namespace tierkv::analysis {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};
constexpr double kProbeStep = 0.1;       // k or v at which errors are measured
constexpr int64_t kProbePositions = 48;  // queries of a sequence and head that are asked
// Raw tokens of the presets below.
constexpr int64_t kWindow = 64, kSinks = 4;
constexpr int64_t kEntropyTokens = 1024;  // tokens of a row whose codes are counted

// At most kProbePositions of the queries, evenly spread, the newest among them.
void thin_queries(const CacheLayout& layout, LayerData* data) {
  const auto all = static_cast<int64_t>(data->positions.size());
  const int64_t kept = std::min(all, kProbePositions), d = layout.head_dim;
  const auto source = [&](int64_t i) { return (i + 1) * all / kept - 1; };
  std::vector<int32_t> positions(kept);
  for (int64_t i = 0; i < kept; ++i) positions[i] = data->positions[source(i)];
  for (std::vector<float>& q : data->q) {
    std::vector<float> few;
    few.reserve(layout.group_size() * kept * d);
    for (int32_t h = 0; h < layout.group_size(); ++h) {
      for (int64_t i = 0; i < kept; ++i) {
        const float* row = q.data() + (h * all + source(i)) * d;
        few.insert(few.end(), row, row + d);
      }
    }
    q = std::move(few);
  }
  data->positions = std::move(positions);
}

// Relative error of attention per head with only this component quantised at kProbeStep.
Status probe_errors(const LayerData& data, const CacheLayout& layout, const Profile& profile,
                    Component c, std::vector<double>* errors) {
  const bool key = c == Component::kKey;
  const std::string step = std::to_string(kProbeStep);
  const std::string window =
      ",window=" + std::to_string(kWindow) + ",sinks=" + std::to_string(kSinks);
  const Result<Preset> preset =
      parse_preset((key ? "step:only=k,k=" + step : "step:only=v,v=" + step) + window);
  if (!preset) return preset.status();
  const Scheme& scheme = preset->scheme;
  LayerScheme shared;
  if (Status s = prepare_layer(scheme, data, layout, &profile, &shared); !s) return s;
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    ExactAttention exact;
    exact.tile = make_tile(data, h, layout, 0, static_cast<int64_t>(data.positions.size()));
    attend_exactly({&data.k[h], &data.v[h]}, &exact);
    RowCodec codec = shared.row(scheme, data, h);
    Tally tally;
    StatusCode code = codec.encode();
    if (code == StatusCode::kOk) code = add_errors(codec, exact, {false, nullptr}, &tally);
    if (code != StatusCode::kOk) return Status(code, "calibration: steps cannot be probed");
    (*errors)[h] = attention_error_online(tally).value_or(0) / kProbeStep;
  }
  return Status::ok();
}

// Counts a sample of the row's codes at every step of the grid.
Status add_codes(const datasets::RowData& row, const RowProfile& statistics, Component c,
                 double sm_scale, std::vector<CodeSample>* samples) {
  const int32_t d = row.head_dim;
  const int64_t tokens = std::min(row.tokens, kEntropyTokens);
  std::vector<float> y(tokens * d);
  for (int64_t t = 0; t < tokens; ++t)
    datasets::row_to_float(row, t * row.tokens / tokens, 1, y.data() + t * d);
  ComponentFormat format;
  format.basis = BasisKind::kMean;
  make_basis(format, c, statistics, d).apply(y.data(), tokens);
  std::vector<int16_t> codes(y.size());
  const std::vector<double> grid = step_grid();
  for (size_t i = 0; i < grid.size(); ++i) {
    format.step = grid[i];
    const auto step = static_cast<float>(make_step(format, c, statistics, sm_scale));
    const StatusCode code =
        quantize_absolute(y.data(), static_cast<int64_t>(y.size()), step, codes.data());
    if (code != StatusCode::kOk)
      return Status(code, "calibration: codes of a fine step do not fit 16 bits");
    (*samples)[i].add(codes.data(), static_cast<int64_t>(codes.size()));
  }
  return Status::ok();
}

struct Place {
  int32_t seq, layer;
};

// Adds what one layer of one sequence says about its rows [num_kv_heads].
Status add_layer(datasets::DumpReader& dump, Place place, const BalanceOptions& options,
                 const Profile& profile, RowRates* rows) {
  const CacheLayout& layout = dump.info().layout;
  LayerData data;
  if (Status s = load_layer(dump, place.seq, place.layer, false, options.threads, &data); !s)
    return s;
  thin_queries(layout, &data);
  std::array<std::vector<double>, 2> errors;
  std::array<Status, 2> status;
  for (auto& e : errors) e.resize(layout.num_kv_heads);
  parallel_for(2, options.threads, [&](int64_t i) {
    status[i] = probe_errors(data, layout, profile, kComponents[i], &errors[i]);
  });
  for (const Status& s : status) {
    if (!s) return s;
  }
  std::vector<Status> counted(2 * static_cast<size_t>(layout.num_kv_heads));
  parallel_for(static_cast<int64_t>(counted.size()), options.threads, [&](int64_t i) {
    const int64_t h = i / 2, c = i % 2;
    counted[i] =
        add_codes((c == 0 ? data.k : data.v)[h], profile.row(data.layer, static_cast<int32_t>(h)),
                  kComponents[c], layout.sm_scale, &rows[h].codes[c]);
  });
  for (const Status& s : counted) {
    if (!s) return s;
  }
  for (int32_t h = 0; h < layout.num_kv_heads; ++h)
    rows[h].errors.push_back({errors[0][h], errors[1][h]});
  return Status::ok();
}

// Samples of equal weight under one ideal code.
class SharedBook {
 public:
  void add(const CodeSample& sample) {
    const int32_t end = sample.lowest + static_cast<int32_t>(sample.counts.size());
    if (shares_.empty()) lowest_ = sample.lowest;
    if (sample.lowest < lowest_) {
      shares_.insert(shares_.begin(), lowest_ - sample.lowest, 0.0);
      lowest_ = sample.lowest;
    }
    shares_.resize(std::max<size_t>(shares_.size(), end - lowest_));
    const double weight = 1 / sample.total();
    double* share = shares_.data() + (sample.lowest - lowest_);
    for (const uint32_t n : sample.counts) *share++ += weight * n;
    ++samples_;
  }
  // Sum over the samples of the bits per code.
  double bits() const {
    double sum = 0;
    for (const double share : shares_) {
      if (share > 0) sum += share * std::log2(samples_ / share);
    }
    return sum;
  }

 private:
  int32_t lowest_ = 0, samples_ = 0;
  std::vector<double> shares_;  // of the codes from lowest_ on; their sum is samples_
};

using StepIndex = std::array<size_t, 2>;  // in the grid, of keys and of values

// What the heads of one layer may choose and have chosen.
class LayerChoice {
 public:
  LayerChoice(const RowRates* rows, int32_t heads) : rows_(rows), chosen_(heads) {
    const std::vector<double> grid = step_grid();
    steps_ = grid.size();
    for (int32_t h = 0; h < heads; ++h) {
      std::vector<double>& errors = errors_.emplace_back();
      for (size_t i = 0; i < steps_ * steps_; ++i) {
        double sum = 0;
        for (const auto& [k, v] : rows[h].errors) {
          const double a = k * grid[i / steps_], b = v * grid[i % steps_];
          sum += std::sqrt(a * a + b * b);
        }
        errors.push_back(sum / static_cast<double>(rows[h].errors.size()));
      }
      for (int32_t c = 0; c < 2; ++c) {
        std::vector<double>& own = own_bits_[c].emplace_back();
        for (const CodeSample& sample : rows[h].codes[c]) {
          SharedBook book;
          book.add(sample);
          own.push_back(book.bits());
        }
      }
    }
  }

  // Least bits + price * error: first as if every head had codebooks of its own, then head by head
  // given the others' choices, until nothing changes.
  void choose(double price) {
    const size_t heads = chosen_.size();
    for (size_t h = 0; h < heads; ++h)
      chosen_[h] = best(h, own_bits_[0][h], own_bits_[1][h], price);
    size_t unchanged = 1;
    for (size_t i = 0; unchanged < heads && i < kTurns * heads; ++i) {
      const size_t h = i % heads;
      const StepIndex now = best(h, shared_bits(0, h), shared_bits(1, h), price);
      unchanged = now == chosen_[h] ? unchanged + 1 : 1;
      chosen_[h] = now;
    }
  }
  const std::vector<StepIndex>& chosen() const { return chosen_; }
  double error(size_t head) const {
    return errors_[head][chosen_[head][0] * steps_ + chosen_[head][1]];
  }

 private:
  static constexpr size_t kTurns = 8;

  // Bits of all heads at each of a head's steps, the others as chosen.
  std::vector<double> shared_bits(int32_t component, size_t head) const {
    SharedBook others;
    for (size_t h = 0; h < chosen_.size(); ++h) {
      if (h != head) others.add(rows_[h].codes[component][chosen_[h][component]]);
    }
    std::vector<double> bits;
    for (const CodeSample& sample : rows_[head].codes[component]) {
      SharedBook book = others;
      book.add(sample);
      bits.push_back(book.bits());
    }
    return bits;
  }
  // Of equal ones the first.
  StepIndex best(size_t head, const std::vector<double>& k, const std::vector<double>& v,
                 double price) const {
    double least = std::numeric_limits<double>::infinity();
    StepIndex found = {};
    for (size_t i = 0; i < steps_; ++i) {
      for (size_t j = 0; j < steps_; ++j) {
        const double cost = k[i] + v[j] + price * errors_[head][i * steps_ + j];
        if (cost >= least) continue;
        least = cost;
        found = {i, j};
      }
    }
    return found;
  }

  const RowRates* rows_;
  size_t steps_ = 0;
  std::vector<std::vector<double>> errors_;                   // [heads][steps * steps]
  std::array<std::vector<std::vector<double>>, 2> own_bits_;  // [component][heads][steps]
  std::vector<StepIndex> chosen_;                             // [heads]
};

double geometric_mean(const std::vector<std::array<double, 2>>& steps, int32_t component) {
  double sum = 0;
  for (const auto& row : steps) sum += std::log(row[component]);
  return std::exp(sum / static_cast<double>(steps.size()));
}

}  // namespace

void CodeSample::add(const int16_t* codes, int64_t n) {
  if (n == 0) return;
  const auto [low, high] = std::minmax_element(codes, codes + n);
  if (counts.empty()) lowest = *low;
  if (*low < lowest) {
    counts.insert(counts.begin(), lowest - *low, 0);
    lowest = *low;
  }
  counts.resize(std::max<size_t>(counts.size(), *high - lowest + 1));
  for (int64_t i = 0; i < n; ++i) ++counts[codes[i] - lowest];
}

double CodeSample::total() const {
  return std::accumulate(counts.begin(), counts.end(), 0.0);
}

std::vector<double> step_grid() {
  std::vector<double> grid;
  for (int32_t i = -24; i <= 4; ++i) grid.push_back(std::exp2(0.25 * i));
  return grid;
}

Result<BalancedSteps> balance_rows(const std::vector<RowRates>& rows, int32_t heads, double error) {
  const std::vector<double> grid = step_grid();
  std::vector<LayerChoice> layers;
  for (size_t r = 0; r < rows.size(); r += heads) layers.emplace_back(&rows[r], heads);
  const auto at_price = [&](double price) {
    BalancedSteps out;
    for (LayerChoice& layer : layers) {
      layer.choose(price);
      for (int32_t h = 0; h < heads; ++h) {
        const StepIndex& i = layer.chosen()[h];
        out.steps.push_back({grid[i[0]], grid[i[1]]});
        out.error += layer.error(h) / static_cast<double>(rows.size());
      }
    }
    return out;
  };
  // Bits per unit of relative error.
  double low = 1e-3, high = 1e7;
  const double finest = at_price(high).error, coarsest = at_price(low).error;
  if (!(finest <= error && error < coarsest)) {
    return Status(StatusCode::kInvalidArgument,
                  "steps cannot be balanced at an attention error of " + std::to_string(error) +
                      ": from " + std::to_string(finest) + " to " + std::to_string(coarsest));
  }
  for (int32_t i = 0; i < 32; ++i) {
    const double middle = std::sqrt(low * high);
    (at_price(middle).error > error ? low : high) = middle;
  }
  return at_price(high);
}

Status balance_steps(std::vector<datasets::DumpReader>& dumps, const BalanceOptions& options,
                     Profile* profile) {
  std::vector<RowRates> rows(profile->rows.size());
  for (RowRates& row : rows) row.codes.fill(std::vector<CodeSample>(step_grid().size()));
  int64_t measured = 0;
  for (datasets::DumpReader& dump : dumps) {
    const datasets::DumpInfo& info = dump.info();
    const auto sequences = static_cast<int32_t>(info.sequences.size());
    for (int32_t seq = 0; seq < sequences; ++seq) {
      if (info.sequences[seq].num_tokens <= kWindow + kSinks) continue;
      ++measured;
      for (int32_t layer = 0; layer < profile->num_layers; ++layer) {
        RowRates* first = &rows[static_cast<size_t>(layer) * profile->num_kv_heads];
        if (Status s = add_layer(dump, {seq, layer}, options, *profile, first); !s) return s;
      }
    }
  }
  if (measured == 0) {
    return Status(
        StatusCode::kInvalidArgument,
        "steps cannot be balanced: every sequence is shorter than the raw window and the sinks");
  }
  Result<BalancedSteps> balanced = balance_rows(rows, profile->num_kv_heads, options.error);
  if (!balanced) return balanced.status();
  const double k = geometric_mean(balanced->steps, 0), v = geometric_mean(balanced->steps, 1);
  profile->balance = {balanced->error, k, v};
  for (size_t r = 0; r < rows.size(); ++r) {
    profile->rows[r].key_step_scale = balanced->steps[r][0] / k;
    profile->rows[r].value_step_scale = balanced->steps[r][1] / v;
  }
  return Status::ok();
}

}  // namespace tierkv::analysis

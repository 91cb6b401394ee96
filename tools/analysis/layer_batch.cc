// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/layer_batch.h"

#include <algorithm>

#include "codec/host/parallel.h"
#include "tools/analysis/stop_watch.h"

namespace tierkv::analysis {
namespace {

constexpr int64_t kOutputBytes = int64_t{48} << 20;  // exact attention outputs kept at a time
constexpr Component kComponents[] = {Component::kKey, Component::kValue};

// The sensitivity of keys and values together; 0 where it was not measured.
double sensitivity_of(const Profile* profile, int32_t layer, int32_t head) {
  if (profile == nullptr) return 0;
  const auto row = static_cast<size_t>(layer) * profile->num_kv_heads + head;
  if (!profile->joint_sensitivity.empty()) return profile->joint_sensitivity[row];
  if (profile->key_sensitivity.empty() || profile->value_sensitivity.empty()) return 0;
  return profile->key_sensitivity[row] + profile->value_sensitivity[row];
}

}  // namespace

LayerBatch::LayerBatch(const datasets::DumpInfo& info, const AnalyzeOptions& options,
                       std::vector<LayerData> layers, const BatchSums& sums)
    : info_(info),
      options_(options),
      layout_(info.layout),
      layers_(std::move(layers)),
      heads_(layout_.num_kv_heads),
      presets_(static_cast<int64_t>(options.presets.size())),
      progress_(sums.progress),
      tallies_(*sums.tallies),
      details_(*sums.details),
      schemes_(layers_.size() * presets_),
      rows_(layers_.size() * heads_ * presets_),
      failures_(*sums.failures) {}

bool LayerBatch::failed(int64_t p) {
  std::lock_guard<std::mutex> lock(mutex_);
  return !failure(p);
}

bool LayerBatch::all_failed() const {
  return std::none_of(failures_.begin(), failures_.end(),
                      [](const Status& s) { return s.is_ok(); });
}

void LayerBatch::fail(const Status& status, const LayerData& l, int64_t p) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure(p)) return;
  failure(p) =
      Status(status.code(), info_.path + ": /seq/" + info_.sequences[l.seq].id + "/layer/" +
                                std::to_string(l.layer) + ": preset " + options_.presets[p].text +
                                ": " + status.message() + " (" + status_name(status.code()) + ")");
}

void LayerBatch::run() {
  prepare();
  if (all_failed()) return;
  int64_t positions = 0;
  for (const LayerData& l : layers_) positions = std::max<int64_t>(positions, l.positions.size());
  const int64_t bytes =
      rows() * layout_.group_size() * layout_.head_dim * static_cast<int64_t>(sizeof(double));
  const int64_t tile = std::max<int64_t>(1, kOutputBytes / bytes);
  to_measure_ = rows() * presets_ * std::max<int64_t>(1, (positions + tile - 1) / tile);
  int64_t first = 0;
  do {  // once at least: a dump without queries has sizes and errors of keys and values all the
        // same
    attend_exactly(first, tile);
    measure(first == 0);
    first += tile;
  } while (first < positions && !all_failed());
  add_up();
}

void LayerBatch::add_up() {
  for (int64_t i = 0; i < static_cast<int64_t>(schemes_.size()); ++i) {
    const LayerData& l = layers_[i / presets_];
    const int64_t p = i % presets_;
    if (failed(p)) continue;
    Tally& t = tally(l, p);
    t.encode_seconds += schemes_[i].codebook_seconds;
    t.stored_bytes += schemes_[i].codebook_bytes();
    for (const Component c : kComponents) {
      const int component = static_cast<int>(c);
      t.component[component].entropy_bits += schemes_[i].entropy_bits[component];
      for (int32_t part = 0; part < 2 && !details_.empty(); ++part) {
        for (const auto& [code, n] : schemes_[i].codes[component][part])
          details_[p].codes[component][part][code] += n;
      }
      for (const auto& [exponent, n] : schemes_[i].exponents[component])
        details_[p].exponents[component][exponent] += n;
    }
    if (!details_.empty()) details_[p].set_classes(l.layer, schemes_[i].classes);
  }
  for (int64_t i = 0; i < static_cast<int64_t>(rows_.size()); ++i) {
    const int64_t row = i / presets_, p = i % presets_;
    if (failed(p)) continue;
    const LayerData& l = layers_[row / heads_];
    tally(l, p).add(rows_[i].tally);
    if (details_.empty()) continue;
    details_[p].errors.add(rows_[i].errors);
    for (int32_t t = 0; t < kNumTiers; ++t)
      details_[p].tiers[l.layer * heads_ + row % heads_][t] += rows_[i].tally.tokens[t];
  }
}

void LayerBatch::prepare() {
  const auto count = static_cast<int64_t>(layers_.size());
  std::vector<std::vector<RowProfile>> statistics(count);
  parallel_for(count, options_.threads, [&](int64_t i) {
    statistics[i] = layer_statistics(layers_[i], layout_, options_.profile);
  });
  parallel_for(count * presets_, options_.threads, [&](int64_t i) {
    prepare_scheme(i / presets_, i % presets_, statistics[i / presets_]);
  });
}

void LayerBatch::prepare_scheme(int64_t layer, int64_t p,
                                const std::vector<RowProfile>& statistics) {
  if (failed(p)) return;
  const LayerData& l = layers_[layer];
  LayerScheme& out = shared(layer, p);
  take_classes(scheme(p), layout_, options_.profile, l.layer, &out);
  if (Status s = place_rows(scheme(p), l, layout_, statistics, &out); !s) return fail(s, l, p);
  out.count_codes = !details_.empty();
  StopWatch watch;
  if (Status s = build_codebooks(scheme(p), l, &out); !s) return fail(s, l, p);
  out.codebook_seconds = watch.seconds();
}

void LayerBatch::attend_exactly(int64_t first, int64_t count) {
  exact_.assign(rows(), {});
  parallel_for(rows(), options_.threads, [&](int64_t r) {
    const LayerData& l = layers_[r / heads_];
    const auto h = static_cast<int32_t>(r % heads_);
    if (first >= static_cast<int64_t>(l.positions.size())) return;
    exact_[r].tile = make_tile(l, h, layout_, first, count);
    analysis::attend_exactly({&l.k[h], &l.v[h]}, &exact_[r]);
  });
}

void LayerBatch::measure(bool first_tile) {
  // Encoded rows live while they are measured: at most half a layer's worth of them at a time, one
  // at least.
  int64_t row_bytes = 1, layer_bytes = 1;
  for (const LayerData& l : layers_) {
    row_bytes = std::max<int64_t>(row_bytes, l.k[0].bytes.size() + l.v[0].bytes.size());
    layer_bytes = std::max(layer_bytes, LayerData::dump_bytes(info_, l.seq, l.layer));
  }
  const int64_t budget = (layer_bytes / 2 + (int64_t{96} << 20)) / row_bytes;
  const auto threads = static_cast<int32_t>(std::clamp<int64_t>(budget, 1, options_.threads));
  parallel_for(rows() * presets_, threads, [&](int64_t i) {
    if (!failed(i % presets_)) measure_row(i / presets_, i % presets_, first_tile);
    if (!progress_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    progress_(static_cast<double>(++measured_) / static_cast<double>(to_measure_));
  });
}

void LayerBatch::measure_row(int64_t row, int64_t p, bool first_tile) {
  const LayerData& l = layers_[row / heads_];
  const auto h = static_cast<int32_t>(row % heads_);
  const LayerScheme& layer = shared(row / heads_, p);
  RowCodec codec = layer.row(scheme(p), l, h);
  Tally& t = rows_[row * presets_ + p].tally;
  StopWatch watch;
  if (StatusCode code = codec.encode(); code != StatusCode::kOk)
    return fail(cannot_hold(code, l, h, {Component::kKey, Component::kValue}), l, p);
  if (first_tile) {
    t.encode_seconds = watch.seconds();
    add_sizes(codec, &t);
    if (scheme(p).weighted()) {
      t.stored_bytes += layer.own_bytes[h];
      t.row_bytes += layer.own_bytes[h];
    }
    for (const ComponentContext& own : layer.context[h]) {
      if (options_.profile == nullptr)
        t.stored_bytes += own.basis.stored_bytes() + (own.step > 0 ? 4 : 0);
    }
  }
  PositionErrors* by_place = details_.empty() ? nullptr : &rows_[row * presets_ + p].errors;
  Tally::RowError& pooled = t.rows[{0, l.layer, h}];
  pooled.sensitivity = sensitivity_of(options_.profile, l.layer, h);
  if (StatusCode code = add_errors(codec, exact_[row], {first_tile, by_place}, &t, &pooled);
      code != StatusCode::kOk)
    return fail(cannot_hold(code, l, h, {Component::kKey, Component::kValue}), l, p);
}

}  // namespace tierkv::analysis

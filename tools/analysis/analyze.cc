#include "tools/analysis/analyze.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>

#include "tools/analysis/attention_error.h"
#include "tools/analysis/layer_data.h"
#include "tools/analysis/parallel.h"
#include "tools/analysis/row_codec.h"
#include "tools/analysis/row_pages.h"

namespace tierkv::analysis {
namespace {

constexpr int64_t kBatchBytes = int64_t{48}
                                << 20;  // layers analysed together, as stored in the dump
constexpr int64_t kOutputBytes = int64_t{48} << 20;  // exact attention outputs kept at a time
constexpr Component kComponents[] = {Component::kKey, Component::kValue};

class StopWatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Codebooks of one (layer, preset), shared by its rows.
struct CodebookSet {
  std::optional<Codebook> books[2][2];
  std::optional<Codebook>& of(Component c, Part part) {
    return books[static_cast<int>(c)][part == Part::kLow];
  }
};

// One (layer of the batch, preset): what its rows share.
struct LayerScheme {
  std::vector<RowPlan> plans;  // per kv_head
  std::vector<std::array<ComponentContext, 2>> context;
  CodebookSet codebooks;
};

// A batch of layers that is analysed in parallel, one item per (layer, row, preset).
class Batch {
 public:
  Batch(const datasets::DumpInfo& info, const AnalyzeOptions& options,
        std::vector<LayerData> layers, std::vector<Tally>* tallies)
      : info_(info),
        options_(options),
        layout_(info.layout),
        layers_(std::move(layers)),
        heads_(layout_.num_kv_heads),
        presets_(static_cast<int64_t>(options.presets.size())),
        tallies_(*tallies) {}

  Status run() {
    prepare();
    if (failed()) return status_;
    int64_t positions = 0;
    for (const LayerData& l : layers_) positions = std::max<int64_t>(positions, l.positions.size());
    const int64_t bytes =
        rows() * layout_.group_size() * layout_.head_dim * static_cast<int64_t>(sizeof(double));
    const int64_t tile = std::max<int64_t>(1, kOutputBytes / bytes);
    int64_t first = 0;
    do {  // once at least: a dump without queries has sizes and errors of keys and values all the
          // same
      attend_exactly(first, tile);
      measure(first);
      first += tile;
    } while (first < positions && !failed());
    return status_;
  }

 private:
  int64_t rows() const { return static_cast<int64_t>(layers_.size()) * heads_; }
  const Scheme& scheme(int64_t p) const { return options_.presets[p].scheme; }
  LayerScheme& shared(int64_t layer, int64_t p) { return schemes_[layer * presets_ + p]; }
  RowInput input(const LayerData& l, int32_t h) const { return {&l.k[h], &l.v[h]}; }
  bool failed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !status_.is_ok();
  }
  void fail(StatusCode code, const LayerData& l, const std::string& preset, const char* what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status_) return;
    status_ = Status(code, info_.path + ": /seq/" + info_.sequences[l.seq].id + "/layer/" +
                               std::to_string(l.layer) + ": preset " + preset + ": " + what + " (" +
                               status_name(code) + ")");
  }
  Tally& tally(const LayerData& l, int64_t p) {
    return tallies_[p * info_.sequences.size() + l.seq];
  }

  void prepare();
  void prepare_row(LayerData& l, int32_t h, int64_t p, const RowProfile& measured);
  void build_codebooks(int64_t layer, int64_t p);
  void attend_exactly(int64_t first, int64_t tile);
  void measure(int64_t first);
  void measure_row(int64_t layer, int32_t h, int64_t p, bool first_tile);
  void attend_stored(int64_t row, const RowCodec& codec, const RowPlan& plan, const Scheme& s,
                     Tally* tally);

  const datasets::DumpInfo& info_;
  const AnalyzeOptions& options_;
  const CacheLayout& layout_;
  std::vector<LayerData> layers_;
  int32_t heads_;
  int64_t presets_;
  std::vector<Tally>& tallies_;
  std::vector<LayerScheme> schemes_;
  std::vector<QueryTile> tiles_;              // per row
  std::vector<std::vector<double>> outputs_;  // per row, exact
  std::mutex mutex_;
  Status status_;
};

void Batch::prepare() {
  schemes_.resize(layers_.size() * presets_);
  for (LayerScheme& s : schemes_) {
    s.plans.resize(heads_);
    s.context.resize(heads_);
  }
  std::vector<RowProfile> measured(rows());
  parallel_for(rows(), options_.threads, [&](int64_t r) {
    const auto h = static_cast<int32_t>(r % heads_);
    const LayerData& l = layers_[r / heads_];
    measured[r] = options_.profile != nullptr ? options_.profile->row(l.layer, h)
                                              : analysis::measure_row(l, h, layout_.head_dim);
  });
  parallel_for(rows() * presets_, options_.threads, [&](int64_t i) {
    const int64_t r = i / presets_;
    prepare_row(layers_[r / heads_], static_cast<int32_t>(r % heads_), i % presets_, measured[r]);
  });
  parallel_for(static_cast<int64_t>(schemes_.size()), options_.threads,
               [&](int64_t i) { build_codebooks(i / presets_, i % presets_); });
}

void Batch::prepare_row(LayerData& l, int32_t h, int64_t p, const RowProfile& measured) {
  LayerScheme& s = shared(&l - layers_.data(), p);
  if (Status planned = plan_row(scheme(p), l.tokens, l.significance[h], &s.plans[h]); !planned) {
    return fail(planned.code(), l, options_.presets[p].text, planned.message().c_str());
  }
  for (const Component c : kComponents) {
    ComponentContext& context = s.context[h][static_cast<int>(c)];
    const ComponentFormat& format = scheme(p).high.of(c);
    context.basis = make_basis(format, c, measured, layout_.head_dim);
    if (format.step_rule != StepRule::kAbsolute) continue;
    context.step = static_cast<float>(make_step(format, c, measured, layout_.sm_scale));
    if (!(context.step > 0) || !std::isfinite(context.step)) {
      fail(StatusCode::kInvalidArgument, l, options_.presets[p].text,
           "no usable global step (all queries or values are zero)");
    }
  }
}

void Batch::build_codebooks(int64_t layer, int64_t p) {
  const Scheme& s = scheme(p);
  if (s.coder == Coder::kNone || failed()) return;
  const LayerData& l = layers_[layer];
  LayerScheme& shared_scheme = shared(layer, p);
  StopWatch watch;
  for (const Component c : kComponents) {
    for (const Part part : {Part::kHigh, Part::kLow}) {
      const TierFormat& format = part == Part::kHigh ? s.high : s.low;
      if (format.of(c).is_raw() || (part == Part::kLow && !s.tiered)) continue;
      CodeHistogram histogram(c, layout_.head_dim);
      for (int32_t h = 0; h < heads_; ++h) {
        const auto& context = shared_scheme.context[h];
        const RowCodec codec(s, shared_scheme.plans[h], input(l, h), &context[0], &context[1]);
        if (StatusCode code = codec.add_codes(c, part, &histogram); code != StatusCode::kOk) {
          fail(code, l, options_.presets[p].text, "quantisation failed");
          return;
        }
      }
      if (histogram.empty()) continue;
      std::optional<Codebook>& book = shared_scheme.codebooks.of(c, part);
      if (s.coder == Coder::kHuffman) {
        Result<Codebook> built = build_codebook(histogram);
        if (!built) return fail(built.status().code(), l, options_.presets[p].text, "no codebook");
        book = std::move(built.value());
        for (auto& context : shared_scheme.context) {
          context[static_cast<int>(c)].codebooks[part == Part::kLow] = &*book;
        }
      }
      std::lock_guard<std::mutex> lock(mutex_);
      Tally& t = tally(l, p);
      t.component[static_cast<int>(c)].entropy_bits +=
          histogram.entropy_bits() * static_cast<double>(histogram.total());
      if (book) t.stored_bytes += codebook_bytes(*book);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  tally(l, p).encode_seconds += watch.seconds();
}

void Batch::attend_exactly(int64_t first, int64_t count) {
  tiles_.assign(rows(), {});
  outputs_.assign(rows(), {});
  parallel_for(rows(), options_.threads, [&](int64_t r) {
    const LayerData& l = layers_[r / heads_];
    const auto h = static_cast<int32_t>(r % heads_);
    const int32_t d = layout_.head_dim;
    if (first >= static_cast<int64_t>(l.positions.size())) return;
    tiles_[r] = make_tile(l, h, layout_, first, count);
    const QueryTile& tile = tiles_[r];
    BlockAttention block(tile);
    SoftmaxState state(tile.count(), d);
    std::vector<float> k(kBlockTokens * d), v(kBlockTokens * d);
    Visibility visible[kBlockTokens];
    const int64_t end = tile.positions.back() + 1;
    for (int64_t t = 0; t < end; t += kBlockTokens) {
      const auto n = static_cast<int32_t>(std::min<int64_t>(kBlockTokens, end - t));
      datasets::row_to_float(l.k[h], t, n, k.data());
      datasets::row_to_float(l.v[h], t, n, v.data());
      for (int32_t i = 0; i < n; ++i) visible[i] = {t + i, std::numeric_limits<int64_t>::max()};
      block.load(k.data(), v.data(), n);
      block.add_to(&state, visible);
    }
    outputs_[r].resize(tile.count() * d);
    for (int64_t q = 0; q < tile.count(); ++q) state.output(q, outputs_[r].data() + q * d);
  });
}

void Batch::measure(int64_t first) {
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
    const int64_t r = i / presets_;
    if (!failed())
      measure_row(r / heads_, static_cast<int32_t>(r % heads_), i % presets_, first == 0);
  });
}

// Pooled squared errors of a decoded block against the original tokens.
void add_errors(const RowInput& in, const int64_t* tokens, const float* k, const float* v,
                int32_t n, Tally* t) {
  const int32_t d = in.k->head_dim;
  std::vector<float> x(d);
  for (const Component c : kComponents) {
    const float* y = c == Component::kKey ? k : v;
    Tally::PerComponent& sum = t->component[static_cast<int>(c)];
    for (int32_t i = 0; i < n; ++i) {
      datasets::row_to_float(in.of(c), tokens[i], 1, x.data());
      for (int32_t j = 0; j < d; ++j) {
        const double e = static_cast<double>(x[j]) - y[i * d + j];
        sum.error_squared += e * e;
        sum.norm_squared += static_cast<double>(x[j]) * x[j];
      }
    }
  }
}

void Batch::measure_row(int64_t layer, int32_t h, int64_t p, bool first_tile) {
  const LayerData& l = layers_[layer];
  const int64_t row = layer * heads_ + h;
  const Scheme& s = scheme(p);
  LayerScheme& shared_scheme = shared(layer, p);
  const RowPlan& plan = shared_scheme.plans[h];
  const auto& context = shared_scheme.context[h];
  const RowInput in = input(l, h);
  RowCodec codec(s, plan, in, &context[0], &context[1]);
  Tally t;
  StopWatch encode_watch;
  if (StatusCode code = codec.encode(); code != StatusCode::kOk) {
    return fail(code, l, options_.presets[p].text, "encoding failed");
  }
  if (first_tile) {
    t.encode_seconds = encode_watch.seconds();
    const int64_t values = plan.tokens * layout_.head_dim;
    t.values = 2 * values;
    t.input_fp16_bytes = 4 * values;
    t.tokens = plan.count;
    t.stored_bytes = codec.stored_bytes();
    t.page_bytes = row_page_bytes(s, plan, layout_.head_dim, codec.body_bytes());
    if (s.tiered) t.stored_bytes += 8 * (plan.tokens - plan.count[static_cast<int>(Tier::kPruned)]);
    for (const Component c : kComponents) {
      const ComponentContext& own = context[static_cast<int>(c)];
      Tally::PerComponent& sum = t.component[static_cast<int>(c)];
      sum.coded_bits = 8.0 * codec.coded_bytes(c);
      sum.symbols = codec.coded_symbols(c);
      if (options_.profile == nullptr)
        t.stored_bytes += own.basis.stored_bytes() + (own.step > 0 ? 4 : 0);
    }
    StopWatch decode_watch;
    double sink = 0;
    StatusCode code = codec.decode(
        [&](Part, const int64_t*, const float* k, const float*, int32_t) { sink += k[0]; });
    t.decode_seconds = decode_watch.seconds();
    if (code == StatusCode::kOk) {
      code = codec.decode([&](Part, const int64_t* tokens, const float* k, const float* v,
                              int32_t n) { add_errors(in, tokens, k, v, n, &t); });
    }
    if (code != StatusCode::kOk || !std::isfinite(sink))
      return fail(code, l, options_.presets[p].text, "decoding failed");
  }
  if (!tiles_[row].positions.empty()) attend_stored(row, codec, plan, s, &t);
  std::lock_guard<std::mutex> lock(mutex_);
  tally(l, p).add(t);
}

void Batch::attend_stored(int64_t row, const RowCodec& codec, const RowPlan& plan, const Scheme& s,
                          Tally* tally_out) {
  const QueryTile& tile = tiles_[row];
  const int32_t d = layout_.head_dim;
  const int64_t window = s.policy.window_tokens;
  BlockAttention block(tile);
  // Every stored token is seen as stored (plain). With the window moving (online) a body token is
  // seen compressed by queries at least `window` away and in the window's format by nearer ones.
  // `both` collects what the two agree on.
  SoftmaxState both(tile.count(), d), plain(tile.count(), d), online(tile.count(), d);
  constexpr int64_t kAlways = std::numeric_limits<int64_t>::max();
  Visibility far[kBlockTokens], near[kBlockTokens], all[kBlockTokens];
  const auto load = [&](const int64_t* tokens, const float* k, const float* v, int32_t n) {
    block.load(k, v, n);
    for (int32_t i = 0; i < n; ++i) {
      all[i] = {tokens[i], kAlways};
      far[i] = {tokens[i] + window, kAlways};
      near[i] = {tokens[i], tokens[i] + window - 1};
    }
  };
  StatusCode code = codec.decode(
      [&](Part part, const int64_t* tokens, const float* k, const float* v, int32_t n) {
        load(tokens, k, v, n);
        if (part == Part::kSinks || part == Part::kWindow) {
          block.add_to(&both, all);
        } else if (part == Part::kKeyGap) {
          block.add_to(&plain, all);
        } else {
          block.add_to(&both, far);
          block.add_to(&plain, near);
        }
      });
  if (code == StatusCode::kOk) {
    code = codec.decode_gap_quantised(
        [&](Part, const int64_t* tokens, const float* k, const float* v, int32_t n) {
          load(tokens, k, v, n);
          block.add_to(&online, far);
        });
  }
  const int64_t recent =
      std::clamp<int64_t>(tile.positions.front() - window + 1, plan.body_begin, plan.body_end);
  if (code == StatusCode::kOk && window > 0) {
    code = codec.decode_recent(
        recent, plan.body_end,
        [&](Part, const int64_t* tokens, const float* k, const float* v, int32_t n) {
          load(tokens, k, v, n);
          block.add_to(&online, near);
        });
  }
  if (code != StatusCode::kOk) return fail(code, layers_[row / heads_], "", "decoding failed");
  plain.merge(both);
  online.merge(both);
  std::vector<double> a(d), b(d);
  for (int64_t q = 0; q < tile.count(); ++q) {
    plain.output(q, a.data());
    online.output(q, b.data());
    const double* o = outputs_[row].data() + q * d;
    double oo = 0, aa = 0, oa = 0, ea = 0, eb = 0;
    for (int32_t i = 0; i < d; ++i) {
      oo += o[i] * o[i];
      aa += a[i] * a[i];
      oa += o[i] * a[i];
      ea += (o[i] - a[i]) * (o[i] - a[i]);
      eb += (o[i] - b[i]) * (o[i] - b[i]);
    }
    if (oo == 0) continue;
    tally_out->attention.error += std::sqrt(ea / oo);
    tally_out->attention.error_online += std::sqrt(eb / oo);
    if (aa > 0) tally_out->attention.cosine += oa / std::sqrt(oo * aa);
    ++tally_out->attention.queries;
  }
}

Status check_options(const datasets::DumpInfo& info, const AnalyzeOptions& o, int32_t last_layer) {
  const auto bad = [&](const std::string& m) { return Status(StatusCode::kInvalidArgument, m); };
  if (o.first_layer < 0 || last_layer >= info.layout.num_layers || o.first_layer > last_layer) {
    return bad(info.path + ": layers " + std::to_string(o.first_layer) + "-" +
               std::to_string(last_layer) + " asked for, the dump has 0-" +
               std::to_string(info.layout.num_layers - 1));
  }
  if (o.profile != nullptr && (o.profile->num_layers != info.layout.num_layers ||
                               o.profile->num_kv_heads != info.layout.num_kv_heads ||
                               o.profile->head_dim != info.layout.head_dim)) {
    return bad(info.path +
               ": the profile was made for another model (layers, kv heads or head_dim differ)");
  }
  for (const Preset& p : o.presets) {
    const std::string where = info.path + ": preset " + p.text;
    if (Status s = p.scheme.validate(info.layout.head_dim); !s) return s.with_context(where);
    const bool matrix = p.scheme.high.k.basis == BasisKind::kMatrix;
    if (matrix && (o.profile == nullptr || o.profile->rows[0].key_forward.empty())) {
      return bad(
          where +
          ": basis=matrix needs a profile with bases (--profile, tierkv calibrate --basis matrix)");
    }
    if (!p.scheme.needs_queries() || o.profile != nullptr) continue;
    for (const datasets::SequenceInfo& seq : info.sequences) {
      if (!o.only_sequence.empty() && seq.id != o.only_sequence) continue;
      for (int32_t l = o.first_layer; l <= last_layer; ++l) {
        if (seq.layers[l].has_q) continue;
        return bad(where + ": /seq/" + seq.id + "/layer/" + std::to_string(l) +
                   " has no q to choose the step by; give a profile (--profile)");
      }
    }
  }
  return Status::ok();
}

}  // namespace

Result<std::vector<AnalyzeResult>> analyze(datasets::DumpReader& reader,
                                           const AnalyzeOptions& given) {
  const datasets::DumpInfo& info = reader.info();
  AnalyzeOptions options = given;
  for (Preset& p : options.presets) p.scheme = p.scheme.for_head_dim(info.layout.head_dim);
  const int32_t last_layer =
      options.last_layer < 0 ? info.layout.num_layers - 1 : options.last_layer;
  if (Status s = check_options(info, options, last_layer); !s) return s;
  bool need_significance = false;
  for (const Preset& p : options.presets) need_significance |= p.scheme.tiered;

  std::vector<std::pair<int32_t, int32_t>> work;
  for (size_t seq = 0; seq < info.sequences.size(); ++seq) {
    if (!options.only_sequence.empty() && info.sequences[seq].id != options.only_sequence) continue;
    for (int32_t l = options.first_layer; l <= last_layer; ++l) work.emplace_back(seq, l);
  }
  if (work.empty()) {
    return Status(StatusCode::kNotFound,
                  info.path + ": no sequence '" + options.only_sequence + "'");
  }
  std::vector<Tally> tallies(options.presets.size() * info.sequences.size());
  for (size_t next = 0; next < work.size();) {
    std::vector<LayerData> layers;
    for (int64_t bytes = 0; next < work.size() && (layers.empty() || bytes < kBatchBytes); ++next) {
      const auto [seq, layer] = work[next];
      bytes += LayerData::dump_bytes(info, seq, layer);
      if (!layers.empty() && bytes > kBatchBytes) break;
      layers.emplace_back();
      if (Status s = load_layer(reader, seq, layer, need_significance, &layers.back()); !s)
        return s;
    }
    if (Status s = Batch(info, options, std::move(layers), &tallies).run(); !s) return s;
    if (options.progress)
      options.progress(static_cast<double>(next) / static_cast<double>(work.size()));
  }

  std::vector<AnalyzeResult> results;
  for (size_t p = 0; p < options.presets.size(); ++p) {
    const size_t total = results.size();
    results.push_back({info.path, options.presets[p].text, "all", {}});
    for (size_t seq = 0; seq < info.sequences.size(); ++seq) {
      const Tally& t = tallies[p * info.sequences.size() + seq];
      if (t.values == 0) continue;
      results[total].tally.add(t);
      results.push_back({info.path, options.presets[p].text, info.sequences[seq].id, t});
    }
  }
  return results;
}

}  // namespace tierkv::analysis

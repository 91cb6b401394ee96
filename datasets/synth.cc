// SPDX-License-Identifier: Apache-2.0
#include "datasets/synth.h"

#include <algorithm>
#include <cmath>

#include "codec/policy/significance.h"
#include "datasets/dump.h"
#include "datasets/portable_math.h"
#include "tierkv/half.h"

namespace tierkv::datasets {
namespace {

constexpr int64_t kSampledQueries = 64;

// Counter-based generator: value i of stream s does not depend on what was drawn before it.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : key_(mix(seed ^ mix(stream + 0x632be59bd9b4e019ull))) {}
  // In (0, 1).
  double uniform(uint64_t i) const {
    return (static_cast<double>(mix(key_ + i) >> 12) + 0.5) * 0x1p-52;
  }
  // Standard normal, Box-Muller.
  double normal(uint64_t i) const {
    return std::sqrt(-2 * portable_log(uniform(2 * i))) * portable_cos_turns(uniform(2 * i + 1));
  }

 private:
  static uint64_t mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  uint64_t key_;
};

enum Stream : uint64_t {
  kTokenIds,
  kKeys,
  kValues,
  kQueries,
  kDirections,
  kOutliers,
  kHeavy,
  kNorms,
  kNumStreams
};

// One row (sequence, layer, kv_head): k, v and q of any position as pure functions of the spec.
class RowSource {
 public:
  RowSource(const SynthSpec& spec, int64_t seq, int32_t layer, int32_t kv_head) : spec_(spec) {
    base_ = ((static_cast<uint64_t>(seq) * 4096 + layer) * 4096 + kv_head) * kNumStreams;
    const int32_t d = spec.layout.head_dim;
    const Random directions = stream(kDirections), outliers = stream(kOutliers);
    double norm = 0;
    for (int32_t i = 0; i < d; ++i) {
      sink_.push_back(directions.normal(i));
      heavy_.push_back(directions.normal(d + i));
      norm += sink_[i] * sink_[i];
      outlier_.push_back(0);
      is_outlier_.push_back(false);
    }
    for (double& v : sink_) v /= std::sqrt(norm);
    for (double& v : heavy_) v /= std::sqrt(static_cast<double>(d));
    for (int32_t n = 0; n < spec.outlier_channels; ++n) {
      auto channel = static_cast<int32_t>(outliers.uniform(n) * d);
      while (is_outlier_[channel]) channel = (channel + 1) % d;
      is_outlier_[channel] = true;
      // Planted outliers differ in size by up to a factor of two on either side.
      const double size =
          spec.outlier_scale * portable_exp(kLn2 * (2 * outliers.uniform(kMaxHeadDim + n) - 1));
      outlier_[channel] = outliers.uniform(2 * kMaxHeadDim + n) < 0.5 ? -size : size;
    }
  }

  void key(int64_t t, float* out) const {
    const Random keys = stream(kKeys);
    const int32_t d = spec_.layout.head_dim;
    const bool sink = t < spec_.sink_tokens, heavy = is_heavy(t);
    for (int32_t i = 0; i < d; ++i) {
      double x = keys.normal(t * d + i) + outlier_[i];
      if (sink) x += 8 * sink_[i];
      if (heavy) x += 5 * heavy_[i];
      out[i] = static_cast<float>(x);
    }
  }
  void value(int64_t t, float* out) const {
    const Random values = stream(kValues);
    const int32_t d = spec_.layout.head_dim;
    // Sinks carry almost nothing; other norms are log-normal.
    const double norm = t < spec_.sink_tokens ? 0.05 : portable_exp(0.4 * stream(kNorms).normal(t));
    for (int32_t i = 0; i < d; ++i) out[i] = static_cast<float>(norm * values.normal(t * d + i));
  }
  void query(int32_t head, int64_t t, float* out) const {
    const Random queries = stream(kQueries);
    const int32_t d = spec_.layout.head_dim;
    const int64_t n = (head * (int64_t{1} << 30) + t) * d;
    std::vector<float> near(d);
    key(std::max<int64_t>(0, t - 1 - static_cast<int64_t>(queries.uniform(n) * 32)), near.data());
    for (int32_t i = 0; i < d; ++i) {
      // Outlier channels of keys are constant, so queries barely use them.
      const double local = is_outlier_[i] ? 0 : 0.35 * near[i];
      out[i] = static_cast<float>(queries.normal(n + i) * (is_outlier_[i] ? 0.2 : 1) +
                                  6 * sink_[i] + 3 * heavy_[i] + local);
    }
  }

 private:
  Random stream(Stream s) const { return Random(spec_.seed, base_ + s); }
  bool is_heavy(int64_t t) const { return stream(kHeavy).uniform(t) < spec_.heavy_fraction; }

  const SynthSpec& spec_;
  uint64_t base_ = 0;
  std::vector<double> sink_, heavy_, outlier_;
  std::vector<bool> is_outlier_;
};

// What the dump will hold after rounding, so that significance belongs to the stored values.
void round_to(DType t, std::vector<float>* x) {
  if (t == DType::kFloat32) return;
  for (float& v : *x) {
    v = t == DType::kFloat16 ? half_to_float(float_to_half(v))
                             : bfloat16_to_float(float_to_bfloat16(v));
  }
}

// Mean over sampled later queries of the largest probability in the group; exact where all
// positions are sampled.
std::vector<float> sampled_significance(const RowSource& row, const CacheLayout& l,
                                        const std::vector<float>& k, int64_t tokens) {
  const int32_t d = l.head_dim;
  std::vector<double> sum(tokens, 0), best(tokens), p(tokens);
  std::vector<int64_t> count(tokens, 0);
  std::vector<float> q(d);
  const int64_t samples = std::min(kSampledQueries, tokens);
  for (int64_t s = 0; s < samples; ++s) {
    const int64_t j = tokens - 1 - s * tokens / samples;
    std::fill(best.begin(), best.begin() + j, 0.0);
    for (int32_t h = 0; h < l.group_size(); ++h) {
      row.query(h, j, q.data());
      round_to(l.dtype, &q);
      double top = -INFINITY, total = 0;
      for (int64_t i = 0; i <= j; ++i) {
        double dot = 0;
        for (int32_t c = 0; c < d; ++c) dot += static_cast<double>(q[c]) * k[i * d + c];
        top = std::max(top, p[i] = l.sm_scale * dot);
      }
      for (int64_t i = 0; i <= j; ++i) total += p[i] = portable_exp(std::max(p[i] - top, -700.0));
      for (int64_t i = 0; i < j; ++i) best[i] = std::max(best[i], p[i] / total);
    }
    for (int64_t i = 0; i < j; ++i) {
      sum[i] += best[i];
      ++count[i];
    }
  }
  std::vector<float> out(tokens, 0.0f);
  for (int64_t i = 0; i < tokens; ++i) {
    if (count[i] > 0) out[i] = static_cast<float>(sum[i] / static_cast<double>(count[i]));
  }
  return out;
}

Status full_significance(const RowSource& row, const CacheLayout& l, const std::vector<float>& k,
                         int64_t tokens, std::vector<float>* out) {
  const int32_t d = l.head_dim;
  std::vector<float> q(l.group_size() * tokens * d);
  for (int32_t h = 0; h < l.group_size(); ++h) {
    for (int64_t t = 0; t < tokens; ++t) row.query(h, t, q.data() + (h * tokens + t) * d);
  }
  round_to(l.dtype, &q);
  AttentionRow in;
  in.q = q.data();
  in.k = k.data();
  in.group_size = l.group_size();
  in.num_queries = in.num_tokens = static_cast<int32_t>(tokens);
  in.head_dim = d;
  in.sm_scale = l.sm_scale;
  std::vector<double> exact(tokens);
  if (Status s = exact_significance(in, exact.data(), nullptr); !s) return s;
  out->assign(exact.begin(), exact.end());
  return Status::ok();
}

Status write_row(DumpWriter& writer, const SynthSpec& spec, const RowSource& row, int32_t kv_head,
                 const std::vector<int32_t>& positions, int64_t tokens) {
  const CacheLayout& l = spec.layout;
  const int32_t d = l.head_dim, group = l.group_size();
  std::vector<float> x(tokens * d);
  for (int64_t t = 0; t < tokens; ++t) row.value(t, x.data() + t * d);
  if (Status s = writer.write_row(kv_head, Component::kValue, x.data()); !s) return s;
  for (int64_t t = 0; t < tokens; ++t) row.key(t, x.data() + t * d);
  if (Status s = writer.write_row(kv_head, Component::kKey, x.data()); !s) return s;
  if (spec.significance != SignificanceKind::kNone) {
    round_to(l.dtype, &x);
    std::vector<float> significance;
    if (spec.significance == SignificanceKind::kSampled) {
      significance = sampled_significance(row, l, x, tokens);
    } else if (Status s = full_significance(row, l, x, tokens, &significance); !s) {
      return s;
    }
    if (Status s = writer.write_significance(kv_head, significance.data()); !s) return s;
  }
  x.resize(positions.size() * d);
  for (int32_t h = 0; h < group && !positions.empty(); ++h) {
    for (size_t i = 0; i < positions.size(); ++i) row.query(h, positions[i], x.data() + i * d);
    if (Status s = writer.write_queries(kv_head * group + h, x.data()); !s) return s;
  }
  return Status::ok();
}

}  // namespace

Status SynthSpec::validate() const {
  const auto bad = [](const char* m) { return Status(StatusCode::kInvalidArgument, m); };
  CacheLayout l = layout;
  if (l.sm_scale == 0) l.sm_scale = 1;
  if (Status s = l.validate(); !s) return s;
  if (tokens.empty()) return bad("tokens: at least one sequence is needed");
  for (const int64_t t : tokens) {
    if (t < 1 || t > kMaxSynthTokens) return bad("tokens must be 1 to 134217728");
  }
  if (num_queries < 0 || num_queries > kMaxSynthTokens)
    return bad("queries must be 0 to 134217728");
  if (outlier_channels < 0 || outlier_channels > layout.head_dim)
    return bad("outliers must be 0 to head_dim");
  if (!(outlier_scale >= 0 && outlier_scale <= 1000)) return bad("outlier_scale must be 0 to 1000");
  if (sink_tokens < 0 || sink_tokens > kMaxSynthTokens) return bad("sinks must be 0 to 134217728");
  if (!(heavy_fraction >= 0 && heavy_fraction <= 1)) return bad("heavy must be 0 to 1");
  return Status::ok();
}

Status synthesize(const SynthSpec& given, const std::string& path,
                  const std::function<void(double)>& progress, bool overwrite) {
  if (Status s = given.validate(); !s) return s;
  SynthSpec spec = given;
  CacheLayout& l = spec.layout;
  if (l.sm_scale == 0) l.sm_scale = 1 / std::sqrt(static_cast<double>(l.head_dim));
  DumpInfo info;
  info.layout = l;
  info.model_id = "synthetic/seed-" + std::to_string(spec.seed);
  info.created_by = "tierkv synth";
  Result<DumpWriter> writer = DumpWriter::create(path, info);
  if (!writer) return writer.status();
  const double steps = static_cast<double>(spec.tokens.size()) * l.num_layers * l.num_kv_heads;
  double done = 0;
  for (size_t s = 0; s < spec.tokens.size(); ++s) {
    const int64_t tokens = spec.tokens[s];
    std::vector<int32_t> ids(tokens), positions;
    const Random random(spec.seed, s * kNumStreams + kTokenIds);
    for (int64_t t = 0; t < tokens; ++t) ids[t] = static_cast<int32_t>(random.uniform(t) * 32000);
    for (int64_t t = std::max<int64_t>(0, tokens - spec.num_queries); t < tokens; ++t) {
      positions.push_back(static_cast<int32_t>(t));
    }
    if (Status st = writer->begin_sequence("synth" + std::to_string(s), "synthetic", ids); !st)
      return st;
    const bool significance = spec.significance != SignificanceKind::kNone;
    if (significance) {
      const char* how =
          spec.significance == SignificanceKind::kExact ? "exact" : "64 sampled query positions";
      if (Status st = writer->annotate("significance_from", how); !st) return st;
    }
    for (int32_t layer = 0; layer < l.num_layers; ++layer) {
      if (Status st = writer->begin_layer(positions, significance); !st) return st;
      for (int32_t h = 0; h < l.num_kv_heads; ++h) {
        const RowSource row(spec, static_cast<int64_t>(s), layer, h);
        if (Status st = write_row(*writer, spec, row, h, positions, tokens); !st) return st;
        if (progress) progress(++done / steps);
      }
    }
  }
  return writer->finish(overwrite);
}

}  // namespace tierkv::datasets

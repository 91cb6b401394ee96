// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/layer_scheme.h"

#include <cmath>

#include "tools/analysis/baselines/baseline_coders.h"
#include "tools/analysis/baselines/eviction.h"
#include "tools/analysis/baselines/fse.h"
#include "tools/analysis/scheme/code_entropy.h"
#include "tools/analysis/scheme/row_basis.h"

namespace tierkv::analysis {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

Status prepare_row(const Scheme& scheme, const RowProfile& statistics, const CacheLayout& layout,
                   std::array<ComponentContext, 2>* out) {
  for (const Component c : kComponents) {
    ComponentContext& context = (*out)[static_cast<int>(c)];
    const ComponentFormat& format = scheme.high.of(c);
    context.basis = make_basis(format, c, statistics, layout.head_dim);
    if (scheme.key_means && c == Component::kKey)
      context.basis = Basis::hadamard(layout.head_dim, statistics.key_mean);
    if (format.step_rule != StepRule::kAbsolute) continue;
    context.step = static_cast<float>(make_step(format, c, statistics, layout.sm_scale));
    if (!(context.step > 0) || !std::isfinite(context.step)) {
      return Status(StatusCode::kInvalidArgument,
                    std::string("no usable global step of ") +
                        (c == Component::kKey ? "keys" : "values") +
                        " (all queries or values are zero, or too large)");
    }
  }
  return Status::ok();
}

void count(const int16_t* codes, int64_t n, std::vector<int64_t>* counts) {
  counts->resize(1 << 16);
  for (int64_t i = 0; i < n; ++i) ++(*counts)[static_cast<uint16_t>(codes[i])];
}

std::unique_ptr<BlockCoder> make_coder(const Scheme& scheme, const Predictor& predictor,
                                       const CodeHistogram& histogram,
                                       const std::optional<Codebook>& codebook) {
  std::unique_ptr<BlockCoder> coder;
  if (scheme.coder == Coder::kHuffman) coder = make_huffman_coder(&*codebook);
  if (scheme.coder == Coder::kFse) coder = std::make_unique<FseCoder>(histogram);
  if (scheme.coder == Coder::kFixed) coder = make_fixed_length_coder();
  if (scheme.coder == Coder::kBitshuffle) coder = make_bitshuffle_coder(scheme.zstd_level);
  if (scheme.prediction == Prediction::kNone) return coder;
  return make_predicting_coder(predictor, std::move(coder));
}

Status build_codebook_of(const Scheme& scheme, const LayerData& data, Component c, Part part,
                         LayerScheme* out) {
  const int32_t head_dim = data.k[0].head_dim;
  const bool low = part == Part::kLow;
  const Predictor predictor =
      Predictor::of(scheme.prediction, (low ? scheme.low : scheme.high).of(c));
  CodeHistogram histogram(c, head_dim);
  std::vector<int64_t> counts;  // of the codes before prediction, by code modulo 2^16
  for (size_t h = 0; h < out->plans.size(); ++h) {
    const RowCodec codec = out->row(scheme, data, static_cast<int32_t>(h));
    const StatusCode code = codec.visit_codes(c, part, [&](int16_t* codes, int32_t tokens) {
      if (out->count_codes) count(codes, static_cast<int64_t>(tokens) * head_dim, &counts);
      predictor.predict(tokens, head_dim, codes);
      histogram.add(codes, tokens);
    });
    if (code != StatusCode::kOk) return cannot_hold(code, data, static_cast<int32_t>(h), {c});
  }
  if (histogram.empty()) return Status::ok();
  const int component = static_cast<int>(c);
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) out->codes[component][low][static_cast<int16_t>(i)] += counts[i];
  }
  if (scheme.coder == Coder::kNone) return Status::ok();
  out->entropy_bits[component] += code_entropy(histogram) * static_cast<double>(histogram.total());
  if (scheme.coder == Coder::kHuffman) {
    Result<Codebook> built = build_codebook(histogram);
    if (!built) return built.status();
    std::optional<Codebook>& book = out->codebooks[component][low];
    book = std::move(built.value());
    for (auto& context : out->context) context[component].codebooks[low] = &*book;
  }
  if (!scheme.has_baseline_coder()) return Status::ok();
  std::unique_ptr<BlockCoder>& blocks = out->blocks[component][low];
  blocks = make_coder(scheme, predictor, histogram, out->codebooks[component][low]);
  for (auto& context : out->context) context[component].blocks[low] = blocks.get();
  return Status::ok();
}

}  // namespace

int64_t LayerScheme::codebook_bytes() const {
  int64_t bytes = 0;
  for (const auto& component : codebooks) {
    for (const std::optional<Codebook>& book : component) {
      if (book) bytes += tierkv::codebook_bytes(*book);
    }
  }
  for (const std::optional<BookChoice>& choice : books) {
    if (!choice) continue;
    for (const Codebook& book : choice->family.books) bytes += tierkv::codebook_bytes(book);
  }
  for (const auto& component : blocks) {
    for (const std::unique_ptr<BlockCoder>& coder : component) {
      if (coder != nullptr) bytes += coder->table_bytes();
    }
  }
  return bytes;
}

std::vector<RowProfile> layer_statistics(const LayerData& data, const CacheLayout& layout,
                                         const Profile* profile) {
  std::vector<RowProfile> statistics;
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    statistics.push_back(profile != nullptr ? profile->row(data.layer, h)
                                            : measure_row(data, h, layout.head_dim));
  }
  return statistics;
}

Status check_sensitivities(const Scheme& scheme, const Profile* profile) {
  const bool scaled = scheme.weighted() && scheme.default_steps;
  if (scaled && profile != nullptr && profile->key_sensitivity.empty()) {
    return Status(
        StatusCode::kInvalidArgument,
        "its steps need sensitivities, which the profile does not hold "
        "(/key_sensitivity): take a profile from the model (python -m tierkv.calibrate_model), "
        "no profile, or steps of your own (k=, v=)");
  }
  if (!scheme.has_unlike_classes()) return Status::ok();
  if (profile == nullptr) {
    return Status(StatusCode::kInvalidArgument,
                  "its classes of heads need a profile with sensitivities (--profile, in Python "
                  "profile=), which python -m tierkv.calibrate_model makes");
  }
  if (profile->joint_sensitivity.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  "its classes of heads need sensitivities, which the profile does not hold "
                  "(/joint_sensitivity): take a profile from the model (python -m "
                  "tierkv.calibrate_model)");
  }
  return Status::ok();
}

void take_classes(const Scheme& scheme, const CacheLayout& layout, const Profile* profile,
                  int32_t layer, LayerScheme* out) {
  out->schemes.clear();
  out->classes.clear();
  if (scheme.classes.empty()) return;
  std::vector<double> shares;
  for (size_t c = 0; c + 1 < scheme.classes.size(); ++c) shares.push_back(scheme.classes[c].share);
  const bool differ = scheme.has_unlike_classes();
  if (differ) {
    const std::vector<int32_t> all = assign_classes(shares, profile->joint_sensitivity);
    const auto first = all.begin() + static_cast<ptrdiff_t>(layer) * layout.num_kv_heads;
    out->classes.assign(first, first + layout.num_kv_heads);
  }
  for (int32_t h = 0; h < layout.num_kv_heads; ++h)
    out->schemes.push_back(scheme.of_class(differ ? out->classes[h] : 0));
}

Status place_rows(const Scheme& scheme, const LayerData& data, const CacheLayout& layout,
                  const std::vector<RowProfile>& statistics, LayerScheme* out) {
  out->plans.resize(layout.num_kv_heads);
  out->context.resize(layout.num_kv_heads);
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    RowPlan* plan = &out->plans[h];
    if (Status s =
            scheme.eviction == Eviction::kNone
                ? plan_row(out->scheme_of(scheme, h), data.tokens, data.significance[h], plan)
                : plan_eviction(scheme, data, h, layout, plan);
        !s) {
      return s;
    }
    if (Status s = prepare_row(scheme, statistics[h], layout, &out->context[h]); !s)
      return s.with_context("kv head " + std::to_string(h));
  }
  if (scheme.weighted()) return fit_weighted_rows(scheme, data, layout, statistics, out);
  return Status::ok();
}

Status build_codebooks(const Scheme& scheme, const LayerData& data, LayerScheme* out) {
  if (scheme.coder == Coder::kNone && !out->count_codes) return Status::ok();
  if (scheme.weighted()) return build_weighted_books(scheme, data, out);
  for (const Component c : kComponents) {
    for (const Part part : {Part::kHigh, Part::kLow}) {
      const TierFormat& format = part == Part::kHigh ? scheme.high : scheme.low;
      if (format.of(c).is_raw() || (part == Part::kLow && !scheme.tiered)) continue;
      if (Status s = build_codebook_of(scheme, data, c, part, out); !s) return s;
    }
  }
  return Status::ok();
}

Status prepare_layer(const Scheme& scheme, const LayerData& data, const CacheLayout& layout,
                     const Profile* profile, LayerScheme* out) {
  std::vector<RowProfile> statistics(layout.num_kv_heads);
  if (scheme.needs_statistics() || profile != nullptr)
    statistics = layer_statistics(data, layout, profile);
  take_classes(scheme, layout, profile, data.layer, out);
  if (Status s = place_rows(scheme, data, layout, statistics, out); !s) return s;
  return build_codebooks(scheme, data, out);
}

}  // namespace tierkv::analysis

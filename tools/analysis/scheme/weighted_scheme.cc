// SPDX-License-Identifier: Apache-2.0
// The rows of a layer under weighted steps: means, weights, steps, importance, codebooks.
#include <algorithm>

#include "codec/host/coded/histogram.h"
#include "tools/analysis/scheme/code_entropy.h"
#include "tools/analysis/scheme/importance.h"
#include "tools/analysis/scheme/layer_scheme.h"

namespace tierkv::analysis {
namespace {

constexpr int64_t kFitTokens = 256;  // of the body, from which a row's own means and steps follow
constexpr Component kComponents[] = {Component::kKey, Component::kValue};

struct Fitted {
  WeightedRow row;
  int64_t own_bytes = 0;
};

Result<Fitted> fit_row(const Scheme& scheme, const RowData& keys, const RowPlan& plan,
                       const RowProfile& known, const WeightedFit& common, const RopeTable* rope) {
  const int32_t d = keys.head_dim;
  const bool has_energy = !known.query_energy.empty();
  const bool has_means = !known.key_mean_before_rope.empty() && rope != nullptr;
  WeightedFit fit = common;
  fit.k = has_energy && scheme.high.k.step > 0 ? scheme.high.k.step : scheme.own_k;
  fit.v = has_energy && scheme.high.v.step > 0 ? scheme.high.v.step : scheme.own_v;
  fit.key_scale = known.key_scale;
  fit.value_scale = known.value_scale;
  const std::vector<double> energy(known.query_energy.begin(), known.query_energy.end());
  if (has_energy) fit.query_energy = energy.data();
  std::vector<uint16_t> means;
  if (has_means) {
    for (const float m : known.key_mean_before_rope) means.push_back(float_to_half(m));
    fit.key_mean = means.data();
  }
  const int64_t n = std::min(kFitTokens, plan.body_end - plan.body_begin);
  std::vector<float> x(n * d);
  row_to_float(keys, plan.body_begin, n, x.data());
  const WeightedTokens first = {x.data(), static_cast<int32_t>(n), plan.body_begin};
  const bool rotated = rope != nullptr && rope->pairs > 0;
  Result<WeightedRow> row = fit_weighted_row(fit, d, first, rotated ? rope : nullptr);
  if (!row) return row.status();
  Fitted out;
  out.row = std::move(*row);
  if (!has_means && !scheme.high.k.is_raw()) out.own_bytes += 2 * d;
  if (!has_energy) out.own_bytes += 4 * (!scheme.high.k.is_raw() + !scheme.high.v.is_raw());
  return out;
}

// The codes of a component of every row, in their order; counts exponents where the layer counts.
Status collect_codes(const Scheme& scheme, const LayerData& data, Component c, LayerScheme* layer,
                     std::vector<std::vector<int16_t>>* codes) {
  std::vector<int8_t> exponents;
  for (size_t h = 0; h < layer->plans.size(); ++h) {
    const RowCodec codec = layer->row(scheme, data, static_cast<int32_t>(h));
    codes->emplace_back();
    if (Status s = codec.weighted_codes(c, &codes->back(), &exponents); !s)
      return cannot_hold(s.code(), data, static_cast<int32_t>(h), {c});
    if (!layer->count_codes) continue;
    for (const int8_t e : exponents) ++layer->exponents[static_cast<int>(c)][e];
  }
  return Status::ok();
}

}  // namespace

Status fit_weighted_rows(const Scheme& scheme, const LayerData& data, const CacheLayout& layout,
                         const std::vector<RowProfile>& statistics, LayerScheme* out) {
  const RopeTable* rope = nullptr;
  if (data.rope != nullptr) {
    Result<RopeTable> table = make_rope_table(*data.rope, layout.head_dim, data.tokens);
    if (!table) return table.status();
    out->rope = std::move(*table);
    rope = &out->rope;
  }
  WeightedFit common;
  common.sm_scale = layout.sm_scale;
  out->weighted.resize(layout.num_kv_heads);
  out->own_bytes.resize(layout.num_kv_heads);
  out->importance.resize(layout.num_kv_heads);
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    const auto at = [h](const Status& s) { return s.with_context("kv head " + std::to_string(h)); };
    Result<Fitted> fitted = fit_row(scheme, data.k[h], out->plans[h], statistics[h], common, rope);
    if (!fitted) return at(fitted.status());
    out->weighted[h] = std::move(fitted->row);
    out->own_bytes[h] = fitted->own_bytes;
    std::array<ComponentContext, 2>& context = out->context[h];
    for (ComponentContext& c : context) c.weighted = &out->weighted[h];
    const std::vector<float>& significance = data.significance[h];
    if (!scheme.importance || significance.empty()) continue;
    std::vector<int8_t>& importance = out->importance[h];
    importance.resize(data.tokens);
    if (Status s = importance_exponents(significance.data(), static_cast<int32_t>(data.tokens), 0,
                                        importance.data());
        !s) {
      return at(s.with_context("significance"));
    }
    for (ComponentContext& c : context) c.importance = importance.data();
  }
  return Status::ok();
}

Status build_weighted_books(const Scheme& scheme, const LayerData& data, LayerScheme* out) {
  const int32_t d = data.k[0].head_dim;
  const auto heads = static_cast<int32_t>(out->plans.size());
  for (const Component c : kComponents) {
    if (scheme.high.of(c).is_raw()) continue;
    const auto component = static_cast<int32_t>(c);
    std::vector<std::vector<int16_t>> codes;
    if (Status s = collect_codes(scheme, data, c, out, &codes); !s) return s;
    std::vector<RowCodes> rows;
    CodeHistogram histogram(c, d);
    for (const std::vector<int16_t>& row : codes) {
      const auto tokens = static_cast<int64_t>(row.size()) / d;
      rows.push_back({row.data(), tokens});
      histogram.add(row.data(), tokens);
      if (!out->count_codes) continue;
      for (const int16_t code : row) ++out->codes[component][0][code];
    }
    if (histogram.empty()) continue;
    out->entropy_bits[component] +=
        code_entropy(histogram) * static_cast<double>(histogram.total());
    BookSpec spec;
    spec.books = std::min(scheme.books, heads * dim_block_count(d));
    Result<BookChoice> choice = choose_books(c, d, rows, spec);
    if (!choice) return choice.status();
    out->books[component] = std::move(*choice);
    const BookChoice& chosen = *out->books[component];
    for (int32_t h = 0; h < heads; ++h) {
      ComponentContext& context = out->context[h][component];
      context.family = &chosen.family;
      context.book_of = chosen.book_of.data() + h * dim_block_count(d);
    }
  }
  return Status::ok();
}

}  // namespace tierkv::analysis

#include "tools/analysis/layer_scheme.h"

#include <cmath>

namespace tierkv::analysis {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

Status prepare_row(const Scheme& scheme, const RowProfile& statistics, const CacheLayout& layout,
                   std::array<ComponentContext, 2>* out) {
  for (const Component c : kComponents) {
    ComponentContext& context = (*out)[static_cast<int>(c)];
    const ComponentFormat& format = scheme.high.of(c);
    context.basis = make_basis(format, c, statistics, layout.head_dim);
    if (format.step_rule != StepRule::kAbsolute) continue;
    context.step = static_cast<float>(make_step(format, c, statistics, layout.sm_scale));
    if (!(context.step > 0) || !std::isfinite(context.step)) {
      return Status(StatusCode::kInvalidArgument,
                    "no usable global step (all queries or values are zero)");
    }
  }
  return Status::ok();
}

Status build_codebook_of(const Scheme& scheme, const LayerData& data, Component c, Part part,
                         LayerScheme* out) {
  const int32_t head_dim = data.k[0].head_dim;
  CodeHistogram histogram(c, head_dim);
  for (size_t h = 0; h < out->plans.size(); ++h) {
    const RowCodec codec = out->row(scheme, data, static_cast<int32_t>(h));
    if (StatusCode code = codec.add_codes(c, part, &histogram); code != StatusCode::kOk) {
      return Status(code, "quantisation failed");
    }
  }
  if (histogram.empty()) return Status::ok();
  if (out->count_codes) {
    CodeCounts& counts = out->codes[static_cast<int>(c)][part == Part::kLow];
    for (int32_t code = histogram.min_code(); code <= histogram.max_code(); ++code) {
      if (histogram.count(code) > 0) counts[code] += static_cast<int64_t>(histogram.count(code));
    }
  }
  if (scheme.coder == Coder::kNone) return Status::ok();
  out->entropy_bits[static_cast<int>(c)] +=
      histogram.entropy_bits() * static_cast<double>(histogram.total());
  if (scheme.coder != Coder::kHuffman) return Status::ok();
  Result<Codebook> built = build_codebook(histogram);
  if (!built) return built.status();
  const bool low = part == Part::kLow;
  std::optional<Codebook>& book = out->codebooks[static_cast<int>(c)][low];
  book = std::move(built.value());
  for (auto& context : out->context) context[static_cast<int>(c)].codebooks[low] = &*book;
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

Status place_rows(const Scheme& scheme, const LayerData& data, const CacheLayout& layout,
                  const std::vector<RowProfile>& statistics, LayerScheme* out) {
  out->plans.resize(layout.num_kv_heads);
  out->context.resize(layout.num_kv_heads);
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    if (Status s = plan_row(scheme, data.tokens, data.significance[h], &out->plans[h]); !s)
      return s;
    if (Status s = prepare_row(scheme, statistics[h], layout, &out->context[h]); !s) return s;
  }
  return Status::ok();
}

Status build_codebooks(const Scheme& scheme, const LayerData& data, LayerScheme* out) {
  if (scheme.coder == Coder::kNone && !out->count_codes) return Status::ok();
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
  if (scheme.needs_statistics()) statistics = layer_statistics(data, layout, profile);
  if (Status s = place_rows(scheme, data, layout, statistics, out); !s) return s;
  return build_codebooks(scheme, data, out);
}

}  // namespace tierkv::analysis

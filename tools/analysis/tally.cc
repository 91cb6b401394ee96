// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/analyze.h"

#include <cmath>

namespace tierkv::analysis {
namespace {

std::optional<double> ratio_of(double numerator, double denominator) {
  if (!(denominator > 0)) return std::nullopt;
  return numerator / denominator;
}

}  // namespace

void Tally::add(const Tally& other) {
  values += other.values;
  stored_bytes += other.stored_bytes;
  page_bytes += other.page_bytes;
  for (int32_t i = 0; i < kNumTiers; ++i) tokens[i] += other.tokens[i];
  for (int32_t c = 0; c < 2; ++c) {
    component[c].error_squared += other.component[c].error_squared;
    component[c].norm_squared += other.component[c].norm_squared;
    component[c].entropy_bits += other.component[c].entropy_bits;
    component[c].coded_bits += other.component[c].coded_bits;
    component[c].symbols += other.component[c].symbols;
  }
  attention.error += other.attention.error;
  attention.error_online += other.attention.error_online;
  attention.cosine += other.attention.cosine;
  attention.queries += other.attention.queries;
  for (const auto& [key, row] : other.rows) {
    RowError& sum = rows[key];
    sum.error_squared += row.error_squared;
    sum.norm_squared += row.norm_squared;
    sum.sensitivity = row.sensitivity;
  }
  blocks.add(other.blocks);
  row_bytes += other.row_bytes;
  encode_seconds += other.encode_seconds;
  decode_seconds += other.decode_seconds;
  input_fp16_bytes += other.input_fp16_bytes;
}

double bits_per_value(const Tally& t) {
  return 8.0 * static_cast<double>(t.stored_bytes) / static_cast<double>(t.values);
}
double compression_ratio(const Tally& t) {
  return 16.0 / bits_per_value(t);
}
std::optional<double> page_ratio(const Tally& t) {
  return ratio_of(2.0 * static_cast<double>(t.values), static_cast<double>(t.page_bytes));
}

std::optional<double> relative_error(const Tally& t, Component c) {
  const Tally::PerComponent& s = t.component[static_cast<int>(c)];
  const std::optional<double> squared = ratio_of(s.error_squared, s.norm_squared);
  return squared ? std::optional<double>(std::sqrt(*squared)) : std::nullopt;
}
std::optional<double> entropy_bits(const Tally& t, Component c) {
  const Tally::PerComponent& s = t.component[static_cast<int>(c)];
  return ratio_of(s.entropy_bits, static_cast<double>(s.symbols));
}
std::optional<double> coded_bits(const Tally& t, Component c) {
  const Tally::PerComponent& s = t.component[static_cast<int>(c)];
  return ratio_of(s.coded_bits, static_cast<double>(s.symbols));
}

std::optional<double> attention_error(const Tally& t) {
  return ratio_of(t.attention.error, static_cast<double>(t.attention.queries));
}
std::optional<double> attention_error_online(const Tally& t) {
  return ratio_of(t.attention.error_online, static_cast<double>(t.attention.queries));
}
std::optional<double> attention_error_pooled(const Tally& t) {
  std::map<std::array<int32_t, 2>, Tally::RowError> layers;
  for (const auto& [key, row] : t.rows) {
    Tally::RowError& sum = layers[{key[0], key[1]}];
    sum.error_squared += row.error_squared;
    sum.norm_squared += row.norm_squared;
  }
  double total = 0;
  int64_t count = 0;
  for (const auto& [key, layer] : layers) {
    if (!(layer.norm_squared > 0)) continue;
    total += std::sqrt(layer.error_squared / layer.norm_squared);
    ++count;
  }
  return ratio_of(total, static_cast<double>(count));
}
std::optional<double> attention_error_weighted(const Tally& t) {
  double total = 0, weights = 0;
  for (const auto& [key, row] : t.rows) {
    if (!(row.norm_squared > 0)) continue;
    total += row.sensitivity * row.error_squared / row.norm_squared;
    weights += row.sensitivity;
  }
  const std::optional<double> mean = ratio_of(total, weights);
  return mean ? std::optional<double>(std::sqrt(*mean)) : std::nullopt;
}
std::optional<double> ranking_error(const Tally& t) {
  const std::optional<double> weighted = attention_error_weighted(t);
  return weighted ? weighted : attention_error_pooled(t);
}
const char* ranking_error_name(const Tally& t) {
  return attention_error_weighted(t) ? "weighted error" : "pooled error";
}
std::optional<double> attention_cosine(const Tally& t) {
  return ratio_of(t.attention.cosine, static_cast<double>(t.attention.queries));
}
std::optional<double> encode_gbps(const Tally& t) {
  return ratio_of(1e-9 * static_cast<double>(t.input_fp16_bytes), t.encode_seconds);
}
std::optional<double> decode_gbps(const Tally& t) {
  return ratio_of(1e-9 * static_cast<double>(t.input_fp16_bytes), t.decode_seconds);
}

}  // namespace tierkv::analysis

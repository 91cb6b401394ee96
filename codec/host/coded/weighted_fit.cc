// SPDX-License-Identifier: Apache-2.0
// How a row gets its weights, means and steps.
#include <cmath>
#include <string>

#include "codec/format/global_step.h"
#include "codec/format/sound_halves.h"
#include "codec/host/coded/weighted_rows.h"
#include "codec/host/coded/weighted_rows_checks.h"
#include "tierkv/layout.h"

namespace tierkv {
namespace {

// Below this a pair of channels is taken to have this energy.
constexpr double kLeastEnergy = 1e-9;

Status invalid(const char* what) {
  return Status(StatusCode::kInvalidArgument, std::string("weighted fit: ") + what);
}

bool positive(double x) {
  return std::isfinite(x) && x > 0;
}

// The fourth root of each pair's mean squared query, scaled to a mean square of 1.
std::vector<float> pair_weights(const double* energy, int32_t head_dim, const RopeTable* rope) {
  std::vector<double> root(energy, energy + head_dim);
  for (int32_t i = 0; rope != nullptr && i < rope->pairs; ++i) {
    double& a = root[pair_first(rope->pairing, i)];
    double& b = root[pair_second(rope->pairing, rope->pairs, i)];
    a = b = (a + b) / 2;
  }
  double sum = 0;
  for (double& x : root) sum += x = std::sqrt(std::fmax(x, kLeastEnergy));
  std::vector<float> weights;
  for (const double x : root) weights.push_back(static_cast<float>(std::sqrt(x * head_dim / sum)));
  return weights;
}

// The tokens' keys before RoPE.
std::vector<float> keys_before_rope(const WeightedTokens& keys, int32_t head_dim,
                                    const RopeTable* rope) {
  std::vector<float> x(keys.x, keys.x + int64_t{keys.tokens} * head_dim);
  for (int32_t t = 0; rope != nullptr && rope->pairs > 0 && t < keys.tokens; ++t) {
    undo_rope(*rope, keys.first_position + t, x.data() + int64_t{t} * head_dim);
  }
  return x;
}

// Sums of doubles in the order of the tokens, rounded to fp32, then to fp16.
Status find_means(const std::vector<float>& x, int32_t head_dim, std::vector<uint16_t>* means) {
  const auto tokens = static_cast<int64_t>(x.size()) / head_dim;
  for (int32_t d = 0; d < head_dim; ++d) {
    double sum = 0;
    for (int64_t t = 0; t < tokens; ++t) sum += static_cast<double>(x[t * head_dim + d]);
    const double mean = tokens == 0 ? 0 : sum / static_cast<double>(tokens);
    means->push_back(float_to_half(static_cast<float>(mean)));
    if (!is_finite_half(means->back())) {
      return Status(StatusCode::kOutOfRange, "weighted fit: a key's mean is beyond fp16");
    }
  }
  return Status::ok();
}

// Root mean square of the keys less their means: of each token as sum_of_squares(), of the tokens
// in doubles, in their order.
double rms_about(std::vector<float> x, const std::vector<uint16_t>& means) {
  const auto dims = static_cast<int32_t>(means.size());
  double sum = 0;
  for (size_t t = 0; t < x.size(); t += means.size()) {
    for (int32_t d = 0; d < dims; ++d) x[t + d] = add_rn(x[t + d], -half_to_float(means[d]));
    sum += static_cast<double>(sum_of_squares(x.data() + t, dims));
  }
  return x.empty() ? 0 : std::sqrt(sum / static_cast<double>(x.size()));
}

Status check(const WeightedFit& fit, int32_t head_dim, const WeightedTokens& keys,
             const RopeTable* rope) {
  if (head_dim < 1 || head_dim > kMaxHeadDim) return invalid("head_dim must be 1 to 4096");
  if (!positive(fit.k) || !positive(fit.v)) return invalid("k and v must be positive");
  if (!positive(fit.key_scale) || !positive(fit.value_scale)) {
    return invalid("head scales must be positive");
  }
  if (keys.tokens < 0 || (keys.tokens > 0 && keys.x == nullptr)) return invalid("no keys");
  if (fit.sm_scale < 0 || !std::isfinite(fit.sm_scale)) return invalid("sm_scale is negative");
  if (rope != nullptr && 2 * rope->pairs > head_dim) return invalid("rope turns more dims");
  if (rope != nullptr &&
      (keys.first_position < 0 || keys.first_position > rope->positions() - keys.tokens)) {
    return Status(StatusCode::kOutOfRange, "weighted fit: a position beyond the RoPE table");
  }
  for (int64_t i = 0; i < int64_t{keys.tokens} * head_dim; ++i) {
    if (!is_finite(keys.x[i])) {
      return Status(StatusCode::kNonFinite, "weighted fit: NaN or infinity in the keys");
    }
  }
  for (int32_t d = 0; fit.query_energy != nullptr && d < head_dim; ++d) {
    if (!std::isfinite(fit.query_energy[d]) || fit.query_energy[d] < 0) {
      return invalid("query_energy is negative or not finite");
    }
  }
  return Status::ok();
}

}  // namespace

Result<WeightedRow> fit_weighted_row(const WeightedFit& fit, int32_t head_dim,
                                     const WeightedTokens& keys, const RopeTable* rope) {
  if (Status s = check(fit, head_dim, keys, rope); !s) return s;
  WeightedRow row;
  row.head_dim = head_dim;
  row.rope = rope;
  row.value_step = static_cast<float>(fit.v * std::sqrt(12.0) * fit.value_scale);
  const std::vector<float> x = keys_before_rope(keys, head_dim, rope);
  if (fit.key_mean != nullptr) {
    row.key_mean.assign(fit.key_mean, fit.key_mean + head_dim);
  } else if (Status s = find_means(x, head_dim, &row.key_mean); !s) {
    return s;
  }
  double step = 0;
  if (fit.query_energy != nullptr) {
    row.key_weight = pair_weights(fit.query_energy, head_dim, rope);
    double trace = 0;
    for (int32_t d = 0; d < head_dim; ++d) trace += fit.query_energy[d];
    const double sm_scale = fit.sm_scale > 0 ? fit.sm_scale : 1 / std::sqrt(head_dim);
    if (trace > 0) step = key_step(fit.k, (1 + kMetricRidge) * trace, sm_scale);
  } else {
    step = fit.k * rms_about(x, row.key_mean);
  }
  // Keys that are all equal, or that no query looks at, have any step.
  row.key_step = static_cast<float>(step > 0 ? step * fit.key_scale : 1.0);
  if (Status s = row.validate(); !s) return s;
  return row;
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "codec/policy/profile.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "codec/format/errors.h"

namespace tierkv {
namespace {

constexpr double kScaleExponent = -0.25;
constexpr double kMaxScale = 8;

template <class T>
Status check_finite(const char* name, const std::vector<T>& values) {
  for (const T v : values) {
    if (!std::isfinite(v))
      return Status(StatusCode::kNonFinite,
                    std::string(name) + ": holds a value that is not finite");
  }
  return Status::ok();
}

// Each row has head_dim numbers of a field. An optional field may be empty in all rows.
Status check_vectors(const Profile& p) {
  const auto dim = static_cast<size_t>(p.head_dim);
  for (const ProfileField& f : kProfileFields) {
    const size_t size = (p.rows[0].*f.field).size();
    if (size != dim && !(f.optional && size == 0))
      return invalid(std::string(f.name) + ": row 0 has " + std::to_string(size) +
                     " numbers, not " + std::to_string(dim));
    for (const RowProfile& r : p.rows) {
      const std::vector<float>& v = r.*f.field;
      if (v.size() != size)
        return invalid(std::string(f.name) + ": some rows have it, some do not");
      if (Status s = check_finite(f.name, v); !s) return s;
    }
  }
  for (const RowProfile& r : p.rows) {
    for (const float e : r.query_energy) {
      if (e < 0) return invalid("query_energy: holds a negative value");
    }
  }
  return Status::ok();
}

Status check_scalars(const Profile& p) {
  struct Field {
    const char* name;
    double RowProfile::*field;
    bool positive;
  };
  static constexpr Field kFields[] = {{"query_trace", &RowProfile::query_trace, false},
                                      {"value_signal", &RowProfile::value_signal, false},
                                      {"key_scale", &RowProfile::key_scale, true},
                                      {"value_scale", &RowProfile::value_scale, true}};
  for (const Field& f : kFields) {
    std::vector<double> values;
    for (const RowProfile& r : p.rows) values.push_back(r.*f.field);
    if (Status s = check_finite(f.name, values); !s) return s;
    const double least = *std::min_element(values.begin(), values.end());
    if (least < 0 || (f.positive && least == 0))
      return invalid(std::string(f.name) + ": holds a value that is " +
                     (f.positive ? "not positive" : "negative"));
  }
  struct Sensitivity {
    const char* name;
    const std::vector<double>* values;
  };
  for (const Sensitivity& f : {Sensitivity{"key_sensitivity", &p.key_sensitivity},
                               {"value_sensitivity", &p.value_sensitivity},
                               {"joint_sensitivity", &p.joint_sensitivity}}) {
    if (f.values->empty()) continue;
    if (f.values->size() != p.rows.size())
      return invalid(std::string(f.name) + ": has " + std::to_string(f.values->size()) +
                     " numbers for " + std::to_string(p.rows.size()) + " heads");
    if (Status s = check_finite(f.name, *f.values); !s) return s;
    for (const double v : *f.values) {
      if (!(v > 0)) return invalid(std::string(f.name) + ": holds a value that is not positive");
    }
  }
  return Status::ok();
}

std::string shape_text(const std::string& id, int32_t layers, int32_t q_heads, int32_t kv_heads,
                       int32_t head_dim, double sm_scale) {
  return "'" + (id.empty() ? "unnamed" : id) + "' (" + std::to_string(layers) + " layers, " +
         std::to_string(q_heads) + " query heads, " + std::to_string(kv_heads) +
         " kv heads, head_dim " + std::to_string(head_dim) + ", sm_scale " +
         std::to_string(sm_scale) + ")";
}

}  // namespace

Status Profile::validate() const {
  if (model_id.empty()) return invalid("model_id: is empty; a profile names its model");
  CacheLayout layout;
  layout.num_layers = num_layers;
  layout.num_q_heads = num_q_heads;
  layout.num_kv_heads = num_kv_heads;
  layout.head_dim = head_dim;
  layout.sm_scale = sm_scale;
  if (Status s = layout.validate(); !s) return s;
  if (!std::isfinite(alpha_high) || !(alpha_low >= 0) || alpha_low > alpha_high)
    return invalid("alpha_high, alpha_low: must satisfy alpha_high >= alpha_low >= 0");
  if (static_cast<int64_t>(rows.size()) != static_cast<int64_t>(num_layers) * num_kv_heads)
    return invalid("rows: a profile needs a row per layer and head");
  if (rope.size() > 1 && static_cast<int64_t>(rope.size()) != num_layers)
    return invalid("rope: has " + std::to_string(rope.size()) + " layers, not 1 or " +
                   std::to_string(num_layers));
  for (const Rope& r : rope) {
    if (Status s = r.validate(head_dim); !s) return s;
  }
  if (Status s = check_vectors(*this); !s) return s;
  return check_scalars(*this);
}

Status Profile::check_model(const CacheLayout& layout, const std::string& id) const {
  const bool same = num_layers == layout.num_layers && num_q_heads == layout.num_q_heads &&
                    num_kv_heads == layout.num_kv_heads && head_dim == layout.head_dim &&
                    std::abs(sm_scale - layout.sm_scale) <= 1e-6 * sm_scale &&
                    (id.empty() || id == model_id);
  if (same) return Status::ok();
  return invalid("the profile is of " +
                 shape_text(model_id, num_layers, num_q_heads, num_kv_heads, head_dim, sm_scale) +
                 ", the cache of " +
                 shape_text(id, layout.num_layers, layout.num_q_heads, layout.num_kv_heads,
                            layout.head_dim, layout.sm_scale));
}

std::vector<double> head_scales(const std::vector<double>& sensitivities) {
  double mean = 0;
  for (const double s : sensitivities) mean += std::log(s);
  mean /= static_cast<double>(std::max<size_t>(sensitivities.size(), 1));
  std::vector<double> scales;
  for (const double s : sensitivities) {
    scales.push_back(
        std::clamp(std::exp(kScaleExponent * (std::log(s) - mean)), 1 / kMaxScale, kMaxScale));
  }
  return scales;
}

std::vector<int32_t> assign_classes(const std::vector<double>& shares,
                                    const std::vector<double>& sensitivities) {
  const auto heads = static_cast<int64_t>(sensitivities.size());
  std::vector<int64_t> order(heads);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return sensitivities[a] > sensitivities[b]; });
  std::vector<int32_t> classes(heads, static_cast<int32_t>(shares.size()));
  int64_t at = 0;
  for (size_t c = 0; c < shares.size(); ++c) {
    const auto wanted = static_cast<int64_t>(
        std::floor(std::min(shares[c], 1.0) * static_cast<double>(heads) + 0.5));
    for (const int64_t end = std::min(heads, at + wanted); at < end; ++at)
      classes[order[at]] = static_cast<int32_t>(c);
  }
  return classes;
}

}  // namespace tierkv

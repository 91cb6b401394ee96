// SPDX-License-Identifier: Apache-2.0
// A profile as a struct of arrays: which field of the one is which of the other.
#pragma once

#include <string>
#include <vector>

#include "capi/abi.h"
#include "codec/policy/profile.h"
#include "tierkv/tierkv_kv_c.h"

namespace tierkv::capi {

struct VectorField {
  const float* tkv_profile_data::*data;
  std::vector<float> RowProfile::*row;
  const char* name;  // null: may be null
};
inline constexpr VectorField kVectors[] = {
    {&tkv_profile_data::key_mean, &RowProfile::key_mean, "key_mean"},
    {&tkv_profile_data::value_mean, &RowProfile::value_mean, "value_mean"},
    {&tkv_profile_data::key_mean_before_rope, &RowProfile::key_mean_before_rope, nullptr},
    {&tkv_profile_data::query_energy, &RowProfile::query_energy, nullptr}};

struct ScalarField {
  const double* tkv_profile_data::*data;
  double RowProfile::*row;
  const char* name;  // null: may be null
};
inline constexpr ScalarField kScalars[] = {
    {&tkv_profile_data::query_trace, &RowProfile::query_trace, "query_trace"},
    {&tkv_profile_data::value_signal, &RowProfile::value_signal, "value_signal"},
    {&tkv_profile_data::key_scale, &RowProfile::key_scale, nullptr},
    {&tkv_profile_data::value_scale, &RowProfile::value_scale, nullptr}};

struct SensitivityField {
  const double* tkv_profile_data::*data;
  std::vector<double> Profile::*profile;
};
inline constexpr SensitivityField kSensitivities[] = {
    {&tkv_profile_data::key_sensitivity, &Profile::key_sensitivity},
    {&tkv_profile_data::value_sensitivity, &Profile::value_sensitivity},
    {&tkv_profile_data::joint_sensitivity, &Profile::joint_sensitivity}};

// `prefix` begins the names of fields.
inline Status read_rope(const tkv_rope& r, const std::string& prefix, const CacheLayout& layout,
                        std::vector<Rope>* out) {
  if (r.pairing < 0 || r.pairing > 2) return invalid(prefix + "pairing is unknown");
  if (r.layers != 1 && r.layers != layout.num_layers)
    return invalid(prefix + "layers must be 1 or num_layers");
  if (r.dims < 0 || r.dims > layout.head_dim) return invalid(prefix + "dims must be 0 to head_dim");
  if (r.dims > 0 && r.inv_freq == nullptr) return invalid(prefix + "inv_freq is null");
  for (int32_t i = 0; i < r.layers; ++i) {
    const float* first = r.inv_freq + static_cast<int64_t>(i) * (r.dims / 2);
    out->push_back({static_cast<RopePairing>(r.pairing), r.dims,
                    std::vector<float>(first, first + r.dims / 2)});
  }
  return Status::ok();
}

inline Status read_profile_arrays(const tkv_profile_data& data, Profile* p) {
  const int64_t rows = static_cast<int64_t>(data.num_layers) * data.num_kv_heads;
  p->rows.resize(rows);
  for (const VectorField& f : kVectors) {
    const float* in = data.*f.data;
    if (in == nullptr && f.name != nullptr) return invalid(std::string(f.name) + " is null");
    if (in == nullptr) continue;
    for (int64_t r = 0; r < rows; ++r)
      (p->rows[r].*f.row).assign(in + r * data.head_dim, in + (r + 1) * data.head_dim);
  }
  for (const ScalarField& f : kScalars) {
    const double* in = data.*f.data;
    if (in == nullptr && f.name != nullptr) return invalid(std::string(f.name) + " is null");
    if (in == nullptr) continue;
    for (int64_t r = 0; r < rows; ++r) p->rows[r].*f.row = in[r];
  }
  for (const SensitivityField& f : kSensitivities) {
    if (data.*f.data != nullptr) (p->*f.profile).assign(data.*f.data, data.*f.data + rows);
  }
  return Status::ok();
}

// The profile of a caller's struct; its arrays are copied. The values are not looked at.
inline Status read_profile_data(const tkv_profile_data* in, Profile* p) {
  tkv_profile_data data;
  if (Status s = read_struct(in, "profile", &data); !s) return s;
  if (data.model_id == nullptr) return invalid("model_id is null");
  CacheLayout layout;
  p->model_id = data.model_id;
  p->num_layers = layout.num_layers = data.num_layers;
  p->num_q_heads = layout.num_q_heads = data.num_q_heads;
  p->num_kv_heads = layout.num_kv_heads = data.num_kv_heads;
  p->head_dim = layout.head_dim = data.head_dim;
  p->sm_scale = layout.sm_scale = data.sm_scale;
  p->alpha_high = data.alpha_high;
  p->alpha_low = data.alpha_low;
  if (Status s = layout.validate(); !s) return s;
  const tkv_rope rope = {sizeof(tkv_rope), data.rope_pairing, data.rope_dims, data.rope_layers,
                         data.rope_inv_freq};
  if (data.rope_pairing != -1) {
    if (Status s = read_rope(rope, "rope_", layout, &p->rope); !s) return s;
  }
  return read_profile_arrays(data, p);
}

}  // namespace tierkv::capi

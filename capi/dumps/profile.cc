// SPDX-License-Identifier: Apache-2.0
// Profiles as numbers.
#include "codec/policy/profile.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory>
#include <utility>

#include "capi/abi.h"
#include "capi/profile_data.h"
#include "datasets/profile_file.h"
#include "tierkv/tierkv_dumps_c.h"

// The arrays of a profile, each in one piece.
struct tkv_profile {
  explicit tkv_profile(tierkv::Profile p) : profile(std::move(p)) {}

  tierkv::Profile profile;
  std::vector<float> vectors[4];   // of kVectors
  std::vector<double> scalars[4];  // of kScalars
  std::vector<float> inv_freq;     // [rope_layers, rope_dims / 2]
  int32_t rope_dims = 0;
};

namespace tierkv::capi {
namespace {

template <class T>
const T* pointer(const std::vector<T>& v) {
  return v.empty() ? nullptr : v.data();
}

void flatten(tkv_profile* out) {
  const Profile& p = out->profile;
  for (const RowProfile& r : p.rows) {
    for (size_t i = 0; i < std::size(kVectors); ++i) {
      const std::vector<float>& v = r.*kVectors[i].row;
      out->vectors[i].insert(out->vectors[i].end(), v.begin(), v.end());
    }
    for (size_t i = 0; i < std::size(kScalars); ++i) out->scalars[i].push_back(r.*kScalars[i].row);
  }
  for (const Rope& r : p.rope) out->rope_dims = std::max(out->rope_dims, r.rotary_dims);
  for (const Rope& r : p.rope) {
    out->inv_freq.insert(out->inv_freq.end(), r.inv_freq.begin(), r.inv_freq.end());
    out->inv_freq.resize(out->inv_freq.size() + out->rope_dims / 2 - r.inv_freq.size());
  }
}

Status open(const char* path, tkv_profile** out) {
  if (path == nullptr || out == nullptr) return invalid("path or profile is null");
  Result<Profile> read = datasets::read_profile(path);
  if (!read) return read.status();
  auto profile = std::make_unique<tkv_profile>(std::move(*read));
  flatten(profile.get());
  *out = profile.release();
  return Status::ok();
}

Status get_data(const tkv_profile* profile, tkv_profile_data* out) {
  tkv_profile_data data;
  if (profile == nullptr) return invalid("profile is null");
  if (Status s = read_struct(out, "data", &data); !s) return s;
  const Profile& p = profile->profile;
  data.model_id = p.model_id.c_str();
  data.num_layers = p.num_layers;
  data.num_q_heads = p.num_q_heads;
  data.num_kv_heads = p.num_kv_heads;
  data.head_dim = p.head_dim;
  data.sm_scale = p.sm_scale;
  data.alpha_high = p.alpha_high;
  data.alpha_low = p.alpha_low;
  data.rope_pairing = p.rope.empty() ? -1 : 0;
  for (const Rope& r : p.rope)
    data.rope_pairing = std::max(data.rope_pairing, static_cast<int32_t>(r.pairing));
  data.rope_dims = profile->rope_dims;
  data.rope_layers = static_cast<int32_t>(p.rope.size());
  data.rope_inv_freq = pointer(profile->inv_freq);
  for (size_t i = 0; i < std::size(kVectors); ++i)
    data.*kVectors[i].data = pointer(profile->vectors[i]);
  for (size_t i = 0; i < std::size(kScalars); ++i)
    data.*kScalars[i].data = pointer(profile->scalars[i]);
  for (const SensitivityField& f : kSensitivities) data.*f.data = pointer(p.*f.profile);
  write_struct(data, out);
  return Status::ok();
}

Status write(const tkv_profile_data* data, const char* path) {
  Profile profile;
  if (Status s = read_profile_data(data, &profile); !s) return s;
  if (path == nullptr) return invalid("path is null");
  return datasets::write_profile(path, profile);
}

Status read_sensitivities(const double* in, int32_t rows, std::vector<double>* out) {
  if (in == nullptr) return invalid("sensitivities is null");
  if (rows < 1) return invalid("rows must be positive");
  out->assign(in, in + rows);
  for (const double s : *out) {
    if (!(s > 0) || !std::isfinite(s)) return invalid("sensitivities must be positive and finite");
  }
  return Status::ok();
}

Status scales_of(const double* sensitivities, int32_t rows, double* scales) {
  std::vector<double> in;
  if (Status s = read_sensitivities(sensitivities, rows, &in); !s) return s;
  if (scales == nullptr) return invalid("scales is null");
  const std::vector<double> out = head_scales(in);
  std::copy(out.begin(), out.end(), scales);
  return Status::ok();
}

Status classes_of(const double* shares, int32_t num_shares,
                  const std::vector<double>& sensitivities, int32_t* classes) {
  if (num_shares < 0 || (shares == nullptr && num_shares > 0)) return invalid("shares is null");
  if (classes == nullptr) return invalid("classes is null");
  const std::vector<double> in(shares, shares + num_shares);
  for (const double s : in) {
    if (!(s >= 0 && s <= 1)) return invalid("shares must be 0 to 1");
  }
  const std::vector<int32_t> out = assign_classes(in, sensitivities);
  std::copy(out.begin(), out.end(), classes);
  return Status::ok();
}

}  // namespace
}  // namespace tierkv::capi

namespace capi = tierkv::capi;

extern "C" {

tkv_status tkv_profile_open(const char* path, tkv_profile** profile, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::open(path, profile); });
}

void tkv_profile_destroy(tkv_profile* profile) {
  delete profile;
}

tkv_status tkv_profile_get_data(const tkv_profile* profile, tkv_profile_data* data,
                                tkv_error* error) {
  return capi::guarded(error, [&] { return capi::get_data(profile, data); });
}

tkv_status tkv_profile_write(const tkv_profile_data* data, const char* path, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::write(data, path); });
}

tkv_status tkv_head_scales(const double* sensitivities, int32_t rows, double* scales,
                           tkv_error* error) {
  return capi::guarded(error, [&] { return capi::scales_of(sensitivities, rows, scales); });
}

tkv_status tkv_assign_classes(const double* shares, int32_t num_shares, const double* sensitivities,
                              int32_t rows, int32_t* classes, tkv_error* error) {
  return capi::guarded(error, [&] {
    std::vector<double> in;
    const tierkv::Status s = capi::read_sensitivities(sensitivities, rows, &in);
    return s ? capi::classes_of(shares, num_shares, in, classes) : s;
  });
}

}  // extern "C"

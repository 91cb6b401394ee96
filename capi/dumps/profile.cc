// Profiles, read as numbers.
#include "codec/profile.h"

#include <algorithm>
#include <cmath>

#include "capi/abi.h"
#include "datasets/profile_file.h"
#include "tierkv/tierkv_dumps_c.h"

struct tkv_profile {
  tierkv::Profile profile;
};

namespace tierkv::capi {
namespace {

// A file may lack some of the four.
bool has_matrix(const Profile& p) {
  return std::all_of(p.rows.begin(), p.rows.end(), [](const RowProfile& r) {
    return !r.key_forward.empty() && !r.key_inverse.empty() && !r.value_forward.empty() &&
           !r.value_inverse.empty();
  });
}

Status open(const char* path, tkv_profile** out) {
  if (path == nullptr || out == nullptr) return invalid("path or profile is null");
  Result<Profile> profile = datasets::read_profile(path);
  if (profile) *out = new tkv_profile{std::move(*profile)};
  return profile.status();
}

Status get_info(const tkv_profile* profile, tkv_profile_info* out) {
  tkv_profile_info info;
  if (profile == nullptr) return invalid("profile is null");
  if (Status s = read_struct(out, "info", &info); !s) return s;
  const Profile& p = profile->profile;
  info.num_layers = p.num_layers;
  info.num_kv_heads = p.num_kv_heads;
  info.head_dim = p.head_dim;
  info.matrix_basis = has_matrix(p) ? 1 : 0;
  info.alpha_high = p.alpha_high;
  info.alpha_low = p.alpha_low;
  info.balance_error = p.balance.error;
  info.balance_k = p.balance.k;
  info.balance_v = p.balance.v;
  write_struct(info, out);
  return Status::ok();
}

// Part `row` of an array of such parts.
void put(const std::vector<float>& part, size_t row, float* array) {
  if (array != nullptr) std::copy(part.begin(), part.end(), array + row * part.size());
}

Status check_component(const Profile& p, const tkv_profile_component& c) {
  if (c.component != TKV_KEY && c.component != TKV_VALUE) return invalid("component is unknown");
  if (c.steps != nullptr && !(c.error > 0 && std::isfinite(c.error))) {
    return invalid("error must be positive");
  }
  if (!(c.sm_scale >= 0 && std::isfinite(c.sm_scale))) return invalid("sm_scale is negative");
  bool matrix_steps = false;
  if (Status s = read_flag(c.matrix_steps, "matrix_steps", &matrix_steps); !s) return s;
  const bool wants_matrix = matrix_steps || c.forward != nullptr || c.inverse != nullptr;
  if (!wants_matrix || has_matrix(p)) return Status::ok();
  return Status(StatusCode::kNotFound, "the profile was calibrated without a matrix basis");
}

Status get_component(const tkv_profile* profile, const tkv_profile_component* in) {
  tkv_profile_component c;
  if (profile == nullptr) return invalid("profile is null");
  if (Status s = read_struct(in, "component", &c); !s) return s;
  const Profile& p = profile->profile;
  if (Status s = check_component(p, c); !s) return s;
  const auto part = static_cast<Component>(c.component);
  const bool key = part == Component::kKey;
  ComponentFormat format;
  format.step = c.error;
  format.basis = c.matrix_steps != 0 ? BasisKind::kMatrix : BasisKind::kMean;
  const double sm_scale = c.sm_scale > 0 ? c.sm_scale : 1 / std::sqrt(p.head_dim);
  for (size_t row = 0; row < p.rows.size(); ++row) {
    const RowProfile& r = p.rows[row];
    put(key ? r.key_mean : r.value_mean, row, c.means);
    put(key ? r.key_forward : r.value_forward, row, c.forward);
    put(key ? r.key_inverse : r.value_inverse, row, c.inverse);
    if (c.steps == nullptr) continue;
    c.steps[row] = static_cast<float>(make_step(format, part, r, sm_scale));
    if (!(c.steps[row] > 0 && std::isfinite(c.steps[row]))) {
      return Status(StatusCode::kCorrupt, "row " + std::to_string(row) + " has no step");
    }
  }
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

tkv_status tkv_profile_get_info(const tkv_profile* profile, tkv_profile_info* info,
                                tkv_error* error) {
  return capi::guarded(error, [&] { return capi::get_info(profile, info); });
}

tkv_status tkv_profile_get_component(const tkv_profile* profile,
                                     const tkv_profile_component* component, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::get_component(profile, component); });
}

}  // extern "C"

// kv-profile v1: a calibrated Profile in HDF5. rows = num_layers * num_kv_heads, layer-major.
//
// /  attributes: format="kv-profile", format_version=1, num_layers, num_kv_heads, head_dim,
//    alpha_h, alpha_l
// /statistics              float64 [rows, 4]: query trace, value signal, key matrix trace, value
//                          matrix trace
// /key_mean, /value_mean   float32 [rows, head_dim]
// /key_forward, /key_inverse, /value_forward, /value_inverse
//                          float32 [rows, head_dim, head_dim], optional
// /step_scales             float64 [rows, 2]: of keys, of values, positive; optional, and with it
//                          the attributes balance_error, balance_k, balance_v
#pragma once

#include <functional>
#include <string>

#include "codec/policy/profile.h"
#include "tierkv/status.h"

namespace tierkv::datasets {

// `between` (may be empty) is called after each array but the last; what it throws leaves no file.
Status write_profile(const std::string& path, const Profile& profile,
                     const std::function<void()>& between = {});
Result<Profile> read_profile(const std::string& path);

}  // namespace tierkv::datasets

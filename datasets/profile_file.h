// SPDX-License-Identifier: Apache-2.0
// kv-profile v2: a calibrated Profile in HDF5. rows = num_layers * num_kv_heads, layer-major.
//
// /  attributes: format="kv-profile", format_version=2, model_id (not empty), num_layers,
//    num_q_heads, num_kv_heads, head_dim, sm_scale, alpha_h, alpha_l
//    attributes rope_pairing ("none", "halves" or "neighbours") and rope_dims; both may be absent:
//    the rotation is unknown
// /rope_inv_freq           float32 [rope_dims / 2], or [num_layers, rope_dims / 2] where layers
//                          differ; zeros: a layer that is not rotated. Absent with "none"
// /key_mean, /value_mean   float32 [rows, head_dim]
// /key_mean_before_rope, /query_energy
//                          float32 [rows, head_dim], optional
// /query_trace, /value_signal, /key_scale, /value_scale
//                          float64 [rows]
// /key_sensitivity, /value_sensitivity, /joint_sensitivity
//                          float64 [rows], optional
//
// codec/policy/profile.h says what they mean.
#pragma once

#include <functional>
#include <string>

#include "codec/policy/profile.h"
#include "tierkv/status.h"

namespace tierkv::datasets {

// Refuses a profile that is not valid. `between` (may be empty) is called before each array; what
// it throws leaves no file. Without `overwrite` it is kIo where a file stands at the path.
Status write_profile(const std::string& path, const Profile& profile,
                     const std::function<void()>& between = {}, bool overwrite = true);
// Messages name the file and the attribute or dataset.
Result<Profile> read_profile(const std::string& path);
// The bytes of such a file; `name` stands for it in messages.
Result<Profile> read_profile_image(const std::string& name, const void* bytes, size_t size);

}  // namespace tierkv::datasets

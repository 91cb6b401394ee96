// SPDX-License-Identifier: Apache-2.0
// A profile for StoreConfig::profile: statistics of a model (docs/guides/calibrate.md).
#pragma once

#include <memory>

#include "tierkv/export.h"
#include "tierkv/status.h"
#include "tierkv/tierkv_c.h"

namespace tierkv {

struct Profile;

// Copies the numbers, which lie in host memory. tkv_profile_open() and tkv_profile_get_data()
// (tierkv_dumps_c.h) read them from a file. Errors: kInvalidArgument and kNonFinite; the message
// names the field.
TKV_API Result<std::shared_ptr<const Profile>> make_profile(const tkv_profile_data& data);

}  // namespace tierkv

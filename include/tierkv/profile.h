// SPDX-License-Identifier: Apache-2.0
// A profile for StoreConfig::profile: statistics of a model (docs/guides/calibrate.md).
#pragma once

#include <memory>

#include "tierkv/export.h"
#include "tierkv/status.h"
#include "tierkv/tierkv_c.h"

namespace tierkv {

struct Profile;

// Of numbers in host memory, which are copied: those that tkv_profile_open() and
// tkv_profile_get_data() (tierkv_dumps_c.h) read from a file, or the program's own.
// kInvalidArgument or kNonFinite with the field's name.
TKV_API Result<std::shared_ptr<const Profile>> make_profile(const tkv_profile_data& data);

}  // namespace tierkv

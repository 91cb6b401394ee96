// SPDX-License-Identifier: Apache-2.0
#include "tierkv/profile.h"

#include <utility>

#include "capi/abi.h"
#include "capi/profile_data.h"

namespace tierkv {

Result<std::shared_ptr<const Profile>> make_profile(const tkv_profile_data& data) {
  auto profile = std::make_shared<Profile>();
  Status s = capi::read_profile_data(&data, profile.get());
  if (s) s = profile->validate();
  if (!s) return s.with_context("profile");
  return std::shared_ptr<const Profile>(std::move(profile));
}

}  // namespace tierkv

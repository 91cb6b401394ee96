// SPDX-License-Identifier: Apache-2.0
// Statuses of the usual failures. Files whose messages begin with a name of their own have others.
#pragma once

#include <string>
#include <utility>

#include "tierkv/status.h"

namespace tierkv {

inline Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}
inline Status unsupported(std::string why) {
  return Status(StatusCode::kUnsupported, std::move(why));
}
inline Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, std::move(why));
}

}  // namespace tierkv

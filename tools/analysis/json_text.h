// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tierkv::analysis {

// JSON as a text that ends its line; indent -1: in one line. Names and ids from files may hold
// bytes that are no UTF-8, which become U+FFFD.
inline std::string json_text(const nlohmann::ordered_json& j, int indent) {
  return j.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace tierkv::analysis

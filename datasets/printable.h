// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace tierkv::datasets {

// Text from a file, fit for a message or a terminal: control characters replaced, at most 100
// bytes.
std::string printable(const std::string& text);

}  // namespace tierkv::datasets

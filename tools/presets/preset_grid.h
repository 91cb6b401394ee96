// SPDX-License-Identifier: Apache-2.0
// Grids of presets: a preset's text with alternatives separated by '/', at the place of its name,
// of any value but that of `classes` and of any suffix.
//
//   step:k=0.2/0.3/0.4,v=0.25/0.3   6 presets
//   k4v4/k8v4:window=64+/huffman    4 presets: each without a suffix and with +huffman
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tierkv/status.h"

namespace tierkv::analysis {

inline constexpr size_t kMaxGridPresets = 10000;

// The presets of a grid, the last alternative varying fastest; a text without '/' is a grid of one.
// Whether they are presets is for parse_preset() to say. kInvalidArgument for a name or value that
// is empty and for more than kMaxGridPresets.
Result<std::vector<std::string>> expand_grid(std::string_view text);

}  // namespace tierkv::analysis

// SPDX-License-Identifier: Apache-2.0
// Classes of heads in the text of a preset: CLASS[|CLASS]..., the most sensitive heads first.
//
//   CLASS  [SHARE*]HIGH[/LOW][@ALPHA_H[:ALPHA_L]]
//
//   0.1*k8v4|0.375*k4v4/k4v2@1|k4v2/k2v2@1
//
// HIGH and LOW are formats of 8, 4 or 2 bits, where 2 bits are clipped at the norm. Without LOW all
// tokens of the class are high. The last class may leave its share out: it is what is left.
#pragma once

#include <string_view>
#include <vector>

#include "tools/presets/scheme.h"

namespace tierkv::analysis {

// The recommended ones.
inline constexpr std::string_view kFastClasses = "0.1*k8v4|0.375*k4v4/k4v2@1|k4v2/k2v2@1";

// kInvalidArgument naming the class and what is wrong with it.
Result<std::vector<HeadClass>> parse_classes(std::string_view text);

}  // namespace tierkv::analysis

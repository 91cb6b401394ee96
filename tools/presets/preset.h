// SPDX-License-Identifier: Apache-2.0
// Presets: the names under which schemes are compared, `NAME[:key=value,...][+STAGE][+rot]`, where
// an entropy STAGE is huffman, fse, fixed or bitshuffle.
//
// A preset is parsed once into a Scheme, plain data that says how the tokens of a row are stored;
// nothing downstream looks at names. docs/reference/presets-and-metrics.md and the help of
// `tierkv analyze` have the names and defaults.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/presets/scheme.h"

namespace tierkv::analysis {

struct Preset {
  std::string text;  // as given
  Scheme scheme;
};

// kInvalidArgument with what is wrong in the text (an unknown name, key or value, a combination
// that makes no sense).
Result<Preset> parse_preset(std::string_view text);

// What `analyze` shows when no --preset is given and a profile serves them all, and the names for
// `--help`.
std::vector<std::string> default_presets();
std::string preset_help();

}  // namespace tierkv::analysis

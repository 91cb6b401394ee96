// SPDX-License-Identifier: Apache-2.0
// What the entry points over kv-dumps share: text handles, opened inputs, progress.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "capi/abi.h"
#include "codec/policy/profile.h"
#include "datasets/dump.h"
#include "tierkv/tierkv_dumps_c.h"
#include "tools/presets/preset.h"

struct tkv_text {
  std::string text;
};

namespace tierkv::capi {

Result<std::vector<datasets::DumpReader>> open_dumps(const char* const* files, size_t num_files);
// nullopt where path is null.
Result<std::optional<Profile>> open_profile(const char* path);
Result<analysis::Preset> read_preset(const char* text);

// Part `part` of `parts` equal ones; empty where the caller gave none.
Result<std::function<void(double)>> read_progress(const tkv_progress* progress, size_t part = 0,
                                                  size_t parts = 1);

}  // namespace tierkv::capi

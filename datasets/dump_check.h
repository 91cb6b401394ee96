// SPDX-License-Identifier: Apache-2.0
// What the structure of a kv-dump must satisfy, checked once when a file is opened.
#pragma once

#include <cstdint>
#include <string>

#include "datasets/dump.h"
#include "datasets/hdf5/hdf5_util.h"

namespace tierkv::datasets {

// Fills everything of `info` but its path. Messages start with the object's path in the file.
Status check_dump(hid_t file, DumpInfo* info);

// "/seq/<id>/layer/<layer>"
std::string layer_path(const std::string& sequence, int32_t layer);

}  // namespace tierkv::datasets

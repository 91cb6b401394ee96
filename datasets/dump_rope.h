// SPDX-License-Identifier: Apache-2.0
// How a kv-dump says how its keys were rotated: the attributes rope_pairing and rope_dims and the
// dataset rope_inv_freq of the root.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "datasets/hdf5/hdf5_util.h"
#include "tierkv/layout.h"
#include "tierkv/rope.h"

namespace tierkv::datasets {

// By RopePairing, in files.
inline constexpr const char* kPairingNames[] = {"none", "halves", "neighbours"};

// What a dump says without those three: no rotation where RoPE is not applied, plain RoPE over the
// whole head where rope_theta is known; empty: unknown.
std::vector<Rope> implied_rope(const CacheLayout& layout);

// [1] for all layers or [num_layers]; empty: unknown. Messages start with the object's path.
Result<std::vector<Rope>> read_rope(hid_t file, const CacheLayout& layout);

// The same three as texts, for formats without attributes: by name, empty where implied.
// Frequencies are decimals between spaces, one layer after the other.
std::map<std::string, std::string> rope_texts(const std::vector<Rope>& rope,
                                              const CacheLayout& layout);
// From a map that holds other names as well; messages name the text.
Result<std::vector<Rope>> parse_rope_texts(const std::map<std::string, std::string>& texts,
                                           const CacheLayout& layout);

// kInvalidArgument for a number of rotations that is not 0, 1 or num_layers, for one that does not
// fit the layout, and for layers that differ in pairing or in rotary dims.
Status check_rope(const std::vector<Rope>& rope, const CacheLayout& layout);
// False where the file cannot be written. `rope` passed check_rope(); what is implied is left out.
bool write_rope(hid_t file, const std::vector<Rope>& rope, const CacheLayout& layout);

}  // namespace tierkv::datasets

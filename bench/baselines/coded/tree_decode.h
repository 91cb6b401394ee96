// SPDX-License-Identifier: Apache-2.0
// Coded blocks decoded bit by bit through the tree of their codebook, as decode_coded() decodes
// them by its table: KVComp section 3.3.1, in two forms to compare with.
#pragma once

#include <cstdint>

#include "bench/baselines/coded/coded_decode.h"

namespace tierkv {

// Codebook::tree in device memory.
struct DeviceTree {
  const uint16_t* nodes = nullptr;  // [entries]
  int32_t entries = 0;
};
// Whether the tree may be that of the codebook: kInvalidArgument or, where the mode is neither
// kSingle nor kPair, kUnsupported.
Status validate_tree(const DeviceTree& tree, const DeviceCodebook& codebook);

enum class TreeForm {
  kLoop,   // a loop for each symbol, as long as its code word
  kArray,  // the paper's: one step for each bit, without a branch that depends on the bits
};

// One kernel; statuses, codes and values as decode_coded() leaves them. kArray holds all symbols of
// a block in shared memory, so fewer warps fit.
Status decode_by_tree(const CodedDecode& call, const DeviceTree& tree, TreeForm form,
                      GpuStream stream);

}  // namespace tierkv

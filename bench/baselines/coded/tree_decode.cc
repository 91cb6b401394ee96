// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/coded/tree_decode.h"

#include <string>

namespace tierkv {

Status validate_tree(const DeviceTree& tree, const DeviceCodebook& codebook) {
  const auto invalid = [](const char* what) {
    return Status(StatusCode::kInvalidArgument, std::string("tree decode: ") + what);
  };
  if (codebook.mode != BlockMode::kSingle && codebook.mode != BlockMode::kPair) {
    return Status(StatusCode::kUnsupported, "tree decode: trees of modes single and pair only");
  }
  if (codebook.levels < 2) return invalid("codebook.levels");
  if (tree.entries < 2 || tree.entries > 2 * kMaxSymbols) return invalid("tree.entries");
  if (tree.nodes == nullptr) return invalid("tree.nodes is needed");
  return Status::ok();
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/coded/coded_encode.h"

#include <string>

#include "tierkv/layout.h"

namespace tierkv {

Status CodedEncode::validate() const {
  const auto invalid = [](const char* what) {
    return Status(StatusCode::kInvalidArgument, std::string("coded encode: ") + what);
  };
  if (num_groups < 0) return invalid("num_groups is negative");
  if (head_dim < 1 || head_dim > kMaxHeadDim) return invalid("head_dim");
  if (size < 0) return invalid("size is negative");
  if (token_stride < head_dim) return invalid("token_stride is less than head_dim");
  if (codebook.streams_per_lane != 1 && codebook.streams_per_lane != 2) {
    return invalid("codebook.streams_per_lane");
  }
  if (codebook.mode != BlockMode::kPair && codebook.mode != BlockMode::kSingle) {
    return Status(StatusCode::kUnsupported, "coded encode: modes single and pair only");
  }
  if (cursor != nullptr && head_dim > kSliceDims) {
    return Status(StatusCode::kUnsupported, "coded encode: cursor with more than one slice");
  }
  const int32_t symbols =
      codebook.mode == BlockMode::kPair ? codebook.levels * codebook.levels : codebook.levels;
  if (codebook.levels < 2 || codebook.levels > 256 || symbols > kMaxSymbols) {
    return invalid("codebook.levels");
  }
  if (num_groups == 0) return Status::ok();
  if (codes == nullptr || bytes == nullptr || groups == nullptr || status == nullptr ||
      codebook.words == nullptr || codebook.cheapest == nullptr) {
    return invalid("codes, bytes, groups, status, codebook.words and cheapest are needed");
  }
  if (reinterpret_cast<uintptr_t>(bytes) % kBlockAlignment != 0) return invalid("bytes alignment");
  return Status::ok();
}

}  // namespace tierkv

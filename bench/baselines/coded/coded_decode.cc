// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/coded/coded_decode.h"

#include <string>

#include "tierkv/layout.h"

namespace tierkv {

Status CodedDecode::validate() const {
  const auto invalid = [](const char* what) {
    return Status(StatusCode::kInvalidArgument, std::string("coded decode: ") + what);
  };
  if (num_groups < 0) return invalid("num_groups is negative");
  if (head_dim < 1 || head_dim > kMaxHeadDim) return invalid("head_dim");
  if (size < 0) return invalid("size is negative");
  if (token_stride < head_dim) return invalid("token_stride is less than head_dim");
  if (max_block_bytes < kCodedBlockHeaderBytes || max_block_bytes > kMaxCodedBlockBytes) {
    return invalid("max_block_bytes");
  }
  if (is_raw_mode(codebook.mode)) return invalid("codebook.mode");
  if (codebook.max_length < 1 || codebook.max_length > kMaxCodeLength) {
    return invalid("codebook.max_length");
  }
  if (codebook.streams_per_lane != 1 && codebook.streams_per_lane != 2) {
    return invalid("codebook.streams_per_lane");
  }
  if (num_groups == 0) return Status::ok();
  if (bytes == nullptr || groups == nullptr || status == nullptr || codebook.table == nullptr) {
    return invalid("bytes, groups, status and codebook.table are needed");
  }
  if (reinterpret_cast<uintptr_t>(bytes) % kBlockAlignment != 0) return invalid("bytes alignment");
  if (codes == nullptr && values == nullptr) return invalid("neither codes nor values");
  if (values != nullptr && (steps == nullptr || num_steps < 1)) return invalid("steps");
  return Status::ok();
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "codec/gpu/coded/weighted_batch.h"

#include <string>

#include "codec/format/element.h"
#include "codec/format/head_dim.h"

namespace tierkv {
namespace {

Status invalid(const char* what) {
  return Status(StatusCode::kInvalidArgument, std::string("coded blocks: ") + what);
}

}  // namespace

Status DeviceWeightedRows::validate() const {
  if (!is_known_head_dim(head_dim)) {
    return Status(StatusCode::kUnsupported,
                  "coded blocks: head_dim must be 64, 96, 128 or 256 on the GPU");
  }
  if (num_rows < 0) return invalid("num_rows is negative");
  if (num_rows > 0 && (key_scales == nullptr || value_steps == nullptr)) {
    return invalid("key_scales and value_steps are needed");
  }
  if (rope.pairs < 0 || 2 * rope.pairs > head_dim) return invalid("rope.pairs");
  if (rope.pairs == 0) return Status::ok();
  if (rope.pairing != RopePairing::kHalves && rope.pairing != RopePairing::kNeighbours) {
    return invalid("rope.pairing");
  }
  if (rope.place == nullptr || rope.block == nullptr || rope.blocks < 1) {
    return invalid("rope without tables");
  }
  return Status::ok();
}

Status WeightedDecode::validate() const {
  if (Status s = rows.validate(); !s) return s;
  if (!is_raw_dtype(dtype)) return invalid("dtype must be float16 or bfloat16");
  if (token_stride < rows.head_dim) return invalid("token_stride is less than head_dim");
  if (size < 0) return invalid("size is negative");
  if (reinterpret_cast<uintptr_t>(bytes) % kBlockAlignment != 0) return invalid("bytes alignment");
  if (num_ranges < 0 || most_blocks < 0) return invalid("num_ranges or most_blocks is negative");
  if (book.codebook == nullptr) return invalid("a codebook is needed");
  if (book.max_length < 1 || book.max_length > kMaxCodeLength) {
    return invalid("max_length of a codebook");
  }
  if (max_block_bytes < kCodedBlockHeaderBytes || max_block_bytes > kMaxCodedBlockBytes) {
    return invalid("max_block_bytes");
  }
  if (num_ranges == 0 || most_blocks == 0) return Status::ok();
  if (bytes == nullptr || places == nullptr || ranges == nullptr || status == nullptr) {
    return invalid("bytes, places, ranges and status are needed");
  }
  return Status::ok();
}

}  // namespace tierkv

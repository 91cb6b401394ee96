// SPDX-License-Identifier: Apache-2.0
#include "attention/coded/coded_attention.h"

#include <cstdint>
#include <initializer_list>
#include <string>

#include "attention/coded/key_turning.h"
#include "codec/format/head_dim.h"
#include "tierkv/attention.h"

namespace tierkv {
namespace {

// Digits are fp16 numbers times 2^-18; below 2^-13 those are equally far from each other.
constexpr int32_t kMaxAttendedLevels = 32;

Status invalid(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, "coded attention: " + what);
}
Status unsupported(const std::string& what) {
  return Status(StatusCode::kUnsupported, "coded attention: " + what);
}

Status check_codebook(const DeviceCodebook& book, Component component, const std::string& name) {
  if (book.component != component) return invalid(name + ".codebook is of the other component");
  if (book.mode != BlockMode::kPair) {
    return unsupported(name + ".codebook: only pairs are decoded here");
  }
  if (book.levels < 2 || book.levels > kMaxAttendedLevels) {
    return unsupported(name + ".codebook: more than 32 levels");
  }
  if (book.max_length < 1 || book.max_length > kMaxCodeLength) {
    return invalid(name + ".codebook.max_length");
  }
  return Status::ok();
}

Status check_arrays(const CodedComponent& c, int32_t num_blocks, const std::string& name) {
  if (c.size < 0) return invalid(name + ".size is negative");
  if (reinterpret_cast<uintptr_t>(c.bytes) % kBlockAlignment != 0) {
    return invalid(name + ".bytes alignment");
  }
  if (c.codebook.table == nullptr || c.steps == nullptr) {
    return invalid(name + ".steps and table");
  }
  if (num_blocks > 0 && (c.bytes == nullptr || c.blocks == nullptr)) return invalid(name);
  return Status::ok();
}

Status check_weighted(const CodedAttention& call) {
  const WeightedRows& w = call.weighted;
  if (w.key_scales == nullptr || w.key_means == nullptr)
    return invalid("weighted.key_scales and key_means");
  for (const void* array : std::initializer_list<const void*>{w.key_scales, w.key_means,
                                                              w.place_turns, w.block_turns}) {
    if (reinterpret_cast<uintptr_t>(array) % kBlockAlignment != 0) {
      return invalid("weighted: an array is not aligned to 16 bytes");
    }
  }
  if (w.sink_tokens < 0 || w.sink_tokens > kMostRawSinks) {
    return invalid("weighted.sink_tokens must be 0 to 16");
  }
  if (w.pairing == RopePairing::kNone) return Status::ok();
  if (w.num_block_turns < 0 || w.place_turns == nullptr || w.block_turns == nullptr) {
    return invalid("weighted: the turns of RoPE");
  }
  if (w.pairs < 1 || 2 * w.pairs > call.head_dim) return invalid("weighted.pairs");
  if (w.pairing == RopePairing::kHalves && !halves_fit(w.pairs, call.head_dim)) {
    return unsupported(std::string("the dims of RoPE in halves ") + kHalvesThatFit);
  }
  return Status::ok();
}

}  // namespace

Status CodedAttention::validate() const {
  if (!is_known_head_dim(head_dim)) {
    return unsupported("head_dim must be 64, 96, 128 or 256");
  }
  if (columns < 1) return invalid("columns must be at least 1");
  if (q_len < 1 || q_len > kMaxQueryTokens) return invalid("q_len must be 1 to 8");
  if (q_len > 1 && (num_kv_heads < 1 || num_rows % num_kv_heads != 0)) {
    return invalid("num_kv_heads must divide num_rows");
  }
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
    return unsupported("dtype must be float16 or bfloat16");
  }
  if (num_rows < 0 || num_items < 0 || num_blocks < 0 || num_steps < 0) {
    return invalid("a count is negative");
  }
  if (!(sm_scale > 0)) return invalid("sm_scale must be positive");
  if (raw_blocks) return Status::ok();
  if (max_block_bytes < kCodedBlockHeaderBytes || max_block_bytes > kMaxCodedBlockBytes) {
    return invalid("max_block_bytes");
  }
  if (keys.codebook.streams_per_lane != 1 && keys.codebook.streams_per_lane != 2) {
    return invalid("streams per lane must be 1 or 2");
  }
  if (values.codebook.streams_per_lane != keys.codebook.streams_per_lane) {
    return unsupported("codebooks with different streams per lane");
  }
  if (Status s = check_codebook(keys.codebook, Component::kKey, "keys"); !s) return s;
  if (Status s = check_codebook(values.codebook, Component::kValue, "values"); !s) return s;
  return check_weighted(*this);
}

Status CodedAttention::validate_arrays() const {
  if (rows == nullptr || q == nullptr || out == nullptr || row_status == nullptr ||
      workspace == nullptr) {
    return invalid("rows, q, out, row_status and workspace are needed");
  }
  if (raw_blocks) {
    const bool there = keys.blocks != nullptr && values.blocks != nullptr &&
                       keys.bytes != nullptr && values.bytes != nullptr;
    return num_blocks == 0 || there ? Status::ok() : invalid("keys and values");
  }
  if (Status s = check_arrays(keys, num_blocks, "keys"); !s) return s;
  return check_arrays(values, num_blocks, "values");
}

}  // namespace tierkv

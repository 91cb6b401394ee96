// SPDX-License-Identifier: Apache-2.0
#include "attention/coded/coded_attention.h"

#include <cstdint>
#include <initializer_list>
#include <string>

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
  if (book.mode != BlockMode::kPair && book.mode != BlockMode::kSingle) {
    return unsupported(name + ".codebook: only single codes and pairs are decoded here");
  }
  if (book.levels < 2 || book.levels > kMaxAttendedLevels) {
    return unsupported(name + ".codebook: more than 32 levels");
  }
  if (book.max_length < 1 || book.max_length > kMaxCodeLength) {
    return invalid(name + ".codebook.max_length");
  }
  return Status::ok();
}

// The codebooks of a component; `first`: what all of the call must be like.
Status check_family(const CodedComponent& c, Component component, const DeviceCodebook& first,
                    const std::string& name) {
  if (c.num_others < 0 || (c.num_others > 0 && c.others == nullptr)) {
    return invalid(name + ".num_others");
  }
  if (c.num_others >= kMostCodedBooks) return unsupported(name + ": more than 16 codebooks");
  bool seen[256] = {};
  for (int32_t i = 0; i <= c.num_others; ++i) {
    const DeviceCodebook& book = i == 0 ? c.codebook : c.others[i - 1];
    if (Status s = check_codebook(book, component, name); !s) return s;
    if (book.streams_per_lane != first.streams_per_lane) {
      return unsupported(name + ": codebooks with different streams per lane");
    }
    if (book.mode != first.mode) return unsupported(name + ": codebooks of different modes");
    if (seen[book.table_id]) return invalid(name + ": two codebooks with one table id");
    seen[book.table_id] = true;
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
  for (int32_t i = 0; i < c.num_others; ++i) {
    if (c.others[i].table == nullptr) return invalid(name + ".others: table");
  }
  if (num_blocks > 0 && (c.bytes == nullptr || c.blocks == nullptr)) return invalid(name);
  return Status::ok();
}

Status check_weighted(const CodedAttention& call) {
  const WeightedRows& w = call.weighted;
  if (call.keys.num_others > 0 || call.values.num_others > 0) {
    return unsupported("weighted blocks of several codebooks");
  }
  if (call.keys.means != nullptr || call.values.means != nullptr) {
    return invalid("the means of weighted blocks belong in weighted.key_means");
  }
  if (w.key_means == nullptr) return invalid("weighted.key_means");
  for (const void* array : std::initializer_list<const void*>{
           w.key_scales, w.key_means, w.place_turns, w.block_turns, w.raw_sinks}) {
    if (reinterpret_cast<uintptr_t>(array) % kBlockAlignment != 0) {
      return invalid("weighted: an array is not aligned to 16 bytes");
    }
  }
  if (w.sink_tokens < 0 || w.sink_tokens > kMostRawSinks) {
    return invalid("weighted.sink_tokens must be 0 to 16");
  }
  if (w.raw_sinks_size < 0 || (w.raw_sinks_size > 0 && w.raw_sinks == nullptr)) {
    return invalid("weighted.raw_sinks");
  }
  if (w.pairing == RopePairing::kNone) return Status::ok();
  if (w.rotary_dims < 2 || w.rotary_dims % 2 != 0 || w.rotary_dims > call.head_dim ||
      w.num_block_turns < 0 || w.place_turns == nullptr || w.block_turns == nullptr) {
    return invalid("weighted: the turns of RoPE");
  }
  if (w.pairing == RopePairing::kHalves && w.rotary_dims != call.head_dim) {
    return unsupported("RoPE in halves over a part of the head");
  }
  return Status::ok();
}

}  // namespace

Status CodedAttention::validate() const {
  if (head_dim != 64 && head_dim != 96 && head_dim != 128 && head_dim != 256) {
    return unsupported("head_dim must be 64, 96, 128 or 256");
  }
  if (columns < 1) return invalid("columns must be at least 1");
  if (q_len < 1 || q_len > kMaxQueryTokens) return invalid("q_len must be 1 to 8");
  if ((q_len > 1 || sinks != nullptr) && (num_kv_heads < 1 || num_rows % num_kv_heads != 0)) {
    return invalid("num_kv_heads must divide num_rows");
  }
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
    return unsupported("dtype must be float16 or bfloat16");
  }
  if (num_rows < 0 || num_items < 0 || num_blocks < 0 || num_steps < 0 || num_means < 0) {
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
  if (Status s = check_family(keys, Component::kKey, keys.codebook, "keys"); !s) return s;
  if (Status s = check_family(values, Component::kValue, keys.codebook, "values"); !s) return s;
  return weighted.any() ? check_weighted(*this) : Status::ok();
}

Status CodedAttention::validate_arrays() const {
  if (rows == nullptr || q == nullptr || out == nullptr || row_status == nullptr ||
      workspace == nullptr) {
    return invalid("rows, q, out, row_status and workspace are needed");
  }
  if (window_size < 0 || num_window_pages < 0 || (window_size > 0 && window == nullptr) ||
      (num_window_pages > 0 && window_pages == nullptr)) {
    return invalid("window");
  }
  // Keys and values of 64 tokens.
  if (num_window_pages > 0 && (window_page_bytes < int64_t{kBlockTokens} * 4 * head_dim ||
                               window_page_bytes % kBlockAlignment != 0)) {
    return invalid("window_page_bytes");
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

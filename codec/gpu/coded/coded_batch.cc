#include "codec/gpu/coded/coded_batch.h"

#include <string>

#include "tierkv/layout.h"

namespace tierkv {

DeviceCodebook device_codebook(const Codebook& c) {
  DeviceCodebook d;
  d.max_length = c.max_length;
  d.levels = c.levels;
  d.base = c.base;
  d.streams_per_lane = c.streams_per_lane;
  d.mode = c.mode;
  d.component = c.component;
  d.table_id = c.table_id;
  d.tree_entries = static_cast<int32_t>(c.tree.size());
  return d;
}

std::vector<uint32_t> encoder_words(const Codebook& c) {
  std::vector<uint32_t> words;
  for (size_t s = 0; s < c.lengths.size(); ++s) {
    words.push_back(c.lengths[s] == 0 ? 0 : c.words[s] | uint32_t{c.lengths[s]} << 16);
  }
  return words;
}

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
  const bool raw = is_raw_mode(codebook.mode);
  if (!raw && (codebook.max_length < 1 || codebook.max_length > kMaxCodeLength)) {
    return invalid("codebook.max_length");
  }
  if (raw && !is_raw(codebook)) return invalid("codebook.mode");
  if (codebook.streams_per_lane != 1 && codebook.streams_per_lane != 2) {
    return invalid("codebook.streams_per_lane");
  }
  if (walk_tree) {
    if (codebook.mode != BlockMode::kSingle && codebook.mode != BlockMode::kPair) {
      return Status(StatusCode::kUnsupported, "coded decode: trees of modes single and pair only");
    }
    if (codebook.tree_entries < 2 || codebook.tree_entries > 2 * kMaxSymbols) {
      return invalid("codebook.tree_entries");
    }
    if (codebook.levels < 2) return invalid("codebook.levels");
    if (num_groups > 0 && codebook.tree == nullptr) return invalid("codebook.tree is needed");
  }
  if (num_groups == 0) return Status::ok();
  if (bytes == nullptr || groups == nullptr || status == nullptr ||
      (!raw && codebook.table == nullptr)) {
    return invalid("bytes, groups, status and codebook.table are needed");
  }
  if (reinterpret_cast<uintptr_t>(bytes) % kBlockAlignment != 0) return invalid("bytes alignment");
  if (codes == nullptr && values == nullptr) return invalid("neither codes nor values");
  if (values != nullptr && (steps == nullptr || num_steps < 1)) return invalid("steps");
  return Status::ok();
}

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
  const bool raw = is_raw(codebook);
  if (!raw && codebook.mode != BlockMode::kPair && codebook.mode != BlockMode::kSingle) {
    return Status(StatusCode::kUnsupported, "coded encode: modes single and pair only");
  }
  if (cursor != nullptr && head_dim > kSliceDims) {
    return Status(StatusCode::kUnsupported, "coded encode: cursor with more than one slice");
  }
  const int32_t symbols =
      codebook.mode == BlockMode::kPair ? codebook.levels * codebook.levels : codebook.levels;
  if (!raw && (codebook.levels < 2 || codebook.levels > 256 || symbols > kMaxSymbols)) {
    return invalid("codebook.levels");
  }
  if (num_groups == 0) return Status::ok();
  if (codes == nullptr || bytes == nullptr || groups == nullptr || status == nullptr ||
      (!raw && (codebook.words == nullptr || codebook.cheapest == nullptr))) {
    return invalid("codes, bytes, groups, status, codebook.words and cheapest are needed");
  }
  if (reinterpret_cast<uintptr_t>(bytes) % kBlockAlignment != 0) return invalid("bytes alignment");
  return Status::ok();
}

}  // namespace tierkv

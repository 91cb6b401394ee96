// SPDX-License-Identifier: Apache-2.0
// How the tensors of a cache are called in a safetensors file, and in which order their axes come.
#pragma once

#include <array>
#include <string>

#include "tierkv/status.h"

namespace tierkv::datasets {

// What a kv-dump holds of a layer.
enum class DumpPart { kKeys, kValues, kQueries, kQueryPositions, kSignificance };
inline constexpr int kNumDumpParts = 5;
inline constexpr DumpPart kDumpParts[kNumDumpParts] = {
    DumpPart::kKeys, DumpPart::kValues, DumpPart::kQueries, DumpPart::kQueryPositions,
    DumpPart::kSignificance};

// The axes of k, v and q; a batch axis has extent 1.
enum class TensorAxes {
  kHeadTokenDim,       // [heads, tokens, head_dim], as in a kv-dump
  kTokenHeadDim,       // [tokens, heads, head_dim]
  kBatchHeadTokenDim,  // [1, heads, tokens, head_dim]
  kBatchTokenHeadDim,  // [1, tokens, heads, head_dim]
};

struct TensorNames {
  // {layer} and {part} once each, {seq} at most once: without it there is one sequence.
  std::string layer = "seq.{seq}.layer.{layer}.{part}";
  std::string tokens = "seq.{seq}.tokens";  // {seq} as in `layer`
  std::array<std::string, kNumDumpParts> parts = {"k", "v", "q", "q_positions", "significance"};
  TensorAxes axes = TensorAxes::kHeadTokenDim;

  // past_key_values.{layer}.key and .value, [1, heads, tokens, head_dim].
  static TensorNames hugging_face();

  bool has_sequences() const { return layer.find("{seq}") != std::string::npos; }
  // kInvalidArgument; begins with names, tokens-name or part, as the options of `tierkv convert`
  // are called.
  Status validate() const;

  std::string layer_name(const std::string& seq, int32_t layer_index, DumpPart part) const;
  std::string tokens_name(const std::string& seq) const;
  // The inverse; false where the name is of another form. Layers are decimal without leading zeros,
  // below 100000; a sequence takes as few characters as it can.
  struct Place {
    std::string seq;  // empty without {seq}
    int32_t layer = 0;
    DumpPart part = DumpPart::kKeys;
  };
  bool match_layer(const std::string& name, Place* place) const;
  bool match_tokens(const std::string& name, std::string* seq) const;
};

}  // namespace tierkv::datasets

// SPDX-License-Identifier: Apache-2.0
// What the rows of one (sequence, layer) share under a scheme: how their tokens are placed, bases,
// steps and codebooks.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "codec/host/coded/weighted_books.h"
#include "tools/analysis/detail.h"
#include "tools/analysis/layer_data.h"
#include "tools/analysis/scheme/row_codec.h"

namespace tierkv::analysis {

struct LayerScheme {
  std::vector<Scheme> schemes;   // per kv_head where there are classes of heads; empty: all alike
  std::vector<int32_t> classes;  // per kv_head where they differ; empty: all alike
  std::vector<RowPlan> plans;    // per kv_head
  std::vector<std::array<ComponentContext, 2>> context;  // per kv_head, point into codebooks
  std::optional<Codebook> codebooks[2][2];               // [component][high, low]
  std::unique_ptr<BlockCoder> blocks[2][2];  // [component][high, low], of baseline coders
  double codebook_seconds = 0;
  double entropy_bits[2] = {0, 0};  // order-0 entropy of the body's codes, summed over them

  // Weighted steps.
  RopeTable rope;                               // pairing none: keys are compressed as stored
  std::vector<WeightedRow> weighted;            // per kv_head
  std::vector<std::vector<int8_t>> importance;  // per kv_head [tokens]; empty: none
  std::vector<int64_t> own_bytes;      // per kv_head: means and steps that no profile holds
  std::optional<BookChoice> books[2];  // by component

  bool count_codes = false;  // set it before build_codebooks() to have what follows filled
  CodeCounts codes[2][2];    // [component][high, low]
  CodeCounts exponents[2];   // [component], of weighted steps

  LayerScheme() = default;
  LayerScheme(const LayerScheme&) = delete;
  LayerScheme& operator=(const LayerScheme&) = delete;

  RowCodec row(const Scheme& scheme, const LayerData& data, int32_t kv_head) const {
    return RowCodec(scheme_of(scheme, kv_head), plans[kv_head],
                    {&data.k[kv_head], &data.v[kv_head]}, &context[kv_head][0],
                    &context[kv_head][1]);
  }
  // What a row of a layer under `scheme` is stored by.
  const Scheme& scheme_of(const Scheme& scheme, int32_t kv_head) const {
    return schemes.empty() ? scheme : schemes[kv_head];
  }
  int64_t codebook_bytes() const;
};

// Whether the profile, null where there is none, holds the sensitivities that the scheme's classes
// of heads or its default steps need.
Status check_sensitivities(const Scheme& scheme, const Profile* profile);
// Before place_rows(): the class of every row. The scheme passed check_sensitivities().
void take_classes(const Scheme& scheme, const CacheLayout& layout, const Profile* profile,
                  int32_t layer, LayerScheme* out);

// Per kv_head, from the profile or, without one, from the layer itself.
std::vector<RowProfile> layer_statistics(const LayerData& data, const CacheLayout& layout,
                                         const Profile* profile);

// Plans, bases and steps of every row. `scheme` must be the one for_head_dim() gave and valid.
// kInvalidArgument without a place.
Status place_rows(const Scheme& scheme, const LayerData& data, const CacheLayout& layout,
                  const std::vector<RowProfile>& statistics, LayerScheme* out);

// After place_rows(): entropies and, for Coder::kHuffman, codebooks. For Coder::kNone nothing but
// the counts of codes. What
// the quantiser says, without a place.
Status build_codebooks(const Scheme& scheme, const LayerData& data, LayerScheme* out);

// What place_rows() and build_codebooks() do for weighted steps (weighted_scheme.cc).
Status fit_weighted_rows(const Scheme& scheme, const LayerData& data, const CacheLayout& layout,
                         const std::vector<RowProfile>& statistics, LayerScheme* out);
Status build_weighted_books(const Scheme& scheme, const LayerData& data, LayerScheme* out);

// Both of the above.
Status prepare_layer(const Scheme& scheme, const LayerData& data, const CacheLayout& layout,
                     const Profile* profile, LayerScheme* out);

}  // namespace tierkv::analysis

// What the rows of one (sequence, layer) share under a scheme: how their tokens are placed, bases,
// steps and codebooks.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "tools/analysis/layer_data.h"
#include "tools/analysis/row_codec.h"

namespace tierkv::analysis {

struct LayerScheme {
  std::vector<RowPlan> plans;                            // per kv_head
  std::vector<std::array<ComponentContext, 2>> context;  // per kv_head, point into codebooks
  std::optional<Codebook> codebooks[2][2];               // [component][high, low]

  LayerScheme() = default;
  LayerScheme(const LayerScheme&) = delete;
  LayerScheme& operator=(const LayerScheme&) = delete;

  RowCodec row(const Scheme& scheme, const LayerData& data, int32_t kv_head) const {
    return RowCodec(scheme, plans[kv_head], {&data.k[kv_head], &data.v[kv_head]},
                    &context[kv_head][0], &context[kv_head][1]);
  }
};

// Statistics come from the profile or, without one, from the layer itself. `scheme` must be the one
// for_head_dim() gave and valid. kInvalidArgument, or what the quantiser says, without a place.
Status prepare_layer(const Scheme& scheme, const LayerData& data, const CacheLayout& layout,
                     const Profile* profile, LayerScheme* out);

}  // namespace tierkv::analysis

// SPDX-License-Identifier: Apache-2.0
#include "codec/format/channel_block.h"

#include <cstring>
#include <string>
#include <vector>

#include "codec/format/errors.h"
#include "codec/format/head_dim.h"

namespace tierkv {
namespace {

void put_half(uint8_t* p, uint16_t x) {
  std::memcpy(p, &x, 2);
}

Status check_keys(const ComponentFormat& k) {
  if (k.unit != Unit::kChannel) return unsupported("unit is not channel");
  if (k.group != 64 && k.group != kMaxChannelTokens) {
    return unsupported("group of " + std::to_string(k.group) + " tokens: 64 or 128");
  }
  return Status::ok();
}

Status check_component(const ComponentFormat& f) {
  if (f.step_rule != StepRule::kMinMax) return unsupported("step_rule");
  if (f.type != kCodes4 && f.type != kCodes2) {
    return unsupported(std::to_string(f.type.bits()) + " bits: 4 or 2");
  }
  if (f.entropy != Entropy::kNone) return unsupported("entropy coder");
  if (f.basis != BasisKind::kNone) return unsupported("basis");
  return Status::ok();
}

using Values = std::vector<float>;  // [tokens, head_dim]

void encode_keys(const ChannelLayout& l, const float* x, uint8_t* block) {
  const int32_t dim = l.head_dim(), bits = l.k_tile.type.bits();
  std::vector<uint8_t> codes(static_cast<size_t>(l.tokens) * dim);
  for (int32_t d = 0; d < dim; ++d) {
    QuantParams params;
    (void)quantize_minmax(x + d, l.tokens, dim, 1 << bits, &params, codes.data() + d);
    put_half(block + l.k_metadata + channel_scale_byte(d), params.scale);
    put_half(block + l.k_metadata + channel_zero_point_byte(d), params.zero_point);
    for (int32_t t = 0; t < l.tokens; ++t) {
      store_code(block + l.k_codes + t / kTileTokens * l.k_tile.bytes(),
                 code_position(l.k_tile, Component::kKey, t % kTileTokens, d), bits,
                 codes[t * dim + d]);
    }
  }
}

void encode_values(const ChannelLayout& l, const float* x, uint8_t* block) {
  const int32_t dim = l.head_dim(), bits = l.v_tile.type.bits();
  std::vector<uint8_t> codes(dim);
  for (int32_t t = 0; t < l.tokens; ++t) {
    QuantParams params;
    (void)quantize_minmax(x + t * dim, dim, 1, 1 << bits, &params, codes.data());
    put_half(block + l.value_metadata_byte(t), params.scale);
    put_half(block + l.value_metadata_byte(t) + 2, params.zero_point);
    for (int32_t d = 0; d < dim; ++d) {
      store_code(block + l.v_codes + t / kTileTokens * l.v_tile.bytes(),
                 code_position(l.v_tile, Component::kValue, t % kTileTokens, d), bits, codes[d]);
    }
  }
}

}  // namespace

Result<ChannelLayout> make_channel_layout(const TierFormat& format, int32_t head_dim) {
  if (!is_known_head_dim(head_dim)) {
    return unsupported("channel blocks of head_dim " + std::to_string(head_dim) +
                       ": 64, 96, 128 or 256");
  }
  if (head_dim == 256 && format.k.group != 64) {
    return unsupported("channel blocks of head_dim 256: a group of 64 tokens");
  }
  if (Status s = check_keys(format.k); !s) return s.with_context("keys");
  if (Status s = check_component(format.k); !s) return s.with_context("keys");
  if (format.v.unit != Unit::kToken) return unsupported("values: unit is not token");
  if (format.v.group != 0 && format.v.group != head_dim) {
    return unsupported("values: sub-groups of a head");
  }
  if (Status s = check_component(format.v); !s) return s.with_context("values");
  return channel_layout(head_dim, format.k.type.bits(), format.v.type.bits(), format.k.group);
}

// The values' parameters are finite because they are.
void encode_channel_block(const ChannelLayout& l, const float* k, const float* v, uint8_t* block) {
  std::memset(block, 0, l.bytes);
  encode_keys(l, k, block);
  encode_values(l, v, block);
}

}  // namespace tierkv

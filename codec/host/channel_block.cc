// SPDX-License-Identifier: Apache-2.0
#include "codec/format/channel_block.h"

#include <cstring>
#include <string>
#include <vector>

#include "codec/format/errors.h"
#include "codec/format/head_dim.h"

namespace tierkv {
namespace {

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

// A key channel's tokens, or a value token's channels, share scale and zero point.
void encode_component(const ChannelLayout& l, Component c, const float* x, uint8_t* block) {
  const bool key = c == Component::kKey;
  const TileLayout& tile = l.tile(c);
  const int32_t dim = l.head_dim(), bits = tile.type.bits();
  const int32_t groups = key ? dim : l.tokens, values = key ? l.tokens : dim;
  const int32_t group_stride = key ? 1 : dim, stride = key ? dim : 1;
  std::vector<uint8_t> codes(static_cast<size_t>(l.tokens) * dim);
  for (int32_t g = 0; g < groups; ++g) {
    const int32_t at = g * group_stride;
    QuantParams params;
    (void)quantize_minmax(x + at, values, stride, 1 << bits, &params, codes.data() + at);
    uint8_t* const to = block + l.scale_byte(c, g);
    std::memcpy(to, &params.scale, 2);
    std::memcpy(to + zero_point_apart(c), &params.zero_point, 2);
  }
  for (int32_t t = 0; t < l.tokens; ++t) {
    uint8_t* to = block + l.codes(c) + t / kTileTokens * tile.bytes();
    for (int32_t d = 0; d < dim; ++d) {
      store_code(to, code_position(tile, c, t % kTileTokens, d), bits, codes[t * dim + d]);
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
  encode_component(l, Component::kKey, k, block);
  encode_component(l, Component::kValue, v, block);
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// Channel-wise keys: blocks of 64 or 128 tokens of one row whose keys share a scale and zero point
// per channel, for caches without tiers. The newest tokens of a row stay raw (fp16) in its residual
// until they fill a block; the append that brings the last one quantises it, and the block never
// changes again. Values are quantised token-wise as everywhere.
//
// A block holds, each segment aligned to 64 bytes:
//   key codes | key metadata | value codes | value metadata
// Codes and value metadata are those of pages (codec/format/page_layout.h). Key metadata is 4 bytes
// a channel, in the order of the B fragments that it is multiplied into: for dims
// 16 f + {2t, 2t + 1, 2t + 8, 2t + 9} four scales, then four zero points, 16 bytes.
//
// Sources: KIVI (channel-wise keys), BitDecoding section 4 (KC, the residual block and its kernel);
// the layout of the metadata is ours.
#pragma once

#include <cstdint>
#include <cstring>

#include "codec/format/page_layout.h"
#include "codec/format/quantize.h"
#include "tierkv/format.h"
#include "tierkv/status.h"

namespace tierkv {

inline constexpr int32_t kMaxChannelTokens = 128;

// Bytes from a scale to its zero point.
TKV_HD constexpr int32_t zero_point_apart(Component c) {
  return c == Component::kKey ? 8 : 2;
}
// Byte of a channel's scale, from the start of the key metadata.
TKV_HD constexpr int32_t channel_scale_byte(int32_t dim) {
  const int32_t in_block = dim % kDimBlock;
  return dim / kDimBlock * 64 + in_block % 8 / 2 * 16 + in_block / 8 * 4 + in_block % 2 * 2;
}

// Byte offsets from the start of a block.
struct ChannelLayout {
  TileLayout k_tile, v_tile;
  int32_t tokens;  // of a block: 64 or 128
  int32_t k_codes, k_metadata, v_codes, v_metadata;
  int32_t bytes;  // of a block; a multiple of 128

  TKV_HD constexpr int32_t tiles() const { return tokens / kTileTokens; }
  TKV_HD constexpr int32_t head_dim() const { return k_tile.head_dim; }
  TKV_HD constexpr const TileLayout& tile(Component c) const {
    return c == Component::kKey ? k_tile : v_tile;
  }
  TKV_HD constexpr int32_t codes(Component c) const {
    return c == Component::kKey ? k_codes : v_codes;
  }
  // Of channel `group` of the keys, or of token `group` of the values.
  TKV_HD constexpr int32_t scale_byte(Component c, int32_t group) const {
    if (c == Component::kKey) return k_metadata + channel_scale_byte(group);
    return v_metadata + group / kTileTokens * kMetadataBlockBytes +
           token_metadata_byte(0, group % kTileTokens);
  }
};

constexpr ChannelLayout channel_layout(int32_t head_dim, int32_t k_bits, int32_t v_bits,
                                       int32_t tokens) {
  ChannelLayout l{};
  l.k_tile = {CodeType::uniform(k_bits), head_dim};
  l.v_tile = {CodeType::uniform(v_bits), head_dim};
  l.tokens = tokens;
  l.k_metadata = tokens * head_dim * k_bits / 8;
  l.v_codes = l.k_metadata + 4 * head_dim;
  l.v_metadata = l.v_codes + tokens * head_dim * v_bits / 8;
  l.bytes = (l.v_metadata + 4 * tokens + 127) / 128 * 128;
  return l;
}
// kUnsupported, by name, unless head_dim is 64, 96, 128 or 256, keys are min-max of 4 or 2 bits per
// channel in groups of 64 or, but for head_dim 256, 128 tokens and values min-max of 4 or 2 bits
// per token, both without entropy coder and basis.
Result<ChannelLayout> make_channel_layout(const TierFormat& format, int32_t head_dim);

// Writes a block, l.bytes, of finite fp16 values k and v, [l.tokens, head_dim].
void encode_channel_block(const ChannelLayout& layout, const float* k, const float* v,
                          uint8_t* block);

// The block's value at (token, dim).
TKV_HD float channel_value(const ChannelLayout& l, const uint8_t* block, Component component,
                           int32_t token, int32_t dim) {
  const TileLayout& tile = l.tile(component);
  const CodePosition at = code_position(tile, component, token % kTileTokens, dim);
  const uint8_t* params =
      block + l.scale_byte(component, component == Component::kKey ? dim : token);
  const uint8_t* codes = block + l.codes(component) + token / kTileTokens * tile.bytes();
  uint16_t scale, zero_point;
  memcpy(&scale, params, 2);
  memcpy(&zero_point, params + zero_point_apart(component), 2);
  return dequantize(static_cast<int32_t>(load_code(codes, at, tile.type.bits())),
                    half_to_float(scale), half_to_float(zero_point));
}

}  // namespace tierkv

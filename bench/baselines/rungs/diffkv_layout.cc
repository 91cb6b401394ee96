// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/rungs/diffkv_layout.h"

#include <cstring>

namespace tierkv {
namespace {

uint32_t code_at(const PageLayout& page, Component component, const uint8_t* from,
                 DiffkvPlace place) {
  const TileLayout& tile = page.tile(component);
  const CodePosition at = code_position(tile, component, place.token % kTileTokens, place.dim);
  uint32_t word;
  std::memcpy(&word, from + page.tile_codes_byte(component, place.token / kTileTokens) + at.byte,
              4);
  return word >> at.bit & ((1u << tile.type.bits()) - 1);
}

void put_bits(uint8_t* to, int64_t bit, int32_t bits, uint32_t code) {
  if (bits == 16) {
    const auto half = static_cast<uint16_t>(code);
    std::memcpy(to + bit / 8, &half, 2);
    return;
  }
  const auto shift = static_cast<int32_t>(bit % 8);
  const uint32_t mask = ((1u << bits) - 1) << shift;
  to[bit / 8] = static_cast<uint8_t>((to[bit / 8] & ~mask) | code << shift);
}

void transcode_component(const PageLayout& page, Component component, const uint8_t* from,
                         uint8_t* to) {
  const bool key = component == Component::kKey;
  const int32_t bits = page.tile(component).type.bits();
  for (int32_t i = 0; i < page.tokens * page.head_dim(); ++i) {
    const DiffkvPlace place =
        key ? diffkv_key_place(bits, page.tokens, i) : diffkv_value_place(bits, page.tokens, i);
    put_bits(to + page.tile_codes_byte(component, 0), static_cast<int64_t>(i) * bits, bits,
             code_at(page, component, from, place));
  }
  if (bits == 16) return;
  for (int32_t token = 0; token < page.tokens; ++token) {
    std::memcpy(to + page.tile_metadata_byte(component, 0) + 4 * token,
                from + page.tile_metadata_byte(component, token / kTileTokens) +
                    token_metadata_byte(0, token % kTileTokens),
                4);
  }
}

}  // namespace

void transcode_page(const PageLayout& page, const uint8_t* from, uint8_t* to) {
  transcode_component(page, Component::kKey, from, to);
  transcode_component(page, Component::kValue, from, to);
}

}  // namespace tierkv

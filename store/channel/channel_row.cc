#include "store/channel/channel_row.h"

#include <cstring>

#include "codec/format/element.h"
#include "codec/format/quantize.h"

namespace tierkv {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

}  // namespace

void RawSide::put(Component c, int32_t position, const uint16_t* x) const {
  uint8_t* page = s->raw_page(row, first, position);
  if (position % kTileTokens == 0) {
    std::memset(page + s->raw_tile_byte(c, position), 0,
                static_cast<size_t>(TileLayout{kRawCodes, s->head_dim()}.bytes()));
  }
  for (int32_t d = 0; d < s->head_dim(); ++d) {
    std::memcpy(page + s->raw_value_byte(c, position, d), &x[d], sizeof(x[d]));
  }
}

void RawSide::get(Component c, int32_t position, uint16_t* x) const {
  const uint8_t* page = s->raw_page(row, first, position);
  for (int32_t d = 0; d < s->head_dim(); ++d) {
    std::memcpy(&x[d], page + s->raw_value_byte(c, position, d), sizeof(x[d]));
  }
}

void RawSide::clear_tail(int32_t num_tokens) const {
  const std::vector<uint16_t> none(s->head_dim());
  for (const Component c : kComponents) {
    for (int32_t p = num_tokens; p % kTileTokens != 0; ++p) put(c, p, none.data());
  }
}

std::vector<uint16_t> token_as_half(const ChannelTokens& tokens, int32_t position,
                                    int32_t head_dim) {
  std::vector<uint16_t> x(head_dim);
  const int64_t at = tokens.first + (position - tokens.first_position) * tokens.stride;
  for (int32_t d = 0; d < head_dim; ++d) {
    x[d] = float_to_half(load_element(tokens.x, tokens.dtype, at + d));
  }
  return x;
}

void encode_blocks(const BlockTokens& from, int32_t first_block, int32_t end_block) {
  const ChannelView& s = *from.raw.s;
  const int32_t dim = s.head_dim(), tokens = s.layout.tokens;
  std::vector<float> x[2];
  std::vector<uint16_t> raw(dim);
  for (int32_t b = first_block; b < end_block; ++b) {
    for (const Component c : kComponents) {
      const ChannelTokens* added = from.added[static_cast<size_t>(c)];
      std::vector<float>& values = x[static_cast<size_t>(c)];
      values.clear();
      for (int32_t p = b * tokens; p < (b + 1) * tokens; ++p) {
        if (added != nullptr && p >= added->first_position) {
          raw = token_as_half(*added, p, dim);
        } else {
          from.raw.get(c, p, raw.data());
        }
        for (const uint16_t value : raw) values.push_back(half_to_float(value));
      }
    }
    encode_channel_block(s.layout, x[0].data(), x[1].data(), s.block(from.raw.row, b));
  }
}

float stored_value(const ChannelView& s, int32_t row, Component c, int32_t position, int32_t dim) {
  const SequenceInfo& info = s.infos[row / s.rows_per_sequence()];
  const int32_t tokens = s.layout.tokens;
  if (position < info.window_first) {
    return channel_value(s.layout, s.block(row, position / tokens), c, position % tokens, dim);
  }
  uint16_t x;
  const uint8_t* page = s.raw_page(row, info.window_first, position);
  std::memcpy(&x, page + s.raw_value_byte(c, position, dim), sizeof(x));
  return half_to_float(x);
}

uint16_t raw_of_block(const ChannelView& s, int32_t row, Component c, int32_t position,
                      int32_t dim) {
  return float_to_half(saturate_to_half_range(stored_value(s, row, c, position, dim)));
}

}  // namespace tierkv

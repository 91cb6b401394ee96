// Tokens and blocks of one row of a store of channel blocks, in host memory. Rows and positions are
// trusted: they come from the store's own state.
#pragma once

#include <cstdint>
#include <vector>

#include "store/channel/channel_shape.h"

namespace tierkv {

// One component of the tokens of an append: fp16, bf16 or fp32.
struct ChannelTokens {
  const void* x;
  int64_t first;   // element of the first token
  int64_t stride;  // elements from a token to the next
  DType dtype;
  int32_t first_position;
  int32_t count;
};

// A row whose raw side begins with the token `first`.
struct RawSide {
  const ChannelView* s;
  int32_t row;
  int32_t first;

  // `x` [head_dim]. The first token of a tile clears it.
  void put(Component c, int32_t position, const uint16_t* x) const;
  void get(Component c, int32_t position, uint16_t* x) const;
  // What is behind the row's `num_tokens` tokens in their last tile becomes zeros.
  void clear_tail(int32_t num_tokens) const;
};

// Writes the row's blocks first_block .. end_block - 1 from the tokens that `raw` holds and, from
// where they begin, those of an append (null: none).
struct BlockTokens {
  RawSide raw;
  const ChannelTokens* added[2];
};
void encode_blocks(const BlockTokens& from, int32_t first_block, int32_t end_block);

// x as fp16.
std::vector<uint16_t> token_as_half(const ChannelTokens& tokens, int32_t position,
                                    int32_t head_dim);
// One component of token `position`, as it reads: of a block or raw.
float stored_value(const ChannelView& s, int32_t row, Component c, int32_t position, int32_t dim);
// A value of a block as a raw one.
uint16_t raw_of_block(const ChannelView& s, int32_t row, Component c, int32_t position,
                      int32_t dim);

}  // namespace tierkv

// Fixed-rate blocks of a coded store, in host memory: which blocks become one, and what they hold.
// They lie among the coded blocks and say by their headers what they are.
#pragma once

#include <cstdint>
#include <vector>

#include "store/coded/coded_row.h"

namespace tierkv {

// Significance of a token of a prompt, on its raw page; of stores with fixed-rate blocks.
void set_raw_score(const CodedView& s, int32_t row, const SequenceInfo& info, int32_t position,
                   float significance);

// Whether raw block `block` is to be kept at a fixed rate.
bool becomes_fixed(const CodedView& s, int32_t row, const SequenceInfo& info, int32_t block);
// Appends it as a fixed-rate block; its values are those of raw_block_codes(), which took them.
void encode_fixed(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                  int32_t block, const float* mean, std::vector<uint8_t>* out);

// Whether the bytes of a block of the store's own making, or their header, are a fixed-rate one.
inline bool is_fixed_block(const uint8_t* bytes) {
  return is_fixed_mode(load_header(bytes).mode);
}
bool is_fixed_block(const CodedView& s, int32_t row, int32_t block);
int32_t fixed_blocks(const CodedView& s, int32_t row, int32_t blocks);

// What block `block` holds as raw tokens, [kBlockTokens, head_dim], coded or fixed.
Status read_block_values(const CodedView& s, const CodedBooks& books, int32_t row, Component c,
                         int32_t block, uint16_t* y);

}  // namespace tierkv

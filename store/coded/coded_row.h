// Tokens of one row of a coded store, in host memory. Rows and positions are trusted: they come
// from the store's own state.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/host/coded/histogram.h"
#include "store/coded/coded_books.h"
#include "store/coded/coded_shape.h"
#include "store/coded/coded_values.h"

namespace tierkv {

// What quantises one component of a row.
struct RowBasis {
  float step;
  const float* mean;  // [head_dim]
};

// One component of the tokens of an append: fp16, bf16 or fp32.
struct CodedTokens {
  const void* x;
  int64_t first;   // element of the first token
  int64_t stride;  // elements from a token to the next
  DType dtype;
  int32_t first_position;
  int32_t count;
};
// The values as fp16, [count, head_dim].
std::vector<uint16_t> half_values(const CodedTokens& tokens, int32_t head_dim);

// `x` [head_dim] at a position; clears its tile when it is the tile's first.
void put_raw_token(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                   int32_t position, const uint16_t* x);
void get_raw_token(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                   int32_t position, uint16_t* x);

// The means of a prompt's tokens, [head_dim].
std::vector<float> prompt_means(const CodedView& s, int32_t row, const SequenceInfo& info,
                                Component c);

// The range of a prompt's values without `mean`, [head_dim].
ValueRange prompt_range(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                        const float* mean);

// Values of raw block `block`, [kBlockTokens, head_dim]; in a prompt the mean is taken off.
void raw_block_values(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                      int32_t block, const float* mean, uint16_t* y);
// Codes of raw block `block`, [kBlockTokens, head_dim]. In a prompt the mean is taken off first.
// kOutOfRange; never past the prompt, where values were checked when they came in.
Status raw_block_codes(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                       int32_t block, const RowBasis& basis, int16_t* codes);

// Blocks of one row that wait for their pages: keys of a block, its values, keys of the next.
struct PendingBlocks {
  std::vector<uint8_t> bytes;
  std::vector<uint32_t> units;
};
// Units of side 0 when the blocks lie behind `end`.
int32_t end_of_blocks(const CodedView& s, int32_t end, const PendingBlocks& blocks);
// Writes them behind unit `end`, as blocks first_block and following; the pages are there.
void write_blocks(const CodedView& s, int32_t row, int32_t first_block, int32_t end,
                  const PendingBlocks& blocks);
// Units that the first `blocks` blocks of the row take, with what was skipped.
int32_t units_of_blocks(const CodedView& s, int32_t row, int32_t blocks);
// After its page `from` was exchanged for `to`.
void move_blocks(const CodedView& s, int32_t row, int32_t blocks, int32_t from, int32_t to);

uint8_t* block_bytes(const CodedView& s, CodedBlockRef ref);

// Codes of a coded block, [kBlockTokens, head_dim].
Status read_block(const CodedView& s, const CodedBooks& books, int32_t row, Component c,
                  int32_t block, int16_t* codes);

}  // namespace tierkv

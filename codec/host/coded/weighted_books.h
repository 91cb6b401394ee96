// SPDX-License-Identifier: Apache-2.0
// Codebooks of coded blocks: a family of at most four for each (layer, component), and which of
// them each dim block of each row takes.
//
// Dim blocks differ in how wide their codes spread. They are sorted by their mean squared code and
// cut into as many classes of equal size as the family has books. Four books save 0.6 to 0.8 % of
// fp16 in keys before RoPE and next to nothing in values; eight save 0.1 % more.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/host/coded/coded_block.h"
#include "codec/host/coded/histogram.h"

namespace tierkv {

struct BookChoice {
  BookFamily family;
  // [rows][dim_block_count(head_dim)]: what encode_block() takes for a row.
  std::vector<uint8_t> book_of;
};

// The codes of one row (kv_head) that books are made from: all of them, or the first 256 tokens.
struct RowCodes {
  const int16_t* codes = nullptr;  // [tokens, head_dim], starting at a block
  int64_t tokens = 0;
};

struct BookSpec {
  int32_t books = kMaxFamilyBooks;  // 1 to kMaxFamilyBooks
  // The rows are the beginning of what the books will code: what they have not shown yet gets code
  // words as well, see smoothed().
  bool sample = false;
  CodebookSpec code;  // code.table_id is the first book's id
};

// kInvalidArgument for rows or books that are not there; kUnsupported where no mode holds the codes
// usefully.
Result<BookChoice> choose_books(Component component, int32_t head_dim,
                                const std::vector<RowCodes>& rows, const BookSpec& spec = {});

// What a sample says about more codes, all in integers. Counts of codes are multiplied by 4096;
// going away from the most frequent code (the lowest of several), each count in [-128, 127] is at
// least an eighth of its neighbour's. A pair counts half of what it did and half of what its codes
// would give independently. A histogram with codes outside [-128, 127] comes back as it is.
CodeHistogram smoothed(const CodeHistogram& sample);

}  // namespace tierkv

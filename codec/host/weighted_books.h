// Codebooks of weighted blocks: a family of at most four for each (layer, component), and which of
// them each dim block of each row takes.
//
// Dim blocks differ in how wide their codes spread. They are sorted by their mean squared code and
// cut into as many classes of equal size as the family has books.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/host/histogram.h"
#include "codec/host/weighted_block.h"

namespace tierkv {

struct BookChoice {
  BookFamily family;
  // [rows][dim_block_count(head_dim)]: what encode_weighted_block() takes for a row.
  std::vector<uint8_t> book_of;
};

// The codes of one row (kv_head) that books are made from: all of them, or the first 256 tokens.
struct RowCodes {
  const int16_t* codes = nullptr;  // [tokens, head_dim], starting at a block
  int64_t tokens = 0;
};

// books: 1 to kMaxFamilyBooks. spec.table_id is the first book's id. kInvalidArgument for rows or
// books that are not there; kUnsupported where no mode holds the codes usefully.
Result<BookChoice> choose_books(Component component, int32_t head_dim,
                                const std::vector<RowCodes>& rows, int32_t books,
                                const CodebookSpec& spec = {});

}  // namespace tierkv

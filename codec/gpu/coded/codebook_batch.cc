// SPDX-License-Identifier: Apache-2.0
#include "codec/gpu/coded/codebook_batch.h"

#include <string>

namespace tierkv {

Status CodebookBuild::validate() const {
  const auto invalid = [](const char* what) {
    return Status(StatusCode::kInvalidArgument, std::string("codebook build: ") + what);
  };
  if (num_books < 0) return invalid("num_books is negative");
  if (book_stride < 1) return invalid("book_stride");
  if (max_length < 8 || max_length > kMaxCodeLength) return invalid("max_length");
  if (streams_per_lane != 1 && streams_per_lane != 2) return invalid("streams_per_lane");
  if (num_books == 0) return Status::ok();
  if (pairs == nullptr || wide == nullptr) return invalid("pairs and wide are needed");
  if (books == nullptr || tables == nullptr || words == nullptr || cheapest == nullptr ||
      lengths == nullptr) {
    return invalid("an output is missing");
  }
  if (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 16 != 0) {
    return invalid("workspace");
  }
  return Status::ok();
}

Result<Codebook> codebook_of_device(const DeviceCodebook& book, const uint8_t* lengths) {
  Codebook c;
  c.component = book.component;
  c.mode = book.mode;
  c.table_id = book.table_id;
  c.streams_per_lane = book.streams_per_lane;
  c.levels = book.levels;
  c.base = book.base;
  c.max_length = book.max_length;
  if (c.mode != BlockMode::kPair || c.levels < 2 || c.levels > 32) {
    return Status(StatusCode::kCorrupt, "codebook: not of pairs of 2 to 32 levels");
  }
  c.lengths.assign(lengths, lengths + c.symbol_count());
  if (Status s = complete_codebook(&c); !s) return Status(StatusCode::kCorrupt, s.message());
  return c;
}

}  // namespace tierkv

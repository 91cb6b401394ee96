// SPDX-License-Identifier: Apache-2.0
#include "tierkv/page_table.h"

#include <string>

namespace tierkv {
namespace {

Status invalid(const std::string& what) {
  return {StatusCode::kInvalidArgument, what};
}

Status validate_table(const PageTableShape& shape, int32_t t) {
  const std::string slots = "table_slots[" + std::to_string(t) + "]";
  const int32_t sides = shape.num_sides - 2 * t;
  if (sides <= 0) {
    return shape.table_slots[t] == 0 ? Status::ok() : invalid(slots + " without a side to use it");
  }
  if (shape.table_slots[t] < 1 || shape.table_slots[t] > kMaxTableSlots) {
    return invalid(slots + " must be 1 to " + std::to_string(kMaxTableSlots));
  }
  for (int32_t s = 2 * t; s < 2 * t + 2 && s < shape.num_sides; ++s) {
    const std::string tokens = "tokens_per_page[" + std::to_string(s) + "]";
    if (shape.tokens_per_page[s] < 1) return invalid(tokens + " must be positive");
    if (int64_t{shape.tokens_per_page[s]} * shape.table_slots[t] > INT32_MAX) {
      return invalid(tokens + " times " + slots + " exceeds 2^31 - 1");
    }
  }
  return Status::ok();
}

}  // namespace

Status PageTableShape::validate() const {
  if (num_sequences < 1 || num_sequences > kMaxSequences) {
    return invalid("num_sequences must be 1 to " + std::to_string(kMaxSequences));
  }
  if (rows_per_sequence < 1 || int64_t{rows_per_sequence} * num_sequences > INT32_MAX) {
    return invalid("rows_per_sequence must be positive, and num_rows at most 2^31 - 1");
  }
  if (num_sides < 1 || num_sides > kMaxSides) return invalid("num_sides must be 1 to 4");
  for (int32_t t = 0; t < kMaxTables; ++t) {
    if (Status s = validate_table(*this, t); !s) return s;
  }
  for (int32_t s = num_sides; s < kMaxSides; ++s) {
    if (tokens_per_page[s] != 0) return invalid("tokens_per_page of a side beyond num_sides");
  }
  return Status::ok();
}

}  // namespace tierkv

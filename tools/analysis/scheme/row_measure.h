// SPDX-License-Identifier: Apache-2.0
// What one stored row costs and loses: the numbers that a (row, scheme) adds to a Tally.
#pragma once

#include <vector>

#include "tools/analysis/analyze.h"
#include "tools/analysis/attention_error.h"
#include "tools/analysis/scheme/row_codec.h"

namespace tierkv::analysis {

// Queries of a row and what exact attention over all its tokens gives them. An empty tile: none.
struct ExactAttention {
  QueryTile tile;
  std::vector<double> outputs;  // [tile.count(), head_dim]
};
void attend_exactly(const RowInput& row, ExactAttention* attention);

// Values, bytes, pages, tiers and coded symbols of an encoded row. What the rows of a layer share
// (codebooks) and what a profile may hold (means, bases, steps) is for the caller to add.
void add_sizes(const RowCodec& codec, Tally* tally);

struct ValueErrorRequest {
  bool wanted = true;                  // errors of keys and values, and the time to decode
  PositionErrors* by_place = nullptr;  // the same errors by place, null: not wanted
};

// Decodes an encoded row once and compares it with the original: keys and values as asked for, and
// the attention outputs. pooled: the row's sums of squares.
StatusCode add_errors(const RowCodec& codec, const ExactAttention& exact,
                      const ValueErrorRequest& values, Tally* tally, Tally::RowError* pooled);

}  // namespace tierkv::analysis

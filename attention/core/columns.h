// SPDX-License-Identifier: Apache-2.0
// Query columns: the queries that share a row's pages, which are the columns of the kernel's
// matrices.
//
// Column c of a kv_head is head c % group of query c / group, of q_len queries: those of the newest
// tokens, in order. Query j sees every token but the newest q_len - 1 - j. A row of a launch holds
// at most most_columns() of them; where there are more, a kv_head becomes `passes` rows, each of
// which reads the pages anew.
#pragma once

#include <cstdint>

#include "tierkv/half.h"

namespace tierkv {

inline constexpr int32_t kBlockColumns = 8;   // of one mma
inline constexpr int32_t kNarrowColumns = 4;  // of a row: so many that a lane has scores of one
inline constexpr int32_t kMaxColumns = 2 * kBlockColumns;

// The most columns of a row. Wider rows would not leave room for the accumulators in registers.
TKV_HD constexpr int32_t most_columns(int32_t head_dim) {
  return head_dim <= 128 ? kMaxColumns : kBlockColumns;
}

struct QueryColumns {
  int32_t group = 1;  // q heads of a kv_head
  int32_t q_len = 1;
  int32_t num_kv_heads = 1;
  int32_t passes = 1;
  int32_t of_row = 1;  // columns of a row; the last pass may have fewer

  TKV_HD constexpr int32_t first(int32_t row) const {
    return passes == 1 ? 0 : row % passes * of_row;
  }

  // The place of a row's column in [count][q_len][num_q_heads], the order of q, out and lse; -1
  // where the row has no such column.
  TKV_HD constexpr int64_t place(int32_t row, int32_t column) const {
    const int32_t at = first(row) + column;
    if (column >= of_row || at >= group * q_len) return -1;
    const int32_t batch_row = passes == 1 ? row : row / passes;
    if (q_len == 1) return static_cast<int64_t>(batch_row) * group + at;
    const int32_t query = at / group, entry = batch_row / num_kv_heads;
    const int32_t kv_head = batch_row - entry * num_kv_heads;
    const int64_t line = static_cast<int64_t>(entry) * q_len + query;
    return (line * num_kv_heads + kv_head) * group + at - query * group;
  }

  // The row and the column of query j of an entry, of a q head.
  struct Place {
    int32_t row, column;
  };
  TKV_HD constexpr Place of_query(int32_t entry, int32_t j, int32_t q_head) const {
    const int32_t kv_head = q_head / group, at = j * group + q_head - kv_head * group;
    const int32_t pass = passes == 1 ? 0 : at / of_row;
    return {(entry * num_kv_heads + kv_head) * passes + pass, at - pass * of_row};
  }

  // The q head of a column; of one that the row does not have, any.
  TKV_HD constexpr int32_t head(int32_t row, int32_t column) const {
    const int32_t batch_row = passes == 1 ? row : row / passes;
    return batch_row % num_kv_heads * group + (first(row) + column) % group;
  }

  // The newest tokens that a column does not see.
  TKV_HD constexpr int32_t hidden(int32_t row, int32_t column) const {
    const int32_t query = (first(row) + column) / group;
    return query < q_len ? q_len - 1 - query : 0;
  }
};

inline constexpr int32_t kNoTail = 1 << 30;  // as `newest`: every token is older than all queries

// The age of tokens of the tier that holds the newest ones: 0 for the newest. `sinks` tokens at its
// beginning are older than all others; the rest may be a ring.
struct TailOrder {
  int32_t newest = kNoTail;  // index in the tier
  int32_t sinks = 0;
  int32_t ring = 0;  // tokens; 0: in order

  TKV_HD constexpr int32_t age(int32_t index) const {
    if (index < sinks) return kNoTail;
    return newest - index + (newest < index ? ring : 0);
  }
};

TKV_HD constexpr QueryColumns query_columns(int32_t num_q_heads, int32_t num_kv_heads,
                                            int32_t q_len, int32_t head_dim) {
  QueryColumns c;
  c.group = num_q_heads / num_kv_heads;
  c.q_len = q_len;
  c.num_kv_heads = num_kv_heads;
  const int32_t total = c.group * q_len, most = most_columns(head_dim);
  c.passes = (total + most - 1) / most;
  c.of_row = (total + c.passes - 1) / c.passes;
  return c;
}

}  // namespace tierkv

// Counting queries from the scores that attention has left (attention/token_scores.h): which
// columns are a query's, and what it does to the mean of a token. The kernel's arithmetic
// (store/device_count.cu), also for the host, where its test runs it.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/columns.h"
#include "attention/token_scores.h"
#include "codec/significance.h"
#include "store/sequence_info.h"
#include "tierkv/attention.h"

namespace tierkv {

inline constexpr int32_t kMostCountedColumns = 32;  // of the passes that have heads of a query

// The passes that have heads of a query.
struct QueryPasses {
  int32_t first, count;
};
TKV_HD QueryPasses query_passes(const QueryColumns& columns, int32_t query) {
  const int32_t begin = query * columns.group, end = begin + columns.group;
  const int32_t first = begin / columns.of_row;
  return {first, (end + columns.of_row - 1) / columns.of_row - first};
}

struct CountedQuery {
  int32_t counted;     // queries counted through it; 0: it is not counted
  QueryPasses passes;  // of a kv_head
  // By pass and column: -lse in log2 units, -infinity: not its column.
  float offsets[kMostCountedColumns];
};

// The queries of a sequence, in order.
struct CountedQueries {
  int32_t first;  // position
  CountSchedule schedule;
  CountedQuery of[kMaxQueryTokens];

  TKV_HD bool any(int32_t q_len) const {
    for (int32_t query = 0; query < q_len; ++query) {
      if (of[query].counted > 0) return true;
    }
    return false;
  }
};

// All but the offsets.
TKV_HD void start_queries(const QueryColumns& columns, const SequenceInfo& info, int32_t interval,
                          CountedQueries* queries) {
  queries->first = info.num_tokens - columns.q_len;
  queries->schedule = {info.prompt_tokens, interval};
  for (int32_t query = 0; query < columns.q_len; ++query) {
    const int32_t position = queries->first + query;
    const bool counts = position >= 0 && queries->schedule.is_counted(position);
    queries->of[query].counted = counts ? queries->schedule.counted_through(position) : 0;
    queries->of[query].passes = query_passes(columns, query);
  }
}

// Offset `at` % kMostCountedColumns of query `at` / kMostCountedColumns of a row of the batch; lse
// is [count, q_len, num_q_heads].
TKV_HD void load_offset(const QueryColumns& columns, const float* lse, int32_t batch_row,
                        int32_t at, CountedQueries* queries) {
  const int32_t query = at / kMostCountedColumns, place_in_query = at % kMostCountedColumns;
  if (query >= columns.q_len) return;
  const QueryPasses passes = query_passes(columns, query);
  const int32_t padded = score_columns(columns.of_row);
  const int32_t pass = place_in_query / padded, column = place_in_query % padded;
  if (pass >= passes.count) return;
  const int32_t row = batch_row * columns.passes + passes.first + pass;
  const int64_t place = columns.place(row, column);
  const bool mine = place >= 0 && (columns.first(row) + column) / columns.group == query;
  const float x = mine ? lse[place] : -INFINITY;
  queries->of[query].offsets[place_in_query] = x == -INFINITY ? -INFINITY : -x * kLog2E;
}

// Two neighbouring columns, in one access.
struct alignas(4) ScoreCodePair {
  uint16_t first, second;
};
struct alignas(8) ReferencePair {
  float first, second;
};

TKV_HD float larger_exponent(float largest, const ScoreCodePair& code,
                             const ReferencePair& reference, const float* offsets) {
  const float a = score_of_code(code.first) + reference.first + offsets[0];
  const float b = score_of_code(code.second) + reference.second + offsets[1];
  if (code.first != kNoProbability) largest = std::fmax(largest, a);
  if (code.second != kNoProbability) largest = std::fmax(largest, b);
  return largest;
}

// The exponent of two of the largest probability that the query gave token `in_tile` of a tile;
// `row` is the first of the launch that has heads of the query.
TKV_HD float largest_exponent(const TokenScores& scores, const CountedQuery& query, int32_t row,
                              int32_t row_tile, int32_t in_tile) {
  float largest = -INFINITY;
  for (int32_t pass = 0; pass < query.passes.count; ++pass) {
    const int64_t tile = scores.tile(row + pass, row_tile);
    const auto* codes = reinterpret_cast<const ScoreCodePair*>(scores.token_codes(tile, in_tile));
    const auto* references = reinterpret_cast<const ReferencePair*>(scores.tile_references(tile));
    const float* offsets = query.offsets + pass * scores.columns;
    for (int32_t pair = 0; pair < scores.columns / 2; ++pair) {
      largest = larger_exponent(largest, codes[pair], references[pair], offsets + 2 * pair);
    }
  }
  return largest;
}

// The same where all heads of one query are kColumns columns of one row, in two halves: what is
// read, so that a thread has several tokens in flight, and what follows from it.
template <int32_t kColumns>
struct TokenColumns {
  static constexpr int32_t kPairs = kColumns > 2 ? kColumns / 2 : 1;
  ScoreCodePair codes[kPairs];
  ReferencePair references[kPairs];
};
// Of token `slot` of the page that begins with tile `first_tile` of the row: tiles follow each
// other.
template <int32_t kColumns>
TKV_HD TokenColumns<kColumns> load_columns(const TokenScores& scores, int32_t row,
                                           int32_t first_tile, int32_t slot) {
  TokenColumns<kColumns> token;
  const int64_t tile = scores.tile(row, first_tile);
  const auto* codes =
      reinterpret_cast<const ScoreCodePair*>(scores.codes + tile * kTileTokens * kColumns);
  const auto* references =
      reinterpret_cast<const ReferencePair*>(scores.references + tile * kColumns);
  for (int32_t pair = 0; pair < kColumns / 2; ++pair) {
    token.codes[pair] = codes[slot * (kColumns / 2) + pair];
    token.references[pair] = references[slot / kTileTokens * (kColumns / 2) + pair];
  }
  return token;
}
template <int32_t kColumns>
TKV_HD float largest_exponent(const TokenColumns<kColumns>& token, const CountedQuery& query) {
  float largest = -INFINITY;
  for (int32_t pair = 0; pair < kColumns / 2; ++pair) {
    largest = larger_exponent(largest, token.codes[pair], token.references[pair],
                              query.offsets + 2 * pair);
  }
  return largest;
}

// The mean of the token at `position` after a counted query of which largest_exponent() is known.
TKV_HD float counted_mean(const CountedQueries& queries, int32_t query, int32_t position,
                          float mean, float exponent) {
  if (position >= queries.first + query) return mean;
  const CountSchedule& schedule = queries.schedule;
  // counted_through(), which divides, for the tokens of a prompt without division.
  const bool every = position < schedule.prompt_tokens || schedule.interval == 1;
  const int32_t through = every ? position + 1 : schedule.counted_through(position);
  const float probability = exp2_fast(exponent);
  return running_mean(mean, queries.of[query].counted - through - 1,
                      probability < 1.0f ? probability : 1.0f);
}

}  // namespace tierkv

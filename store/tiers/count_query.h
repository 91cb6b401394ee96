// Counting queries from the scores that attention has left (attention/tiers/token_scores.h): which
// columns are a query's, and what it does to the mean of a token. The kernel's arithmetic
// (store/tiers/device_count.cu), also for the host, where its test runs it.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/core/columns.h"
#include "attention/tiers/token_scores.h"
#include "codec/policy/significance.h"
#include "store/shared/sequence_info.h"
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
    const auto* references = reinterpret_cast<const ReferencePair*>(scores.tile_references(tile));
    const float* offsets = query.offsets + pass * scores.columns;
    for (int32_t pair = 0; pair < scores.columns / 2; ++pair) {
      const auto* code =
          reinterpret_cast<const ScoreCodePair*>(scores.code(tile, in_tile, 2 * pair));
      largest = larger_exponent(largest, *code, references[pair], offsets + 2 * pair);
    }
  }
  return largest;
}

// The same where all heads of one query are kColumns columns of one row. In steps of codes, so that
// a token takes integer sums alone; rounding the references to them costs as much as rounding the
// scores has.
inline constexpr int32_t kNoSteps = -(1 << 21);  // stands for no probability
inline constexpr float kManySteps = 0x1.8p23f;   // what is added to it is rounded to its low bits

// What a thread takes at once: the codes of a quarter of a tile, tokens 2 * quarter, 2 * quarter +
// 1 and the two that are 8 behind them.
inline constexpr int32_t kQuarterTokens = kTileTokens / 4;
template <int32_t kColumns>
struct alignas(16) QuarterCodes {
  uint32_t pairs[2][kColumns / 2][2];  // by token % 2, pair of columns and token / 8
};
// Token i, 0 .. 3, of a quarter: its place in the tile.
TKV_HD constexpr int32_t quarter_token(int32_t quarter, int32_t i) {
  return 2 * quarter + i % 2 + i / 2 * 8;
}

// What code 0 of a column stands for: steps of the exponent of a probability.
TKV_HD int32_t column_steps(float reference, float offset) {
  const float exponent = reference + offset + kLeastScore;
  const float rounded =
      std::fma(std::fmax(exponent, kNoSteps / kScoreSteps), kScoreSteps, kManySteps);
  return static_cast<int32_t>(float_bits(rounded) - float_bits(kManySteps));
}
// Those of a tile, and the largest of them.
template <int32_t kColumns>
struct TileSteps {
  int32_t of[kColumns];
  int32_t largest;
};
template <int32_t kColumns>
TKV_HD TileSteps<kColumns> tile_steps(const float (&references)[kColumns], const float* offsets) {
  TileSteps<kColumns> steps;
  steps.largest = kNoSteps;
  for (int32_t column = 0; column < kColumns; ++column) {
    steps.of[column] = column_steps(references[column], offsets[column]);
    steps.largest = larger_of(steps.largest, steps.of[column]);
  }
  return steps;
}

TKV_HD int32_t larger_sum(int32_t a, int32_t b, int32_t than) {
#if defined(__CUDA_ARCH__)
  return __viaddmax_s32(a, b, than);
#else
  return larger_of(a + b, than);
#endif
}
// Of token i of a quarter the steps of its largest probability; kNoSteps where all its codes
// stand for less than can be told.
template <int32_t kColumns>
TKV_HD int32_t largest_steps(const QuarterCodes<kColumns>& codes, const TileSteps<kColumns>& steps,
                             int32_t i) {
  int32_t largest = steps.largest;
  for (int32_t pair = 0; pair < kColumns / 2; ++pair) {
    const uint32_t code = codes.pairs[i % 2][pair][i / 2];
    largest = larger_sum(static_cast<int32_t>(code & 0xffffu), steps.of[2 * pair], largest);
    largest = larger_sum(static_cast<int32_t>(code >> 16), steps.of[2 * pair + 1], largest);
  }
  return largest == steps.largest ? kNoSteps : largest;
}
TKV_HD float probability_of_steps(int32_t steps) {
  const int32_t at_most_one = smaller_of(steps, 0);
  const float sum = bits_float(float_bits(kManySteps) + static_cast<uint32_t>(at_most_one));
  return exp2_fast((sum - kManySteps) * (1.0f / kScoreSteps));
}

// running_mean(), as exact as probabilities are: the mean of `count` observations, at least 1,
// given that of all but the last.
TKV_HD float mean_with(float mean, int32_t count, float observation) {
#if defined(__CUDA_ARCH__)
  float share;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(static_cast<float>(count)));
#else
  const float share = 1.0f / static_cast<float>(count);
#endif
  return std::fma(observation - mean, share, mean);
}

// The mean of the token at `position` after a counted query of which largest_exponent() is known.
TKV_HD float counted_mean(const CountedQueries& queries, int32_t query, int32_t position,
                          float mean, float exponent) {
  if (position >= queries.first + query) return mean;
  return mean_with(mean, queries.of[query].counted - queries.schedule.counted_through(position),
                   exp2_fast(std::fmin(exponent, 0.0f)));
}

// What is counted through the query at `position`, or 0 where it is not counted. One division.
TKV_HD int32_t counted_through_query(const CountSchedule& schedule, int32_t position) {
  const int32_t behind = position + 1 - schedule.prompt_tokens;
  if (behind <= 0) return position + 1;
  const int32_t turns = behind / schedule.interval;
  return turns * schedule.interval == behind ? schedule.prompt_tokens + turns : 0;
}

}  // namespace tierkv

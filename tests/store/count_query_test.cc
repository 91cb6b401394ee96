// The arithmetic of counted queries on a device, on the host: from scores as attention leaves them
// to the means of tokens, for every split of queries and heads into columns and passes.
#include "store/tiers/count_query.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "store/tiers/store_shape.h"
#include "tests/support/random_input.h"

namespace tierkv::testing {
namespace {

constexpr int32_t kRows = 3, kTokens = 40;  // of the batch, in one layer of one kv_head each

struct alignas(16) ScoreMemory {
  uint64_t words[2];
};

// Probabilities that each head of each query gives each token of a row, and the scores that stand
// for them.
struct LeftScores {
  LeftScores(const QueryColumns& c, RandomInput* input)
      : columns(c),
        probabilities(int64_t{kRows} * c.q_len * c.group * kTokens),
        lse(int64_t{kRows} * c.q_len * c.group) {
    const int32_t tiles = (kTokens + kTileTokens - 1) / kTileTokens + 2;
    const int64_t rows = int64_t{kRows} * c.passes;
    memory.assign(rows * tiles * score_tile_bytes(score_columns(c.of_row)) / 16 + 1,
                  {~uint64_t{0}, ~uint64_t{0}});
    scores = token_scores(memory.data(), memory.size() * 16, rows, c.of_row);
    for (float& x : lse) x = input->real(-9, 9);
    lse[0] = -INFINITY;  // that head saw nothing
    for (int64_t row = 0; row < rows; ++row) fill_row(static_cast<int32_t>(row), input);
  }

  float* probability(int64_t place, int32_t token) {
    return &probabilities[place * kTokens + token];
  }

  // Poison where there is no column, as padding may be.
  void fill_row(int32_t row, RandomInput* input) {
    for (int32_t token = 0; token < kTokens; ++token) {
      const int64_t tile = scores.tile(row, token / kTileTokens);
      for (int32_t column = 0; column < scores.columns; ++column) {
        float* reference = scores.tile_references(tile) + column;
        const int64_t place = columns.place(row, column);
        const bool seen = place >= 0 && lse[place] > -INFINITY;
        if (token % kTileTokens == 0) {
          *reference = (seen ? lse[place] * kLog2E : 0.0f) + input->real(-20, 10);
        }
        float p = seen ? input->real(0, 1) : 0.0f;
        if (token >= kTokens - columns.hidden(row, column) || input->chance(0.1)) p = 0;
        const float score = std::log2(p) + (seen ? lse[place] * kLog2E : 0.0f) - *reference;
        const uint32_t code = place < 0 ? 0u : p == 0 ? kNoProbability : score_code(score);
        *scores.code(tile, token % kTileTokens, column) = static_cast<uint16_t>(code);
        if (place >= 0) *probability(place, token) = p;
      }
    }
  }

  QueryColumns columns;
  std::vector<float> probabilities, lse;
  std::vector<ScoreMemory> memory;
  TokenScores scores;
};

// The mean of a token as update_scores() makes it, query by query, oldest first.
float expected_mean(LeftScores* left, const SequenceInfo& info, int32_t interval, int32_t batch_row,
                    int32_t token, float mean) {
  const QueryColumns& c = left->columns;
  const CountSchedule schedule = {info.prompt_tokens, interval};
  for (int32_t query = 0; query < c.q_len; ++query) {
    const int32_t position = info.num_tokens - c.q_len + query;
    if (position <= token || !schedule.is_counted(position)) continue;
    float most = 0;
    for (int32_t g = 0; g < c.group; ++g) {
      const int64_t place = (int64_t{batch_row} * c.q_len + query) * c.group + g;
      most = std::fmax(most, *left->probability(place, token));
    }
    mean = scored(schedule, mean, token, position, most);
  }
  return mean;
}

// The form for one query in one pass finds the same, but for the rounding of a reference to steps,
// and nothing below what its columns' codes can tell.
template <int32_t kColumns>
void expect_columns(const LeftScores& left, const CountedQuery& q, int32_t row, int32_t token,
                    float exponent) {
  const int64_t tile = left.scores.tile(row, token / kTileTokens);
  const int32_t in_tile = token % kTileTokens, quarter = in_tile / 2 % 4;
  const int32_t i = in_tile % 2 + in_tile / 8 * 2;
  ASSERT_EQ(quarter_token(quarter, i), in_tile);
  float references[kColumns];
  std::copy_n(left.scores.tile_references(tile), kColumns, references);
  const TileSteps<kColumns> steps = tile_steps(references, q.offsets);
  const auto* codes =
      reinterpret_cast<const QuarterCodes<kColumns>*>(left.scores.tile_codes(tile)) + quarter;
  const int32_t largest = largest_steps(*codes, steps, i);
  const float found = static_cast<float>(largest) / kScoreSteps;
  if (largest == kNoSteps) {
    EXPECT_LE(exponent, static_cast<float>(steps.largest + 1) / kScoreSteps);
  } else {
    EXPECT_NEAR(found, exponent, 0.51f / kScoreSteps) << kColumns << " columns, token " << token;
  }
  EXPECT_NEAR(probability_of_steps(largest), std::fmin(1.0f, std::exp2(found)), 1e-6);
}
void expect_one_query(const LeftScores& left, const CountedQuery& q, int32_t row, int32_t token,
                      float exponent) {
  if (left.columns.q_len > 1 || left.columns.passes > 1) return;
  if (left.scores.columns == 2) expect_columns<2>(left, q, row, token, exponent);
  if (left.scores.columns == 4) expect_columns<4>(left, q, row, token, exponent);
  if (left.scores.columns == 8) expect_columns<8>(left, q, row, token, exponent);
}

void check(int32_t head_dim, int32_t group, int32_t q_len, int32_t interval) {
  SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " group " << group << " q_len "
                                    << q_len << " interval " << interval);
  RandomInput input;
  const QueryColumns c = query_columns(group, 1, q_len, head_dim);
  LeftScores left(c, &input);
  const SequenceInfo info = {kTokens, 0, 0, input.uniform(1, kTokens - q_len)};
  for (int32_t batch_row = 0; batch_row < kRows; ++batch_row) {
    CountedQueries queries;
    std::fill_n(reinterpret_cast<uint8_t*>(&queries), sizeof(queries), uint8_t{0xff});
    start_queries(c, info, interval, &queries);
    EXPECT_EQ(counted_through_query(queries.schedule, queries.first), queries.of[0].counted);
    for (int32_t at = 0; at < kMaxQueryTokens * kMostCountedColumns; ++at) {
      load_offset(c, left.lse.data(), batch_row, at, &queries);
    }
    for (int32_t token = 0; token < kTokens; ++token) {
      const float before = input.real(0, 1);
      float mean = before;
      for (int32_t query = 0; query < q_len; ++query) {
        const CountedQuery& q = queries.of[query];
        ASSERT_LE(q.passes.count * left.scores.columns, kMostCountedColumns);
        if (q.counted == 0) continue;
        const float exponent =
            largest_exponent(left.scores, q, batch_row * c.passes + q.passes.first,
                             token / kTileTokens, token % kTileTokens);
        mean = counted_mean(queries, query, token, mean, exponent);
        expect_one_query(left, q, batch_row, token, exponent);
      }
      // A code is right to 2^-11.5 of a probability of at most 1, and a mean takes a share of it.
      ASSERT_NEAR(mean, expected_mean(&left, info, interval, batch_row, token, before), 5e-4)
          << "row " << batch_row << " token " << token;
    }
  }
}

TEST(CountQuery, IsUpdateScoresOfEachQueryInOrder) {
  for (const int32_t head_dim : {64, 128, 256}) {
    for (int32_t group = 1; group <= 16; ++group) {
      for (int32_t q_len = 1; q_len <= kMaxQueryTokens; ++q_len) {
        check(head_dim, group, q_len, q_len % 2 == 0 ? 1 : 3);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace tierkv::testing

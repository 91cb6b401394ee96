// SPDX-License-Identifier: Apache-2.0
// The decode kernel's source, run on the host by fibers.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "attention/tiers/token_scores.h"
#include "tests/support/page_world.h"

namespace tierkv::test {

struct DecodeOutput {
  std::vector<double> out, lse;
  std::vector<int32_t> row_status;
  std::vector<uint8_t> score_bytes;
  TokenScores scores;  // in score_bytes
};

// One decode step of `ctas` CTAs, which arrive in random order. Leaves the scores of up to
// `score_tokens` tokens of a row.
DecodeOutput emulate_decode(World& world, int32_t ctas, std::mt19937_64& rng,
                            int32_t score_tokens = 0);

// The same with counts that change after the plan, by `change`. Whether only rows of the batch were
// written; what was written there may be anything.
bool stays_in_batch(World& world, int32_t ctas, std::mt19937_64& rng,
                    const std::function<void()>& change);

// A random world's outputs, in pages with records or without, against the double reference.
void check(WorldShape shape, int32_t ctas);
// Its outputs, and the probabilities that follow from the scores left of up to `tokens` tokens.
void check_scores(const WorldShape& shape, int32_t tokens);

inline AttentionTier tier(int32_t side, int32_t k_bits, int32_t v_bits) {
  return {side, token_wise_tier(k_bits, v_bits)};
}

}  // namespace tierkv::test

// SPDX-License-Identifier: Apache-2.0
// The decode kernel's source, run on the host by fibers.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "attention/tiers/shared_rows.h"
#include "tests/support/page_world.h"

namespace tierkv::test {

struct DecodeOutput {
  std::vector<double> out, lse;
  std::vector<int32_t> row_status;
};

// One decode step of `ctas` CTAs, which arrive in random order. join: in place of the kernel that
// joins the parts of shared rows; empty: that kernel.
using JoinSharedRows = std::function<void(const SharedRowsParams&)>;
DecodeOutput emulate_decode(World& world, int32_t ctas, std::mt19937_64& rng,
                            const JoinSharedRows& join = {});

// The same with counts that change after the plan, by `change`. Whether only rows of the batch were
// written; what was written there may be anything.
bool stays_in_batch(World& world, int32_t ctas, std::mt19937_64& rng,
                    const std::function<void()>& change);

// A random world's outputs, in pages with records or without, against the double reference.
void check(WorldShape shape, int32_t ctas);

inline AttentionTier tier(int32_t side, int32_t k_bits, int32_t v_bits) {
  return {side, token_wise_tier(k_bits, v_bits)};
}

}  // namespace tierkv::test

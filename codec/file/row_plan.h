// SPDX-License-Identifier: Apache-2.0
// Which token of a row is stored where.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tierkv/format.h"
#include "tierkv/policy.h"
#include "tierkv/status.h"

namespace tierkv {

// Where the tokens of a row are stored. Tokens are in ascending order in every list.
//   protected  sinks [0, S) and window [T - W, T)
//   body       everything between: high, or by tier
//   key_gap    body tokens whose keys stay raw, because their group of a channel or block unit is
//   incomplete
struct RowPlan {
  int64_t tokens = 0;
  int64_t body_begin = 0, body_end = 0;
  int64_t key_body_end = 0;  // [key_body_end, body_end) is the key gap
  std::vector<Tier> tiers;   // per token; empty where the scheme has no tiers
  std::array<int64_t, kNumTiers> count{};

  int64_t window_begin() const { return body_end; }
};

// The parts of a row that are encoded on their own.
enum class Part : int32_t { kSinks = 0, kHigh = 1, kLow = 2, kKeyGap = 3, kWindow = 4 };
inline constexpr int32_t kNumParts = 5;

// The tokens of a component that a part holds, ascending.
std::vector<int64_t> part_tokens(const RowPlan& plan, Component c, Part part);

// The chunk kRow.
Result<RowPlan> parse_row(const std::vector<uint8_t>& bytes, int64_t tokens);

}  // namespace tierkv

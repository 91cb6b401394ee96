// SPDX-License-Identifier: Apache-2.0
// Where the tokens of a row lie, as arithmetic that host and device share. store/ENGINE.md, "Where
// a token lies", has the laws. All rows of a (sequence, layer) are alike, so it is kept once for
// them.
#pragma once

#include <cstdint>

#include "codec/format/page_layout.h"
#include "tierkv/half.h"

namespace tierkv::store {

inline constexpr int32_t kMaxSinkTokens = 16;
inline constexpr int32_t kMaxWindowTokens = 4096;

TKV_HD constexpr int32_t least(int32_t a, int32_t b) {
  return a < b ? a : b;
}
TKV_HD constexpr int32_t most(int32_t a, int32_t b) {
  return a > b ? a : b;
}
TKV_HD constexpr int64_t round_up(int64_t x, int64_t unit) {
  return (x + unit - 1) / unit * unit;
}

struct TokenLaws {
  int32_t sink_tokens = 0;
  int32_t window_tokens = 0;
  int32_t unit_tokens = 0;
  int32_t cut_tokens = 0;   // a multiple of unit_tokens
  int32_t ring_tokens = 0;  // a multiple of 16
};

struct Positions {
  int32_t first = 0, end = 0;

  TKV_HD constexpr int32_t count() const { return end - first; }
};

// How many tokens a (sequence, layer) has, and where its body ends.
struct LayerTokens {
  int32_t tokens = 0;
  int32_t body_end = 0;

  friend bool operator==(const LayerTokens&, const LayerTokens&) = default;
};

// body_end once there are `tokens` tokens. Sinks alone are no unit.
TKV_HD constexpr int32_t body_end_at(const TokenLaws& laws, int32_t body_end, int32_t tokens) {
  const int32_t left = most(0, tokens - laws.window_tokens);
  const int32_t end = left / laws.unit_tokens * laws.unit_tokens;
  return end > laws.sink_tokens ? most(body_end, end) : body_end;
}
TKV_HD constexpr LayerTokens after_append(const TokenLaws& laws, LayerTokens at, int32_t added) {
  return {at.tokens + added, body_end_at(laws, at.body_end, at.tokens + added)};
}
// Truncated to `tokens` <= at.tokens.
TKV_HD constexpr LayerTokens after_truncate(const TokenLaws& laws, LayerTokens at, int32_t tokens) {
  const bool cuts = tokens < at.body_end;
  return {tokens, cuts ? tokens / laws.cut_tokens * laws.cut_tokens : at.body_end};
}

TKV_HD constexpr int32_t sink_count(const TokenLaws& laws, LayerTokens at) {
  return least(laws.sink_tokens, at.tokens);
}
// The first position in the ring, and how many there are.
TKV_HD constexpr int32_t ring_first(const TokenLaws& laws, LayerTokens at) {
  return most(at.body_end, sink_count(laws, at));
}
TKV_HD constexpr int32_t ring_count(const TokenLaws& laws, LayerTokens at) {
  return at.tokens - ring_first(laws, at);
}
// What of the positions of a range lies where; any may be empty.
struct RangeParts {
  Positions sinks, body, ring;
};
TKV_HD constexpr RangeParts parts_of(const TokenLaws& laws, LayerTokens at, Positions range) {
  const int32_t sinks = sink_count(laws, at);
  return {{range.first, least(range.end, sinks)},
          {most(range.first, sinks), least(range.end, at.body_end)},
          {most(range.first, ring_first(laws, at)), range.end}};
}
// What the ring holds at most, and how many of that and of `added` tokens leave when these come.
TKV_HD constexpr int32_t most_in_ring(const TokenLaws& laws) {
  return most(laws.window_tokens + laws.unit_tokens, laws.cut_tokens) - 1;
}
TKV_HD constexpr int32_t most_leaving(const TokenLaws& laws, int32_t added) {
  const int32_t all = most_in_ring(laws) + added - laws.window_tokens;
  return all / laws.unit_tokens * laws.unit_tokens;
}
TKV_HD constexpr int32_t body_count(const TokenLaws& laws, LayerTokens at) {
  return most(0, at.body_end - laws.sink_tokens);
}

// Counts of queries and tokens stay below, so that hostile bytes lead to no overflow.
inline constexpr int32_t kMostCounted = 1 << 30;
inline constexpr float kMostSum = 3.402823466e38f;

// What is known of a raw token's importance. count: queries that were counted, `sum` the sum of
// their probabilities. kDecided: the format has decided before; `sum` is what it keeps, as bits.
struct alignas(8) RawScore {
  static constexpr int32_t kDecided = -1;
  float sum = 0;
  int32_t count = 0;
};

// Whether an encoder writes such a score.
TKV_HD bool is_possible(RawScore score) {
  if (score.count < 0) return score.count == RawScore::kDecided;
  return score.count <= kMostCounted && is_finite(score.sum) && score.sum >= 0;
}

// The raw memory of a row: its tokens in fp16, [head_dim] each, first all keys, then all values;
// then a RawScore for each index of the ring. A sink has the place of its position; the ring is
// behind the sinks, position p at index p % ring_tokens. What lies in places that hold no token is
// finite: attention multiplies it by zero. Offsets in bytes.
struct RawLayout {
  int32_t head_dim = 0;
  int32_t sink_tokens = 0, ring_tokens = 0;
  int32_t values = 0;
  int32_t scores = 0;
  int32_t row_bytes = 0;  // a multiple of 128

  RawLayout() = default;
  RawLayout(const TokenLaws& laws, int32_t dim)
      : head_dim(dim),
        sink_tokens(laws.sink_tokens),
        ring_tokens(laws.ring_tokens),
        values((laws.sink_tokens + laws.ring_tokens) * dim * 2),
        scores(2 * values),
        row_bytes(static_cast<int32_t>(round_up(scores + 8 * laws.ring_tokens, 128))) {}

  TKV_HD constexpr int32_t place(int32_t position) const {
    return position < sink_tokens ? position : sink_tokens + position % ring_tokens;
  }
  // A token's first element.
  TKV_HD constexpr int32_t token_byte(Component c, int32_t position) const {
    return (c == Component::kKey ? 0 : values) + place(position) * head_dim * 2;
  }
  TKV_HD constexpr int32_t score_byte(int32_t position) const {
    return scores + position % ring_tokens * 8;
  }
};

struct RawRows {
  TokenLaws laws;
  RawLayout raw;
};

}  // namespace tierkv::store

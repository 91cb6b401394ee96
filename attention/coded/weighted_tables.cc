// SPDX-License-Identifier: Apache-2.0
#include "attention/coded/weighted_tables.h"

#include <cmath>
#include <string>

#include "attention/coded/key_turning.h"
#include "codec/format/coded_block_format.h"
#include "codec/format/head_dim.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

Status unsupported(const std::string& what) {
  return Status(StatusCode::kUnsupported, "weighted attention: " + what);
}

// Appends the turns of two dims from `dim` on: of halves the cosines and then the sines of two
// pairs, of neighbours a cosine and a sine. `turn` gives the turn of a pair.
template <typename TurnOf>
void put_turns(RopePairing pairing, int32_t dim, const TurnOf& turn, std::vector<uint16_t>* out) {
  if (pairing == RopePairing::kHalves) {
    const Turn a = turn(dim), b = turn(dim + 1);
    for (const float x : {a.cos, b.cos, a.sin, b.sin}) out->push_back(float_to_half(x));
  } else {
    const Turn a = turn(dim / 2);
    for (const float x : {a.cos, a.sin}) out->push_back(float_to_half(x));
  }
}

// How many dim blocks a table covers. With kHalves half of the head is enough, because both dims of
// a pair turn alike.
int32_t turned_blocks(RopePairing pairing, int32_t head_dim) {
  return head_dim / (pairing == RopePairing::kHalves ? 2 * kDimBlock : kDimBlock);
}

// The pair whose turn is entry `i` of a table. Where halves of part of the head leave room, the
// turns of their first dims are followed by the same turns for their second dims.
int32_t pair_at(const RopeTable& rope, int32_t i) {
  const bool is_second = rope.pairing == RopePairing::kHalves && i >= rope.pairs;
  return is_second && i < 2 * rope.pairs ? i - rope.pairs : i;
}

// Per (tile, dim block, lane, register). For kHalves, the first two registers of all lanes come
// before the other two.
void place_turns(const RopeTable& rope, int32_t head_dim, std::vector<uint16_t>* out) {
  const int32_t together =
      rope.pairing == RopePairing::kHalves ? kPairsPerFragment / 2 : kPairsPerFragment;
  for (int32_t tile = 0; tile < kBlockTokens / kTileTokens; ++tile) {
    for (int32_t f = 0; f < turned_blocks(rope.pairing, head_dim); ++f) {
      for (int32_t i = 0; i < kPairsPerFragment; i += together) {
        for (int32_t lane = 0; lane < kWarpLanes; ++lane) {
          for (int32_t r = i; r < i + together; ++r) {
            const PairPosition at = pair_position(Component::kKey, tile, f, r, lane);
            const auto turn = [&](int32_t entry) {
              const int32_t pair = pair_at(rope, entry);
              return pair < rope.pairs
                         ? rope.place[static_cast<size_t>(at.token * rope.pairs + pair)]
                         : Turn{};
            };
            put_turns(rope.pairing, at.dim, turn, out);
          }
        }
      }
    }
  }
}

// Per (dim block, lane % 4, register of the query).
void block_turns(const RopeTable& rope, int64_t position, int32_t head_dim,
                 std::vector<uint16_t>* out) {
  const auto turn = [&](int32_t entry) {
    const int32_t pair = pair_at(rope, entry);
    return pair < rope.pairs ? rope.at(position, pair) : Turn{};
  };
  for (int32_t f = 0; f < turned_blocks(rope.pairing, head_dim); ++f) {
    for (int32_t i = 0; i < 8; ++i) {
      put_turns(rope.pairing, kDimBlock * f + i % 2 * 8 + i / 2 * 2, turn, out);
    }
  }
}

}  // namespace

Status check_weighted_keys(const WeightedRow& row) {
  if (Status s = row.validate(); !s) return s;
  if (!is_known_head_dim(row.head_dim)) return unsupported("head_dim must be 64, 96, 128 or 256");
  const auto scale = [&](size_t d) {
    return row.key_weight.empty() ? row.key_step : dim_scale(row.key_step, row.key_weight[d]);
  };
  for (int32_t i = 0; row.rope != nullptr && i < row.rope->pairs; ++i) {
    if (scale(pair_first(row.rope->pairing, i)) !=
        scale(pair_second(row.rope->pairing, row.rope->pairs, i))) {
      return unsupported("weights that differ between dims that turn together");
    }
  }
  for (size_t d = 0; d < row.key_mean.size(); ++d) {
    if (!(std::abs(half_to_float(row.key_mean[d]) / scale(d)) <= 0x1p24f)) {
      return unsupported("means of 2^24 steps");
    }
  }
  return Status::ok();
}

Result<WeightedTurns> weighted_turns(const RopeTable& rope, int32_t head_dim, int32_t sink_tokens) {
  WeightedTurns turns;
  if (rope.pairing == RopePairing::kNone) return turns;
  if (rope.pairing == RopePairing::kHalves && !halves_fit(rope.pairs, head_dim)) {
    return unsupported("RoPE in halves over " + std::to_string(2 * rope.pairs) + " of " +
                       std::to_string(head_dim) + " dims: " + kHalvesThatFit);
  }
  if (2 * rope.pairs > head_dim || sink_tokens < 0 || sink_tokens >= kBlockTokens) {
    return Status(StatusCode::kInvalidArgument, "weighted attention: rope or sink_tokens");
  }
  place_turns(rope, head_dim, &turns.place);
  for (int32_t b = 0; b < rope.blocks; ++b) {
    block_turns(rope, b == 0 ? sink_tokens : int64_t{kBlockTokens} * b, head_dim, &turns.block);
  }
  return turns;
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "attention/coded/weighted_tables.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "codec/format/weighted_block_format.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

constexpr int32_t kPlaces = kBlockTokens;

Status unsupported(const std::string& what) {
  return Status(StatusCode::kUnsupported, "weighted attention: " + what);
}

Turn place_turn(const RopeTable& rope, int32_t place, int32_t pair) {
  return pair < rope.pairs ? rope.place[static_cast<size_t>(place * rope.pairs + pair)] : Turn{};
}

// Per (tile, dim block of the first half, register, lane): cosines, then sines, of two pairs.
void place_turns_of_halves(const RopeTable& rope, int32_t head_dim, std::vector<uint16_t>* out) {
  for (int32_t tile = 0; tile < kPlaces / kTileTokens; ++tile) {
    for (int32_t f = 0; f < head_dim / 32; ++f) {
      for (int32_t i = 0; i < 2; ++i) {
        for (int32_t lane = 0; lane < kWarpLanes; ++lane) {
          for (int32_t r = 2 * i; r < 2 * i + 2; ++r) {
            const PairPosition at = pair_position(Component::kKey, tile, f, r, lane);
            const Turn a = place_turn(rope, at.token, at.dim);
            const Turn b = place_turn(rope, at.token, at.dim + 1);
            for (const float x : {a.cos, b.cos, a.sin, b.sin}) out->push_back(float_to_half(x));
          }
        }
      }
    }
  }
}

// Per (tile, dim block, lane, register): the cosine and the sine of the pair.
void place_turns_of_neighbours(const RopeTable& rope, int32_t head_dim,
                               std::vector<uint16_t>* out) {
  for (int32_t tile = 0; tile < kPlaces / kTileTokens; ++tile) {
    for (int32_t f = 0; f < head_dim / kDimBlock; ++f) {
      for (int32_t lane = 0; lane < kWarpLanes; ++lane) {
        for (int32_t r = 0; r < kPairsPerFragment; ++r) {
          const PairPosition at = pair_position(Component::kKey, tile, f, r, lane);
          const Turn turn = place_turn(rope, at.token, at.dim / 2);
          out->push_back(float_to_half(turn.cos));
          out->push_back(float_to_half(turn.sin));
        }
      }
    }
  }
}

// Per (dim block, lane % 4, register of the query): of a dim block of the first half and its
// partner the cosines of two pairs and then their sines; of neighbours a cosine and a sine.
void block_turns(const RopeTable& rope, int64_t position, int32_t head_dim,
                 std::vector<uint16_t>* out) {
  const auto turn = [&](int32_t pair) {
    return pair < rope.pairs ? rope.at(position, pair) : Turn{};
  };
  const bool halves = rope.pairing == RopePairing::kHalves;
  for (int32_t f = 0; f < head_dim / (halves ? 32 : 16); ++f) {
    for (int32_t i = 0; i < 8; ++i) {
      const int32_t d = kDimBlock * f + i % 2 * 8 + i / 2 * 2;
      if (halves) {
        const Turn a = turn(d), b = turn(d + 1);
        for (const float x : {a.cos, b.cos, a.sin, b.sin}) out->push_back(float_to_half(x));
      } else {
        const Turn a = turn(d / 2);
        for (const float x : {a.cos, a.sin}) out->push_back(float_to_half(x));
      }
    }
  }
}

}  // namespace

Result<WeightedKeyChannels> weighted_key_channels(const WeightedRow& row) {
  if (Status s = row.validate(); !s) return s;
  if (row.head_dim % kDimBlock != 0) {
    return Status(StatusCode::kInvalidArgument, "weighted attention: head_dim");
  }
  const auto dims = static_cast<size_t>(row.head_dim);
  WeightedKeyChannels channels;
  channels.scales.assign(dims, row.key_step);
  for (size_t d = 0; d < row.key_weight.size(); ++d) {
    channels.scales[d] = dim_scale(row.key_step, row.key_weight[d]);
  }
  for (int32_t i = 0; row.rope != nullptr && i < row.rope->pairs; ++i) {
    const auto first = static_cast<size_t>(pair_first(row.rope->pairing, i));
    const auto second = static_cast<size_t>(pair_second(row.rope->pairing, row.rope->pairs, i));
    if (channels.scales[first] != channels.scales[second]) {
      return unsupported("weights that differ between dims that turn together");
    }
  }
  // Per (two dim blocks in their order, lane % 4): the means of a lane's four pairs of dims.
  const int32_t blocks = row.head_dim / kDimBlock;
  for (int32_t i = 0; i < row.head_dim; ++i) {
    const int32_t pair = i / 2 % 4, lane = i / 8 % 4;
    const int32_t f = key_block_at(blocks, i / 32 * 2 + pair / 2);
    const auto d = static_cast<size_t>(f * kDimBlock + pair % 2 * 8 + lane * 2 + i % 2);
    const float mean = row.key_mean.empty() ? 0.0f : half_to_float(row.key_mean[d]);
    const float of_scale = 0x1p-9f * mean / channels.scales[d];
    if (!(std::abs(of_scale) <= 32768.0f)) return unsupported("means of 2^24 steps");
    channels.means.push_back(float_to_half(of_scale));
  }
  const float largest = *std::max_element(channels.scales.begin(), channels.scales.end());
  for (float& scale : channels.scales) scale /= 2 * largest;
  channels.unit = 0x1p10f * largest;
  return channels;
}

Result<WeightedTurns> weighted_turns(const RopeTable& rope, int32_t head_dim, int32_t sink_tokens) {
  WeightedTurns turns;
  if (rope.pairing == RopePairing::kNone) return turns;
  if (rope.pairing == RopePairing::kHalves && 2 * rope.pairs != head_dim) {
    return unsupported("RoPE in halves over " + std::to_string(2 * rope.pairs) + " of " +
                       std::to_string(head_dim) + " dims");
  }
  if (2 * rope.pairs > head_dim || sink_tokens < 0 || sink_tokens >= kBlockTokens) {
    return Status(StatusCode::kInvalidArgument, "weighted attention: rope or sink_tokens");
  }
  if (rope.pairing == RopePairing::kHalves) {
    place_turns_of_halves(rope, head_dim, &turns.place);
  } else {
    place_turns_of_neighbours(rope, head_dim, &turns.place);
  }
  for (int32_t b = 0; b < rope.blocks; ++b) {
    block_turns(rope, b == 0 ? sink_tokens : int64_t{kBlockTokens} * b, head_dim, &turns.block);
  }
  return turns;
}

}  // namespace tierkv

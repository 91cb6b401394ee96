#include "attention/coded/weighted_tables.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "codec/format/fragment_order.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

constexpr int32_t kPlaces = kBlockTokens;

// The exponent of the least power of two that is at least x > 0.
int32_t exponent_above(float x) {
  int32_t exponent = 0;
  const float fraction = std::frexp(x, &exponent);
  return fraction == 0.5f ? exponent - 1 : exponent;
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

}  // namespace

Result<WeightedKeyChannels> weighted_key_channels(const WeightedRow& row) {
  if (Status s = row.validate(); !s) return s;
  if (row.head_dim % kDimBlock != 0) {
    return Status(StatusCode::kInvalidArgument, "weighted attention: head_dim");
  }
  const auto scale = [&](int32_t d) {
    const auto i = static_cast<size_t>(d);
    return row.key_weight.empty() ? row.key_step : dim_scale(row.key_step, row.key_weight[i]);
  };
  const auto mean = [&](int32_t d) {
    return row.key_mean.empty() ? 0.0f : half_to_float(row.key_mean[static_cast<size_t>(d)]);
  };
  float largest_scale = 0, largest_mean = 0;
  for (int32_t d = 0; d < row.head_dim; ++d) {
    largest_scale = std::max(largest_scale, scale(d));
    largest_mean = std::max(largest_mean, std::abs(mean(d)));
  }
  // The largest 2^24 scale / unit is in (2^14, 2^15], unless means need a larger unit.
  int32_t exponent = exponent_above(largest_scale) + 9;
  if (largest_mean > 0) exponent = std::max(exponent, exponent_above(largest_mean) - 14);
  exponent = std::clamp(exponent, -100, 100);
  WeightedKeyChannels channels;
  channels.unit = std::ldexp(1.0f, exponent);
  // Per (dim block, lane % 4, half of the dim block): two scales, two means.
  for (int32_t f = 0; f < row.head_dim / kDimBlock; ++f) {
    for (int32_t t = 0; t < 4; ++t) {
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t d = kDimBlock * f + 2 * t + 8 * half;
        for (int32_t i = d; i < d + 2; ++i) {
          channels.halves.push_back(float_to_half(std::ldexp(scale(i), 24 - exponent)));
        }
        for (int32_t i = d; i < d + 2; ++i) {
          channels.halves.push_back(float_to_half(std::ldexp(mean(i), -exponent)));
        }
      }
    }
  }
  return channels;
}

Result<WeightedTurns> weighted_turns(const RopeTable& rope, int32_t head_dim, int32_t sink_tokens) {
  WeightedTurns turns;
  if (rope.pairing == RopePairing::kNone) return turns;
  if (rope.pairing == RopePairing::kHalves && 2 * rope.pairs != head_dim) {
    return Status(StatusCode::kUnsupported, "weighted attention: RoPE in halves over " +
                                                std::to_string(2 * rope.pairs) + " of " +
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
    for (int32_t pair = 0; pair < rope.pairs; ++pair) {
      const int64_t first = b == 0 ? sink_tokens : int64_t{kBlockTokens} * b;
      const Turn turn = rope.at(first, pair);
      turns.block.push_back(turn.cos);
      turns.block.push_back(turn.sin);
    }
  }
  return turns;
}

}  // namespace tierkv

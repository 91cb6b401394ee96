// Exponents and codes of a block's tokens, by a warp: the laws of codec/format/weighted_step.h and
// rope_turn.h, with the bits of token_exponents() and quantize_weighted().
//
// Lane l takes the channels l, 32 + l, ... of one token after the other, as the sum of squares
// wants it; where RoPE pairs channels half a head apart, both are then the lane's own.
#pragma once

#include "codec/format/element.h"
#include "codec/gpu/coded/weighted_batch.h"
#include "gpu/warp.cuh"

namespace tierkv {

// A block whose codes are asked for. In shared memory: exact_code() has it from there.
struct WeightedBlockJob {
  const uint16_t* x;            // token 0, channel 0
  const float* significance;    // of token 0; null: none
  const uint8_t (*decided)[4];  // as WeightedEncode's, of token 0; null: none
  const uint16_t* means;        // [head_dim]; null: zeros
  const float* scales;          // [head_dim] of keys, [1] of values
  const Turn *place, *block;    // of position 0, of the block; null: no rotation
  int64_t token_stride;
  DType dtype;
  Component component;
  RopePairing pairing;
  int32_t pairs, head_dim, tokens, position, place_of_first;
  bool saturates;
  int32_t coded;  // tokens, the first ones, whose elements are codes

  __device__ __forceinline__ uint16_t bits(int32_t t, int32_t d) const {
    return x[t * token_stride + d];
  }
  __device__ __forceinline__ float scale(int32_t d) const {
    return scales[component == Component::kKey ? d : 0];
  }
};

// What is wrong with a block's tokens; of several faults the first of these.
struct WeightedFaults {
  bool non_finite = false, negative = false, out_of_range = false;

  // The worst fault of the warp's lanes; all lanes get it.
  __device__ __forceinline__ StatusCode worst() const {
    if (__any_sync(kFullWarp, non_finite)) return StatusCode::kNonFinite;
    if (__any_sync(kFullWarp, negative)) return StatusCode::kInvalidArgument;
    return __any_sync(kFullWarp, out_of_range) ? StatusCode::kOutOfRange : StatusCode::kOk;
  }
};

// Reads a turn from memory that no kernel writes meanwhile: stores need not hold such loads back.
__device__ __forceinline__ Turn load_turn(const Turn* p) {
  const float2 x = __ldg(reinterpret_cast<const float2*>(p));
  return {x.x, x.y};
}
__device__ __forceinline__ float raw_float(bool is_bfloat16, uint32_t bits) {
  return is_bfloat16 ? bits_float(bits << 16) : half_to_float(static_cast<uint16_t>(bits));
}

// How a channel turns: with which pair and channel, as the first of both or the second.
struct TurningDim {
  int32_t pair = -1, partner;  // -1: it does not turn
  float sign = 1;

  __device__ __forceinline__ TurningDim(RopePairing pairing, int32_t pairs, int32_t d)
      : partner(d) {
    if (d >= 2 * pairs) return;
    const bool halves = pairing == RopePairing::kHalves;
    const bool second = halves ? d >= pairs : d % 2 == 1;
    pair = halves ? (second ? d - pairs : d) : d / 2;
    partner = second ? pair_first(pairing, pair) : pair_second(pairing, pairs, pair);
    sign = second ? -1.0f : 1.0f;
  }
};

// unturn_pair() for one of both: sign -1 for the second.
__device__ __forceinline__ float unturn_one(Turn by, float own, float partner, float sign) {
  return fma_rn(own, by.cos, mul_rn(partner, mul_rn(sign, by.sin)));
}

// A code by the laws as they are written, for codes that a quicker way leaves in doubt.
struct ExactCode {
  int32_t code;  // 0 where there is none
  StatusCode status;
};
__device__ __noinline__ inline ExactCode exact_code(const WeightedBlockJob* job, int32_t t,
                                                    int32_t d, int32_t exponent) {
  if (t < job->coded) return {static_cast<int16_t>(job->bits(t, d)), StatusCode::kOk};
  float y = raw_to_float(job->dtype, job->bits(t, d)), mean = 0;
  bool finite = is_finite(y);
  if (job->component == Component::kKey) {
    const TurningDim turning(job->pairing, job->pairs, d);
    if (turning.pair >= 0) {
      const float partner = raw_to_float(job->dtype, job->bits(t, turning.partner));
      finite &= is_finite(partner);
      const int32_t place = (job->place_of_first + t) * job->pairs;
      const Turn by = compose_turns(job->block[turning.pair], job->place[place + turning.pair]);
      y = unturn_one(by, y, partner, turning.sign);
    }
    if (job->means != nullptr) mean = half_to_float(job->means[d]);
  }
  if (!finite) return {0, StatusCode::kNonFinite};
  const float c = weighted_code(y, mean, job->scale(d), exponent_factor(exponent));
  if (!is_code(c)) {
    const int32_t nearest = c > 0 ? 32767 : -32768;
    return {job->saturates ? nearest : 0, StatusCode::kOutOfRange};
  }
  return {static_cast<int32_t>(c), StatusCode::kOk};
}

// 32 partial sums of squares to their total, in all lanes.
__device__ __forceinline__ float sum_of_partials(float partial) {
#pragma unroll
  for (int32_t offset = kNormPartials / 2; offset > 0; offset /= 2) {
    partial = add_rn(partial, __shfl_xor_sync(kFullWarp, partial, offset));
  }
  return partial;
}

// The tokens' exponents, [tokens] in shared memory. kPer: channels of a lane.
template <int32_t kPer>
__device__ __forceinline__ WeightedFaults find_exponents(const WeightedBlockJob& job, double scale,
                                                         int8_t* exponents) {
  WeightedFaults faults;
  const int32_t lane = lane_index(), tokens = job.tokens;
  int32_t importance[kBlockTokens / kWarpLanes] = {};
#pragma unroll
  for (int32_t i = 0; i < kBlockTokens / kWarpLanes; ++i) {
    const int32_t t = i * kWarpLanes + lane;
    if (job.decided != nullptr && t < tokens) {
      importance[i] = static_cast<int8_t>(job.decided[t][0]);
    }
    if (job.significance == nullptr || t >= tokens) continue;
    const double u = token_importance(job.position + t, job.significance[t], scale);
    faults.non_finite |= !(u - u == 0.0);
    faults.negative |= u < 0;
    importance[i] = importance_exponent(u);
  }
  float sums[kBlockTokens / kWarpLanes] = {};
  if (job.component == Component::kValue) {
    const bool is_bfloat16 = job.dtype == DType::kBFloat16;
    const uint16_t* x = job.x + lane;
    const int64_t stride = job.token_stride;
#pragma unroll
    for (int32_t i = 0; i < kBlockTokens / kWarpLanes; ++i) {
      const int32_t count = min(kWarpLanes, tokens - i * kWarpLanes);
#pragma unroll 4
      for (int32_t j = 0; j < count; ++j) {
        float sum = 0;
#pragma unroll
        for (int32_t k = 0; k < kPer; ++k) {
          const float value = raw_float(is_bfloat16, __ldg(x + k * kWarpLanes));
          faults.non_finite |= !is_finite(value) && i * kWarpLanes + j >= job.coded;
          sum = add_rn(sum, mul_rn(value, value));
        }
        x += stride;
        sum = sum_of_partials(sum);
        if (j == lane) sums[i] = sum;
      }
    }
  }
#pragma unroll
  for (int32_t i = 0; i < kBlockTokens / kWarpLanes; ++i) {
    const int32_t t = i * kWarpLanes + lane;
    if (t >= tokens) continue;
    int32_t e = importance[i];
    if (job.component == Component::kValue) {
      const bool known = job.decided != nullptr && job.decided[t][2] != 0;
      e = known ? static_cast<int8_t>(job.decided[t][1])
                : value_exponent(sums[i], kPer * kWarpLanes, importance[i]);
    }
    exponents[t] = static_cast<int8_t>(e);
  }
  __syncwarp();
  return faults;
}

// Divides by scale * f(e), to integers. A code it vouches for is that of weighted_code(): 1 /
// scale, f(-e), their product and the one with y are within 2^-24 each, 1 / f(e) and f(-e) within
// 2^-23, and so are the law's own product and quotient: less than 2^-21 together, for codes up to
// 127 less than 2^-14. Scales outside [2^-100, 2^100] get no inverse, so that nothing is subnormal.
struct QuickCodes {
  bool sure = true;

  __device__ __forceinline__ static float inverse_of(float scale) {
    const bool usual = scale >= 0x1p-100f && scale <= 0x1p100f;
    return usual ? 1.0f / scale : bits_float(0x7fc00000u);
  }
  __device__ __forceinline__ int32_t code(float y, float inverse, float inverse_factor) {
    constexpr float kBias = 0x1.8p23f;
    const float q = mul_rn(y, mul_rn(inverse, inverse_factor));
    const float shifted = add_rn(q, kBias), rounded = add_rn(shifted, -kBias);
    sure &= std::fabs(q - rounded) < 0.5f - 0x1p-14f && std::fabs(rounded) <= 127.0f;
    return static_cast<int32_t>(float_bits(shifted) - float_bits(kBias));
  }
};

// Sink, where codes go. Of all lanes together, codes of channels k * 32 + lane:
//   kAhead                          tokens that are loaded before one is coded: no load goes past
//   the
//                                   call for a code in doubt
//   kTogether                       tokens that take() gets at once, 1 or 2; divides kAhead
//   take(t, codes)                  codes [kTogether][kPer] of the tokens t, t + 1; 0 where there
//   is
//                                   no token
//   clip(code)                      of a code that is not quick
template <int32_t kPer, class Sink>
__device__ __forceinline__ void take_exact(const WeightedBlockJob& job, int32_t t, int32_t exponent,
                                           Sink& sink, WeightedFaults& faults,
                                           int32_t (&codes)[kPer]) {
#pragma unroll
  for (int32_t k = 0; k < kPer; ++k) {
    const ExactCode c = exact_code(&job, t, k * kWarpLanes + lane_index(), exponent);
    faults.non_finite |= c.status == StatusCode::kNonFinite;
    faults.out_of_range |= c.status == StatusCode::kOutOfRange;
    codes[k] = sink.clip(c.code);
  }
}

// A lane's channels of a key before RoPE. kFolded: RoPE in halves over the whole head, so that a
// pair's channels are kPer / 2 apart.
template <int32_t kPer, bool kFolded>
struct UnturnedKey {
  Turn block[kFolded ? kPer / 2 : kPer];
  int32_t pair[kPer], partner[kPer];  // not folded
  float sign[kPer];

  __device__ __forceinline__ explicit UnturnedKey(const WeightedBlockJob& job) {
#pragma unroll
    for (int32_t k = 0; k < (kFolded ? kPer / 2 : kPer); ++k) {
      const TurningDim turning(job.pairing, job.pairs, k * kWarpLanes + lane_index());
      pair[k] = turning.pair, partner[k] = turning.partner, sign[k] = turning.sign;
      if (turning.pair >= 0) block[k] = load_turn(job.block + turning.pair);
    }
  }
  __device__ __forceinline__ void load(const WeightedBlockJob& job, bool is_bfloat16, int32_t t,
                                       float (&y)[kPer]) const {
    const uint16_t* x = job.x + t * job.token_stride;
    const Turn* place = job.place + (job.place_of_first + t) * job.pairs;
#pragma unroll
    for (int32_t k = 0; k < kPer; ++k) {
      y[k] = raw_float(is_bfloat16, __ldg(x + k * kWarpLanes + lane_index()));
    }
    if constexpr (kFolded) {
#pragma unroll
      for (int32_t k = 0; k < kPer / 2; ++k) {
        const Turn by = compose_turns(block[k], load_turn(place + k * kWarpLanes + lane_index()));
        unturn_pair(by, &y[k], &y[k + kPer / 2]);
      }
    } else {
#pragma unroll
      for (int32_t k = 0; k < kPer; ++k) {
        if (pair[k] < 0) continue;
        const float other = raw_float(is_bfloat16, __ldg(x + partner[k]));
        y[k] =
            unturn_one(compose_turns(block[k], load_turn(place + pair[k])), y[k], other, sign[k]);
      }
    }
  }
};
// Values, and keys that are not rotated.
template <int32_t kPer>
struct PlainToken {
  __device__ __forceinline__ explicit PlainToken(const WeightedBlockJob&) {}
  __device__ __forceinline__ void load(const WeightedBlockJob& job, bool is_bfloat16, int32_t t,
                                       float (&y)[kPer]) const {
    const uint16_t* x = job.x + t * job.token_stride;
#pragma unroll
    for (int32_t k = 0; k < kPer; ++k) {
      y[k] = raw_float(is_bfloat16, __ldg(x + k * kWarpLanes + lane_index()));
    }
  }
};

template <int32_t kPer, class Token, class Sink>
__device__ __forceinline__ void find_codes_of(const WeightedBlockJob& shared_job,
                                              const int8_t* exponents, Sink& sink,
                                              WeightedFaults& faults) {
  constexpr int32_t kTogether = Sink::kTogether;
  const WeightedBlockJob job = shared_job;  // the sink's bytes could be anything's
  const bool is_bfloat16 = job.dtype == DType::kBFloat16;
  const int32_t tokens = job.tokens;
  float mean[kPer], inverse[kPer];
#pragma unroll
  for (int32_t k = 0; k < kPer; ++k) {
    const int32_t d = k * kWarpLanes + lane_index();
    mean[k] = job.means == nullptr ? 0.0f : half_to_float(__ldg(job.means + d));
    inverse[k] = QuickCodes::inverse_of(job.scale(d));
  }
  const Token token(job);
  constexpr int32_t kAhead = Sink::kAhead;
#pragma unroll 1
  for (int32_t t = 0; t < tokens; t += kAhead) {
    float y[kAhead][kPer];
#pragma unroll
    for (int32_t i = 0; i < kAhead; ++i) {
      token.load(job, is_bfloat16, min(t + i, tokens - 1), y[i]);
    }
#pragma unroll
    for (int32_t i = 0; i < kAhead; i += kTogether) {
      if (t + i >= tokens) break;
      int32_t codes[kTogether][kPer] = {};
#pragma unroll
      for (int32_t j = 0; j < kTogether; ++j) {
        if (t + i + j >= tokens) break;
        if (t + i + j < job.coded) {
#pragma unroll
          for (int32_t k = 0; k < kPer; ++k) {
            const uint16_t bits =
                __ldg(job.x + (t + i + j) * job.token_stride + k * kWarpLanes + lane_index());
            codes[j][k] = sink.clip(static_cast<int16_t>(bits));
          }
          continue;
        }
        const int32_t exponent = exponents[t + i + j];
        const float inverse_factor = exponent_factor(-exponent);
        QuickCodes quick;
#pragma unroll
        for (int32_t k = 0; k < kPer; ++k) {
          codes[j][k] = quick.code(add_rn(y[i + j][k], -mean[k]), inverse[k], inverse_factor);
        }
        if (!quick.sure) take_exact(shared_job, t + i + j, exponent, sink, faults, codes[j]);
      }
      sink.take(t + i, codes);
    }
  }
}

// The codes of all channels. kKey: the job's component.
template <int32_t kPer, bool kKey, class Sink>
__device__ __forceinline__ void find_codes(const WeightedBlockJob& job, const int8_t* exponents,
                                           Sink& sink, WeightedFaults& faults) {
  if (!kKey || job.pairs == 0) {
    return find_codes_of<kPer, PlainToken<kPer>>(job, exponents, sink, faults);
  }
  if constexpr (kKey && kPer % 2 == 0) {
    if (job.pairing == RopePairing::kHalves && 2 * job.pairs == kPer * kWarpLanes) {
      return find_codes_of<kPer, UnturnedKey<kPer, true>>(job, exponents, sink, faults);
    }
  }
  if constexpr (kKey) {
    find_codes_of<kPer, UnturnedKey<kPer, false>>(job, exponents, sink, faults);
  }
}

}  // namespace tierkv

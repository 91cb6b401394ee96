// SPDX-License-Identifier: Apache-2.0
// What fixes the codes of a block's tokens, and codes by the laws of
// codec/format/weighted_step.h and rope_turn.h: one by one as they are written, with the bits of
// token_exponents() and quantize_weighted(), or quickly where the result is beyond doubt.
#pragma once

#include "codec/format/element.h"
#include "codec/gpu/coded/turns.cuh"
#include "codec/gpu/coded/weighted_batch.h"
#include "gpu/warp.cuh"

namespace tierkv {

// A block whose codes are asked for. In shared memory: exact_code() has it from there.
struct WeightedBlockJob {
  const uint16_t* x;            // token 0, channel 0
  const uint8_t (*decided)[4];  // as WeightedEncode's, of token 0
  const uint16_t* means;        // [head_dim]; null: zeros
  const float* scales;          // [head_dim] of keys, [1] of values
  const Turn *place, *block;    // of position 0, of the block; null: no rotation
  int64_t token_stride;
  DType dtype;
  Component component;
  RopePairing pairing;
  int32_t pairs, head_dim, tokens, position, place_of_first;
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
  bool non_finite = false, out_of_range = false;

  // The worst fault of the warp's lanes; all lanes get it.
  __device__ __forceinline__ StatusCode worst() const {
    if (__any_sync(kFullWarp, non_finite)) return StatusCode::kNonFinite;
    return __any_sync(kFullWarp, out_of_range) ? StatusCode::kOutOfRange : StatusCode::kOk;
  }
};

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
  int32_t code;  // 0 where there is none, the nearest where it is beyond 16 bits
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
    return {c > 0 ? 32767 : -32768, StatusCode::kOutOfRange};
  }
  return {static_cast<int32_t>(c), StatusCode::kOk};
}

// Exponents G of the tokens' importance, [tokens] in shared memory: those of keys, and what those
// of values are added to.
__device__ __forceinline__ void load_importance(const WeightedBlockJob& job, int8_t* exponents) {
#pragma unroll
  for (int32_t i = 0; i < kBlockTokens / kWarpLanes; ++i) {
    const int32_t t = i * kWarpLanes + lane_index();
    if (t < job.tokens) exponents[t] = static_cast<int8_t>(job.decided[t][0]);
  }
  __syncwarp();
}

// A quotient by scale * f(e) as an integer, where the product with `inverse`, 1 / scale times
// f(-e), leaves no doubt: `off` below kSureOff and the code at most kMostSureCode. Such a code is
// that of weighted_code(): 1 / scale, f(-e) and their product are within 2^-24 each, 1 / f(e) and
// f(-e) within 2^-23, and so are the law's own product and quotient: less than 2^-21 together, for
// codes up to 127 less than 2^-14. Scales outside [2^-100, 2^100] get no inverse, so that nothing
// is subnormal; what is no number has bits of no code.
inline constexpr float kQuickBias = 0x1.8p23f;
inline constexpr uint32_t kQuickBits =
    0x4b400000u;  // of the bias; code bits are these and the code
inline constexpr uint32_t kNoQuickCode = 0;
inline constexpr uint32_t kPaddingBits = 1;  // where there is no token
inline constexpr float kSureOff = 0.5f - 0x1p-14f;
inline constexpr int32_t kMostSureCode = 127;
__device__ __forceinline__ int32_t quick_code(uint32_t bits) {
  return static_cast<int32_t>(bits - kQuickBits);
}
__device__ __forceinline__ bool is_sure_code(uint32_t bits) {
  return bits - (kQuickBits - kMostSureCode) <= 2 * kMostSureCode;
}
struct QuickCode {
  uint32_t bits;
  float off;  // from the integer

  __device__ __forceinline__ static float inverse_of(float scale) {
    const bool usual = scale >= 0x1p-100f && scale <= 0x1p100f;
    return usual ? 1.0f / scale : bits_float(0x7fc00000u);
  }
  __device__ __forceinline__ static QuickCode of(float y, float inverse) {
    const float shifted = fma_rn(y, inverse, kQuickBias);
    const float rounded = add_rn(shifted, -kQuickBias);
    return {float_bits(shifted), std::fabs(fma_rn(y, inverse, -rounded))};
  }
};
// The bits of the law's code of y, the value less its mean; kNoQuickCode where there is none.
__device__ __noinline__ inline uint32_t exact_bits(const WeightedBlockJob* job, float y, int32_t d,
                                                   int32_t exponent) {
  const float c = weighted_code(y, 0.0f, job->scale(d), exponent_factor(exponent));
  return is_code(c) ? kQuickBits + static_cast<uint32_t>(static_cast<int32_t>(c)) : kNoQuickCode;
}

}  // namespace tierkv

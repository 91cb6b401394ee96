// SPDX-License-Identifier: Apache-2.0
// codec/host/coded/weighted_rows.h, compiled once per instruction set and chosen at run time. All
// give the same bits: where a CPU has no fused multiply-add, the loops behind those over vectors do
// everything.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/host/coded/weighted_rows_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <vector>

#include "codec/host/coded/weighted_rows.h"
#include "codec/host/coded/weighted_rows_checks.h"

HWY_BEFORE_NAMESPACE();
namespace tierkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::CappedTag<float, 16>;
using VF = hn::Vec<DF>;
using MF = hn::Mask<DF>;

HWY_INLINE int32_t lanes() {
  return static_cast<int32_t>(hn::Lanes(DF()));
}
// Whether a vector from i on, to be multiplied and added, ends before `count`.
HWY_INLINE bool fits(int32_t i, int32_t count) {
  return HWY_NATIVE_FMA && i + lanes() <= count;
}

HWY_INLINE MF finite(VF x) {
  const DF df;
  const hn::RebindToUnsigned<DF> du;
  const auto exponent = hn::And(hn::BitCast(du, x), hn::Set(du, 0x7f800000u));
  return hn::RebindMask(df, hn::Ne(exponent, hn::Set(du, 0x7f800000u)));
}

float token_sum(const float* x, int32_t dims, bool* non_finite) {
  const DF df;
  alignas(64) float partial[kNormPartials] = {};
  MF good = hn::FirstN(df, static_cast<size_t>(lanes()));
  int32_t d = 0;
  for (; d + kNormPartials <= dims; d += kNormPartials) {
    for (int32_t l = 0; l < kNormPartials; l += lanes()) {
      const VF v = hn::LoadU(df, x + d + l);
      good = hn::And(good, finite(v));
      hn::Store(hn::Add(hn::Load(df, partial + l), hn::Mul(v, v)), df, partial + l);
    }
  }
  *non_finite |= !hn::AllTrue(df, good);
  for (; d < dims; ++d) {
    *non_finite |= !is_finite(x[d]);
    partial[d % kNormPartials] += x[d] * x[d];
  }
  return add_partials(partial);
}

struct Turns {
  VF cos, sin;
};
// Those of the pairs from i on at a position: `block` and `place` are its rows of the tables.
HWY_INLINE Turns load_turns(const Turn* block, const Turn* place, int32_t i) {
  const DF df;
  VF bc, bs, pc, ps;
  hn::LoadInterleaved2(df, &block[i].cos, bc, bs);
  hn::LoadInterleaved2(df, &place[i].cos, pc, ps);
  return {hn::MulSub(bc, pc, hn::Mul(bs, ps)), hn::MulAdd(bs, pc, hn::Mul(bc, ps))};
}

// Turns the pairs of a key forwards or back, in place.
template <bool kBack>
HWY_INLINE void rotate(const RopeTable& rope, int64_t position, float* key) {
  const DF df;
  const Turn* block = rope.block.data() + position / kBlockTokens * rope.pairs;
  const Turn* place = rope.place.data() + position % kBlockTokens * rope.pairs;
  const bool halves = rope.pairing == RopePairing::kHalves;
  int32_t i = 0;
  for (; fits(i, rope.pairs); i += lanes()) {
    const Turns by = load_turns(block, place, i);
    VF a, b;
    if (halves) {
      a = hn::LoadU(df, key + i);
      b = hn::LoadU(df, key + rope.pairs + i);
    } else {
      hn::LoadInterleaved2(df, key + 2 * i, a, b);
    }
    const VF as = hn::Mul(a, by.sin), bs = hn::Mul(b, by.sin);
    const VF x = kBack ? hn::MulAdd(a, by.cos, bs) : hn::MulSub(a, by.cos, bs);
    const VF y = kBack ? hn::MulSub(b, by.cos, as) : hn::MulAdd(b, by.cos, as);
    if (halves) {
      hn::StoreU(x, df, key + i);
      hn::StoreU(y, df, key + rope.pairs + i);
    } else {
      hn::StoreInterleaved2(x, y, df, key + 2 * i);
    }
  }
  for (; i < rope.pairs; ++i) {
    const Turn by = compose_turns(block[i], place[i]);
    float* first = key + pair_first(rope.pairing, i);
    float* second = key + pair_second(rope.pairing, rope.pairs, i);
    kBack ? unturn_pair(by, first, second) : turn_pair(by, first, second);
  }
}

// x is used up.
void quantize_one(const ChannelScales& channels, int64_t position, float factor, float* x,
                  int16_t* codes, CodeFaults* faults) {
  const DF df;
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<int16_t, DF> d16;
  const auto dims = static_cast<int32_t>(channels.scale.size());
  const MF all = hn::FirstN(df, static_cast<size_t>(lanes()));
  MF good = all, codable = all;
  if (channels.rope != nullptr) {
    int32_t d = 0;
    for (; fits(d, dims); d += lanes()) good = hn::And(good, finite(hn::LoadU(df, x + d)));
    for (; d < dims; ++d) faults->non_finite |= !is_finite(x[d]);
    rotate<true>(*channels.rope, position, x);
  }
  const VF f = hn::Set(df, factor), low = hn::Set(df, -32768.0f), high = hn::Set(df, 32767.0f);
  int32_t d = 0;
  for (; fits(d, dims); d += lanes()) {
    const VF v = hn::LoadU(df, x + d);
    if (channels.rope == nullptr) good = hn::And(good, finite(v));
    const VF y = hn::Sub(v, hn::LoadU(df, channels.mean.data() + d));
    const VF step = hn::Mul(hn::LoadU(df, channels.scale.data() + d), f);
    const VF c = hn::Round(hn::Div(y, step));
    codable = hn::And(codable, hn::And(hn::Ge(c, low), hn::Le(c, high)));
    hn::StoreU(hn::DemoteTo(d16, hn::ConvertTo(di, c)), d16, codes + d);
  }
  faults->non_finite |= !hn::AllTrue(df, good);
  faults->out_of_range |= !hn::AllTrue(df, codable);
  for (; d < dims; ++d) {
    if (channels.rope == nullptr) faults->non_finite |= !is_finite(x[d]);
    const float c = weighted_code(x[d], channels.mean[d], channels.scale[d], factor);
    faults->out_of_range |= !is_code(c);
    codes[d] = is_code(c) ? static_cast<int16_t>(c) : int16_t{0};
  }
}

void dequantize_one(const ChannelScales& channels, int64_t position, float factor,
                    const int16_t* codes, float* x) {
  const DF df;
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<int16_t, DF> d16;
  const auto dims = static_cast<int32_t>(channels.scale.size());
  const VF f = hn::Set(df, factor);
  int32_t d = 0;
  for (; fits(d, dims); d += lanes()) {
    const VF c = hn::ConvertTo(df, hn::PromoteTo(di, hn::LoadU(d16, codes + d)));
    const VF scale = hn::LoadU(df, channels.scale.data() + d);
    hn::StoreU(hn::MulAdd(hn::Mul(c, f), scale, hn::LoadU(df, channels.mean.data() + d)), df,
               x + d);
  }
  for (; d < dims; ++d) {
    x[d] = weighted_value(codes[d], channels.mean[d], channels.scale[d], factor);
  }
  if (channels.rope != nullptr) rotate<false>(*channels.rope, position, x);
}

}  // namespace HWY_NAMESPACE
}  // namespace tierkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tierkv {

HWY_EXPORT(token_sum);
HWY_EXPORT(quantize_one);
HWY_EXPORT(dequantize_one);

Status token_exponents(Component component, const WeightedTokens& tokens, int32_t head_dim,
                       const int8_t* importance, int8_t* exponents) {
  if (Status s = check_importance(tokens, head_dim, importance); !s) return s;
  CodeFaults faults;
  for (int32_t t = 0; t < tokens.tokens; ++t) {
    int32_t e = importance == nullptr ? 0 : importance[t];
    if (component == Component::kValue) {
      const float* x = tokens.x + int64_t{t} * head_dim;
      const float sum = HWY_DYNAMIC_DISPATCH(token_sum)(x, head_dim, &faults.non_finite);
      e = value_exponent(sum, head_dim, e);
    }
    exponents[t] = static_cast<int8_t>(e);
  }
  return faults.status();
}

Status quantize_weighted(const WeightedRow& row, Component component, const WeightedTokens& tokens,
                         const int8_t* exponents, int16_t* codes) {
  const WeightedSource shape{codes, exponents, tokens.tokens, tokens.first_position};
  if (Status s = check_weighted_source(row, component, shape, tokens.x); !s) return s;
  const ChannelScales channels(row, component);
  std::vector<float> token(static_cast<size_t>(row.head_dim));
  CodeFaults faults;
  for (int32_t t = 0; t < tokens.tokens; ++t) {
    const int64_t at = int64_t{t} * row.head_dim;
    std::copy_n(tokens.x + at, row.head_dim, token.data());
    HWY_DYNAMIC_DISPATCH(quantize_one)
    (channels, tokens.first_position + t, exponent_factor(exponents[t]), token.data(), codes + at,
     &faults);
  }
  return faults.status();
}

Status dequantize_weighted(const WeightedRow& row, Component component,
                           const WeightedSource& source, float* x) {
  if (Status s = check_weighted_source(row, component, source, x); !s) return s;
  const ChannelScales channels(row, component);
  for (int32_t t = 0; t < source.tokens; ++t) {
    const int64_t at = int64_t{t} * row.head_dim;
    HWY_DYNAMIC_DISPATCH(dequantize_one)
    (channels, source.first_position + t, exponent_factor(source.exponents[t]), source.codes + at,
     x + at);
  }
  return Status::ok();
}

}  // namespace tierkv
#endif

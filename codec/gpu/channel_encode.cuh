// SPDX-License-Identifier: Apache-2.0
// A CTA encodes a block: values to shared memory, parameters, then each lane of a warp makes words
// of codes in fragment order (codec/format/fragment_codes.h) and writes them in whole sectors. The
// bytes of codec/host/channel_block.cc.
#pragma once

#include "codec/format/channel_block.h"
#include "codec/format/fragment_codes.h"
#include "codec/format/sound_halves.h"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kChannelThreads = 256;
inline constexpr int32_t kTokenParts = 4;  // that channels' extrema are first found of

template <int32_t kHeadDim>
struct ChannelShared {
  // Lines are 16 bytes longer than a token: lanes of a fragment then read from different banks.
  static constexpr int32_t kLine = kHeadDim + 8;
  static constexpr int32_t kTokens = kHeadDim > 128 ? 64 : kMaxChannelTokens;
  uint16_t x[kTokens * kLine];                                // fp16
  CodeMaker makers[kHeadDim > kTokens ? kHeadDim : kTokens];  // of a channel or a token
  __half2 lo[kTokenParts][kHeadDim / 2], hi[kTokenParts][kHeadDim / 2];
};

// A channel pair and a part of the tokens each, then a thread per channel.
template <int32_t kHeadDim, int32_t kBits>
__device__ __forceinline__ void find_channel_params(const ChannelLayout& l, uint8_t* block,
                                                    ChannelShared<kHeadDim>& s) {
  constexpr int32_t kPairs = kHeadDim / 2;
  const auto i = static_cast<int32_t>(threadIdx.x);
  for (int32_t j = i; j < kTokenParts * kPairs; j += kChannelThreads) {
    const int32_t pair = j % kPairs, part = j / kPairs, tokens = l.tokens / kTokenParts;
    const auto* x = reinterpret_cast<const __half2*>(
        &s.x[part * tokens * ChannelShared<kHeadDim>::kLine + 2 * pair]);
    __half2 lo = *x, hi = *x;
    for (int32_t t = 1; t < tokens; ++t) {
      x += ChannelShared<kHeadDim>::kLine / 2;
      lo = __hmin2(lo, *x), hi = __hmax2(hi, *x);
    }
    s.lo[part][pair] = lo, s.hi[part][pair] = hi;
  }
  __syncthreads();
  if (i >= kHeadDim) return;
  float lo = INFINITY, hi = -INFINITY;
#pragma unroll
  for (int32_t part = 0; part < kTokenParts; ++part) {
    lo = fminf(lo, __half2float(reinterpret_cast<const __half*>(s.lo[part])[i]));
    hi = fmaxf(hi, __half2float(reinterpret_cast<const __half*>(s.hi[part])[i]));
  }
  const QuantParams p = minmax_params(lo, hi, 1 << kBits);
  s.makers[i] = make_code_maker(p);
  uint8_t* const to = block + l.scale_byte(Component::kKey, i);
  *reinterpret_cast<uint16_t*>(to) = p.scale;
  *reinterpret_cast<uint16_t*>(to + zero_point_apart(Component::kKey)) = p.zero_point;
}

// Eight lanes per token.
template <int32_t kHeadDim, int32_t kBits>
__device__ __forceinline__ void find_token_params(const ChannelLayout& l, uint8_t* block,
                                                  ChannelShared<kHeadDim>& s) {
  const int32_t part = lane_index() % 8;
  for (int32_t t = static_cast<int32_t>(threadIdx.x) / 8; t < l.tokens; t += kChannelThreads / 8) {
    const uint16_t* line = &s.x[t * ChannelShared<kHeadDim>::kLine];
    __half2 lo = *reinterpret_cast<const __half2*>(line), hi = lo;
#pragma unroll
    for (int32_t d = 0; d < kHeadDim; d += 64) {
      if (kHeadDim % 64 != 0 && d + 8 * part >= kHeadDim) continue;
      const uint4 w = *reinterpret_cast<const uint4*>(line + d + 8 * part);
      const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (const uint32_t word : words) {
        lo = __hmin2(lo, *reinterpret_cast<const __half2*>(&word));
        hi = __hmax2(hi, *reinterpret_cast<const __half2*>(&word));
      }
    }
#pragma unroll
    for (int32_t lanes = 4; lanes > 0; lanes /= 2) {
      lo = __hmin2(lo, __shfl_xor_sync(kFullWarp, lo, lanes));
      hi = __hmax2(hi, __shfl_xor_sync(kFullWarp, hi, lanes));
    }
    if (part != 0) continue;
    const float2 least = __half22float2(lo), most = __half22float2(hi);
    const QuantParams p = minmax_params(fminf(least.x, least.y), fmaxf(most.x, most.y), 1 << kBits);
    s.makers[t] = make_code_maker(p);
    *reinterpret_cast<QuantParams*>(block + l.scale_byte(Component::kValue, t)) = p;
  }
}

// The codes of a dim block that a lane's words hold.
template <int32_t kHeadDim, int32_t kBits, Component kComponent>
__device__ __forceinline__ BlockCodes block_codes(const ChannelShared<kHeadDim>& s, int32_t tile,
                                                  int32_t f, int32_t lane) {
  constexpr float kTop = static_cast<float>((1 << kBits) - 1);
  BlockCodes codes;
#pragma unroll
  for (int32_t part = 0; part < 8; ++part) {
    const int32_t th = part / 4, dh = part / 2 % 2, par = part % 2;
    const int32_t t = tile * kTileTokens + fragment_token(kComponent, lane, th, par);
    const int32_t d = f * kDimBlock + fragment_dim(kComponent, lane, dh, par);
    const float x = half_to_float(s.x[t * ChannelShared<kHeadDim>::kLine + d]);
    const CodeMaker& maker = s.makers[kComponent == Component::kKey ? d : t];
    codes.at[th][dh][par] = biased_code(x, maker, kTop);
  }
  return codes;
}

template <int32_t kHeadDim, int32_t kBits, Component kComponent>
__device__ __forceinline__ void write_codes(const ChannelLayout& l, uint8_t* block,
                                            const ChannelShared<kHeadDim>& s) {
  static_assert(kBits == 4 || kBits == 2);
  constexpr TileLayout kTile{CodeType::uniform(kBits), kHeadDim};
  constexpr int32_t kWords = kTile.words_per_lane();
  constexpr int32_t kAccess = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1;  // words of one store
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < l.tiles() * (kWords / kAccess) * 32;
       i += kChannelThreads) {
    const int32_t lane = i % 32, first = i / 32 % (kWords / kAccess) * kAccess;
    const int32_t tile = i / 32 / (kWords / kAccess);
    uint32_t words[kAccess];
#pragma unroll
    for (int32_t w = 0; w < kAccess; ++w) {
      if constexpr (kBits == 4) {
        words[w] = pack_word_4(block_codes<kHeadDim, kBits, kComponent>(s, tile, first + w, lane));
      } else {
        const int32_t f = 2 * (first + w);
        words[w] = pack_word_2(block_codes<kHeadDim, kBits, kComponent>(s, tile, f, lane),
                               block_codes<kHeadDim, kBits, kComponent>(s, tile, f + 1, lane));
      }
    }
    uint8_t* to =
        block + l.codes(kComponent) + tile * kTile.bytes() + lane_word_byte(kWords, first, lane);
    if constexpr (kAccess == 4) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (kAccess == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    }
  }
}

template <int32_t kHeadDim, int32_t kBits, Component kComponent>
__device__ __forceinline__ void encode_staged(const ChannelLayout& l, uint8_t* block,
                                              ChannelShared<kHeadDim>& s) {
  if constexpr (kComponent == Component::kKey) {
    find_channel_params<kHeadDim, kBits>(l, block, s);
  } else {
    find_token_params<kHeadDim, kBits>(l, block, s);
  }
  __syncthreads();
  write_codes<kHeadDim, kBits, kComponent>(l, block, s);
}
template <int32_t kHeadDim, Component kComponent, class Source>
__device__ __forceinline__ bool encode_component(const ChannelLayout& l, const Source& source,
                                                 uint8_t* block, ChannelShared<kHeadDim>& s) {
  __syncthreads();  // what was in shared memory is no longer needed
  if (__syncthreads_and(source.stage(l, kComponent, s)) == 0) return false;
  l.tile(kComponent).type == kCodes4 ? encode_staged<kHeadDim, 4, kComponent>(l, block, s)
                                     : encode_staged<kHeadDim, 2, kComponent>(l, block, s);
  return true;
}

// By all threads of a CTA; false where a value is not finite, and then the block is not all
// written. source.stage(l, component, s) brings a component to shared memory and returns whether
// what this thread saw is finite.
template <int32_t kHeadDim, class Source>
__device__ __forceinline__ bool encode_channels(const ChannelLayout& l, const Source& source,
                                                uint8_t* block, ChannelShared<kHeadDim>& s) {
  const int32_t used = l.v_metadata + 4 * l.tokens;
  for (int32_t i = used + static_cast<int32_t>(threadIdx.x); i < l.bytes; i += kChannelThreads) {
    block[i] = 0;
  }
  return encode_component<kHeadDim, Component::kKey>(l, source, block, s) &&
         encode_component<kHeadDim, Component::kValue>(l, source, block, s);
}

}  // namespace tierkv

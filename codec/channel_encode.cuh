// A CTA encodes a block: values to shared memory, parameters, codes gathered into words there, and
// the words to memory in whole sectors. The bytes of codec/channel_block.cc.
#pragma once

#include "codec/channel_block.h"
#include "codec/warp.cuh"

namespace tierkv {

inline constexpr int32_t kChannelThreads = 256;

struct ChannelShared {
  // [tokens][head_dim] fp16; lines of an even number of words, read by channel and by token.
  uint16_t x[kMaxChannelTokens * 128];
  uint32_t words[kMaxChannelTokens * 128 / 8];  // codes of 4 bits
  QuantParams params[kMaxChannelTokens];        // of a channel or a token
};

// Values as they come: rows of [.., head_dim] `stride` elements apart.
struct DenseSource {
  const uint16_t* x[2];  // k, v
  int64_t stride;

  __device__ uint16_t value(const ChannelLayout&, Component c, int32_t token, int32_t dim) const {
    return x[static_cast<int32_t>(c)][token * stride + dim];
  }
};
// A row's residual, which this CTA may have written.
struct ResidualSource {
  const uint8_t* residual;

  __device__ uint16_t value(const ChannelLayout& l, Component c, int32_t token, int32_t dim) const {
    const CodePosition at =
        code_position(TileLayout{16, l.head_dim()}, c, token % kTileTokens, dim);
    const uint8_t* from = residual + l.residual_tile(c, token / kTileTokens) + at.byte + at.bit / 8;
    return *reinterpret_cast<const uint16_t*>(from);
  }
};

__device__ __forceinline__ QuantParams params_of(float lo, float hi, int32_t bits) {
  return minmax_params(lo, hi, 1 << bits);
}

// A thread per channel.
__device__ __forceinline__ void find_channel_params(const ChannelLayout& l, uint8_t* block,
                                                    ChannelShared& s) {
  const auto d = static_cast<int32_t>(threadIdx.x);
  if (d >= l.head_dim()) return;
  float lo = half_to_float(s.x[d]), hi = lo;
  for (int32_t t = 1; t < l.tokens; ++t) {
    const float x = half_to_float(s.x[t * l.head_dim() + d]);
    lo = fminf(lo, x), hi = fmaxf(hi, x);
  }
  const QuantParams p = params_of(lo, hi, l.k_tile.bits);
  s.params[d] = p;
  *reinterpret_cast<uint16_t*>(block + l.k_metadata + channel_scale_byte(d)) = p.scale;
  *reinterpret_cast<uint16_t*>(block + l.k_metadata + channel_zero_point_byte(d)) = p.zero_point;
}

// A warp per token.
__device__ __forceinline__ void find_token_params(const ChannelLayout& l, uint8_t* block,
                                                  ChannelShared& s) {
  for (int32_t t = static_cast<int32_t>(threadIdx.x) / 32; t < l.tokens;
       t += kChannelThreads / 32) {
    float lo = INFINITY, hi = -INFINITY;
    for (int32_t d = lane_index(); d < l.head_dim(); d += 32) {
      const float x = half_to_float(s.x[t * l.head_dim() + d]);
      lo = fminf(lo, x), hi = fmaxf(hi, x);
    }
#pragma unroll
    for (int32_t lanes = 16; lanes > 0; lanes /= 2) {
      lo = fminf(lo, __shfl_xor_sync(kAllLanes, lo, lanes));
      hi = fmaxf(hi, __shfl_xor_sync(kAllLanes, hi, lanes));
    }
    if (lane_index() != 0) continue;
    const QuantParams p = params_of(lo, hi, l.v_tile.bits);
    s.params[t] = p;
    *reinterpret_cast<QuantParams*>(block + l.value_metadata_byte(t)) = p;
  }
}

__device__ __forceinline__ void gather_codes(const ChannelLayout& l, Component c, uint8_t* block,
                                             ChannelShared& s) {
  const TileLayout tile = l.tile(c);
  const int32_t dim = l.head_dim(), values = l.tokens * dim, words = values * tile.bits / 32;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < words; i += kChannelThreads) {
    s.words[i] = 0;
  }
  __syncthreads();  // parameters, too
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < values; i += kChannelThreads) {
    const int32_t t = i / dim, d = i % dim;
    const QuantParams p = s.params[c == Component::kKey ? d : t];
    const int32_t code = minmax_code(half_to_float(s.x[i]), half_to_float(p.scale),
                                     half_to_float(p.zero_point), 1 << tile.bits);
    const CodePosition at = code_position(tile, c, t % kTileTokens, d);
    atomicOr(&s.words[(t / kTileTokens * tile.bytes() + at.byte) / 4], static_cast<uint32_t>(code)
                                                                           << at.bit);
  }
  __syncthreads();
  auto* to = reinterpret_cast<uint4*>(block + l.codes(c));
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < words / 4; i += kChannelThreads) {
    to[i] = reinterpret_cast<const uint4*>(s.words)[i];
  }
}

// All threads; false where a value is not finite, and then the block is not all written.
template <class Source>
__device__ __forceinline__ bool encode_channel_block(const ChannelLayout& l, const Source& source,
                                                     uint8_t* block, ChannelShared& s) {
  const int32_t dim = l.head_dim(), values = l.tokens * dim;
  const int32_t used = l.v_metadata + 4 * l.tokens;
  for (int32_t i = used + static_cast<int32_t>(threadIdx.x); i < l.bytes; i += kChannelThreads) {
    block[i] = 0;
  }
  bool finite = true;
#pragma unroll 1
  for (const Component c : {Component::kKey, Component::kValue}) {
    __syncthreads();  // what was in shared memory is no longer needed
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < values; i += kChannelThreads) {
      const uint16_t x = source.value(l, c, i / dim, i % dim);
      s.x[i] = x;
      finite &= (x & 0x7c00u) != 0x7c00u;
    }
    finite = __syncthreads_and(finite) != 0;
    if (!finite) return false;
    if (c == Component::kKey) {
      find_channel_params(l, block, s);
    } else {
      find_token_params(l, block, s);
    }
    gather_codes(l, c, block, s);
  }
  return true;
}

__device__ __forceinline__ void put_residual(const ChannelLayout& l, uint8_t* residual, Component c,
                                             int32_t token, int32_t dim, uint16_t x) {
  const CodePosition at = code_position(TileLayout{16, l.head_dim()}, c, token % kTileTokens, dim);
  uint8_t* to = residual + l.residual_tile(c, token / kTileTokens) + at.byte + at.bit / 8;
  *reinterpret_cast<uint16_t*>(to) = x;
}

}  // namespace tierkv

// The codes of a block in shared memory, a byte each, in the order of the lanes' streams: written
// token by token, read as the lane encoder asks for them.
#pragma once

#include "codec/gpu/coded/weighted_codes.cuh"
#include "codec/gpu/coded/weighted_form.cuh"

namespace tierkv {

// Stands in the codes for one that is not in a byte.
inline constexpr int32_t kWideCode = -128;

// What a warp has in shared memory, in this order.
struct EncodeWarp {
  WeightedBlockJob job;
  int8_t exponents[kBlockTokens];
};
inline constexpr int32_t kEncodeWarpBytes = (sizeof(EncodeWarp) + 15) / 16 * 16;
// Codes of a slice in shared memory: 8 bytes of a lane in every fragment.
TKV_HD constexpr int32_t slice_code_bytes() {
  return kBlockTokens * kSliceDims;
}

template <int32_t kPer, bool kKey>
struct StageSink {
  static constexpr int32_t kAhead = kPer < 8 ? 4 : 2;
  static constexpr int32_t kTogether = kKey ? 1 : 2;
  static constexpr int32_t kTileBytes =
      kTileTokens * (kPer * kWarpLanes < kSliceDims ? kPer * kWarpLanes : kSliceDims);
  uint8_t* lane;  // the codes, where this lane's lie
  bool wide = false;

  __device__ __forceinline__ explicit StageSink(uint8_t* codes) {
    const int32_t l = lane_index();
    lane = codes + l / 16 * 256 +
           (kKey ? l % 8 / 2 * 8 + l % 16 / 8 * 4 + l % 2 : l % 8 * 32 + l % 16 / 8 * 2);
  }
  __device__ __forceinline__ int32_t clip(int32_t code) {
    if (code > kWideCode && code < -kWideCode) return code;
    wide = true;
    return kWideCode;
  }
  __device__ __forceinline__ void take(int32_t t, const int32_t (&codes)[kTogether][kPer]) {
    uint8_t* to = lane + t / kTileTokens * kTileBytes;
    to += kKey ? t % 8 * 32 + t % 16 / 8 * 2 : t % 8 / 2 * 8 + t % 16 / 8 * 4;
#pragma unroll
    for (int32_t k = 0; k < kPer; ++k) {
      uint8_t* const at = to + k / 4 * slice_code_bytes() + k % 4 * 512;
      if constexpr (kKey) {
        *at = static_cast<uint8_t>(codes[0][k]);
      } else {
        *reinterpret_cast<uint16_t*>(at) =
            static_cast<uint16_t>((codes[0][k] & 255) | (codes[1][k] & 255) << 8);
      }
    }
  }
};

// The codes of a slice as the lane encoder takes them.
struct StagedCodes {
  const uint8_t* bytes;  // of this lane
  const EncodeWarp* warp;
  int32_t first_dim, blocks;
  int32_t whole;   // fragments that have no padding
  int32_t filler;  // low half of padding
  bool wide;       // any code of the block is

  struct Fragment {
    uint2 bytes;
    int32_t index;
  };

  __device__ __forceinline__ StagedCodes(const uint8_t* staged, const EncodeWarp* of, int32_t slice,
                                         int32_t dim_blocks, bool any_wide)
      : bytes(staged + slice * slice_code_bytes() + 8 * lane_index()),
        warp(of),
        first_dim(slice * kSliceDims),
        blocks(dim_blocks),
        whole(of->job.tokens / kTileTokens * dim_blocks),
        filler(exact(0, 0) & 0xffff),
        wide(any_wide) {}

  // d: of the slice.
  __device__ __forceinline__ int32_t exact(int32_t t, int32_t d) const {
    return exact_code(&warp->job, t, first_dim + d, warp->exponents[t]).code;
  }
  __device__ __forceinline__ Fragment fetch(int32_t i) const {
    return {*reinterpret_cast<const uint2*>(bytes + i * 256), i};
  }
  __device__ __forceinline__ void codes(const Fragment& x, int32_t f, FragmentCodes& out) const {
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const uint32_t pair = (r < 2 ? x.bytes.x : x.bytes.y) >> (r % 2 * 16);
      out[r][0] = static_cast<int8_t>(pair);
      out[r][1] = static_cast<int8_t>(pair >> 8);
    }
    if (!wide && x.index < whole) return;
    const Component c = warp->job.component;
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const PairPosition p = pair_position(c, x.index / blocks, f, r, lane_index());
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        const int32_t t = p.token + (c == Component::kValue ? h : 0);
        if (t >= warp->job.tokens) {
          out[r][h] = kPaddingCodes | filler;
        } else if (out[r][h] == kWideCode) {
          out[r][h] = exact(t, p.dim + (c == Component::kKey ? h : 0));
        }
      }
    }
  }
};

}  // namespace tierkv

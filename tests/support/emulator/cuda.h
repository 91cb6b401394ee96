// SPDX-License-Identifier: Apache-2.0
// What of CUDA's language and of its warp functions the emulated kernels use, for fibers.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/support/emulator/fibers.h"
#include "tierkv/half.h"

#define __device__
#define __host__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (emulator::cta().thread_index())
#define blockIdx (emulator::cta().block_index())
#define blockDim (emulator::cta().block_size())
#define gridDim (emulator::cta().grid())

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct int2 {
  int32_t x, y;
};
struct int4 {
  int32_t x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline int2 make_int2(int32_t x, int32_t y) {
  return {x, y};
}
inline uint2 make_uint2(uint32_t x, uint32_t y) {
  return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return {x, y, z, w};
}
struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};

inline float __half2float(__half h) {
  return tierkv::half_to_float(h.bits);
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {{tierkv::float_to_half(x)}, {tierkv::float_to_half(y)}};
}
inline __half2 __float2half2_rn(float x) {
  return __floats2half2_rn(x, x);
}
inline float2 __half22float2(__half2 h) {
  return {__half2float(h.x), __half2float(h.y)};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
  return __floats2half2_rn(__half2float(a.x) * __half2float(b.x),
                           __half2float(a.y) * __half2float(b.y));
}
inline __half2 __hmin2(__half2 a, __half2 b) {
  return {__half2float(b.x) < __half2float(a.x) ? b.x : a.x,
          __half2float(b.y) < __half2float(a.y) ? b.y : a.y};
}
inline __half2 __hmax2(__half2 a, __half2 b) {
  return {__half2float(b.x) > __half2float(a.x) ? b.x : a.x,
          __half2float(b.y) > __half2float(a.y) ? b.y : a.y};
}
inline float __int_as_float(int32_t x) {
  return tierkv::bits_float(static_cast<uint32_t>(x));
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}

inline void __syncthreads() {
  emulator::cta().sync_cta();
}
// In all threads of a CTA.
inline int32_t __syncthreads_and(bool x) {
  static bool all;
  all = true;
  emulator::cta().sync_cta();
  if (!x) all = false;
  emulator::cta().sync_cta();
  const bool result = all;
  emulator::cta().sync_cta();
  return result ? 1 : 0;
}
inline void __syncwarp() {
  emulator::cta().sync_warp();
}

namespace emulator {

// What the lane `source` shows.
template <class T>
T from_lane(T x, int32_t source) {
  return cta().exchange(x, [&](Warp& w) {
    std::memcpy(&x, w.words[source], sizeof(T));
    return x;
  });
}
// All lanes' values, from the first on.
template <class T, class Combine>
T reduce_lanes(T x, const Combine& combine) {
  return cta().exchange(static_cast<uint32_t>(x), [&](Warp& w) {
    auto all = static_cast<T>(w.words[0][0]);
    for (int32_t i = 1; i < kLanes; ++i) all = combine(all, static_cast<T>(w.words[i][0]));
    return all;
  });
}

}  // namespace emulator

template <class T>
T __shfl_xor_sync(uint32_t, T x, int32_t mask) {
  return emulator::from_lane(x, emulator::cta().lane() ^ mask);
}
template <class T>
T __shfl_sync(uint32_t, T x, int32_t source) {
  return emulator::from_lane(x, source & 31);
}
template <class T>
T __shfl_up_sync(uint32_t, T x, int32_t lanes) {
  const int32_t lane = emulator::cta().lane();
  return emulator::from_lane(x, lane < lanes ? lane : lane - lanes);
}
template <class T>
T __shfl_down_sync(uint32_t, T x, int32_t lanes) {
  const int32_t lane = emulator::cta().lane();
  return emulator::from_lane(x, lane + lanes < emulator::kLanes ? lane + lanes : lane);
}
inline int32_t __reduce_min_sync(uint32_t, int32_t x) {
  return emulator::reduce_lanes(x, [](int32_t a, int32_t b) { return std::min(a, b); });
}
inline int32_t __reduce_max_sync(uint32_t, int32_t x) {
  return emulator::reduce_lanes(x, [](int32_t a, int32_t b) { return std::max(a, b); });
}
inline bool __all_sync(uint32_t, bool x) {
  return emulator::reduce_lanes<uint32_t>(x, [](uint32_t a, uint32_t b) { return a & b; }) != 0;
}
inline uint32_t __ballot_sync(uint32_t, bool x) {
  return emulator::cta().exchange(uint32_t{x}, [](emulator::Warp& w) {
    uint32_t bits = 0;
    for (int32_t i = 0; i < emulator::kLanes; ++i) bits |= w.words[i][0] << i;
    return bits;
  });
}
inline bool __any_sync(uint32_t, bool x) {
  return emulator::cta().exchange(uint32_t{x}, [](emulator::Warp& w) {
    return std::any_of(w.words, w.words + emulator::kLanes, [](auto& lane) { return lane[0]; });
  });
}

// Fibers change at barriers only.
template <class T>
T atomicAdd(T* p, T x) {
  const T before = *p;
  *p += x;
  return before;
}
__extension__ using emulated_uint128 = unsigned __int128;
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<emulated_uint128>(a) * b >> 64);
}
inline int32_t atomicMin(int32_t* p, int32_t x) {
  const int32_t old = *p;
  *p = std::min(old, x);
  return old;
}
inline int32_t atomicMax(int32_t* p, int32_t x) {
  const int32_t old = *p;
  *p = std::max(old, x);
  return old;
}
inline int32_t atomicCAS(int32_t* p, int32_t expected, int32_t x) {
  const int32_t before = *p;
  if (before == expected) *p = x;
  return before;
}
inline uint32_t atomicOr(uint32_t* p, uint32_t x) {
  const uint32_t before = *p;
  *p |= x;
  return before;
}
inline int32_t __clz(int32_t x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(x));
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline int32_t __popc(uint32_t x) {
  return __builtin_popcount(x);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31u));
}
// Four of the eight bytes of b, a; without signs.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t x = 0;
  for (int32_t i = 0; i < 4; ++i) {
    x |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7u) & 0xffu) << 8 * i;
  }
  return x;
}
inline uint32_t __brev(uint32_t x) {
  uint32_t reversed = 0;
  for (int32_t i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
inline int32_t min(int32_t a, int32_t b) {
  return std::min(a, b);
}
inline int32_t max(int32_t a, int32_t b) {
  return std::max(a, b);
}
// Two signed numbers of 16 bits in a word.
template <class Choose>
uint32_t choose_halves(uint32_t a, uint32_t b, const Choose& choose) {
  const auto half = [&](int32_t i) {
    return static_cast<uint32_t>(static_cast<uint16_t>(
        choose(static_cast<int16_t>(a >> 16 * i), static_cast<int16_t>(b >> 16 * i))));
  };
  return half(0) | half(1) << 16;
}
inline uint32_t __vmins2(uint32_t a, uint32_t b) {
  return choose_halves(a, b, [](int16_t x, int16_t y) { return std::min(x, y); });
}
inline uint32_t __vmaxs2(uint32_t a, uint32_t b) {
  return choose_halves(a, b, [](int16_t x, int16_t y) { return std::max(x, y); });
}

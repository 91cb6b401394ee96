// The host's stand-in for attention/ptx.cuh and for what of CUDA the attention kernels use. Copies
// are carried out when they are waited for, over memory that was poisoned when they started, so a
// read without a wait is seen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "codec/element.h"
#include "tests/emulator/cuda.h"
#include "tierkv/half.h"

namespace tierkv {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

inline float emulated_half(uint32_t word, int32_t i) {
  return half_to_float(static_cast<uint16_t>(word >> 16 * i));
}

// Fragment tables of the PTX manual, "Matrix Fragments for mma.m16n8k16".
template <class Decode>
void emulated_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Decode decode) {
  emulator::Cta& cta = emulator::cta();
  const int32_t g = cta.lane() / 4, t = cta.lane() % 4;
  cta.exchange({a[0], a[1], a[2], a[3], b0, b1}, [&](emulator::Warp& w) {
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t row = g + 8 * (i / 2), column = 2 * t + i % 2;
      for (int32_t k = 0; k < 16; ++k) {
        const int32_t a_lane = row % 8 * 4 + k % 8 / 2, a_word = row / 8 + 2 * (k / 8);
        const int32_t b_lane = column * 4 + k % 8 / 2, b_word = 4 + k / 8;
        d[i] += decode(w.words[a_lane][a_word], k % 2) * decode(w.words[b_lane][b_word], k % 2);
      }
    }
    return 0;
  });
}
inline float emulated_bfloat(uint32_t word, int32_t i) {
  return bfloat16_to_float(static_cast<uint16_t>(word >> 16 * i));
}
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_mma(d, a, b0, b1, emulated_half);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated_mma(d, a, b0, b1, emulated_bfloat);
}

inline void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  const uint32_t with_zeros[4] = {a[0], a[1], 0, 0};
  mma_m16n8k16(d, with_zeros, b, 0);
}

inline uint32_t transpose_8x8(uint32_t x) {
  emulator::Cta& cta = emulator::cta();
  const int32_t g = cta.lane() / 4, t = cta.lane() % 4;
  return cta.exchange({x}, [&](emulator::Warp& w) {
    const uint32_t low = w.words[8 * t + g / 2][0], high = w.words[8 * t + 4 + g / 2][0];
    return (low >> 16 * (g % 2) & 0xffffu) | (high >> 16 * (g % 2) & 0xffffu) << 16;
  });
}

inline int32_t kept(int32_t x) {
  return x;
}
inline uint32_t odd_bytes(uint32_t x) {
  return x >> 8 & 0x00ff00ffu;
}
inline int32_t lowest_bit(uint32_t x) {
  return __builtin_ffs(static_cast<int>(x)) - 1;
}
inline int32_t highest_bit(uint32_t x) {
  return x == 0 ? -1 : 31 - __builtin_clz(x);
}

inline uint32_t pack_halves(float low, float high) {
  return float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
}
inline float2 unpack_halves(uint32_t x) {
  return {emulated_half(x, 0), emulated_half(x, 1)};
}
inline uint32_t pack_bfloats(float low, float high) {
  return float_to_bfloat16(low) | static_cast<uint32_t>(float_to_bfloat16(high)) << 16;
}
inline float2 unpack_bfloats(uint32_t x) {
  return {emulated_bfloat(x, 0), emulated_bfloat(x, 1)};
}
inline uint32_t pack_outputs(float low, float high, bool is_bfloat16) {
  const DType type = is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  return output_to_raw(type, low) | static_cast<uint32_t>(output_to_raw(type, high)) << 16;
}
inline uint32_t multiply_halves(uint32_t x, float factor) {
  return pack_halves(emulated_half(x, 0) * factor, emulated_half(x, 1) * factor);
}

inline constexpr uint32_t kOneHalves = 0x3c003c00u;
inline uint32_t equal_halves(uint32_t x, uint32_t y) {
  uint32_t z = 0;
  for (int32_t i = 0; i < 2; ++i) {
    if (emulated_half(x, i) == emulated_half(y, i)) z |= 0xffffu << 16 * i;
  }
  return z;
}
inline uint32_t add_halves(uint32_t x, uint32_t y) {
  return pack_halves(emulated_half(x, 0) + emulated_half(y, 0),
                     emulated_half(x, 1) + emulated_half(y, 1));
}
inline uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  float d[2];
  for (int32_t i = 0; i < 2; ++i) {
    d[i] = std::fma(emulated_half(a, i), emulated_half(b, i), emulated_half(c, i));
  }
  return pack_halves(d[0], d[1]);
}
inline uint32_t low_halves(uint32_t a, uint32_t b) {
  return (a & 0xffffu) | b << 16;
}
inline uint32_t high_halves(uint32_t a, uint32_t b) {
  return a >> 16 | (b & 0xffff0000u);
}

inline uint32_t even_bytes_as(uint32_t x, uint32_t upper) {
  return __byte_perm(x, upper, 0x4240);
}
inline uint32_t odd_bytes_as(uint32_t x, uint32_t upper) {
  return __byte_perm(x, upper, 0x4341);
}
inline uint32_t saturate_halves(uint32_t x) {
  const auto inside = [&](int32_t i) {
    return std::fmin(std::fmax(emulated_half(x, i), -65504.0f), 65504.0f);
  };
  return pack_halves(inside(0), inside(1));
}

// Shared memory where kernels know it by addresses: they begin behind what the system keeps.
struct EmulatedShared {
  static constexpr uint32_t kStart = 1024;
  uint8_t* base = nullptr;
  uint32_t bytes = 0;

  // Aborts outside of it.
  uint8_t* at(uint32_t address, uint32_t count) const {
    const bool inside = address >= kStart && address - kStart + count <= bytes;
    if (inside && address % count == 0) return base + (address - kStart);
    std::fprintf(stderr, "emulator: %u bytes at shared address %u\n", count, address);
    std::abort();
  }
};
inline EmulatedShared& emulated_shared() {
  static EmulatedShared shared;
  return shared;
}
inline uint32_t shared_address(const void* p) {
  const auto* byte = static_cast<const uint8_t*>(p);
  return EmulatedShared::kStart + static_cast<uint32_t>(byte - emulated_shared().base);
}

struct CopyPiece {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
};
inline constexpr int32_t kCopyPieces = 4;
struct CopyPieces {
  int32_t count;
  uint32_t total;
  CopyPiece piece[kCopyPieces];
};

// Per barrier: phases completed, and the pieces of the phase under way.
struct EmulatedBarrier {
  int32_t phase = 0;
  bool armed = false;
  std::vector<CopyPiece> pieces;

  bool has_ended(uint32_t parity) const { return static_cast<uint32_t>(phase) % 2 != parity; }
};
inline std::map<const void*, EmulatedBarrier>& emulated_barriers() {
  static std::map<const void*, EmulatedBarrier> barriers;
  return barriers;
}

// Aborts where a copy is under way.
template <class T>
T load_arrived(const uint8_t* from) {
  for (const auto& [at, barrier] : emulated_barriers()) {
    for (const CopyPiece& piece : barrier.pieces) {
      if (from + sizeof(T) <= piece.to || from >= piece.to + piece.bytes) continue;
      std::fprintf(stderr, "emulator: a read of what a copy may be writing\n");
      std::abort();
    }
  }
  return *reinterpret_cast<const T*>(from);
}

inline void init_barrier(uint64_t* barrier) {
  emulated_barriers()[barrier] = {};
}
inline void publish_barriers() {
  __syncwarp();
}

inline void wait_barrier(uint64_t* barrier, uint32_t parity) {
  __syncwarp();  // the copies have been started
  EmulatedBarrier& b = emulated_barriers().at(barrier);
  if (b.armed) {
    for (const CopyPiece& piece : b.pieces) std::memcpy(piece.to, piece.from, piece.bytes);
    b.pieces.clear();
    b.armed = false;
    ++b.phase;
  }
  if (!b.has_ended(parity)) {
    std::fprintf(stderr, "emulator: waiting for a copy that nobody started\n");
    std::abort();
  }
}

// Either is possible.
inline bool has_arrived(const uint64_t*, uint32_t parity) {
  return parity != 0;
}

inline void copy_pieces(uint64_t* barrier, const CopyPieces& pieces) {
  if (emulator::cta().lane() != 0) return;
  EmulatedBarrier& b = emulated_barriers().at(barrier);
  if (b.armed) std::abort();
  uint32_t total = 0;
  for (int32_t i = 0; i < pieces.count; ++i) {
    const CopyPiece& piece = pieces.piece[i];
    total += piece.bytes;
    const bool aligned = piece.bytes % 16 == 0 && reinterpret_cast<uintptr_t>(piece.to) % 16 == 0 &&
                         reinterpret_cast<uintptr_t>(piece.from) % 16 == 0;
    if (!aligned) std::abort();
    if (piece.bytes == 0) continue;
    std::memset(piece.to, 0xff, piece.bytes);
    b.pieces.push_back(piece);
  }
  if (total != pieces.total) std::abort();
  b.armed = true;
}

inline void copy_page(uint64_t* barrier, const CopyPiece& piece) {
  copy_pieces(barrier, {1, piece.bytes, {piece}});
}

inline uint64_t* barrier_at(uint32_t address) {
  return reinterpret_cast<uint64_t*>(emulated_shared().at(address, 8));
}
inline void wait_barrier(uint32_t barrier, uint32_t parity) {
  wait_barrier(barrier_at(barrier), parity);
}
inline void copy_of_lane(int32_t owner, uint32_t barrier, uint32_t to, const uint8_t* from,
                         uint32_t bytes) {
  if (emulator::cta().lane() != owner) return;
  EmulatedBarrier& b = emulated_barriers().at(barrier_at(barrier));
  if (b.armed || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) std::abort();
  b.armed = true;
  if (bytes == 0) return;
  uint8_t* place = emulated_shared().at(to, 16);
  emulated_shared().at(to + bytes - 16, 16);
  std::memset(place, 0xff, bytes);
  b.pieces.push_back({place, from, bytes});
}

inline void prefetch_bytes(const uint8_t*, uint32_t) {}
inline void prefetch_pieces(const CopyPieces&) {}
inline uint32_t fresh_lane() {
  return static_cast<uint32_t>(emulator::cta().lane());
}
inline bool is_first_lane() {
  return emulator::cta().lane() == 0;
}
inline int32_t arrive_acq_rel(int32_t* counter) {
  return (*counter)++;
}
template <class Params>
void touch_parameters(const Params&, int32_t) {}
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

}  // namespace tierkv

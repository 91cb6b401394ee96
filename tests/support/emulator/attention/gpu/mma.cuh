// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/mma.cuh.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "gpu/math.cuh"

namespace tierkv {

// As tensor cores sum, at their worst: the terms and what they are added to are cut off at 2^-24 of
// the largest of them, the sum at 2^-23 of itself. A term that is no number makes a sum like it.
inline float emulated_sum(float d, const double* terms, int32_t count) {
  double largest = std::abs(double{d}), plain = d;
  for (int32_t k = 0; k < count; ++k) {
    largest = std::max(largest, std::abs(terms[k])), plain += terms[k];
  }
  if (largest == 0 || !std::isfinite(plain)) return static_cast<float>(plain);
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 24), per_unit = 1 / unit;
  auto units = static_cast<int64_t>(d * per_unit);
  for (int32_t k = 0; k < count; ++k) units += static_cast<int64_t>(terms[k] * per_unit);
  const double sum = static_cast<double>(units) * unit;
  const auto rounded = static_cast<float>(sum);
  return std::abs(double{rounded}) > std::abs(sum) ? std::nextafter(rounded, 0.0f) : rounded;
}

// Fragment tables of the PTX manual, "Matrix Fragments for mma.m16n8k16".
template <class Decode>
void emulated_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Decode decode) {
  emulator::Cta& cta = emulator::cta();
  const int32_t g = cta.lane() / 4, t = cta.lane() % 4;
  float mine[12];
  for (int32_t i = 0; i < 8; ++i) mine[i] = decode(a[i / 2], i % 2);
  for (int32_t i = 0; i < 4; ++i) mine[8 + i] = decode(i < 2 ? b0 : b1, i % 2);
  cta.exchange(mine, [&](emulator::Warp& w) {
    const auto shown = [&](int32_t lane, int32_t i) {
      float x;
      std::memcpy(&x, &w.words[lane][i], sizeof(x));
      return double{x};
    };
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t row = g + 8 * (i / 2), column = 2 * t + i % 2;
      double terms[16];
      for (int32_t k = 0; k < 16; ++k) {
        const int32_t of_row = k % 8 / 2, half = k / 8;
        terms[k] = shown(row % 8 * 4 + of_row, 2 * (row / 8 + 2 * half) + k % 2) *
                   shown(column * 4 + of_row, 8 + 2 * half + k % 2);
      }
      d[i] = emulated_sum(emulated_sum(d[i], terms, 8), terms + 8, 8);
    }
    return 0;
  });
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
  return cta.exchange(x, [&](emulator::Warp& w) {
    const uint32_t low = w.words[8 * t + g / 2][0], high = w.words[8 * t + 4 + g / 2][0];
    return (low >> 16 * (g % 2) & 0xffffu) | (high >> 16 * (g % 2) & 0xffffu) << 16;
  });
}

// read(x, matrix, row): from the addresses that the lanes gave of the matrices' rows.
template <class Read>
void read_matrices(const void* row, Read read) {
  emulator::cta().exchange(row, [&](emulator::Warp& w) {
    read([&](int32_t matrix, int32_t of_matrix) {
      const uint8_t* address;
      std::memcpy(&address, w.words[8 * matrix + of_matrix], sizeof(address));
      return address;
    });
    return 0;
  });
}
inline void load_matrices(uint32_t (&x)[4], const void* row) {
  const int32_t g = emulator::cta().lane() / 4, t = emulator::cta().lane() % 4;
  read_matrices(row, [&](auto row_of) {
    for (int32_t i = 0; i < 4; ++i) std::memcpy(&x[i], row_of(i, g) + 4 * t, 4);
  });
}
inline void load_matrices_transposed(uint32_t (&x)[4], const void* row) {
  const int32_t g = emulator::cta().lane() / 4, t = emulator::cta().lane() % 4;
  read_matrices(row, [&](auto row_of) {
    for (int32_t i = 0; i < 4; ++i) {
      uint16_t low, high;
      std::memcpy(&low, row_of(i, 2 * t) + 2 * g, 2);
      std::memcpy(&high, row_of(i, 2 * t + 1) + 2 * g, 2);
      x[i] = low | static_cast<uint32_t>(high) << 16;
    }
  });
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// DiffKV's page layout against the shapes as its section 6.2 writes them.
#include "bench/baselines/rungs/diffkv_layout.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <utility>
#include <vector>

namespace tierkv {
namespace {

constexpr int32_t kDims = 128;

// Row-major index into [F / (Kvec * Kgroup), N, Kgroup, Kvec].
int32_t key_index(int32_t bits, int32_t tokens, int32_t token, int32_t dim) {
  const int32_t vec = diffkv_key_vector(bits), group = kDiffkvKeyGroup;
  const int32_t outer = dim / (vec * group), inner = dim % (vec * group);
  return ((outer * tokens + token) * group + inner / vec) * vec + inner % vec;
}
// Row-major index into [F / Vgroup, N / Vvec, Vgroup, Vvec].
int32_t value_index(int32_t bits, int32_t tokens, int32_t token, int32_t dim) {
  const int32_t vec = diffkv_value_vector(bits), group = kDiffkvValueGroup;
  return ((dim / group * (tokens / vec) + token / vec) * group + dim % group) * vec + token % vec;
}

uint32_t code_at(const uint8_t* segment, int32_t bits, int32_t index) {
  uint32_t word;
  std::memcpy(&word, segment + index * bits / 32 * 4, 4);
  return word >> index * bits % 32 & ((1u << bits) - 1);
}

TEST(DiffkvLayout, PlacesAreThoseOfTheShapes) {
  for (const int32_t tokens : {16, 64, 112}) {
    for (const int32_t bits : {16, 8, 4, 2}) {
      for (int32_t token = 0; token < tokens; ++token) {
        for (int32_t dim = 0; dim < kDims; ++dim) {
          if (bits >= 4) {
            const DiffkvPlace key =
                diffkv_key_place(bits, tokens, key_index(bits, tokens, token, dim));
            ASSERT_EQ(key.token, token);
            ASSERT_EQ(key.dim, dim);
          }
          const DiffkvPlace value =
              diffkv_value_place(bits, tokens, value_index(bits, tokens, token, dim));
          ASSERT_EQ(value.token, token);
          ASSERT_EQ(value.dim, dim);
        }
      }
    }
  }
}

TEST(DiffkvLayout, TranscodingKeepsEveryCodeAndItsMetadata) {
  std::mt19937_64 rng(std::random_device{}());
  for (const auto& [k_bits, v_bits] : {std::pair{16, 16}, {8, 4}, {4, 2}, {4, 8}}) {
    const TierFormat format = token_wise_tier(k_bits, v_bits);
    const int32_t page_bytes = choose_page_size({format}, kDims)->page_bytes;
    const PageLayout page = *make_page_layout(format, kDims, page_bytes);
    std::vector<uint8_t> from(page_bytes), to(page_bytes, 0xa5);
    for (uint8_t& byte : from) byte = static_cast<uint8_t>(rng());
    transcode_page(page, from.data(), to.data());
    for (int32_t token = 0; token < page.tokens; ++token) {
      for (const Component c : {Component::kKey, Component::kValue}) {
        const int32_t bits = page.tile(c).type.bits(), tile = token / kTileTokens;
        const uint8_t* codes = to.data() + page.tile_codes_byte(c, 0);
        for (int32_t dim = 0; dim < kDims; ++dim) {
          const CodePosition at = code_position(page.tile(c), c, token % kTileTokens, dim);
          uint32_t word;
          std::memcpy(&word, from.data() + page.tile_codes_byte(c, tile) + at.byte, 4);
          const int32_t index = c == Component::kKey ? key_index(bits, page.tokens, token, dim)
                                                     : value_index(bits, page.tokens, token, dim);
          ASSERT_EQ(code_at(codes, bits, index), word >> at.bit & ((1u << bits) - 1));
        }
        if (bits == 16) continue;
        ASSERT_EQ(std::memcmp(to.data() + page.tile_metadata_byte(c, 0) + 4 * token,
                              from.data() + page.tile_metadata_byte(c, tile) +
                                  token_metadata_byte(0, token % kTileTokens),
                              4),
                  0);
      }
    }
  }
}

}  // namespace
}  // namespace tierkv

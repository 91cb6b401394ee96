// SPDX-License-Identifier: Apache-2.0
// Random tokens and poisoned pages for the page tests. The seed is fresh and printed with each
// failure.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "codec/host/page_codec.h"
#include "tests/support/fresh_random.h"

namespace tierkv {

// Tokens of one row as fp16, bf16 or fp32, each with its own magnitude and offset.
struct RandomTokens {
  std::vector<uint16_t> half_k, half_v;
  std::vector<float> k, v;  // what the 16-bit patterns mean, exactly; the input itself for kFloat32
  std::vector<float> scores;
  std::vector<int32_t> positions;
  int32_t head_dim = 0;
  DType dtype = DType::kFloat16;

  TokenBatch batch(int32_t first, int32_t count) const {
    TokenBatch b;
    const int64_t at = int64_t{first} * head_dim;
    b.dtype = dtype;
    const bool wide = dtype == DType::kFloat32;
    b.k = wide ? static_cast<const void*>(k.data() + at) : half_k.data() + at;
    b.v = wide ? static_cast<const void*>(v.data() + at) : half_v.data() + at;
    b.scores = scores.data() + first;
    b.positions = positions.data() + first;
    b.count = count;
    return b;
  }
};

// A page of `bytes` at 128-byte alignment, filled with poison.
class PoisonedPage {
 public:
  PoisonedPage(const PageLayout& layout, DType raw_dtype, uint8_t poison = 0xa5)
      : storage_(layout.used_bytes + 256, poison) {
    const auto at = reinterpret_cast<uintptr_t>(storage_.data());
    page_.bytes = storage_.data() + (128 - at % 128) % 128;
    page_.layout = layout;
    page_.raw_dtype = raw_dtype;
  }
  // With the rules of the format, to write 2 bits clipped at the norm.
  PoisonedPage(const PageLayout& layout, DType raw_dtype, const TierFormat& format)
      : PoisonedPage(layout, raw_dtype) {
    page_.rule[0] = format.k.step_rule;
    page_.rule[1] = format.v.step_rule;
  }
  PoisonedPage(const PoisonedPage&) = delete;
  PoisonedPage& operator=(const PoisonedPage&) = delete;

  const HostPage& page() const { return page_; }
  std::vector<uint8_t> bytes() const {
    return {page_.bytes, page_.bytes + page_.layout.used_bytes};
  }
  // All of the storage: to see that nothing outside the page was written.
  const std::vector<uint8_t>& storage() const { return storage_; }

 private:
  std::vector<uint8_t> storage_;
  HostPage page_;
};

// The defined bytes of a page of `used` tokens, segment after segment.
inline std::vector<uint8_t> defined_bytes(const HostPage& page, int32_t used) {
  std::vector<uint8_t> out;
  const PageLayout& l = page.layout;
  const int32_t tiles = (used + kTileTokens - 1) / kTileTokens;
  const auto add = [&](int32_t offset, int32_t bytes) {
    out.insert(out.end(), page.bytes + offset, page.bytes + offset + bytes);
  };
  add(l.k_codes, tiles * l.k_tile.bytes());
  add(l.k_metadata, tiles * tile_metadata_bytes(l.k_groups));
  add(l.v_codes, tiles * l.v_tile.bytes());
  add(l.v_metadata, tiles * tile_metadata_bytes(l.v_groups));
  if (!l.has_records()) return out;
  add(l.scores, tiles * kTileTokens * 4);
  add(l.positions, tiles * kTileTokens * 4);
  return out;
}

class PageFixture : public RandomTest {
 protected:
  RandomTokens random_tokens(int32_t count, int32_t head_dim, DType dtype = DType::kFloat16) {
    RandomTokens t;
    t.head_dim = head_dim;
    t.dtype = dtype;
    const int64_t n = int64_t{count} * head_dim;
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> exponent(-6.0f, 6.0f), score(0.0f, 1.0f);
    for (auto* x : {&t.k, &t.v}) {
      auto& half = x == &t.k ? t.half_k : t.half_v;
      for (int64_t i = 0; i < n; ++i) {
        if (i % head_dim == 0) {
          scale_ = std::exp2(exponent(rng_));
          offset_ = scale_ * normal(rng_);
        }
        const float value = offset_ + scale_ * normal(rng_);
        const uint16_t bits =
            dtype == DType::kBFloat16 ? float_to_bfloat16(value) : float_to_half(value);
        half.push_back(bits);
        x->push_back(dtype == DType::kFloat32    ? value
                     : dtype == DType::kBFloat16 ? bfloat16_to_float(bits)
                                                 : half_to_float(bits));
      }
    }
    for (int32_t i = 0; i < count; ++i) {
      t.scores.push_back(score(rng_));
      t.positions.push_back(static_cast<int32_t>(rng_() >> 1));
    }
    return t;
  }
  int32_t uniform(int32_t lo, int32_t hi) {  // inclusive
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }
  std::string seed_text() const { return "seed " + std::to_string(seed_); }

  float scale_ = 1, offset_ = 0;
};

// The layout of a page of exactly `tokens` tokens.
inline PageLayout layout_of(const TierFormat& format, int32_t head_dim, int32_t tokens,
                            bool records = true) {
  PageShape shape = *page_shape(format, head_dim);
  shape.tokens = tokens;
  shape.records = records;
  return page_layout(shape);
}

// What a component of a token must read as: the quantiser applied to it directly.
inline std::vector<float> expected_values(const ComponentFormat& format, int32_t head_dim,
                                          DType raw_dtype, const float* x) {
  std::vector<float> y(head_dim);
  if (format.is_raw()) {
    for (int32_t d = 0; d < head_dim; ++d) {
      y[d] = raw_dtype == DType::kFloat16 ? half_to_float(float_to_half(x[d]))
                                          : bfloat16_to_float(float_to_bfloat16(x[d]));
    }
    return y;
  }
  const int32_t width = format.group == 0 ? head_dim : format.group;
  std::vector<uint8_t> codes(head_dim);
  for (int32_t d = 0; d < head_dim; d += width) {
    QuantParams p;
    EXPECT_EQ(format.step_rule == StepRule::kNorm
                  ? quantize_norm(x + d, width, &p, codes.data() + d)
                  : quantize_minmax(x + d, width, 1, format.type.levels(), &p, codes.data() + d),
              StatusCode::kOk);
    for (int32_t i = d; i < d + width; ++i) {
      y[i] = dequantize(codes[i], half_to_float(p.scale), half_to_float(p.zero_point));
    }
  }
  return y;
}

struct Decoded {
  std::vector<float> k, v, scores;
  std::vector<int32_t> positions;
};

inline Decoded decode_all(const HostPage& page, int32_t count) {
  Decoded d;
  const size_t n = static_cast<size_t>(count) * page.layout.head_dim();
  d.k.assign(n, NAN);
  d.v.assign(n, NAN);
  d.scores.assign(count, NAN);
  d.positions.assign(count, -7);
  TokenOutput out;
  out.k = d.k.data();
  out.v = d.v.data();
  out.scores = d.scores.data();
  out.positions = d.positions.data();
  out.count = count;
  EXPECT_TRUE(decode_tokens(page, 0, out));
  return d;
}

inline void expect_tokens(const HostPage& page, const TierFormat& format,
                          const RandomTokens& tokens, int32_t count) {
  const Decoded d = decode_all(page, count);
  const int32_t head_dim = tokens.head_dim;
  for (int32_t i = 0; i < count; ++i) {
    ASSERT_EQ(d.scores[i], tokens.scores[i]);
    ASSERT_EQ(d.positions[i], tokens.positions[i]);
    const int64_t at = int64_t{i} * head_dim;
    const auto k = expected_values(format.k, head_dim, page.raw_dtype, tokens.k.data() + at);
    const auto v = expected_values(format.v, head_dim, page.raw_dtype, tokens.v.data() + at);
    for (int32_t j = 0; j < head_dim; ++j) {
      ASSERT_EQ(d.k[at + j], k[j]) << "token " << i << " dim " << j;
      ASSERT_EQ(d.v[at + j], v[j]) << "token " << i << " dim " << j;
    }
  }
}

}  // namespace tierkv

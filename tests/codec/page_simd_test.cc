// SPDX-License-Identifier: Apache-2.0
// The fast page codec against the plain one, byte for byte, on every SIMD target this CPU has.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/codec/support/simd_targets.h"
#include "tests/support/page_fixture.h"

namespace tierkv {
namespace {

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
constexpr int32_t kBits[] = {16, 8, 4, 2};

class PageSimdTest : public PageFixture {
 protected:
  // A format that pages can hold: any bits, sub-groups of 16 dims or more.
  TierFormat random_format(int32_t head_dim) {
    TierFormat f;
    for (ComponentFormat* c : {&f.k, &f.v}) {
      c->type = CodeType::of_bits(kBits[uniform(0, 3)]);
      if (c->type == kCodes2 && uniform(0, 1)) c->step_rule = StepRule::kNorm;
      if (c->type.is_raw() || uniform(0, 1) == 0) continue;
      do {
        c->group = 16 * uniform(1, head_dim / 16);
      } while (head_dim % c->group != 0);
    }
    return f;
  }

  // Values that a shuffle or a rounding could get wrong: ties, zeros of both signs, constants,
  // extremes, subnormals.
  void add_edge_values(RandomTokens* t) {
    for (auto* x : {&t->k, &t->v}) {
      auto& half = x == &t->k ? t->half_k : t->half_v;
      for (size_t row = 0; row < x->size() / t->head_dim; ++row) {
        const int kind = uniform(0, 9);
        for (int32_t d = 0; d < t->head_dim; ++d) {
          float v = (*x)[row * t->head_dim + d];
          if (kind == 0) v = static_cast<float>(uniform(0, 30)) * 0.5f;  // halfway between codes
          if (kind == 1) v = uniform(0, 1) ? 0.0f : -0.0f;
          if (kind == 2) v = -3.5f;
          if (kind == 3) v = uniform(0, 1) ? 65504.0f : -65504.0f;
          if (kind == 4) v = static_cast<float>(uniform(-40, 40)) * 0x1p-24f;  // fp16 subnormals
          if (kind == 5) v = -v * static_cast<float>(uniform(0, 1));           // -0 among others
          const uint16_t bits =
              t->dtype == DType::kBFloat16 ? float_to_bfloat16(v) : float_to_half(v);
          half[row * t->head_dim + d] = bits;
          (*x)[row * t->head_dim + d] = t->dtype == DType::kFloat32    ? v
                                        : t->dtype == DType::kBFloat16 ? bfloat16_to_float(bits)
                                                                       : half_to_float(bits);
        }
      }
    }
  }

  void compare_append();
  void compare_decode();
};

void PageSimdTest::compare_append() {
  const int32_t head_dim = std::array{64, 96, 128, 256}[uniform(0, 3)];
  const TierFormat format = random_format(head_dim);
  const DType raw = kDTypes[uniform(0, 1)];
  const PageLayout layout = layout_of(format, head_dim, 64);
  RandomTokens tokens = random_tokens(64, head_dim, kDTypes[uniform(0, 2)]);
  add_edge_values(&tokens);
  if (uniform(0, 9) == 0) {  // a value that quantised components refuse
    const float bad = std::array{NAN, INFINITY, -INFINITY, 1e30f}[uniform(0, 3)];
    const int32_t at = uniform(0, 64 * head_dim - 1);
    (uniform(0, 1) ? tokens.k : tokens.v)[at] = bad;
    (uniform(0, 1) ? tokens.half_k : tokens.half_v)[at] = uniform(0, 1) ? 0x7fc0 : 0xff80;
  }
  const int32_t used = uniform(0, 40), count = uniform(0, 64 - used);
  TokenBatch batch = tokens.batch(0, count);
  std::vector<int32_t> rows;
  for (int32_t i = 0; i < count; ++i) rows.push_back(uniform(0, 63));
  if (uniform(0, 1)) batch.rows = rows.data();
  const RandomTokens before = random_tokens(used, head_dim);
  const PoisonedPage plain(layout, raw, format), fast(layout, raw, format);
  ASSERT_TRUE(reference::append_tokens(plain.page(), 0, before.batch(0, used)));
  ASSERT_TRUE(reference::append_tokens(fast.page(), 0, before.batch(0, used)));
  const Status want = reference::append_tokens(plain.page(), used, batch);
  const Status got = append_tokens(fast.page(), used, batch);
  SCOPED_TRACE(testing::Message() << to_string(format) << " d " << head_dim << " used " << used
                                  << " count " << count << " dtype " << dtype_name(tokens.dtype)
                                  << " raw " << dtype_name(raw));
  ASSERT_EQ(got.code(), want.code());
  ASSERT_EQ(got.message(), want.message());
  const int32_t defined = want.is_ok() ? used + count : used;
  ASSERT_EQ(defined_bytes(fast.page(), defined), defined_bytes(plain.page(), defined));
  const auto& storage = fast.storage();
  const int64_t offset = fast.page().bytes - storage.data();
  for (int64_t i = 0; i < static_cast<int64_t>(storage.size()); ++i) {
    const bool inside = i >= offset && i < offset + layout.used_bytes;
    ASSERT_TRUE(inside || storage[i] == 0xa5) << "byte " << i - offset << " outside the page";
  }
}

TEST_F(PageSimdTest, AppendsTheSameBytesOnEveryTarget) {
  SimdTargets targets;
  for (const int64_t target : targets.list()) {
    SimdTargets::choose(target);
    SCOPED_TRACE(hwy::TargetName(target));
    for (int trial = 0; trial < 300; ++trial) {
      compare_append();
      if (HasFatalFailure()) return;
    }
  }
}

// The same bits, a NaN standing for any NaN.
template <class T>
bool same_value(DType dtype, T a, T b) {
  float x, y;
  if constexpr (sizeof(T) == 4) {
    memcpy(&x, &a, 4);
    memcpy(&y, &b, 4);
  } else {
    x = dtype == DType::kFloat16 ? half_to_float(a) : bfloat16_to_float(a);
    y = dtype == DType::kFloat16 ? half_to_float(b) : bfloat16_to_float(b);
  }
  return a == b || (std::isnan(x) && std::isnan(y));
}

template <class T>
void expect_same(DType dtype, const std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
  for (size_t i = 0; i < a.size(); i += sizeof(T)) {
    T x, y;
    memcpy(&x, a.data() + i, sizeof(T));
    memcpy(&y, b.data() + i, sizeof(T));
    ASSERT_TRUE(same_value(dtype, x, y))
        << "element " << i / sizeof(T) << ": " << +x << " and " << +y;
  }
}

// Pages of random bytes: any codes, any metadata, infinities and NaN among it.
void PageSimdTest::compare_decode() {
  const int32_t head_dim = std::array{64, 96, 128, 256}[uniform(0, 3)];
  const TierFormat format = random_format(head_dim);
  const PageLayout layout = layout_of(format, head_dim, 48);
  const PoisonedPage p(layout, kDTypes[uniform(0, 1)]);
  for (int32_t i = 0; i < layout.used_bytes; ++i) p.page().bytes[i] = static_cast<uint8_t>(rng_());
  if (uniform(0, 1)) {  // and pages of tokens, whose metadata is sane
    RandomTokens tokens = random_tokens(48, head_dim);
    add_edge_values(&tokens);
    ASSERT_TRUE(reference::append_tokens(p.page(), 0, tokens.batch(0, 48)));
  }
  TokenOutput out;
  out.dtype = kDTypes[uniform(0, 2)];
  out.count = uniform(0, 48);
  out.row_stride = uniform(0, 1) ? 0 : head_dim + uniform(0, 9);
  const int32_t first = uniform(0, 48 - out.count);
  std::vector<int32_t> rows;
  for (int32_t i = 0; i < out.count; ++i) rows.push_back(out.count - 1 - i);
  if (uniform(0, 1)) out.rows = rows.data();
  const int64_t bytes = int64_t{out.count} * (head_dim + 9) * dtype_bytes(out.dtype);
  std::vector<uint8_t> k[2], v[2], scores[2], positions[2];
  const bool skip_k = uniform(0, 4) == 0, skip_v = uniform(0, 4) == 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (auto* x : {&k[pass], &v[pass]}) x->assign(bytes, 0xee);
    for (auto* x : {&scores[pass], &positions[pass]}) x->assign(48 * 4, 0xee);
    out.k = skip_k ? nullptr : k[pass].data();
    out.v = skip_v ? nullptr : v[pass].data();
    out.scores = reinterpret_cast<float*>(scores[pass].data());
    out.positions = reinterpret_cast<int32_t*>(positions[pass].data());
    ASSERT_TRUE(pass == 0 ? reference::decode_tokens(p.page(), first, out)
                          : decode_tokens(p.page(), first, out));
  }
  SCOPED_TRACE(testing::Message() << to_string(format) << " d " << head_dim << " first " << first
                                  << " count " << out.count << " dtype " << dtype_name(out.dtype)
                                  << " raw " << dtype_name(p.page().raw_dtype));
  for (const auto* x : {&k, &v}) {
    if (out.dtype == DType::kFloat32) {
      expect_same<uint32_t>(out.dtype, (*x)[0], (*x)[1]);
    } else {
      expect_same<uint16_t>(out.dtype, (*x)[0], (*x)[1]);
    }
  }
  ASSERT_EQ(scores[0], scores[1]);
  ASSERT_EQ(positions[0], positions[1]);
}

TEST_F(PageSimdTest, ReadsTheSameValuesOnEveryTarget) {
  SimdTargets targets;
  for (const int64_t target : targets.list()) {
    SimdTargets::choose(target);
    SCOPED_TRACE(hwy::TargetName(target));
    for (int trial = 0; trial < 300; ++trial) {
      compare_decode();
      if (HasFatalFailure()) return;
    }
  }
}

// Every fp16 and bf16 pattern through a raw page to every type, so every branch of the vector
// conversions.
TEST_F(PageSimdTest, ConvertsEveryPatternOnEveryTarget) {
  const PageLayout layout = layout_of(raw_tier(), 256, 256);
  SimdTargets targets;
  for (const int64_t target : targets.list()) {
    SimdTargets::choose(target);
    SCOPED_TRACE(hwy::TargetName(target));
    for (const DType raw : {DType::kFloat16, DType::kBFloat16}) {
      const PoisonedPage p(layout, raw);
      std::vector<uint16_t> patterns(65536);
      for (int32_t i = 0; i < 65536; ++i) patterns[i] = static_cast<uint16_t>(i);
      for (int32_t slot = 0; slot < 256; ++slot) {
        TokenCodes token{};
        std::copy_n(patterns.begin() + 256 * slot, 256, token.k.codes);
        std::copy_n(patterns.begin() + 256 * slot, 256, token.v.codes);
        store_token(p.page(), slot, token);
      }
      for (const DType dtype : kDTypes) {
        std::vector<uint8_t> want(65536 * dtype_bytes(dtype)), got(want.size(), 0xee);
        TokenOutput out;
        out.count = 256;
        out.dtype = dtype;
        out.k = want.data();
        ASSERT_TRUE(reference::decode_tokens(p.page(), 0, out));
        out.k = got.data();
        ASSERT_TRUE(decode_tokens(p.page(), 0, out));
        if (dtype == DType::kFloat32) {
          expect_same<uint32_t>(dtype, want, got);
        } else {
          expect_same<uint16_t>(dtype, want, got);
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace tierkv

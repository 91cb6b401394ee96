// SPDX-License-Identifier: Apache-2.0
// Channel blocks on the host against quantisation written out, and what they refuse.
#include "codec/format/channel_block.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <set>
#include <utility>

#include "tests/baselines/channel_world.h"
#include "tests/support/fresh_random.h"

namespace tierkv::testing {
namespace {

class ChannelBlock : public RandomTest {};

struct Case {
  int32_t head_dim, k_bits, v_bits, tokens;
};
constexpr Case kCases[] = {{64, 4, 4, 64}, {128, 4, 2, 128}, {128, 2, 4, 64}, {64, 2, 2, 128}};

ChannelLayout layout_of(const Case& c) {
  const auto layout = make_channel_layout(channel_format(c.k_bits, c.v_bits, c.tokens), c.head_dim);
  EXPECT_TRUE(layout.is_ok()) << layout.status().message();
  return *layout;
}

// scale = half((max - min) / (levels - 1)), zero point = half(min), of n values `stride` apart.
float quantised(const std::vector<float>& x, int64_t first, int64_t stride, int32_t n, int32_t bits,
                int64_t at) {
  float lo = x[first], hi = x[first];
  for (int32_t i = 0; i < n; ++i) {
    lo = std::min(lo, x[first + i * stride]);
    hi = std::max(hi, x[first + i * stride]);
  }
  const float levels = static_cast<float>((1 << bits) - 1);
  const float scale = half_to_float(float_to_half((hi - lo) / levels));
  const float zero = half_to_float(float_to_half(lo));
  const float code =
      scale == 0 ? 0 : std::min(levels, std::max(0.0f, std::nearbyint((x[at] - zero) / scale)));
  return scale * code + zero;
}

void expect_row(ChannelWorld* w, int32_t row, const std::vector<float>& k,
                const std::vector<float>& v, int32_t tokens) {
  const ChannelCache cache = w->cache();
  const ChannelLayout& l = w->layout;
  const int32_t dim = l.head_dim(), blocks = tokens / l.tokens;
  ASSERT_EQ(w->block_count[row], blocks);
  ASSERT_EQ(w->residual_tokens[row], tokens % l.tokens);
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t d = 0; d < dim; ++d) {
      const int64_t at = int64_t{t} * dim + d, first = int64_t{t} / l.tokens * l.tokens * dim + d;
      if (t < blocks * l.tokens) {
        const uint8_t* block = cache.block(cache.block_id(row, t / l.tokens));
        ASSERT_EQ(channel_value(l, block, Component::kKey, t % l.tokens, d),
                  quantised(k, first, dim, l.tokens, l.k_tile.type.bits(), at));
        ASSERT_EQ(channel_value(l, block, Component::kValue, t % l.tokens, d),
                  quantised(v, int64_t{t} * dim, 1, dim, l.v_tile.type.bits(), at));
      } else {
        ASSERT_EQ(residual_value(l, cache.residual_of(row), Component::kKey, t % l.tokens, d),
                  k[at]);
        ASSERT_EQ(residual_value(l, cache.residual_of(row), Component::kValue, t % l.tokens, d),
                  v[at]);
      }
    }
  }
}

// Tokens of one head of one sequence, as floats.
std::vector<float> row_floats(const std::vector<uint16_t>& x, int32_t first, int32_t tokens,
                              int32_t heads, int32_t head, int32_t dim) {
  std::vector<float> y;
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t d = 0; d < dim; ++d) {
      y.push_back(half_to_float(x[((int64_t{first} + t) * heads + head) * dim + d]));
    }
  }
  return y;
}

TEST_F(ChannelBlock, PromptsAndAppendsGiveTheSameCache) {
  for (const Case& c : kCases) {
    const ChannelLayout l = layout_of(c);
    ChannelWorld filled(&rng_, l, 6, 3), grown = filled;
    const std::vector<int32_t> indptr = {0, 2 * c.tokens + 17, 2 * c.tokens + 17,
                                         3 * c.tokens + 17};  // the second one is empty
    const std::vector<uint16_t> k = channel_values(&rng_, indptr[3] * 2, c.head_dim, 1);
    const std::vector<uint16_t> v = channel_values(&rng_, indptr[3] * 2, c.head_dim, 0.3f);
    ASSERT_TRUE(fill_channel_host(filled.cache(),
                                  {k.data(), v.data(), indptr.data(), 2, filled.status.data()}));
    for (int32_t row = 0; row < 6; ++row) {
      const int32_t first = indptr[row / 2], tokens = indptr[row / 2 + 1] - first;
      ASSERT_EQ(filled.status[row], StatusCode::kOk);
      expect_row(&filled, row, row_floats(k, first, tokens, 2, row % 2, c.head_dim),
                 row_floats(v, first, tokens, 2, row % 2, c.head_dim), tokens);
      if (HasFatalFailure()) FAIL() << "seed " << seed_;
    }
    // Rows of one length token by token.
    ChannelWorld prompt(&rng_, l, 2, 3);
    ChannelWorld step = prompt;
    const std::vector<int32_t> one = {0, c.tokens + 9};
    ASSERT_TRUE(fill_channel_host(prompt.cache(),
                                  {k.data(), v.data(), one.data(), 2, prompt.status.data()}));
    for (int32_t t = 0; t < one[1]; ++t) {
      const int64_t at = int64_t{t} * 2 * c.head_dim;
      ASSERT_TRUE(
          append_channel_host(step.cache(), {k.data() + at, v.data() + at, step.status.data()}));
      ASSERT_EQ(step.status[1], StatusCode::kOk);
    }
    EXPECT_EQ(prompt.block_count, step.block_count);
    EXPECT_EQ(prompt.residual_tokens, step.residual_tokens);
    EXPECT_EQ(std::memcmp(prompt.pool.data(), step.pool.data(), prompt.pool.size() * 128), 0);
  }
}

TEST_F(ChannelBlock, ChannelsOfAKeyHavePlacesOfTheirOwn) {
  for (const int32_t dim : {64, 128}) {
    std::set<int32_t> bytes;
    for (int32_t d = 0; d < dim; ++d) {
      bytes.insert(channel_scale_byte(d));
      bytes.insert(channel_scale_byte(d) + zero_point_apart(Component::kKey));
    }
    EXPECT_EQ(bytes.size(), 2u * dim);
    EXPECT_EQ(*bytes.rbegin(), 4 * dim - 2);
  }
}

TEST_F(ChannelBlock, RefusesOtherFormatsByName) {
  const TierFormat good = channel_format(4, 4, 64);
  const auto text = [&](const std::function<void(TierFormat*)>& change, int32_t dim) {
    TierFormat f = good;
    change(&f);
    const Status s = make_channel_layout(f, dim).status();
    EXPECT_EQ(s.code(), StatusCode::kUnsupported);
    return s.message();
  };
  const auto has = [](const std::string& s, const char* part) {
    return s.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(text([](auto*) {}, 80), "head_dim 80"));
  EXPECT_TRUE(has(text([](auto* f) { f->k.group = 128; }, 256), "head_dim 256"));
  EXPECT_TRUE(has(text([](auto* f) { f->k.unit = Unit::kToken; }, 64), "keys: unit"));
  EXPECT_TRUE(has(text([](auto* f) { f->k.group = 32; }, 64), "group of 32"));
  EXPECT_TRUE(has(text([](auto* f) { f->k.type = CodeType::uniform(8); }, 64), "keys: 8 bits"));
  EXPECT_TRUE(has(text([](auto* f) { f->v.type = CodeType::raw16(); }, 64), "values: 16 bits"));
  EXPECT_TRUE(has(text([](auto* f) { f->v.unit = Unit::kChannel; }, 64), "values: unit"));
  EXPECT_TRUE(has(text([](auto* f) { f->v.group = 32; }, 64), "sub-groups"));
  EXPECT_TRUE(has(text([](auto* f) { f->k.entropy = Entropy::kHuffman; }, 64), "entropy"));
  EXPECT_TRUE(has(text([](auto* f) { f->v.basis = BasisKind::kMean; }, 64), "basis"));
  EXPECT_TRUE(has(text([](auto* f) { f->k.step_rule = StepRule::kRelative; }, 64), "step_rule"));
}

TEST_F(ChannelBlock, BadRowsAreLeftAsTheyWere) {
  const ChannelLayout l = layout_of(kCases[0]);
  ChannelWorld w(&rng_, l, 5, 1);
  const std::vector<uint16_t> zeros(5 * 64, 0);
  std::vector<uint16_t> bad = zeros;
  w.residual_tokens = {63, 5, 64, 63, 0};
  w.block_count = {1, 0, 0, 0, -1};
  w.table[3] = w.num_blocks;
  bad[64] = 0x7c00;
  const ChannelWorld before = w;
  ASSERT_TRUE(append_channel_host(w.cache(), {zeros.data(), bad.data(), w.status.data()}));
  const StatusCode expected[] = {StatusCode::kOutOfPages, StatusCode::kNonFinite,
                                 StatusCode::kCorrupt, StatusCode::kOutOfPages,
                                 StatusCode::kCorrupt};
  for (int32_t i = 0; i < 5; ++i) EXPECT_EQ(w.status[i], expected[i]) << i;
  EXPECT_EQ(w.residual_tokens, before.residual_tokens);
  EXPECT_EQ(w.block_count, before.block_count);
  EXPECT_EQ(std::memcmp(w.pool.data(), before.pool.data(), w.pool.size() * 128), 0);
  EXPECT_EQ(std::memcmp(w.residual.data(), before.residual.data(), w.residual.size() * 128), 0);

  const StatusCode invalid = StatusCode::kInvalidArgument;
  const auto code = [&](const std::function<void(ChannelCache*)>& change) {
    ChannelCache c = w.cache();
    change(&c);
    return append_channel_host(c, {zeros.data(), zeros.data(), w.status.data()}).code();
  };
  EXPECT_EQ(code([](auto* c) { c->pool = nullptr; }), invalid);
  EXPECT_EQ(code([](auto* c) { c->pool += 64; }), invalid);
  EXPECT_EQ(code([](auto* c) { c->residual = nullptr; }), invalid);
  EXPECT_EQ(code([](auto* c) { c->table = nullptr; }), invalid);
  EXPECT_EQ(code([](auto* c) { c->num_rows = -1; }), invalid);
  EXPECT_EQ(code([](auto* c) { c->layout.v_codes += 64; }), invalid);
  EXPECT_EQ(append_channel_host(w.cache(), {nullptr, zeros.data(), w.status.data()}).code(),
            invalid);
  const std::vector<int32_t> long_prompt = {0, 128};
  ChannelWorld short_rows(&rng_, l, 2, 1);
  const std::vector<uint16_t> prompt(128 * 2 * 64, 0);
  ASSERT_TRUE(fill_channel_host(
      short_rows.cache(),
      {prompt.data(), prompt.data(), long_prompt.data(), 2, short_rows.status.data()}));
  EXPECT_EQ(short_rows.status[0], StatusCode::kCorrupt);
  EXPECT_EQ(short_rows.block_count[0], 0);
  for (const auto& [first, end] :
       {std::pair(INT32_MIN, 5), std::pair(5, INT32_MIN), std::pair(9, 8), std::pair(-1, 8)}) {
    const std::vector<int32_t> bad_range = {first, end};
    short_rows.status[0] = StatusCode::kOk;
    ASSERT_TRUE(fill_channel_host(
        short_rows.cache(),
        {prompt.data(), prompt.data(), bad_range.data(), 2, short_rows.status.data()}));
    EXPECT_EQ(short_rows.status[0], StatusCode::kCorrupt) << first << " to " << end;
  }
  EXPECT_EQ(fill_channel_host(short_rows.cache(),
                              {prompt.data(), prompt.data(), nullptr, 2, short_rows.status.data()})
                .code(),
            invalid);
}

}  // namespace
}  // namespace tierkv::testing

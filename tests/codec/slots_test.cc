// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "codec/host/page_codec.h"
#include "tests/support/block_world.h"
#include "tests/support/fresh_random.h"
#include "tierkv/basis.h"

namespace tierkv {
namespace {

using test::BlockShape;
using test::BlockWorld;

class SlotsTest : public RandomTest {
 protected:
  int32_t uniform(int32_t lo, int32_t hi) {
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }
  BlockShape random_shape() {
    static constexpr int32_t kHeadDims[] = {64, 96, 128, 256};
    static const char* const kFormats[] = {"k8v4", "k4v4", "k4v2", "k4v2n", "k2nv2n", "k16v16"};
    BlockShape s;
    s.format = kFormats[uniform(0, 5)];
    s.head_dim = kHeadDims[uniform(0, 3)];
    s.num_kv_heads = uniform(1, 3);
    s.block_tokens = uniform(0, 3) == 0 ? 16 : 64;
    s.rotate = uniform(0, 2) > 0;
    s.has_reflections = uniform(0, 1) == 1;
    s.layers_apart = uniform(1, 2);
    s.dtype = uniform(0, 1) == 1 ? DType::kBFloat16 : DType::kFloat16;
    return s;
  }
};

// The codec's own append of the coordinates that the library's basis gives.
TEST_F(SlotsTest, PagesHoldTheCoordinatesOfTheirTokens) {
  for (int32_t round = 0; round < 60; ++round) {
    BlockShape shape = random_shape();
    shape.tokens = {uniform(1, 150)};
    SCOPED_TRACE(shape.format + " dim " + std::to_string(shape.head_dim));
    BlockWorld w(shape, rng_);
    w.encode_all();
    const int32_t dim = shape.head_dim, n = shape.tokens[0];
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      const Basis basis = shape.rotate ? Basis::hadamard(dim) : Basis::none(dim);
      for (int32_t page = 0; page * shape.block_tokens < n; ++page) {
        const int32_t count = std::min(shape.block_tokens, n - page * shape.block_tokens);
        std::vector<float> k(count * dim), v(count * dim);
        for (int32_t i = 0; i < count * dim; ++i) {
          const int64_t from =
              (page * shape.block_tokens + i / dim) * w.head_elements() + h * dim + i % dim;
          k[i] = raw_to_float(shape.dtype, w.k[from]);
          v[i] = raw_to_float(shape.dtype, w.v[from]);
        }
        basis.apply(k.data(), count);
        basis.apply(v.data(), count);
        for (int32_t i = 0; i < count; ++i) {
          reflect(w.cache.reflection_of(h), dim, k.data() + i * dim);
        }
        std::vector<uint8_t> expected(w.cache.layout.used_bytes, 0xff);
        const HostPage to{
            expected.data(), w.cache.layout, shape.dtype, {w.cache.rule[0], w.cache.rule[1]}};
        TokenBatch batch;
        batch.k = k.data();
        batch.v = v.data();
        batch.count = count;
        batch.dtype = DType::kFloat32;
        ASSERT_TRUE(append_tokens(to, 0, batch));
        const uint8_t* got = w.cache.page(w.table[page], h);
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), got)) << "page " << page;
      }
    }
    EXPECT_EQ(w.errors, std::vector<int32_t>(kEngineErrors, 0));
  }
}

// Any cut of the tokens into calls, in any order inside a call: the same bytes.
TEST_F(SlotsTest, HowTokensAreCutIntoCallsDoesNotMatter) {
  for (int32_t round = 0; round < 30; ++round) {
    BlockShape shape = random_shape();
    shape.tokens = {uniform(1, 100), uniform(1, 40)};
    BlockWorld w(shape, rng_);
    std::vector<uint8_t> other = w.other_bytes();
    BlockCache cut = w.other_cache(&other);
    w.encode_all();
    for (int32_t s = 0; s < 2; ++s) {
      for (int32_t t = 0; t < shape.tokens[s];) {
        const int32_t end = std::min(shape.tokens[s], t + uniform(1, 20));
        std::vector<int32_t> order(end - t);
        std::iota(order.begin(), order.end(), t);
        std::shuffle(order.begin(), order.end(), rng_);
        BlockWorld::Tokens call;
        for (const int32_t i : order) w.add(&call, s, i);
        SlotEncode e = w.encode(call);
        e.cache = cut;
        ASSERT_TRUE(encode_slots_host(e));
        t = end;
      }
    }
    EXPECT_TRUE(std::equal(w.cache.base, w.cache.base + w.cache.num_blocks * w.cache.block_stride,
                           cut.base));
  }
}

// Refused drafts are written over; what a tile held behind its first slot goes when that is
// written.
TEST_F(SlotsTest, SlotsAreWrittenOver) {
  BlockShape shape = random_shape();
  shape.tokens = {40, 40};
  BlockWorld w(shape, rng_);
  std::vector<uint8_t> other = w.other_bytes();
  const BlockCache plain = w.other_cache(&other);
  BlockWorld::Tokens right, drafts;
  for (int32_t t = 0; t < 33; ++t) w.add(&right, 0, t);
  for (int32_t t = 30; t < 37; ++t) w.add(&drafts, 1, t);
  for (size_t i = 0; i < drafts.slots.size(); ++i) {
    drafts.slots[i] = w.slot(0, 30 + static_cast<int32_t>(i));
  }
  const SlotEncode all = w.encode(right);
  SlotEncode reference = all;
  reference.cache = plain;
  ASSERT_TRUE(encode_slots_host(reference));
  SlotEncode first = all, rest = all;
  first.count = 30;
  ASSERT_TRUE(encode_slots_host(first));
  ASSERT_TRUE(encode_slots_host(w.encode(drafts)));
  rest.count = 3;
  rest.k = right.k.data() + 30 * w.head_elements();
  rest.v = right.v.data() + 30 * w.head_elements();
  rest.slots = right.slots.data() + 30;
  ASSERT_TRUE(encode_slots_host(rest));
  // Slot 32 opened its tile again, so nothing of the drafts is left.
  EXPECT_TRUE(std::equal(w.cache.base, w.cache.base + w.cache.num_blocks * w.cache.block_stride,
                         plain.base));
}

TEST_F(SlotsTest, StraySlotsAreCountedAndNothingIsWritten) {
  BlockShape shape = random_shape();
  shape.tokens = {20};
  BlockWorld w(shape, rng_);
  w.encode_all();
  const std::vector<uint8_t> before = w.bytes;
  BlockWorld::Tokens stray;
  for (int32_t t = 0; t < 5; ++t) w.add(&stray, 0, t);
  stray.slots = {-1, -2, w.cache.num_blocks * shape.block_tokens, INT64_MAX, INT64_MIN};
  ASSERT_TRUE(encode_slots_host(w.encode(stray)));
  EXPECT_EQ(w.bytes, before);
  EXPECT_EQ(w.errors, (std::vector<int32_t>{4, 0, 0, 0}));
}

TEST_F(SlotsTest, TokensThatDoNotFitLeaveTheirSlotsCleared) {
  BlockShape shape;
  shape.format = "k8v4";
  shape.head_dim = 64;
  shape.dtype = DType::kBFloat16;
  shape.tokens = {3};
  BlockWorld w(shape, rng_);
  const uint16_t nan = float_to_bfloat16(NAN), huge = float_to_bfloat16(1e30f);
  w.k[w.head_elements() + 5] = nan;        // token 1, head 0
  w.v[2 * w.head_elements() + 64] = huge;  // token 2, head 1
  w.encode_all();
  EXPECT_EQ(w.errors, (std::vector<int32_t>{0, 1, 1, 0}));
  for (int32_t h = 0; h < 2; ++h) {
    const HostPage page{w.cache.page(w.table[0], h), w.cache.layout, DType::kBFloat16};
    for (int32_t t = 0; t < 3; ++t) {
      TokenCodes codes;
      load_token(page, t, &codes);
      const bool is_cleared = t == 1 + h;
      EXPECT_EQ(codes.k.params[0] == QuantParams{}, is_cleared) << h << " " << t;
      EXPECT_EQ(codes.v.params[0] == QuantParams{}, is_cleared);
      EXPECT_EQ(std::all_of(codes.k.codes, codes.k.codes + 64, [](uint16_t c) { return c == 0; }),
                is_cleared);
    }
  }
}

// Ranges of sequences come back in the basis of their input, within what the codes can say.
TEST_F(SlotsTest, DecodedRangesAreTheirTokens) {
  const std::pair<const char*, double> kErrors[] = {
      {"k16v16", 0.004}, {"k8v4", 0.12}, {"k4v4", 0.12}};
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const auto& [format, bound] : kErrors) {
      BlockShape shape;
      shape.format = format;
      shape.head_dim = head_dim;
      shape.tokens = {130, 70};
      shape.dtype = DType::kBFloat16;
      BlockWorld w(shape, rng_);
      w.encode_all();
      const std::vector<int32_t> sequences = {1, 0}, from = {3, 50}, starts = {0, 60, 130};
      std::vector<uint16_t> k(130 * w.head_elements()), v(k.size());
      BlockDecode d;
      d.cache = w.cache;
      d.block_table = w.table.data();
      d.table_stride = w.columns;
      d.num_sequences = 2;
      d.sequences = sequences.data();
      d.first = from.data();
      d.starts = starts.data();
      d.count = 2;
      d.max_tokens = 70;
      d.num_rows = 130;
      d.k = k.data();
      d.v = v.data();
      d.dtype = shape.dtype;
      d.errors = w.errors.data();
      ASSERT_TRUE(decode_blocks_host(d));
      double error[2] = {}, norm[2] = {};
      for (int32_t row = 0; row < 130; ++row) {
        const int32_t range = row < 60 ? 0 : 1;
        const int64_t token = w.first[sequences[range]] + from[range] + row - starts[range];
        for (int64_t i = 0; i < w.head_elements(); ++i) {
          const std::vector<uint16_t>* given[2] = {&w.k, &w.v};
          const std::vector<uint16_t>* got[2] = {&k, &v};
          for (int32_t c = 0; c < 2; ++c) {
            const double x = bfloat16_to_float((*given[c])[token * w.head_elements() + i]);
            const double y = bfloat16_to_float((*got[c])[row * w.head_elements() + i]);
            error[c] += (x - y) * (x - y);
            norm[c] += x * x;
          }
        }
      }
      // Values are normal: a step of 4 bits is about 5.5 deviations / 15, its error a twelfth of
      // its square; bf16 rounds to 2^-9. Twice that is allowed.
      EXPECT_LT(std::sqrt(error[0] / norm[0]), bound) << format << head_dim;
      EXPECT_LT(std::sqrt(error[1] / norm[1]), std::max(bound, 0.24 * (bound > 0.01))) << format;
      EXPECT_EQ(w.errors, std::vector<int32_t>(kEngineErrors, 0));
    }
  }
}

TEST_F(SlotsTest, StrayBlocksGiveZeros) {
  BlockShape shape;
  shape.head_dim = 64;
  shape.tokens = {70};
  BlockWorld w(shape, rng_);
  w.encode_all();
  w.table[1] = static_cast<int32_t>(w.cache.num_blocks);
  const std::vector<int32_t> starts = {0, 70};
  std::vector<uint16_t> k(71 * w.head_elements(), 0x1234);
  BlockDecode d;
  d.cache = w.cache;
  d.block_table = w.table.data();
  d.table_stride = w.columns;
  d.num_sequences = 1;
  d.starts = starts.data();
  d.count = 1;
  d.max_tokens = 100;
  d.num_rows = 70;
  d.k = k.data();
  d.errors = w.errors.data();
  ASSERT_TRUE(decode_blocks_host(d));
  EXPECT_EQ(w.errors, (std::vector<int32_t>{0, 0, 0, 6 * 2}));
  EXPECT_TRUE(std::all_of(k.begin() + 64 * w.head_elements(), k.begin() + 70 * w.head_elements(),
                          [](uint16_t x) { return x == 0; }));
  EXPECT_EQ(k[70 * w.head_elements()], 0x1234);
  d.num_rows = 3;  // no write behind the rows that are there
  std::fill(k.begin(), k.end(), 0x1234);
  ASSERT_TRUE(decode_blocks_host(d));
  EXPECT_NE(k[3 * w.head_elements() - 1], 0x1234);
  EXPECT_EQ(k[3 * w.head_elements()], 0x1234);
}

TEST_F(SlotsTest, BadCallsAreRefusedByName) {
  BlockShape shape;
  shape.tokens = {5};
  BlockWorld w(shape, rng_);
  BlockWorld::Tokens tokens;
  w.add(&tokens, 0, 0);
  const auto refusal = [&](auto change) {
    SlotEncode e = w.encode(tokens);
    change(e);
    return encode_slots_host(e).message();
  };
  const auto has = [](const std::string& text, const char* word) {
    return text.find(word) != std::string::npos;
  };
  EXPECT_TRUE(has(refusal([](SlotEncode& e) { e.slots = nullptr; }), "slots"));
  EXPECT_TRUE(has(refusal([](SlotEncode& e) { e.dtype = DType::kFloat32; }), "dtype"));
  EXPECT_TRUE(has(refusal([](SlotEncode& e) { e.count = -1; }), "count"));
  EXPECT_TRUE(has(refusal([](SlotEncode& e) { e.cache.base += 16; }), "aligned"));
  EXPECT_TRUE(has(refusal([](SlotEncode& e) { e.cache.num_blocks = 0; }), "num_blocks"));
  EXPECT_TRUE(has(refusal([](SlotEncode& e) { e.cache.block_stride -= 128; }), "block_stride"));
  EXPECT_TRUE(has(refusal([](SlotEncode& e) { e.cache.page_bytes -= 128; }), "page_bytes"));
  EXPECT_TRUE(has(refusal([](SlotEncode& e) { e.cache.rule[0] = StepRule::kNorm; }), "rule"));
  PageShape six{128, kCodes4, kCodes4, 1, 1, 64};
  EXPECT_TRUE(has(refusal([&](SlotEncode& e) { e.cache.layout = page_layout(six); }), "layout"));
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/engine_world.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

using test::EngineShape;
using test::EngineWorld;
using ::testing::HasSubstr;

class EngineTest : public RandomTest {
 protected:
  int32_t uniform(int32_t lo, int32_t hi) {
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }
  // Mixed lengths: decodes, drafts, a prompt's tail, padding, a sequence shorter than the queries.
  EngineShape ragged(int32_t head_dim, const char* format, int32_t group) {
    EngineShape s;
    s.blocks.head_dim = head_dim;
    s.blocks.format = format;
    s.blocks.num_kv_heads = uniform(1, 2);
    s.blocks.rotate = uniform(0, 2) > 0;
    s.blocks.has_reflections = uniform(0, 2) > 0;
    s.blocks.layers_apart = uniform(1, 2);
    s.blocks.dtype = uniform(0, 1) == 1 ? DType::kBFloat16 : DType::kFloat16;
    s.blocks.tokens = {uniform(60, 140), 1, uniform(5, 64), 0, 3};
    s.group = group;
    s.max_queries = uniform(3, 8);
    s.queries = {1, 1, uniform(2, 3), 0, 3};
    s.lse_by_heads = uniform(0, 1) == 1;
    return s;
  }
  // The mean squared error of all outputs against exact attention, over their mean square, and the
  // largest error of an lse.
  struct Errors {
    double out = 0, lse = 0;
  };
  Errors errors_of(const EngineWorld& e) {
    double error = 0, norm = 0, worst = 0;
    for (size_t s = 0; s < e.lens.size(); ++s) {
      for (int32_t j = 0; j < e.starts[s + 1] - e.starts[s]; ++j) {
        for (int32_t h = 0; h < e.config.num_q_heads; ++h) {
          const auto exact = e.exact(static_cast<int32_t>(s), j, h);
          const int64_t token = e.starts[s] + j;
          for (int32_t d = 0; d < e.config.head_dim; ++d) {
            const double got =
                e.value(e.out, (token * e.config.num_q_heads + h) * e.config.head_dim + d);
            error += (got - exact.out[d]) * (got - exact.out[d]);
            norm += exact.out[d] * exact.out[d];
          }
          worst = std::max(worst, std::fabs(e.lse_at(token, h) - exact.lse));
        }
      }
    }
    return {std::sqrt(error / norm), worst};
  }
};

// Raw coordinates are rounded to 2^-11 (bf16: 2^-8) of their head's norm, as are queries, so logits
// of standard normal inputs with means of 2 are off by less than 2^-8 |q| |k| / sqrt(dim) ~ 0.1
// with bf16, typically a tenth of that.
TEST_F(EngineTest, RawPagesAreExactAttention) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 3, 16}) {
      const EngineShape shape = ragged(head_dim, "k16v16", group);
      SCOPED_TRACE(testing::Message()
                   << "dim " << head_dim << " group " << group << " rotate " << shape.blocks.rotate
                   << " reflected " << shape.blocks.has_reflections);
      EngineWorld e(shape, rng_);
      e.w.encode_all();
      ASSERT_TRUE(engine_attend_host(e.config, e.call()));
      const bool is_bfloat16 = shape.blocks.dtype == DType::kBFloat16;
      const Errors got = errors_of(e);
      EXPECT_LT(got.out, is_bfloat16 ? 0.02 : 0.004);
      EXPECT_LT(got.lse, is_bfloat16 ? 0.1 : 0.02);
      EXPECT_EQ(e.w.errors, std::vector<int32_t>(kEngineErrors, 0));
    }
  }
}

// Codes of 8 and 4 bits of standard normal coordinates leave errors of 0.007 and 0.11 of a value;
// an output is a mean of some, its own error with weights that are off by as much again.
TEST_F(EngineTest, CodesAreNearExactAttention) {
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const auto& [format, bound] : {std::pair("k8v4", 0.2), std::pair("k4v4", 0.3)}) {
      EngineShape shape = ragged(head_dim, format, 2);
      shape.blocks.rotate = shape.blocks.has_reflections = true;
      EngineWorld e(shape, rng_);
      e.w.encode_all();
      ASSERT_TRUE(engine_attend_host(e.config, e.call()));
      const Errors got = errors_of(e);
      EXPECT_LT(got.out, bound) << format << " " << head_dim;
      EXPECT_LT(got.lse, 0.5) << format << " " << head_dim;
    }
  }
}

// A prompt's chunk over a cached prefix: the prefix through the cache, the chunk on its raw keys
// and values, joined by their lse. Queries that are not turned as keys would shift the weights of
// the two parts.
TEST_F(EngineTest, PrefixAndChunkJoinByTheirLse) {
  EngineShape shape = ragged(128, "k16v16", 2);
  shape.blocks.rotate = shape.blocks.has_reflections = true;
  shape.blocks.tokens = {100};
  shape.queries = {4};
  shape.max_queries = 4;
  EngineWorld e(shape, rng_);
  e.w.encode_all();
  EngineAttend prefix = e.call();
  const int32_t prefix_len = 96;
  prefix.batch.seq_lens = &prefix_len;  // its queries see all of it
  const int32_t dim = 128;
  for (int32_t j = 0; j < 4; ++j) {
    // One query at a time: several would be taken for the newest tokens of the prefix.
    const std::vector<int32_t> one = {j, j + 1};
    prefix.batch.query_start_loc = one.data();
    prefix.batch.queries = 1;
    ASSERT_TRUE(engine_attend_host(e.config, prefix));
    for (int32_t h = 0; h < e.config.num_q_heads; ++h) {
      const auto chunk = e.exact(0, j, h, 96), whole = e.exact(0, j, h);
      const double a = e.lse_at(j, h), both = std::log(std::exp(a) + std::exp(chunk.lse));
      EXPECT_NEAR(both, whole.lse, 0.05);
      for (int32_t d = 0; d < dim; ++d) {
        const double part = e.value(e.out, (int64_t{j} * e.config.num_q_heads + h) * dim + d);
        const double joined = std::exp(a - both) * part + std::exp(chunk.lse - both) * chunk.out[d];
        EXPECT_NEAR(joined, whole.out[d], 0.05);
      }
    }
  }
}

// Rows of padding are not written; a batch may name its sequences; entries of -1 are nobody.
TEST_F(EngineTest, ABatchMayNameItsSequences) {
  EngineShape shape = ragged(64, "k8v4", 2);
  EngineWorld all(shape, rng_);
  all.w.encode_all();
  ASSERT_TRUE(engine_attend_host(all.config, all.call()));
  const std::vector<uint16_t> expected = all.out;
  all.out.assign(all.out.size(), 0x7fff);
  const std::vector<int32_t> some = {2, -1, 0};
  EngineAttend call = all.call();
  call.batch.sequences = some.data();
  call.batch.count = 3;
  ASSERT_TRUE(engine_attend_host(all.config, call));
  const int64_t width = all.config.num_q_heads * all.config.head_dim;
  for (int32_t s = 0; s < 5; ++s) {
    for (int64_t i = all.starts[s] * width; i < all.starts[s + 1] * width; ++i) {
      ASSERT_EQ(all.out[i], s == 0 || s == 2 ? expected[i] : 0x7fff) << s;
    }
  }
}

TEST_F(EngineTest, BlocksOutsideTheLayerAreRefusedOnTheHost) {
  EngineShape shape = ragged(64, "k8v4", 2);
  EngineWorld e(shape, rng_);
  e.w.encode_all();
  e.w.table[0] = static_cast<int32_t>(e.w.cache.num_blocks);
  EXPECT_EQ(engine_attend_host(e.config, e.call()).code(), StatusCode::kCorrupt);
}

TEST_F(EngineTest, BytesOfABlockAreThoseThatAreSaid) {
  EngineConfig c;
  c.head_dim = 128;
  c.num_kv_heads = 8;
  const std::pair<const char*, int64_t> kBytes[] = {
      {"k16v16", 512}, {"k8v4", 200}, {"k4v4", 136}, {"k4v2", 104}, {"k4v2n", 104}};
  for (const auto& [name, bytes] : kBytes) {
    c.format = *parse_tier_format(name);
    EXPECT_EQ(c.page_bytes(), 64 * bytes) << name;
    EXPECT_EQ(c.block_bytes(), 8 * 64 * bytes) << name;
  }
  c.head_dim = 80;
  EXPECT_EQ(c.page_bytes(), 0);
}

TEST_F(EngineTest, RefusesByName) {
  EngineShape shape = ragged(64, "k8v4", 2);
  EngineWorld e(shape, rng_);
  const auto config = [&](auto change) {
    EngineConfig c = e.config;
    change(c);
    return c.validate().message();
  };
  EXPECT_EQ(config([](EngineConfig&) {}), "");
  EXPECT_THAT(config([](EngineConfig& c) { c.head_dim = 80; }), HasSubstr("head_dim"));
  EXPECT_THAT(config([](EngineConfig& c) { c.head_dim = 512; }), HasSubstr("512"));
  EXPECT_THAT(config([](EngineConfig& c) { c.num_q_heads = 17 * c.num_kv_heads; }),
              HasSubstr("group of 17"));
  EXPECT_THAT(config([](EngineConfig& c) { c.sliding_window_tokens = 4096; }),
              HasSubstr("sliding_window_tokens"));
  EXPECT_THAT(config([](EngineConfig& c) { c.dtype = DType::kFloat32; }), HasSubstr("float32"));
  EXPECT_THAT(config([](EngineConfig& c) { c.block_tokens = 40; }), HasSubstr("block_tokens 40"));
  EXPECT_THAT(config([](EngineConfig& c) { c.max_queries = 9; }), HasSubstr("max_queries 9"));
  EXPECT_THAT(config([](EngineConfig& c) { c.max_blocks = 0; }), HasSubstr("max_blocks"));
  EXPECT_THAT(config([](EngineConfig& c) { c.max_sequences = 0; }), HasSubstr("max_sequences"));
  EXPECT_THAT(config([](EngineConfig& c) { c.sm_scale = 0; }), HasSubstr("sm_scale"));
  EXPECT_THAT(config([](EngineConfig& c) { c.format.k.group = 32; }), HasSubstr("sub-groups"));
  const auto attend = [&](auto change) {
    EngineAttend call = e.call();
    change(call);
    return engine_attend_host(e.config, call).message();
  };
  std::vector<float> mean(e.config.num_kv_heads * 64, 1.0f), out(mean.size());
  EXPECT_THAT(engine_key_reflections(e.config, nullptr, out.data()).message(),
              HasSubstr("key_mean"));
  mean.back() = NAN;
  EXPECT_EQ(engine_key_reflections(e.config, mean.data(), out.data()).code(),
            StatusCode::kNonFinite);
  EXPECT_THAT(attend([](EngineAttend& c) { c.q = nullptr; }), HasSubstr("q or out"));
  EXPECT_THAT(attend([](EngineAttend& c) { c.batch.queries = 9; }), HasSubstr("max_queries"));
  EXPECT_THAT(attend([](EngineAttend& c) { c.batch.count = 6; }), HasSubstr("max_sequences"));
  EXPECT_THAT(attend([](EngineAttend& c) { c.batch.seq_lens = nullptr; }), HasSubstr("seq_lens"));
  EXPECT_THAT(attend([](EngineAttend& c) { c.batch.table_stride = 1; }), HasSubstr("table"));
  EXPECT_THAT(attend([](EngineAttend& c) { c.batch.num_blocks += 1; }), HasSubstr("blocks"));
  EXPECT_THAT(attend([](EngineAttend& c) { c.batch.block_stride += 128; }), HasSubstr("stride"));
  EXPECT_THAT(attend([](EngineAttend& c) { c.layer.blocks = nullptr; }), HasSubstr("cache"));
  EngineLayer odd = e.call().layer;
  odd.block_stride = e.config.block_bytes() + 128;
  EXPECT_THAT(engine_encode_host(e.config, odd, {}).message(), HasSubstr("block_stride"));
  const bool is_dense = e.call().layer.block_stride == e.config.block_bytes();
  EXPECT_EQ(attend([](EngineAttend& c) { c.batch.block_stride = 0; }).empty(), is_dense);
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// One path for prompts, turns and steps: the same tokens are the same bytes in whatever chunks.
#include <cmath>

#include "codec/policy/significance.h"
#include "tests/engine/support/feed.h"
#include "tests/support/fresh_random.h"
#include "tierkv/attention.h"

namespace tierkv {
namespace {

class ChunkTest : public RandomTest {};

TEST_F(ChunkTest, AnyChunksGiveTheSameBytes) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t kind : {0, 1, 2}) {
      const bool with_profile = kind == 1;
      ConfigChoice choice;
      choice.head_dim = head_dim;
      choice.num_kv_heads = head_dim == 64 ? 3 : 1;
      choice.with_profile = with_profile;
      StoreConfig config = make_config(choice);
      config.raw_layers = {1};
      if (kind == 2) config.format = ChannelFormat{4, 2, head_dim == 96 ? 128 : 64};
      give_pages(400, &config);
      const Feed feed(config.layout, 600, &rng_);
      std::vector<uint8_t> whole;
      for (int32_t round = 0; round < 4; ++round) {
        OneSequence one(config);
        for (int32_t at = 0; at < feed.tokens;) {
          const int32_t most = round == 0 ? 600 : round == 1 ? 8 : pick(0, 1) == 0 ? 12 : 200;
          const int32_t n = std::min(round == 0 ? 600 : pick(1, most), feed.tokens - at);
          ASSERT_TRUE(feed.give(one.store.engine.get(), one.id, at, n));
          at += n;
        }
        if (round == 0) {
          whole = one.bytes();
        } else {
          EXPECT_EQ(whole, one.bytes()) << "head_dim " << head_dim << ", kind " << kind;
        }
      }
    }
  }
}

// A conversation of three turns and steps between them against one prompt.
TEST_F(ChunkTest, TurnsEqualOnePrompt) {
  const StoreConfig config = make_config({});
  const Feed feed(config.layout, 500, &rng_);
  OneSequence turns(config), prompt(config, feed, 500);
  int32_t at = 0;
  for (const int32_t n : {200, 1, 1, 1, 60, 1, 1, 235}) {
    ASSERT_TRUE(feed.give(turns.store.engine.get(), turns.id, at, n));
    at += n;
  }
  std::vector<uint16_t> out[2];
  for (OneSequence* one : {&turns, &prompt}) {
    std::vector<uint16_t>& to = out[one == &prompt];
    to.resize(feed.q.size() / config.layout.num_layers);
    LayerAttend call;
    call.sequences = {&one->id, 1};
    call.q_len = 500;  // all of it at once
    call.q = feed.q.data();
    call.out = to.data();
    ASSERT_TRUE(one->store.engine->attend(call));
  }
  EXPECT_EQ(out[0], out[1]);
}

TEST_F(ChunkTest, QueriesGiveTheSignificancesThatTheyHave) {
  const StoreConfig config = make_config({});
  const CacheLayout& shape = config.layout;
  const int32_t n = 400, dim = shape.head_dim, group = shape.group_size();
  const Feed feed(shape, n, &rng_);
  OneSequence by_q(config), by_significance(config), neutral(config, feed, n);
  for (OneSequence* one : {&by_q, &by_significance}) {
    ASSERT_TRUE(one->store.engine->begin({&one->id, 1}, n));
  }
  for (int32_t l = 0; l < shape.num_layers; ++l) {
    std::vector<float> significance;
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      std::vector<float> q(int64_t{group} * n * dim), k(int64_t{n} * dim);
      for (int64_t i = 0; i < int64_t{n} * dim; ++i) {
        const int64_t token = int64_t{l} * n + i / dim;
        k[i] = half_to_float(feed.k[(token * shape.num_kv_heads + h) * dim + i % dim]);
        for (int32_t g = 0; g < group; ++g) {
          q[(int64_t{g} * n * dim) + i] =
              half_to_float(feed.q[(token * shape.num_q_heads + h * group + g) * dim + i % dim]);
        }
      }
      AttentionRow row;
      row.q = q.data();
      row.k = k.data();
      row.group_size = group;
      row.num_queries = row.num_tokens = n;
      row.head_dim = dim;
      row.sm_scale = shape.sm_scale;
      std::vector<double> found(n);
      ASSERT_TRUE(exact_significance(row, found.data(), nullptr));
      significance.insert(significance.end(), found.begin(), found.end());
    }
    LayerAppend call = feed.call(by_significance.id, l, 0, n);
    call.significance = significance.data();
    call.stride = n;
    ASSERT_TRUE(by_significance.store.engine->append(call));
    call = feed.call(by_q.id, l, 0, n);
    call.q = feed.q.data() + int64_t{l} * n * shape.num_q_heads * dim;
    ASSERT_TRUE(by_q.store.engine->append(call));
  }
  EXPECT_EQ(by_q.bytes(), by_significance.bytes());
  EXPECT_NE(by_q.bytes(), neutral.bytes());
}

// A step with k = 0.3 and v = 0.25 is 0.3 root mean squares of a channel over all tokens, and 0.87
// of a token's: an error of half a step, times 1.41 for importance 4 eighths.
TEST_F(ChunkTest, BodiesAreWithinHalfAStep) {
  StoreConfig config = make_config({});
  config.format = CodedFormat{0.3, 0.25};
  const Feed feed(config.layout, 500, &rng_);
  OneSequence one(config, feed, 500);
  const int64_t values = int64_t{500} * config.layout.num_kv_heads * config.layout.head_dim;
  std::vector<uint16_t> k(values), v(values);
  ASSERT_TRUE(
      one.store.engine->decode_range({one.id, 0, 0, 500, DType::kFloat16, k.data(), v.data()}));
  double error_k = 0, error_v = 0;
  for (int64_t i = 0; i < values; ++i) {
    const double dk = half_to_float(k[i]) - half_to_float(feed.k[i]);
    const double dv = half_to_float(v[i]) - half_to_float(feed.v[i]);
    error_k += dk * dk;
    error_v += dv * dv;
    // A turn may bring the errors of both dims of a pair into one; tokens of values are up to 1.5
    // rms.
    ASSERT_LE(std::fabs(dk), 0.3 * 1.1 / 2 * 1.42 + 2e-3);
    ASSERT_LE(std::fabs(dv), 0.87 * 1.5 / 2 + 2e-3);
  }
  // Uniform errors: a step over the root of 12, of 432 of 500 tokens.
  EXPECT_NEAR(std::sqrt(error_k / values), 0.3 / std::sqrt(12) * std::sqrt(0.87), 0.02);
  EXPECT_NEAR(std::sqrt(error_v / values), 0.25 * std::sqrt(0.87), 0.03);
}

// What a prefill kernel does with a turn: attention over the prefix that decode_range() writes and
// over the turn's own tokens, merged by their lse, is attend().
TEST_F(ChunkTest, APrefixAndATurnMerge) {
  const StoreConfig config = make_config({});
  const CacheLayout& shape = config.layout;
  const int32_t n = 440, turn = 40, dim = shape.head_dim, heads = shape.num_q_heads;
  const Feed feed(shape, n, &rng_);
  OneSequence one(config, feed, n - turn);
  ASSERT_TRUE(feed.give(one.store.engine.get(), one.id, n - turn, turn));
  const uint16_t* q = feed.q.data() + int64_t{n - turn} * heads * dim;
  const auto part = [&](int32_t first, int32_t end, std::vector<uint16_t>* out,
                        std::vector<float>* lse) {
    std::vector<uint16_t> k(int64_t{end - first} * shape.num_kv_heads * dim), v(k.size());
    ASSERT_TRUE(one.store.engine->decode_range(
        {one.id, 0, first, end, DType::kFloat16, k.data(), v.data()}));
    for (int32_t r = 0; r < turn * heads; ++r) {
      const int32_t seen = std::min(end, n - turn + r / heads + 1) - first;
      const int32_t head = r % heads / shape.group_size();
      std::vector<double> p(seen), sum(dim);
      double total = 0;
      for (int32_t t = 0; t < seen; ++t) {
        const int64_t at = (int64_t{t} * shape.num_kv_heads + head) * dim;
        for (int32_t d = 0; d < dim; ++d) {
          p[t] += static_cast<double>(half_to_float(q[int64_t{r} * dim + d])) *
                  static_cast<double>(half_to_float(k[at + d]));
        }
        total += p[t] = std::exp(p[t] * shape.sm_scale);
        for (int32_t d = 0; d < dim; ++d) {
          sum[d] += p[t] * static_cast<double>(half_to_float(v[at + d]));
        }
      }
      for (const double x : sum) out->push_back(float_to_half(static_cast<float>(x / total)));
      lse->push_back(static_cast<float>(std::log(total)));
    }
  };
  std::vector<uint16_t> out[3];
  std::vector<float> lse[3];
  part(0, n - turn, &out[0], &lse[0]);
  part(n - turn, n, &out[1], &lse[1]);
  out[2].resize(out[0].size());
  lse[2].resize(lse[0].size());
  MergeCall merge;
  merge.a = {out[0].data(), lse[0].data()};
  merge.b = {out[1].data(), lse[1].data()};
  merge.out = out[2].data();
  merge.lse = lse[2].data();
  merge.rows = turn * heads;
  merge.head_dim = dim;
  ASSERT_TRUE(merge_attention_host(merge));
  std::vector<uint16_t> whole(out[2].size());
  std::vector<float> whole_lse(lse[2].size());
  LayerAttend call;
  call.sequences = {&one.id, 1};
  call.q_len = turn;
  call.q = q;
  call.out = whole.data();
  call.lse = whole_lse.data();
  ASSERT_TRUE(one.store.engine->attend(call));
  // Outputs below 2 are rounded to fp16 up to three times, keys and values once.
  for (size_t i = 0; i < whole.size(); ++i) {
    ASSERT_NEAR(half_to_float(out[2][i]), half_to_float(whole[i]), 6e-3);
  }
  for (size_t i = 0; i < whole_lse.size(); ++i) ASSERT_NEAR(lse[2][i], whole_lse[i], 1e-2);
}

// A second sequence of a store with a profile is coded from its first unit on; sinks are no unit.
TEST_F(ChunkTest, AUnitOfSinksAloneIsNoBlock) {
  ConfigChoice choice;
  choice.with_profile = true;
  StoreConfig config = make_config(choice);
  config.sink_tokens = 16;
  config.window_tokens = 8;
  give_pages(100, &config);
  const Feed feed(config.layout, 400, &rng_);
  OneSequence one(config, feed, 400);
  KvStore* engine = one.store.engine.get();
  const SequenceId steps = *engine->add_sequence(), prompt = *engine->add_sequence();
  for (int32_t at = 0; at < 60; ++at) ASSERT_TRUE(feed.give(engine, steps, at, 1));
  ASSERT_TRUE(feed.give(engine, prompt, 0, 60));
  EXPECT_EQ(*engine->export_sequence(steps), *engine->export_sequence(prompt));
  const StoreUsage usage = *engine->usage();
  EXPECT_EQ(usage.body_tokens, 4 * (384 - 16 + 2 * (48 - 16)));
}

TEST_F(ChunkTest, EmptyAndShortSequences) {
  ConfigChoice choice;
  choice.group = 5;
  choice.max_tokens = 3;
  StoreConfig config = make_config(choice);
  config.format = ChannelFormat{};
  EXPECT_TRUE(config.validate());
  config.format = CodedFormat{};
  const Feed feed(config.layout, 1, &rng_);
  OneSequence one(config);
  EXPECT_EQ(*one.store.engine->num_tokens(one.id), 0);
  const std::vector<uint8_t> nothing = one.bytes();
  ASSERT_TRUE(one.store.engine->import_sequence(nothing.data(), nothing.size()));
  const Result<SequenceId> copy = one.store.engine->fork(one.id);
  ASSERT_TRUE(copy);
  ASSERT_TRUE(one.store.engine->truncate(*copy, 0));
  uint16_t x[10 * 64] = {};
  LayerAttend attend;
  attend.sequences = {&one.id, 1};
  attend.q = feed.q.data();
  attend.out = x;
  EXPECT_EQ(one.store.engine->attend(attend).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(feed.give(one.store.engine.get(), one.id, 0, 1));
  ASSERT_TRUE(one.store.engine->attend(attend));
  for (int32_t h = 0; h < config.layout.num_q_heads; ++h) {
    for (int32_t d = 0; d < 64; ++d) EXPECT_EQ(x[h * 64 + d], feed.v[h / 5 * 64 + d]);
  }
}

}  // namespace
}  // namespace tierkv

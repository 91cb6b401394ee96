// SPDX-License-Identifier: Apache-2.0
// What configs and calls are refused, by name, and that a refused call changes nothing.
#include <cmath>
#include <functional>

#include "tests/engine/support/feed.h"
#include "tests/support/fresh_random.h"
#include "tierkv/significance.h"

namespace tierkv {
namespace {

using ::testing::HasSubstr;

TEST(OneStoreConfig, RefusesByName) {
  struct Case {
    const char* name;
    std::function<void(StoreConfig*)> spoil;
  };
  const Case cases[] = {
      {"head_dim", [](StoreConfig* c) { c->layout.head_dim = 80; }},
      {"layout.dtype", [](StoreConfig* c) { c->layout.dtype = DType::kFloat32; }},
      {"layout.dtype", [](StoreConfig* c) { c->layout.dtype = static_cast<DType>(7); }},
      {"sink_tokens", [](StoreConfig* c) { c->sink_tokens = 17; }},
      {"window_tokens", [](StoreConfig* c) { c->window_tokens = 7; }},
      {"max_sequences", [](StoreConfig* c) { c->max_sequences = 0; }},
      {"max_tokens", [](StoreConfig* c) { c->max_tokens = 0; }},
      {"memory_bytes", [](StoreConfig* c) { c->memory_bytes = 0; }},
      {"memory_bytes", [](StoreConfig* c) { c->memory_bytes = 10000; }},
      {"memory_bytes", [](StoreConfig* c) { c->memory_bytes = int64_t{1} << 37; }},
      {"page_bytes", [](StoreConfig* c) { c->page_bytes = 8192 + 64; }},
      {"page_bytes", [](StoreConfig* c) { c->page_bytes = 1024; }},
      {"raw_layers", [](StoreConfig* c) { c->raw_layers.assign(2, 1); }},
      {"raw_layers", [](StoreConfig* c) { c->raw_layers = {2}; }},
      {"rope", [](StoreConfig* c) { c->rope.resize(3); }},
      {"rope", [](StoreConfig* c) { c->rope[0].inv_freq[0] = -1; }},
      {"rope: layers",
       [](StoreConfig* c) {
         c->rope.resize(2, c->rope[0]);
         c->rope[1].pairing = RopePairing::kNeighbours;
       }},
      {"rope: layers", [](StoreConfig* c) { c->rope.push_back(Rope::plain(10000, 32)); }},
      {"format.k", [](StoreConfig* c) { c->format = CodedFormat{.k = -1}; }},
      {"format.k", [](StoreConfig* c) { c->format = CodedFormat{.v = NAN}; }},
      {"format.k", [](StoreConfig* c) { c->format = CodedFormat{.k = 1e-300}; }},
      {"max_length", [](StoreConfig* c) { c->format = CodedFormat{.max_length = 15}; }},
      {"streams_per_lane", [](StoreConfig* c) { c->format = CodedFormat{.streams_per_lane = 3}; }},
      {"key_books", [](StoreConfig* c) { c->format = CodedFormat{.key_books = 5}; }},
      {"profile",
       [](StoreConfig* c) {
         std::mt19937 rng(1);
         CacheLayout other = c->layout;
         other.num_layers = 3;
         c->profile = random_profile(other, c->rope, &rng);
       }},
      {"profile: weighted steps: value_step",
       [](StoreConfig* c) {
         std::mt19937 rng(1);
         auto profile = std::make_shared<Profile>(*random_profile(c->layout, c->rope, &rng));
         profile->rows[1].value_scale = 1e-60;
         c->profile = profile;
       }},
  };
  for (const Case& test : cases) {
    StoreConfig config = make_config({});
    ASSERT_TRUE(config.validate());
    test.spoil(&config);
    const Status s = config.validate();
    EXPECT_FALSE(s) << test.name;
    EXPECT_THAT(s.message(), HasSubstr(test.name));
    EXPECT_FALSE(KvStore::create(config));
  }
}

// fp16 holds the means of tiers.
TEST(OneStoreConfig, MeansBeyondFp16AreTheLargest) {
  std::mt19937 rng(std::random_device{}());
  StoreConfig config = make_config({});
  config.format = TiersFormat{};
  auto profile = std::make_shared<Profile>(*random_profile(config.layout, config.rope, &rng));
  profile->rows[1].key_mean[3] = 66000;
  config.profile = profile;
  OneSequence one(config);
  const Feed feed(config.layout, 200, &rng);
  const Status s = feed.give(one.store.engine.get(), one.id, 0, 200);
  EXPECT_TRUE(s) << s.message();
}

TEST(OneStoreConfig, CountsTheTokensThatFit) {
  ConfigChoice choice;
  choice.max_tokens = 4000;
  choice.pages = 300;
  StoreConfig config = make_config(choice);
  const Result<TokenCapacity> fits = tokens_that_fit(config);
  ASSERT_TRUE(fits);
  EXPECT_LT(fits->least, fits->typical);
  EXPECT_GT(fits->least, 0);
  // As many tokens of noise fit into one sequence as the typical estimate says of four.
  std::mt19937 rng(7);
  config.max_sequences = 1;
  give_pages(300, &config);
  const Result<TokenCapacity> alone = tokens_that_fit(config);
  const Feed feed(config.layout, static_cast<int32_t>(alone->typical), &rng);
  OneSequence(config, feed, feed.tokens);
}

TEST(OneStoreConfig, PagesGrowUntilATableHoldsThem) {
  for (const BodyFormat& format : {BodyFormat{ChannelFormat{}}, BodyFormat{CodedFormat{}}}) {
    StoreConfig config = make_config({});
    config.layout.num_kv_heads = 8, config.layout.num_q_heads = 8, config.layout.head_dim = 128;
    config.format = format;
    config.profile = nullptr;
    config.max_tokens = 1 << 20;
    config.max_sequences = 1;
    config.memory_bytes = int64_t{48} << 30;
    const Result<TokenCapacity> fits = tokens_that_fit(config);
    ASSERT_TRUE(fits) << fits.status().message();
    EXPECT_GE(fits->least, config.max_tokens);
    config.page_bytes = std::holds_alternative<CodedFormat>(format) ? 1 << 15 : 1 << 14;
    const Status s = tokens_that_fit(config).status();
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(s.message(), HasSubstr("page_bytes"));
  }
}

TEST(OneStore, RunsThroughItsPublicClass) {
  const StoreConfig config = make_config({});
  Result<std::unique_ptr<KvStore>> store = KvStore::create(config);
  ASSERT_TRUE(store) << store.status().message();
  std::mt19937 rng(3);
  const Feed feed(config.layout, 400, &rng);
  const SequenceId id = *(*store)->add_sequence();
  ASSERT_TRUE((*store)->begin({&id, 1}, 400));
  for (int32_t l = 0; l < 2; ++l) ASSERT_TRUE((*store)->append(feed.call(id, l, 0, 400)));
  const Result<SequenceId> copy = (*store)->fork(id);
  ASSERT_TRUE(copy);
  EXPECT_GT((*store)->usage()->pages_shared, 0);
  EXPECT_EQ(*(*store)->bytes_held(id), *(*store)->bytes_held(*copy));
  EXPECT_EQ((*store)->free_pages(), (*store)->usage()->pages_free);
  ASSERT_TRUE((*store)->truncate(*copy, 10));
  const Result<std::vector<uint8_t>> bytes = (*store)->export_sequence(id);
  ASSERT_TRUE((*store)->release(id));
  ASSERT_TRUE((*store)->release(*copy));
  EXPECT_EQ((*store)->usage()->pages_free, (*store)->usage()->pages);
  EXPECT_GT((*store)->usage()->most_pages, 0);
  EXPECT_TRUE((*store)->import_sequence(bytes->data(), bytes->size()));
}

// Values and significances that no store takes; nothing has changed, and the call can be repeated.
TEST(OneStore, RefusesValuesByName) {
  for (const int32_t tokens : {5, 300}) {
    ConfigChoice choice;
    StoreConfig config = make_config(choice);
    config.layout.dtype = DType::kBFloat16;
    std::mt19937 rng(5);
    const Feed good(config.layout, 400, &rng);
    OneSequence one(config, good, 100);
    KvStore* engine = one.store.engine.get();
    ASSERT_TRUE(engine->begin({&one.id, 1}, tokens));
    struct Case {
      const char* name;
      StatusCode code;
      float value;
    };
    const Case cases[] = {
        {"not finite", StatusCode::kNonFinite, NAN},
        {"not finite", StatusCode::kNonFinite, -INFINITY},
        {"beyond fp16", StatusCode::kOutOfRange, 70000.0f},
    };
    for (const Case& test : cases) {
      for (const bool key : {true, false}) {
        Feed bad = good;
        (key ? bad.k : bad.v)[(100 + tokens - 1) * 128 + 127] =
            float_to_raw(DType::kBFloat16, test.value);
        const Status s = engine->append(bad.call(one.id, 0, 100, tokens));
        EXPECT_EQ(s.code(), test.code);
        EXPECT_THAT(s.message(), HasSubstr(test.name));
        EXPECT_THAT(s.message(), HasSubstr("sequence 1 (slot 0, generation 0): "));
        EXPECT_THAT(s.message(), HasSubstr("position " + std::to_string(99 + tokens)));
      }
    }
    for (const float x : {-1.0f, NAN, INFINITY}) {
      std::vector<float> significance(2 * static_cast<size_t>(tokens), 0.1f);
      significance.back() = x;
      LayerAppend call = good.call(one.id, 0, 100, tokens);
      call.significance = significance.data();
      call.stride = tokens;
      EXPECT_THAT(engine->append(call).message(), HasSubstr("significance"));
      call.stride = tokens - 1;
      EXPECT_THAT(engine->append(call).message(), HasSubstr("stride"));
      call.q = good.q.data();
      EXPECT_THAT(engine->append(call).message(), HasSubstr("significance and q"));
    }
    for (const int32_t stride : {-1, 0, kMaxQueryStride + 1}) {
      LayerAppend call = good.call(one.id, 0, 100, tokens);
      call.q = good.q.data();
      call.query_stride = stride;
      const Status s = engine->append(call);
      EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
      EXPECT_THAT(s.message(), HasSubstr("query_stride"));
    }
    for (int32_t l = 0; l < 2; ++l) ASSERT_TRUE(engine->append(good.call(one.id, l, 100, tokens)));
    OneSequence other(config, good, 100);
    ASSERT_TRUE(good.give(other.store.engine.get(), other.id, 100, tokens));
    EXPECT_EQ(one.bytes(), other.bytes());
  }
}

// A call with several faults tells the worst one, whichever sequence has it. Here the second
// sequence has it.
TEST(OneStore, TellsTheWorstOfACall) {
  StoreConfig config = make_config({});
  config.layout.dtype = DType::kBFloat16;
  std::mt19937 rng(7);
  constexpr int32_t kTokens = 20;
  const Feed good(config.layout, 2 * kTokens, &rng);
  OneSequence one(config);
  KvStore* engine = one.store.engine.get();
  const SequenceId ids[] = {one.id, *engine->add_sequence()};
  ASSERT_TRUE(engine->begin({ids, 2}, kTokens));
  const int64_t second = kTokens * int64_t{config.layout.num_kv_heads} * config.layout.head_dim;
  const auto told = [&](float of_first, float score, float of_second, float second_score) {
    Feed bad = good;
    bad.k[0] = float_to_raw(DType::kBFloat16, of_first);
    bad.v[second] = float_to_raw(DType::kBFloat16, of_second);
    std::vector<float> significance(4 * kTokens, 0.1f);
    significance[0] = score, significance[2 * kTokens] = second_score;
    LayerAppend call = bad.call(one.id, 0, 0, kTokens);
    call.sequences = {ids, 2};
    call.significance = significance.data(), call.stride = kTokens;
    const Status s = engine->append(call);
    EXPECT_THAT(s.message(), HasSubstr("sequence 2"));
    return s;
  };
  EXPECT_EQ(told(1e30f, -1, NAN, -1).code(), StatusCode::kNonFinite);
  EXPECT_EQ(told(1, NAN, 1e30f, 1).code(), StatusCode::kOutOfRange);
  const Status not_finite = told(1, -1, 1, NAN);
  EXPECT_EQ(not_finite.code(), StatusCode::kNonFinite);
  EXPECT_THAT(not_finite.message(), HasSubstr("significance"));
}

// The order of calls: a layer at a time, all layers before the next begin.
TEST(OneStore, RefusesCallsOutOfOrder) {
  const StoreConfig config = make_config({});
  std::mt19937 rng(9);
  const Feed feed(config.layout, 100, &rng);
  OneSequence one(config);
  KvStore* engine = one.store.engine.get();
  ASSERT_TRUE(engine->release(one.id));
  one.id = *engine->add_sequence();
  const SequenceList list = {&one.id, 1};
  // As users know it: the number in C and Python, the fields in C++.
  const std::string name = "sequence 4294967297 (slot 0, generation 1)";
  ASSERT_TRUE(engine->begin(list, 50));
  EXPECT_THAT(engine->begin(list, 1).message(), HasSubstr("layer 0 lacks 50 tokens of " + name));
  EXPECT_THAT(engine->append(feed.call(one.id, 0, 0, 49)).message(),
              HasSubstr("tokens: 49, but begin() announced 50 more for layer 0 of " + name));
  EXPECT_FALSE(engine->append(feed.call(one.id, 2, 0, 50)));
  ASSERT_TRUE(engine->append(feed.call(one.id, 0, 0, 50)));
  EXPECT_THAT(engine->append(feed.call(one.id, 0, 0, 50)).message(),
              HasSubstr("tokens: 50, but begin() announced 0 more for layer 0 of " + name));
  EXPECT_FALSE(engine->fork(one.id));
  EXPECT_FALSE(engine->export_sequence(one.id));
  std::vector<uint16_t> x(4 * 64);
  LayerAttend attend;
  attend.sequences = list;
  attend.q = feed.q.data();
  attend.out = x.data();
  attend.layer = 1;
  EXPECT_THAT(engine->attend(attend).message(), HasSubstr("layer 1 lacks 50 tokens of " + name));
  attend.layer = 0;
  EXPECT_TRUE(engine->attend(attend));
  attend.dtype = DType::kFloat32;
  EXPECT_EQ(engine->attend(attend).code(), StatusCode::kUnsupported);
  EXPECT_THAT(engine->truncate(one.id, 1).message(), HasSubstr("layer 1 has 0 of " + name));
  ASSERT_TRUE(engine->truncate(one.id, 0));
  EXPECT_EQ(*engine->num_tokens(one.id), 0);
  EXPECT_TRUE(feed.give(engine, one.id, 0, 100));
}

}  // namespace
}  // namespace tierkv

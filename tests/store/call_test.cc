// What calls refuse, by name, and that they then change nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/store/support/modelled_store.h"

namespace tierkv::testing {
namespace {

StatusCode validated(void (*change)(KvStoreConfig*)) {
  KvStoreConfig c = small_config();
  change(&c);
  const Status status = c.validate();
  const auto store = KvStore::create(c);
  EXPECT_EQ(store.is_ok(), status.is_ok());
  if (!store) {
    EXPECT_EQ(store.status().code(), status.code());
  }
  return status.code();
}

TEST(StoreConfig, RefusesByName) {
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(validated([](KvStoreConfig*) {}), StatusCode::kOk);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->layout.num_layers = 0; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->layout.num_q_heads = 5; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->layout.head_dim = 80; }), StatusCode::kUnsupported);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->low_format.v.type = CodeType::uniform(1); }),
            StatusCode::kUnsupported);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->high_format.k.basis = BasisKind::kMean; }),
            StatusCode::kUnsupported);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->low_format = token_wise_tier(16, 2); }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->window_format = token_wise_tier(8, 2); }),
            kInvalid);
  for (const double theta : {double{NAN}, double{INFINITY}, -1.0}) {
    KvStoreConfig c = small_config();
    c.layout.rope_theta = theta;
    EXPECT_EQ(KvStore::create(c).status().code(), kInvalid) << theta;
  }
  for (const double scale : {0.0, -1.0, double{NAN}, 1e300, 2 * kMaxSmScale}) {
    KvStoreConfig c = small_config();
    c.layout.sm_scale = scale;
    EXPECT_EQ(KvStore::create(c).status().code(), kInvalid) << scale;
  }
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->policy.alpha_low = 2; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->policy.window_tokens = 7; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->policy.sink_tokens = INT32_MAX; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->score_interval = 0; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->page_bytes = 1000; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->page_bytes = 128; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->num_pages = 0; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->max_sequences = 0; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->max_tokens = 0; }), kInvalid);
  EXPECT_EQ(validated([](KvStoreConfig* c) { c->max_tokens = INT32_MAX; }), kInvalid);
}

// A pool of 2^51 bytes is more than a process can address.
TEST(StoreConfig, APoolWithoutMemoryIsOutOfMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer ends the process instead of refusing the memory";
#endif
  KvStoreConfig c = small_config();
  c.page_bytes = 1 << 20;
  c.num_pages = INT32_MAX;
  ASSERT_TRUE(c.validate()) << c.validate().message();
  const auto store = KvStore::create(c);
  EXPECT_EQ(store.status().code(), StatusCode::kOutOfMemory) << store.status().message();
  EXPECT_NE(store.status().message().find("no memory for a pool"), std::string::npos);
}

TEST(StoreConfig, ChoosesPagesThatWasteLittle) {
  KvStoreConfig c = small_config();
  c.layout.head_dim = 128;
  c.page_bytes = 0;
  c.policy.window_tokens = 64;
  EXPECT_EQ(make_store(c)->page_bytes(), 13312);
  EXPECT_EQ(c.page_bytes, 0);
}

// Unknown importance is neutral: without scores nothing falls to the low tier or is pruned, and
// every token's significance is that of the threshold of alpha = 1.
TEST(StorePrompts, TokensThatNobodyScoredAreNeutral) {
  for (const float alpha_high : {0.5f, 1.0f, 1.5f}) {
    RandomInput input;
    KvStoreConfig c = small_config();
    c.policy.alpha_high = alpha_high;
    ModelledStore world(c, &input);
    ModelSequence s;
    ASSERT_TRUE(world.add(&s));
    ASSERT_TRUE(world.prompt({&s}, 100, false));
    ASSERT_TRUE(world.end_prompt({&s}));
    const StoreStats stats = *world.store().stats();
    const int64_t rows = 4, settled = rows * (100 - c.policy.window_tokens);
    const bool is_high = alpha_high <= 1;
    EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kHigh)], is_high ? settled : 0);
    EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kLow)], is_high ? 0 : settled);
    EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kPruned)], 0);
    for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(world.step({&s}, 1, false));
    EXPECT_EQ(world.store().stats()->tokens[static_cast<int32_t>(Tier::kHigh)] >= settled, is_high);
  }
}

TEST(StorePrompts, NeutralSignificanceIsTheThresholdOrTheNextFloatAbove) {
  for (int32_t n = 1; n < 200000; n += 1 + n / 1000) {
    const float neutral = neutral_significance(n);
    EXPECT_GE(static_cast<double>(neutral), 1.0 / n) << n;
    EXPECT_LT(static_cast<double>(std::nextafter(neutral, 0.0f)), 1.0 / n) << n;
  }
}

// A sequence in its prompt and one past it, both with tokens.
class StoreCalls : public ::testing::Test {
 protected:
  StoreCalls() : world_(small_config(), &input_) {
    EXPECT_TRUE(world_.add(&prompt_));
    EXPECT_TRUE(world_.add(&live_));
    EXPECT_TRUE(world_.prompt({&prompt_}, 20, true));
    EXPECT_TRUE(world_.prompt({&live_}, 30, true));
    EXPECT_TRUE(world_.end_prompt({&live_}));
    before_ = state_of(store().view());
  }
  HostStore& store() { return world_.store(); }
  void refuses(const Status& status, StatusCode code) {
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_FALSE(status.message().empty());
    EXPECT_TRUE(state_of(store().view()) == before_) << status.message();
  }

  static constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  RandomInput input_;
  ModelledStore world_;
  ModelSequence prompt_, live_;
  std::vector<uint8_t> before_;
};

TEST_F(StoreCalls, RefuseBadLists) {
  const SequenceId id = live_.id;
  const SequenceId twice[2] = {id, id};
  const std::vector<SequenceId> many(6, id);
  refuses(store().begin_step({nullptr, 1}, 1), kInvalid);
  refuses(store().begin_step({&id, 0}, 1), kInvalid);
  refuses(store().begin_step({&id, -1}, 1), kInvalid);
  refuses(store().begin_step({many.data(), 6}, 1), kInvalid);
  refuses(store().begin_step({twice, 2}, 1), kInvalid);
  for (const SequenceId wrong : {SequenceId{-1, 0}, SequenceId{5, 0}, SequenceId{id.slot, 9},
                                 SequenceId{4, 0}, SequenceId{}}) {
    refuses(store().begin_step({&wrong, 1}, 1), StatusCode::kStaleSequence);
    refuses(store().release(wrong), StatusCode::kStaleSequence);
  }
}

TEST_F(StoreCalls, NameAnIdAsBothInterfacesDo) {
  const Status refused = store().release({2, 9});
  EXPECT_EQ(refused.message(), "sequence 38654705667 (slot 2, generation 9) is not open");
  for (const uint64_t number : {uint64_t{0}, uint64_t{1}, uint64_t{38654705667}, UINT64_MAX,
                                uint64_t{1} << 31, uint64_t{1} << 32}) {
    EXPECT_EQ(number_of(id_of(number)), number);
  }
}

TEST_F(StoreCalls, RefuseTheWrongPhaseAndCount) {
  const SequenceId p = prompt_.id, l = live_.id;
  refuses(store().begin_prompt({&l, 1}, 1), kInvalid);
  refuses(store().begin_prompt({&p, 1}, 0), kInvalid);
  refuses(store().begin_prompt({&p, 1}, 131), StatusCode::kOutOfRange);
  refuses(store().begin_prompt({&p, 1}, INT32_MAX), StatusCode::kOutOfRange);
  refuses(store().end_prompt({&l, 1}), kInvalid);
  refuses(store().begin_step({&p, 1}, 1), kInvalid);
  refuses(store().begin_step({&l, 1}, 0), kInvalid);
  refuses(store().begin_step({&l, 1}, kMaxStepTokens + 1), kInvalid);
  refuses(store().fork(p).status(), kInvalid);
  refuses(store().export_sequence(p).status(), kInvalid);
  refuses(store().truncate(l, -1), kInvalid);
  refuses(store().truncate(l, 31), kInvalid);
}

TEST_F(StoreCalls, RefuseLayersThatLackTokens) {
  const SequenceId l = live_.id, p = prompt_.id;
  ASSERT_TRUE(store().begin_step({&l, 1}, 2));
  ASSERT_TRUE(store().begin_prompt({&p, 1}, 2));
  before_ = state_of(store().view());
  const std::vector<float> x(4096, 0.5f);
  refuses(store().begin_step({&l, 1}, 1), kInvalid);
  refuses(store().begin_prompt({&p, 1}, 1), kInvalid);
  refuses(store().end_prompt({&p, 1}), kInvalid);
  refuses(store().fork(l).status(), kInvalid);
  refuses(store().truncate(l, 3), kInvalid);
  refuses(store().export_sequence(l).status(), kInvalid);
  refuses(store().update_scores({{&l, 1}, 1, 0, x.data(), 150}), kInvalid);
  refuses(store().score_prompt({{&p, 1}, 1, x.data(), 150}), kInvalid);
  EXPECT_TRUE(store().release(l)) << "a step may be abandoned";
}

TEST_F(StoreCalls, RefuseBadValues) {
  const SequenceId l = live_.id;
  ASSERT_TRUE(store().begin_step({&l, 1}, 1));
  before_ = state_of(store().view());
  const auto append = [&](int32_t layer, int32_t tokens, const void* k, const void* v) {
    return store().append({{&l, 1}, layer, tokens, k, v});
  };
  std::vector<uint16_t> good(2 * 64, float_to_half(1.0f));
  refuses(append(-1, 1, good.data(), good.data()), kInvalid);
  refuses(append(2, 1, good.data(), good.data()), kInvalid);
  refuses(append(0, 0, good.data(), good.data()), kInvalid);
  refuses(append(0, 2, good.data(), good.data()), kInvalid);
  refuses(append(0, 1, nullptr, good.data()), kInvalid);
  refuses(append(0, 1, good.data(), nullptr), kInvalid);
  for (const uint16_t bad : {0x7c00, 0xfc00, 0x7e01}) {
    std::vector<uint16_t> values = good;
    values.back() = bad;
    refuses(append(0, 1, values.data(), good.data()), StatusCode::kNonFinite);
    refuses(append(0, 1, good.data(), values.data()), StatusCode::kNonFinite);
  }
  EXPECT_TRUE(append(0, 1, good.data(), good.data()));
  before_ = state_of(store().view());
  refuses(append(0, 1, good.data(), good.data()), kInvalid);
}

TEST(StoreRange, RefusesWhatNoTierCanHold) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    KvStoreConfig c = small_config();
    c.layout.dtype = dtype;
    const auto store = make_store(c);
    const SequenceId id = *store->add_sequence();
    ASSERT_TRUE(store->begin_prompt({&id, 1}, 1));
    std::vector<float> wide(128, 7e4f), good(128, 65504.0f);
    std::vector<uint16_t> wide16(128, float_to_bfloat16(7e4f)), good16(128, 0x3f80);
    const bool half = dtype == DType::kBFloat16;
    const void* bad = half ? static_cast<const void*>(wide16.data()) : wide.data();
    const void* fine = half ? static_cast<const void*>(good16.data()) : good.data();
    EXPECT_EQ(store->append({{&id, 1}, 0, 1, bad, fine}).code(), StatusCode::kOutOfRange);
    EXPECT_EQ(store->append({{&id, 1}, 0, 1, fine, bad}).code(), StatusCode::kOutOfRange);
    EXPECT_TRUE(store->append({{&id, 1}, 0, 1, fine, fine}));
  }
}

TEST_F(StoreCalls, RefuseBadScores) {
  const SequenceId l = live_.id, p = prompt_.id;
  std::vector<float> x(2 * 150, 0.5f);
  refuses(store().score_prompt({{&p, 1}, 0, nullptr, 150}), kInvalid);
  refuses(store().score_prompt({{&p, 1}, 0, x.data(), 19}), kInvalid);
  refuses(store().score_prompt({{&p, 1}, 2, x.data(), 150}), kInvalid);
  refuses(store().score_prompt({{&l, 1}, 0, x.data(), 150}), kInvalid);
  refuses(store().update_scores({{&l, 1}, 0, 0, nullptr, 150}), kInvalid);
  refuses(store().update_scores({{&l, 1}, 0, -1, x.data(), 150}), kInvalid);
  refuses(store().update_scores({{&l, 1}, 0, 30, x.data(), 150}), kInvalid);
  refuses(store().update_scores({{&l, 1}, 0, 0, x.data(), 29}), kInvalid);
  refuses(store().update_scores({{&p, 1}, 0, 0, x.data(), 150}), kInvalid);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -0.25f}) {
    x[150] = bad;  // the second head's first token
    const StatusCode code = bad == -0.25f ? kInvalid : StatusCode::kNonFinite;
    refuses(store().score_prompt({{&p, 1}, 0, x.data(), 150}), code);
    refuses(store().update_scores({{&l, 1}, 0, 0, x.data(), 150}), code);
  }
}

TEST_F(StoreCalls, ASlotUsedAgainGivesAnotherId) {
  const SequenceId old = live_.id;
  ASSERT_TRUE(store().release(old));
  EXPECT_EQ(store().release(old).code(), StatusCode::kStaleSequence);
  const SequenceId fresh = *store().add_sequence();
  EXPECT_EQ(fresh.slot, old.slot);
  EXPECT_FALSE(fresh == old);
  EXPECT_EQ(store().num_tokens(old).status().code(), StatusCode::kStaleSequence);
  EXPECT_EQ(*store().num_tokens(fresh), 0);
}

TEST(StorePages, RunOutByNameAndComeBack) {
  RandomInput input;
  KvStoreConfig c = small_config();
  c.num_pages = 12;  // four rows, a page of 16 window tokens each: three sequences
  ModelledStore world(c, &input);
  ModelSequence s[4];
  for (ModelSequence& one : s) ASSERT_TRUE(world.add(&one));
  for (int32_t i = 0; i < 3; ++i) ASSERT_TRUE(world.prompt({&s[i]}, 16, true));
  const std::vector<uint8_t> before = state_of(world.view());
  EXPECT_EQ(world.prompt({&s[3]}, 1, true).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(world.prompt({&s[0], &s[3]}, 1, true).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(world.end_prompt({&s[0]}).code(), StatusCode::kOutOfPages) << "needs the worst case";
  EXPECT_TRUE(state_of(world.view()) == before);
  ASSERT_TRUE(world.store().release(s[1].id));
  ASSERT_TRUE(world.store().release(s[2].id));
  EXPECT_TRUE(world.end_prompt({&s[0]}));
  EXPECT_EQ(world.difference(s[0], true), "");
}

TEST(StoreStats, CountTokensAndBytes) {
  RandomInput input;
  ModelledStore world(small_config(), &input);
  ModelSequence a, b;
  ASSERT_TRUE(world.add(&a));
  ASSERT_TRUE(world.prompt({&a}, 40, true));
  ASSERT_TRUE(world.end_prompt({&a}));
  for (int32_t i = 0; i < 30; ++i) ASSERT_TRUE(world.step({&a}, 1, true));
  ASSERT_TRUE(world.fork(a, &b));
  const StoreStats stats = *world.store().stats();
  int64_t kept = 0, sum = 0;
  for (const RowModel& row : a.rows) kept += 2 * row.kept_tokens();
  for (const int64_t n : stats.tokens) sum += n;
  EXPECT_EQ(stats.sequences, 2);
  EXPECT_EQ(sum, 2 * 4 * 70);
  EXPECT_EQ(sum - stats.tokens[static_cast<int32_t>(Tier::kPruned)], kept);
  EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kWindow)], 2 * 4 * 8);
  EXPECT_EQ(stats.raw_bytes, 2 * 4 * 70 * 64 * 4);
  // K8V4: 64 + 32 bytes of codes, 8 of metadata, 8 of score and position; K4V2: 32 + 16 + 16.
  const int64_t low = stats.tokens[static_cast<int32_t>(Tier::kLow)];
  EXPECT_EQ(stats.nominal_bytes, (kept - low) * 112 + low * 64);
  EXPECT_GT(stats.nominal_ratio(), 1.0);
  EXPECT_EQ(stats.held_bytes(), int64_t{stats.pages - stats.pages_free} * 1920);
}

}  // namespace
}  // namespace tierkv::testing

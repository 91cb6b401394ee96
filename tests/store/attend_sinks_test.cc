// Learned sinks in calls of stores other than the plain one, which attend_queries_test.cc has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/store/support/coded_world.h"
#include "tests/store/support/query_call.h"
#include "tests/support/basis_source.h"
#include "tests/support/small_store.h"

namespace tierkv::testing {
namespace {

// A coded store's sinks take of logits and values with their means.
TEST(StoreSinks, OfCodedTokens) {
  RandomInput input;
  CodedWorld world(small_coded_config(&input), &input);
  CodedModel m;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 150));
  ASSERT_TRUE(world.end_prompt({&m}));
  const CacheLayout& layout = world.config().layout;
  QueryCall bare(world.config(), {m.id}, 2);
  bare.q = input.values(DType::kFloat16, 2 * layout.num_q_heads, layout.head_dim);
  QueryCall with = bare;
  ASSERT_TRUE(world.store().attend(bare.request()));
  for (int32_t h = 0; h < layout.num_q_heads; ++h) {
    with.sinks.push_back(h == 0 ? -INFINITY : bare.lse[h] + input.real(-3, 3));
  }
  ASSERT_TRUE(world.store().attend(with.request()));
  for (size_t i = 0; i < bare.lse.size(); ++i) {
    const double sink = with.sinks[i % layout.num_q_heads], lse = bare.lse[i];
    const double most = std::fmax(sink, lse);
    const double sum = std::exp(sink - most) + std::exp(lse - most);
    EXPECT_NEAR(with.lse[i], most + std::log(sum), 1e-6 + 2.4e-7 * std::fabs(most));
    for (int32_t d = 0; d < layout.head_dim; ++d) {
      const double x = half_to_float(bare.out[i * layout.head_dim + d]);
      const double want = x * std::exp(lse - most) / sum;
      // Both are rounded to fp16; lse to fp32, which moves the share.
      EXPECT_NEAR(half_to_float(with.out[i * layout.head_dim + d]), want,
                  (0x1p-10 + 2.4e-7 * std::fabs(most)) * std::fabs(want) + 0x1p-24);
    }
  }
}

TEST(StoreSinks, RefusedByName) {
  RandomInput input;
  std::mt19937 rng(std::random_device{}());
  for (const bool means : {false, true}) {
    KvStoreConfig c = small_config();
    c.basis = std::make_shared<const CacheBasis>(
        means ? random_cache_basis(&rng, c.layout, BasisKind::kNone, BasisKind::kMean)
              : CacheBasis::hadamard(c.layout));
    const auto store = std::move(*KvStore::create(c));
    const Result<SequenceId> id = store->add_sequence();
    ASSERT_TRUE(id);
    QueryCall call(c, {*id}, 1);
    call.q = input.values(DType::kFloat16, 4, 64);
    call.sinks = {1.0f, -INFINITY, -2.0f, 1e4f};
    const Status s = store->attend(call.request());
    EXPECT_EQ(s.code(), means ? StatusCode::kUnsupported : StatusCode::kOk) << s.message();
    if (means) {
      EXPECT_NE(s.message().find("sinks"), std::string::npos);
      continue;
    }
    // No tokens: nothing but the sinks.
    for (int32_t h = 0; h < 4; ++h) EXPECT_EQ(call.lse[h], call.sinks[h]) << h;
    for (const uint16_t x : call.out) EXPECT_EQ(half_to_float(x), 0.0f);  // of either sign
  }
  for (const float bad : {INFINITY, -NAN}) {
    const auto store = make_store(small_config());
    const Result<SequenceId> id = store->add_sequence();
    QueryCall call(small_config(), {*id}, 1);
    call.q = input.values(DType::kFloat16, 4, 64);
    call.sinks = {1.0f, 0.0f, bad, 0.0f};
    EXPECT_EQ(store->attend(call.request()).code(), StatusCode::kNonFinite);
    EXPECT_EQ(call.out[0], 0x7e00);
  }
}

}  // namespace
}  // namespace tierkv::testing

// What a coded store's config may not ask for.
#include <gtest/gtest.h>

#include <cmath>

#include "store/tiers/host_store.h"
#include "tests/store/support/coded_world.h"

namespace tierkv::testing {
namespace {

using Change = void (*)(KvStoreConfig*);

TEST(CodedConfig, NamesWhatItRefuses) {
  RandomInput input;
  const struct {
    Change change;
    StatusCode code;
    const char* name;
  } kCases[] = {
      {[](KvStoreConfig* c) { c->high_format = token_wise_tier(4, 4); }, StatusCode::kUnsupported,
       "high_format"},
      {[](KvStoreConfig* c) { c->window_format = raw_tier(); }, StatusCode::kUnsupported,
       "window_format"},
      {[](KvStoreConfig* c) { c->policy.alpha_high = 2; }, StatusCode::kUnsupported, "alpha_high"},
      {[](KvStoreConfig* c) { c->policy.sink_tokens = 4; }, StatusCode::kUnsupported, "sink"},
      {[](KvStoreConfig* c) { c->coded.fixed_format = token_wise_tier(8, 8); },
       StatusCode::kInvalidArgument, "fixed_blocks"},
      {[](KvStoreConfig* c) {
         c->coded.fixed_blocks = true;
         c->coded.fixed_format.v = token_wise(2);
       },
       StatusCode::kUnsupported, "fixed_format"},
      {[](KvStoreConfig* c) {
         c->coded.fixed_blocks = true;
         c->coded.fixed_format.k = token_wise(8, 32);
       },
       StatusCode::kUnsupported, "fixed_format"},
      {[](KvStoreConfig* c) {
         c->coded.fixed_blocks = true;
         c->policy.alpha_low = 0.5;
       },
       StatusCode::kUnsupported, "alpha_low"},
      {[](KvStoreConfig* c) { c->score_interval = 4; }, StatusCode::kUnsupported, "score_interval"},
      {[](KvStoreConfig* c) { c->page_bytes = 13312; }, StatusCode::kUnsupported, "page_bytes"},
      {[](KvStoreConfig* c) { c->basis = std::make_shared<CacheBasis>(); },
       StatusCode::kUnsupported, "basis"},
      {[](KvStoreConfig* c) { c->layout.head_dim = 80; }, StatusCode::kUnsupported, "head_dim"},
      {[](KvStoreConfig* c) { c->policy.window_tokens = 7; }, StatusCode::kInvalidArgument,
       "window_tokens"},
      {[](KvStoreConfig* c) { c->num_pages = 0; }, StatusCode::kInvalidArgument, "num_pages"},
      {[](KvStoreConfig* c) { c->num_pages = INT32_MAX; }, StatusCode::kOutOfRange, "num_pages"},
      {[](KvStoreConfig* c) { c->max_tokens = 1 << 30; }, StatusCode::kInvalidArgument,
       "max_tokens"},
      {[](KvStoreConfig* c) { c->coded.key_steps.pop_back(); }, StatusCode::kInvalidArgument,
       "key_steps"},
      {[](KvStoreConfig* c) { c->coded.value_steps[1] = 0; }, StatusCode::kInvalidArgument,
       "value_steps"},
      {[](KvStoreConfig* c) { c->coded.value_steps[1] = NAN; }, StatusCode::kInvalidArgument,
       "value_steps"},
      {[](KvStoreConfig* c) { c->coded.key_relative = 0.1f; }, StatusCode::kInvalidArgument,
       "key_relative"},
      {[](KvStoreConfig* c) { c->coded.steps = StepSource::kPrompt; }, StatusCode::kInvalidArgument,
       "key_relative"},
      {[](KvStoreConfig* c) {
         c->coded.steps = StepSource::kPrompt;
         c->coded.key_relative = c->coded.value_relative = 0.1f;
       },
       StatusCode::kInvalidArgument, "key_steps"},
      {[](KvStoreConfig* c) { c->coded.steps = static_cast<StepSource>(2); },
       StatusCode::kInvalidArgument, "coded.steps"},
      {[](KvStoreConfig* c) { c->coded.means = MeanSource::kGiven; }, StatusCode::kInvalidArgument,
       "key_means"},
      {[](KvStoreConfig* c) { c->coded.max_length = 7; }, StatusCode::kInvalidArgument,
       "max_length"},
      {[](KvStoreConfig* c) { c->coded.streams_per_lane = 3; }, StatusCode::kInvalidArgument,
       "streams_per_lane"},
      {[](KvStoreConfig* c) { c->coded.codebooks = CodebookSource::kGiven; },
       StatusCode::kInvalidArgument, "given"},
      {[](KvStoreConfig* c) {
         c->coded.codebooks = CodebookSource::kGiven;
         c->coded.given = {{1, 2, 3}};
       },
       StatusCode::kCorrupt, "given"},
      {[](KvStoreConfig* c) {
         c->coded.given = {{1, 2, 3}};
       },
       StatusCode::kInvalidArgument, "given"},
  };
  ASSERT_TRUE(small_coded_config(&input).validate());
  for (const auto& refused : kCases) {
    KvStoreConfig c = small_coded_config(&input);
    refused.change(&c);
    const Status status = c.validate();
    EXPECT_EQ(status.code(), refused.code) << refused.name << ": " << status.message();
    EXPECT_NE(status.message().find(refused.name), std::string::npos) << status.message();
    EXPECT_FALSE(KvStore::create(c).is_ok());
  }
}

TEST(CodedConfig, IsPartOfTheConfig) {
  RandomInput input;
  const KvStoreConfig a = small_coded_config(&input);
  KvStoreConfig b = a;
  EXPECT_TRUE(a == b);
  b.coded.value_steps[2] *= 2;
  EXPECT_TRUE(a != b);
  b = a;
  b.coded.fixed_blocks = true;
  b.coded.fixed_format = token_wise_tier(8, 8);
  b.policy.sink_tokens = 5;
  b.policy.alpha_high = 30;
  EXPECT_TRUE(b.validate()) << b.validate().message();
  EXPECT_TRUE(a != b);
  EXPECT_NE(to_json(b).find("\"fixed_blocks\":true,\"fixed_format\":\"k8v8\""), std::string::npos);
  EXPECT_NE(to_json(a).find("\"coded\":{\"enabled\":true"), std::string::npos);
}

// A store of one row, so that its longest prompt needs little but page tables.
TEST(CodedPrompt, IsRefusedByNameWhereAGridWouldBeTooLarge) {
  RandomInput input;
  KvStoreConfig config = small_coded_config(&input);
  config.layout.num_layers = config.layout.num_kv_heads = 1;
  config.coded.key_steps.resize(1);
  config.coded.value_steps.resize(1);
  config.max_sequences = 1;
  config.max_tokens = 1 << 22;
  const auto store = KvStore::create(config);
  ASSERT_TRUE(store.is_ok()) << store.status().message();
  const SequenceId id = *(*store)->add_sequence();
  const Status refused = (*store)->begin_prompt({&id, 1}, 65534 * 64 + 1);
  EXPECT_EQ(refused.code(), StatusCode::kOutOfRange);
  EXPECT_NE(refused.message().find("at most 4194176 at once"), std::string::npos)
      << refused.message();
  EXPECT_EQ(*(*store)->num_tokens(id), 0);
  EXPECT_EQ((*store)->begin_prompt({&id, 1}, 65534 * 64).code(), StatusCode::kOutOfPages);
  EXPECT_TRUE((*store)->begin_prompt({&id, 1}, 64));
}

}  // namespace
}  // namespace tierkv::testing

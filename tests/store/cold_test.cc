// The cold tier: the same state comes back, in a file no larger than it should be, and generation
// goes on as if nothing had happened.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "codec/container_format.h"
#include "tests/store/coded_world.h"
#include "tests/store/cold_sequence.h"
#include "tests/store/modelled_store.h"
#include "tests/store/named_config.h"
#include "tierkv/cold.h"

namespace tierkv::testing {
namespace {

// Saves a sequence, coded and not, on one thread and three, releases it, loads each and compares
// state for state. `id` is the one that came back last.
void goes_and_comes_back(KvStore* store, SequenceId* id) {
  const Bytes before = state_bytes(*store, *id);
  for (const bool entropy_coded : {false, true}) {
    const Result<Bytes> cold = save_sequence(*store, *id, {entropy_coded, 1});
    ASSERT_TRUE(cold.is_ok()) << cold.status().message();
    EXPECT_TRUE(*save_sequence(*store, *id, {entropy_coded, 3}) == *cold);
    const int32_t free = store->stats()->pages_free;
    ASSERT_TRUE(store->release(*id));
    const int32_t threads = entropy_coded ? 1 : 3;
    const Result<SequenceId> back = load_sequence(*store, cold->data(), cold->size(), threads);
    ASSERT_TRUE(back.is_ok()) << back.status().message();
    *id = *back;
    EXPECT_TRUE(state_bytes(*store, *id) == before);
    // A coded row that has just coded a block may hold a page more than it needs.
    EXPECT_GE(store->stats()->pages_free, free);
    EXPECT_TRUE(*save_sequence(*store, *id, {entropy_coded, 1}) == *cold);
  }
}

// What attention gives for one query of each layer.
Bytes attention(KvStore& store, SequenceId id, const Bytes& q) {
  const CacheLayout& layout = store.config().layout;
  Bytes all;
  for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
    Bytes out(q.size(), 0xa5);
    std::vector<float> lse(layout.num_q_heads);
    AttendRequest request;
    request.sequences = {&id, 1};
    request.layer = layer;
    request.q = q.data();
    request.out = out.data();
    request.lse = lse.data();
    const Status s = store.attend(request);
    EXPECT_TRUE(s.is_ok()) << s.message();
    all.insert(all.end(), out.begin(), out.end());
    const auto* bytes = reinterpret_cast<const uint8_t*>(lse.data());
    all.insert(all.end(), bytes, bytes + 4 * lse.size());
  }
  return all;
}

TEST(ColdTier, TieredSequencesOfAnyLengthComeBack) {
  RandomInput input;
  ModelledStore world(small_config(), &input);
  for (const int32_t tokens : {0, 1, 7, 8, 9, 16, 17, 63, 64, 65, input.uniform(66, 120)}) {
    SCOPED_TRACE(tokens);
    ModelSequence s;
    ASSERT_TRUE(world.add(&s));
    if (tokens > 0) {
      ASSERT_TRUE(world.prompt({&s}, tokens, true));
    }
    ASSERT_TRUE(world.end_prompt({&s}));
    goes_and_comes_back(&world.store(), &s.id);
    for (int32_t i = input.uniform(1, 20); i > 0; --i) ASSERT_TRUE(world.step({&s}, 1, true));
    goes_and_comes_back(&world.store(), &s.id);
    EXPECT_EQ(world.difference(s, true), "");
    ASSERT_TRUE(world.store().release(s.id));
  }
}

TEST(ColdTier, EveryHeadDimAndFormatComesBack) {
  RandomInput input;
  const TierFormat k8v4 = token_wise_tier(8, 4), k4v2 = token_wise_tier(4, 2);
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const auto& [high, low] : {std::pair{k8v4, k4v2},
                                    {raw_tier(), k8v4},
                                    {token_wise_tier(4, 8), token_wise_tier(2, 2)}}) {
      SCOPED_TRACE(head_dim);
      const auto store = KvStore::create(format_config(head_dim, high, low));
      ASSERT_TRUE(store.is_ok()) << store.status().message();
      Result<SequenceId> id = prompted(**store, input.uniform(1, 150), &input);
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      goes_and_comes_back(store->get(), &*id);
    }
  }
}

void coded_sequences_come_back(const KvStoreConfig& config, RandomInput& input) {
  CodedWorld world(config, &input);
  for (const int32_t tokens : {0, 1, 16, 63, 64, 65, 80, 128, 145, input.uniform(146, 300)}) {
    SCOPED_TRACE(tokens);
    CodedModel m;
    ASSERT_TRUE(world.add(&m));
    if (tokens > 0) {
      ASSERT_TRUE(world.prompt({&m}, tokens));
    }
    ASSERT_TRUE(world.end_prompt({&m}));
    goes_and_comes_back(&world.store(), &m.id);
    for (int32_t i = input.uniform(1, 70); i > 0; --i) ASSERT_TRUE(world.step({&m}, 1));
    goes_and_comes_back(&world.store(), &m.id);
    EXPECT_EQ(broken_law(world.view()), "");
    EXPECT_EQ(world.difference(m), "");
    ASSERT_TRUE(world.store().release(m.id));
  }
}

TEST(ColdTier, CodedSequencesOfAnyLengthComeBack) {
  RandomInput input;
  coded_sequences_come_back(small_coded_config(&input), input);
}

TEST(ColdTier, SequencesWithFixedRateBlocksComeBack) {
  RandomInput input;
  KvStoreConfig config = small_coded_config(&input);
  config.coded.fixed_blocks = true;
  config.policy.sink_tokens = input.uniform(0, 70);
  coded_sequences_come_back(config, input);
}

// What a store without them wrote, one with them reads; not the other way round.
TEST(ColdTier, FixedRateBlocksNeedAStoreThatKnowsThem) {
  RandomInput input;
  const KvStoreConfig plain = small_coded_config(&input);
  KvStoreConfig fixed = plain;
  fixed.coded.fixed_blocks = true;
  fixed.policy.sink_tokens = 4;
  const auto a = std::move(*KvStore::create(plain)), b = std::move(*KvStore::create(fixed));
  const Bytes old = *save_sequence(*a, *prompted(*a, 200, &input));
  const Bytes made = *save_sequence(*b, *prompted(*b, 200, &input));
  EXPECT_EQ(old[10], 0);  // minor versions
  EXPECT_EQ(made[10], 1);
  EXPECT_TRUE(load(*b, old));
  EXPECT_EQ(load(*a, made).code(), StatusCode::kInvalidArgument);
  const Bytes exported = *b->export_sequence(*prompted(*b, 200, &input));
  EXPECT_EQ(a->import_sequence(exported.data(), exported.size()).status().code(),
            StatusCode::kInvalidArgument);
  fixed.coded.fixed_format = token_wise_tier(8, 8);
  const auto other = std::move(*KvStore::create(fixed));
  EXPECT_EQ(load(*other, made).code(), StatusCode::kInvalidArgument);
}

// Two sequences of equal state get the same tokens; one of them was away before.
void goes_on_the_same(KvStore* store, SequenceId stays, RandomInput* input) {
  const Result<SequenceId> fork = store->fork(stays);
  ASSERT_TRUE(fork.is_ok()) << fork.status().message();
  const Result<Bytes> cold = save_sequence(*store, *fork, {true, 1});
  ASSERT_TRUE(cold.is_ok()) << cold.status().message();
  ASSERT_TRUE(store->release(*fork));
  const Result<SequenceId> back = load_sequence(*store, cold->data(), cold->size());
  ASSERT_TRUE(back.is_ok()) << back.status().message();
  const CacheLayout& layout = store->config().layout;
  for (int32_t i = 0; i < 70; ++i) {
    std::vector<Bytes> values;
    ASSERT_TRUE(step(*store, stays, input, &values));
    ASSERT_TRUE(step(*store, *back, input, &values));
    const Bytes q = input->values(DType::kFloat16, layout.num_q_heads, layout.head_dim);
    ASSERT_TRUE(attention(*store, stays, q) == attention(*store, *back, q)) << "step " << i;
  }
  EXPECT_TRUE(state_bytes(*store, stays) == state_bytes(*store, *back));
}

TEST(ColdTier, GenerationGoesOnAsIfTheSequenceHadStayed) {
  RandomInput input;
  const KvStoreConfig coded = small_coded_config(&input);
  for (const KvStoreConfig& config : {small_config(), coded}) {
    const auto store = KvStore::create(config);
    ASSERT_TRUE(store.is_ok()) << store.status().message();
    const Result<SequenceId> id = prompted(**store, input.uniform(30, 75), &input);
    ASSERT_TRUE(id.is_ok()) << id.status().message();
    goes_on_the_same(store->get(), *id, &input);
  }
}

TEST(ColdTier, CodingSavesBytesAndTheFileKeepsToTheLengths) {
  RandomInput input;
  KvStoreConfig config = format_config(128, token_wise_tier(8, 4), token_wise_tier(4, 2));
  config.layout.num_layers = 1;
  config.num_pages = 200;
  config.max_tokens = 3000;
  config.policy.alpha_high = 2;  // tokens that nobody scores are low
  const auto store = KvStore::create(config);
  ASSERT_TRUE(store.is_ok()) << store.status().message();
  const Result<SequenceId> id = prompted(**store, 3000, &input);
  ASSERT_TRUE(id.is_ok()) << id.status().message();
  const size_t state = state_bytes(**store, *id).size();
  const size_t plain = save_sequence(**store, *id, {false, 1})->size();
  const size_t coded = save_sequence(**store, *id, {true, 1})->size();
  // Normal values of 2 bits have 1.8 bits of entropy, of 4 bits 3.3, of 8 bits 7.2: see codec.
  EXPECT_LT(coded, plain * 95 / 100);
  // A page is a chunk: 48 bytes of index, and at most 15 of zeros. Rows and headers are small.
  EXPECT_LT(plain, state + state / 100 + 2000);
}

// Values whose min-max codes are nearly equally frequent: `flat` of the tokens are uniform.
Bytes flat_values(int64_t tokens, int32_t per_token, double flat, RandomInput* input) {
  Bytes bytes = input->values(DType::kFloat16, tokens, per_token);
  for (int64_t t = 0; t < tokens; ++t) {
    if (!input->chance(flat)) continue;
    for (int32_t i = 0; i < per_token; ++i) {
      const uint16_t bits = float_to_half(input->real(-1, 1));
      std::memcpy(&bytes[(t * per_token + i) * 2], &bits, 2);
    }
  }
  return bytes;
}

// What a codebook costs beside code words is known well enough: a file that asks for coding is not
// larger than one that does not, but by what blocks differ.
TEST(ColdTier, CodingCostsNothingWhereItSavesNothing) {
  RandomInput input;
  for (const int32_t head_dim : {64, 128}) {
    for (const auto& [high, low] : {std::pair{token_wise_tier(8, 4), token_wise_tier(4, 2)},
                                    {token_wise_tier(4, 8), token_wise_tier(2, 2)}}) {
      KvStoreConfig config = format_config(head_dim, high, low);
      config.num_pages = 400;
      config.max_tokens = 1000;
      const auto store = KvStore::create(config);
      ASSERT_TRUE(store.is_ok()) << store.status().message();
      const int32_t tokens = input.uniform(1, 1000);
      const double flat = input.real(0, 1);
      std::vector<Bytes> values;
      for (int32_t i = 0; i < 2 * config.layout.num_layers; ++i) {
        const int64_t rows = int64_t{tokens} * config.layout.num_kv_heads;
        values.push_back(flat_values(rows, head_dim, flat, &input));
      }
      const Result<SequenceId> id = prompted(**store, tokens, &input, std::move(values));
      ASSERT_TRUE(id.is_ok()) << id.status().message();
      const size_t plain = save_sequence(**store, *id, {false, 1})->size();
      const size_t coded = save_sequence(**store, *id, {true, 1})->size();
      EXPECT_LE(coded, plain + plain / 1000) << head_dim << " x " << tokens;
    }
  }
}

TEST(ColdTier, RefusesAnotherConfigAndWantOfRoom) {
  RandomInput input;
  const KvStoreConfig config = small_config();
  const auto store = std::move(*KvStore::create(config));
  const SequenceId id = *prompted(*store, 70, &input);
  const Bytes cold = *save_sequence(*store, id);
  const auto refused = [&](void (*change)(KvStoreConfig*)) {
    KvStoreConfig c = config;
    change(&c);
    return load(**KvStore::create(c), cold).code();
  };
  for (const auto change : {+[](KvStoreConfig* c) { c->policy.sink_tokens = 2; },
                            +[](KvStoreConfig* c) { c->low_format = token_wise_tier(4, 4); },
                            +[](KvStoreConfig* c) { c->layout.num_layers = 1; },
                            +[](KvStoreConfig* c) { c->layout.rope_theta = 7; },
                            +[](KvStoreConfig* c) { c->page_bytes = 4096; }}) {
    EXPECT_EQ(refused(change), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(refused([](KvStoreConfig* c) { c->max_tokens = 69; }), StatusCode::kOutOfRange);
  EXPECT_EQ(refused([](KvStoreConfig* c) { c->num_pages = 3; }), StatusCode::kOutOfPages);
  EXPECT_EQ(load(**KvStore::create(small_coded_config(&input)), cold).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(save_sequence(*store, id, {true, 0}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(load_sequence(*store, cold.data(), cold.size(), 0).status().code(),
            StatusCode::kInvalidArgument);
  const SequenceId prompt = *store->add_sequence();
  EXPECT_EQ(save_sequence(*store, prompt).status().code(), StatusCode::kInvalidArgument);
}

TEST(ColdTier, IsNoSequenceWhereTheContainerHoldsADump) {
  RandomInput input;
  const auto store = std::move(*KvStore::create(small_config()));
  ContainerModel model;
  model.layout = small_config().layout;
  model.num_sequences = 1;
  ChunkBlock block;
  block.add(ChunkKey{}, serialize_model(model));
  std::vector<ChunkBlock> blocks;
  blocks.push_back(std::move(block));
  EXPECT_EQ(load(*store, assemble_container(blocks)).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv::testing

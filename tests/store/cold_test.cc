// The cold tier: the same state comes back, generation goes on as if nothing had happened, and
// nothing but an intact sequence is let in.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "codec/container_format.h"
#include "tests/store/coded_world.h"
#include "tests/store/modelled_store.h"
#include "tests/store/named_config.h"
#include "tierkv/cold.h"

namespace tierkv::testing {
namespace {

using Bytes = std::vector<uint8_t>;

// The state of a sequence, as its export has it.
Bytes state_bytes(KvStore& store, SequenceId id) {
  const Result<Bytes> bytes = store.export_sequence(id);
  EXPECT_TRUE(bytes.is_ok()) << bytes.status().message();
  return bytes ? *bytes : Bytes();
}
Status load(KvStore& store, const Bytes& bytes) {
  return load_sequence(store, bytes.data(), bytes.size()).status();
}

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

// Keys and values that a seed makes again.
Status append_all(KvStore& store, SequenceId id, int32_t tokens, RandomInput* input,
                  std::vector<Bytes>* values) {
  const CacheLayout& layout = store.config().layout;
  const bool made = !values->empty();
  for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
    if (!made) {
      for (int i = 0; i < 2; ++i) {
        values->push_back(
            input->values(layout.dtype, int64_t{tokens} * layout.num_kv_heads, layout.head_dim));
      }
    }
    const Status s = store.append({{&id, 1},
                                   layer,
                                   tokens,
                                   (*values)[size_t{2} * layer].data(),
                                   (*values)[size_t{2} * layer + 1].data()});
    if (!s) return s;
  }
  return Status::ok();
}
Status step(KvStore& store, SequenceId id, RandomInput* input, std::vector<Bytes>* values) {
  if (Status s = store.begin_step({&id, 1}, 1); !s) return s;
  return append_all(store, id, 1, input, values);
}
Result<SequenceId> prompted(KvStore& store, int32_t tokens, RandomInput* input) {
  const SequenceId id = *store.add_sequence();
  std::vector<Bytes> values;
  if (tokens > 0) {
    if (Status s = store.begin_prompt({&id, 1}, tokens); !s) return s;
    if (Status s = append_all(store, id, tokens, input, &values); !s) return s;
  }
  if (Status s = store.end_prompt({&id, 1}); !s) return s;
  return id;
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

KvStoreConfig format_config(int32_t head_dim, const TierFormat& high, const TierFormat& low) {
  KvStoreConfig c = small_config();
  c.layout.head_dim = head_dim;
  c.window_format = c.high_format = high;
  c.low_format = low;
  c.page_bytes = 0;
  return c;
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

TEST(ColdTier, CodedSequencesOfAnyLengthComeBack) {
  RandomInput input;
  CodedWorld world(small_coded_config(&input), &input);
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

// A sequence of `tokens` tokens, small enough to be damaged byte by byte.
struct SmallSequence {
  std::unique_ptr<KvStore> store;
  SequenceId id;
  Bytes cold;

  SmallSequence(KvStoreConfig config, int32_t tokens, RandomInput* input) {
    config.layout.num_layers = 1;
    config.layout.num_q_heads = config.layout.num_kv_heads = 1;
    if (config.coded.enabled) {
      config.coded.key_steps.resize(1);
      config.coded.value_steps.resize(1);
    } else {
      config.policy.alpha_low = 0;  // unscored tokens are low ones
    }
    store = std::move(*KvStore::create(config));
    id = *prompted(*store, tokens, input);
    cold = *save_sequence(*store, id, {true, 1});
  }
};

class ColdDamage : public ::testing::TestWithParam<bool> {
 protected:
  ColdDamage()
      : small_(GetParam() ? small_coded_config(&input_) : small_config(), GetParam() ? 90 : 140,
               &input_),
        state_(state_bytes(*small_.store, small_.id)),
        free_(small_.store->stats()->pages_free) {}

  void expect_unchanged() {
    EXPECT_EQ(small_.store->stats()->sequences, 1);
    EXPECT_EQ(small_.store->stats()->pages_free, free_);
    EXPECT_TRUE(state_bytes(*small_.store, small_.id) == state_);
  }

  RandomInput input_;
  SmallSequence small_;
  Bytes state_;
  int32_t free_;
};

TEST_P(ColdDamage, AtEveryByteIsRefusedByName) {
  for (size_t at = 0; at < small_.cold.size(); ++at) {
    Bytes damaged = small_.cold;
    damaged[at] ^= static_cast<uint8_t>(1 << input_.uniform(0, 7));
    const Status s = load(*small_.store, damaged);
    ASSERT_FALSE(s.is_ok()) << "byte " << at;
    ASSERT_EQ(s.message().substr(0, 9), "sequence:") << s.message();
  }
  expect_unchanged();
}

TEST_P(ColdDamage, EveryTruncationIsRefused) {
  for (size_t size = 0; size < small_.cold.size(); ++size) {
    ASSERT_FALSE(load_sequence(*small_.store, small_.cold.data(), size).is_ok()) << size;
  }
  Bytes longer = small_.cold;
  longer.push_back(0);
  EXPECT_EQ(load(*small_.store, longer).code(), StatusCode::kCorrupt);
  EXPECT_EQ(load_sequence(*small_.store, nullptr, 9).status().code(), StatusCode::kInvalidArgument);
  expect_unchanged();
}

// The container of other chunks, all of its checksums right.
Bytes resealed(const Bytes& cold, const ContainerReader& reader,
               const std::function<void(ChunkKey*, Bytes*, bool*)>& change) {
  ChunkBlock block;
  for (size_t i = 0; i < reader.chunks().size(); ++i) {
    ChunkKey key = reader.chunks()[i].key;
    Bytes payload;
    EXPECT_TRUE(reader.read(static_cast<int64_t>(i), &payload));
    bool keep = true;
    change(&key, &payload, &keep);
    if (keep) block.add(key, payload);
  }
  std::vector<ChunkBlock> blocks;
  blocks.push_back(std::move(block));
  EXPECT_GE(cold.size(), size_t{64});
  return assemble_container(blocks);
}

TEST_P(ColdDamage, HasCodesToDamage) {
  const auto reader = ContainerReader::from_bytes(small_.cold, "cold");
  ASSERT_TRUE(reader.is_ok());
  const auto codebooks =
      std::count_if(reader->chunks().begin(), reader->chunks().end(),
                    [](const ChunkEntry& c) { return c.key.kind == ChunkKind::kCodebook; });
  EXPECT_GE(codebooks, 1) << "no page of the small sequence is worth coding";
}

// Damage that every checksum agrees with: what gets in must be a state that can be lived with.
TEST_P(ColdDamage, ResealedChunksAreLookedAt) {
  const auto reader = ContainerReader::from_bytes(small_.cold, "cold");
  ASSERT_TRUE(reader.is_ok());
  EXPECT_TRUE(resealed(small_.cold, *reader, [](ChunkKey*, Bytes*, bool*) {}) == small_.cold)
      << "the test seals as the library does";
  const auto chunks = static_cast<int32_t>(reader->chunks().size());
  int32_t refused = 0;
  for (int32_t i = 0; i < 1500; ++i) {
    const int32_t which = input_.uniform(0, chunks - 1), what = input_.uniform(0, 9);
    int32_t at = 0;
    const Bytes changed = resealed(small_.cold, *reader, [&](ChunkKey* key, Bytes* x, bool* keep) {
      if (at++ != which) return;
      const auto last = static_cast<int32_t>(x->size()) - 1;
      if (what == 0) {
        *keep = false;
      } else if (what == 1) {
        x->resize(input_.uniform(0, last));
      } else if (what == 2) {
        x->push_back(static_cast<uint8_t>(input_.uniform(0, 255)));
      } else if (what == 3) {
        key->page += input_.uniform(1, 5);
      } else {
        (*x)[input_.uniform(0, last)] ^= static_cast<uint8_t>(1 << input_.uniform(0, 7));
      }
    });
    const Result<SequenceId> id = load_sequence(*small_.store, changed.data(), changed.size());
    if (id) {
      const Bytes exported = state_bytes(*small_.store, *id);
      EXPECT_FALSE(exported.empty());
      EXPECT_TRUE(small_.store->release(*id));
    }
    refused += id.is_ok() ? 0 : 1;
    ASSERT_FALSE(id.is_ok() && (what <= 2)) << "chunk " << which << ", change " << what;
  }
  EXPECT_GT(refused, 500);
  expect_unchanged();
}

TEST_P(ColdDamage, ChunksOfAnythingElseAreRefusedUnlessOptional) {
  const auto reader = ContainerReader::from_bytes(small_.cold, "cold");
  for (const bool optional : {false, true}) {
    for (const uint16_t kind : {uint16_t{7}, uint16_t{999}}) {
      ChunkBlock block;
      for (size_t i = 0; i < reader->chunks().size(); ++i) {
        Bytes payload;
        ASSERT_TRUE(reader->read(static_cast<int64_t>(i), &payload));
        block.add(reader->chunks()[i].key, payload);
      }
      ChunkKey key;
      key.kind = static_cast<ChunkKind>(kind);
      block.add(key, {1, 2, 3}, optional);
      std::vector<ChunkBlock> blocks;
      blocks.push_back(std::move(block));
      const Status s = load(*small_.store, assemble_container(blocks));
      const bool skipped = kind == 999 && optional;
      EXPECT_EQ(s.is_ok(), skipped) << kind << s.message();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Stores, ColdDamage, ::testing::Values(false, true),
                         [](const auto& coded) { return coded.param ? "coded" : "tiered"; });

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

// The cold tier lets nothing in but an intact sequence.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "codec/file/container_format.h"
#include "tests/store/support/coded_world.h"
#include "tests/store/support/cold_sequence.h"
#include "tierkv/cold.h"

namespace tierkv::testing {
namespace {

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

enum class Kind { kTiered, kCoded, kFixed };

KvStoreConfig config_of(Kind kind, RandomInput* input) {
  if (kind == Kind::kTiered) return small_config();
  KvStoreConfig c = small_coded_config(input);
  if (kind == Kind::kCoded) return c;
  c.coded.fixed_blocks = true;
  c.coded.fixed_format = token_wise_tier(4, 4);
  c.policy.sink_tokens = 3;
  return c;
}

class ColdDamage : public ::testing::TestWithParam<Kind> {
 protected:
  ColdDamage()
      : small_(config_of(GetParam(), &input_), GetParam() == Kind::kTiered ? 140 : 90, &input_),
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

const char* name_of(Kind kind) {
  constexpr const char* kAll[] = {"tiered", "coded", "fixed"};
  return kAll[static_cast<int32_t>(kind)];
}

INSTANTIATE_TEST_SUITE_P(Stores, ColdDamage,
                         ::testing::Values(Kind::kTiered, Kind::kCoded, Kind::kFixed),
                         [](const auto& made) { return name_of(made.param); });

}  // namespace
}  // namespace tierkv::testing

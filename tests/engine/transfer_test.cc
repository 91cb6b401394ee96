// SPDX-License-Identifier: Apache-2.0
// Sequences between stores, and hostile bytes.
#include <fstream>
#include <iterator>
#include <new>
#include <utility>

#include "store/transfer/sequence_chunks.h"
#include "tests/engine/support/changed_bytes.h"
#include "tests/engine/support/feed.h"
#include "tests/engine/support/owned_parts.h"
#include "tests/engine/support/tiers_world.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

class SequenceTransfer : public RandomTest {
 protected:
  static std::vector<uint16_t> values(KvStore* engine, SequenceId id, const CacheLayout& shape) {
    const int32_t n = *engine->num_tokens(id);
    std::vector<uint16_t> all;
    for (int32_t l = 0; l < shape.num_layers; ++l) {
      std::vector<uint16_t> k(int64_t{n} * shape.num_kv_heads * shape.head_dim), v(k.size());
      EXPECT_TRUE(engine->decode_range({id, l, 0, n, DType::kFloat16, k.data(), v.data()}));
      all.insert(all.end(), k.begin(), k.end());
      all.insert(all.end(), v.begin(), v.end());
    }
    return all;
  }
};

TEST_F(SequenceTransfer, StoresOfUnequalCapacityAgree) {
  const StoreConfig small = make_config({});
  ConfigChoice choice;
  choice.max_sequences = 9;
  choice.max_tokens = 3000;
  choice.pages = 1000;
  const StoreConfig large = make_config(choice);
  const Feed feed(small.layout, 660, &rng_), other(small.layout, 400, &rng_);
  OneSequence from(small, feed, 600), to(large), with_books(large, other, 400);
  const std::vector<uint8_t> bytes = from.bytes();
  std::vector<SequenceId> ids;
  // A store without codebooks takes those of the sequence; one with its own codes the blocks anew.
  for (OneSequence* one : {&to, &with_books}) {
    KvStore* engine = one->store.engine.get();
    const Result<SequenceId> id = engine->import_sequence(bytes.data(), bytes.size());
    ASSERT_TRUE(id) << id.status().message();
    EXPECT_EQ(values(engine, *id, small.layout),
              values(from.store.engine.get(), from.id, small.layout));
    if (one == &to) {
      EXPECT_EQ(*engine->export_sequence(*id), bytes);
    }
    ids.push_back(*id);
  }
  // All go on alike.
  ASSERT_TRUE(feed.give(from.store.engine.get(), from.id, 600, 60));
  ASSERT_TRUE(feed.give(to.store.engine.get(), ids[0], 600, 60));
  EXPECT_EQ(*to.store.engine->export_sequence(ids[0]), from.bytes());
  ASSERT_TRUE(feed.give(with_books.store.engine.get(), ids[1], 600, 60));
  EXPECT_EQ(values(with_books.store.engine.get(), ids[1], small.layout),
            values(from.store.engine.get(), from.id, small.layout));
}

// After a truncation inside the body all tokens of a sequence lie in it. A store whose max_tokens
// they just reach takes them.
TEST_F(SequenceTransfer, ATruncatedSequenceFillsAStore) {
  for (const int32_t kind : {0, 1, 2}) {
    ConfigChoice choice;
    choice.max_tokens = 2000;
    StoreConfig config = make_config(choice);
    if (kind == 1) config.format = TiersFormat{};
    if (kind == 2) config.format = ChannelFormat{};
    config.raw_layers = {0};
    give_pages(800, &config);
    const Feed feed(config.layout, 1100, &rng_);
    OneSequence from(config, feed, 1100);
    for (int32_t tokens = 1024; tokens > 0; tokens -= 64) {
      ASSERT_TRUE(from.store.engine->truncate(from.id, tokens));
      const std::vector<uint8_t> bytes = from.bytes();
      StoreConfig small = config;
      small.max_tokens = tokens;
      OneSequence to(small);
      const auto id = to.store.engine->import_sequence(bytes.data(), bytes.size());
      ASSERT_TRUE(id) << kind << " " << tokens << " " << id.status().message();
    }
  }
}

TEST_F(SequenceTransfer, ACompressedFileIsNamed) {
  std::ifstream file(TIERKV_SOURCE_DIR "/tests/golden/containers/k4v2_window_8.tkv",
                     std::ios::binary);
  const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
  ASSERT_FALSE(bytes.empty());
  OneSequence one(make_config({}));
  const auto id = one.store.engine->import_sequence(bytes.data(), bytes.size());
  ASSERT_FALSE(id);
  EXPECT_EQ(id.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(id.status().message().find(".tkv container"), std::string::npos);
}

// Long enough for several threads.
TEST_F(SequenceTransfer, LongSequencesIntoMemoryOfTheCaller) {
  for (const int32_t kind : {0, 1, 2}) {
    ConfigChoice choice;
    choice.max_tokens = 5200;
    choice.pages = 8000;
    StoreConfig config = make_config(choice);
    if (kind == 1) config.format = TiersFormat{};
    if (kind == 2) config.format = ChannelFormat{};
    for (int32_t l = 1; l < config.layout.num_layers; ++l) config.raw_layers.push_back(l);
    give_pages(8000, &config);
    const Feed feed(config.layout, 5000, &rng_);
    OneSequence from(config, feed, 5000);
    KvStore* engine = from.store.engine.get();
    const std::vector<uint8_t> bytes = from.bytes();
    ASSERT_GT(bytes.size(), size_t{2} << 20);
    std::vector<uint8_t> given;
    const Status refused = engine->export_sequence(from.id, [&](size_t size) {
      given.assign(size, 0xee);
      return nullptr;
    });
    EXPECT_EQ(refused.code(), StatusCode::kBufferTooSmall);
    EXPECT_EQ(engine->export_sequence(from.id, ExportTarget{}).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(given, std::vector<uint8_t>(bytes.size(), 0xee));
    ASSERT_TRUE(engine->export_sequence(from.id, [&](size_t) { return given.data(); }));
    EXPECT_EQ(given, bytes);
    OneSequence to(config);
    const Result<SequenceId> id = to.store.engine->import_sequence(given.data(), given.size());
    ASSERT_TRUE(id) << id.status().message();
    EXPECT_EQ(*to.store.engine->export_sequence(*id), bytes);
  }
}

TEST_F(SequenceTransfer, OfLayersThatDoNotRotate) {
  for (const int32_t plain : {0, 1}) {
    StoreConfig config = make_config({});
    config.rope.resize(static_cast<size_t>(config.layout.num_layers), config.rope[0]);
    config.rope[static_cast<size_t>(plain)] = Rope();
    const Feed feed(config.layout, 400, &rng_);
    OneSequence from(config, feed, 400);
    const std::vector<uint8_t> bytes = from.bytes();
    OpenStore same(config);
    const Result<SequenceId> id = same.engine->import_sequence(bytes.data(), bytes.size());
    ASSERT_TRUE(id) << id.status().message();
    EXPECT_EQ(*same.engine->export_sequence(*id), bytes);
    config.rope[static_cast<size_t>(plain)] = config.rope[static_cast<size_t>(1 - plain)];
    OpenStore other(config);
    EXPECT_EQ(other.engine->import_sequence(bytes.data(), bytes.size()).status().code(),
              StatusCode::kInvalidArgument);
  }
}

TEST_F(SequenceTransfer, RefusesOtherStores) {
  const StoreConfig config = make_config({});
  const Feed feed(config.layout, 400, &rng_);
  OneSequence from(config, feed, 400);
  const std::vector<uint8_t> bytes = from.bytes();
  std::vector<StoreConfig> others(7, config);
  others[0].window_tokens = 32;
  others[1].sink_tokens = 5;
  others[2].format = CodedFormat{0.4};
  others[3].rope = {Rope::plain(500000, 64)};
  others[4].layout.sm_scale *= 2;
  others[5].raw_layers = {0};
  others[6] = make_config({64, 2, 2, 2, 4, 700, 200, true});
  for (const StoreConfig& other : others) {
    OpenStore store(other);
    const Result<SequenceId> id = store.engine->import_sequence(bytes.data(), bytes.size());
    EXPECT_EQ(id.status().code(), StatusCode::kInvalidArgument) << id.status().message();
  }
  StoreConfig shorter = config;
  shorter.max_tokens = 399;
  OpenStore store(shorter);
  EXPECT_EQ(store.engine->import_sequence(bytes.data(), bytes.size()).status().code(),
            StatusCode::kOutOfRange);
}

TEST_F(SequenceTransfer, AFlippedBitIsCorrupt) {
  const StoreConfig config = make_config({});
  const Feed feed(config.layout, 400, &rng_);
  OneSequence from(config, feed, 400);
  const std::vector<uint8_t> bytes = from.bytes();
  KvStore* engine = from.store.engine.get();
  const StoreUsage before = *engine->usage();
  for (int32_t i = 0; i < 300; ++i) {
    std::vector<uint8_t> bad = bytes;
    bad[static_cast<size_t>(pick(0, static_cast<int32_t>(bad.size()) - 1))] ^=
        static_cast<uint8_t>(1 << pick(0, 7));
    EXPECT_FALSE(engine->import_sequence(bad.data(), bad.size()));
    bad.resize(static_cast<size_t>(pick(0, static_cast<int32_t>(bytes.size()) - 1)));
    EXPECT_FALSE(engine->import_sequence(bad.data(), bad.size()));
  }
  EXPECT_EQ(engine->usage()->pages_free, before.pages_free);
  EXPECT_EQ(engine->usage()->sequences, 1);
}

// Codebooks are the store's for good: those of a sequence that is refused at its end are not.
TEST_F(SequenceTransfer, ARefusedSequenceLeavesNoCodebooks) {
  const StoreConfig config = make_config({});
  const Feed feed(config.layout, 400, &rng_), other(config.layout, 400, &rng_);
  OneSequence from(config, feed, 400), fresh(config), to(config);
  std::vector<uint8_t> bytes = from.bytes();
  bytes[chunks_of(bytes).back().offset + 100] ^= 1;
  const auto refused = to.store.engine->import_sequence(bytes.data(), bytes.size());
  EXPECT_EQ(refused.status().code(), StatusCode::kCorrupt);
  EXPECT_NE(refused.status().message().find("checksum"), std::string::npos)
      << refused.status().message();
  for (OneSequence* one : {&fresh, &to}) {
    ASSERT_TRUE(other.give(one->store.engine.get(), one->id, 0, 400));
  }
  EXPECT_EQ(to.bytes(), fresh.bytes());
}

// Memory of the caller that held a sequence before holds none then.
TEST_F(SequenceTransfer, AnExportThatFailsLeavesNoSequence) {
  const StoreConfig config = make_config({});
  const Feed feed(config.layout, 400, &rng_);
  OneSequence from(config, feed, 400);
  KvStore* engine = from.store.engine.get();
  std::vector<uint8_t> bytes = from.bytes();
  Result<store::SequenceSource> source = from.store.place->export_parts(from.layers(400));
  ASSERT_TRUE(source);
  const auto into = [&](size_t size) { return size == bytes.size() ? bytes.data() : nullptr; };
  const auto identity = from.store.place->identity();
  ASSERT_TRUE(store::write_sequence(config, identity, *source, into));
  EXPECT_EQ(bytes, from.bytes());
  source->write = [](const auto&, auto*) { return Status(StatusCode::kCuda, "wait"); };
  EXPECT_EQ(store::write_sequence(config, identity, *source, into).code(), StatusCode::kCuda);
  // As of bytes that are no container.
  EXPECT_EQ(engine->import_sequence(bytes.data(), bytes.size()).status().code(),
            StatusCode::kInvalidArgument);
}

// Its slot and pages are free again.
TEST_F(SequenceTransfer, AnImportWithoutMemoryLeavesNothing) {
  for (const bool tiers : {false, true}) {
    StoreConfig config = make_config({});
    if (tiers) config.format = TiersFormat{};
    const Feed feed(config.layout, 400, &rng_);
    OneSequence from(config, feed, 400);
    const std::vector<uint8_t> bytes = from.bytes();
    const int64_t free = from.store.engine->usage()->pages_free;
    const OwnedParts owned(*from.store.place->export_parts(from.layers(400)));
    store::SequenceParts parts = owned.views();
    // The damage is in the last row: others have been written by then, or at least planned.
    parts.verify = [&](int64_t first, int64_t count) -> Status {
      if (first + count == static_cast<int64_t>(owned.raw.size())) throw std::bad_alloc();
      return Status::ok();
    };
    EXPECT_EQ(from.store.place->import_parts(from.id.slot + 1, parts).code(),
              StatusCode::kOutOfMemory);
    EXPECT_EQ(from.store.engine->usage()->pages_free, free);
    const Result<SequenceId> id = from.store.engine->import_sequence(bytes.data(), bytes.size());
    ASSERT_TRUE(id) << id.status().message();
    EXPECT_EQ(id->slot, from.id.slot + 1);
    EXPECT_EQ(*from.store.engine->export_sequence(*id), bytes);
    InvariantChecker laws;
    EXPECT_TRUE(laws.check(from.store.place->pages().allocator));
  }
}

// A side's bytes come page by page, so pages of another size would take them for other tokens.
TEST_F(SequenceTransfer, TiersOfOtherPagesAreRefused) {
  const StoreConfig config = tiers_config(64, 900, true, &rng_);
  StoreConfig other = config;
  other.page_bytes = 2 * OpenStore(config).place->pages().page_bytes;
  OpenStore store(other);
  for (const int32_t tokens : {60, 400}) {
    const Feed feed(config.layout, tokens, &rng_);
    const std::vector<uint8_t> bytes = OneSequence(config, feed, tokens).bytes();
    EXPECT_EQ(store.engine->import_sequence(bytes.data(), bytes.size()).status().code(),
              StatusCode::kInvalidArgument);
  }
}

// Whatever it held before: other tokens fix other means and steps, and significances are compared
// with the mean of those before them.
TEST_F(SequenceTransfer, ATruncationToNothingForgetsEverything) {
  for (const int32_t kind : {0, 1, 2}) {
    SCOPED_TRACE(kind);
    StoreConfig config = kind == 1 ? tiers_config(64, 900, true, &rng_) : make_config({});
    if (kind == 2) config.format = ChannelFormat{};
    if (kind == 2) give_pages(200, &config);
    const Feed feed(config.layout, 400, &rng_);
    Feed before(config.layout, 400, &rng_);
    for (std::vector<uint16_t>* x : {&before.k, &before.v}) {
      for (uint16_t& e : *x) e = float_to_half(half_to_float(e) / 4 + 1);
    }
    for (float& x : before.significance) x *= 100;
    const auto give = [&](const OneSequence& to, const Feed& from) {
      for (const auto& [first, count] : {std::pair(0, 20), std::pair(20, 380)}) {
        ASSERT_TRUE(to.store.engine->begin({&to.id, 1}, count));
        for (int32_t l = 0; l < config.layout.num_layers; ++l) {
          LayerAppend call = from.call(to.id, l, first, count);
          const int64_t row = int64_t{l} * config.layout.num_kv_heads * from.tokens;
          call.significance = from.significance.data() + row + first;
          call.stride = from.tokens;
          ASSERT_TRUE(to.store.engine->append(call));
        }
      }
    };
    OneSequence fresh(config), used(config);
    give(fresh, feed);
    give(used, before);
    KvStore* engine = used.store.engine.get();
    ASSERT_TRUE(engine->truncate(used.id, 0));
    EXPECT_EQ(engine->usage()->pages_free, engine->usage()->pages);
    give(used, feed);
    // Codebooks are the store's, so bytes may differ where values do not.
    EXPECT_TRUE(values(engine, used.id, config.layout) ==
                values(fresh.store.engine.get(), fresh.id, config.layout));
  }
}

// Checksums that are right around bytes that are not: refused, or a sequence that works.
TEST_F(SequenceTransfer, HostileChunksDoNoHarm) {
  for (const int32_t kind : {0, 1, 2}) {
    const bool long_enough = kind > 0;
    StoreConfig config = make_config({});
    if (kind == 2) config.format = ChannelFormat{};
    give_pages(200, &config);
    const Feed feed(config.layout, 460, &rng_);
    OneSequence from(config, feed, long_enough ? 400 : 200);
    KvStore* engine = from.store.engine.get();
    ASSERT_TRUE(engine->truncate(from.id, long_enough ? 290 : 140));
    const std::vector<uint8_t> bytes = from.bytes();
    const auto chunks = static_cast<int32_t>(chunks_of(bytes).size());
    int32_t accepted = 0;
    for (int32_t i = 0; i < 300; ++i) {
      const auto victim = static_cast<size_t>(pick(1, chunks - 1));
      const auto bad = changed_bytes(bytes, [&](size_t c, std::vector<uint8_t>* payload) {
        if (c != victim || payload->empty()) return;
        const auto at = static_cast<size_t>(pick(0, static_cast<int32_t>(payload->size()) - 1));
        // The beginning of a chunk has most of its structure.
        const size_t place = pick(0, 1) == 0 ? at % std::min<size_t>(payload->size(), 40) : at;
        switch (pick(0, 3)) {
          case 0:
            (*payload)[place] ^= static_cast<uint8_t>(1 << pick(0, 7));
            break;
          case 1:
            (*payload)[place] = static_cast<uint8_t>(pick(0, 255));
            break;
          case 2:
            payload->resize(place);
            break;
          default:
            payload->insert(payload->begin() + static_cast<int64_t>(place), 3, 0xff);
        }
      });
      const Result<SequenceId> id = engine->import_sequence(bad.data(), bad.size());
      if (!id) continue;
      ++accepted;
      const int32_t n = *engine->num_tokens(*id);
      (void)values(engine, *id, config.layout);
      std::vector<uint16_t> out(4 * 64);
      LayerAttend call;
      call.sequences = {&*id, 1};
      call.q = feed.q.data();
      call.out = out.data();
      call.count_query = true;
      EXPECT_TRUE(engine->attend(call));
      (void)feed.give(engine, *id, n, 100);
      (void)engine->truncate(*id, n / 2);
      EXPECT_TRUE(engine->export_sequence(*id));
      ASSERT_TRUE(engine->release(*id));
    }
    EXPECT_GT(accepted, 0);
    EXPECT_LT(accepted, 280);
    InvariantChecker laws;
    EXPECT_TRUE(laws.check(from.store.place->pages().allocator));
    EXPECT_EQ(from.bytes(), bytes);
  }
}

}  // namespace
}  // namespace tierkv

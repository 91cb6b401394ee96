// What calls of coded stores refuse, and that a refused call changes nothing; codebooks and
// statistics.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "codec/file/container_format.h"
#include "codec/format/codebook.h"
#include "store/coded/coded_bytes.h"
#include "store/tiers/host_store.h"
#include "tests/store/support/coded_world.h"
#include "tests/store/support/damaged_import.h"

namespace tierkv::testing {
namespace {

class CodedCalls : public ::testing::Test {
 protected:
  CodedCalls() : config_(small_coded_config(&input_)), world_(config_, &input_) {}

  std::vector<uint8_t> exported(const CodedModel& m) {
    return *world_.store().export_sequence(m.id);
  }

  RandomInput input_;
  KvStoreConfig config_;
  CodedWorld world_;
};

TEST_F(CodedCalls, ScoresAreRefusedByName) {
  CodedModel m;
  ASSERT_TRUE(world_.add(&m));
  ASSERT_TRUE(world_.prompt({&m}, 3));
  EXPECT_EQ(world_.store().score_prompt({}).code(), StatusCode::kUnsupported);
  EXPECT_EQ(world_.store().update_scores({}).code(), StatusCode::kUnsupported);
  ASSERT_TRUE(world_.end_prompt({&m}));
  std::vector<uint16_t> q(1 << 12), out(q.size());
  AttendRequest request;
  request.sequences = {&m.id, 1};
  request.q = q.data();
  request.out = out.data();
  EXPECT_TRUE(world_.store().attend(request));
  request.count_query = true;
  EXPECT_EQ(world_.store().attend(request).code(), StatusCode::kUnsupported);
}

TEST_F(CodedCalls, BadValuesChangeNothing) {
  CodedModel m;
  ASSERT_TRUE(world_.add(&m));
  ASSERT_TRUE(world_.prompt({&m}, 150));
  ASSERT_TRUE(world_.end_prompt({&m}));
  ASSERT_TRUE(world_.store().begin_step({&m.id, 1}, 1));
  std::vector<uint16_t> good(128, float_to_half(0.5f));
  for (const uint16_t bits : {0x7c00, 0xfc00, 0x7e00}) {
    std::vector<uint16_t> bad = good;
    bad[77] = bits;
    EXPECT_EQ(world_.store().append({{&m.id, 1}, 0, 1, good.data(), bad.data()}).code(),
              StatusCode::kNonFinite);
    EXPECT_EQ(world_.store().append({{&m.id, 1}, 0, 1, bad.data(), good.data()}).code(),
              StatusCode::kNonFinite);
  }
  std::vector<uint16_t> far = good;
  far[5] = float_to_half(60000.0f);  // 16 bits hold codes up to 32767
  EXPECT_EQ(world_.store().append({{&m.id, 1}, 0, 1, good.data(), far.data()}).code(),
            StatusCode::kOutOfRange);
  EXPECT_TRUE(world_.store().append({{&m.id, 1}, 0, 1, good.data(), good.data()}));
  EXPECT_TRUE(world_.store().append({{&m.id, 1}, 1, 1, good.data(), good.data()}));
}

// In a prompt codes are only known at its end.
TEST_F(CodedCalls, APromptWithoutACodeStaysAPrompt) {
  for (const int32_t at : {10, 140}) {  // a coded token, one of the window
    CodedModel m;
    ASSERT_TRUE(world_.add(&m));
    ASSERT_TRUE(world_.store().begin_prompt({&m.id, 1}, 150));
    std::vector<uint16_t> x(150 * 128, float_to_half(0.5f));
    x[at * 128 + 3] = float_to_half(65504.0f);
    for (int32_t layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(world_.store().append({{&m.id, 1}, layer, 150, x.data(), x.data()}));
    }
    const int32_t free = world_.store().stats()->pages_free;
    EXPECT_EQ(world_.store().end_prompt({&m.id, 1}).code(), StatusCode::kOutOfRange);
    EXPECT_EQ(world_.store().stats()->pages_free, free);
    EXPECT_EQ(broken_law(world_.view()), "");
    EXPECT_FALSE(world_.store().books().ready());
    ASSERT_TRUE(world_.store().release(m.id));
  }
}

TEST_F(CodedCalls, OutOfPagesChangesNothing) {
  KvStoreConfig c = config_;
  c.num_pages = 32;
  CodedWorld world(c, &input_);
  world.set_spread(30);  // raw blocks: steps need pages often
  CodedModel m, other;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 150));
  ASSERT_TRUE(world.end_prompt({&m}));
  ASSERT_TRUE(world.add(&other));
  Status refused = Status::ok();
  while (refused) refused = world.prompt({&other}, 64);
  ASSERT_EQ(refused.code(), StatusCode::kOutOfPages);
  ASSERT_GT(other.tokens, 0);
  refused = Status::ok();
  for (int32_t i = 0; i < 100 && refused; ++i) {
    const std::vector<uint8_t> before = *world.store().export_sequence(m.id);
    refused = world.step({&m}, 1);
    EXPECT_TRUE(refused || *world.store().export_sequence(m.id) == before);
  }
  EXPECT_EQ(refused.code(), StatusCode::kOutOfPages);
  EXPECT_EQ(broken_law(world.view()), "");
  EXPECT_EQ(world.difference(m), "");
  EXPECT_EQ(world.end_prompt({&other}).code(), StatusCode::kOutOfPages);
  CodedModel copy;
  EXPECT_EQ(world.fork(m, &copy).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(world.transfer(m, &copy).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(broken_law(world.view()), "");
  ASSERT_TRUE(world.store().release(other.id));
  EXPECT_TRUE(world.step({&m}, 1));
  EXPECT_EQ(world.difference(m), "");
}

TEST_F(CodedCalls, RefusesDamagedSequences) {
  CodedModel m;
  ASSERT_TRUE(world_.add(&m));
  ASSERT_TRUE(world_.prompt({&m}, 170));
  ASSERT_TRUE(world_.end_prompt({&m}));
  const std::vector<uint8_t> bytes = exported(m);
  const auto import = [&](const std::vector<uint8_t>& b) {
    return world_.store().import_sequence(b.data(), b.size()).status().code();
  };
  const int32_t free = world_.store().stats()->pages_free;
  expect_refused(&world_.store(), {bytes, 400, 3}, &input_);
  // Damage that the checksum agrees with: the last raw value of the last row.
  std::vector<uint8_t> changed = bytes;
  changed[bytes.size() - 9] = 0x7c;
  const size_t row = (bytes.size() - 8);
  size_t first = row;
  const uint64_t sum_of_last = [&] {
    uint64_t x;
    std::memcpy(&x, &bytes[row], 8);
    return x;
  }();
  while (first > 0 && xxh3(&bytes[first], row - first) != sum_of_last) --first;
  ASSERT_GT(first, 0U);
  const uint64_t sum = xxh3(&changed[first], row - first);
  std::memcpy(&changed[row], &sum, 8);
  EXPECT_EQ(import(changed), StatusCode::kCorrupt);
  EXPECT_EQ(world_.store().stats()->pages_free, free);
}

TEST_F(CodedCalls, AnotherStoreTakesASequenceWithOtherCodebooks) {
  CodedModel m;
  ASSERT_TRUE(world_.add(&m));
  ASSERT_TRUE(world_.prompt({&m}, 300));
  ASSERT_TRUE(world_.end_prompt({&m}));
  const std::vector<uint8_t> bytes = exported(m);
  // One that has none adopts them.
  auto empty = std::move(*CodedHostStore::make(config_));
  const auto id = empty->import_sequence(bytes.data(), bytes.size());
  ASSERT_TRUE(id.is_ok()) << id.status().message();
  EXPECT_TRUE(*empty->export_sequence(*id) == bytes);
  EXPECT_TRUE(empty->books() == world_.store().books());
  // One that has made its own codes the blocks anew; back home it is what it was.
  KvStoreConfig c = config_;
  c.coded.max_length = 9;
  CodedWorld other(c, &input_);
  other.set_spread(4);
  CodedModel first;
  ASSERT_TRUE(other.add(&first));
  ASSERT_TRUE(other.prompt({&first}, 100));
  ASSERT_TRUE(other.end_prompt({&first}));
  const auto there = other.store().import_sequence(bytes.data(), bytes.size());
  ASSERT_TRUE(there.is_ok()) << there.status().message();
  EXPECT_EQ(broken_law(other.view()), "");
  CodedModel moved = m;
  moved.id = *there;
  EXPECT_EQ(other.difference(moved), "");
  const std::vector<uint8_t> back = *other.store().export_sequence(*there);
  EXPECT_FALSE(back == bytes);
  const auto home = empty->import_sequence(back.data(), back.size());
  ASSERT_TRUE(home.is_ok());
  EXPECT_TRUE(*empty->export_sequence(*home) == bytes);
  c = config_;
  c.coded.key_steps[0] *= 1.5f;
  auto stranger = std::move(*CodedHostStore::make(c));
  EXPECT_EQ(stranger->import_sequence(bytes.data(), bytes.size()).status().code(),
            StatusCode::kInvalidArgument);
}

Codebook pair_book(RandomInput* input, Component component, int32_t streams) {
  CodeHistogram histogram(component, 64);
  std::vector<int16_t> codes(64 * 64);
  for (int16_t& x : codes) x = static_cast<int16_t>(input->uniform(-3, 3));
  histogram.add(codes.data(), 64);
  CodebookSpec spec;
  spec.mode = BlockMode::kPair;
  spec.streams_per_lane = streams;
  return *build_codebook(histogram, spec);
}

// A call of attention on a device decodes keys and values with as many streams each.
TEST_F(CodedCalls, AStoreWithoutCodebooksAdoptsOnlyWhatItCouldHaveMade) {
  for (const int32_t value_streams : {1, 2}) {
    KvStoreConfig c = config_;
    c.coded.codebooks = CodebookSource::kGiven;
    for (const Component component : {Component::kKey, Component::kValue}) {
      const int32_t streams = component == Component::kKey ? 1 : value_streams;
      serialize_codebook(pair_book(&input_, component, streams), &c.coded.given.emplace_back());
    }
    CodedWorld world(c, &input_);
    CodedModel m;
    ASSERT_TRUE(world.add(&m));
    ASSERT_TRUE(world.prompt({&m}, 150));
    ASSERT_TRUE(world.end_prompt({&m}));
    const std::vector<uint8_t> bytes = *world.store().export_sequence(m.id);
    auto empty = std::move(*CodedHostStore::make(config_));
    EXPECT_EQ(empty->import_sequence(bytes.data(), bytes.size()).status().code(),
              value_streams == 1 ? StatusCode::kOk : StatusCode::kInvalidArgument);
    EXPECT_EQ(empty->books().ready(), value_streams == 1);
  }
}

// The bytes of a sequence that was read, with its codebooks.
std::vector<uint8_t> written(const KvStoreConfig& config, const ImportedCodedSequence& sequence) {
  std::vector<uint8_t> bytes = export_coded_header(config, sequence.books, sequence.info);
  const int32_t dim = config.layout.head_dim, heads = config.layout.num_kv_heads;
  for (size_t w = 0; w < sequence.rows.size(); ++w) {
    const ImportedCodedRow& from = sequence.rows[w];
    const auto within = static_cast<int32_t>(w);
    CodedRowContent row;
    for (const Component c : {Component::kKey, Component::kValue}) {
      const auto i = static_cast<size_t>(c);
      row.steps[i] = from.steps[i];
      row.means[i] = from.means[i];
      row.raw[i] = from.raw[i];
      for (size_t at = 0; at < from.codes[i].size(); at += kBlockTokens * dim) {
        sequence.books.encode(&from.codes[i][at], dim, within / heads, c,
                              &row.blocks[i].emplace_back());
      }
    }
    export_coded_row(row, &bytes);
  }
  return bytes;
}

TEST_F(CodedCalls, StepsOfAPromptNeedATokenAndTravelWithTheSequence) {
  KvStoreConfig c = config_;
  use_prompt_steps(&c, &input_);
  CodedWorld world(c, &input_);
  CodedModel m;
  ASSERT_TRUE(world.add(&m));
  const Status empty = world.end_prompt({&m});
  EXPECT_EQ(empty.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(empty.message().find("coded.steps"), std::string::npos) << empty.message();
  ASSERT_TRUE(world.prompt({&m}, 150));
  ASSERT_TRUE(world.end_prompt({&m}));
  EXPECT_EQ(world.difference(m), "");
  const std::vector<uint8_t> bytes = *world.store().export_sequence(m.id);
  // A store that measures its own steps takes a sequence's; one of given steps has others.
  auto other = std::move(*CodedHostStore::make(c));
  const Result<SequenceId> copy = other->import_sequence(bytes.data(), bytes.size());
  ASSERT_TRUE(copy.is_ok()) << copy.status().message();
  EXPECT_TRUE(*other->export_sequence(*copy) == bytes);
  auto stranger = std::move(*CodedHostStore::make(config_));
  EXPECT_EQ(stranger->import_sequence(bytes.data(), bytes.size()).status().code(),
            StatusCode::kInvalidArgument);
}

// All values alike, and all zero: a step all the same.
TEST_F(CodedCalls, ConstantPromptsHaveAStep) {
  KvStoreConfig c = config_;
  use_prompt_steps(&c, &input_);
  const int64_t values = 150ll * c.layout.num_kv_heads * c.layout.head_dim;
  for (const MeanSource means : {MeanSource::kNone, MeanSource::kPrompt}) {
    for (const float x : {0.0f, 3.0f, -65504.0f, 0x1p-24f}) {
      c.coded.means = means;
      auto store = std::move(*CodedHostStore::make(c));
      const SequenceId id = *store->add_sequence();
      ASSERT_TRUE(store->begin_prompt({&id, 1}, 150));
      const std::vector<uint16_t> same(values, float_to_half(x));
      for (int32_t layer = 0; layer < c.layout.num_layers; ++layer) {
        ASSERT_TRUE(store->append({{&id, 1}, layer, 150, same.data(), same.data()}));
      }
      const Status s = store->end_prompt({&id, 1});
      ASSERT_TRUE(s.is_ok()) << s.message();
      const float width = means == MeanSource::kPrompt ? 0.0f : std::fabs(x);
      const float step = width > 0 ? c.coded.key_relative * width : 1.0f;
      EXPECT_EQ(store->view().step(Component::kKey, 0), step) << x;
    }
  }
}

// Truncate makes tokens of a block raw again, and a step codes them once more.
TEST_F(CodedCalls, RefusesCodesThatCannotBeCodedAgain) {
  KvStoreConfig c = config_;
  c.coded.key_steps.assign(4, 1.0f);
  CodedWorld world(c, &input_);
  CodedModel m;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 150));
  ASSERT_TRUE(world.end_prompt({&m}));
  const std::vector<uint8_t> bytes = *world.store().export_sequence(m.id);
  ImportedCodedSequence sequence = *read_coded_sequence(c, bytes.data(), bytes.size());
  ASSERT_TRUE(written(c, sequence) == bytes);
  const struct {
    int16_t code;
    StatusCode status;
  } kCases[] = {{32752, StatusCode::kOk},
                {-32768, StatusCode::kOk},
                {32767, StatusCode::kCorrupt}};  // fp16 has 32768 in its place
  for (const auto& made : kCases) {
    sequence.rows[1].codes[0][70] = made.code;
    const std::vector<uint8_t> changed = written(c, sequence);
    EXPECT_EQ(world.store().import_sequence(changed.data(), changed.size()).status().code(),
              made.status)
        << made.code;
  }
}

// The first blocks make the codebooks, whether a prompt or a step codes them.
TEST_F(CodedCalls, AStepMakesCodebooks) {
  CodedModel m;
  ASSERT_TRUE(world_.add(&m));
  ASSERT_TRUE(world_.prompt({&m}, 20));
  ASSERT_TRUE(world_.end_prompt({&m}));
  EXPECT_FALSE(world_.store().books().ready());
  for (int32_t i = 0; i < 80; ++i) ASSERT_TRUE(world_.step({&m}, 1));
  EXPECT_TRUE(world_.store().books().ready());
  EXPECT_EQ(m.coded, 64);
  EXPECT_EQ(world_.difference(m), "");
}

// Two codebooks for each component, for narrow codes and for wide ones: each block is the smaller.
TEST_F(CodedCalls, AFamilyIsChosenFromPerBlock) {
  KvStoreConfig c = config_;
  c.coded.key_steps.assign(4, 1.0f);
  c.coded.value_steps.assign(4, 1.0f);
  c.coded.codebooks = CodebookSource::kGiven;
  constexpr float kSpreads[] = {0.3f, 2.5f};
  std::normal_distribution<float> normal;
  std::mt19937 rng(static_cast<uint32_t>(input_.uniform(0, INT32_MAX)));
  std::vector<Codebook> family;
  for (const Component component : {Component::kKey, Component::kValue}) {
    for (int32_t wide = 0; wide < 2; ++wide) {
      CodeHistogram histogram(component, 64);
      std::vector<int16_t> codes(64 * 64 * 20);
      for (int16_t& x : codes) {
        x = static_cast<int16_t>(std::lround(kSpreads[wide] * normal(rng)));
      }
      histogram.add(codes.data(), 64 * 20);
      CodebookSpec spec;
      spec.mode = BlockMode::kPair;
      spec.table_id = static_cast<uint8_t>(3 + wide);
      family.push_back(*build_codebook(histogram, spec));
      c.coded.given.emplace_back();
      serialize_codebook(family.back(), &c.coded.given.back());
    }
  }
  CodedWorld world(c, &input_);
  bool seen[2] = {false, false};
  for (const float spread : kSpreads) {
    world.set_spread(spread);
    CodedModel m;
    ASSERT_TRUE(world.add(&m));
    ASSERT_TRUE(world.prompt({&m}, 200));
    ASSERT_TRUE(world.end_prompt({&m}));
    EXPECT_EQ(world.difference(m), "");
    EXPECT_EQ(world.attention_difference(m, 0), "");
    const CodedBlockRef ref =
        world.view().keys[world.view().row_of(m.id.slot, 0, 0) * world.view().max_blocks];
    const CodedBlockHeader h = load_header(world.view().pages.base + int64_t{ref.offset} * 16);
    ASSERT_FALSE(is_raw_mode(h.mode));
    seen[h.table_id - 3] = true;
    CodedModel copy;
    EXPECT_TRUE(world.transfer(m, &copy));
  }
  EXPECT_TRUE(seen[0] && seen[1]);
}

TEST_F(CodedCalls, StatisticsCountWhatIsHeld) {
  KvStoreConfig c = config_;
  c.max_tokens = 3000;
  c.num_pages = 1000;
  c.policy.window_tokens = 64;
  CodedWorld world(c, &input_);
  world.set_spread(1.5f);
  CodedModel m;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 2600));
  EXPECT_LT(world.store().stats()->pool_gain(), 1.0) << "prompts are raw";
  ASSERT_TRUE(world.end_prompt({&m}));
  const StoreStats stats = *world.store().stats();
  EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kHigh)], 4 * 2496);
  EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kWindow)], 4 * 104);
  EXPECT_EQ(stats.raw_bytes, int64_t{4} * 2600 * 64 * 4);
  int64_t bytes = world.store().books().stored_bytes() + 4 * 64 * 4 + 4 * 104 * 64 * 4;
  for (int32_t r = 0; r < 4; ++r) {
    for (const Component component : {Component::kKey, Component::kValue}) {
      for (int32_t b = 0; b < 39; ++b) bytes += 16 * world.view().blocks(component, r)[b].units + 8;
    }
  }
  EXPECT_EQ(stats.nominal_bytes, bytes);
  EXPECT_GT(stats.nominal_ratio(), 3.0);
  EXPECT_GT(stats.pool_gain(), 0.85 * stats.nominal_ratio());
  EXPECT_LE(stats.pool_gain(), stats.nominal_ratio());
}

}  // namespace
}  // namespace tierkv::testing

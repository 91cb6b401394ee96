// What stores of channel blocks and their calls refuse, and that a refused call changes nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "codec/file/container_format.h"
#include "tests/store/support/channel_store_world.h"
#include "tests/store/support/damaged_import.h"
#include "tierkv/cold.h"

namespace tierkv::testing {
namespace {

class ChannelCalls : public ::testing::Test {
 protected:
  ChannelCalls() : config_(small_channel_config()), world_(config_, &input_) {}

  // A live sequence.
  ChannelModel live(int32_t tokens) {
    ChannelModel m;
    EXPECT_TRUE(world_.add(&m));
    EXPECT_TRUE(world_.prompt({&m}, tokens));
    EXPECT_TRUE(world_.end_prompt({&m}));
    return m;
  }

  RandomInput input_;
  KvStoreConfig config_;
  ChannelStoreWorld world_;
};

using Change = void (*)(KvStoreConfig*);

TEST(ChannelConfig, NamesWhatItRefuses) {
  const struct {
    Change change;
    StatusCode code;
    const char* name;
  } kCases[] = {
      {[](KvStoreConfig* c) { c->high_format = token_wise_tier(4, 4); }, StatusCode::kUnsupported,
       "high_format"},
      {[](KvStoreConfig* c) { c->low_format = raw_tier(); }, StatusCode::kUnsupported,
       "low_format"},
      {[](KvStoreConfig* c) { c->window_format = raw_tier(); }, StatusCode::kUnsupported,
       "window_format"},
      {[](KvStoreConfig* c) { c->policy.alpha_high = 2; }, StatusCode::kUnsupported, "alpha_high"},
      {[](KvStoreConfig* c) { c->policy.sink_tokens = 4; }, StatusCode::kUnsupported, "sink"},
      {[](KvStoreConfig* c) { c->score_interval = 4; }, StatusCode::kUnsupported, "score_interval"},
      {[](KvStoreConfig* c) { c->page_bytes = 13312; }, StatusCode::kUnsupported, "page_bytes"},
      {[](KvStoreConfig* c) { c->basis = std::make_shared<CacheBasis>(); },
       StatusCode::kUnsupported, "basis"},
      {[](KvStoreConfig* c) { c->coded.enabled = true; }, StatusCode::kUnsupported, "coded"},
      {[](KvStoreConfig* c) { c->layout.head_dim = 80; }, StatusCode::kUnsupported, "head_dim"},
      {[](KvStoreConfig* c) { c->channel.k_bits = 8; }, StatusCode::kUnsupported, "keys"},
      {[](KvStoreConfig* c) { c->channel.v_bits = 3; }, StatusCode::kUnsupported, "values"},
      {[](KvStoreConfig* c) { c->channel.block_tokens = 32; }, StatusCode::kUnsupported, "group"},
      {[](KvStoreConfig* c) {
         c->layout.head_dim = 256;
         c->channel.block_tokens = 128;
       },
       StatusCode::kUnsupported, "256"},
      {[](KvStoreConfig* c) { c->policy.window_tokens = 7; }, StatusCode::kInvalidArgument,
       "window_tokens"},
      {[](KvStoreConfig* c) { c->num_pages = 0; }, StatusCode::kInvalidArgument, "num_pages"},
      {[](KvStoreConfig* c) { c->max_sequences = 0; }, StatusCode::kInvalidArgument,
       "max_sequences"},
      {[](KvStoreConfig* c) { c->max_tokens = 1 << 30; }, StatusCode::kInvalidArgument,
       "max_tokens"},
  };
  EXPECT_TRUE(small_channel_config().validate());
  for (const auto& made : kCases) {
    KvStoreConfig config = small_channel_config();
    made.change(&config);
    const Status status = config.validate();
    EXPECT_EQ(status.code(), made.code) << made.name;
    EXPECT_NE(status.message().find(made.name), std::string::npos) << status.message();
    EXPECT_EQ(KvStore::create(config).status().code(), made.code) << made.name;
  }
}

TEST(ChannelConfig, IsPartOfTheStores) {
  const KvStoreConfig a = small_channel_config();
  KvStoreConfig b = a;
  EXPECT_TRUE(a == b);
  b.channel.v_bits = 2;
  EXPECT_TRUE(a != b);
  EXPECT_NE(to_json(b).find("\"channel\":{\"enabled\":true,\"k_bits\":4,\"v_bits\":2,"
                            "\"block_tokens\":64}"),
            std::string::npos);
  const auto store = KvStore::create(a);
  ASSERT_TRUE(store.is_ok());
  EXPECT_TRUE((*store)->config() == a);
  // 64 keys and values of 4 bits, 4 bytes a channel and a token; a raw tile takes 4096.
  EXPECT_EQ((*store)->page_bytes(), 64 * 64 + 64 * 4 + 64 * 4);
  b.channel.k_bits = 2;
  EXPECT_EQ((*KvStore::create(b))->page_bytes(), 2 * (64 * 32 + 64 * 4 + 64 * 4));
}

TEST_F(ChannelCalls, ScoresAreRefusedByName) {
  const ChannelModel m = live(3);
  EXPECT_EQ(world_.store().score_prompt({}).code(), StatusCode::kUnsupported);
  EXPECT_EQ(world_.store().update_scores({}).code(), StatusCode::kUnsupported);
  std::vector<uint16_t> q(4 * 64), out(q.size());
  AttendRequest request;
  request.sequences = {&m.id, 1};
  request.q = q.data();
  request.out = out.data();
  EXPECT_TRUE(world_.store().attend(request));
  request.count_query = true;
  EXPECT_EQ(world_.store().attend(request).code(), StatusCode::kUnsupported);
  request.count_query = false;
  q[5] = 0x7e00;
  EXPECT_EQ(world_.store().attend(request).code(), StatusCode::kNonFinite);
}

// The same queries in either type: outputs are one, rounded once to 11 or to 8 bits.
TEST_F(ChannelCalls, QueriesMayBeBFloat16) {
  const ChannelModel m = live(100);
  std::vector<uint16_t> half(2 * 4 * 64), bfloat(half), out(half.size()), rounded(half.size());
  for (size_t i = 0; i < half.size(); ++i) {
    bfloat[i] = float_to_bfloat16(input_.real(-1, 1));
    half[i] = float_to_half(bfloat16_to_float(bfloat[i]));
  }
  std::vector<float> lse(8), same(8);
  AttendRequest request;
  request.sequences = {&m.id, 1};
  request.q_len = 2;
  request.q = half.data();
  request.out = out.data();
  request.lse = lse.data();
  ASSERT_TRUE(world_.store().attend(request));
  request.dtype = DType::kBFloat16;
  request.q = bfloat.data();
  request.out = rounded.data();
  request.lse = same.data();
  ASSERT_TRUE(world_.store().attend(request));
  for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], same[i], 1e-3);
  for (size_t i = 0; i < out.size(); ++i) {
    const float x = half_to_float(out[i]);
    EXPECT_NEAR(bfloat16_to_float(rounded[i]), x, 0x1p-8f * std::fabs(x) + 2e-3f) << i;
  }
}

TEST_F(ChannelCalls, BadValuesChangeNothing) {
  ChannelModel m = live(79);
  for (const bool prompt : {true, false}) {
    if (prompt) {
      ASSERT_TRUE(world_.add(&m));
      ASSERT_TRUE(world_.prompt({&m}, 79));
      ASSERT_TRUE(world_.store().begin_prompt({&m.id, 1}, 1));
    } else {
      m = live(79);
      ASSERT_TRUE(world_.store().begin_step({&m.id, 1}, 1));
    }
    std::vector<uint16_t> good(128, float_to_half(0.5f));
    for (const uint16_t bits : {0x7c00, 0xfc00, 0x7e00}) {
      std::vector<uint16_t> bad = good;
      bad[77] = bits;
      EXPECT_EQ(world_.store().append({{&m.id, 1}, 0, 1, good.data(), bad.data()}).code(),
                StatusCode::kNonFinite);
      EXPECT_EQ(world_.store().append({{&m.id, 1}, 0, 1, bad.data(), good.data()}).code(),
                StatusCode::kNonFinite);
    }
    for (int32_t layer = 0; layer < 2; ++layer) {
      EXPECT_TRUE(world_.store().append({{&m.id, 1}, layer, 1, good.data(), good.data()}));
    }
    EXPECT_EQ(broken_channel_law(world_.view()), "");
    EXPECT_EQ(world_.view().infos[m.id.slot].window_first, 64);
    const int32_t row = world_.view().row_of(m.id.slot, 1, 1);
    EXPECT_EQ(stored_value(world_.view(), row, Component::kKey, 79, 3), 0.5f);
  }
}

TEST_F(ChannelCalls, OutOfPagesChangesNothing) {
  KvStoreConfig c = config_;
  c.num_pages = 44;
  ChannelStoreWorld world(c, &input_);
  ChannelModel m, other;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 150));
  ASSERT_TRUE(world.end_prompt({&m}));
  ASSERT_TRUE(world.add(&other));
  Status refused = Status::ok();
  while (refused) refused = world.prompt({&other}, 32);
  ASSERT_EQ(refused.code(), StatusCode::kOutOfPages);
  ASSERT_GT(other.tokens, 0);
  refused = Status::ok();
  for (int32_t i = 0; i < 200 && refused; ++i) {
    const std::vector<uint8_t> before = *world.store().export_sequence(m.id);
    refused = world.step({&m}, 1);
    EXPECT_TRUE(refused || *world.store().export_sequence(m.id) == before);
  }
  EXPECT_EQ(refused.code(), StatusCode::kOutOfPages);
  EXPECT_EQ(broken_channel_law(world.view()), "");
  EXPECT_EQ(world.difference(m), "");
  EXPECT_EQ(world.difference(other), "");
  ChannelModel copy;
  EXPECT_EQ(world.fork(m, &copy).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(world.transfer(m, &copy).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(broken_channel_law(world.view()), "");
  ASSERT_TRUE(world.store().release(other.id));
  EXPECT_TRUE(world.step({&m}, 1));
  EXPECT_EQ(world.difference(m), "");
}

TEST_F(ChannelCalls, RefusesDamagedSequences) {
  const ChannelModel m = live(170);
  const std::vector<uint8_t> bytes = *world_.store().export_sequence(m.id);
  expect_refused(&world_.store(), {bytes, 90, 2}, &input_);
  KvStoreConfig other = config_;
  other.channel.v_bits = 2;
  EXPECT_EQ((*KvStore::create(other))->import_sequence(bytes.data(), bytes.size()).status().code(),
            StatusCode::kInvalidArgument);
}

// Damage that the checksums agree with, in the last row: a scale that is infinite, one that is
// negative, a byte behind the block (head_dim 64 has none), a raw value.
TEST_F(ChannelCalls, RefusesValuesThatNoStoreMakes) {
  const ChannelModel m = live(170);
  const std::vector<uint8_t> bytes = *world_.store().export_sequence(m.id);
  const ChannelLayout& l = world_.view().layout;
  const size_t row_bytes = 2 * l.bytes + 2 * 42 * 64 * 2;
  const size_t first = bytes.size() - 8 - row_bytes;
  const auto import_with = [&](size_t at, uint16_t value) {
    std::vector<uint8_t> changed = bytes;
    std::memcpy(&changed[first + at], &value, 2);
    const uint64_t sum = xxh3(&changed[first], row_bytes);
    std::memcpy(&changed[bytes.size() - 8], &sum, 8);
    const auto id = world_.store().import_sequence(changed.data(), changed.size());
    if (id) {
      EXPECT_TRUE(world_.store().release(*id));
    }
    return id.status().code();
  };
  const size_t key_scale = l.k_metadata + channel_scale_byte(9);
  EXPECT_EQ(import_with(key_scale, 0x3c00), StatusCode::kOk);
  EXPECT_EQ(import_with(key_scale, 0x7c00), StatusCode::kCorrupt);
  EXPECT_EQ(import_with(key_scale, 0xbc00), StatusCode::kCorrupt);
  EXPECT_EQ(import_with(l.k_metadata + channel_zero_point_byte(63), 0x7e00), StatusCode::kCorrupt);
  EXPECT_EQ(import_with(l.bytes + l.value_metadata_byte(63), 0xfc00), StatusCode::kCorrupt);
  EXPECT_EQ(import_with(l.bytes + l.value_metadata_byte(63) + 2, 0xfc00), StatusCode::kCorrupt);
  EXPECT_EQ(import_with(2 * l.bytes, 0x3c00), StatusCode::kOk);
  EXPECT_EQ(import_with(2 * l.bytes, 0x7c00), StatusCode::kCorrupt);
  EXPECT_EQ(import_with(row_bytes - 2, 0xfe00), StatusCode::kCorrupt);
}

TEST_F(ChannelCalls, TheColdTierIsRefusedByName) {
  const ChannelModel m = live(100);
  const auto saved = save_sequence(world_.store(), m.id);
  EXPECT_EQ(saved.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(saved.status().message().find("channel"), std::string::npos);
  const uint8_t byte = 0;
  EXPECT_EQ(load_sequence(world_.store(), &byte, 1).status().code(), StatusCode::kUnsupported);
}

TEST_F(ChannelCalls, StatisticsCountWhatIsHeld) {
  KvStoreConfig c = config_;
  c.max_tokens = 3000;
  c.num_pages = 1000;
  c.policy.window_tokens = 64;
  ChannelStoreWorld world(c, &input_);
  ChannelModel m;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 2600));
  ASSERT_TRUE(world.end_prompt({&m}));
  const StoreStats stats = *world.store().stats();
  EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kHigh)], 4 * 2496);
  EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kWindow)], 4 * 104);
  EXPECT_EQ(stats.raw_bytes, int64_t{4} * 2600 * 64 * 4);
  EXPECT_EQ(stats.nominal_bytes, int64_t{4} * (39 * 4608 + 104 * 64 * 4));
  // 39 blocks, and 104 raw tokens on pages of 16.
  EXPECT_EQ(stats.pages - stats.pages_free, 4 * (39 + 7));
  EXPECT_EQ(stats.sequences, 1);
}

}  // namespace
}  // namespace tierkv::testing

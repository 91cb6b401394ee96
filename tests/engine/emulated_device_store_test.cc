// SPDX-License-Identifier: Apache-2.0
// The store on a device as a whole, its source run on the host: random calls beside the store in
// host memory, which must leave the same bytes. CUDA's runtime is a stand-in, page operations are
// the host's, kernels run in the emulator, but for that of attention over the pages of tiers.
#include <cuda_runtime.h>

#include <functional>

#include "store/place/device/device_attention.cu"
#include "store/place/device/device_pages.cu"
#include "store/place/device/device_place.cu"
#include "store/place/device/device_setup.cu"
#include "store/place/device/device_transfer.cu"
#include "store/place/device/sequence_link.cu"
#include "store/rows/coded/device_coded_rows.cu"
#include "tests/engine/support/emulated_attention.h"
#include "tests/gpu/store/twin_calls.cuh"
#include "tests/gpu/store/twin_faults.cuh"
#include "tests/gpu/store/twin_queries.cuh"

namespace tierkv {

Status initialize_device(const PageAllocator& a, GpuStream) {
  return initialize_host(a);
}
size_t page_op_workspace_bytes(const AllocatorShape&, int32_t) {
  return 256;
}
Status run_page_op_device(const PageAllocator& a, const PageOp& op, const DeviceWorkspace&,
                          GpuStream) {
  return run_page_op_host(a, op);
}

// The references in place of the kernels; an lse is not needed.
Status prompt_lse(const SignificanceCall&, float*, GpuStream) {
  return Status::ok();
}
Status prompt_significance(const SignificanceCall& p, const float*, float* significance,
                           GpuStream) {
  return prompt_significance_host(p, significance);
}

namespace testing {
namespace {

// Where the blocks of a body of fixed rows begin.
size_t first_block_byte(const TwinChoice& choice, int32_t tokens) {
  const int32_t units = 2 * store::block_count(tokens - choice.window);
  return 32 + 2 * choice.head_dim + store::round_up(units, 4) * sizeof(uint32_t);
}

class EmulatedDeviceStore : public RandomTest {
 protected:
  void live_together(const TwinChoice& choice, int32_t calls, int32_t longest) {
    KvTwins t(twin_config(choice), &rng_);
    t.add();
    t.extend({0}, std::min(longest, 300));
    ASSERT_FALSE(HasFatalFailure());
    coded_tokens_ += t.device().usage()->body_tokens;
    testing::live_together(&t, calls, longest, false);
  }
  // Both stores refuse the bytes for the same reason, which names `what`, and the one on a device
  // is as it was. The bytes are a container whose chunks damage(key, &payload) changes; their
  // checksums are right.
  template <class Damage>
  void expect_refused(KvTwins* t, const std::vector<uint8_t>& bytes, const Damage& damage,
                      const std::string& what = "") {
    const std::vector<ChunkEntry> chunks = chunks_of(bytes);
    const std::vector<uint8_t> bad = changed_bytes(
        bytes, [&](size_t c, std::vector<uint8_t>* payload) { damage(chunks[c].key, payload); });
    const int64_t free = t->device().usage()->pages_free;
    const auto a = t->host().import_sequence(bad.data(), bad.size());
    const auto b = t->device().import_sequence(bad.data(), bad.size());
    EXPECT_EQ(a.status().code(), StatusCode::kCorrupt);
    EXPECT_EQ(b.status().code(), StatusCode::kCorrupt);
    EXPECT_EQ(a.status().message(), b.status().message());
    EXPECT_NE(a.status().message().find(what), std::string::npos) << a.status().message();
    EXPECT_EQ(t->device().usage()->pages_free, free);
  }
  int64_t coded_tokens_ = 0;
};

TEST_F(EmulatedDeviceStore, WithoutBodies) {
  live_together({.window = 160}, 120, 160);
}
TEST_F(EmulatedDeviceStore, CallsOfOthersComeBetween) {
  expect_calls_come_between({}, &rng_);
}
TEST_F(EmulatedDeviceStore, OfCodedRows) {
  for (const int32_t unit : {64, 32, 16}) {
    SCOPED_TRACE("unit " + std::to_string(unit));
    TwinChoice choice = {.format = CodedFormat{.unit_tokens = unit}, .num_kv_heads = 1};
    if (unit < 64) choice.rotary_dims = 32;
    if (unit == 16) choice.pairing = RopePairing::kNeighbours;
    live_together(choice, 40, 420);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(coded_tokens_, 0);
}

TEST_F(EmulatedDeviceStore, OfTiersRows) {
  for (const double alpha_low : {0.0, 0.4}) {
    TiersFormat format;
    format.classes[0].alpha_low = alpha_low;
    live_together({.format = format}, 60, 420);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(coded_tokens_, 0);
}
TEST_F(EmulatedDeviceStore, FaultySignificancesAreUnknown) {
  for (const BodyFormat& format : {BodyFormat{CodedFormat{}}, BodyFormat{TiersFormat{}}}) {
    KvTwins t(twin_config({.format = format}), &rng_);
    testing::expect_faults_are_unknown(&t, 150);
  }
}
TEST_F(EmulatedDeviceStore, TellsWhatTheHostRefuses) {
  for (const BodyFormat& format :
       {BodyFormat{TiersFormat{}}, BodyFormat{CodedFormat{}}, BodyFormat{ChannelFormat{}}}) {
    TwinChoice choice = {.format = format, .dtype = DType::kBFloat16};
    choice.raw_layers = {1};
    KvTwins t(twin_config(choice), &rng_);
    expect_values_are_told(&t, 300, 12);
    expect_values_are_told(&t, 70, 6);  // few leave
  }
}
// Otherwise every replay would attend to the captured sequences in front of its step.
TEST_F(EmulatedDeviceStore, AStepIsNotCapturedBehindAttention) {
  KvTwins t(twin_config({}), &rng_);
  t.add();
  t.extend({0}, 400);
  const SequenceList one = {&t.live()[0].device, 1};
  const CacheLayout& l = t.device().config().layout;
  std::vector<uint16_t> x(static_cast<size_t>(l.num_q_heads) * l.head_dim);
  LayerAttend attend;
  attend.sequences = one;
  attend.q_len = 1;
  attend.q = attend.out = x.data();
  emulator::capture = 1;
  KvTwins::expect_ok(t.device().attend(attend));
  const Status refused = t.device().begin(one, 1);
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
  EXPECT_NE(refused.message().find("attend"), std::string::npos) << refused.message();
  emulator::capture = 2;
  KvTwins::expect_ok(t.device().begin(one, 1));
  emulator::capture = 0;
}
TEST_F(EmulatedDeviceStore, TakesQueries) {
  for (const BodyFormat& format : {BodyFormat{CodedFormat{}}, BodyFormat{TiersFormat{}}}) {
    KvTwins t(twin_config({.format = format}), &rng_);
    EXPECT_TRUE(expect_queries(&t, 400, t.pick(1, 16)));
  }
}
TEST_F(EmulatedDeviceStore, TiersCountQueries) {
  KvTwins t(twin_config({.format = TiersFormat{}}), &rng_);
  expect_counted(&t, 150);
}
TEST_F(EmulatedDeviceStore, ManyQueriesCount) {
  TiersFormat format;
  format.classes[0].alpha_low = 0.4;
  KvTwins t(twin_config({.format = format}), &rng_);
  expect_many_counted(&t, 150, t.pick(9, 100));
}
// A sequence of two pieces. All of it is raw, which takes least time here.
TEST_F(EmulatedDeviceStore, ManyQueriesOfTwoPieces) {
  for (const int32_t head_dim : {96, 256}) {
    TwinChoice choice = {.format = TiersFormat{}, .head_dim = head_dim, .num_kv_heads = 1};
    choice.max_tokens = 4200, choice.window = 4096;
    choice.max_sequences = 1;
    KvTwins t(twin_config(choice), &rng_);
    t.add();
    t.extend({0}, 4096 + t.pick(1, 4));
    t.attend({0}, 1, t.pick(9, 20), DType::kBFloat16);
    if (HasFatalFailure()) return;
  }
}
// Codebooks are there, so the device decodes what comes in.
TEST_F(EmulatedDeviceStore, RefusesHostileBodies) {
  for (const bool coded : {true, false}) {
    TwinChoice choice;
    if (!coded) choice.format = TiersFormat{};
    KvTwins t(twin_config(choice), &rng_);
    t.add();
    t.extend({0}, 360);
    const int32_t refused = expect_hostile(&t, 0, 30);
    EXPECT_TRUE(!coded || refused >= 20) << refused;
    t.expect_equal();
    exchange(&t, 0);
    t.expect_equal();
    if (HasFatalFailure()) return;
  }
}
// Numbers that no encoder writes, in chunks whose checksums are right.
TEST_F(EmulatedDeviceStore, RefusesImpossibleNumbers) {
  using Damage = std::function<void(std::vector<uint8_t>*)>;
  // To the first chunks of a kind, one after the other.
  const auto refused = [&](const BodyFormat& format, ChunkKind kind, std::vector<Damage> damages,
                           const char* what) {
    KvTwins t(twin_config({.format = format}), &rng_);
    t.add();
    t.extend({0}, 360);
    const auto bytes = t.host().export_sequence(t.live()[0].host);
    ASSERT_TRUE(bytes);
    size_t damaged = 0;
    const auto damage = [&](const ChunkKey& key, std::vector<uint8_t>* payload) {
      if (key.kind == kind && damaged < damages.size()) damages[damaged++](payload);
    };
    expect_refused(&t, *bytes, damage, what);
  };
  const Damage infinite = [](auto* raw) { (*raw)[0] = 0, (*raw)[1] = 0x7c; };
  const Damage many_queries = [](auto* raw) { raw->back() = 0x7f; };  // more than are counted
  refused(CodedFormat{}, ChunkKind::kStoreRow, {infinite}, "value");
  refused(CodedFormat{}, ChunkKind::kStoreRow, {many_queries}, "score");
  // A value comes before a score, also one of a later head.
  refused(CodedFormat{}, ChunkKind::kStoreRow, {many_queries, infinite}, "value");
  // The last zero point; the scale before it.
  const Damage zero_point = [](auto* body) { body->back() = 0x7c; };
  const Damage scale = [](auto* body) { body->end()[-3] = 0x81; };
  const Damage all = [](auto* body) { std::fill(body->begin(), body->end(), uint8_t{0x7c}); };
  refused(TiersFormat{}, ChunkKind::kStorePage, {zero_point}, "body");
  refused(TiersFormat{}, ChunkKind::kStorePage, {scale}, "body");
  refused(ChannelFormat{}, ChunkKind::kStorePage, {all}, "body");
}
// Bodies that no sequence has: blocks of no bytes, which have no place where pages are full, and
// more bytes than the store's pages.
TEST_F(EmulatedDeviceStore, RefusesImpossibleBodies) {
  TwinChoice choice;
  KvTwins t(twin_config(choice), &rng_);
  t.add();
  t.extend({0}, 360);
  const auto bytes = t.device().export_sequence(t.live()[0].device);
  ASSERT_TRUE(bytes);
  const auto first_block = static_cast<int64_t>(first_block_byte(choice, t.live()[0].tokens));
  for (const bool is_empty : {true, false}) {
    bool is_first = true;
    const size_t pinned = emulator::pinned_bytes;
    expect_refused(&t, *bytes, [&](const ChunkKey& key, std::vector<uint8_t>* body) {
      if (key.kind != ChunkKind::kStorePage) return;
      if (is_empty) {
        ASSERT_EQ(body->front(), 1);  // fixed, so that the device would decode the blocks
        body->resize(first_block);
        std::fill(body->begin() + 32 + 2 * choice.head_dim, body->end(), uint8_t{0});
      } else if (std::exchange(is_first, false)) {
        body->resize(static_cast<size_t>(choice.memory_bytes));
      }
    });
    EXPECT_LT(emulator::pinned_bytes - pinned, size_t{1} << 26) << "taken for it";
  }
  exchange(&t, 0);
  t.expect_equal();
}
// The host decodes such rows; attention on a device has no halves for their means.
TEST_F(EmulatedDeviceStore, RefusesMeansThatAttentionHasNoNumbersFor) {
  TwinChoice choice;
  choice.num_kv_heads = 1;
  KvTwins t(twin_config(choice), &rng_);
  t.add();
  t.extend({0}, 360);
  const auto bytes = t.host().export_sequence(t.live()[0].host);
  ASSERT_TRUE(bytes);
  const std::vector<ChunkEntry> chunks = chunks_of(*bytes);
  const auto bad = changed_bytes(*bytes, [&](size_t c, std::vector<uint8_t>* body) {
    if (chunks[c].key.kind != ChunkKind::kStorePage || chunks[c].key.layer != 1) return;
    const float step = 1e-8f;
    const uint16_t one = 0x3c00;
    std::memcpy(body->data() + 16, &step, sizeof(step));
    std::memcpy(body->data() + 32, &one, sizeof(one));
  });
  const int64_t free = t.device().usage()->pages_free;
  const auto a = t.host().import_sequence(bad.data(), bad.size());
  const auto b = t.device().import_sequence(bad.data(), bad.size());
  EXPECT_TRUE(a) << a.status().message();
  EXPECT_EQ(b.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(b.status().message().find("layer 1, kv_head 0"), std::string::npos);
  EXPECT_EQ(t.device().usage()->pages_free, free);
  exchange(&t, 0);
  t.expect_equal();
}
// Raw layers are large, so layers come in several groups. The first groups are already on their
// pages when the last one proves damaged. If several layers are damaged, the error names the first.
// The host reads the head of the last layer before the device decodes the first one.
TEST_F(EmulatedDeviceStore, RefusesWhatComesLate) {
  TwinChoice choice;
  choice.max_tokens = 2200;
  choice.num_layers = 4;
  choice.num_kv_heads = 4;
  choice.raw_layers = {1, 2};
  KvTwins t(twin_config(choice), &rng_);
  t.add();
  t.extend({0}, 2100);
  const auto bytes = t.host().export_sequence(t.live()[0].host);
  ASSERT_TRUE(bytes);
  ASSERT_GT(bytes->size(), size_t{9} << 19);
  const auto first_block = static_cast<int64_t>(first_block_byte(choice, 2100));
  const auto spoil = [&](std::vector<uint8_t>* body) {
    std::fill(body->begin() + first_block, body->end(), uint8_t{0xff});
  };
  for (const bool both : {false, true}) {
    emulator::is_pinned = both;
    expect_refused(&t, *bytes, [&](const ChunkKey& key, std::vector<uint8_t>* body) {
      if (key.kind != ChunkKind::kStorePage) return;
      if (key.layer == (both ? 0 : 3)) spoil(body);
      if (key.layer == 3 && both) body->resize(body->size() - 16);
    });
  }
  // Pages are short, as is known when the first groups are already there.
  emulator::is_pinned = true;
  StoreConfig config = twin_config(choice);
  const StoreUsage usage = *t.device().usage();
  config.memory_bytes -= (usage.pages + usage.pages_free) / 2 * usage.page_bytes;
  const auto small = KvStore::create_device(config, t.stream());
  ASSERT_TRUE(small) << small.status().message();
  const auto came = (*small)->import_sequence(bytes->data(), bytes->size());
  EXPECT_EQ(came.status().code(), StatusCode::kOutOfPages);
  EXPECT_GT((*small)->shortage().pages, 0);
  EXPECT_EQ((*small)->usage()->held_bytes(), 0);
  EXPECT_TRUE((*small)->take_status());
  emulator::is_pinned = false;
  exchange(&t, 0);
  t.expect_equal();
}
// A layer whose codebooks got no pages takes those that come with a sequence.
TEST_F(EmulatedDeviceStore, ImportsWhereCodebooksWereRefused) {
  TwinChoice choice;
  choice.num_layers = 4;
  choice.max_tokens = 1500;
  KvTwins from(twin_config(choice), &rng_);
  from.add();
  from.extend({0}, 400);
  const auto bytes = from.host().export_sequence(from.live()[0].host);
  ASSERT_TRUE(bytes);
  const TwinTokens x = from.draw(1, 1500);
  // Memory in which pages run out behind the second layer.
  int32_t refused = 0;
  for (int64_t memory = 1 << 20; refused < 2; memory += 1 << 16) {
    refused = 0;
    StoreConfig config = twin_config(choice);
    config.memory_bytes = memory;
    const auto store = KvStore::create_device(config, from.stream());
    if (!store) continue;
    const SequenceId id = *(*store)->add_sequence();
    if (!(*store)->begin({&id, 1}, 1500)) continue;
    Status s = Status::ok();
    while (s && refused < choice.num_layers) {
      s = (*store)->append(from.call({&id, 1}, refused, 1500, x, nullptr));
      refused += s ? 1 : 0;
    }
    ASSERT_EQ(s.code(), StatusCode::kOutOfPages) << "of " << memory << " bytes";
    if (refused < 2) continue;
    ASSERT_TRUE((*store)->release(id));
    const auto came = (*store)->import_sequence(bytes->data(), bytes->size());
    EXPECT_TRUE(came) << came.status().message();
  }
}
// Long enough for several threads; pages of the second sequence lie behind those of the first.
TEST_F(EmulatedDeviceStore, LongSequencesComeAndGo) {
  TwinChoice choice;
  choice.max_tokens = 3000;
  choice.num_layers = 8;
  choice.num_kv_heads = 4;
  choice.memory_bytes = 256 << 20;
  for (const BodyFormat& format : {BodyFormat(TiersFormat{}), BodyFormat(CodedFormat{})}) {
    choice.format = format;
    const StoreConfig config = twin_config(choice);
    KvTwins t(config, &rng_);
    const SequenceId id = *t.host().add_sequence();
    const TwinTokens x = t.draw(1, 2900);
    ASSERT_TRUE(t.host().begin({&id, 1}, 2900));
    for (int32_t l = 0; l < choice.num_layers; ++l) {
      ASSERT_TRUE(t.host().append(t.call({&id, 1}, l, 2900, x, nullptr)));
    }
    std::vector<uint8_t> bytes = *t.host().export_sequence(id);
    ASSERT_GT(bytes.size(), size_t{2} << 20);
    for (const bool is_pinned : {false, true}) {
      emulator::is_pinned = is_pinned;
      const auto came = t.device().import_sequence(bytes.data(), bytes.size());
      ASSERT_TRUE(came) << came.status().message();
      EXPECT_EQ(*t.device().export_sequence(*came), bytes);
    }
    emulator::is_pinned = t.chance(0.5);
    const int64_t free = t.device().usage()->pages_free;
    bytes[bytes.size() / 2] ^= 1;
    const auto refused = t.device().import_sequence(bytes.data(), bytes.size());
    EXPECT_EQ(refused.status().code(), StatusCode::kCorrupt);
    EXPECT_NE(refused.status().message().find("checksum"), std::string::npos)
        << refused.status().message();
    EXPECT_EQ(t.device().usage()->pages_free, free);
  }
}
TEST_F(EmulatedDeviceStore, OfChannelRows) {
  live_together({.format = ChannelFormat{}}, 60, 420);
  EXPECT_GT(coded_tokens_, 0);
}

}  // namespace
}  // namespace testing
}  // namespace tierkv

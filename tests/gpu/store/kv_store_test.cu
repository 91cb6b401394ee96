// SPDX-License-Identifier: Apache-2.0
// The store in device memory beside the host's: equal bytes after random calls, attention that
// agrees, and what happens where pages run out.
#include "gpu/pdl.cuh"
#include "tests/gpu/device_array.cuh"
#include "tests/gpu/store/twin_calls.cuh"
#include "tests/gpu/store/twin_cases.cuh"
#include "tests/gpu/store/twin_queries.cuh"

namespace tierkv::testing {
namespace {

// By one thread that lets the next kernel start first: kernels that do not wait find what was there
// before.
__global__ void copy_late(uint16_t* to, const uint16_t* from, int32_t count) {
  let_next_kernel_start();
  for (int32_t i = 0; i < count; ++i) to[i] = from[i];
}

class KvStoreTwins : public ::testing::TestWithParam<TwinCase>, protected FreshRandom {
 protected:
  void live_together(int32_t calls) {
    KvTwins twins(twin_config(GetParam().choice), &rng_);
    testing::live_together(&twins, calls, GetParam().longest, true);
  }
};

TEST_P(KvStoreTwins, HoldTheSameBytes) {
  live_together(300);
}
TEST_P(KvStoreTwins, SmallHoldTheSameBytes) {
  live_together(40);
}

// Queries that a kernel in front of attend() writes.
TEST_P(KvStoreTwins, SmallQueriesAreWaitedFor) {
  KvTwins twins(twin_config(GetParam().choice), &rng_);
  twins.write_late = [](uint16_t* to, const uint16_t* from, int32_t count, cudaStream_t stream) {
    copy_late<<<1, 1, 0, stream>>>(to, from, count);
  };
  testing::live_together(&twins, 60, GetParam().longest, true);
}

TEST_P(KvStoreTwins, SmallFaultySignificancesAreUnknown) {
  KvTwins twins(twin_config(GetParam().choice), &rng_);
  expect_faults_are_unknown(&twins, GetParam().longest / 3);
}

// Wherever its token goes: sinks, the body or the window.
TEST_P(KvStoreTwins, SmallTellAnElementThatIsNotFinite) {
  KvTwins twins(twin_config(GetParam().choice), &rng_);
  const TwinChoice& choice = GetParam().choice;
  const int32_t tokens = GetParam().longest / 2;
  for (int32_t turn = 0; turn < 8; ++turn) {
    twins.add();
    TwinTokens x = twins.draw(1, tokens);
    const int32_t token = twins.pick(0, tokens - 1), head = twins.pick(0, choice.num_kv_heads - 1);
    const int32_t row = (token * choice.num_kv_heads + head) * choice.head_dim;
    (twins.chance(0.5) ? x.k : x.v)[static_cast<size_t>(row + twins.pick(0, choice.head_dim - 1))] =
        0x7fff;  // NaN of both types, in layer 0
    const SequenceList one = {&twins.live().back().device, 1};
    ASSERT_TRUE(twins.device().begin(one, tokens));
    for (int32_t layer = 0; layer < choice.num_layers; ++layer) {
      ASSERT_TRUE(twins.device().append(twins.call(one, layer, tokens, x, &twins)));
    }
    const Status s = twins.device().take_status();
    EXPECT_EQ(s.code(), StatusCode::kNonFinite) << "token " << token;
    const std::string where = "layer 0, kv_head " + std::to_string(head);
    EXPECT_NE(s.message().find(where), std::string::npos) << s.message();
    twins.release(twins.live().size() - 1);
    if (HasFatalFailure()) return;
  }
}

TEST_P(KvStoreTwins, SmallCountQueries) {
  KvTwins twins(twin_config(GetParam().choice), &rng_);
  expect_counted(&twins, std::min(150, GetParam().longest - 20));
}

TEST_P(KvStoreTwins, SmallManyQueriesCount) {
  KvTwins twins(twin_config(GetParam().choice), &rng_);
  expect_many_counted(&twins, std::min(150, GetParam().longest - 20), twins.pick(9, 100));
}

TEST_P(KvStoreTwins, SmallTakeQueries) {
  for (const int32_t query_stride : {1, 16}) {
    KvTwins twins(twin_config(GetParam().choice), &rng_);
    EXPECT_TRUE(expect_queries(&twins, GetParam().longest - 20, query_stride));
  }
}

TEST_P(KvStoreTwins, SmallHostileBodies) {
  KvTwins twins(twin_config(GetParam().choice), &rng_);
  twins.add();
  twins.extend({0}, GetParam().longest - 20);
  const int32_t refused = expect_hostile(&twins, 0, 40);
  const bool is_coded = std::holds_alternative<CodedFormat>(GetParam().choice.format);
  EXPECT_TRUE(!is_coded || refused >= 20) << refused;
  twins.expect_equal();
  exchange(&twins, 0);
  twins.expect_equal();
}

INSTANTIATE_TEST_SUITE_P(Formats, KvStoreTwins, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Out of pages anywhere: the call has changed nothing and can be made again after a release.
class KvStorePages : public RandomTest {
 protected:
  void run_out(BodyFormat format) {
    TwinChoice choice = with(std::move(format), 64, 2, 2);
    choice.memory_bytes = 0;
    choice.max_sequences = 8;
    choice.max_tokens = 2000;
    // Workspaces differ by format and device: a MiB more than the least that works.
    for (bool fits = false; !fits; choice.memory_bytes += 1 << 17) {
      choice.memory_bytes = std::max<int64_t>(choice.memory_bytes, 4 << 20);
      const auto made = KvStore::create_device(twin_config(choice), nullptr);
      fits = made.is_ok();
      ASSERT_TRUE(fits || made.status().code() == StatusCode::kOutOfRange)
          << made.status().message();
    }
    choice.memory_bytes += 1 << 20;
    const StoreConfig config = twin_config(choice);
    KvTwins twins(config, &rng_);
    KvStore& store = twins.device();
    const CacheLayout& l = config.layout;
    int32_t refused = 0;
    std::vector<SequenceId> ids;
    Buffer k, v;
    for (int32_t i = 0; i < 400 && refused < 12; ++i) {
      if (ids.size() < 8 && (ids.empty() || twins.chance(0.2)))
        ids.push_back(*store.add_sequence());
      const auto one = static_cast<size_t>(twins.pick(0, static_cast<int32_t>(ids.size()) - 1));
      const int32_t tokens = twins.chance(0.6) ? twins.pick(1, 8) : twins.pick(9, 400);
      if (*store.num_tokens(ids[one]) + tokens > choice.max_tokens) continue;
      const auto before = store.export_sequence(ids[one]);
      ASSERT_TRUE(before) << before.status().message();
      bool begun = false;
      const auto extend = [&]() -> Status {
        if (Status s = store.begin({&ids[one], 1}, tokens); !s) return s;
        begun = true;
        const TwinTokens x = twins.draw(1, tokens);
        for (int32_t layer = 0; layer < l.num_layers; ++layer) {
          const LayerAppend a = twins.call({&ids[one], 1}, layer, tokens, x, &twins);
          if (Status s = store.append(a); !s) return s;
        }
        return Status::ok();
      };
      const Status s = extend();
      if (s) continue;
      ASSERT_EQ(s.code(), StatusCode::kOutOfPages) << s.message();
      EXPECT_GT(store.shortage().pages, 0);
      EXPECT_EQ(store.shortage().bytes, store.shortage().pages * store.usage()->page_bytes);
      ++refused;
      if (begun) {
        const auto held = static_cast<int32_t>(*store.num_tokens(ids[one])) - tokens;
        ASSERT_TRUE(store.truncate(ids[one], held));
      }
      const auto after = store.export_sequence(ids[one]);
      ASSERT_TRUE(after) << after.status().message();
      // A chunk that some layers had may have moved the ends of their bodies.
      if (!begun) {
        EXPECT_EQ(*before, *after);
      }
      ASSERT_TRUE(store.release(ids[one]));
      ids.erase(ids.begin() + static_cast<int64_t>(one));
      ASSERT_TRUE(store.take_status());
    }
    EXPECT_GT(refused, 3);
    for (const SequenceId& id : ids) ASSERT_TRUE(store.release(id));
    const StoreUsage usage = *store.usage();
    EXPECT_EQ(usage.pages_free, usage.pages);
    EXPECT_EQ(usage.pages_shared, 0);
  }
};
TEST_F(KvStorePages, TiersRunOut) {
  run_out(TiersFormat{});
}
TEST_F(KvStorePages, CodedRunOut) {
  run_out(coded(64));
}

// Sequences of several pieces, which are decoded one after the other.
TEST_F(KvStorePages, ManyQueriesOfLongSequences) {
  for (const BodyFormat& format :
       {BodyFormat{pruning()}, BodyFormat{CodedFormat{}}, BodyFormat{ChannelFormat{}}}) {
    TwinChoice choice = with(format, 64, 2, 3);
    choice.max_tokens = 9000;
    choice.max_sequences = 2;
    choice.num_layers = 1;
    KvTwins twins(twin_config(choice), &rng_);
    twins.add();
    twins.add();
    twins.extend({0}, twins.pick(4090, 4110));
    twins.extend({1}, twins.pick(8190, 8990));
    for (const int32_t q_len : {9, 50}) {
      twins.attend({1, 0}, 0, q_len, twins.chance(0.5) ? DType::kFloat16 : DType::kBFloat16);
    }
    KvTwins::expect_ok(twins.device().take_status());
    if (HasFatalFailure()) return;
  }
}

// Usage of both is that of the same sequences.
TEST_P(KvStoreTwins, SmallUsage) {
  KvTwins twins(twin_config(GetParam().choice), &rng_);
  twins.add();
  twins.extend({0}, std::min(290, GetParam().longest - 20));
  twins.fork(0);
  const StoreUsage a = *twins.host().usage(), b = *twins.device().usage();
  EXPECT_EQ(a.sequences, b.sequences);
  EXPECT_EQ(a.sink_tokens, b.sink_tokens);
  EXPECT_EQ(a.body_tokens, b.body_tokens);
  EXPECT_EQ(a.ring_tokens, b.ring_tokens);
  EXPECT_EQ(a.raw_bytes, b.raw_bytes);
  EXPECT_EQ(a.nominal_bytes, b.nominal_bytes);
  EXPECT_EQ(a.pages_shared, b.pages_shared);
  EXPECT_EQ(a.pages - a.pages_free, b.pages - b.pages_free);
  EXPECT_EQ(twins.device().free_pages(), twins.device().usage()->pages_free);
  EXPECT_EQ(*twins.host().bytes_held(twins.live()[1].host),
            *twins.device().bytes_held(twins.live()[1].device));
}

TEST_F(KvStorePages, SmallCallsOfOthersComeBetween) {
  TwinChoice choice;
  choice.format = TiersFormat{};
  expect_calls_come_between(choice, &rng_);
}

}  // namespace
}  // namespace tierkv::testing

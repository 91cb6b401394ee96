// SPDX-License-Identifier: Apache-2.0
// The store in device memory beside the host's: equal bytes after random calls, attention that
// agrees, captured steps, and what happens where pages run out.
#include "codec/policy/profile.h"
#include "gpu/pdl.cuh"
#include "tests/gpu/device_array.cuh"
#include "tests/gpu/store/twin_calls.cuh"
#include "tests/gpu/store/twin_choices.cuh"
#include "tests/gpu/store/twin_queries.cuh"

namespace tierkv::testing {
namespace {

struct TwinCase {
  const char* name;
  TwinChoice choice;
  int32_t longest;  // tokens of a sequence
};

TiersFormat pruning() {
  TiersFormat format;
  format.classes[0].alpha_low = 0.3;
  return format;
}
TwinChoice of_bfloats(TwinChoice c) {
  c.dtype = DType::kBFloat16;
  return c;
}

TwinChoice turned(TwinChoice c, RopePairing pairing, int32_t rotary_dims) {
  c.pairing = pairing;
  c.rotary_dims = rotary_dims;
  return c;
}

std::vector<TwinCase> all_cases() {
  const auto neighbours = RopePairing::kNeighbours;
  return {{"Short64", without_bodies(64, 1), 160},
          {"Short96", without_bodies(96, 3), 160},
          {"Short128", without_bodies(128, 16), 160},
          {"Short256", of_bfloats(without_bodies(256, 8)), 160},
          {"Tiers64", with(TiersFormat{}, 64, 3, 3), 600},
          {"Tiers128", with(pruning(), 128, 2, 8), 600},
          {"Tiers256", of_bfloats(with(TiersFormat{}, 256, 1, 16)), 500},
          {"Coded64Neighbours", turned(with(coded(64), 64, 3, 3), neighbours, 0), 600},
          {"Coded64NoRope", turned(with(coded(64), 64, 3, 3), RopePairing::kNone, 0), 600},
          {"Coded96", with(coded(64), 96, 2, 5), 600},
          {"Coded96Units16", with(coded(16), 96, 2, 5), 600},
          {"Coded128", with(coded(16), 128, 2, 8), 600},
          {"Coded128Neighbours", turned(with(coded(16), 128, 2, 8), neighbours, 64), 600},
          {"Coded128PartHalves", turned(with(coded(16), 128, 2, 8), RopePairing::kHalves, 96), 600},
          {"Coded256", of_bfloats(with(coded(32), 256, 1, 16)), 500},
          {"Coded256PartHalves", turned(with(coded(32), 256, 1, 4), RopePairing::kHalves, 64), 500},
          {"Channel64", with(ChannelFormat{4, 2, 128}, 64, 3, 3), 600},
          {"Channel128", of_bfloats(with(ChannelFormat{}, 128, 2, 8)), 600}};
}

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

// Calls that were captured.
class Graph {
 public:
  template <class Make>
  Graph(cudaStream_t stream, const Make& make) : stream_(stream) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    KvTwins::expect_ok(make());
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&exec_, graph_, 0), cudaSuccess);
  }
  ~Graph() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
  }
  void launch_and_wait() {
    ASSERT_EQ(cudaGraphLaunch(exec_, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

// A captured step, replayed: inputs and outputs stay where they are.
TEST_P(KvStoreTwins, ReplayACapturedStep) {
  const TwinChoice& choice = GetParam().choice;
  const StoreConfig config = twin_config(choice);
  const CacheLayout& l = config.layout;
  KvTwins twins(config, &rng_);
  twins.add();
  twins.add();
  const bool has_bodies = GetParam().longest > choice.window;
  // Four blocks, so that coded rows have their means.
  twins.extend({0}, has_bodies ? 345 : 11);
  twins.extend({1}, has_bodies ? 400 : 9);
  ASSERT_FALSE(HasFatalFailure());
  const std::vector<size_t> who = {1, 0};
  const KvTwins::Ids ids = twins.ids_of(who);
  const int32_t n = twins.pick(1, 2), replays = has_bodies ? 100 : 60;
  const size_t values = who.size() * n * l.num_kv_heads * l.head_dim;
  const size_t queries = who.size() * n * l.num_q_heads * l.head_dim;
  const size_t lines = queries / l.head_dim;
  Buffer k, v, q, out, lse;
  uint16_t* all_k = twins.put(&k, std::vector<uint16_t>(values * l.num_layers));
  uint16_t* all_v = twins.put(&v, std::vector<uint16_t>(values * l.num_layers));
  uint16_t* all_q = twins.put(&q, std::vector<uint16_t>(queries * l.num_layers));
  uint16_t* all_out = twins.put(&out, std::vector<uint16_t>(queries * l.num_layers, 0x7e00));
  float* all_lse = twins.put(&lse, std::vector<float>(lines * l.num_layers, NAN));
  const auto make_step = [&]() -> Status {
    if (Status s = twins.device().begin(ids.device_list(), n); !s) return s;
    for (int32_t layer = 0; layer < l.num_layers; ++layer) {
      LayerAppend a;
      a.sequences = ids.device_list();
      a.layer = layer;
      a.tokens = n;
      a.k = all_k + layer * values;
      a.v = all_v + layer * values;
      if (Status s = twins.device().append(a); !s) return s;
      LayerAttend b;
      b.sequences = ids.device_list();
      b.layer = layer;
      b.q_len = n;
      b.q = all_q + layer * queries;
      b.out = all_out + layer * queries;
      b.lse = all_lse + layer * lines;
      if (Status s = twins.device().attend(b); !s) return s;
    }
    return Status::ok();
  };
  Graph step(twins.stream(), make_step);
  ASSERT_FALSE(HasFailure());
  for (int32_t i = 0; i < replays; ++i) {
    SCOPED_TRACE("replay " + std::to_string(i));
    TwinTokens x = twins.draw(who.size(), n);
    x.significance.clear();
    std::vector<uint16_t> drawn(queries * l.num_layers);
    for (uint16_t& e : drawn) {
      e = float_to_half(std::uniform_real_distribution<float>(-1, 1)(rng_));
    }
    twins.put(&k, x.k);
    twins.put(&v, x.v);
    twins.put(&q, drawn);
    if (i > 0) KvTwins::expect_ok(twins.device().note_replay(ids.device_list(), n));
    step.launch_and_wait();
    KvTwins::expect_ok(twins.host().begin(ids.host_list(), n));
    std::vector<uint16_t> expected(drawn.size());
    std::vector<float> expected_lse(lines * l.num_layers);
    for (int32_t layer = 0; layer < l.num_layers; ++layer) {
      KvTwins::expect_ok(twins.host().append(twins.call(ids.host_list(), layer, n, x, nullptr)));
      LayerAttend b;
      b.sequences = ids.host_list();
      b.layer = layer;
      b.q_len = n;
      b.q = drawn.data() + layer * queries;
      b.out = expected.data() + layer * queries;
      b.lse = expected_lse.data() + layer * lines;
      KvTwins::expect_ok(twins.host().attend(b));
    }
    KvTwins::expect_close(expected, out.read<uint16_t>(expected.size()), expected_lse,
                          lse.read<float>(expected_lse.size()), DType::kFloat16);
    for (const size_t w : who) twins.live()[w].tokens += n;
    if (i % 20 == 0) twins.expect_equal();
    if (HasFatalFailure()) break;
  }
  twins.expect_equal();
  twins.extend({0, 1}, 3);  // and on without the graph
  twins.expect_equal();
}

std::shared_ptr<const Profile> profile_of_normals(const CacheLayout& l) {
  auto p = std::make_shared<Profile>();
  p->model_id = "normals";
  p->num_layers = l.num_layers;
  p->num_q_heads = l.num_q_heads;
  p->num_kv_heads = l.num_kv_heads;
  p->head_dim = l.head_dim;
  p->sm_scale = l.sm_scale;
  RowProfile row;
  row.key_mean = row.value_mean = row.key_mean_before_rope = std::vector<float>(l.head_dim);
  row.query_energy.assign(l.head_dim, 1.0f);
  row.query_trace = row.value_signal = l.head_dim;
  p->rows.assign(static_cast<size_t>(l.num_layers) * l.num_kv_heads, row);
  return p;
}

// Sequences whose bodies are empty, although they came from elsewhere or waited for codebooks: what
// replays make of them is coded, and can be replayed and captured. Without a profile a row's first
// blocks give it its means, so no replay begins a coded body.
TEST_P(KvStoreTwins, ReplaysOfShortSequences) {
  const TwinChoice& choice = GetParam().choice;
  if (GetParam().longest <= 2 * choice.window) GTEST_SKIP() << "no bodies";
  StoreConfig config = twin_config(choice);
  if (std::holds_alternative<CodedFormat>(config.format)) {
    config.profile = profile_of_normals(config.layout);
  }
  const CacheLayout& l = config.layout;
  KvTwins twins(config, &rng_);
  twins.add();
  twins.extend({0}, choice.window + 70);  // a coded block waits
  twins.add();
  twins.extend({1}, 345);  // brings codebooks
  twins.truncate(0, 10);
  ASSERT_FALSE(HasFatalFailure());
  const auto bytes = twins.device().export_sequence(twins.live()[0].device);
  ASSERT_TRUE(bytes.is_ok());
  const TwinTokens x = twins.draw(1, 1);
  Buffer k, v;
  const uint16_t *all_k = twins.put(&k, x.k), *all_v = twins.put(&v, x.v);
  for (const bool is_imported : {false, true}) {
    SCOPED_TRACE(is_imported ? "imported" : "truncated");
    SequenceId id = twins.live()[0].device;
    if (is_imported) {
      const auto imported = twins.device().import_sequence(bytes->data(), bytes->size());
      ASSERT_TRUE(imported.is_ok()) << imported.status().message();
      id = *imported;
    }
    const SequenceList list = {&id, 1};
    const auto make_step = [&]() -> Status {
      if (Status s = twins.device().begin(list, 1); !s) return s;
      for (int32_t layer = 0; layer < l.num_layers; ++layer) {
        LayerAppend a;
        a.sequences = list;
        a.layer = layer;
        a.tokens = 1;
        a.k = all_k + layer * l.num_kv_heads * l.head_dim;
        a.v = all_v + layer * l.num_kv_heads * l.head_dim;
        if (Status s = twins.device().append(a); !s) return s;
      }
      return Status::ok();
    };
    Graph step(twins.stream(), make_step);
    ASSERT_FALSE(HasFailure());
    for (int32_t i = 0; i < choice.window + 90; ++i) {
      if (i > 0) {
        const Status s = twins.device().note_replay(list, 1);
        ASSERT_TRUE(s.is_ok()) << "replay " << i << ": " << s.message();
      }
      step.launch_and_wait();
    }
    KvTwins::expect_ok(twins.device().take_status());
    Graph again(twins.stream(), make_step);
    ASSERT_FALSE(HasFailure());
    again.launch_and_wait();
    KvTwins::expect_ok(twins.device().take_status());
    if (is_imported) KvTwins::expect_ok(twins.device().release(id));
  }
}

// A captured step that is given up costs no pages.
TEST_P(KvStoreTwins, CapturesThatAreGivenUp) {
  const TwinChoice& choice = GetParam().choice;
  if (GetParam().longest <= 2 * choice.window) GTEST_SKIP() << "no bodies";
  KvTwins twins(twin_config(choice), &rng_);
  twins.add();
  twins.extend({0}, 345);
  ASSERT_FALSE(HasFatalFailure());
  for (int32_t i = 0; i < 3; ++i) {
    const auto fork = twins.device().fork(twins.live()[0].device);
    ASSERT_TRUE(fork.is_ok()) << fork.status().message();
    const SequenceList list = {&*fork, 1};
    {
      Graph step(twins.stream(), [&] { return twins.device().begin(list, 1); });
      ASSERT_FALSE(HasFailure());
    }
    KvTwins::expect_ok(twins.device().release(*fork));
    twins.extend({0}, 1);
    ASSERT_FALSE(HasFatalFailure());
  }
  KvTwins::expect_ok(twins.device().take_status());
  twins.expect_equal();
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

// All sequences of a captured step complete a unit at once: more blocks than staging memory holds,
// which is 64 MiB.
class KvStoreSteps : public RandomTest {};
TEST_F(KvStoreSteps, OfMoreBlocksThanStagingMemoryHolds) {
  constexpr int32_t kSequences = 36, kReplays = 20;
  TwinChoice choice = with(coded(16), 128, 8, 1);
  choice.num_layers = 8;
  choice.max_sequences = kSequences;
  choice.memory_bytes = int64_t{2} << 30;
  ASSERT_GT(int64_t{kSequences} * choice.num_layers * choice.num_kv_heads * 2 * 64 * 128 * 2,
            int64_t{64} << 20);
  KvTwins twins(twin_config(choice), &rng_);
  twins.add();
  twins.extend({0}, twins.pick(400, 415));
  std::vector<size_t> who = {0};
  for (int32_t i = 1; i < kSequences; ++i) {
    twins.fork(0);
    who.push_back(static_cast<size_t>(i));
  }
  ASSERT_FALSE(HasFatalFailure());
  const KvTwins::Ids ids = twins.ids_of(who);
  const size_t values = who.size() * choice.num_kv_heads * choice.head_dim;
  Buffer k, v;
  const std::vector<uint16_t> poison(values * choice.num_layers, 0x7e00);
  uint16_t *const all_k = twins.put(&k, poison), *const all_v = twins.put(&v, poison);
  Graph step(twins.stream(), [&]() -> Status {
    if (Status s = twins.device().begin(ids.device_list(), 1); !s) return s;
    for (int32_t layer = 0; layer < choice.num_layers; ++layer) {
      LayerAppend a;
      a.sequences = ids.device_list();
      a.layer = layer;
      a.tokens = 1;
      a.k = all_k + layer * values;
      a.v = all_v + layer * values;
      if (Status s = twins.device().append(a); !s) return s;
    }
    return Status::ok();
  });
  ASSERT_FALSE(HasFailure());
  for (int32_t i = 0; i < kReplays; ++i) {
    TwinTokens x = twins.draw(who.size(), 1);
    x.significance.clear();
    twins.put(&k, x.k);
    twins.put(&v, x.v);
    if (i > 0) KvTwins::expect_ok(twins.device().note_replay(ids.device_list(), 1));
    step.launch_and_wait();
    KvTwins::expect_ok(twins.host().begin(ids.host_list(), 1));
    for (int32_t layer = 0; layer < choice.num_layers; ++layer) {
      KvTwins::expect_ok(twins.host().append(twins.call(ids.host_list(), layer, 1, x, nullptr)));
    }
    for (const size_t w : who) ++twins.live()[w].tokens;
  }
  twins.expect_equal();
}

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

// SPDX-License-Identifier: Apache-2.0
// Steps of a store that are captured: replayed beside the host's, of short sequences, given up.
#include "tests/engine/support/store_world.h"
#include "tests/gpu/store/twin_cases.cuh"

namespace tierkv::testing {
namespace {

class KvStoreCaptures : public ::testing::TestWithParam<TwinCase>, protected FreshRandom {};

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
TEST_P(KvStoreCaptures, ReplayACapturedStep) {
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

// Sequences whose bodies are empty, although they came from elsewhere or waited for codebooks: what
// replays make of them is coded, and can be replayed and captured. Without a profile a row's first
// blocks give it its means, so no replay begins a coded body.
TEST_P(KvStoreCaptures, ReplaysOfShortSequences) {
  const TwinChoice& choice = GetParam().choice;
  if (GetParam().longest <= 2 * choice.window) GTEST_SKIP() << "no bodies";
  StoreConfig config = twin_config(choice);
  if (std::holds_alternative<CodedFormat>(config.format)) {
    config.profile = random_profile(config.layout, config.rope, &rng_);
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

INSTANTIATE_TEST_SUITE_P(Formats, KvStoreCaptures, ::testing::ValuesIn(all_cases()),
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

// A captured step that is given up costs no pages: a store that kept counting them would find none
// before the loop ends.
TEST_F(KvStoreSteps, GivenUp) {
  for (const BodyFormat& format : {BodyFormat{TiersFormat{}}, BodyFormat{CodedFormat{}}}) {
    TwinChoice choice = with(format, 64, 2, 2);
    choice.memory_bytes = int64_t{1} << 26;
    KvTwins twins(twin_config(choice), &rng_);
    twins.add();
    twins.extend({0}, 345);
    ASSERT_FALSE(HasFatalFailure());
    const int64_t pages = twins.device().usage()->pages;
    for (int64_t i = 0; i < pages; ++i) {
      const auto fork = twins.device().fork(twins.live()[0].device);
      ASSERT_TRUE(fork.is_ok()) << "fork " << i << ": " << fork.status().message();
      const SequenceList list = {&*fork, 1};
      Graph step(twins.stream(), [&] { return twins.device().begin(list, 1); });
      ASSERT_FALSE(HasFailure()) << "capture " << i << " of " << pages;
      KvTwins::expect_ok(twins.device().release(*fork));
    }
    twins.extend({0}, 100);
    ASSERT_FALSE(HasFatalFailure());
    KvTwins::expect_ok(twins.device().take_status());
    twins.expect_equal();
  }
}

}  // namespace
}  // namespace tierkv::testing

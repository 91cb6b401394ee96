// SPDX-License-Identifier: Apache-2.0
// Steps of a store that are captured: replayed beside the host's, of short sequences, given up.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

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

// A captured step of `count` sequences, which each get `tokens` tokens; inputs and outputs stay
// where they are.
class CapturedStep {
 public:
  CapturedStep(KvTwins* twins, const CacheLayout& layout, const std::vector<size_t>& who,
               int32_t tokens)
      : twins_(*twins),
        l_(layout),
        tokens_(tokens),
        values_(who.size() * tokens * l_.num_kv_heads * l_.head_dim),
        queries_(who.size() * tokens * l_.num_q_heads * l_.head_dim),
        lines_(queries_ / l_.head_dim),
        captured_(who) {
    all_k_ = twins_.put(&k_, std::vector<uint16_t>(values_ * l_.num_layers));
    all_v_ = twins_.put(&v_, std::vector<uint16_t>(values_ * l_.num_layers));
    all_q_ = twins_.put(&q_, std::vector<uint16_t>(queries_ * l_.num_layers));
    all_out_ = twins_.put(&out_, std::vector<uint16_t>(queries_ * l_.num_layers));
    all_lse_ = twins_.put(&lse_, std::vector<float>(lines_ * l_.num_layers));
    const KvTwins::Ids ids = twins_.ids_of(who);
    graph_ = std::make_unique<Graph>(twins_.stream(), [&] { return make(ids.device_list()); });
  }
  size_t count() const { return captured_.size(); }
  void launch() { graph_->launch_and_wait(); }

  // Beside the host. The first launch is of those that were captured.
  void launch_beside_host(std::vector<size_t> who) {
    TwinTokens x = twins_.draw(count(), tokens_);
    x.significance.clear();
    std::vector<uint16_t> drawn(queries_ * l_.num_layers);
    for (uint16_t& e : drawn) {
      e = float_to_half(std::uniform_real_distribution<float>(-1, 1)(twins_.rng()));
    }
    twins_.put(&k_, x.k);
    twins_.put(&v_, x.v);
    twins_.put(&q_, drawn);
    twins_.put(&out_, std::vector<uint16_t>(drawn.size(), 0x7e00));
    twins_.put(&lse_, std::vector<float>(lines_ * l_.num_layers, NAN));
    if (!was_launched_) who = captured_;
    const KvTwins::Ids ids = twins_.ids_of(who);
    if (was_launched_) KvTwins::expect_ok(twins_.device().note_replay(ids.device_list(), tokens_));
    was_launched_ = true;
    launch();
    KvTwins::expect_ok(twins_.host().begin(ids.host_list(), tokens_));
    std::vector<uint16_t> expected(drawn.size());
    std::vector<float> expected_lse(lines_ * l_.num_layers);
    for (int32_t layer = 0; layer < l_.num_layers; ++layer) {
      const SequenceList list = ids.host_list();
      KvTwins::expect_ok(twins_.host().append(twins_.call(list, layer, tokens_, x, nullptr)));
      LayerAttend b;
      b.sequences = list;
      b.layer = layer;
      b.q_len = tokens_;
      b.q = drawn.data() + layer * queries_;
      b.out = expected.data() + layer * queries_;
      b.lse = expected_lse.data() + layer * lines_;
      KvTwins::expect_ok(twins_.host().attend(b));
    }
    KvTwins::expect_close(expected, out_.read<uint16_t>(expected.size()), expected_lse,
                          lse_.read<float>(expected_lse.size()), DType::kFloat16);
    for (const size_t w : who) twins_.live()[w].tokens += tokens_;
  }

 private:
  Status make(SequenceList list) {
    if (Status s = twins_.device().begin(list, tokens_); !s) return s;
    for (int32_t layer = 0; layer < l_.num_layers; ++layer) {
      LayerAppend a;
      a.sequences = list;
      a.layer = layer;
      a.tokens = tokens_;
      a.k = all_k_ + layer * values_;
      a.v = all_v_ + layer * values_;
      if (Status s = twins_.device().append(a); !s) return s;
      LayerAttend b;
      b.sequences = list;
      b.layer = layer;
      b.q_len = tokens_;
      b.q = all_q_ + layer * queries_;
      b.out = all_out_ + layer * queries_;
      b.lse = all_lse_ + layer * lines_;
      if (Status s = twins_.device().attend(b); !s) return s;
    }
    return Status::ok();
  }

  KvTwins& twins_;
  const CacheLayout l_;
  const int32_t tokens_;
  const size_t values_, queries_, lines_;
  const std::vector<size_t> captured_;
  Buffer k_, v_, q_, out_, lse_;
  uint16_t *all_k_ = nullptr, *all_v_ = nullptr, *all_q_ = nullptr, *all_out_ = nullptr;
  float* all_lse_ = nullptr;
  bool was_launched_ = false;
  std::unique_ptr<Graph> graph_;
};

// Replays for the sequences that were captured and for others, of two graphs in turn.
TEST_P(KvStoreCaptures, ReplayACapturedStep) {
  const TwinChoice& choice = GetParam().choice;
  const StoreConfig config = twin_config(choice);
  KvTwins twins(config, &rng_);
  const bool has_bodies = GetParam().longest > choice.window;
  for (size_t i = 0; i < 4; ++i) {
    twins.add();
    // Four blocks, so that coded rows have their means.
    twins.extend({i}, twins.pick(1, 20) + (has_bodies ? 345 : 0));
  }
  ASSERT_FALSE(HasFatalFailure());
  const int32_t n = twins.pick(1, 2), replays = has_bodies ? 100 : 60;
  CapturedStep pair(&twins, config.layout, {1, 0}, n);
  ASSERT_FALSE(HasFailure());
  std::unique_ptr<CapturedStep> other;
  for (int32_t i = 0; i < replays; ++i) {
    SCOPED_TRACE("replay " + std::to_string(i));
    if (i == replays / 3) {
      other =
          std::make_unique<CapturedStep>(&twins, config.layout, std::vector<size_t>{3, 2, 0}, 1);
      ASSERT_FALSE(HasFailure());
      other->launch_beside_host({});
    }
    CapturedStep& step = other != nullptr && twins.chance(0.3) ? *other : pair;
    std::vector<size_t> who = {0, 1, 2, 3};
    if (twins.chance(0.7)) std::shuffle(who.begin(), who.end(), twins.rng());
    who.resize(step.count());
    step.launch_beside_host(who);
    if (i % 20 == 0) twins.expect_equal();
    if (HasFatalFailure()) return;
  }
  twins.expect_equal();
  twins.extend({0, 1, 2, 3}, 3);  // and on without the graph
  twins.expect_equal();
  // As many sequences as were captured.
  KvTwins::expect_ok(twins.device().note_replay(twins.ids_of({2}).device_list(), n));
  pair.launch();
  EXPECT_EQ(twins.device().take_status().code(), StatusCode::kInvalidArgument);
}

// Sequences whose bodies are empty, although they came from elsewhere or waited for codebooks: what
// replays make of them is coded, and can be replayed and captured. Without means and query energies
// in a profile a row's first blocks give it these, so no replay begins a coded body.
TEST_P(KvStoreCaptures, ReplaysOfShortSequences) {
  const TwinChoice& choice = GetParam().choice;
  if (GetParam().longest <= 2 * choice.window) GTEST_SKIP() << "no bodies";
  StoreConfig config = twin_config(choice);
  if (std::holds_alternative<CodedFormat>(config.format)) {
    do {
      config.profile = random_profile(config.layout, config.rope, &rng_);
    } while (config.profile->rows[0].query_energy.empty());
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

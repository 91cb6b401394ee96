// Attention begins while the append or the plan before it still runs: calls that follow each other
// without a pause, and what the host finds. Small enough for compute-sanitizer.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/gpu/store/store_twins.cuh"

namespace tierkv::testing {
namespace {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

constexpr int32_t kLayers = 6;
// docs/internals/attention.md, twice that of the outputs: the host's are rounded, too. A token of 8
// that is not seen, or seen as what was in its slot before, is a hundred times as much.
constexpr double kTolerance = 4e-3;

KvStoreConfig layers_config(int32_t window_tokens) {
  KvStoreConfig c = small_config();
  c.layout.num_layers = kLayers;
  c.layout.num_q_heads = 8;
  c.layout.head_dim = 128;
  c.layout.sm_scale = 1.0 / (16 * std::sqrt(128));
  c.policy.window_tokens = window_tokens;
  c.page_bytes = 0;
  c.num_pages = 1500;
  c.max_tokens = 400;
  return c;
}

// What is enqueued meanwhile runs kernel upon kernel.
__global__ void hold_kernel(int64_t cycles) {
  const int64_t start = clock64();
  while (clock64() - start < cycles) {
  }
}
void hold(cudaStream_t stream) {
  hold_kernel<<<1, 1, 0, stream>>>(1000000);
}

// Appends and queries of the same sequences in every layer, of a host and a device store.
class LayerCalls {
 public:
  LayerCalls(Twins* twins, std::vector<SequenceId> ids, int32_t tokens, RandomInput* input)
      : twins_(twins), ids_(std::move(ids)), tokens_(tokens), input_(input), layers_(kLayers) {}
  SequenceList list() const { return {ids_.data(), static_cast<int32_t>(ids_.size())}; }
  int32_t tokens() const { return tokens_; }

  // Fresh values and queries, and results that no call gives.
  void draw() {
    const CacheLayout& layout = twins_->config().layout;
    for (Layer& l : layers_) {
      const CallValues values(input_, layout, list().count, tokens_);
      const int64_t heads = int64_t{list().count} * layout.num_q_heads;
      l.host[0] = values.k_bytes();
      l.host[1] = values.v_bytes();
      l.host[2] = input_->values(DType::kFloat16, heads, layout.head_dim);
      for (int32_t i = 0; i < 3; ++i) l.device[i].put(l.host[i]);
      l.out.assign(heads * layout.head_dim, 0x7e00);
      l.lse.assign(heads, NAN);
      l.device_out.put(l.out);
      l.device_lse.put(l.lse);
    }
  }
  void append(KvStore& store, int32_t layer) {
    Layer& l = layers_[layer];
    const bool on_device = &store == &twins_->device();
    const Status s = store.append({list(), layer, tokens_, l.at(on_device, 0), l.at(on_device, 1)});
    ASSERT_TRUE(s) << s.message();
  }
  AttendRequest request(bool on_device, int32_t layer) {
    Layer& l = layers_[layer];
    AttendRequest r;
    r.sequences = list();
    r.layer = layer;
    r.q = l.at(on_device, 2);
    r.out = on_device ? l.device_out.get<uint16_t>() : l.out.data();
    r.lse = on_device ? l.device_lse.get<float>() : l.lse.data();
    return r;
  }
  void attend(KvStore& store, int32_t layer) {
    const Status s = store.attend(request(&store == &twins_->device(), layer));
    ASSERT_TRUE(s) << s.message();
  }
  // A step of all layers.
  void step(KvStore& store) {
    ASSERT_TRUE(store.begin_step(list(), tokens_));
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      append(store, layer);
      attend(store, layer);
    }
  }
  // Waits.
  void expect_equal() const {
    const Status s = twins_->device().take_status();
    ASSERT_TRUE(s) << s.message();
    for (int32_t i = 0; i < kLayers; ++i) {
      const Layer& l = layers_[i];
      const auto out = l.device_out.read<uint16_t>(l.out.size());
      const auto lse = l.device_lse.read<float>(l.lse.size());
      double difference = 0, norm = 0;
      for (size_t j = 0; j < out.size(); ++j) {
        const double want = half_to_float(l.out[j]), x = half_to_float(out[j]);
        difference += (x - want) * (x - want);
        norm += want * want;
      }
      EXPECT_LT(std::sqrt(difference / norm), kTolerance) << "layer " << i;
      for (size_t j = 0; j < lse.size(); ++j) {
        EXPECT_NEAR(lse[j], l.lse[j], 2e-3) << "layer " << i << " row " << j;
      }
    }
  }

 private:
  struct Layer {
    std::vector<uint8_t> host[3];  // k, v, q
    Buffer device[3];
    std::vector<uint16_t> out;
    std::vector<float> lse;
    Buffer device_out, device_lse;

    const void* at(bool on_device, int32_t i) const {
      return on_device ? device[i].get<void>() : static_cast<const void*>(host[i].data());
    }
  };
  Twins* twins_;
  std::vector<SequenceId> ids_;
  int32_t tokens_;
  RandomInput* input_;
  std::vector<Layer> layers_;
};

class SettledStore : public ::testing::Test {
 protected:
  SettledStore() { EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess); }
  ~SettledStore() override { cudaStreamDestroy(stream_); }

  // Sequences past prompts of these lengths.
  std::vector<SequenceId> fill(Twins* twins, const std::vector<int32_t>& prompts) {
    std::vector<SequenceId> ids(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_TRUE(twins->add(&ids[i]));
      const SequenceList one = {&ids[i], 1};
      EXPECT_TRUE(twins->begin_prompt(one, prompts[i]));
      EXPECT_TRUE(twins->append_all(one, prompts[i]));
      for (int32_t layer = 0; layer < kLayers; ++layer) {
        EXPECT_TRUE(twins->score_prompt(one, layer));
      }
      EXPECT_TRUE(twins->end_prompt(one));
    }
    return ids;
  }

  cudaStream_t stream_ = nullptr;
};

// With tiers, without, and with a window that is not full.
TEST_F(SettledStore, SmallStepsAreTheHosts) {
  RandomInput input;
  Twins twins(layers_config(16), &input, stream_);
  const std::vector<SequenceId> ids = fill(&twins, {1, 12, 90, 250});
  for (const int32_t tokens : {1, 8, 1, 3, 1, 8}) {
    LayerCalls calls(&twins, ids, tokens, &input);
    calls.draw();
    hold(stream_);
    calls.step(twins.device());
    calls.step(twins.host());
    calls.expect_equal();
    if (HasFailure()) return;
  }
  EXPECT_EQ(twins.difference(), "");
}

// Windows alone, one CTA of appends, eight tokens one after the other: the first chunks that
// attention may copy are those that the append still writes.
TEST_F(SettledStore, SmallStepsSeeTheirNewestTokens) {
  RandomInput input;
  Twins twins(layers_config(64), &input, stream_);
  LayerCalls calls(&twins, fill(&twins, {2}), 8, &input);
  for (int32_t step = 0; step < 20; ++step) {
    if (step == 12) {
      ASSERT_TRUE(twins.truncate(calls.list().ids[0], 20));
    }
    calls.draw();
    hold(stream_);
    calls.step(twins.device());
    calls.step(twins.host());
    calls.expect_equal();
    if (HasFailure()) return;
  }
}

// Two replays in a row, of which the second's results are left.
TEST_F(SettledStore, SmallReplaysAreTheHosts) {
  RandomInput input;
  Twins twins(layers_config(16), &input, stream_);
  LayerCalls calls(&twins, fill(&twins, {3, 15, 120}), 4, &input);
  calls.draw();
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
  calls.step(twins.device());
  ASSERT_CUDA(cudaStreamEndCapture(stream_, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (int32_t i = 0; i < 10; ++i) {
    calls.draw();
    for (int32_t twice = 0; twice < 2; ++twice) {
      if (i + twice > 0) {
        ASSERT_TRUE(twins.device().note_replay(calls.list(), calls.tokens()));
      }
      ASSERT_CUDA(cudaGraphLaunch(replay, stream_));
    }
    for (int32_t twice = 0; twice < 2; ++twice) calls.step(twins.host());
    calls.expect_equal();
    if (HasFailure()) break;
  }
  EXPECT_EQ(twins.difference(), "");
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

// Plans and batches change between the layers; calls that are refused leave their plan behind.
TEST_F(SettledStore, SmallPlansAndBatchesAreWaitedFor) {
  RandomInput input;
  Twins twins(layers_config(16), &input, stream_);
  const std::vector<SequenceId> ids = fill(&twins, {200, 30, 5, 140});
  LayerCalls calls(&twins, {ids[2], ids[0]}, 2, &input);
  LayerCalls others(&twins, {ids[1], ids[3]}, 1, &input);
  const SequenceList last = {&ids[3], 1};
  const std::vector<float> seen = twins.scores(last);
  Buffer scores;
  scores.put(seen);
  const auto refuse = [&](LayerCalls& of, KvStore& store, int32_t layer) {
    if (&store == &twins.host()) return;
    AttendRequest bad = of.request(true, layer);
    bad.q = static_cast<const uint16_t*>(bad.q) + 1;
    ASSERT_EQ(store.attend(bad).code(), StatusCode::kInvalidArgument);
  };
  const auto run = [&](KvStore& store, const float* probabilities) {
    ASSERT_TRUE(store.begin_step(others.list(), 1));
    for (int32_t layer = 0; layer < kLayers; ++layer) others.append(store, layer);
    ASSERT_TRUE(store.begin_step(calls.list(), 2));
    for (int32_t layer = 0; layer < kLayers; layer += 2) {
      // A plan, an append, its attention.
      if (layer > 0) refuse(calls, store, layer - 1);
      calls.append(store, layer);
      calls.attend(store, layer);
      // The batch anew, an append, the attention of a plan in use.
      ASSERT_TRUE(store.update_scores({last, layer, 0, probabilities, twins.config().max_tokens}));
      calls.append(store, layer + 1);
      calls.attend(store, layer + 1);
      // A plan and at once its attention.
      refuse(others, store, layer);
      others.attend(store, layer);
      others.attend(store, layer + 1);
    }
  };
  for (int32_t step = 0; step < 4; ++step) {
    calls.draw();
    others.draw();
    hold(stream_);
    run(twins.device(), scores.get<float>());
    run(twins.host(), seen.data());
    calls.expect_equal();
    others.expect_equal();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace tierkv::testing

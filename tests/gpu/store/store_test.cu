// The device back end beside the host's: many rows, replayed steps, failures, attention.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/gpu/store/store_twins.cuh"
#include "tests/gpu/store/trace_steps.h"

namespace tierkv::testing {
namespace {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

// Thousands of rows, no waiting between the calls of a step.
TEST(StoreDevice, CarriesThousandsOfRows) {
  RandomInput input;
  KvStoreConfig c = small_config();
  c.layout.num_layers = 8;
  c.layout.num_kv_heads = 8;
  c.layout.num_q_heads = 8;
  c.layout.head_dim = 128;
  c.page_bytes = 0;
  c.policy.window_tokens = 64;
  c.max_sequences = 32;
  c.num_pages = 20000;
  c.max_tokens = 300;
  Twins twins(c, &input);
  std::vector<SequenceId> ids(32);
  for (SequenceId& id : ids) ASSERT_TRUE(twins.add(&id));
  const SequenceList l = {ids.data(), 32};
  ASSERT_TRUE(twins.begin_prompt(l, 200));
  for (int32_t layer = 0; layer < 8; ++layer) {
    ASSERT_TRUE(twins.append(l, layer, 200));
    ASSERT_TRUE(twins.score_prompt(l, layer));
  }
  ASSERT_TRUE(twins.end_prompt(l));
  ASSERT_EQ(twins.difference(), "");
  for (int32_t step = 0; step < trace_steps(12); ++step) {
    ASSERT_TRUE(twins.begin_step(l, 1));
    ASSERT_TRUE(twins.append_all(l, 1));
    ASSERT_TRUE(twins.update_scores(l, step % 8, 0));
  }
  ASSERT_EQ(twins.difference(), "");
}

// The inputs of one step of all layers, at fixed places on the device.
struct StepBuffers {
  std::vector<Buffer> k, v, scores;
  explicit StepBuffers(int32_t layers) : k(layers), v(layers), scores(layers) {}
};

TEST(StoreDevice, AReplayedStepIsTheStep) {
  RandomInput input;
  KvStoreConfig c = small_config();
  c.layout.head_dim = 128;
  c.page_bytes = 0;
  c.num_pages = 200;
  c.max_tokens = 300;
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  Twins twins(c, &input, stream);
  std::vector<SequenceId> ids(3);
  for (SequenceId& id : ids) ASSERT_TRUE(twins.add(&id));
  for (int32_t i = 0; i < 3; ++i) {
    const SequenceList one = {&ids[i], 1};
    ASSERT_TRUE(twins.begin_prompt(one, 40 + 50 * i));
    ASSERT_TRUE(twins.append_all(one, 40 + 50 * i));
    for (int32_t layer = 0; layer < 2; ++layer) ASSERT_TRUE(twins.score_prompt(one, layer));
  }
  const SequenceList l = {ids.data(), 3};
  ASSERT_TRUE(twins.end_prompt(l));

  StepBuffers buffers(2);
  std::vector<CallValues> values;
  std::vector<std::vector<float>> scores;
  const auto fresh_inputs = [&] {
    values.clear();
    scores.clear();
    for (int32_t layer = 0; layer < 2; ++layer) {
      values.emplace_back(&input, c.layout, 3, 1);
      scores.push_back(twins.scores(l));
      buffers.k[layer].put(values[layer].k_bytes());
      buffers.v[layer].put(values[layer].v_bytes());
      buffers.scores[layer].put(scores[layer]);
    }
  };
  const auto step = [&](KvStore& store, bool device) {
    ASSERT_TRUE(store.begin_step(l, 1));
    for (int32_t layer = 0; layer < 2; ++layer) {
      const void* k = device ? buffers.k[layer].get<void>() : values[layer].k();
      const void* v = device ? buffers.v[layer].get<void>() : values[layer].v();
      const float* x = device ? buffers.scores[layer].get<float>() : scores[layer].data();
      ASSERT_TRUE(store.append({l, layer, 1, k, v}));
      ASSERT_TRUE(store.update_scores({l, layer, 0, x, c.max_tokens}));
    }
  };
  fresh_inputs();
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  step(twins.device(), true);
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (int32_t i = 0; i < 60; ++i) {
    if (i > 0) {
      fresh_inputs();
      ASSERT_TRUE(twins.device().note_replay(l, 1));
    }
    ASSERT_CUDA(cudaGraphLaunch(replay, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    step(twins.host(), false);
    if (i % 10 == 0) {
      ASSERT_EQ(twins.difference(), "") << "replay " << i;
    }
  }
  ASSERT_TRUE(twins.device().take_status());
  ASSERT_EQ(twins.difference(), "");
  // And eagerly on from there.
  fresh_inputs();
  step(twins.host(), false);
  step(twins.device(), true);
  ASSERT_EQ(twins.difference(), "");
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

TEST(StoreDevice, DoesNothingAfterAFailureUntilItIsTaken) {
  RandomInput input;
  Twins twins(small_config(), &input);
  SequenceId id;
  ASSERT_TRUE(twins.add(&id));
  const SequenceList l = {&id, 1};
  ASSERT_TRUE(twins.begin_prompt(l, 30));
  ASSERT_TRUE(twins.append_all(l, 30));
  ASSERT_TRUE(twins.end_prompt(l));
  ASSERT_TRUE(twins.begin_step(l, 1));

  std::vector<uint16_t> good(2 * 64, float_to_half(0.5f)), bad = good;
  bad[77] = 0x7e00;
  Buffer good_values, bad_values;
  DeviceStore& device = twins.device();
  ASSERT_TRUE(device.append({l, 0, 1, good_values.put(good), bad_values.put(bad)}));
  ASSERT_TRUE(device.append({l, 1, 1, good_values.get<void>(), good_values.get<void>()}));
  ASSERT_TRUE(device.begin_step(l, 1)) << "as far as the host knows";
  EXPECT_EQ(device.stats().status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(device.fork(id).status().code(), StatusCode::kInvalidArgument);
  const Status status = device.take_status();
  EXPECT_EQ(status.code(), StatusCode::kNonFinite) << status.message();
  EXPECT_TRUE(device.take_status());
  EXPECT_EQ(*device.num_tokens(id), 31);
  EXPECT_EQ(device.begin_step(l, 1).code(), StatusCode::kInvalidArgument) << "layers lack tokens";
  ASSERT_TRUE(twins.append_all(l, 1)) << "the layers take their tokens now";
  EXPECT_EQ(twins.difference(), "");
  ASSERT_TRUE(twins.begin_step(l, 3));
  ASSERT_TRUE(twins.append_all(l, 3));
  EXPECT_EQ(twins.difference(), "");
}

// A plan that was made before it fits the batch that is written after it.
TEST(StoreDevice, AttendsWithThePlanOfBeforeAFailure) {
  RandomInput input;
  KvStoreConfig c = small_config();
  c.layout.head_dim = 128;
  c.page_bytes = 0;
  c.num_pages = 200;
  Twins twins(c, &input);
  std::vector<SequenceId> ids(4);
  for (SequenceId& id : ids) ASSERT_TRUE(twins.add(&id));
  const SequenceList all = {ids.data(), 4}, some = {ids.data(), 3}, other = {&ids[3], 1};
  ASSERT_TRUE(twins.begin_prompt(all, 120));
  ASSERT_TRUE(twins.append_all(all, 120));
  for (int32_t layer = 0; layer < 2; ++layer) ASSERT_TRUE(twins.score_prompt(all, layer));
  ASSERT_TRUE(twins.end_prompt(all));
  ASSERT_TRUE(twins.begin_step(some, 1));
  ASSERT_TRUE(twins.append(some, 0, 1));

  constexpr size_t kValues = 3 * 4 * 128, kGuard = 64 * 128;
  const std::vector<uint8_t> q = input.values(DType::kFloat16, 3 * 4, 128);
  const std::vector<uint16_t> poison(kValues + kGuard, 0x7e00);
  const std::vector<float> seen = twins.scores(other);
  const std::vector<uint16_t> bad(3 * 2 * 128, 0x7e00);
  Buffer dq, dout, dseen, dbad;
  AttendRequest request;
  request.sequences = some;
  request.q = dq.put(q);
  request.out = dout.put(poison);
  DeviceStore& device = twins.device();
  ASSERT_TRUE(device.attend(request));
  const auto out = dout.read<uint16_t>(poison.size());
  for (size_t i = 0; i < kValues; ++i) ASSERT_NE(out[i], 0x7e00) << i;
  ASSERT_TRUE(device.append({some, 1, 1, dbad.put(bad), dbad.get<void>()}));
  ASSERT_TRUE(device.update_scores({other, 0, 0, dseen.put(seen), c.max_tokens}));
  dout.put(poison);
  ASSERT_TRUE(device.attend(request));
  EXPECT_EQ(dout.read<uint16_t>(poison.size()), out);
  EXPECT_EQ(device.take_status().code(), StatusCode::kNonFinite);
}

// The host takes for granted that the prompts ended; the device knows better.
TEST(StoreDevice, RefusesAStepAfterAPromptThatCouldNotEnd) {
  RandomInput input;
  KvStoreConfig c = small_config();
  c.num_pages = 40;  // four rows of 8 window pages; the tiers would need as many again
  Twins twins(c, &input);
  SequenceId id;
  ASSERT_TRUE(twins.add(&id));
  const SequenceList l = {&id, 1};
  ASSERT_TRUE(twins.begin_prompt(l, 120));
  ASSERT_TRUE(twins.append_all(l, 120));
  DeviceStore& device = twins.device();
  ASSERT_TRUE(device.end_prompt(l));
  ASSERT_TRUE(device.begin_step(l, 1));
  const CallValues values(&input, c.layout, 1, 1);
  Buffer k;
  ASSERT_TRUE(device.append({l, 0, 1, k.put(values.k_bytes()), k.get<void>()}));
  EXPECT_EQ(device.take_status().code(), StatusCode::kOutOfPages);
  EXPECT_EQ(*device.num_tokens(id), 120);
  EXPECT_EQ(twins.host().end_prompt(l).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(twins.difference(), "");
  ASSERT_TRUE(twins.truncate(id, 20)) << "in its prompt, as it was";
  ASSERT_TRUE(twins.end_prompt(l));
  EXPECT_EQ(twins.difference(), "");
}

TEST(StoreDevice, AttendsLikeTheHost) {
  RandomInput input;
  KvStoreConfig c = small_config();
  c.layout.head_dim = 128;
  c.layout.sm_scale = 0.002;  // logits of a few units: the values' scales spread over 2^8
  c.page_bytes = 0;
  c.num_pages = 100;
  Twins twins(c, &input);
  std::vector<SequenceId> ids(2);
  for (SequenceId& id : ids) ASSERT_TRUE(twins.add(&id));
  const SequenceList l = {ids.data(), 2};
  ASSERT_TRUE(twins.begin_prompt(l, 100));
  ASSERT_TRUE(twins.append_all(l, 100));
  for (int32_t layer = 0; layer < 2; ++layer) ASSERT_TRUE(twins.score_prompt(l, layer));
  ASSERT_TRUE(twins.end_prompt(l));
  for (int32_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(twins.begin_step(l, 1));
    ASSERT_TRUE(twins.append_all(l, 1));
  }
  std::vector<uint16_t> q(2 * 4 * 128), out(q.size(), 0x7e00);
  for (uint16_t& x : q) x = float_to_half(input.real(-1, 1));
  std::vector<float> lse(8, NAN), p(2 * 2 * 150, NAN);
  Buffer dq, dout, dlse, dp;
  AttendRequest request;
  request.sequences = l;
  request.layer = 1;
  request.q = dq.put(q);
  request.out = const_cast<uint16_t*>(dout.put(out));
  request.lse = const_cast<float*>(dlse.put(lse));
  request.probabilities = const_cast<float*>(dp.put(p));
  request.stride = 150;
  ASSERT_TRUE(twins.device().attend(request));
  ASSERT_TRUE(twins.device().take_status());
  request.q = q.data();
  request.out = out.data();
  request.lse = lse.data();
  request.probabilities = p.data();
  ASSERT_TRUE(twins.host().attend(request));
  const auto device_out = dout.read<uint16_t>(out.size());
  const auto device_lse = dlse.read<float>(8), device_p = dp.read<float>(p.size());
  // P and its products are rounded to fp16 in the kernel: 2^-11 of the values attended to.
  float largest = 0;
  for (const uint16_t x : out) largest = std::max(largest, std::fabs(half_to_float(x)));
  for (size_t i = 0; i < out.size(); ++i) {
    EXPECT_NEAR(half_to_float(device_out[i]), half_to_float(out[i]), 4e-3f * largest) << i;
  }
  for (int32_t i = 0; i < 8; ++i) EXPECT_NEAR(device_lse[i], lse[i], 4e-3f + 1e-3f * lse[i]);
  for (int32_t r = 0; r < 4; ++r) {
    for (int32_t i = 0; i < 105; ++i) {
      EXPECT_NEAR(device_p[r * 150 + i], p[r * 150 + i], 1e-2f * p[r * 150 + i] + 1e-6f);
    }
    EXPECT_TRUE(std::isnan(device_p[r * 150 + 105])) << "beyond the tokens";
  }
}

}  // namespace
}  // namespace tierkv::testing

// Stores of channel blocks on the GPU beside the host's: equal states after each call, byte for
// byte, and attention that agrees.
#include "tests/gpu/store/channel_store_twins.cuh"
#include "tests/gpu/store/trace_steps.h"
#include "tests/gpu/store/twin_trace.cuh"

namespace tierkv::testing {
namespace {

TEST(GpuChannelStore, IsTheHostStoreByteForByte) {
  constexpr int32_t kHeadDims[] = {64, 128, 96, 256};
  constexpr DType kDTypes[] = {DType::kFloat16, DType::kFloat16, DType::kBFloat16, DType::kFloat32};
  for (int32_t i = 0; i < 12; ++i) {
    RandomInput input;
    KvStoreConfig config = channel_config(kHeadDims[i / 2 % 4]);
    config.layout.dtype = kDTypes[i % 4];
    config.channel.k_bits = i % 2 == 0 ? 4 : 2;
    config.channel.v_bits = i / 2 % 2 == 0 ? 4 : 2;
    if (i % 4 == 2) config.policy.window_tokens = 64;
    if (i % 4 == 3) config.num_pages = 90;
    if (i % 5 > 2 && config.layout.head_dim < 256) config.channel.block_tokens = 128;
    SCOPED_TRACE(to_json(config));
    ChannelTwins twins(config, &input);
    TwinTrace<ChannelTwins> trace(&twins, &input);
    trace.run(trace_steps(60));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// A long life of steps alone, around every boundary of a block.
TEST(GpuChannelStore, StepsMakeTheirBlocks) {
  for (const int32_t bits : {4, 2}) {
    RandomInput input;
    KvStoreConfig config = channel_config(128);
    config.channel.k_bits = config.channel.v_bits = bits;
    config.max_tokens = 1000;
    ChannelTwins twins(config, &input);
    SequenceId ids[2];
    ASSERT_TRUE(twins.add(&ids[0]));
    ASSERT_TRUE(twins.add(&ids[1]));
    ASSERT_TRUE(twins.prompt({ids, 1}, 130));
    ASSERT_TRUE(twins.prompt({ids + 1, 1}, 7));
    ASSERT_TRUE(twins.end_prompt({ids, 2}));
    for (int32_t i = 0; i < trace_steps(110); ++i) {
      ASSERT_TRUE(twins.step({ids, 2}, 1 + i % 5));
      ASSERT_EQ(twins.difference(), "") << i;
      if (i % 10 == 9) ASSERT_EQ(twins.attention_difference({ids, 2}), "") << i;
    }
    const StoreStats a = *twins.host().stats(), b = *twins.device().stats();
    EXPECT_EQ(a.nominal_bytes, b.nominal_bytes);
    EXPECT_EQ(a.pages_free, b.pages_free);
  }
}

// Lengths around blocks and window; one token, and none.
TEST(GpuChannelStore, EveryPromptLength) {
  RandomInput input;
  KvStoreConfig config = channel_config(64);
  config.policy.window_tokens = 16;
  ChannelTwins twins(config, &input);
  for (const int32_t tokens : {0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 143, 144, 145}) {
    SequenceId id;
    ASSERT_TRUE(twins.add(&id));
    EXPECT_EQ(twins.attention_difference({&id, 1}), "") << "no tokens";
    ASSERT_TRUE(tokens == 0 || twins.prompt({&id, 1}, tokens));
    EXPECT_EQ(twins.attention_difference({&id, 1}), "") << "in a prompt of " << tokens;
    ASSERT_TRUE(twins.end_prompt({&id, 1}));
    ASSERT_EQ(twins.difference(), "") << tokens;
    EXPECT_EQ(twins.attention_difference({&id, 1}), "") << tokens;
    ASSERT_TRUE(twins.step({&id, 1}, 1));
    ASSERT_EQ(twins.difference(), "") << tokens;
    EXPECT_EQ(twins.attention_difference({&id, 1}), "") << tokens;
    ASSERT_TRUE(twins.release(id));
  }
}

// Long rows, split among many CTAs, beside short ones.
TEST(GpuChannelStore, LongAndShortRows) {
  RandomInput input;
  KvStoreConfig config = channel_config(128);
  config.layout.num_layers = 1;
  config.max_tokens = 9000;
  config.num_pages = 700;
  ChannelTwins twins(config, &input);
  SequenceId ids[3];
  constexpr int32_t kTokens[] = {8500, 1, 300};
  for (int32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(twins.add(&ids[i]));
    ASSERT_TRUE(twins.prompt({ids + i, 1}, kTokens[i]));
    ASSERT_EQ(twins.attention_difference({ids + i, 1}), "") << kTokens[i];
  }
  ASSERT_TRUE(twins.end_prompt({ids, 3}));
  EXPECT_EQ(twins.attention_difference({ids, 3}), "");
}

// Several queries of a sequence, of every number of passes and groups of passes; either type;
// learned sinks; lengths that differ, one of as many tokens as queries.
TEST(GpuChannelStore, QueriesOfEveryKind) {
  for (const int32_t head_dim : {64, 128, 96, 256}) {
    for (const int32_t group : {1, 4, 6, 16}) {
      RandomInput input;
      KvStoreConfig config = channel_config(head_dim);
      config.layout.num_layers = 1;
      config.layout.num_q_heads = 2 * group;
      config.channel.k_bits = input.chance(0.5) ? 4 : 2;
      config.channel.v_bits = input.chance(0.5) ? 4 : 2;
      SCOPED_TRACE(to_json(config));
      ChannelTwins twins(config, &input);
      SequenceId ids[4];
      const int32_t tokens[] = {input.uniform(300, 480), input.uniform(60, 140), 25, 8};
      for (int32_t i = 0; i < 4; ++i) {
        ASSERT_TRUE(twins.add(&ids[i]));
        ASSERT_TRUE(twins.prompt({ids + i, 1}, tokens[i]));
      }
      ASSERT_TRUE(twins.end_prompt({ids, 4}));
      std::vector<float> sinks;
      for (int32_t i = 0; i < 2 * group; ++i) {
        sinks.push_back(input.chance(0.3) ? -INFINITY : input.real(-2, 2));
      }
      for (const int32_t q_len : {1, 2, 5, 8}) {
        AttendRequest request;
        request.q_len = q_len;
        EXPECT_EQ(twins.attention_difference({ids, 4}, request), "") << q_len;
        request.dtype = DType::kBFloat16;
        request.sinks = sinks.data();
        EXPECT_EQ(twins.attention_difference({ids, 4}, request), "") << q_len << " bfloat16";
        ASSERT_TRUE(twins.step({ids, 4}, q_len));
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// A captured call goes on with the rows that it finds: as many items as it was captured with,
// however the lengths have become.
TEST(GpuChannelStore, ACapturedCallFollowsTheLengths) {
  RandomInput input;
  KvStoreConfig config = channel_config(128);
  config.layout.num_layers = 1;
  config.max_tokens = 5000;
  config.num_pages = 700;
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  {
    ChannelTwins twins(config, &input, stream);
    SequenceId ids[3];
    for (SequenceId& id : ids) ASSERT_TRUE(twins.add(&id));
    ASSERT_TRUE(twins.prompt({ids, 3}, 70));
    const std::vector<uint16_t> queries = twins.queries(3);
    Buffer q, out, lse;
    AttendRequest request;
    request.sequences = {ids, 3};
    request.q = q.put(queries);
    request.out = out.put(std::vector<uint16_t>(queries.size(), 0x7e00));
    request.lse = lse.put(std::vector<float>(18, NAN));
    // Another list is planned in between, so that the captured call has a plan of its own.
    AttendRequest other = request;
    other.sequences.count = 1;
    ASSERT_TRUE(twins.device().attend(other));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    const Status attended = twins.device().attend(request);
    EXPECT_TRUE(attended) << attended.message();
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    for (const int32_t more : {0, 4000, 300}) {
      if (more > 0) {
        ASSERT_TRUE(twins.prompt({ids + more % 7 % 3, 1}, more));
        // The batch that the graph reads is the device's last one.
        ASSERT_TRUE(twins.device().attend(request));
      }
      ASSERT_EQ(cudaMemset(request.out, 0xff, queries.size() * 2), cudaSuccess);
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_EQ(twins.output_difference(request, queries, out.read<uint16_t>(queries.size()),
                                        lse.read<float>(18)),
                "")
          << more;
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

TEST(GpuChannelStore, OutOfPagesIsToldAndTakenBack) {
  RandomInput input;
  KvStoreConfig config = channel_config(64);
  config.num_pages = 40;
  ChannelTwins twins(config, &input);
  SequenceId ids[2];
  for (SequenceId& id : ids) ASSERT_TRUE(twins.add(&id));
  ASSERT_TRUE(twins.prompt({ids, 1}, 250));
  ASSERT_EQ(twins.prompt({ids + 1, 1}, 450).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(twins.difference(), "");
  ASSERT_TRUE(twins.end_prompt({ids, 1}));
  StatusCode code = StatusCode::kOk;
  for (int32_t i = 0; i < 60 && code == StatusCode::kOk; ++i) {
    code = twins.step({ids, 1}, 4).code();
  }
  EXPECT_EQ(code, StatusCode::kOutOfPages);
  EXPECT_EQ(twins.difference(), "");
  EXPECT_EQ(twins.attention_difference({ids, 1}), "");
}

// One captured step, replayed, attention included: whether a block is due and how many there are is
// the device's to find.
TEST(GpuChannelStore, ACapturedStepMakesBlocks) {
  RandomInput input;
  const KvStoreConfig config = channel_config(128);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  {
    ChannelTwins twins(config, &input, stream);
    SequenceId ids[2];
    for (SequenceId& id : ids) ASSERT_TRUE(twins.add(&id));
    ASSERT_TRUE(twins.prompt({ids, 1}, 140));
    ASSERT_TRUE(twins.prompt({ids + 1, 1}, 100));
    ASSERT_TRUE(twins.end_prompt({ids, 2}));
    Buffer k, v, q, out, lse;
    const size_t elements = size_t{2} * 6 * 128;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    for (int32_t i = 0; i < trace_steps(200); ++i) {
      const std::vector<uint8_t> x = twins.values(2), y = twins.values(2);
      const uint8_t *device_x = k.put(x), *device_y = v.put(y);
      const std::vector<uint16_t> queries = twins.queries(2);
      AttendRequest request;
      request.sequences = {ids, 2};
      request.layer = 1;
      request.q = q.put(queries);
      request.out = out.put(std::vector<uint16_t>(elements, 0x7e00));
      request.lse = lse.put(std::vector<float>(12, NAN));
      ASSERT_TRUE(twins.host().begin_step({ids, 2}, 1));
      for (int32_t layer = 0; layer < 2; ++layer) {
        ASSERT_TRUE(twins.host().append({{ids, 2}, layer, 1, x.data(), y.data()}));
      }
      if (i == 0) {
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        EXPECT_TRUE(twins.device().begin_step({ids, 2}, 1));
        for (int32_t layer = 0; layer < 2; ++layer) {
          EXPECT_TRUE(twins.device().append({{ids, 2}, layer, 1, device_x, device_y}));
        }
        const Status attended = twins.device().attend(request);
        EXPECT_TRUE(attended) << attended.message();
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
      } else {
        ASSERT_TRUE(twins.device().note_replay({ids, 2}, 1));
      }
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      ASSERT_EQ(twins.output_difference(request, queries, out.read<uint16_t>(elements),
                                        lse.read<float>(12)),
                "")
          << "step " << i;
      if (i % 20 != 19) continue;
      ASSERT_TRUE(twins.device().take_status());
      ASSERT_EQ(twins.difference(), "") << i;
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

TEST(GpuChannelStore, RefusesByName) {
  const auto refused = [](const KvStoreConfig& c) {
    const auto store = create_device_store(c, nullptr);
    return store ? Status::ok() : store.status();
  };
  EXPECT_EQ(refused(channel_config(256)).code(), StatusCode::kOk);
  KvStoreConfig c = channel_config(64);
  c.layout.num_q_heads = 34;
  EXPECT_EQ(refused(c).code(), StatusCode::kUnsupported);
  c = channel_config(64);
  c.channel.k_bits = 8;
  EXPECT_EQ(refused(c).code(), StatusCode::kUnsupported);
  RandomInput input;
  ChannelTwins twins(channel_config(64), &input);
  SequenceId id;
  ASSERT_TRUE(twins.add(&id));
  ASSERT_TRUE(twins.prompt({&id, 1}, 3));
  EXPECT_EQ(twins.device().score_prompt({}).code(), StatusCode::kUnsupported);
  EXPECT_EQ(twins.device().update_scores({}).code(), StatusCode::kUnsupported);
  Buffer q, other;
  AttendRequest request;
  request.sequences = {&id, 1};
  request.q = request.out = q.put(std::vector<uint16_t>(2 * 6 * 64));
  const auto code = [&] { return twins.device().attend(request).code(); };
  EXPECT_EQ(code(), StatusCode::kOk);
  request.probabilities = other.put(std::vector<float>(2000));
  request.stride = 500;
  EXPECT_EQ(code(), StatusCode::kUnsupported);
  request.probabilities = nullptr;
  request.q_len = 4;
  EXPECT_EQ(code(), StatusCode::kInvalidArgument);  // of three tokens
  request.q_len = 1;
  request.dtype = DType::kFloat32;
  EXPECT_EQ(code(), StatusCode::kUnsupported);
  request.dtype = DType::kFloat16;
  request.q = q.get<uint16_t>() + 1;
  EXPECT_EQ(code(), StatusCode::kInvalidArgument);
  request.q = q.get<uint16_t>();
  ASSERT_TRUE(twins.end_prompt({&id, 1}));
  request.count_query = true;
  EXPECT_EQ(code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace tierkv::testing

// Single calls of coded stores on the GPU beside the host's: what is refused and taken back,
// captured steps, learned sinks and probabilities.
#include "tests/gpu/store/coded_store_twins.cuh"

namespace tierkv::testing {
namespace {

TEST(GpuCodedStoreCalls, BadValuesAreToldAndTakenBack) {
  RandomInput input;
  CodedTwins twins(coded_config(&input, 64), &input);
  SequenceId id;
  ASSERT_TRUE(twins.add(&id));
  ASSERT_TRUE(twins.prompt({&id, 1}, 100));
  ASSERT_TRUE(twins.end_prompt({&id, 1}));
  const std::vector<uint16_t> good = twins.values(1);
  for (const uint16_t bits : {0x7c00, 0x7e00, 0x7bff}) {  // the last has no code
    ASSERT_TRUE(
        twins.same(twins.host().begin_step({&id, 1}, 1), twins.device().begin_step({&id, 1}, 1)));
    std::vector<uint16_t> bad = good;
    bad[65] = bits;
    Buffer k, v;
    const Status host = twins.host().append({{&id, 1}, 0, 1, good.data(), bad.data()});
    ASSERT_FALSE(host);
    ASSERT_TRUE(twins.device().append({{&id, 1}, 0, 1, k.put(good), v.put(bad)}));
    // What comes behind the failure is not done.
    ASSERT_TRUE(twins.device().append({{&id, 1}, 1, 1, k.put(good), v.put(good)}));
    EXPECT_EQ(twins.device().take_status().code(), host.code());
    ASSERT_TRUE(twins.append({&id, 1}, 1));
    EXPECT_EQ(twins.difference(), "");
  }
}

// Prompts that find no pages leave no codebooks behind: the next ones make them, from their codes.
TEST(GpuCodedStoreCalls, ARefusedPromptMakesNoCodebooks) {
  RandomInput input;
  KvStoreConfig config = coded_config(&input, 64);
  config.num_pages = 34;
  CodedTwins twins(config, &input);
  SequenceId ids[2];
  for (SequenceId& id : ids) ASSERT_TRUE(twins.add(&id));
  twins.set_spread(4);
  ASSERT_TRUE(twins.prompt({ids, 1}, 250));  // 16 pages
  ASSERT_TRUE(twins.prompt({ids + 1, 1}, 250));
  ASSERT_EQ(twins.end_prompt({ids, 2}).code(), StatusCode::kOutOfPages);
  EXPECT_FALSE(twins.host().books().ready());
  ASSERT_TRUE(twins.release(ids[1]));
  ASSERT_TRUE(twins.end_prompt({ids, 1}));
  EXPECT_EQ(twins.difference(), "");
  EXPECT_EQ(twins.attention_difference({ids, 1}), "");
  for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(twins.step({ids, 1}, 8));
  EXPECT_EQ(twins.difference(), "");
}

// A coded token, or one of the window, that has no code: the prompt stays a prompt.
TEST(GpuCodedStoreCalls, APromptWithoutACodeStaysAPrompt) {
  RandomInput input;
  for (const bool first : {true, false}) {  // before and after there are codebooks
    CodedTwins twins(coded_config(&input, 64), &input);
    SequenceId id;
    for (int32_t i = first ? 0 : 1; i < 2; ++i) {
      ASSERT_TRUE(twins.add(&id));
      ASSERT_TRUE(twins.prompt({&id, 1}, 200));
      if (i == 0) break;
      ASSERT_TRUE(twins.end_prompt({&id, 1}));
    }
    for (const int32_t at : {10, 190}) {
      ASSERT_TRUE(twins.add(&id));
      ASSERT_TRUE(twins.same(twins.host().begin_prompt({&id, 1}, 200),
                             twins.device().begin_prompt({&id, 1}, 200)));
      for (int32_t layer = 0; layer < 2; ++layer) {
        std::vector<uint16_t> x = twins.values(200);
        if (layer == 1) x[at * 128 + 70] = 0x7bff;
        Buffer k;
        const uint16_t* device = k.put(x);
        ASSERT_TRUE(twins.same(twins.host().append({{&id, 1}, layer, 200, x.data(), x.data()}),
                               twins.device().append({{&id, 1}, layer, 200, device, device})));
      }
      EXPECT_EQ(twins.end_prompt({&id, 1}).code(), StatusCode::kOutOfRange);
      EXPECT_EQ(twins.difference(), "") << at;
      ASSERT_TRUE(twins.release(id));
    }
  }
}

// A plan of attention says nothing of the sequence that is in a slot next.
TEST(GpuCodedStoreCalls, ASlotsNextSequenceBeginsEmpty) {
  RandomInput input;
  CodedTwins twins(coded_config(&input, 64), &input);
  for (int32_t i = 0; i < 2; ++i) {
    SequenceId id;
    ASSERT_TRUE(twins.add(&id));
    EXPECT_EQ(twins.attention_difference({&id, 1}), "") << i;
    ASSERT_TRUE(twins.prompt({&id, 1}, 150));
    ASSERT_TRUE(twins.end_prompt({&id, 1}));
    EXPECT_EQ(twins.attention_difference({&id, 1}), "") << i;
    ASSERT_TRUE(twins.release(id));
  }
}

// One captured step, replayed, attention included: whether a block is due and how many there are is
// the device's to find.
void capture_steps(const KvStoreConfig& config, RandomInput& input) {
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  {
    CodedTwins twins(config, &input, stream);
    SequenceId ids[2];
    ASSERT_TRUE(twins.add(&ids[0]));
    ASSERT_TRUE(twins.add(&ids[1]));
    ASSERT_TRUE(twins.prompt({ids, 1}, 140));
    ASSERT_TRUE(twins.prompt({ids + 1, 1}, 100));
    ASSERT_TRUE(twins.end_prompt({ids, 2}));
    Buffer k[2], v[2], q[2], out[2];
    const size_t elements = size_t{2} * 6 * 128;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    for (int32_t i = 0; i < 200; ++i) {
      ASSERT_TRUE(twins.host().begin_step({ids, 2}, 1));
      uint16_t *device_k[2], *device_v[2];
      for (int32_t layer = 0; layer < 2; ++layer) {
        const std::vector<uint16_t> x = twins.values(2), y = twins.values(2);
        ASSERT_TRUE(twins.host().append({{ids, 2}, layer, 1, x.data(), y.data()}));
        device_k[layer] = k[layer].put(x);
        device_v[layer] = v[layer].put(y);
      }
      std::vector<uint16_t> queries[2];
      AttendRequest requests[2];
      for (int32_t layer = 0; layer < 2; ++layer) {
        for (size_t j = 0; j < elements; ++j) {
          queries[layer].push_back(float_to_half(input.real(-2, 2)));
        }
        requests[layer].sequences = {ids, 2};
        requests[layer].layer = layer;
        requests[layer].q = q[layer].put(queries[layer]);
        requests[layer].out = out[layer].put(std::vector<uint16_t>(elements, 0x7e00));
      }
      if (i == 0) {
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        const Status begun = twins.device().begin_step({ids, 2}, 1);
        EXPECT_TRUE(begun) << begun.message();
        for (int32_t layer = 0; layer < 2; ++layer) {
          EXPECT_TRUE(
              twins.device().append({{ids, 2}, layer, 1, device_k[layer], device_v[layer]}));
          const Status attended = twins.device().attend(requests[layer]);
          EXPECT_TRUE(attended) << attended.message();
        }
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
      } else {
        ASSERT_TRUE(twins.device().note_replay({ids, 2}, 1));
      }
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      for (int32_t layer = 0; layer < 2; ++layer) {
        std::vector<uint16_t> want(elements);
        AttendRequest request = requests[layer];
        request.q = queries[layer].data();
        request.out = want.data();
        ASSERT_TRUE(twins.host().attend(request));
        const auto got = out[layer].read<uint16_t>(elements);
        for (size_t j = 0; j < elements; ++j) {
          // As in attention_difference().
          ASSERT_NEAR(half_to_float(got[j]), half_to_float(want[j]), twins.value_tolerance())
              << "step " << i;
        }
      }
      if (i % 20 == 19) {
        ASSERT_TRUE(twins.device().take_status());
        ASSERT_EQ(twins.difference(), "") << i;
        ASSERT_EQ(twins.attention_difference({ids, 2}), "") << i;
      }
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

TEST(GpuCodedStoreCalls, ACapturedStepCodesBlocks) {
  RandomInput input;
  capture_steps(coded_config(&input, 128), input);
}

// The first blocks at a fixed rate, some of them made by the steps.
TEST(GpuCodedStoreCalls, ACapturedStepMakesFixedRateBlocks) {
  RandomInput input;
  KvStoreConfig config = coded_config(&input, 128);
  config.coded.fixed_blocks = true;
  config.policy.sink_tokens = 170;
  capture_steps(config, input);
}

struct HostCall {
  AttendRequest request;
  std::vector<uint16_t> q, out;
  std::vector<float> lse, sinks, probabilities;

  // Poisoned; some heads have no sink.
  HostCall(const KvStoreConfig& config, SequenceList list, int32_t q_len, RandomInput* input) {
    const CacheLayout& layout = config.layout;
    const size_t queries = static_cast<size_t>(list.count) * q_len * layout.num_q_heads;
    request.stride = 310;
    out.resize(queries * layout.head_dim, 0x7e00);
    lse.resize(queries, NAN);
    probabilities.resize(queries / layout.group_size() * request.stride, -1.0f);
    for (size_t i = 0; i < out.size(); ++i) q.push_back(float_to_half(input->real(-2, 2)));
    for (int32_t h = 0; h < layout.num_q_heads; ++h) {
      sinks.push_back(h == 1 ? -INFINITY : input->real(-2, 9));
    }
    request.sequences = list;
    request.q_len = q_len;
    request.q = q.data();
    request.out = out.data();
    request.lse = lse.data();
    request.sinks = sinks.data();
    request.probabilities = probabilities.data();
  }
};

// Learned sinks and probabilities, of several queries and without an lse, too; of a sequence
// without tokens nothing is written where its tokens would be.
TEST(GpuCodedStoreCalls, SinksAndProbabilitiesAreThoseOfTheHost) {
  for (const bool fixed : {false, true}) {
    RandomInput input;
    KvStoreConfig config = coded_config(&input, fixed ? 64 : 128);
    config.coded.fixed_blocks = fixed;
    if (fixed) config.policy.sink_tokens = 1;
    CodedTwins twins(config, &input);
    SequenceId ids[2];
    for (SequenceId& id : ids) ASSERT_TRUE(twins.add(&id));
    ASSERT_TRUE(twins.prompt({ids, 1}, 300));
    ASSERT_TRUE(twins.end_prompt({ids, 1}));
    for (const int32_t q_len : {1, 3}) {
      HostCall want(config, {ids, q_len == 1 ? 2 : 1}, q_len, &input);
      const std::vector<float> poison = want.probabilities;
      ASSERT_TRUE(twins.host().attend(want.request));
      Buffer q, out, lse, sinks, probabilities;
      AttendRequest request = want.request;
      request.q = q.put(want.q);
      request.sinks = sinks.put(want.sinks);
      for (const bool asks : {true, false}) {
        request.out = out.put(std::vector<uint16_t>(want.out.size(), 0x7e00));
        request.lse = asks ? lse.put(std::vector<float>(want.lse.size(), NAN)) : nullptr;
        request.probabilities = probabilities.put(poison);
        ASSERT_TRUE(twins.device().attend(request));
        ASSERT_TRUE(twins.device().take_status());
        const auto got = out.read<uint16_t>(want.out.size());
        // What is left of an output is off by what its sum is off by: 2^-11 of it.
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_NEAR(half_to_float(got[i]), half_to_float(want.out[i]),
                      twins.value_tolerance() * 7 / 6)
              << i;
        }
        const double score = twins.score_tolerance();
        const auto p = probabilities.read<float>(poison.size());
        for (size_t i = 0; i < p.size(); ++i) {
          const float x = want.probabilities[i];
          if (x <= 0) {
            ASSERT_EQ(p[i], x) << i;
          } else {
            ASSERT_NEAR(p[i], x, x * std::expm1(2e-3 + 4 * score) + 1e-30) << i;
          }
        }
        if (!asks) continue;
        const auto got_lse = lse.read<float>(want.lse.size());
        for (size_t i = 0; i < got_lse.size(); ++i) {
          if (std::isinf(want.lse[i])) {
            ASSERT_EQ(got_lse[i], want.lse[i]) << i;
          } else {
            ASSERT_NEAR(got_lse[i], want.lse[i], 2e-3 + 2 * score) << i;
          }
        }
      }
    }
  }
}

TEST(GpuCodedStoreCalls, RefusesByName) {
  RandomInput input;
  const auto refused = [](const KvStoreConfig& c) {
    const auto store = create_device_store(c, nullptr);
    return store ? Status::ok() : store.status();
  };
  KvStoreConfig c = coded_config(&input, 64);
  c.coded.key_steps.clear();
  EXPECT_EQ(refused(c).code(), StatusCode::kInvalidArgument);
  // More tables than shared memory holds.
  c = coded_config(&input, 128);
  give_family(&c, 15);
  EXPECT_EQ(refused(c).code(), StatusCode::kUnsupported);
  EXPECT_NE(refused(c).message().find("shared memory holds"), std::string::npos)
      << refused(c).message();
  c = coded_config(&input, 64);
  CodedTwins twins(c, &input);
  SequenceId id;
  ASSERT_TRUE(twins.add(&id));
  ASSERT_TRUE(twins.prompt({&id, 1}, 3));
  EXPECT_EQ(twins.device().score_prompt({}).code(), StatusCode::kUnsupported);
  Buffer q;
  AttendRequest request;
  request.sequences = {&id, 1};
  request.q = request.out = q.put(std::vector<uint16_t>(6 * 64));
  EXPECT_TRUE(twins.device().attend(request));
  ASSERT_TRUE(twins.end_prompt({&id, 1}));
  request.count_query = true;
  EXPECT_EQ(twins.device().attend(request).code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace tierkv::testing

// SPDX-License-Identifier: Apache-2.0
// Attention over an engine's blocks on the GPU, against engine_attend_host(). Tests named Small*
// are small enough for compute-sanitizer.
#include "tests/gpu/device_array.cuh"
#include "tests/support/engine_world.h"
#include "tests/support/fresh_random.h"

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaGetLastError())

namespace tierkv {
namespace {

using test::DeviceArray;
using test::EngineShape;
using test::EngineWorld;

// A world on the device.
struct DeviceEngine {
  explicit DeviceEngine(EngineWorld& e)
      : host(e),
        grid(*engine_grid(e.config)),
        bytes(std::vector<uint8_t>(e.w.cache.base,
                                   e.w.cache.base + e.w.cache.num_blocks * e.w.cache.block_stride)),
        reflections(e.w.reflections),
        table(e.w.table),
        lens(e.lens),
        starts(e.starts),
        sequences(e.shape.sequences),
        q(e.q),
        out(e.out),
        lse(e.lse),
        errors(kEngineErrors, 0),
        workspace(engine_workspace_bytes(e.config, grid), 0) {}

  EngineAttend call() {
    EngineAttend c = host.call();
    c.batch.block_table = table.get();
    c.batch.seq_lens = lens.get();
    c.batch.query_start_loc = starts.get();
    if (c.batch.sequences != nullptr) c.batch.sequences = sequences.get();
    c.layer.blocks = bytes.get();
    if (c.layer.key_reflection != nullptr) c.layer.key_reflection = reflections.get();
    c.q = q.get();
    c.out = out.get();
    c.lse = lse.get();
    c.errors = errors.get();
    return c;
  }
  AttentionWorkspace space() { return {workspace.get(), workspace.size()}; }
  Status plan(cudaStream_t stream = nullptr) {
    return engine_plan(host.config, grid, call().batch, space(), stream);
  }
  Status attend(cudaStream_t stream = nullptr) {
    return engine_attend(host.config, grid, call(), space(), stream);
  }

  EngineWorld& host;
  const EngineGrid grid;
  DeviceArray<uint8_t> bytes;
  DeviceArray<float> reflections;
  DeviceArray<int32_t> table, lens, starts, sequences;
  DeviceArray<uint16_t> q, out;
  DeviceArray<float> lse;
  DeviceArray<int32_t> errors;
  DeviceArray<uint8_t> workspace;
};

class Engine : public RandomTest {
 protected:
  int32_t uniform(int32_t lo, int32_t hi) {
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }
  EngineShape random_shape(int32_t head_dim, int32_t group) {
    static const char* const kFormats[] = {"k8v4", "k4v4", "k4v2n", "k16v16"};
    EngineShape s;
    s.blocks.format = kFormats[uniform(0, 3)];
    s.blocks.head_dim = head_dim;
    s.blocks.num_kv_heads = uniform(1, 4);
    s.blocks.rotate = uniform(0, 2) > 0;
    s.blocks.has_reflections = uniform(0, 2) > 0;
    s.blocks.layers_apart = uniform(1, 2);
    s.blocks.dtype = uniform(0, 1) == 1 ? DType::kBFloat16 : DType::kFloat16;
    s.group = group;
    s.max_queries = uniform(0, 1) == 0 ? 1 : uniform(2, 8);
    const int32_t more = std::min(2, s.max_queries);
    s.blocks.tokens = {uniform(70, 900), 0, more, uniform(more, 64), uniform(1, 20)};
    s.queries = {1, 0, more, more, 1};
    if (uniform(0, 1) == 1) s.sequences = {4, -1, 0, 3, 9};
    s.lse_by_heads = uniform(0, 1) == 1;
    return s;
  }
  // The device's results against the host's for the same call.
  static void expect_results(EngineWorld& e, const DeviceEngine& device) {
    e.out.assign(e.out.size(), 0x7fff);
    e.lse.assign(e.lse.size(), -77);
    ASSERT_TRUE(engine_attend_host(e.config, e.call()));
    const std::vector<uint16_t> out = device.out.read();
    const std::vector<float> lse = device.lse.read();
    double error = 0, norm = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      if (e.out[i] == 0x7fff || out[i] == 0x7fff) {
        ASSERT_EQ(out[i], e.out[i]) << i;
        continue;
      }
      const double a = e.value(out, i), b = e.value(e.out, i);
      error += (a - b) * (a - b);
      norm += b * b;
    }
    // docs/internals/attention.md, "Error", and once more the rounding of an output.
    EXPECT_LE(std::sqrt(error),
              (e.config.dtype == DType::kBFloat16 ? 8e-3 : 3e-3) * std::sqrt(norm));
    for (size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(e.lse[i])) {
        ASSERT_EQ(lse[i], e.lse[i]) << i;
      } else {
        ASSERT_NEAR(lse[i], e.lse[i], 2e-3) << i;
      }
    }
    EXPECT_EQ(device.errors.read(), std::vector<int32_t>(kEngineErrors, 0));
  }
};

TEST_F(Engine, SmallBatchesAreAttendedAsOnTheHost) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 2, 5, 16}) {
      const EngineShape shape = random_shape(head_dim, group);
      SCOPED_TRACE(testing::Message() << shape.blocks.format << " dim " << head_dim << " group "
                                      << group << " queries " << shape.max_queries);
      EngineWorld e(shape, rng_);
      e.w.encode_all();
      DeviceEngine device(e);
      ASSERT_TRUE(device.plan());
      ASSERT_TRUE(device.attend());
      expect_results(e, device);
      if (HasFatalFailure()) return;
    }
  }
}

// A step of decodes is captured once; lengths, tables and queries change between replays, rows
// become padding and come back.
TEST_F(Engine, AGraphFollowsItsTablesAndLengths) {
  EngineShape shape;
  shape.blocks.num_kv_heads = 4;
  shape.blocks.tokens = {900, 70, 300, 64, 1, 500};
  shape.queries = {3, 3, 3, 3, 0, 3};
  shape.max_queries = 3;
  EngineWorld e(shape, rng_);
  e.w.encode_all();
  DeviceEngine device(e);
  const std::vector<int32_t> full = e.lens, queries = e.starts;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(device.plan(stream));
  ASSERT_TRUE(device.attend(stream));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (int32_t round = 0; round < 20; ++round) {
    std::vector<int32_t> now = {0};
    for (size_t s = 0; s < full.size(); ++s) {
      const bool is_padding = uniform(0, 4) == 0;
      const int32_t most = full[s] < 3 || is_padding ? 0 : 3, count = uniform(0, most);
      e.lens[s] = count == 0 ? 0 : uniform(count, full[s]);
      now.push_back(now.back() + count);
    }
    e.starts = now;
    device.lens.write(e.lens);
    device.starts.write(e.starts);
    device.out.write(std::vector<uint16_t>(e.out.size(), 0x7fff));
    device.lse.write(std::vector<float>(e.lse.size(), -77));
    ASSERT_CUDA(cudaGraphLaunch(replay, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    // The arrays keep their sizes, whatever a replay uses of them.
    EngineAttend call = e.call();
    call.num_tokens = queries.back();
    e.out.assign(e.out.size(), 0x7fff);
    e.lse.assign(e.lse.size(), -77);
    ASSERT_TRUE(engine_attend_host(e.config, call));
    const std::vector<uint16_t> out = device.out.read();
    double error = 0, norm = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i] == 0x7fff, e.out[i] == 0x7fff) << i;
      if (out[i] == 0x7fff) continue;
      const double a = e.value(out, i), b = e.value(e.out, i);
      error += (a - b) * (a - b);
      norm += b * b;
    }
    ASSERT_LE(std::sqrt(error), 3e-3 * std::sqrt(norm)) << round;
  }
  EXPECT_EQ(device.errors.read(), std::vector<int32_t>(kEngineErrors, 0));
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// One plan serves all layers of a step, and a step follows the other without a wait.
TEST_F(Engine, StepsFollowEachOther) {
  EngineShape shape = random_shape(128, 4);
  shape.blocks.tokens = {2000, 10, 640};
  shape.queries = {1, 1, 1};
  shape.sequences.clear();
  EngineWorld e(shape, rng_);
  e.w.encode_all();
  DeviceEngine device(e);
  for (int32_t step = 0; step < 20; ++step) {
    ASSERT_TRUE(device.plan());
    for (int32_t layer = 0; layer < 8; ++layer) ASSERT_TRUE(device.attend());
  }
  expect_results(e, device);
}

TEST_F(Engine, SmallStrayBlocksAreLeftOutAndCounted) {
  EngineShape shape = random_shape(64, 2);
  shape.blocks.tokens = {200, 100};
  shape.queries = {1, 1};
  shape.max_queries = 1;
  shape.sequences.clear();
  EngineWorld e(shape, rng_);
  e.w.encode_all();
  e.w.table[1] = static_cast<int32_t>(e.w.cache.num_blocks);
  DeviceEngine device(e);
  ASSERT_TRUE(device.plan());
  ASSERT_TRUE(device.attend());
  std::vector<int32_t> expected(kEngineErrors, 0);
  expected[static_cast<int32_t>(EngineError::kStrayBlocks)] = shape.blocks.num_kv_heads;
  EXPECT_EQ(device.errors.read(), expected);
}

TEST_F(Engine, WorkspacesAreChecked) {
  EngineShape shape = random_shape(64, 2);
  EngineWorld e(shape, rng_);
  DeviceEngine device(e);
  EXPECT_EQ(engine_plan(e.config, device.grid, device.call().batch,
                        {device.workspace.get(), device.workspace.size() - 1}, nullptr)
                .code(),
            StatusCode::kBufferTooSmall);
  EXPECT_EQ(engine_attend(e.config, device.grid, device.call(), {nullptr, 1 << 30}, nullptr).code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// Calls of the attention kernels on a GPU: batches, graphs, overlapping launches, corrupt tables,
// bad calls, the plan and the merge. Tests named Small* are small enough for compute-sanitizer.
#include <cstring>

#include "attention/core/merge.h"
#include "attention/core/workspace.h"
#include "attention/work/plan.h"
#include "gpu/launch.cuh"
#include "tests/gpu/attention/attention_world.cuh"
#include "tests/support/plan_items.h"

namespace tierkv {
namespace {

using test::DeviceArray;
using test::DeviceWorld;
using test::expect_output;
using test::kTolerance;
using test::make_world;
using test::relative_error;
using test::three_tiers;
using test::tier;
using test::World;
using test::WorldShape;

__global__ void write_architecture(int32_t* to) {
#if defined(__CUDA_ARCH__)
  *to = __CUDA_ARCH__ / 10;
#endif
}

// The architecture that the code was compiled for, never more than the device's: that is what
// overlapping launches depend on.
TEST(AttentionCalls, SmallCodeKnowsItsArchitecture) {
  int32_t architecture = 0;
  ASSERT_CUDA(image_architecture(&architecture));
  int major = 0, minor = 0;
  ASSERT_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  ASSERT_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  EXPECT_GE(architecture, 80);
  EXPECT_LE(architecture, 10 * major + minor);
  DeviceArray<int32_t> in_kernel(std::vector<int32_t>{0});
  write_architecture<<<1, 1>>>(in_kernel.get());
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(in_kernel.read()[0], architecture);
}

TEST(AttentionCalls, SmallBatchNamesItsSequences) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  WorldShape shape;
  shape.num_layers = 3;
  shape.tiers = three_tiers();
  shape.tokens = {{10, 100, 50}, {0, 40, 300}, {0, 7, 0}};
  World world = make_world(shape, rng);
  const std::vector<int32_t> order = {2, -1, 0};
  DeviceWorld device(world, order);
  ASSERT_TRUE(device.plan().is_ok());
  for (const int32_t layer : {1, 2, 0}) {
    AttendCall reference_call = world.call();
    reference_call.batch = {order.data(), 3};
    reference_call.layer = layer;
    const Result<ReferenceOutput> expected = attend_reference(world.config, reference_call);
    ASSERT_TRUE(expected.is_ok());
    device.poison_outputs();
    AttendCall call = device.call();
    call.layer = layer;
    call.plan_is_settled = layer != 1;
    ASSERT_TRUE(attend(world.config, device.grid, call, device.space(), nullptr).is_ok());
    ASSERT_CUDA(cudaDeviceSynchronize());
    expect_output(device, *expected);
  }
}

// The same captured graph while every sequence grows from nothing to its full length.
TEST(AttentionCalls, GraphStaysValidWhileSequencesGrow) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  WorldShape shape;
  shape.tiers = three_tiers();
  shape.tokens = {{64, 600, 1500}, {64, 10, 0}, {3, 2000, 90}};
  World world = make_world(shape, rng);
  const std::vector<SideCounts> full = world.tokens;
  DeviceWorld device(world);
  device.poison_outputs();
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(device.plan(stream).is_ok());
  ASSERT_TRUE(device.attend_now(stream).is_ok());
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (const double share : {0.0, 0.02, 0.3, 0.31, 1.0}) {
    for (size_t row = 0; row < full.size(); ++row) {
      for (int32_t side = 0; side < kMaxSides; ++side) {
        world.tokens[row].of[side] = static_cast<int32_t>(full[row].of[side] * share);
      }
    }
    const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
    ASSERT_TRUE(expected.is_ok());
    device.upload_tables();
    device.poison_outputs();
    ASSERT_CUDA(cudaGraphLaunch(replay, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    expect_output(device, *expected);
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// Launches that overlap (programmatic dependent launch) must not see each other's parts and
// counters.
TEST(AttentionCalls, BackToBackLaunchesAgree) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  WorldShape shape;
  shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
  shape.num_kv_heads = 4;
  shape.tokens = {{1000, 3000}, {2000, 100}, {5, 900}};
  World world = make_world(shape, rng);
  const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
  ASSERT_TRUE(expected.is_ok());
  DeviceWorld device(world);
  device.poison_outputs();
  ASSERT_TRUE(device.plan().is_ok());
  AttendCall call = device.call();
  for (int i = 0; i < 200; ++i) {
    call.plan_is_settled = i > 2 && i % 2 == 0;
    for (Settled& settled : call.settled) settled = static_cast<Settled>(rng() % 3);
    ASSERT_TRUE(attend(world.config, device.grid, call, device.space(), nullptr).is_ok());
  }
  ASSERT_CUDA(cudaDeviceSynchronize());
  expect_output(device, *expected);
}

// Lets the next kernel start, and writes pages after a while.
__global__ void write_late_kernel(PageView pages, const uint8_t* from, const int32_t* ids,
                                  int64_t cycles) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  for (const int64_t start = clock64(); clock64() - start < cycles;) continue;
  const int64_t page = ids[blockIdx.x] * pages.page_bytes;
  for (int64_t i = threadIdx.x; i < pages.page_bytes; i += blockDim.x) {
    pages.base[page + i] = from[page + i];
  }
}

// The kernel before a call writes what is not settled: the last page of each row, which is damaged
// until then.
TEST(AttentionCalls, SmallPagesThatAreNotSettledAreWaitedFor) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  WorldShape shape;
  shape.tiers = {tier(0, 8, 4)};
  shape.tokens = {{600}, {64}, {1}, {1400}};
  World world = make_world(shape, rng);
  const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
  ASSERT_TRUE(expected.is_ok());
  const PageView pages = world.pages();
  const std::vector<uint8_t> whole(pages.base, pages.base + pages.num_pages * pages.page_bytes);
  std::vector<int32_t> last;
  const SideView side = world.table().side(0);
  for (size_t row = 0; row < world.tokens.size(); ++row) {
    const int32_t page = (world.tokens[row].of[0] - 1) / side.tokens_per_page;
    last.push_back(side.slots[row * side.row_stride + page * side.direction]);
    std::memset(pages.base + last.back() * pages.page_bytes, 0xff, pages.page_bytes);
  }
  DeviceWorld device(world);
  const DeviceArray<uint8_t> source(whole);
  const DeviceArray<int32_t> ids(last);
  ASSERT_TRUE(device.plan().is_ok());
  AttendCall call = device.call();
  call.plan_is_settled = true;
  for (const Settled settled : {Settled::kAllButLastPage, Settled::kNothing}) {
    call.settled[0] = settled;
    ASSERT_CUDA(cudaMemcpy(call.pages.base, pages.base, whole.size(), cudaMemcpyHostToDevice));
    device.poison_outputs();
    ASSERT_CUDA(cudaDeviceSynchronize());
    write_late_kernel<<<static_cast<uint32_t>(last.size()), 128>>>(call.pages, source.get(),
                                                                   ids.get(), 400000);
    ASSERT_TRUE(attend(world.config, device.grid, call, device.space(), nullptr).is_ok());
    ASSERT_CUDA(cudaDeviceSynchronize());
    expect_output(device, *expected);
  }
}

TEST(AttentionCalls, SmallStrayPagesAndCountsAreLeftOut) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(0, 8, 4)};
  shape.tokens = {{200}, {200}, {64}, {100}, {100}};
  World world = make_world(shape, rng);
  const std::vector<SideCounts> counts = world.tokens;
  const int32_t stride = world.table_shape.row_stride();
  world.tokens[1].of[0] = 192;
  world.tokens[2].of[0] = 0;
  world.tokens[3].of[0] = 0;
  const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
  ASSERT_TRUE(expected.is_ok());
  world.tokens = counts;
  world.slots[stride + 3] = world.num_pages;
  world.slots[2 * stride] = INT32_MIN;
  world.tokens[3].of[0] = -3;
  DeviceWorld device(world, {0, 1, 2, 3, -1, 5});
  device.poison_outputs();
  ASSERT_TRUE(device.plan().is_ok());
  ASSERT_TRUE(device.attend_now().is_ok());
  ASSERT_CUDA(cudaDeviceSynchronize());
  const auto corrupt = static_cast<int32_t>(StatusCode::kCorrupt);
  EXPECT_THAT(device.row_status(),
              ::testing::ElementsAre(0, corrupt, corrupt, corrupt, 0, corrupt));
  const std::vector<uint16_t> out = device.out();
  std::vector<double> got, want(expected->out.begin(), expected->out.begin() + 4 * 4 * 128);
  for (size_t i = 0; i < want.size(); ++i) got.push_back(half_to_float(out[i]));
  EXPECT_LT(relative_error(got, want), kTolerance);
  for (size_t i = want.size(); i < out.size(); ++i) ASSERT_EQ(out[i], 0) << i;
}

// A count beyond the table reads the whole table of the row and no more.
TEST(AttentionCalls, SmallHugeCountsStayInside) {
  std::mt19937_64 rng(std::random_device{}());
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
  shape.tokens = {{130, 40}, {70, 0}};
  World world = make_world(shape, rng);
  world.tokens[0].of[0] = INT32_MAX;
  world.tokens[1].of[1] = INT32_MAX - 7;
  DeviceWorld device(world);
  device.poison_outputs();
  ASSERT_TRUE(device.plan().is_ok());
  ASSERT_TRUE(device.attend_now().is_ok());
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_THAT(device.row_status(), ::testing::Each(static_cast<int32_t>(StatusCode::kCorrupt)));
}

TEST(AttentionCalls, SmallDevicePlanIsTheHostPlan) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  for (const int32_t sequences : {1, 3, 150, 700}) {
    WorldShape shape;
    shape.num_kv_heads = 1;
    shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
    shape.tokens.assign(sequences, {1, 1});
    World world = make_world(shape, rng);
    world.table_shape.table_slots[0] = 4000;  // counts alone are read
    for (SideCounts& n : world.tokens) {
      n.of[0] = std::uniform_int_distribution<int32_t>(-50, 3000)(rng);
      n.of[1] = std::uniform_int_distribution<int32_t>(0, 90000)(rng);
    }
    DeviceWorld device(world);
    ASSERT_TRUE(device.plan().is_ok());
    ASSERT_CUDA(cudaDeviceSynchronize());
    const AttentionConfig& config = world.config;
    std::vector<WorkItem> items(items_per_layer(device.grid));
    const WorkspaceLayout layout = workspace_layout(config, device.grid, sequences);
    ASSERT_CUDA(cudaMemcpy(items.data(),
                           static_cast<uint8_t*>(device.space().memory) + layout.items,
                           items.size() * sizeof(WorkItem), cudaMemcpyDeviceToHost));
    RowsOf<1> rows;
    for (int32_t t = 0; t < 2; ++t) {
      const PageLayout page = *tier_layout(config, t);
      rows.tiers[t] = tier_source(page, world.table().side(t), device.grid.slot_bytes);
    }
    rows.row_stride = world.table_shape.row_stride();
    rows.token_stride = kMaxSides;
    rows.num_rows = sequences;
    rows.num_tiers = 2;
    rows.num_table_sequences = sequences;
    const std::vector<WorkItem> expected = plan_items(rows, 0, device.grid.num_ctas, kDecodeWarps);
    for (size_t i = 0; i < items.size(); ++i) {
      EXPECT_EQ(items[i].row, expected[i].row) << i;
      EXPECT_EQ(items[i].tile, expected[i].tile) << i;
      EXPECT_EQ(items[i].tiles, expected[i].tiles) << i;
      EXPECT_THAT(items[i].tier, ::testing::ElementsAreArray(expected[i].tier)) << i;
    }
  }
}

TEST(AttentionCalls, SmallBadCallsAreRefused) {
  std::mt19937_64 rng(3);
  WorldShape shape;
  shape.tiers = three_tiers();
  shape.tokens = {{1, 2, 3}};
  World world = make_world(shape, rng);
  DeviceWorld device(world);
  device.poison_outputs();
  const AttentionConfig& config = world.config;
  const auto code = [&](const AttendCall& call, AttentionWorkspace space) {
    return attend(config, device.grid, call, space, nullptr).code();
  };
  const AttentionWorkspace space = device.space();
  AttendCall call = device.call();
  call.q = nullptr;
  EXPECT_EQ(code(call, space), StatusCode::kInvalidArgument);
  call = device.call();
  call.out = static_cast<uint16_t*>(call.out) + 1;
  EXPECT_EQ(code(call, space), StatusCode::kInvalidArgument);
  call = device.call();
  call.layer = 1;
  EXPECT_EQ(code(call, space), StatusCode::kInvalidArgument);
  call = device.call();
  call.table.slots = nullptr;
  EXPECT_EQ(code(call, space), StatusCode::kInvalidArgument);
  call = device.call();
  call.table.shape.tokens_per_page[1] += 16;
  EXPECT_EQ(code(call, space), StatusCode::kInvalidArgument);
  const std::function<void(PageTableShape&)> bad_shapes[] = {
      [](PageTableShape& s) { s.num_sequences = 0; },
      [](PageTableShape& s) { s.num_sequences = kMaxSequences + 1; },
      [](PageTableShape& s) { s.num_sides = kMaxSides + 1; },
      [](PageTableShape& s) { s.table_slots[0] = -1; },
      [](PageTableShape& s) { s.table_slots[1] = kMaxTableSlots + 1; }};
  for (const auto& change : bad_shapes) {
    call = device.call();
    change(call.table.shape);
    EXPECT_EQ(code(call, space), StatusCode::kInvalidArgument);
    EXPECT_EQ(plan_attention(config, device.grid, call.table, call.batch, space, nullptr).code(),
              StatusCode::kInvalidArgument);
  }
  call = device.call();
  call.pages.page_bytes *= 2;
  EXPECT_EQ(code(call, space), StatusCode::kInvalidArgument);
  call = device.call();
  call.batch.count = 0;
  EXPECT_EQ(code(call, space), StatusCode::kInvalidArgument);
  call = device.call();
  EXPECT_EQ(code(call, {space.memory, space.bytes - 1}), StatusCode::kBufferTooSmall);
  EXPECT_EQ(code(call, {nullptr, space.bytes}), StatusCode::kInvalidArgument);
  AttentionConfig other = config;
  other.q_len = 9;
  EXPECT_EQ(attend(other, device.grid, call, space, nullptr).code(), StatusCode::kUnsupported);
  ASSERT_CUDA(cudaDeviceSynchronize());
  EXPECT_THAT(device.out(), ::testing::Each(0xffff));
}

TEST(AttentionCalls, SmallMergeIsTheHostMerge) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  constexpr int32_t kRows = 33, kDim = 96;
  std::vector<uint16_t> a(kRows * kDim), b(a), out(a);
  std::vector<float> lse_a(kRows), lse_b(kRows), lse(kRows);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = float_to_half(normal(rng));
    b[i] = float_to_half(normal(rng));
  }
  for (int32_t r = 0; r < kRows; ++r) {
    lse_a[r] = r % 7 == 0 ? -INFINITY : 4 * normal(rng);
    lse_b[r] = r % 5 == 0 ? -INFINITY : 4 * normal(rng);
  }
  MergeCall call;
  call.a = {a.data(), lse_a.data()};
  call.b = {b.data(), lse_b.data()};
  call.out = out.data();
  call.lse = lse.data();
  call.rows = kRows;
  call.head_dim = kDim;
  ASSERT_TRUE(merge_attention_host(call).is_ok());
  DeviceArray<uint16_t> device_a(a), device_b(b);
  DeviceArray<float> device_lse_a(lse_a), device_lse_b(lse_b);
  call.a = {device_a.get(), device_lse_a.get()};
  call.b = {device_b.get(), device_lse_b.get()};
  call.out = device_a.get();  // over its input
  call.lse = device_lse_a.get();
  ASSERT_TRUE(merge_attention(call, nullptr).is_ok());
  ASSERT_CUDA(cudaDeviceSynchronize());
  const std::vector<uint16_t> got = device_a.read();
  for (size_t i = 0; i < got.size(); ++i) {
    // One ulp of fp16: exp2 and log2 of the device differ from the host's in the last bits.
    EXPECT_NEAR(half_to_float(got[i]), half_to_float(out[i]),
                2e-3 + 1e-3 * std::fabs(half_to_float(out[i])));
  }
  const std::vector<float> got_lse = device_lse_a.read();
  for (int32_t r = 0; r < kRows; ++r) {
    if (lse[r] == -INFINITY) {
      EXPECT_EQ(got_lse[r], -INFINITY);
    } else {
      EXPECT_NEAR(got_lse[r], lse[r], 1e-5);
    }
  }
}

}  // namespace
}  // namespace tierkv

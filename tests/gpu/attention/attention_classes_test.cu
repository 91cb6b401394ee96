// SPDX-License-Identifier: Apache-2.0
// Rows of several classes of heads in one launch, on a GPU against the double reference. Tests
// named Small* are small enough for compute-sanitizer.
#include "attention/tiers/config_rows.h"
#include "attention/work/plan.h"
#include "tests/gpu/attention/attention_world.cuh"
#include "tests/support/plan_items.h"

namespace tierkv {
namespace {

using test::check;
using test::DeviceWorld;
using test::make_world;
using test::tier;
using test::World;
using test::WorldShape;

// The classes of QUALITY's `fast`: K8V4; K4V4 and K4V2; K4V2 and K2V2. 2 bits clipped at the norm.
WorldShape fast_classes() {
  const TierFormat k8v4 = token_wise_tier(8, 4), k4v4 = token_wise_tier(4, 4);
  const TierFormat k4v2 = *parse_tier_format("k4v2n"), k2v2 = *parse_tier_format("k2nv2n");
  WorldShape shape;
  shape.num_kv_heads = 5;
  shape.page_records = false;
  shape.tiers = {{0, k8v4}, {1, k8v4}, tier(2, 16, 16)};
  shape.classes = {{k4v4, k4v2, raw_tier()}, {k4v2, k2v2, raw_tier()}};
  return shape;
}

TEST(AttentionClasses, SmallEveryHeadDimAndGroup) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 2, 4, 5, 8, 9, 16}) {
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " group " << group);
      WorldShape shape = fast_classes();
      shape.head_dim = head_dim;
      shape.group = group;
      if (head_dim == 128) shape.page_bytes = 13312;
      shape.tokens = {{70, 150, 20}, {0, 0, 0}, {0, 177, 3}, {1, 0, 0}, {0, 0, 64}};
      check(shape);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(AttentionClasses, LongRaggedRows) {
  std::mt19937_64 rng(std::random_device{}());
  const auto draw = [&](int32_t most) {
    return std::uniform_int_distribution<int32_t>(0, most)(rng);
  };
  for (const int32_t head_dim : {64, 128}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      WorldShape shape = fast_classes();
      shape.head_dim = head_dim;
      shape.dtype = dtype;
      shape.num_kv_heads = 8;
      shape.jitter = 9;
      for (int32_t i = 0; i < 60; ++i) shape.tokens.push_back({draw(700), draw(900), draw(80)});
      check(shape);
    }
  }
}

// A row over all CTAs, and one that most of them have nothing of.
TEST(AttentionClasses, FewLongRows) {
  WorldShape shape = fast_classes();
  shape.num_kv_heads = 2;
  shape.tokens = {{9000, 21000, 64}};
  check(shape);
  shape.num_kv_heads = 3;
  shape.tokens = {{400, 900, 64}, {0, 1, 0}};
  check(shape);
}

TEST(AttentionClasses, SmallSeveralQueries) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t q_len : {2, 3, 5, 8}) {
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
        SCOPED_TRACE(::testing::Message()
                     << "head_dim " << head_dim << " q_len " << q_len << " " << dtype_name(dtype));
        WorldShape shape = fast_classes();
        shape.head_dim = head_dim;
        shape.q_len = q_len;
        shape.dtype = dtype;
        shape.group = q_len == 3 ? 5 : 2;
        shape.sink_scale = q_len == 5 ? 3 : 0;
        shape.tokens = {{40, 60, 20}, {0, 33, 17}, {0, 0, q_len}, {200, 0, q_len - 1}};
        check(shape);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

// Every pair of formats that classes may have, four classes at once.
TEST(AttentionClasses, SmallEveryPairOfFormats) {
  const int32_t pairs[][2] = {{8, 8}, {8, 4}, {8, 2}, {4, 4}, {4, 2}, {2, 2}, {16, 16}};
  for (const auto& high : pairs) {
    WorldShape shape;
    shape.num_kv_heads = 9;
    shape.group = high[0] == 4 ? 8 : 4;
    shape.tiers = {tier(0, high[0], high[1]), tier(1, 4, 2)};
    shape.classes = {{token_wise_tier(4, 2), token_wise_tier(high[0], high[1])},
                     {token_wise_tier(8, 2), token_wise_tier(2, 2)},
                     {token_wise_tier(high[0], high[1]), raw_tier()}};
    shape.tokens = {{33, 129}, {150, 17}};
    check(shape);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(AttentionClasses, SmallSharedMemoryTakesFewerWarps) {
  bool few = false;
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const int32_t group : {1, 8, 16}) {
      WorldShape shape = fast_classes();
      shape.head_dim = head_dim;
      shape.group = group;
      shape.dtype = group == 8 ? DType::kBFloat16 : DType::kFloat16;
      shape.tokens = {{64, 700, 100}, {0, 0, 0}, {1, 0, 7}};
      int32_t warps = 0;
      check(shape, 64 << 10, &warps);
      if (::testing::Test::HasFailure()) return;
      few |= warps < 8;
    }
  }
  EXPECT_TRUE(few);
}

// The plan of every layer is the host's, of the layer's classes.
TEST(AttentionClasses, SmallPlanIsTheHostPlan) {
  std::mt19937_64 rng(std::random_device{}());
  for (const int32_t sequences : {1, 30, 300}) {
    WorldShape shape = fast_classes();
    shape.num_layers = 3;
    shape.tokens.assign(sequences, {1, 1, 1});
    World world = make_world(shape, rng);
    world.table_shape.table_slots[0] = world.table_shape.table_slots[1] = 2000;
    for (SideCounts& n : world.tokens) {
      n.of[0] = std::uniform_int_distribution<int32_t>(-50, 3000)(rng);
      n.of[1] = std::uniform_int_distribution<int32_t>(0, 90000)(rng);
      n.of[2] = std::uniform_int_distribution<int32_t>(0, 64)(rng);
    }
    DeviceWorld device(world);
    ASSERT_TRUE(device.plan().is_ok());
    ASSERT_CUDA(cudaDeviceSynchronize());
    const AttentionConfig& config = world.config;
    const int32_t per_layer = items_per_layer(device.grid);
    std::vector<WorkItem> items(static_cast<size_t>(per_layer) * config.num_layers);
    const WorkspaceLayout layout = workspace_layout(config, device.grid, sequences);
    ASSERT_CUDA(cudaMemcpy(items.data(),
                           static_cast<uint8_t*>(device.space().memory) + layout.items,
                           items.size() * sizeof(WorkItem), cudaMemcpyDeviceToHost));
    for (int32_t layer = 0; layer < config.num_layers; ++layer) {
      const RowsOf<kMaxAttentionClasses> rows = config_rows<kMaxAttentionClasses>(
          config, device.grid, world.table(), world.call().batch, layer);
      const std::vector<WorkItem> expected =
          plan_items(rows, layer, device.grid.num_ctas, device.grid.warps_per_cta);
      for (int32_t i = 0; i < per_layer; ++i) {
        const WorkItem& item = items[layer * per_layer + i];
        ASSERT_EQ(item.row, expected[i].row) << i << " of layer " << layer;
        ASSERT_EQ(item.tile, expected[i].tile) << i;
        ASSERT_EQ(item.tiles, expected[i].tiles) << i;
        ASSERT_THAT(item.tier, ::testing::ElementsAreArray(expected[i].tier)) << i;
      }
    }
  }
}

// A head may be of another class in every layer.
TEST(AttentionClasses, SmallLayersDifferInClasses) {
  std::mt19937_64 rng(std::random_device{}());
  WorldShape shape = fast_classes();
  shape.num_layers = 3;
  shape.tokens = {{70, 150, 20}, {0, 177, 3}};
  World world = make_world(shape, rng);
  DeviceWorld device(world);
  ASSERT_TRUE(device.plan().is_ok());
  for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
    AttendCall host = world.call(), call = device.call();
    host.layer = call.layer = layer;
    const Result<ReferenceOutput> expected = attend_reference(world.config, host);
    ASSERT_TRUE(expected.is_ok()) << expected.status().message();
    device.poison_outputs();
    const Status s = attend(world.config, device.grid, call, device.space(), nullptr);
    ASSERT_TRUE(s.is_ok()) << s.message();
    ASSERT_CUDA(cudaDeviceSynchronize());
    test::expect_output(device, *expected);
    EXPECT_THAT(device.row_status(layer), ::testing::Each(0));
  }
}

}  // namespace
}  // namespace tierkv

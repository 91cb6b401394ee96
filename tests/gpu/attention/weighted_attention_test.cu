// SPDX-License-Identifier: Apache-2.0
// Attention over weighted blocks against exact attention in double, over what the host decodes.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/device_array.cuh"
#include "tests/support/fresh_random.h"
#include "tests/support/weighted_attention_world.h"

namespace tierkv::test::weighted {
namespace {

// shared_bytes: of a CTA, as if the device had no more; 0: what it has.
coded::Attended attend_on_gpu(const World& w, int32_t most_copies_log, int32_t shared_bytes = 0) {
  const DeviceArray<uint8_t> keys(w.bytes[0]), values(w.bytes[1]), window(w.window);
  const DeviceArray<CodedBlockRef> key_refs(w.refs[0]), value_refs(w.refs[1]);
  const DeviceArray<uint32_t> key_table(device_table(w.books[0].family.books.front())),
      value_table(device_table(w.books[1].family.books.front()));
  const DeviceArray<float> units(w.units), value_steps(w.value_steps), sinks(w.sinks);
  const DeviceArray<float> block_turns(w.turns.block);
  const DeviceArray<float> scales(w.key_scales);
  const DeviceArray<uint16_t> means(w.key_means), place_turns(w.turns.place);
  const DeviceArray<uint16_t> raw_sinks(w.sinks_raw);
  const DeviceArray<CodedRow> rows(w.rows);
  const DeviceArray<int32_t> window_pages(w.window_pages);
  const DeviceArray<uint16_t> q(w.q), out(std::vector<uint16_t>(w.q.size(), 0x7e00));
  const auto columns = static_cast<size_t>(w.shape.all_columns());
  const DeviceArray<float> lse(std::vector<float>(w.rows.size() * columns, NAN));
  const DeviceArray<StatusCode> status(std::vector<StatusCode>(w.rows.size(), StatusCode::kIo));
  CodedAttention call = call_of(w);
  call.keys.bytes = keys.get(), call.values.bytes = values.get();
  call.keys.blocks = key_refs.get(), call.values.blocks = value_refs.get();
  call.keys.steps = units.get(), call.values.steps = value_steps.get();
  call.keys.codebook.table = key_table.get(), call.values.codebook.table = value_table.get();
  call.weighted.key_scales = scales.get();
  call.weighted.key_means = means.get();
  call.weighted.place_turns = place_turns.get();
  call.weighted.block_turns = block_turns.get();
  call.weighted.raw_sinks = reinterpret_cast<const uint8_t*>(raw_sinks.get());
  call.rows = rows.get();
  call.window = window.get();
  call.window_pages = window_pages.get();
  call.q = q.get();
  call.out = out.get();
  call.lse = lse.get();
  if (!w.sinks.empty()) call.sinks = sinks.get();
  call.row_status = status.get();
  call.most_shared_bytes = shared_bytes;
  auto grid = coded_attention_grid(call, most_copies_log);
  EXPECT_TRUE(grid.is_ok()) << grid.status().message();
  if (!grid.is_ok()) return {};
  const DeviceArray<uint8_t> workspace(
      std::vector<uint8_t>(coded_attention_workspace_bytes(call, *grid), 0xff));
  call.workspace = workspace.get();
  const Status s = attend_coded(call, *grid, nullptr);
  EXPECT_TRUE(s.is_ok()) << s.message();
  return {out.read(), lse.read(), status.read(), *grid, {}, 0};
}

class WeightedAttentionTest : public RandomTest {
 protected:
  WeightedAttentionTest() : source_(seed_) {}
  std::vector<RowData> ragged_rows(const Shape& shape) {
    const int32_t least = shape.q_len - 1;
    std::vector<RowData> rows = {{0, 0}, {60, least}, {0, 1}, {1, least}, {0, 0}};
    for (int32_t i = 0; i < 9; ++i) {
      rows.push_back({source_.below(700), least + source_.below(150)});
    }
    rows.insert(rows.end(), {{3000, 64 + least}, {64, 700}, {0, 0}});
    while (rows.size() % static_cast<size_t>(shape.kv_heads) != 0) rows.push_back({70, 9});
    return rows;
  }
  void check(const Shape& shape, int32_t shared_bytes = 0) {
    SCOPED_TRACE(shape.name());
    World w;
    make_world(&source_, shape, ragged_rows(shape), &w);
    if (HasFatalFailure()) return;
    const coded::Attended got = attend_on_gpu(w, 5, shared_bytes);
    if (!HasFailure()) compare(w, got);
  }
  CodeSource source_;
};

TEST_F(WeightedAttentionTest, EqualsTheReferenceOnRaggedRows) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t streams : {1, 2}) {
      for (const int32_t columns : {1, 4, 8, 1 + source_.below(16)}) {
        Shape shape;
        shape.head_dim = head_dim;
        shape.streams = streams;
        shape.columns = columns;
        shape.importance = source_.below(3) != 0;
        shape.learned_sinks = source_.below(2) != 0;
        shape.raw_sinks = source_.below(3) == 0 ? source_.below(17) : 4;
        shape.max_length = 9 + source_.below(3);
        if (columns == 8 && source_.below(2) == 0) {
          shape.mode = BlockMode::kSingle;
          shape.coarseness = 6;
        }
        check(shape);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(WeightedAttentionTest, EveryPairingAndSeveralQueries) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const RopePairing pairing :
         {RopePairing::kNone, RopePairing::kHalves, RopePairing::kNeighbours}) {
      Shape shape;
      shape.head_dim = head_dim;
      shape.pairing = pairing;
      if (pairing == RopePairing::kNeighbours && source_.below(2) == 0) shape.rotary_dims = 32;
      shape.q_len = 1 + source_.below(8);
      shape.kv_heads = 1 + source_.below(3);
      shape.columns = 1 + source_.below(8);
      shape.streams = 1 + source_.below(2);
      shape.large_means = source_.below(3) == 0;
      if (source_.below(2) != 0) shape.dtype = DType::kBFloat16;
      check(shape);
      if (HasFailure()) return;
    }
  }
}

// As on devices with 99 KB of shared memory for a CTA.
TEST_F(WeightedAttentionTest, SmallSharedMemory) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    Shape shape;
    shape.head_dim = head_dim;
    shape.columns = 4;
    check(shape, 99 << 10);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace tierkv::test::weighted

// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/emulated_decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "attention/tiers/config_rows.h"
#include "attention/tiers/decode_kernel.cuh"
#include "attention/tiers/grid.h"
#include "attention/tiers/shared_rows.cuh"
#include "attention/work/plan.h"
#include "codec/format/element.h"
#include "tests/support/plan_items.h"

namespace tierkv {

__align__(128) uint8_t shared_bytes[1 << 19];

namespace test {
namespace {

constexpr int32_t kSlotBytes = 8704;
constexpr int32_t kOddSlotBytes = 3 * 4096;  // three tiles of raw tokens of 64 dims fill it

template <int32_t kClasses>
DecodeKernelOf<kClasses> kernel_of(int32_t head_dim, const DecodeParamsOf<kClasses>& p) {
  const DecodeChoice choice = decode_choice(p);
  switch (head_dim) {
    case 64:
      return decode_kernel_of<64, kClasses>(choice);
    case 96:
      return decode_kernel_of<96, kClasses>(choice);
    case 256:
      return decode_kernel_of<256, kClasses>(choice);
    default:
      return decode_kernel_of<128, kClasses>(choice);
  }
}

// What a run differs in from the usual one.
struct DecodeRun {
  std::function<void()> after_plan;
  JoinSharedRows join;
  int32_t guard_rows = 0;  // behind those of the batch, in out and lse
  bool is_guard_whole = true;
};

template <int32_t kClasses>
DecodeOutput emulate(World& world, int32_t ctas, std::mt19937_64& rng, DecodeRun* run) {
  const AttentionConfig& config = world.config;
  const QueryColumns columns_of = query_columns(config);
  const int32_t of_row = columns_of.of_row, dim = config.head_dim;
  DecodeParamsOf<kClasses> p;
  const auto draw = [&](int32_t most) { return static_cast<int32_t>(rng() % (most + 1)); };
  p.slot_bytes = dim > 128 ? 2 * kSlotBytes : draw(1) == 1 ? kSlotBytes : kOddSlotBytes;
  p.slots = 1 + draw(most_slots(dim) - 1);
  p.warps = static_cast<uint8_t>(kDecodeWarps >> std::max(draw(5) - 2, 0));
  p.plan_is_settled = draw(1) == 1;
  if (draw(1) == 1) {  // as a device with so much shared memory has them: chunks fill their slots
    const Result<AttentionGrid> grid = choose_grid(config, ctas, 227 << 10);
    EXPECT_TRUE(grid.is_ok()) << grid.status().message();
    p.slot_bytes = grid->slot_bytes;
    p.slots = grid->slots_per_warp;
    p.warps = static_cast<uint8_t>(grid->warps_per_cta);
  }
  for (Settled& settled : p.settled) settled = static_cast<Settled>(draw(2));
  AttentionGrid cut;
  cut.slot_bytes = p.slot_bytes;
  cut.tile_cost = draw(40);
  p.rows = config_rows<kClasses>(config, cut, world.table(), world.call().batch, 0);
  p.pool = world.pages().base;
  p.page_bytes = config.page_bytes;
  p.num_pages = world.num_pages;
  p.columns = columns_of;
  p.is_bfloat16 = config.dtype == DType::kBFloat16;
  const AttentionTail& tail = world.tail;
  if (config.q_len > 1) {
    p.tail = {tail.tier < 0 ? config.num_tiers - 1 : tail.tier, tail.newest, tail.ring_first,
              tail.ring_tokens};
  }
  p.q = world.q.data();
  const size_t columns = static_cast<size_t>(world.sequences()) * config.q_len * config.num_q_heads;
  const size_t guard = static_cast<size_t>(run->guard_rows) * of_row;
  std::vector<uint16_t> out((columns + guard) * dim, 0xffff);
  std::vector<float> lse(columns + guard, -1e30f), parts(2ul * ctas * of_row * dim, NAN);
  std::vector<SoftmaxState> part_states(2ul * ctas * of_row, {NAN, NAN});
  std::vector<int32_t> row_status(p.rows.num_rows / p.rows.passes, 0);
  const std::vector<WorkItem> items = plan_items(p.rows, 0, ctas, p.warps);
  if (run->after_plan) run->after_plan();
  p.out = out.data();
  p.lse = lse.data();
  p.sinks = world.sinks.empty() ? nullptr : world.sinks.data();
  p.row_status = row_status.data();
  p.items = items.data();
  p.parts = parts.data();
  p.part_states = part_states.data();
  p.scale_log2 = static_cast<float>(config.sm_scale * 1.4426950408889634);
  DecodeOutput result;
  EXPECT_LE(decode_shared(dim, of_row, p.slot_bytes, p.slots, p.warps).bytes,
            static_cast<int32_t>(sizeof(shared_bytes)));
  const auto run_in_random_order = [&](int32_t num_ctas, int32_t threads, const auto& kernel) {
    std::vector<int32_t> order(num_ctas);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    for (const int32_t cta : order) {
      std::fill(std::begin(shared_bytes), std::end(shared_bytes), 0xff);
      emulator::cta().run(cta, threads, kernel);
    }
  };
  run_in_random_order(ctas, p.warps * 32, [&] { kernel_of(dim, p)(p); });
  const SharedRowsParams shared_rows = shared_rows_params(p, ctas);
  if (run->join) {
    run->join(shared_rows);
  } else {
    const SharedRowsLaunch launch = shared_rows_launch(shared_rows, dim);
    run_in_random_order(launch.ctas, kSharedRowsThreads, [&] { launch.kernel(shared_rows); });
  }
  const auto end = static_cast<std::ptrdiff_t>(columns);
  run->is_guard_whole =
      std::all_of(out.begin() + end * dim, out.end(), [](uint16_t x) { return x == 0xffff; }) &&
      std::all_of(lse.begin() + end, lse.end(), [](float x) { return x == -1e30f; });
  out.resize(columns * dim);
  lse.resize(columns);
  for (const uint16_t x : out) result.out.push_back(raw_to_float(config.dtype, x));
  result.lse.assign(lse.begin(), lse.end());
  result.row_status = row_status;
  return result;
}

DecodeOutput emulate(World& world, int32_t ctas, std::mt19937_64& rng, DecodeRun* run) {
  return world.config.classes.count > 1 ? emulate<kMaxAttentionClasses>(world, ctas, rng, run)
                                        : emulate<1>(world, ctas, rng, run);
}

double tolerance_of(DType dtype) {
  return dtype == DType::kBFloat16 ? 4e-3 : 2e-3;
}

}  // namespace

DecodeOutput emulate_decode(World& world, int32_t ctas, std::mt19937_64& rng,
                            const JoinSharedRows& join) {
  DecodeRun run;
  run.join = join;
  return emulate(world, ctas, rng, &run);
}

bool stays_in_batch(World& world, int32_t ctas, std::mt19937_64& rng,
                    const std::function<void()>& change) {
  DecodeRun run;
  run.after_plan = change;
  // No item has more rows left than tiles.
  for (const SideCounts& n : world.tokens) {
    for (const int32_t tokens : n.of) run.guard_rows += tile_count(tokens) + 1;
  }
  (void)emulate(world, ctas, rng, &run);
  return run.is_guard_whole;
}

void check(WorldShape shape, int32_t ctas) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << ctas << " CTAs");
  std::mt19937_64 rng(seed);
  shape.page_records = rng() % 2 == 0;
  World world = make_world(shape, rng);
  const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
  ASSERT_TRUE(expected.is_ok()) << expected.status().message();
  const DecodeOutput got = emulate_decode(world, ctas, rng);
  // docs/internals/attention.md, "Error".
  EXPECT_LT(relative_error(got.out, expected->out), tolerance_of(shape.dtype));
  for (size_t i = 0; i < got.lse.size(); ++i) {
    if (expected->lse[i] == -INFINITY) {
      EXPECT_EQ(got.lse[i], -INFINITY) << i;
    } else {
      // A sink far from 0 is rounded with its factor log2(e), and back.
      EXPECT_NEAR(got.lse[i], expected->lse[i], 1e-3 + 3e-7 * std::fabs(expected->lse[i])) << i;
    }
  }
  EXPECT_THAT(got.row_status, ::testing::Each(0));
}

}  // namespace test
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// The plan kernel's source run on the host, beside plan_items().
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "attention/work/plan_kernel.cuh"
#include "tests/support/plan_items.h"

namespace tierkv {

extern uint8_t shared_bytes[1 << 18];  // of emulated_decode.cc

namespace {

constexpr int32_t kWarps = 3;
constexpr int64_t kPageBytes = 13312;

struct Draw {
  std::mt19937_64& rng;
  int32_t operator()(int32_t low, int32_t high) const {
    return std::uniform_int_distribution<int32_t>(low, high)(rng);
  }
};

struct Size {
  int32_t sequences, kv_heads, layers, passes, max_ctas, table_slots;
};

// Random counts, some outside the table, and everything that a plan of them needs.
template <int32_t kClasses>
struct PlanWorld {
  PageTableShape shape;
  std::vector<SideCounts> tokens;
  std::vector<int32_t> sequences;  // of the batch; empty: 0, 1, 2, ...
  std::vector<WorkItem> items;
  std::vector<int32_t> row_status;
  PlanParamsOf<kClasses> params;

  PlanWorld(const Size& size, Draw draw) {
    shape.num_sequences = size.sequences;
    shape.rows_per_sequence = size.kv_heads * size.layers;
    shape.num_sides = kMaxSides;
    shape.table_slots[0] = shape.table_slots[1] = size.table_slots;
    tokens.resize(shape.num_rows());
    add_tiers(draw);
    RowsOf<kClasses>& rows = params.rows;
    rows.token_stride = kMaxSides;
    rows.passes = size.passes;
    rows.num_rows = size.sequences * size.kv_heads * size.passes;
    rows.num_kv_heads = size.kv_heads;
    rows.num_table_sequences = size.sequences;
    rows.rows_per_sequence = shape.rows_per_sequence;
    if (draw(0, 1) == 1) {
      for (int32_t i = 0; i < size.sequences; ++i) {
        sequences.push_back(draw(0, 4) > 0 ? draw(0, size.sequences - 1)
                                           : draw(-2, size.sequences + 1));
      }
      rows.sequences = sequences.data();
    }
    fill(draw);
    params.max_ctas = size.max_ctas;
    params.even_ctas = even_ctas(rows.num_rows, size.max_ctas);
    params.warps = kWarps;
    params.num_layers = size.layers;
    items.assign(size.layers * (size.max_ctas * kWarps + 1), {-9, -9, -9, {-9, -9, -9}});
    row_status.assign(size.layers * size.sequences * size.kv_heads, -9);
    params.items = items.data();
    params.row_status = row_status.data();
  }

  // One to three, of any sides.
  void add_tiers(Draw draw) {
    const TierFormat formats[] = {token_wise_tier(8, 4), token_wise_tier(4, 2),
                                  token_wise_tier(16, 16), token_wise_tier(2, 2)};
    int32_t sides[kMaxSides] = {0, 1, 2, 3};
    std::shuffle(sides, sides + kMaxSides, draw.rng);
    const PageTableView view{shape, nullptr, tokens.data(), nullptr};
    params.rows.num_tiers = draw(1, kAttentionTiers);
    for (int32_t t = 0; t < params.rows.num_tiers; ++t) {
      for (int32_t c = 0; c < kClasses; ++c) {
        const PageLayout layout =
            *make_page_layout(formats[kClasses > 1 ? draw(0, 3) : t], 128, kPageBytes);
        SideView side = view.side(sides[t]);
        side.max_pages = shape.table_slots[sides[t] >> 1];
        params.rows.tiers[c * kAttentionTiers + t] = tier_source(layout, side, 8704);
      }
    }
    if constexpr (kClasses > 1) {
      for (HeadPlanes& heads : params.layers) {
        for (int32_t h = 0; h < kClassHeads; ++h) heads.set(h, draw(0, kClasses - 1));
      }
    }
  }

  // With the classes of a layer, as the host's plan takes them.
  RowsOf<kClasses> rows_of(int32_t layer) const {
    RowsOf<kClasses> rows = params.rows;
    if constexpr (kClasses > 1) rows.heads = params.layers[layer];
    return rows;
  }

  void fill(Draw draw) {
    const int32_t most = draw(0, 3) * 1000, kind = draw(0, 2);
    for (SideCounts& n : tokens) {
      for (int32_t& x : n.of) {
        x = kind == 0 ? most : kind == 1 ? draw(0, most) : draw(0, 9) * draw(-20, 20000);
      }
    }
  }
};

template <class Cost, int32_t kClasses>
void emulate(const PlanLaunchOf<kClasses>& launch) {
  const PlanParamsOf<kClasses>& p = launch.plan;
  ASSERT_LE(plan_shared_bytes<Cost>(p.rows.num_rows), sizeof(shared_bytes));
  for (int32_t layer = 0; layer < p.num_layers; ++layer) {
    for (int32_t part = 0; part < ceil_div(p.max_ctas * p.warps + 1, kPlanItems); ++part) {
      std::fill(std::begin(shared_bytes), std::end(shared_bytes), 0xff);
      emulator::cta().run(emulator::Index{layer, part}, kPlanThreads,
                          [&] { plan_kernel<Cost, kClasses>(launch); });
    }
  }
}

template <int32_t kClasses>
void expect_is_host_plan(const PlanWorld<kClasses>& w) {
  const PlanParamsOf<kClasses>& p = w.params;
  for (int32_t layer = 0; layer < p.num_layers; ++layer) {
    const RowsOf<kClasses> rows = w.rows_of(layer);
    const std::vector<WorkItem> expected = plan_items(rows, layer, p.max_ctas, p.warps);
    for (size_t i = 0; i < expected.size(); ++i) {
      const WorkItem &item = w.items[layer * expected.size() + i], &e = expected[i];
      ASSERT_EQ(item.row, e.row) << "item " << i << " of layer " << layer;
      ASSERT_EQ(item.tile, e.tile) << i;
      ASSERT_EQ(item.tiles, e.tiles) << i;
      ASSERT_TRUE(std::equal(item.tier, item.tier + kAttentionTiers, e.tier)) << i;
    }
    for (int32_t row = 0; row < p.rows.num_rows; ++row) {
      const bool is_corrupt =
          row_tokens(rows, table_row_of(rows, layer, row), first_tier_of(rows, row)).corrupt;
      const int32_t batch_rows = p.rows.num_rows / p.rows.passes;
      ASSERT_EQ(w.row_status[layer * batch_rows + batch_row_of(p.rows, row)],
                static_cast<int32_t>(is_corrupt ? StatusCode::kCorrupt : StatusCode::kOk))
          << row;
    }
  }
}

template <class Cost, int32_t kClasses>
void check_sizes(const std::vector<Size>& sizes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  for (const Size& size : sizes) {
    PlanWorld<kClasses> w(size, Draw{rng});
    SCOPED_TRACE(::testing::Message() << w.params.rows.num_rows << " rows, " << size.max_ctas);
    emulate<Cost>(plan_launch(w.params));
    expect_is_host_plan(w);
  }
}

std::vector<Size> sizes() {
  return {{1, 1, 1, 1, 1, 60},    {1, 8, 1, 1, 132, 400},  {3, 5, 2, 1, 7, 60},
          {64, 8, 1, 1, 132, 60}, {40, 7, 1, 2, 132, 400}, {300, 8, 2, 1, 132, 60},
          {16, 8, 2, 1, 132, 60}, {70, 11, 1, 1, 512, 60}, {1100, 8, 1, 1, 132, 60}};
}

TEST(EmulatedPlan, IsTheHostPlan) {
  check_sizes<uint32_t, 1>(sizes());
}

TEST(EmulatedPlan, OfClassesIsTheHostPlan) {
  check_sizes<uint32_t, kMaxAttentionClasses>(sizes());
  check_sizes<uint64_t, kMaxAttentionClasses>({{40, 7, 3, 2, 132, 400}});
}

TEST(EmulatedPlan, CostsOf64BitsAreTheHostPlan) {
  check_sizes<uint64_t, 1>(sizes());
}

}  // namespace
}  // namespace tierkv

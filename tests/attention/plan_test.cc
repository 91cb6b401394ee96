// SPDX-License-Identifier: Apache-2.0
#include "attention/work/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "attention/tiers/decode.h"
#include "tests/support/plan_items.h"

namespace tierkv {
namespace {

constexpr int64_t kPageBytes = 13312;
constexpr int32_t kSlotBytes = 8704;

// Token counts alone: the plan reads nothing else.
struct Rows {
  std::vector<SideCounts> tokens;
  std::vector<int32_t> slots;
  PageTableShape shape;
  PageLayout layouts[2];
  RowsOf<1> rows;

  Rows(int32_t sequences, int32_t kv_heads, int32_t layers, int32_t table_slots) {
    const TierFormat formats[] = {token_wise_tier(8, 4), token_wise_tier(4, 2)};
    shape.num_sequences = sequences;
    shape.rows_per_sequence = kv_heads * layers;
    shape.table_slots[0] = table_slots;
    for (int32_t t = 0; t < 2; ++t) {
      layouts[t] = *make_page_layout(formats[t], 128, kPageBytes);
      shape.tokens_per_page[t] = layouts[t].tokens;
    }
    tokens.resize(shape.num_rows());
    slots.resize(static_cast<size_t>(shape.num_rows()) * shape.row_stride());
    const PageTableView view{shape, slots.data(), tokens.data(), nullptr};
    for (int32_t t = 0; t < 2; ++t) {
      rows.tiers[t] = tier_source(layouts[t], view.side(t), kSlotBytes);
    }
    rows.row_stride = shape.row_stride();
    rows.token_stride = kMaxSides;
    rows.num_rows = sequences * kv_heads;
    rows.num_kv_heads = kv_heads;
    rows.num_tiers = 2;
    rows.num_table_sequences = sequences;
    rows.rows_per_sequence = shape.rows_per_sequence;
  }
};

constexpr int32_t kWarps = 3;

// Walks the tiles of all rows of a layer in order.
struct TileWalk {
  const RowsOf<1>& rows;
  int32_t layer;
  int32_t row = 0, tile = 0;

  RowTokens tokens() const { return row_tokens(rows, table_row_of(rows, layer, row)); }
  // The cost of the tile, with that of its row where it is the first; on to the next one.
  int64_t pass() {
    const RowTokens n = tokens();
    int64_t cost = 0;
    int32_t end = 0;
    for (int32_t t = 0; t < rows.num_tiers; ++t) {
      const int32_t first = end;
      end += tile_count(n.tier[t]);
      if (tile >= first && tile < end) cost += rows.tiers[t].tile_cost;
    }
    if (tile == 0) cost += row_cost(end);
    if (++tile >= end) {
      tile = 0;
      ++row;
    }
    return cost;
  }
};

// Every tile in one item, items in order, no idle CTA before a working one, cost even.
void check_plan(const RowsOf<1>& rows, int32_t layer, int32_t max_ctas) {
  const std::vector<WorkItem> plan = plan_items(rows, layer, max_ctas, kWarps);
  const int32_t items = max_ctas * kWarps;
  ASSERT_EQ(plan.size(), static_cast<size_t>(items) + 1);
  TileWalk walk{rows, layer};
  std::vector<int64_t> costs;
  int32_t used = 0;
  for (int32_t i = 0; i < items; ++i) {
    const WorkItem& item = plan[i];
    const int32_t cta = i / kWarps;
    if (item.row == rows.num_rows) {
      EXPECT_EQ(item.tiles, 0);
      continue;
    }
    EXPECT_GE(cta, used - 1) << "an idle CTA before a working one";
    used = cta + 1;
    EXPECT_EQ(item.row, walk.row);
    EXPECT_EQ(item.tile, walk.tile);
    costs.push_back(0);
    for (int32_t k = 0; k < item.tiles; ++k) {
      ASSERT_LT(walk.row, rows.num_rows);
      if (k == 0) {
        const RowTokens n = walk.tokens();
        for (int32_t t = 0; t < rows.num_tiers; ++t) EXPECT_EQ(item.tier[t], n.tier[t]);
      }
      costs.back() += walk.pass();
    }
  }
  EXPECT_EQ(walk.row, rows.num_rows) << "tiles without an item";
  EXPECT_EQ(plan[items].row, rows.num_rows);
  EXPECT_EQ(plan[items].tile, 0);
  for (int32_t cta = 0; cta < used; ++cta) {
    const WorkItem& first = plan[cta * kWarps];
    int32_t tiles = 0;
    for (int32_t w = 0; w < kWarps; ++w) tiles += (&first)[w].tiles;
    EXPECT_GT(tiles, 0) << "a working CTA without work";
  }
  // The ends of an item are rounded to places where one may start.
  const int64_t total = std::accumulate(costs.begin(), costs.end(), int64_t{0});
  EXPECT_LE(*std::max_element(costs.begin(), costs.end()),
            total / static_cast<int64_t>(costs.size()) + largest_step_cost(rows));
}

TEST(Plan, DivisorsGiveTheQuotientsOfADivision) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  for (int round = 0; round < 20000; ++round) {
    const int32_t bits = std::uniform_int_distribution<int32_t>(0, 30)(rng);
    const int32_t d = std::uniform_int_distribution<int32_t>(1, 1 << bits)(rng);
    const auto divisor = static_cast<uint32_t>(d);
    const auto any = std::uniform_int_distribution<uint32_t>(0, ~0u)(rng);
    const uint32_t multiple = any / divisor * divisor;
    for (const uint32_t x : {any, multiple, multiple - 1, 0u, ~0u}) {
      ASSERT_EQ(Divisor(d).quotient(x), x / divisor) << x << " / " << d;
    }
  }
}

TEST(Plan, PartsOfATotalDifferByOneAtMost) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  for (int round = 0; round < 20000; ++round) {
    const int32_t parts = std::uniform_int_distribution<int32_t>(1, 4096)(rng);
    const int32_t bits = std::uniform_int_distribution<int32_t>(0, 46)(rng);
    const int64_t total =
        parts + std::uniform_int_distribution<int64_t>(0, (int64_t{1} << bits) - 1)(rng);
    const EvenCut cut(total, Divisor(parts));
    const int32_t i = std::uniform_int_distribution<int32_t>(0, parts - 1)(rng);
    SCOPED_TRACE(::testing::Message() << i << " of " << parts << " parts of " << total);
    EXPECT_EQ(cut.start(0), 0);
    const int64_t exact = total * i / parts;
    ASSERT_GE(cut.start(i), exact);
    ASSERT_LE(cut.start(i), exact + 1);
    ASSERT_LT(cut.start(i), total);
    if (total * i % parts == 0) {
      ASSERT_EQ(cut.start(i), exact);
    }
    const int64_t size = (i + 1 < parts ? cut.start(i + 1) : total) - cut.start(i);
    ASSERT_GE(size, total / parts - 1);
    ASSERT_LE(size, total / parts + 1);
  }
}

TEST(Plan, RowsOfOneCostBeginAndEndWithACta) {
  EXPECT_EQ(even_ctas(8, 132), 128);
  EXPECT_EQ(even_ctas(512, 132), 128);
  EXPECT_EQ(even_ctas(1000, 132), 125);
  EXPECT_EQ(even_ctas(100, 132), 132) << "would leave 32 of 132 without work";
  EXPECT_EQ(even_ctas(509, 132), 132) << "a prime";
  for (const int32_t kv_heads : {8, 60}) {
    Rows r(5, kv_heads, 1, 60);
    for (SideCounts& n : r.tokens) n.of[0] = 1500;
    const std::vector<WorkItem> plan = plan_items(r.rows, 0, 63, kWarps);
    const int32_t ctas = kv_heads == 8 ? 63 : 60;  // 40 rows on 63 CTAs, five rows a CTA
    for (int32_t cta = 0; cta < 63; ++cta) {
      EXPECT_EQ(plan[cta * kWarps].row == r.rows.num_rows, cta >= ctas) << cta;
      if (kv_heads == 60) {
        EXPECT_EQ(plan[cta * kWarps].tile, 0) << cta;
      }
    }
  }
}

TEST(Plan, CoversRandomRaggedRows) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(rng);
  };
  for (int round = 0; round < 200; ++round) {
    Rows r(draw(1, 20), draw(1, 4), 2, 60);
    for (SideCounts& n : r.tokens) {
      n.of[0] = draw(0, 2) == 0 ? 0 : draw(0, 1500);
      n.of[1] = draw(0, 2) == 0 ? 0 : draw(0, 3000);
    }
    check_plan(r.rows, draw(0, 1), draw(1, 140));
  }
}

TEST(Plan, LittleWorkGoesToFewCtas) {
  Rows r(3, 1, 1, 10);
  r.tokens[1].of[0] = 33;
  check_plan(r.rows, 0, 132);
  const std::vector<WorkItem> plan = plan_items(r.rows, 0, 132, kWarps);
  EXPECT_EQ(plan.back().row, 3);
  EXPECT_EQ(plan[plan.size() - 2].tiles, 0);
}

TEST(Plan, OneRowOverAllCtas) {
  Rows r(1, 1, 1, 1000);
  r.tokens[0].of[0] = 30000;
  r.tokens[0].of[1] = 40000;
  check_plan(r.rows, 0, 132);
}

TEST(Plan, BatchNamesItsSequences) {
  Rows r(4, 2, 1, 10);
  for (int32_t row = 0; row < 8; ++row) r.tokens[row].of[0] = 64 * (row + 1);
  const std::vector<int32_t> sequences = {3, -1, 0};
  r.rows.sequences = sequences.data();
  r.rows.num_rows = 6;
  check_plan(r.rows, 0, 5);
  EXPECT_EQ(table_row_of(r.rows, 0, 1), 7);
  EXPECT_EQ(table_row_of(r.rows, 0, 2), kPaddingRow);
  EXPECT_EQ(table_row_of(r.rows, 0, 4), 0);
}

TEST(Plan, CountsOutsideTheTableAreCut) {
  Rows r(3, 1, 1, 4);
  r.tokens[0].of[0] = INT32_MAX;
  r.tokens[1].of[1] = -5;
  const std::vector<int32_t> sequences = {0, 1, 99};
  r.rows.sequences = sequences.data();
  check_plan(r.rows, 0, 3);
  for (int32_t row = 0; row < 3; ++row) {
    EXPECT_TRUE(row_tokens(r.rows, table_row_of(r.rows, 0, row)).corrupt) << row;
  }
  EXPECT_EQ(row_tokens(r.rows, 0).tier[0], 4 * r.layouts[0].tokens);
  EXPECT_EQ(row_tokens(r.rows, 1).tier[1], 0);
}

TEST(CutPage, ChunksFitTheSlotAndThePage) {
  for (const int32_t slot : {kSlotBytes, 13312}) {
    for (const int32_t k : {16, 8, 4, 2}) {
      for (const int32_t v : {16, 8, 4, 2}) {
        for (const int64_t page_bytes : {8448, 13312, 23296, 65536}) {
          const PageLayout layout = *make_page_layout(token_wise_tier(k, v), 128, page_bytes);
          const int32_t tiles = cut_page(layout.tiles(), tile_read_bytes(layout), slot);
          EXPECT_GE(tiles, 1);
          EXPECT_LE(tiles, layout.tiles());
          EXPECT_LE(tiles * tile_read_bytes(layout), slot);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tierkv

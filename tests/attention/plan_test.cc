#include "attention/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "attention/decode.h"

namespace tierkv {
namespace {

constexpr int64_t kPageBytes = 13312;

// Token counts alone: the plan reads nothing else.
struct Rows {
  std::vector<SideCounts> tokens;
  std::vector<int32_t> slots;
  PageTableShape shape;
  AttentionRows rows;

  Rows(int32_t sequences, int32_t kv_heads, int32_t layers, int32_t table_slots) {
    const TierFormat formats[] = {token_wise_tier(8, 4), token_wise_tier(4, 2)};
    shape.num_sequences = sequences;
    shape.rows_per_sequence = kv_heads * layers;
    shape.table_slots[0] = table_slots;
    for (int32_t t = 0; t < 2; ++t) {
      rows.tiers[t].layout = *make_page_layout(formats[t], 128, kPageBytes);
      shape.tokens_per_page[t] = rows.tiers[t].layout.tokens;
    }
    tokens.resize(shape.num_rows());
    slots.resize(static_cast<size_t>(shape.num_rows()) * shape.row_stride());
    const PageTableView view{shape, slots.data(), tokens.data(), nullptr};
    for (int32_t t = 0; t < 2; ++t) {
      rows.tiers[t].side = view.side(t);
      cut_pages(rows.tiers[t], decode_slot_bytes(128));
    }
    rows.num_rows = sequences * kv_heads;
    rows.num_kv_heads = kv_heads;
    rows.num_tiers = 2;
    rows.num_table_sequences = sequences;
    rows.rows_per_sequence = shape.rows_per_sequence;
  }
};

int64_t item_cost(const AttentionRows& rows, int32_t layer, const WorkItem& item) {
  int64_t cost = 0;
  int32_t row = item.row, chunk = item.chunk;
  for (int32_t i = 0; i < item.num_chunks; ++i) {
    RowTokens n = row_tokens(rows, table_row_of(rows, layer, row));
    while (chunk >= row_work(rows, n).chunks) {
      chunk = 0;
      n = row_tokens(rows, table_row_of(rows, layer, ++row));
    }
    const ChunkPlace place = chunk_place(rows, n, chunk++);
    cost += place.tokens == 0 ? kEmptyRowCost : rows.tiers[place.tier].chunk_cost;
  }
  return cost;
}

// Every chunk in one item, items in order, none empty before the last, spans true, cost even.
void check_plan(const AttentionRows& rows, int32_t layer, int32_t max_items) {
  const std::vector<WorkItem> plan = plan_items(rows, layer, max_items);
  ASSERT_EQ(plan.size(), static_cast<size_t>(max_items) + 1);
  int32_t row = 0, chunk = 0;
  int64_t total_cost = 0, largest_cost = 0;
  std::vector<std::vector<int32_t>> items_of_row(rows.num_rows);
  int32_t used = 0;
  for (int32_t c = 0; c < max_items; ++c) {
    const WorkItem& item = plan[c];
    if (item.num_chunks == 0) {
      EXPECT_EQ(item.row, rows.num_rows);
      continue;
    }
    EXPECT_EQ(used++, c) << "an empty item before a used one";
    EXPECT_EQ(item.row, row);
    EXPECT_EQ(item.chunk, chunk);
    for (int32_t i = 0; i < item.num_chunks; ++i) {
      ASSERT_LT(row, rows.num_rows);
      if (items_of_row[row].empty() || items_of_row[row].back() != c)
        items_of_row[row].push_back(c);
      const RowTokens n = row_tokens(rows, table_row_of(rows, layer, row));
      if (++chunk == row_work(rows, n).chunks) {
        chunk = 0;
        ++row;
      }
    }
    const int64_t cost = item_cost(rows, layer, item);
    total_cost += cost;
    largest_cost = std::max(largest_cost, cost);
  }
  EXPECT_EQ(row, rows.num_rows) << "chunks without an item";
  EXPECT_EQ(plan[max_items].row, rows.num_rows);
  for (int32_t c = 0; c < used; ++c) {
    EXPECT_EQ(plan[c].span_first, items_of_row[plan[c].row].front());
    EXPECT_EQ(plan[c].span_last, items_of_row[plan[c].row].back());
  }
  // An item's ends are rounded to chunks; none holds more than a chunk over its share.
  const int64_t chunk_cost = std::max(rows.tiers[0].chunk_cost, rows.tiers[1].chunk_cost);
  EXPECT_LE(largest_cost, total_cost / used + 2 * chunk_cost);
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

TEST(Plan, FewerChunksThanItems) {
  Rows r(3, 1, 1, 10);
  r.tokens[1].of[0] = 33;
  check_plan(r.rows, 0, 132);
  const std::vector<WorkItem> plan = plan_items(r.rows, 0, 132);
  EXPECT_EQ(plan[3].num_chunks, 1);  // two chunks of row 1, one of each empty row
  EXPECT_EQ(plan[4].num_chunks, 0);
}

TEST(Plan, OneRowOverAllItems) {
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
  EXPECT_EQ(row_tokens(r.rows, 0).tier[0], 4 * r.rows.tiers[0].layout.tokens);
  EXPECT_EQ(row_tokens(r.rows, 1).tier[1], 0);
}

TEST(CutPages, ChunksFitTheSlotAndCoverThePage) {
  const int32_t slot = decode_slot_bytes(128);
  for (const int32_t k : {16, 8, 4, 2}) {
    for (const int32_t v : {16, 8, 4, 2}) {
      for (const int64_t page_bytes : {8448, 13312, 23296, 65536}) {
        TierSource tier;
        tier.layout = *make_page_layout(token_wise_tier(k, v), 128, page_bytes);
        cut_pages(tier, slot);
        EXPECT_LE(tier.tiles_per_chunk * tile_read_bytes(tier.layout), slot);
        EXPECT_GE(tier.tiles_per_chunk * tier.chunks_per_page, tier.layout.tiles());
        EXPECT_LT(tier.tiles_per_chunk * (tier.chunks_per_page - 1), tier.layout.tiles());
      }
    }
  }
}

}  // namespace
}  // namespace tierkv

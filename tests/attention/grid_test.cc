// SPDX-License-Identifier: Apache-2.0
// Which grids devices with little shared memory get. Prints the table of
// docs/notes/2026-11-22-shared-memory.md.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "attention/core/workspace.h"
#include "attention/tiers/decode.h"
#include "attention/tiers/grid.h"
#include "attention/tiers/shared_rows.h"

namespace tierkv {
namespace {

constexpr int32_t kSmallest = 99 << 10;  // sm_86, 89, 120
constexpr int32_t kLargest = 227 << 10;  // sm_90, 100

AttentionConfig config_of(int32_t head_dim, int32_t group, int32_t q_len,
                          std::initializer_list<TierFormat> formats) {
  AttentionConfig c;
  c.num_kv_heads = 2;
  c.num_q_heads = 2 * group;
  c.head_dim = head_dim;
  c.q_len = q_len;
  c.sm_scale = 0.1;
  c.page_bytes = 26112 * head_dim / 128;
  for (const TierFormat& format : formats)
    c.tiers[c.num_tiers] = {c.num_tiers, format}, ++c.num_tiers;
  return c;
}

TEST(AttentionGrid, EveryShapeFitsIntoTheSmallestSharedMemory) {
  std::printf(
      "| head_dim | columns | formats | warps | slots a warp | bytes a slot | bytes a CTA |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  const TierFormat raw = raw_tier(), high = token_wise_tier(8, 4), low = token_wise_tier(4, 2);
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 2, 4, 7, 8, 9, 12, 16}) {
      for (const int32_t q_len : {1, 2, 3, 8}) {
        for (const bool has_raw : {false, true}) {
          const AttentionConfig c = has_raw ? config_of(head_dim, group, q_len, {raw, high, low})
                                            : config_of(head_dim, group, q_len, {high, low});
          const Result<AttentionGrid> grid = choose_grid(c, 100, kSmallest);
          ASSERT_TRUE(grid.is_ok()) << grid.status().message() << ": head_dim " << head_dim
                                    << " group " << group << " q_len " << q_len;
          EXPECT_LE(grid->shared_bytes, kSmallest - kSharedRowsRoom);
          EXPECT_GE(grid->slot_bytes, least_slot_bytes(c));
          // Devices with much keep all their warps.
          const Result<AttentionGrid> large = choose_grid(c, 100, kLargest);
          ASSERT_TRUE(large.is_ok());
          EXPECT_EQ(large->warps_per_cta, kDecodeWarps);
          if (q_len > 1 || (group & (group - 1)) != 0) continue;
          std::printf("| %d | %d | %s | %d | %d | %d | %d |\n", head_dim, query_columns(c).of_row,
                      has_raw ? "raw, K8V4, K4V2" : "K8V4, K4V2", grid->warps_per_cta,
                      grid->slots_per_warp, grid->slot_bytes, grid->shared_bytes);
        }
      }
    }
  }
}

// The formats of classes share a page, two of which each of eight warps has room for.
TEST(AttentionGrid, PagesOfClassesFitTwiceIntoTheRings) {
  const TierFormat k8v4 = token_wise_tier(8, 4), k4v2 = token_wise_tier(4, 2);
  const uint8_t of_head[] = {0, 2};
  for (const int32_t group : {1, 2, 4}) {
    AttentionConfig c = config_of(128, group, 1, {k8v4, k8v4, raw_tier()});
    c.page_bytes = 13312;
    c.page_records = false;
    c.classes.count = 3;
    c.classes.of_head = of_head;
    const TierFormat formats[2][3] = {{token_wise_tier(4, 4), k4v2, raw_tier()},
                                      {k4v2, token_wise_tier(2, 2), raw_tier()}};
    for (int32_t i = 0; i < 2; ++i) std::copy_n(formats[i], 3, c.classes.format[i]);
    const Result<AttentionGrid> grid = choose_grid(c, 132, kLargest);
    ASSERT_TRUE(grid.is_ok()) << grid.status().message();
    EXPECT_EQ(grid->warps_per_cta, kDecodeWarps);
    EXPECT_EQ(grid->slots_per_warp, 2);
    // 8 tiles of K4V2 fill it; 4 of K8V4 take 12800 bytes, 11 of K2V2 12672.
    EXPECT_EQ(grid->slot_bytes, 13312);
  }
}

// A byte between two parts is a byte less for the rings of pages.
TEST(AttentionGrid, PartsOfSharedMemoryAreAlignedWithoutOtherGaps) {
  const int32_t head_dim = 96, columns = 5, slot_bytes = 3072, slots = 3;
  for (int32_t warps = 1; warps <= kDecodeWarps; ++warps) {
    SCOPED_TRACE(warps);
    const DecodeShared s = decode_shared(head_dim, columns, slot_bytes, slots, warps);
    const auto per_warp = [&](size_t bytes) { return warps * static_cast<int32_t>(bytes); };
    EXPECT_EQ(s.full, per_warp(slots * slot_bytes));
    EXPECT_EQ(s.headers - s.full, per_warp(kMaxSlots * sizeof(uint64_t)));
    EXPECT_EQ(s.places - s.headers, per_warp(kMaxSlots * kChunkHeaderBytes));
    EXPECT_EQ(s.states - s.places, per_warp(kMaxSlots * kChunkHeaderBytes));
    EXPECT_EQ(s.ends - s.states, per_warp(2 * columns * sizeof(SoftmaxState)));
    EXPECT_EQ(s.part_rows - s.ends, 2 * static_cast<int32_t>(sizeof(WorkItem)));
    EXPECT_EQ(s.parts / 16, (s.part_rows + per_warp(2 * sizeof(int32_t)) + 15) / 16);
    EXPECT_EQ(s.bytes - s.parts, per_warp(columns * head_dim * sizeof(float)));
    // Barriers and states are read as 8 bytes, headers and parts as 16.
    EXPECT_EQ(s.full % 8 + s.states % 8, 0);
    EXPECT_EQ(s.headers % 16 + s.places % 16 + s.parts % 16, 0);
    EXPECT_EQ(s.ends % static_cast<int32_t>(alignof(WorkItem)), 0);
  }
}

TEST(AttentionGrid, TooLittleSharedMemoryIsRefusedByName) {
  const AttentionConfig c = config_of(256, 8, 1, {raw_tier()});
  const Result<AttentionGrid> grid = choose_grid(c, 100, 16 << 10);
  ASSERT_FALSE(grid.is_ok());
  EXPECT_EQ(grid.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(grid.status().message().find("16384"), std::string::npos);
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "codec/format/page_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tierkv {
namespace {

constexpr int32_t kHeadDims[] = {64, 96, 128, 256};
constexpr int32_t kBits[] = {16, 8, 4, 2};
constexpr Component kComponents[] = {Component::kKey, Component::kValue};

// The layout is usable as a constant expression, as kernels need it.
constexpr PageLayout kHigh = page_layout({128, kCodes8, kCodes4, 1, 1, 64});
static_assert(kHigh.used_bytes == 13312 && kHigh.k_metadata == 8192 && kHigh.v_codes == 8448);
static_assert(kHigh.v_metadata == 12544 && kHigh.scores == 12800 && kHigh.positions == 13056);
static_assert(CodeType::of_bits(16) == CodeType::raw16() && CodeType::raw16().bits() == 16);
static_assert(CodeType::raw16() != CodeType::uniform(16) && CodeType::uniform(16).bits() == 16);
static_assert(CodeType::raw16().kind() == CodeKind::kRaw16 && !CodeType::raw16().has_params());
static_assert(CodeType::of_bits(4) == kCodes4 && kCodes4.has_params() && kCodes4.levels() == 16);
static_assert(CodeType::of_bits(-1) == CodeType::uniform(1 << 30));  // neither is a width
static_assert(kCodes2.bytes_of(5) == 2 && CodeType::raw16().bytes_of(5) == 10);
static_assert(code_position({kCodes4, 128}, Component::kKey, 9, 3).bit == 24);

// docs/reference/format.md, section 2, for head_dim 128, written as the table is: rows and columns
// of the fragment.
CodePosition design_table_position(int32_t bits, Component component, int32_t token, int32_t dim) {
  const bool key = component == Component::kKey;
  const int32_t f = dim / 16;
  const int32_t row = key ? token : dim % 16, col = key ? dim % 16 : token;
  const int32_t g = row % 8, rh = row / 8, ch = col / 8, t = (col % 8) / 2, par = col % 2;
  int32_t w = 0, bit = 0;
  if (bits == 16) {
    w = 4 * f + rh + 2 * ch;
    bit = 16 * par;
  } else if (bits == 8) {
    w = key ? 2 * f + rh : 2 * f + ch;
    bit = key ? 16 * par + 8 * ch : 16 * par + 8 * rh;
  } else if (bits == 4) {
    w = f;
    bit = key ? 16 * par + 8 * rh + 4 * ch : 16 * par + 8 * ch + 4 * rh;
  } else {
    w = f / 2;
    bit = key ? 16 * par + 8 * rh + 4 * (f % 2) + 2 * ch : 16 * par + 8 * ch + 4 * (f % 2) + 2 * rh;
  }
  const int32_t lane = 4 * g + t;
  return {(w / 4) * 512 + 16 * lane + 4 * (w % 4), bit};
}

TEST(CodePosition, IsTheDesignTableAtHeadDim128) {
  for (int32_t bits : kBits) {
    for (Component c : kComponents) {
      for (int32_t token = 0; token < 16; ++token) {
        for (int32_t dim = 0; dim < 128; ++dim) {
          const CodePosition got = code_position({CodeType::of_bits(bits), 128}, c, token, dim);
          const CodePosition want = design_table_position(bits, c, token, dim);
          ASSERT_EQ(got.byte, want.byte) << bits << " bits, token " << token << " dim " << dim;
          ASSERT_EQ(got.bit, want.bit) << bits << " bits, token " << token << " dim " << dim;
        }
      }
    }
  }
}

// Every bit of a tile belongs to exactly one code.
TEST(CodePosition, FillsTheTileWithoutOverlap) {
  for (int32_t head_dim : kHeadDims) {
    for (int32_t bits : kBits) {
      for (Component c : kComponents) {
        const TileLayout tile{CodeType::of_bits(bits), head_dim};
        ASSERT_EQ(tile.bytes(), 16 * head_dim * bits / 8);
        std::vector<int> owners(static_cast<size_t>(tile.bytes()) * 8, 0);
        for (int32_t token = 0; token < 16; ++token) {
          for (int32_t dim = 0; dim < head_dim; ++dim) {
            const CodePosition p = code_position(tile, c, token, dim);
            ASSERT_EQ(p.byte % 4, 0);
            ASSERT_GE(p.byte, 0);
            ASSERT_LE(p.byte + 4, tile.bytes());
            ASSERT_LE(p.bit + bits, 32);
            for (int32_t b = 0; b < bits; ++b) ++owners[p.byte * 8 + p.bit + b];
          }
        }
        EXPECT_EQ(std::count(owners.begin(), owners.end(), 1), tile.bytes() * 8)
            << "head_dim " << head_dim << " bits " << bits;
      }
    }
  }
}

// What the kernels rely on: after "shift to the byte, mask", register r of dim block f of lane 4g +
// t holds the fragment element the PTX manual names, times 2^code_shift.
TEST(CodePosition, IsTheMmaOperandOrder) {
  for (int32_t head_dim : kHeadDims) {
    for (int32_t bits : kBits) {
      for (Component c : kComponents) {
        const TileLayout tile{CodeType::of_bits(bits), head_dim};
        const bool key = c == Component::kKey;
        for (int32_t lane = 0; lane < 32; ++lane) {
          for (int32_t i = 0; i < 8 * tile.dim_blocks(); ++i) {
            const int32_t f = i / 8, reg = i % 8 / 2, odd = i % 2;
            const int32_t row = lane / 4 + 8 * (reg & 1),
                          col = 2 * (lane % 4) + odd + 8 * (reg / 2);
            const int32_t token = key ? row : col, dim = 16 * f + (key ? col : row);
            const CodePosition p = code_position(tile, c, token, dim);
            ASSERT_EQ(p.bit / 16, odd) << "the half of the register";
            bool of_lane = false;
            for (int32_t w = 0; w < tile.words_per_lane(); ++w) {
              of_lane |= lane_word_byte(tile.words_per_lane(), w, lane) == p.byte;
            }
            ASSERT_TRUE(of_lane) << "head_dim " << head_dim << " bits " << bits;
            ASSERT_EQ(bits < 8 ? p.bit % 8 : 0, code_shift(bits, dim));
          }
        }
      }
    }
  }
}

TEST(LaneWords, AccessesAreCoalescedAndCoverTheTile) {
  for (int32_t words : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64}) {
    int32_t first = 0, byte = 0;
    for (int32_t a = 0; a < lane_accesses(words); ++a) {
      const int32_t n = access_words(words, a);
      for (int32_t lane = 0; lane < 32; ++lane) {
        for (int32_t w = 0; w < n; ++w) {
          ASSERT_EQ(lane_word_byte(words, first + w, lane), byte + (lane * n + w) * 4) << words;
        }
      }
      first += n;
      byte += 128 * n;
    }
    EXPECT_EQ(first, words);
  }
  EXPECT_EQ(lane_accesses(6), 2);  // head_dim 96, 4 bits: 16 + 8 bytes
  EXPECT_EQ(lane_accesses(3), 2);  // head_dim 96, 2 bits: 8 + 4 bytes
}

TEST(Metadata, BlocksHoldEveryTokenOnce) {
  for (int32_t groups : {1, 2, 4, 8}) {
    std::vector<int> owners(tile_metadata_bytes(groups), 0);
    for (int32_t j = 0; j < groups; ++j) {
      for (int32_t token = 0; token < 16; ++token) {
        for (int32_t b = 0; b < 4; ++b) ++owners[token_metadata_byte(j, token) + b];
      }
    }
    EXPECT_EQ(std::count(owners.begin(), owners.end(), 1), 64 * groups);
  }
  EXPECT_EQ(token_metadata_byte(0, 11), 3 * 8 + 4);
  EXPECT_EQ(token_metadata_byte(2, 1), 128 + 8);
}

TEST(PageLayout, SegmentsAreDisjointAlignedAndFit) {
  for (int32_t head_dim : kHeadDims) {
    for (int32_t kb : kBits) {
      for (int32_t vb : kBits) {
        for (int32_t group : {0, 16, 32}) {
          const TierFormat format{token_wise(kb, kb == 16 ? 0 : group),
                                  token_wise(vb, vb == 16 ? 0 : group)};
          const auto layout = make_page_layout(format, head_dim, 40960);
          ASSERT_TRUE(layout) << layout.status().message();
          const PageLayout& p = *layout;
          const int32_t g = group == 0 ? 1 : head_dim / group;
          EXPECT_EQ(p.k_groups, kb == 16 ? 0 : g);
          EXPECT_EQ(p.v_groups, vb == 16 ? 0 : g);
          EXPECT_EQ(p.k_codes, 0);
          EXPECT_EQ(p.k_metadata, p.tokens * head_dim * kb / 8);
          EXPECT_EQ(p.v_codes - p.k_metadata, p.tokens * p.k_groups * 4);
          EXPECT_EQ(p.v_metadata - p.v_codes, p.tokens * head_dim * vb / 8);
          EXPECT_EQ(p.scores - p.v_metadata, p.tokens * p.v_groups * 4);
          EXPECT_EQ(p.positions - p.scores, p.tokens * 4);
          EXPECT_EQ(p.used_bytes - p.positions, p.tokens * 4);
          for (int32_t offset : {p.k_metadata, p.v_codes, p.v_metadata, p.scores, p.positions}) {
            EXPECT_EQ(offset % 64, 0);
          }
          EXPECT_GT(p.tokens, 0);
          EXPECT_EQ(p.tokens % 16, 0);
          EXPECT_LE(p.used_bytes, 40960);
          EXPECT_GT(p.used_bytes + p.used_bytes / p.tiles(), 40960);  // one more tile does not fit
        }
      }
    }
  }
}

// Engines' blocks of 64 tokens; the tile ends where the scores would begin, and no code moves.
TEST(PageLayout, WithoutRecordsPagesEndBeforeTheirScores) {
  const std::pair<const char*, int32_t> kTokenBytes[] = {
      {"k16v16", 512}, {"k8v4", 200}, {"k4v4", 136}, {"k4v2", 104}};
  for (const auto& [name, bytes] : kTokenBytes) {
    const TierFormat format = *parse_tier_format(name);
    const auto layout = make_page_layout(format, 128, 64 * bytes, false);
    ASSERT_TRUE(layout) << layout.status().message();
    EXPECT_EQ(layout->tokens, 64) << name;
    EXPECT_EQ(layout->used_bytes, 64 * bytes) << name;
    EXPECT_EQ(64 * bytes % kPageAlignment, 0) << name;
    EXPECT_FALSE(layout->has_records());
  }
  for (int32_t head_dim : kHeadDims) {
    for (int32_t kb : kBits) {
      for (int32_t vb : kBits) {
        PageShape shape = *page_shape(token_wise_tier(kb, vb), head_dim);
        shape.tokens = 48;
        const PageLayout with = page_layout(shape);
        shape.records = false;
        PageLayout p = page_layout(shape);
        EXPECT_EQ(page_tile_bytes(shape) * 3, p.used_bytes);
        EXPECT_EQ(p.used_bytes, with.scores);
        EXPECT_EQ(p.v_metadata, with.v_metadata);
        EXPECT_EQ(p.positions, p.scores);
        EXPECT_TRUE(with.has_records());
        EXPECT_TRUE(is_page_layout(with) && is_page_layout(p));
        p.used_bytes += 4;
        EXPECT_FALSE(is_page_layout(p));
      }
    }
  }
}

TEST(PageLayout, RefusesByName) {
  const auto code = [](const TierFormat& f, int32_t head_dim, int64_t page_bytes) {
    return make_page_layout(f, head_dim, page_bytes).status().code();
  };
  const TierFormat k8v4 = token_wise_tier(8, 4);
  EXPECT_EQ(code(k8v4, 80, 13312), StatusCode::kUnsupported);
  EXPECT_EQ(code(k8v4, 128, 3200), StatusCode::kInvalidArgument);   // no tile fits
  EXPECT_EQ(code(k8v4, 128, 13313), StatusCode::kInvalidArgument);  // alignment
  EXPECT_EQ(code(k8v4, 128, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(k8v4, 128, -128), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(k8v4, 128, int64_t{1} << 40), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(token_wise_tier(4, 1), 128, 13312), StatusCode::kUnsupported);
  EXPECT_EQ(code({token_wise(8, 8), token_wise(4)}, 128, 13312), StatusCode::kUnsupported);
  EXPECT_EQ(code({token_wise(8, 48), token_wise(4)}, 128, 13312), StatusCode::kInvalidArgument);
  TierFormat channel = k8v4;
  channel.k.unit = Unit::kChannel;
  channel.k.group = 64;
  EXPECT_EQ(code(channel, 128, 13312), StatusCode::kUnsupported);
  TierFormat coded = k8v4;
  coded.v.entropy = Entropy::kHuffman;
  EXPECT_EQ(code(coded, 128, 13312), StatusCode::kUnsupported);
}

TEST(PageSize, DiffKvPairAtHeadDim128) {
  const auto choice = choose_page_size({token_wise_tier(8, 4), token_wise_tier(4, 2)}, 128);
  ASSERT_TRUE(choice) << choice.status().message();
  EXPECT_EQ(choice->page_bytes, 13312);
  EXPECT_EQ(choice->tokens, (std::vector<int32_t>{64, 112}));
  EXPECT_TRUE(choice->within_limit);
  EXPECT_EQ(choice->waste[0], 0.0);
  EXPECT_NEAR(choice->worst_waste, 768.0 / 13312, 1e-12);

  PageSizing exact;
  exact.max_waste = 0;
  const auto full = choose_page_size({token_wise_tier(8, 4), token_wise_tier(4, 2)}, 128, exact);
  ASSERT_TRUE(full);
  EXPECT_EQ(full->page_bytes, 23296);
  EXPECT_EQ(full->tokens, (std::vector<int32_t>{112, 208}));
}

// Against the definition, by trying every multiple of 128 bytes: nothing smaller is within the
// limit.
TEST(PageSize, IsTheSmallestWithinTheLimit) {
  for (int32_t head_dim : kHeadDims) {
    for (const auto& names : std::vector<std::vector<std::string>>{{"k8v4"},
                                                                   {"k4v2"},
                                                                   {"k16v16"},
                                                                   {"k8v4", "k4v2"},
                                                                   {"k16v16", "k8v4", "k4v2"},
                                                                   {"k16v4", "k2v2"},
                                                                   {"k4v16", "k8v8", "k2v4"}}) {
      std::vector<TierFormat> formats;
      std::vector<int32_t> tile_bytes;
      for (const auto& name : names) {
        formats.push_back(*parse_tier_format(name));
        tile_bytes.push_back(page_tile_bytes(*page_shape(formats.back(), head_dim)));
      }
      const PageSizing sizing;
      const auto choice = choose_page_size(formats, head_dim, sizing);
      ASSERT_TRUE(choice) << choice.status().message();
      ASSERT_EQ(choice->page_bytes % kPageAlignment, 0);
      const auto worst = [&](int32_t page) {
        double w = 0;
        for (int32_t tile : tile_bytes) w = std::max(w, (page % tile) / static_cast<double>(page));
        return w;
      };
      const auto holds = [&](int32_t page) {
        const int32_t small = *std::min_element(tile_bytes.begin(), tile_bytes.end());
        return page / small * 16 >= sizing.min_tokens &&
               page >= *std::max_element(tile_bytes.begin(), tile_bytes.end());
      };
      int32_t first = 0;
      double least = 1;
      for (int32_t page = 128; page <= sizing.max_page_bytes; page += 128) {
        if (!holds(page)) continue;
        least = std::min(least, worst(page));
        if (first == 0 && worst(page) <= sizing.max_waste) first = page;
      }
      EXPECT_NEAR(choice->worst_waste, worst(choice->page_bytes), 1e-12);
      EXPECT_EQ(choice->within_limit, first != 0);
      if (first != 0) {
        EXPECT_EQ(choice->page_bytes, first);
      } else {
        EXPECT_NEAR(choice->worst_waste, least, 1e-12);
      }
    }
  }
}

// Pages of all classes of heads, without scores and positions: one size serves the four pairs.
TEST(PageSize, WithoutRecordsOneSizeServesAllClasses) {
  PageSizing sizing;
  sizing.records = false;
  const Result<PageChoice> choice =
      choose_page_size({token_wise_tier(8, 4), token_wise_tier(4, 4), *parse_tier_format("k4v2n"),
                        *parse_tier_format("k2nv2n")},
                       128, sizing);
  ASSERT_TRUE(choice.is_ok());
  EXPECT_EQ(choice->page_bytes, 13312);
  EXPECT_EQ(choice->tokens, (std::vector<int32_t>{64, 96, 128, 176}));
  EXPECT_NEAR(choice->worst_waste, 0.048, 0.0005);
}

TEST(PageSize, RefusesBadRequests) {
  const TierFormat k8v4 = token_wise_tier(8, 4);
  EXPECT_EQ(choose_page_size({}, 128).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(choose_page_size({k8v4}, 80).status().code(), StatusCode::kUnsupported);
  PageSizing s;
  s.max_page_bytes = 4096;
  EXPECT_EQ(choose_page_size({raw_tier()}, 128, s).status().code(), StatusCode::kInvalidArgument);
  s = {};
  s.max_waste = 1.0;
  EXPECT_EQ(choose_page_size({k8v4}, 128, s).status().code(), StatusCode::kInvalidArgument);
  s = {};
  s.min_tokens = 0;
  EXPECT_EQ(choose_page_size({k8v4}, 128, s).status().code(), StatusCode::kInvalidArgument);
  s.min_tokens = 2147483647;
  EXPECT_EQ(choose_page_size({k8v4}, 128, s).status().code(), StatusCode::kInvalidArgument);
}

TEST(PageViewTest, ValidatesItsFields) {
  alignas(128) static uint8_t pool[256];
  const PageView good{pool, 128, 2};
  EXPECT_TRUE(good.validate());
  const auto refused = [](PageView v) {
    return v.validate().code() == StatusCode::kInvalidArgument;
  };
  PageView v = good;
  v.base = nullptr;
  EXPECT_TRUE(refused(v));
  v = good;
  v.base = pool + 64;
  EXPECT_TRUE(refused(v));
  for (int64_t bytes : {int64_t{0}, int64_t{-128}, int64_t{100}, int64_t{1} << 40}) {
    v = good;
    v.page_bytes = bytes;
    EXPECT_TRUE(refused(v)) << bytes;
  }
  for (int32_t n : {0, -1}) {
    v = good;
    v.num_pages = n;
    EXPECT_TRUE(refused(v));
  }
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// A mirror of one sequence whose pages have ids of a place elsewhere.
#include <algorithm>
#include <cstdlib>

#include "store/rows/row_format.h"
#include "tests/engine/support/feed.h"
#include "tests/engine/support/owned_parts.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

using store::HostPlace;
using store::LayerMoves;

class MirrorTest : public RandomTest {
 protected:
  // The rows of a slot become those of slot 0.
  static void copy_tables(const PageAllocator& from, int32_t slot, const PageAllocator& to) {
    const PageTableShape& table = from.shape.table;
    const int64_t rows = table.rows_per_sequence, line = table.row_stride();
    std::copy_n(from.tokens + slot * rows, rows, to.tokens);
    std::copy_n(from.pages + slot * rows, rows, to.pages);
    std::copy_n(from.slots + slot * rows * line, rows * line, to.slots);
  }
  // The pages of the first sequence.
  static std::vector<int32_t> pages_of(const store::PagesView& view) {
    const PageAllocator& a = view.allocator;
    std::vector<int32_t> pages;
    for (int32_t row = 0; row < a.shape.table.rows_per_sequence; ++row) {
      for (int32_t side = 0; side < a.shape.table.num_sides; ++side) {
        for (int32_t i = 0; i < a.pages[row].of[side]; ++i)
          pages.push_back(view.page(row, side, i));
      }
    }
    return pages;
  }
  static HostPlace::Memory memory_of(int64_t bytes) {
    return {std::aligned_alloc(kPageAlignment, bytes), std::free};
  }
};

TEST_F(MirrorTest, HoldsASequenceOnThePagesThatItIsGiven) {
  for (const bool tiers : {false, true}) {
    StoreConfig config = make_config({});
    if (tiers) config.format = TiersFormat{};
    const Feed feed(config.layout, 500, &rng_);
    OneSequence source(config);
    ASSERT_TRUE(feed.give(source.store.engine.get(), source.id, 0, 500));
    LayerMoves layers;
    for (int32_t l = 0; l < config.layout.num_layers; ++l) {
      const store::LayerTokens at =
          store::after_append(source.store.place->laws(), {}, feed.tokens);
      layers.push_back({source.id.slot, l, at, at});
    }
    const OwnedParts parts(*source.store.place->export_parts(layers));

    Result<std::unique_ptr<store::RowFormat>> format = store::make_row_format(config);
    const Result<store::StoreLayout> layout = store::store_layout(config, **format);
    const HostPlace::Memory slot = memory_of(store::round_up(layout->slot_bytes, kPageAlignment));
    const auto mirror = HostPlace::make_mirror(config, *layout, std::move(*format), slot);
    ASSERT_TRUE(mirror) << mirror.status().message();
    // Pages of the source's ids.
    const store::PagesView &view = (*mirror)->pages(), &elsewhere = source.store.place->pages();
    HostPlace::ImportSteps steps;
    steps.take = [&](const auto&, const auto& plans) {
      EXPECT_EQ(plans.size(), size_t{1} * config.layout.num_layers);
      copy_tables(elsewhere.allocator, source.id.slot, view.allocator);
      std::vector<int32_t> pages = pages_of(view);
      std::shuffle(pages.begin(), pages.end(), rng_);
      const auto bytes = static_cast<int64_t>(pages.size()) * view.page_bytes;
      (*mirror)->place_pages(pages, memory_of(bytes));
      return Status::ok();
    };
    std::vector<int32_t> written;
    steps.written = [&](int32_t layer) {
      written.push_back(layer);
      return Status::ok();
    };
    const Status imported = (*mirror)->import_parts(0, parts.views(), steps);
    ASSERT_TRUE(imported) << imported.message();
    EXPECT_EQ(written, (std::vector<int32_t>{0, 1}));
    EXPECT_EQ(*(*mirror)->pages_of(0), *source.store.place->pages_of(source.id.slot));
    for (store::LayerMove& move : layers) move.slot = 0;
    const OwnedParts again(*(*mirror)->export_parts(layers));
    EXPECT_EQ(again.raw, parts.raw);
    EXPECT_EQ(again.bodies, parts.bodies);
    EXPECT_EQ(again.shared, parts.shared);
  }
}

}  // namespace
}  // namespace tierkv

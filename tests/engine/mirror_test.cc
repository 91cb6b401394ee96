// A mirror of one sequence whose pages have ids of a place elsewhere.
#include <algorithm>
#include <numeric>

#include "store/rows/row_format.h"
#include "tests/engine/support/feed.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

using store::HostPlace;
using store::LayerMoves;
using store::SequenceParts;

class MirrorTest : public RandomTest {};

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
    const Result<SequenceParts> parts = source.store.place->export_parts(layers);
    ASSERT_TRUE(parts);

    Result<std::unique_ptr<store::RowFormat>> format = store::make_row_format(config);
    const Result<store::StoreLayout> layout = store::store_layout(config, **format);
    std::vector<int32_t> ids(layout->allocator.num_pages);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng_);
    const auto mirror = HostPlace::make_mirror(config, *layout, std::move(*format), ids);
    ASSERT_TRUE(mirror) << mirror.status().message();
    ASSERT_TRUE((*mirror)->import_parts(0, *parts));
    const Result<int64_t> pages = (*mirror)->pages_of(0);
    EXPECT_EQ(*pages, *source.store.place->pages_of(source.id.slot));
    // Dealt in the order of rows, sides and places.
    const store::HostPagesView& view = (*mirror)->pages();
    size_t next = 0;
    for (int32_t row = 0; row < view.allocator.shape.table.rows_per_sequence; ++row) {
      for (int32_t side = 0; side < view.allocator.shape.table.num_sides; ++side) {
        for (int32_t i = 0; i < view.allocator.pages[row].of[side]; ++i) {
          EXPECT_EQ(view.page(row, side, i), ids[next++]);
        }
      }
    }
    for (store::LayerMove& move : layers) move.slot = 0;
    const Result<SequenceParts> again = (*mirror)->export_parts(layers);
    ASSERT_TRUE(again);
    EXPECT_EQ(again->raw, parts->raw);
    EXPECT_EQ(again->bodies, parts->bodies);
    EXPECT_EQ(again->shared, parts->shared);
  }
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// A mirror of one sequence whose pages have ids of a place elsewhere.
#include <algorithm>

#include "store/rows/row_format.h"
#include "tests/engine/support/feed.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

using store::HostPlace;
using store::LayerMoves;
using store::SequenceParts;

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
    const Result<SequenceParts> parts = source.store.place->export_parts(layers);
    ASSERT_TRUE(parts);

    Result<std::unique_ptr<store::RowFormat>> format = store::make_row_format(config);
    const Result<store::StoreLayout> layout = store::store_layout(config, **format);
    const auto mirror = HostPlace::make_mirror(config, *layout, std::move(*format));
    ASSERT_TRUE(mirror) << mirror.status().message();
    // Pages of the source's ids.
    const store::HostPagesView &view = (*mirror)->pages(), &elsewhere = source.store.place->pages();
    const Status imported = (*mirror)->import_parts(0, *parts, [&](const auto&, const auto& plans) {
      EXPECT_EQ(plans.size(), size_t{1} * config.layout.num_layers);
      copy_tables(elsewhere.allocator, source.id.slot, view.allocator);
      return Status::ok();
    });
    ASSERT_TRUE(imported) << imported.message();
    EXPECT_EQ(*(*mirror)->pages_of(0), *source.store.place->pages_of(source.id.slot));
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

// SPDX-License-Identifier: Apache-2.0
// Tiers rows in device memory, their kernels run on the host, beside those in host memory.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/engine/support/emulated_rows.h"
#include "tests/engine/support/rows_twin.h"
#include "tests/engine/support/tiers_pages.h"
#include "tests/support/fresh_random.h"

namespace tierkv::store {
namespace {

class EmulatedTiersRows : public RandomTest {
 protected:
  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }
};

// More groups of positions than a chunk's plan has warps.
TEST_F(EmulatedTiersRows, LongChunks) {
  StoreConfig config = tiers_config(64, 4000, false, &rng_);
  config.layout.num_layers = 1;
  config.layout.num_kv_heads = 2, config.layout.num_q_heads = 2;
  config.max_tokens = 10000, config.max_sequences = 1;
  auto& tiers = std::get<TiersFormat>(config.format);
  tiers.class_of_head = {static_cast<uint8_t>(pick(0, 1)), 2};
  config.profile = nullptr;
  test::HostTwinMemory memory;
  test::RowsTwin twin(
      config, &memory,
      [&](const StoreConfig&, RowFormat* host) -> Result<std::unique_ptr<DeviceRowFormat>> {
        return test::emulated_tiers_rows(*static_cast<const TiersRows*>(host), &rng_);
      },
      test::tiers_page_bytes, &rng_);
  twin.add();
  twin.extend({0}, pick(600, 700), true);
  if (HasFatalFailure()) return;
  // Importances of later chunks count in the mean.
  twin.extend({0}, pick(8300, 8800), true);
  if (HasFatalFailure()) return;
  twin.read(0);
}

TEST_F(EmulatedTiersRows, BytesAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    const StoreConfig config = tiers_config(head_dim, 2000, pick(0, 1) == 1, &rng_);
    SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim);
    test::HostTwinMemory memory;
    test::RowsTwin twin(
        config, &memory,
        [&](const StoreConfig&, RowFormat* host) -> Result<std::unique_ptr<DeviceRowFormat>> {
          return test::emulated_tiers_rows(*static_cast<const TiersRows*>(host), &rng_);
        },
        test::tiers_page_bytes, &rng_);
    twin.add();
    twin.add();
    for (int32_t i = 0; i < 12; ++i) {
      if (i == 5) twin.fork(0);
      std::vector<int32_t> places = {pick(0, twin.count() - 1)};
      if (i > 5 && pick(0, 2) == 0) twin.truncate(places[0], pick(1, twin.tokens(places[0])));
      if (HasFatalFailure()) return;
      if (pick(0, 2) == 0) places = {1, 0};
      int32_t room = config.max_tokens;
      for (const int32_t p : places) room = std::min(room, config.max_tokens - twin.tokens(p));
      const int32_t tokens = std::min(room, i < 3             ? pick(9, 150)
                                            : pick(0, 3) == 0 ? pick(9, 90)
                                                              : pick(1, 8));
      if (tokens == 0) continue;
      twin.extend(places, tokens, pick(0, 2) > 0);
      if (HasFatalFailure()) return;
      twin.read(places[0]);
      if (pick(0, 1) == 1) twin.count_queries(places[0]);
      if (HasFatalFailure()) return;
    }
    twin.truncate(0, 1);
    twin.spoil(0, config.window_tokens + pick(150, 300));
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tierkv::store

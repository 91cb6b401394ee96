// SPDX-License-Identifier: Apache-2.0
// Random calls on stores of random configs, each checked against a model that knows no pages. The
// number of calls is that of TIERKV_SOAK_CALLS where it is set.
#include <cstdlib>

#include "tests/engine/support/store_world.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

using StoreSoak = RandomTest;

TEST_F(StoreSoak, HoldsWhatItWasGiven) {
  const char* wanted = std::getenv("TIERKV_SOAK_CALLS");
  const int64_t calls = wanted == nullptr ? 10000 : std::atoll(wanted);
  int64_t made = 0, out_of_pages = 0, coded = 0;
  // One set of stores in 80 has room for everything: more stores follow then.
  const auto has_seen_all = [&] { return out_of_pages > 0 && coded > 0; };
  while ((made < calls || (made < 10 * calls && !has_seen_all())) && !HasFailure()) {
    const uint32_t seed = rng_();
    SCOPED_TRACE("store " + std::to_string(seed));
    std::mt19937 rng(seed);
    StoreWorld world(random_config(&rng), seed + 1);
    for (int32_t i = 0; i < 150 && !HasFailure(); ++i) {
      world.step();
      if (i % 10 == 9) world.check_all();
    }
    made += world.calls();
    out_of_pages += world.out_of_pages();
    coded += world.coded_tokens();
  }
  RecordProperty("out_of_pages", std::to_string(out_of_pages));
  RecordProperty("coded_tokens", std::to_string(coded));
  if (!HasFailure()) {
    EXPECT_GT(out_of_pages, 0);
    EXPECT_GT(coded, 0);
  }
}

}  // namespace
}  // namespace tierkv

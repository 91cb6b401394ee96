// SPDX-License-Identifier: Apache-2.0
// Channel rows in device memory, their kernels run on the host, beside those in host memory: bytes,
// and attention over bodies.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/engine/support/channel_pages.h"
#include "tests/engine/support/emulated_rows.h"
#include "tests/support/fresh_random.h"
#include "tierkv/attention.h"

namespace tierkv::store {
namespace {

class EmulatedChannelRows : public RandomTest {
 protected:
  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }
};

TEST_F(EmulatedChannelRows, BytesAndAnswersAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    const StoreConfig config = test::channel_config(head_dim, pick(0, 1) == 1, &rng_);
    SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim);
    test::HostTwinMemory memory;
    test::RowsTwin twin(
        config, &memory,
        [&](const StoreConfig& of, RowFormat* host) -> Result<std::unique_ptr<DeviceRowFormat>> {
          return test::emulated_channel_rows(of, *static_cast<const ChannelRows*>(host), &rng_);
        },
        test::channel_page_bytes, &rng_);
    twin.add();
    twin.add();
    for (int32_t i = 0; i < 10; ++i) {
      if (i == 5) twin.fork(0);
      std::vector<int32_t> places = {pick(0, twin.count() - 1)};
      if (i > 5 && pick(0, 1) == 0) twin.truncate(places[0], pick(1, twin.tokens(places[0])));
      if (HasFatalFailure()) return;
      if (pick(0, 2) == 0) places = {1, 0};
      int32_t room = config.max_tokens;
      for (const int32_t p : places) room = std::min(room, config.max_tokens - twin.tokens(p));
      const int32_t tokens = std::min(room, pick(0, 3) > 0 ? pick(9, 180) : pick(1, 8));
      if (tokens > 0) twin.extend(places, tokens, pick(0, 1) == 1);
      if (HasFatalFailure()) return;
      if (pick(0, 1) == 1) twin.count_queries(places[0]);
      if (HasFatalFailure()) return;
      twin.read(places[0]);
      if (i % 4 == 3) twin.attend(places, pick(0, 1) == 0 ? 1 : pick(1, kMaxQueryTokens));
      if (HasFatalFailure()) return;
    }
    twin.truncate(0, 1);
    twin.spoil(0, config.window_tokens + pick(150, 300));
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tierkv::store

// SPDX-License-Identifier: Apache-2.0
// Rows of tiers and channel rows in device memory, their kernels run on the host, beside those in
// host memory: bytes, and attention over bodies.
#include <gtest/gtest.h>

#include "tests/engine/support/channel_pages.h"
#include "tests/engine/support/tiers_pages.h"
#include "tests/support/emulator/runtime/cuda_runtime.h"
#include "tests/support/fresh_random.h"

namespace tierkv::store::test {
namespace {

class EmulatedRows : public RandomTest {
 protected:
  ~EmulatedRows() override { emulator::multiprocessors = 1; }

  HostTwinMemory memory_;
};

// More groups of positions than a chunk's plan has warps.
TEST_F(EmulatedRows, LongChunksOfTiers) {
  StoreConfig config = tiers_config(64, 4000, false, &rng_);
  config.layout.num_layers = 1;
  config.layout.num_kv_heads = 2, config.layout.num_q_heads = 2;
  config.max_tokens = 10000, config.max_sequences = 1;
  auto& tiers = std::get<TiersFormat>(config.format);
  tiers.class_of_head = {static_cast<uint8_t>(pick(0, 1)), 2};
  config.profile = nullptr;
  RowsTwin twin(config, &memory_, make_device_tiers_rows, tiers_page_bytes, &rng_);
  twin.add();
  twin.extend({0}, pick(600, 700), true);
  if (HasFatalFailure()) return;
  // Importances of later chunks count in the mean.
  twin.extend({0}, pick(8300, 8800), true);
  if (HasFatalFailure()) return;
  twin.read(0);
}

TEST_F(EmulatedRows, TiersAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    const StoreConfig config = tiers_config(head_dim, 2000, pick(0, 1) == 1, &rng_);
    SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim);
    RowsTwin twin(config, &memory_, make_device_tiers_rows, tiers_page_bytes, &rng_);
    twin.soak(12, 120, 4);
    if (HasFatalFailure()) return;
    // Few tokens that leave are written one by one.
    RowsTwin few(config, &memory_, make_device_tiers_rows, tiers_page_bytes, &rng_);
    few.add();
    few.spoil(0, config.window_tokens + config.sink_tokens + pick(1, kMaxStepTokens));
    if (HasFatalFailure()) return;
  }
}

TEST_F(EmulatedRows, ChannelBlocksAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    const StoreConfig config = channel_config(head_dim, pick(0, 1) == 1, &rng_);
    emulator::multiprocessors = pick(1, 7);
    SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim);
    RowsTwin twin(config, &memory_, make_device_channel_rows, channel_page_bytes, &rng_);
    twin.soak(12, 180, 4);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tierkv::store::test

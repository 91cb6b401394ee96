// SPDX-License-Identifier: Apache-2.0
// Rows of tiers and channel rows in device memory, their kernels run on the host, beside those in
// host memory: bytes, and attention over bodies.
#include <gtest/gtest.h>

#include "codec/format/rotation.h"
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

// Zeros that stand for them, less these means, would not fit into any code.
TEST_F(EmulatedRows, TokensThatArePrunedReportNothing) {
  for (const int32_t head_dim : {64, 128}) {
    StoreConfig config = tiers_config(head_dim, 2000, false, &rng_);
    auto& tiers = std::get<TiersFormat>(config.format);
    tiers.classes = {{token_wise_tier(4, 4), token_wise_tier(4, 4), 1e30, 1e30}};
    tiers.class_of_head.clear();
    auto profile = std::make_shared<Profile>(*random_profile(config.layout, {}, &rng_));
    const std::vector<float> signs = hadamard_signs(head_dim);
    for (RowProfile& row : profile->rows) {
      for (int32_t d = 0; d < head_dim; ++d) row.key_mean[d] = 60000 * signs[d];
    }
    config.profile = profile;
    RowsTwin twin(config, &memory_, make_device_tiers_rows, tiers_page_bytes, &rng_);
    twin.add(), twin.add();
    const int32_t raw = config.window_tokens + config.sink_tokens;
    for (const int32_t tokens : {raw + 1, 1, kMaxStepTokens, 100}) {
      twin.extend({0, 1}, tokens, pick(0, 1) == 1);
      if (HasFatalFailure()) return;
    }
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

// A store of channel blocks with a model of every row beside it: what each token should read as,
// from the values that came in, by plain arithmetic.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "store/channel/channel_host.h"
#include "tests/support/random_input.h"

namespace tierkv::testing {

// Two layers of two kv heads, a window of 16, blocks of 64.
KvStoreConfig small_channel_config();

// The laws of store/CHANNEL.md; "" or the one that is broken.
std::string broken_channel_law(const ChannelView& s);

struct ChannelModel {
  SequenceId id;
  bool live = false;
  int32_t tokens = 0;
  int32_t in_blocks = 0;                    // tokens
  std::vector<std::vector<float>> rows[2];  // keys, values: [tokens, head_dim] as they read
};

class ChannelStoreWorld {
 public:
  using List = std::vector<ChannelModel*>;

  ChannelStoreWorld(const KvStoreConfig& config, RandomInput* input);

  ChannelHostStore& store() { return *store_; }
  const ChannelView& view() const { return store_->view(); }
  const KvStoreConfig& config() const { return config_; }

  Status add(ChannelModel* m);
  Status prompt(const List& list, int32_t tokens);
  Status end_prompt(const List& list);
  Status step(const List& list, int32_t tokens);
  Status fork(const ChannelModel& source, ChannelModel* copy);
  Status truncate(ChannelModel* m, int32_t tokens);
  // Exports and imports, and exports again: the same bytes.
  Status transfer(const ChannelModel& source, ChannelModel* copy);

  // "" or what differs from the model.
  std::string difference(const ChannelModel& m) const;
  // The same of the output and the lse of random queries, the newest q_len tokens', at `layer`.
  std::string attention_difference(const ChannelModel& m, int32_t layer, int32_t q_len = 1);

 private:
  int32_t rows() const { return config_.layout.num_layers * config_.layout.num_kv_heads; }
  void expect_refused(AppendCall call, std::vector<uint8_t> v);
  Status append_layers(const List& list, int32_t tokens);
  // Tokens that left the window are quantised, block after block.
  void fill_blocks(ChannelModel* m) const;

  KvStoreConfig config_;
  std::unique_ptr<ChannelHostStore> store_;
  RandomInput* input_;
};

}  // namespace tierkv::testing

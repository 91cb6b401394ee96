// A cache held as blocks of channel-wise keys: what a store must know beside its capacities.
//
//   KvStoreConfig config = ...;               // layout, policy.window_tokens, capacities
//   config.channel.enabled = true;
//   config.channel.k_bits = config.channel.v_bits = 4;
//   KvStore::create(config)
//
// Keys have channels that are large in every token: a scale per channel then costs less error than
// one per token, but it needs the tokens together. Every token but the newest ones lies in a block
// of block_tokens tokens whose keys share a scale and zero point per channel and whose values have
// theirs per token; the newest policy.window_tokens and up to block_tokens - 1 more stay fp16.
// There are no tiers and no scores, and nothing is pruned. store/CHANNEL.md holds the states and
// laws.
//
// Sources: KIVI (channel-wise keys, raw residual), BitDecoding section 4 (KC and its residual
// block).
#pragma once

#include <cstdint>
#include <string>

#include "tierkv/export.h"

namespace tierkv {

struct TKV_API ChannelConfig {
  bool enabled = false;
  int32_t k_bits = 4;         // 4 or 2
  int32_t v_bits = 4;         // 4 or 2
  int32_t block_tokens = 64;  // 64, or 128 but for head_dim 256

  friend bool operator==(const ChannelConfig& a, const ChannelConfig& b) {
    return a.enabled == b.enabled && a.k_bits == b.k_bits && a.v_bits == b.v_bits &&
           a.block_tokens == b.block_tokens;
  }
  friend bool operator!=(const ChannelConfig& a, const ChannelConfig& b) { return !(a == b); }
};
// One line of JSON, all fields.
TKV_API std::string to_json(const ChannelConfig& config);

}  // namespace tierkv

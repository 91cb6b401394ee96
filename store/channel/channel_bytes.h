// Exported sequences of a store of channel blocks (store/CHANNEL.md, "Exported sequences").
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codec/format/channel_block.h"
#include "store/shared/sequence_info.h"
#include "tierkv/status.h"
#include "tierkv/store.h"

namespace tierkv {

struct ChannelRowContent {
  std::vector<uint8_t> blocks;   // as they lie in their pages
  std::vector<uint16_t> raw[2];  // keys, values: [raw tokens, head_dim]
};
struct ChannelSequence {
  SequenceInfo info;
  std::vector<ChannelRowContent> rows;
};

std::vector<uint8_t> channel_sequence_bytes(const KvStoreConfig& config,
                                            const ChannelSequence& sequence);
// Checks everything, every block and value included: what this returns can be stored and lived
// with. kVersion, kInvalidArgument for bytes of another config, kOutOfRange beyond max_tokens,
// kCorrupt.
Result<ChannelSequence> read_channel_sequence(const KvStoreConfig& config,
                                              const ChannelLayout& layout, const uint8_t* bytes,
                                              size_t size);

}  // namespace tierkv

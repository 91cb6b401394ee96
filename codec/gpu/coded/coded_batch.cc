// SPDX-License-Identifier: Apache-2.0
#include "codec/gpu/coded/coded_batch.h"

namespace tierkv {

DeviceCodebook device_codebook(const Codebook& c) {
  DeviceCodebook d;
  d.max_length = c.max_length;
  d.levels = c.levels;
  d.base = c.base;
  d.streams_per_lane = c.streams_per_lane;
  d.mode = c.mode;
  d.component = c.component;
  d.table_id = c.table_id;
  return d;
}

std::vector<uint32_t> encoder_words(const Codebook& c) {
  std::vector<uint32_t> words;
  for (size_t s = 0; s < c.lengths.size(); ++s) {
    words.push_back(c.lengths[s] == 0 ? 0 : c.words[s] | uint32_t{c.lengths[s]} << 16);
  }
  return words;
}

}  // namespace tierkv

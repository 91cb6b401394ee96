// SPDX-License-Identifier: Apache-2.0
// A container that is written where it stays, by several threads: sizes first, then bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "codec/file/container_format.h"
#include "tierkv/container.h"

namespace tierkv {

class ChunkPlan {
 public:
  // The number of the chunk.
  int64_t add(const ChunkKey& key, int64_t bytes) {
    ChunkEntry c;
    c.key = key;
    c.offset = end_;
    c.bytes = static_cast<uint64_t>(bytes);
    end_ += align_chunk(c.bytes);
    chunks_.push_back(c);
    return static_cast<int64_t>(chunks_.size()) - 1;
  }
  size_t bytes() const { return end_ + chunks_.size() * kIndexEntryBytes; }
  uint8_t* payload(uint8_t* container, int64_t chunk) const {
    return container + chunks_[chunk].offset;
  }
  void write(uint8_t* container, int64_t chunk, const std::vector<uint8_t>& payload) {
    std::copy(payload.begin(), payload.end(), this->payload(container, chunk));
    const uint64_t padded = align_chunk(payload.size());
    uint8_t* at = this->payload(container, chunk);
    std::fill(at + payload.size(), at + padded, uint8_t{0});
    set_checksum(chunk, xxh3(at, padded));
  }
  // Of the payload and the zeros behind it, up to a multiple of kChunkAlignment.
  void set_checksum(int64_t chunk, uint64_t checksum) { chunks_[chunk].checksum = checksum; }
  void finish(uint8_t* container) const {
    const std::vector<uint8_t> index = store_index(chunks_);
    std::copy(index.begin(), index.end(), container + end_);
    store_container_header(header_before(static_cast<int64_t>(end_), index), container);
  }

 private:
  std::vector<ChunkEntry> chunks_;
  uint64_t end_ = kContainerHeaderBytes;
};

}  // namespace tierkv

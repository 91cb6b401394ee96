// SPDX-License-Identifier: Apache-2.0
// The bytes of a sequence with other payloads in its chunks, whose checksums are right.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tierkv/container.h"

namespace tierkv {

inline std::vector<ChunkEntry> chunks_of(const std::vector<uint8_t>& bytes) {
  return ContainerReader::from_bytes(bytes, "sequence")->chunks();
}

// change(place of the chunk, &payload), of each chunk.
template <class Change>
std::vector<uint8_t> changed_bytes(const std::vector<uint8_t>& bytes, const Change& change) {
  const auto reader = ContainerReader::from_bytes(bytes, "sequence");
  std::vector<ChunkBlock> blocks(1);
  for (size_t c = 0; c < reader->chunks().size(); ++c) {
    std::vector<uint8_t> payload;
    EXPECT_TRUE(reader->read(static_cast<int64_t>(c), &payload));
    change(c, &payload);
    blocks[0].add(reader->chunks()[c].key, payload);
  }
  return assemble_container(blocks);
}

}  // namespace tierkv

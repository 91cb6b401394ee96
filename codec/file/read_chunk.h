// SPDX-License-Identifier: Apache-2.0
// Chunks of a container by key, parsed, with failures that name file and chunk.
#pragma once

#include <vector>

#include "tierkv/container.h"

namespace tierkv {

inline ChunkKey key_of(ChunkKind kind, int32_t seq, int32_t layer, int32_t head) {
  return {kind, seq, layer, head, 0, 0};
}

// Reads a chunk and gives it to parse(bytes, argument); failures name file and chunk.
template <class Parse>
auto read_chunk(const ContainerReader& reader, const ChunkKey& key, const Parse& parse)
    -> decltype(parse(std::vector<uint8_t>{})) {
  std::vector<uint8_t> bytes;
  if (Status s = reader.read(key, &bytes); !s) {
    // A chunk that another one needs is no question of the caller's.
    return s.code() == StatusCode::kNotFound ? Status(StatusCode::kCorrupt, s.message()) : s;
  }
  auto result = parse(bytes);
  if (!result) return result.status().with_context(reader.path() + ": " + to_string(key));
  return result;
}

}  // namespace tierkv

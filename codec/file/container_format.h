// SPDX-License-Identifier: Apache-2.0
// The bytes around the chunks of a container: the one place that knows them
// (docs/reference/format.md).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "codec/format/xxh3_keys.h"
#include "tierkv/container.h"

namespace tierkv {

inline constexpr int64_t kContainerHeaderBytes = 64;
inline constexpr int64_t kIndexEntryBytes = 48;
inline constexpr int64_t kChunkAlignment = 16;
inline constexpr int64_t kMagicBytes = 8;
// Bytes that no text file has and that a transfer in text mode changes.
inline constexpr uint8_t kContainerMagic[kMagicBytes] = {0x89, 'T', 'K', 'V', '\r', '\n', 0x1a, 0};

inline constexpr uint64_t align_chunk(uint64_t bytes) {
  return (bytes + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
}

struct ContainerHeader {
  uint16_t major = kContainerMajor, minor = kContainerMinor;
  uint64_t file_bytes = 0;
  uint64_t index_offset = 0;
  uint32_t chunk_count = 0;
  uint64_t index_checksum = 0;
};

uint64_t xxh3(const uint8_t* bytes, size_t size);
Xxh3Keys xxh3_keys();

void store_container_header(const ContainerHeader& header, uint8_t out[kContainerHeaderBytes]);
// The header of a container whose index, as store_index() writes it, lies at `offset`.
ContainerHeader header_before(int64_t offset, const std::vector<uint8_t>& index);
// `size` bytes are there. Every field is checked against `file_size`, the size the file really has.
Status load_container_header(const uint8_t* bytes, size_t size, uint64_t file_size,
                             bool verify_checksums, ContainerHeader* out);

std::vector<uint8_t> store_index(const std::vector<ChunkEntry>& chunks);
// A key, and which chunk has it.
using ChunkPlace = std::pair<ChunkKey, int64_t>;
// `bytes` are the whole index. Chunks must follow one another from the header to the index, no two
// of a known kind may have one key. `sorted`: by their keys.
Status load_index(const std::vector<uint8_t>& bytes, const ContainerHeader& header,
                  std::vector<ChunkEntry>* out, std::vector<ChunkPlace>* sorted);

}  // namespace tierkv

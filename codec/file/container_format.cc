// SPDX-License-Identifier: Apache-2.0
#include "codec/file/container_format.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "codec/format/byte_cursor.h"
#include "codec/format/errors.h"

namespace tierkv {
namespace {

constexpr int64_t kHashedHeaderBytes = 56;
constexpr uint16_t kOptionalFlag = 1;

Status unknown_version(uint16_t major) {
  return Status(
      StatusCode::kVersion,
      "header: major version " + std::to_string(major) +
          " is not known; this build reads version " + std::to_string(kContainerMajor) +
          (major < kContainerMajor
               ? ": write the file again from its source, or decode it with the tierkv that made it"
               : ": read it with a newer tierkv"));
}

bool is_known(ChunkKind kind) {
  return kind >= ChunkKind::kModel && kind <= ChunkKind::kWeightedRow;
}

}  // namespace

uint64_t xxh3(const uint8_t* bytes, size_t size) {
  return XXH3_64bits(bytes, size);
}

Xxh3Keys xxh3_keys() {
  uint8_t secret[XXH3_SECRET_DEFAULT_SIZE];
  XXH3_generateSecret_fromSeed(secret, 0);
  Xxh3Keys keys;
  std::memcpy(keys.stripes, secret, sizeof(keys.stripes));
  std::memcpy(keys.last, secret + sizeof(secret) - sizeof(keys.last) - 7, sizeof(keys.last));
  std::memcpy(keys.merge, secret + 11, sizeof(keys.merge));
  return keys;
}

void store_container_header(const ContainerHeader& header, uint8_t out[kContainerHeaderBytes]) {
  std::vector<uint8_t> bytes(kContainerMagic, kContainerMagic + kMagicBytes);
  ByteWriter w(&bytes);
  w.u16(header.major);
  w.u16(header.minor);
  w.u32(header.chunk_count);
  w.u64(header.file_bytes);
  w.u64(header.index_offset);
  w.u64(header.index_checksum);
  w.u64(0);
  w.u64(0);
  w.u64(xxh3(bytes.data(), bytes.size()));
  std::copy(bytes.begin(), bytes.end(), out);
}

Status load_container_header(const uint8_t* bytes, size_t size, uint64_t file_size,
                             bool verify_checksums, ContainerHeader* out) {
  if (size < kMagicBytes || std::memcmp(bytes, kContainerMagic, kMagicBytes) != 0) {
    return invalid("not a .tkv container (the magic number differs)");
  }
  if (size < kContainerHeaderBytes) {
    return corrupt("header: cut short, " + std::to_string(size) + " of 64 bytes");
  }
  ByteReader r(bytes + kMagicBytes, kContainerHeaderBytes - kMagicBytes);
  out->major = r.u16();
  out->minor = r.u16();
  out->chunk_count = r.u32();
  out->file_bytes = r.u64();
  out->index_offset = r.u64();
  out->index_checksum = r.u64();
  const uint64_t reserved = r.u64() | r.u64();
  const uint64_t checksum = r.u64();
  // The version comes first: only a known one says where the checksum is.
  if (out->major != kContainerMajor) return unknown_version(out->major);
  if (verify_checksums && checksum != xxh3(bytes, kHashedHeaderBytes)) {
    return corrupt("header: checksum does not match");
  }
  if (reserved != 0 && out->minor <= kContainerMinor) {
    return corrupt("header: reserved bytes are not zero");
  }
  if (out->file_bytes != file_size) {
    return corrupt("file has " + std::to_string(file_size) + " bytes, its header says " +
                   std::to_string(out->file_bytes));
  }
  const uint64_t index_bytes = static_cast<uint64_t>(kIndexEntryBytes) * out->chunk_count;
  if (out->index_offset < kContainerHeaderBytes || out->index_offset > file_size ||
      file_size - out->index_offset != index_bytes) {
    return corrupt("header: index of " + std::to_string(out->chunk_count) + " chunks at byte " +
                   std::to_string(out->index_offset) + " does not end the file");
  }
  return Status::ok();
}

ContainerHeader header_before(int64_t offset, const std::vector<uint8_t>& index) {
  ContainerHeader header;
  header.index_offset = static_cast<uint64_t>(offset);
  header.file_bytes = header.index_offset + index.size();
  header.chunk_count = static_cast<uint32_t>(index.size() / kIndexEntryBytes);
  header.index_checksum = xxh3(index.data(), index.size());
  return header;
}

std::vector<uint8_t> store_index(const std::vector<ChunkEntry>& chunks) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  for (const ChunkEntry& c : chunks) {
    w.u16(static_cast<uint16_t>(c.key.kind));
    w.u16(c.optional ? kOptionalFlag : 0);
    w.i32(c.key.sequence);
    w.i32(c.key.layer);
    w.i32(c.key.head);
    w.u8(c.key.component);
    w.u8(c.key.part);
    w.u16(0);
    w.i32(c.key.page);
    w.u64(c.offset);
    w.u64(c.bytes);
    w.u64(c.checksum);
  }
  return bytes;
}

Status load_index(const std::vector<uint8_t>& bytes, const ContainerHeader& header,
                  std::vector<ChunkEntry>* out, std::vector<ChunkPlace>* sorted) {
  ByteReader r(bytes);
  uint64_t next = kContainerHeaderBytes;
  for (uint32_t i = 0; i < header.chunk_count; ++i) {
    const auto where = [&] { return "index entry " + std::to_string(i) + ": "; };
    ChunkEntry c;
    c.key.kind = static_cast<ChunkKind>(r.u16());
    const uint16_t flags = r.u16();
    c.optional = (flags & kOptionalFlag) != 0;
    c.key.sequence = r.i32();
    c.key.layer = r.i32();
    c.key.head = r.i32();
    c.key.component = r.u8();
    c.key.part = r.u8();
    const bool reserved_clear = r.u16() == 0 && (flags & ~kOptionalFlag) == 0;
    c.key.page = r.i32();
    c.offset = r.u64();
    c.bytes = r.u64();
    c.checksum = r.u64();
    if (!reserved_clear && header.minor <= kContainerMinor) {
      return corrupt(where() + "reserved bits are not zero");
    }
    if (c.offset != next || c.bytes > header.index_offset - next ||
        align_chunk(c.bytes) > header.index_offset - next) {
      return corrupt(where() + to_string(c.key) + " does not follow the chunk before it");
    }
    next += align_chunk(c.bytes);
    if (!is_known(c.key.kind) && !c.optional) {
      return unsupported(where() + to_string(c.key) +
                         " is needed to read the file and not known to "
                         "this build");
    }
    sorted->emplace_back(c.key, static_cast<int64_t>(out->size()));
    out->push_back(c);
  }
  if (next != header.index_offset) return corrupt("bytes between the last chunk and the index");
  std::sort(sorted->begin(), sorted->end());
  const auto twice = std::adjacent_find(sorted->begin(), sorted->end(), [](auto& a, auto& b) {
    return a.first == b.first && is_known(a.first.kind);
  });
  if (twice != sorted->end()) {
    return corrupt("index: two chunks are the " + to_string(twice->first));
  }
  return Status::ok();
}

}  // namespace tierkv

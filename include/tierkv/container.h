// SPDX-License-Identifier: Apache-2.0
// The `.tkv` container, version 2: a compressed cache in a file, chunk by chunk.
//
// A container is a header, chunks, and an index that says what every chunk is and where it lies.
// The header carries the checksum of the index, the index that of every chunk (XXH3, 64 bits). So
// no bit can change unnoticed, and any chunk can be read alone. Integers are little-endian.
// docs/reference/format.md says what the chunks hold; this layer only knows their kinds.
//
//   ContainerWriter  writes to a temporary name and renames in finish(): a container exists whole
//                    or not at all
//   ContainerReader  checks header and index when it opens, a chunk when it reads it
//
// Messages name the file, the chunk and what is wrong with it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tierkv/export.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"
#include "tierkv/rope.h"
#include "tierkv/status.h"

namespace tierkv {

// What version 2 promises stands in docs/reference/format.md, section 7.
inline constexpr uint16_t kContainerMajor = 2;
inline constexpr uint16_t kContainerMinor = 0;
inline constexpr int32_t kNotApplicable = -1;  // of a field of ChunkKey

// The values are those of the file format. An unknown kind is skipped where its chunk is marked
// optional and refused otherwise.
enum class ChunkKind : uint16_t {
  kModel = 1,           // layout of the cache, names
  kSequence = 2,        // id, kind and tokens of a sequence
  kBasis = 3,           // coordinates and global step of a (layer, kv_head, component)
  kCodebook = 4,        // of a (layer, component, part), one by one where it is a family
  kRow = 5,             // which token is stored where in a (layer, kv_head)
  kSegment = 6,         // codes of a (layer, kv_head, component, part)
  kQueryPositions = 7,  // of a layer; optional, as the next two
  kQueries = 8,         // of a (layer, query head)
  kSignificance = 9,    // of a (layer, kv_head)
  kPage = 10,           // tokens of a (layer, kv_head, part), unified page by page
  kPageFormat = 11,     // of the pages of a (layer, part)
  kStore = 12,          // format and counts of an exported sequence (store/ENGINE.md)
  kStoreRow = 13,       // raw tokens of a (layer, kv_head) of it
  kStorePage = 14,      // body of a (layer, kv_head) of it
  kStoreFixed = 15,     // reserved: no writer makes it
  kWeightedRow = 16,    // means, weights and steps of a (layer, kv_head)
};

struct ChunkKey {
  ChunkKind kind = ChunkKind::kModel;
  // kBasis, kWeightedRow: kNotApplicable serves every sequence.
  int32_t sequence = kNotApplicable;
  int32_t layer = kNotApplicable;
  int32_t head = kNotApplicable;  // kv_head; query head for kQueries
  uint8_t component = 0;          // Component
  uint8_t part = 0;               // of a row, docs/reference/format.md
  int32_t page = 0;               // kPage: of the part, kCodebook: of the family, from 0

  friend bool operator==(const ChunkKey& a, const ChunkKey& b) {
    return a.kind == b.kind && a.sequence == b.sequence && a.layer == b.layer && a.head == b.head &&
           a.component == b.component && a.part == b.part && a.page == b.page;
  }
  TKV_API friend bool operator<(const ChunkKey& a, const ChunkKey& b);
};

// "segment of sequence 0, layer 3, head 1, values, part 1"
TKV_API std::string to_string(const ChunkKey& key);

struct ChunkEntry {
  ChunkKey key;
  bool optional = false;  // a reader that does not know the kind may skip it
  uint64_t offset = 0;    // from the start of the file, a multiple of 16
  uint64_t bytes = 0;     // without the zeros up to the next multiple of 16
  uint64_t checksum = 0;  // XXH3 of the bytes and those zeros
};

// Chunks as they will lie in a file: filled on any thread, then written in one piece.
class TKV_API ChunkBlock {
 public:
  ChunkBlock();
  ChunkBlock(ChunkBlock&&) noexcept;
  ChunkBlock& operator=(ChunkBlock&&) noexcept;
  ~ChunkBlock();
  void add(const ChunkKey& key, const std::vector<uint8_t>& payload, bool optional = false);
  void reserve(int64_t bytes);     // room for so many more
  void clear();                    // keeps its memory
  int64_t optional_bytes() const;  // of the payloads

 private:
  friend class ContainerWriter;
  friend std::vector<uint8_t> assemble_container(const std::vector<ChunkBlock>& blocks);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class TKV_API ContainerWriter {
 public:
  static Result<ContainerWriter> create(const std::string& path);
  ContainerWriter(ContainerWriter&&) noexcept;
  ContainerWriter& operator=(ContainerWriter&&) noexcept;
  ~ContainerWriter();  // removes the temporary file when finish() has not succeeded

  // Chunks lie in the file in the order in which they are added.
  Status add(const ChunkKey& key, const std::vector<uint8_t>& payload, bool optional = false);
  Status add(const ChunkBlock& block);
  // Without `overwrite`: kIo where a file is at the path when finish() is called.
  Status finish(bool overwrite = true);
  int64_t file_bytes() const;  // so far; after finish() the size of the file

 private:
  struct Impl;
  explicit ContainerWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The bytes of a container of these chunks, in order.
TKV_API std::vector<uint8_t> assemble_container(const std::vector<ChunkBlock>& blocks);

struct ContainerReadOptions {
  // Off only to look at what is damaged, or to try hostile bytes on what lies behind the checksums.
  bool verify_checksums = true;
};

class TKV_API ContainerReader {
 public:
  // kIo: the file cannot be read. kInvalidArgument: it is no container. kVersion, kUnsupported: a
  // major version or a chunk this build does not know. kCorrupt: anything else.
  static Result<ContainerReader> open(const std::string& path,
                                      const ContainerReadOptions& options = {});
  // The same for a container in memory; `name` stands for the path in messages.
  static Result<ContainerReader> from_bytes(std::vector<uint8_t> bytes, const std::string& name,
                                            const ContainerReadOptions& options = {});
  // Over bytes that outlive the reader.
  static Result<ContainerReader> over_bytes(const uint8_t* bytes, size_t size,
                                            const std::string& name,
                                            const ContainerReadOptions& options = {});
  ContainerReader(ContainerReader&&) noexcept;
  ContainerReader& operator=(ContainerReader&&) noexcept;
  ~ContainerReader();

  const std::string& path() const;
  int64_t file_bytes() const;
  const std::vector<ChunkEntry>& chunks() const;
  // Index into chunks(), -1 where there is none.
  int64_t find(const ChunkKey& key) const;
  // The payload of a chunk; kCorrupt where its checksum does not match: then what `payload` holds
  // is unspecified. Any number of threads may read at once.
  Status read(int64_t chunk, std::vector<uint8_t>* payload) const;
  // The same without a copy, of a container in memory: payload [chunks()[chunk].bytes].
  Status view(int64_t chunk, const uint8_t** payload) const;
  // read(find(key)); kNotFound where there is none.
  Status read(const ChunkKey& key, std::vector<uint8_t>* payload) const;

 private:
  struct Impl;
  explicit ContainerReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The chunk kModel.
struct ContainerModel {
  CacheLayout layout;
  int32_t num_sequences = 0;
  std::string preset, model_id, created_by;
  // How keys were rotated: [1] for all layers or [num_layers]; empty: unknown. Layers share pairing
  // and rotary_dims; frequencies of 0 are those of a layer that does not rotate.
  std::vector<Rope> rope;

  // Null where it is unknown.
  const Rope* rope_of(int32_t layer) const {
    return rope.empty() ? nullptr : &rope[rope.size() == 1 ? 0 : static_cast<size_t>(layer)];
  }
};
TKV_API std::vector<uint8_t> serialize_model(const ContainerModel& model);
TKV_API Result<ContainerModel> parse_model(const std::vector<uint8_t>& bytes);

// The chunk kSequence.
struct ContainerSequence {
  std::string id, kind;
  std::vector<int32_t> tokens;
};
TKV_API std::vector<uint8_t> serialize_sequence(const ContainerSequence& sequence);
TKV_API Result<ContainerSequence> parse_sequence(const std::vector<uint8_t>& bytes);

}  // namespace tierkv

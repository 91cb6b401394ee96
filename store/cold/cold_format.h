// The chunks of a sequence in its cold form: their keys, and the chunk that says which store the
// sequence is of. docs/reference/format.md, "Store", has the bytes.
//
// The bytes of an export are cut into chunks and put together again: import_sequence() then looks
// at every token, so that there is one place that decides what may enter a store.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "store/shared/sequence_info.h"
#include "tierkv/cold.h"
#include "tierkv/container.h"

namespace tierkv {

// Parts of a row, as in other containers.
inline constexpr uint8_t kHighPart = 1, kLowPart = 2, kWindowPart = 4;

ChunkKey cold_store_key();
ChunkKey cold_fixed_key();
ChunkKey cold_row_key(int32_t layer, int32_t kv_head);
ChunkKey cold_page_key(ChunkKey row, uint8_t part, int32_t page);
// `number` counts the codebooks of a given family.
ChunkKey cold_book_key(int32_t layer, uint8_t component, uint8_t part, int32_t number);

// The chunk kStore.
struct ColdSequence {
  SequenceInfo info;
  bool has_codebooks = false;  // of a coded store
  bool has_fixed = false;      // likewise: there is a chunk kStoreFixed
};
std::vector<uint8_t> serialize_cold_sequence(const KvStoreConfig& config,
                                             const ColdSequence& sequence);
// kInvalidArgument for a store of another config. The info is not looked at.
Result<ColdSequence> parse_cold_sequence(const KvStoreConfig& config,
                                         const std::vector<uint8_t>& bytes);
// The chunk kStoreFixed: in which format blocks are kept at a fixed rate.
std::vector<uint8_t> serialize_cold_fixed(const KvStoreConfig& config);
// kInvalidArgument for a store of another format, or none.
Status check_cold_fixed(const KvStoreConfig& config, const std::vector<uint8_t>& bytes);

// Chunks of a container, each of which belongs to the sequence.
class ColdChunks {
 public:
  explicit ColdChunks(const ContainerReader& reader) : reader_(reader) {}
  bool has(const ChunkKey& key) const { return reader_.find(key) >= 0; }
  // kCorrupt also where there is none. On any thread, each chunk once.
  Status read(const ChunkKey& key, std::vector<uint8_t>* payload);
  // A failure about the chunk, with its name.
  Status at(const ChunkKey& key, const Status& why) const;
  // kCorrupt where there are chunks that nobody read.
  Status check_all_read() const;

 private:
  const ContainerReader& reader_;
  std::atomic<int64_t> read_{0};
};

// With a basis a store holds coordinates in the config of their store.
KvStoreConfig cold_config(const KvStore& store);

// Chunks of the sequence, behind the first two; from and to what export_sequence() gives. `config`
// is cold_config().
Result<std::vector<ChunkBlock>> cold_tiered_chunks(const KvStoreConfig& config,
                                                   const std::vector<uint8_t>& exported,
                                                   const ColdOptions& options,
                                                   ColdSequence* sequence);
Result<std::vector<uint8_t>> exported_tiered_sequence(const KvStoreConfig& config,
                                                      const ColdSequence& sequence, int32_t threads,
                                                      ColdChunks* chunks);
Result<std::vector<ChunkBlock>> cold_coded_chunks(const KvStoreConfig& config,
                                                  const std::vector<uint8_t>& exported,
                                                  const ColdOptions& options,
                                                  ColdSequence* sequence);
Result<std::vector<uint8_t>> exported_coded_sequence(const KvStoreConfig& config,
                                                     const ColdSequence& sequence, int32_t threads,
                                                     ColdChunks* chunks);

}  // namespace tierkv

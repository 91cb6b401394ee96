// A dumped cache into a `.tkv` container and back.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "codec/large_vector.h"
#include "codec/profile.h"
#include "datasets/dump.h"
#include "tierkv/container.h"
#include "tools/analysis/container_chunks.h"
#include "tools/analysis/container_pages.h"
#include "tools/analysis/preset.h"
#include "tools/analysis/row_codec.h"

namespace tierkv::analysis {

struct CompressOptions {
  Preset preset;
  int32_t threads = 1;
  const Profile* profile = nullptr;      // means, steps and bases; null: each sequence's own
  std::function<void(double)> progress;  // fraction done, called by one thread at a time
  bool without_queries = false;          // nothing is carried over but keys and values
};

struct CompressSummary {
  int64_t values = 0;              // 2 * tokens * num_kv_heads * head_dim over layers
  int64_t file_bytes = 0;          // of the container
  int64_t query_bytes = 0;         // of it: query positions, queries and significance carried over
  int64_t tokens[kNumTiers] = {};  // (row, token) pairs by tier
  // Time of the stages, added up over the threads.
  double read_seconds = 0, encode_seconds = 0, write_seconds = 0;
};

// Writes `path` whole or not at all; the bytes depend on the dump, the preset and the profile
// alone. kUnsupported names a preset that the container cannot hold.
Result<CompressSummary> compress(datasets::DumpReader& reader, const CompressOptions& options,
                                 const std::string& path);

struct DecodedRow {
  LargeVector<float> k, v;      // [tokens, head_dim]; pruned tokens are zeros
  std::vector<uint8_t> pruned;  // [tokens]
  bool any_pruned = false;
};

// The rows of a container. Any number of threads may decode at once; messages name the file and the
// chunk.
class CacheDecoder {
 public:
  // Reads model and sequences.
  static Result<CacheDecoder> open(ContainerReader reader);

  const ContainerReader& container() const { return reader_; }
  const ContainerModel& model() const { return model_; }
  const std::vector<ContainerSequence>& sequences() const { return sequences_; }

  Status decode_row(int32_t seq, int32_t layer, int32_t kv_head, DecodedRow* out) const;
  // The same without k and v.
  Status read_pruned(int32_t seq, int32_t layer, int32_t kv_head, DecodedRow* out) const;
  // Empty where the container has none.
  Result<std::vector<int32_t>> query_positions(int32_t seq, int32_t layer) const;
  Result<std::vector<float>> queries(int32_t seq, int32_t layer, int32_t q_head,
                                     int64_t positions) const;
  Result<std::vector<float>> significance(int32_t seq, int32_t layer, int32_t kv_head) const;

 private:
  explicit CacheDecoder(ContainerReader reader) : reader_(std::move(reader)) {}
  Status load();
  Result<RowPlan> read_plan(int32_t seq, int32_t layer, int32_t kv_head) const;
  Result<StoredBasis> read_basis(ChunkKey key) const;
  Status decode_part(const ChunkKey& key, const std::vector<int64_t>& tokens, float* out) const;
  Status decode_segment(const ChunkKey& key, const RowPlan& plan, float* out) const;
  Status decode_pages(ChunkKey key, const StoredPageFormat& format, const RowPlan& plan,
                      DecodedRow* out) const;
  Result<std::vector<float>> values(const ChunkKey& key, int64_t count) const;

  ContainerReader reader_;
  ContainerModel model_;
  std::vector<ContainerSequence> sequences_;
};

// What a layer carries besides its rows.
struct CarriedOver {
  std::vector<int32_t> positions;
  std::vector<std::vector<float>> queries;       // per query head
  std::vector<std::vector<float>> significance;  // per kv_head; all empty, or none
};

Status read_carried(const CacheDecoder& decoder, int32_t seq, int32_t layer, CarriedOver* out);

// rows [num_kv_heads], to be used during the call only.
using VisitLayer = std::function<Status(int32_t seq, int32_t layer, const DecodedRow* rows,
                                        const CarriedOver& carried)>;

// Decodes everything on several threads and visits the layers in order, up to the first failure.
Status decode_all(const CacheDecoder& decoder, int32_t threads, const VisitLayer& visit,
                  const std::function<void(double)>& progress);

struct DecompressOptions {
  DType dtype = DType::kFloat16;
  int32_t threads = 1;
  int32_t gzip_level = 0;                // of the dump, 0 to 9
  std::function<void(double)> progress;  // fraction done, called by one thread at a time
};

// Writes the kv-dump `path` whole or not at all.
Status decompress(const CacheDecoder& decoder, const DecompressOptions& options,
                  const std::string& path);

// Whether it holds a sequence of a store (docs/FORMAT.md, section 8), which no CacheDecoder opens.
bool holds_store_sequence(const ContainerReader& container);

// Every chunk's checksum: the first that is wrong.
Status verify_chunks(const ContainerReader& container, int32_t threads);
// The same, then everything decoded.
Status verify(const CacheDecoder& decoder, int32_t threads,
              const std::function<void(double)>& progress);

}  // namespace tierkv::analysis

// SPDX-License-Identifier: Apache-2.0
// The rows of a `.tkv` container.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "codec/file/container_chunks.h"
#include "codec/file/container_pages.h"
#include "codec/file/row_plan.h"
#include "codec/host/large_vector.h"
#include "tierkv/container.h"

namespace tierkv {

struct DecodedRow {
  LargeVector<float> k, v;      // [tokens, head_dim]; pruned tokens are zeros
  std::vector<uint8_t> pruned;  // [tokens]
  bool any_pruned = false;
};

// The tables that were made last, for all sequences: layers of equal rotation share one.
struct RopeTables {
  struct Entry {
    const Rope* rope = nullptr;
    std::shared_ptr<const RopeTable> table;
  };
  std::mutex mutex;  // of the entries; held while a table is made
  std::deque<Entry> entries;
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
  explicit CacheDecoder(ContainerReader reader)
      : reader_(std::move(reader)), ropes_(std::make_unique<RopeTables>()) {}
  Status corrupt_chunk(const ChunkKey& key, const std::string& what) const {
    return Status(StatusCode::kCorrupt, reader_.path() + ": " + to_string(key) + ": " + what);
  }
  Status require_absent(const ChunkKey& key) const;
  // Gives a chunk to parse(bytes); failures name file and chunk.
  template <class Parse>
  auto read_chunk(const ChunkKey& key, const Parse& parse) const
      -> decltype(parse(std::vector<uint8_t>{})) {
    std::vector<uint8_t> bytes;
    if (Status s = reader_.read(key, &bytes); !s) {
      // A chunk that another one needs is no question of the caller's.
      return s.code() == StatusCode::kNotFound ? Status(StatusCode::kCorrupt, s.message()) : s;
    }
    auto result = parse(bytes);
    if (!result) return result.status().with_context(reader_.path() + ": " + to_string(key));
    return result;
  }
  Status load();
  Result<RowPlan> read_plan(int32_t seq, int32_t layer, int32_t kv_head) const;
  Status check_rope() const;
  Status check_ids() const;
  Status check_rows() const;
  // Null where the keys of the layer are not rotated.
  Result<std::shared_ptr<const RopeTable>> rope_table(int32_t layer) const;
  // Its rope is null.
  Result<WeightedRow> read_weighted_row(ChunkKey key) const;
  Result<Codebook> read_codebook(ChunkKey key) const;
  Result<BookFamily> read_family(ChunkKey key) const;
  Result<StoredBasis> read_basis(ChunkKey key) const;
  Status decode_part(const ChunkKey& key, const std::vector<int64_t>& tokens, float* out) const;
  Status decode_pages(ChunkKey key, const StoredPageFormat& format, const RowPlan& plan,
                      DecodedRow* out) const;
  Result<std::vector<float>> values(const ChunkKey& key, int64_t count) const;

  ContainerReader reader_;
  ContainerModel model_;
  std::vector<ContainerSequence> sequences_;
  std::unique_ptr<RopeTables> ropes_;
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

// Whether it holds a sequence of a store (store/ENGINE.md), which no
// CacheDecoder opens.
bool holds_store_sequence(const ContainerReader& container);

// Every chunk's checksum: the first that is wrong.
Status verify_chunks(const ContainerReader& container, int32_t threads);
// The same, then everything decoded.
Status verify(const CacheDecoder& decoder, int32_t threads,
              const std::function<void(double)>& progress);

}  // namespace tierkv

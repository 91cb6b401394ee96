// SPDX-License-Identifier: Apache-2.0
// kv-dump v1: caches of real models in HDF5, the input of the analysis. The format is in
// docs/reference/kv-dump.md.
//
// DumpReader checks the whole structure when it opens a file, then reads one (sequence, layer,
// kv_head) at a time. DumpWriter writes to a temporary name and renames it in finish(): a dump
// exists whole or not at all.
//
// Messages name the file, the dataset, what is wrong with it and what was expected.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "datasets/row_data.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"
#include "tierkv/rope.h"
#include "tierkv/status.h"

namespace tierkv::datasets {

inline constexpr int64_t kMaxSequenceTokens = int64_t{1} << 27;

struct LayerInfo {
  DType dtype = DType::kFloat16;  // of k, v and q
  bool has_q = false;
  bool has_significance = false;
  bool has_pruned = false;  // see DumpWriter::write_pruned()
  int64_t num_queries = 0;
};

struct SequenceInfo {
  std::string id, kind;
  int64_t num_tokens = 0;
  std::vector<LayerInfo> layers;  // [num_layers]
};

struct DumpInfo {
  std::string path;
  CacheLayout layout;
  std::string model_id, created_by;
  int32_t format_version = 1;
  // How keys were rotated: [1] for all layers or [num_layers]; empty: unknown.
  std::vector<Rope> rope;
  std::vector<SequenceInfo> sequences;
};

class DumpReader {
 public:
  static Result<DumpReader> open(const std::string& path);
  // A dump in host memory, which is copied; `name` stands for the path in messages.
  static Result<DumpReader> open_image(const std::string& name, const void* bytes, size_t size);
  DumpReader(DumpReader&&) noexcept;
  DumpReader& operator=(DumpReader&&) noexcept;
  ~DumpReader();

  const DumpInfo& info() const;

  // All reads may be called from several threads at once. kInvalidArgument for an index outside
  // info(), kNotFound for what the dump does not hold, kNonFinite naming the first bad element,
  // kCorrupt for an unreadable dataset; outputs are unspecified after a failure.
  Status read_row(int32_t seq, int32_t layer, int32_t kv_head, Component c, RowData* out) const;
  // q of heads [first_head, first_head + num_heads) as floats, [num_heads, num_queries, head_dim].
  Status read_queries(int32_t seq, int32_t layer, int32_t first_head, int32_t num_heads,
                      std::vector<float>* q) const;
  // Strictly increasing, within the sequence; [num_queries].
  Status read_query_positions(int32_t seq, int32_t layer, std::vector<int32_t>* positions) const;
  Status read_significance(int32_t seq, int32_t layer, int32_t kv_head,
                           std::vector<float>* significance) const;
  Status read_tokens(int32_t seq, std::vector<int32_t>* tokens) const;

 private:
  struct Impl;
  explicit DumpReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct DumpWriteOptions {
  int32_t gzip_level = 4;  // of k, v and q, shuffled: 1 to 9; 0: as they are, which is much faster
};

// The place of a row whose values come later.
class RowTarget {
 public:
  Status write(const float* values) const;  // [tokens, head_dim], once; as DumpWriter::write_row()

 private:
  friend class DumpWriter;
  int descriptor_ = -1;
  int64_t offset_ = 0, elements_ = 0;
  DType dtype_ = DType::kFloat16;
  std::string where_;
  int32_t head_ = 0;
  std::shared_ptr<std::atomic<int64_t>> missing_;  // of the dump
};

class DumpWriter {
 public:
  // info.sequences is ignored; info.layout.dtype is the type of k, v and q; an empty info.rope says
  // what the layout implies (dump_rope.h). All calls refuse with kInvalidArgument what would make a
  // dump that DumpReader refuses, and what was left unwritten.
  static Result<DumpWriter> create(const std::string& path, const DumpInfo& info,
                                   const DumpWriteOptions& options = {});
  DumpWriter(DumpWriter&&) noexcept;
  DumpWriter& operator=(DumpWriter&&) noexcept;
  ~DumpWriter();  // removes the temporary file when finish() has not succeeded

  Status begin_sequence(const std::string& id, const std::string& kind,
                        const std::vector<int32_t>& tokens);
  // Creates k, v (and q with its positions, significance) of the next layer of the current
  // sequence. Rows are then written one by one, in any order, rounded to the dump's dtype; all of
  // them before the next begin_layer(), begin_sequence() or finish(). kNonFinite or kOutOfRange
  // for a value that the dtype cannot hold.
  Status begin_layer(const std::vector<int32_t>& q_positions, bool significance);
  Status write_row(int32_t kv_head, Component c, const float* values);  // [tokens, head_dim]
  // Instead of write_row(): targets may be written in any order and on any threads until finish(),
  // around HDF5. kUnsupported where rows are gzipped.
  Result<RowTarget> defer_row(int32_t kv_head, Component c);
  Status write_queries(int32_t q_head, const float* values);        // [positions, head_dim]
  Status write_significance(int32_t kv_head, const float* values);  // [tokens]
  // 1 where the row has lost the token (its k and v are then zeros), 0 elsewhere; uint8 [tokens].
  // The dataset `pruned` [num_kv_heads, tokens] of the layer exists once one row is written; rows
  // that are not are all 0.
  Status write_pruned(int32_t kv_head, const uint8_t* flags);
  // A free text attribute on the current sequence.
  Status annotate(const std::string& name, const std::string& value);
  // Without `overwrite`: kIo where a file is at the path when finish() is called.
  Status finish(bool overwrite = true);

 private:
  struct Impl;
  explicit DumpWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The message about a file that is not HDF5, after its path.
inline constexpr char kNotHdf5[] = "is not an HDF5 file";

// For a command, before it calls anything else here: HDF5 closes nothing when the process ends.
// HDF5 1.10 crashes there after a file that it could not close, as beyond a limit of file sizes.
void leave_hdf5_as_it_is_at_exit();

}  // namespace tierkv::datasets

// SPDX-License-Identifier: Apache-2.0
// A store in host memory: plain, and the reference of every other place.
//
// A sequence's slot is one run of bytes, [num_layers] of: the raw rows of its kv_heads (RawLayout),
// then the format's state. A fork copies it as it is.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "store/engine/engine.h"
#include "store/place/place.h"
#include "store/rows/row_format.h"

namespace tierkv::store {

class HostPlace final : public Place {
 public:
  // kOutOfMemory.
  static Result<std::unique_ptr<HostPlace>> make(const StoreConfig& config,
                                                 std::unique_ptr<RowFormat> format);
  using Memory = std::shared_ptr<void>;
  // A place of one sequence for a store elsewhere, whose layout is given and whose pages begin at
  // `pages`: it has the sequence's table rows and states, and knows where bytes lie that it never
  // touches: it runs no page operation. `slot`: the states of all layers.
  static Result<std::unique_ptr<HostPlace>> make_mirror(const StoreConfig& config,
                                                        const StoreLayout& layout,
                                                        std::unique_ptr<RowFormat> format,
                                                        const Memory& slot, uint8_t* pages);
  // For a mirror, before its first use too: empties its tables.
  Status clear();

  const TokenLaws& laws() const override { return layout_.laws; }
  Status open(int32_t slot) override;
  Status release(int32_t slot) override;
  Status compress(const LayerMoves& moves, int32_t tokens) override;
  Status append(const LayerAppend& call, const LayerMoves& moves) override;
  Status attend(const LayerAttend& call, const LayerMoves& moves) override;
  Status decode(const LayerRange& range, const LayerMove& move) override;
  Status fork(int32_t from, int32_t to, const LayerMoves& layers) override;
  Status truncate(const LayerMoves& layers) override;
  Status note_replay(const LayerMoves& moves, int32_t tokens) override;
  Status take_status() override { return Status::ok(); }
  Status add_usage(const LayerMoves& layers, StoreUsage* usage) const override;
  Result<int64_t> bytes_held(int32_t slot) const override;
  int64_t free_pages() override {
    const RingCursors& ring = *pages_.allocator.ring.cursors;
    return ring.end - ring.start;
  }
  Shortage shortage() const override { return shortage_; }
  std::vector<uint8_t> identity() const override { return format_->identity(); }
  Result<SequenceSource> export_parts(const LayerMoves& layers) override;
  Status import_parts(int32_t slot, const SequenceParts& parts) override;
  // Everything of an export except write().
  SequenceSource describe(const LayerMoves& layers) const;
  struct LayerImport {
    HostLayer layer;
    std::unique_ptr<BodyPlan> plan;
  };
  // Clears the states of a slot and plans its layers, by several threads.
  Result<std::vector<LayerImport>> plan_imports(int32_t slot, const SequenceParts& parts,
                                                bool decodes_later) const;
  const PagesView& pages() const { return pages_; }
  uint8_t* slot_memory() const { return slot_bytes(0); }  // of a mirror
  RowFormat* format() const { return format_.get(); }
  HostLayer layer_of(const LayerMove& move) const;

 private:
  static Memory allocate(size_t alignment, int64_t bytes);
  Status bind(const StoreConfig& config, const StoreLayout& layout,
              std::unique_ptr<RowFormat> format, uint8_t* pages);

  uint8_t* slot_bytes(int32_t slot) const;
  uint8_t* raw_row(const LayerMove& move, int32_t kv_head) const;
  // Finished keys and values of a row, [end - first, head_dim] each, and which of them are pruned
  // (may be null).
  void read_row(const LayerMove& move, int32_t kv_head, Positions range, float* k, float* v,
                uint8_t* pruned) const;
  RawTokens tokens_of(const LayerMove& move, const Chunk& chunk, RowOfCall row) const;
  // Plans, takes the pages and writes; all or nothing. chunk: of the moves, or none.
  Status compress_works(const LayerMoves& moves, const Chunk& chunk);
  // Pages for these plans, one for each layer. kOutOfPages; kOutOfRange beyond a table.
  Status take_pages(const std::vector<HostLayer>& layers, const std::vector<LayerPlan>& plans);
  Status require_pages(int64_t needed);
  // What the table rows of a slot hold, [rows_per_sequence].
  std::vector<SideCounts> counts_of(int32_t slot) const;
  Status run(const PageOp& op);  // and the watermark
  // The tokens behind the cut of a truncation, which go back to the ring.
  struct Returned {
    LayerMove move;
    int32_t first = 0;             // up to move.to.tokens
    std::vector<float> k, v;       // [num_kv_heads, count, head_dim]
    std::vector<RawScore> scores;  // [num_kv_heads, count]
  };
  Returned read_returned(const LayerMove& move) const;
  void restore(const Returned& returned) const;
  void copy_pages(const std::vector<PageCopy>& copies) const;
  const PageCopy* copies_of(const std::vector<PageCopy>& copies, int32_t layer) const;
  Status find_significance(const LayerAppend& call, const LayerMoves& moves,
                           std::vector<float>* significance) const;
  // scores: of the row's ring, whose tokens the queries count where the call says so.
  void attend_row(const LayerAttend& call, const LayerMove& move, int64_t entry, int32_t kv_head,
                  std::vector<RawScore>* scores) const;
  int64_t raw_part_bytes(LayerTokens at) const;
  void export_raw(const LayerMove& move, int32_t kv_head, uint8_t* to) const;
  // An import_fault(), or kNoImportFault.
  int32_t import_raw(const LayerMove& move, int32_t kv_head, std::span<const uint8_t> raw) const;
  Status import_opened(int32_t slot, const SequenceParts& parts);

  StoreConfig config_;
  StoreLayout layout_;
  std::unique_ptr<RowFormat> format_;
  Memory allocator_memory_, page_memory_, slot_memory_;
  PagesView pages_;
  int64_t most_pages_ = 0;
  Shortage shortage_;
};

}  // namespace tierkv::store

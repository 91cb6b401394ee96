// SPDX-License-Identifier: Apache-2.0
// Body tokens as coded blocks of weighted steps, in host memory: the reference of its kernels.
// store/ENGINE.md, "Coded rows", has the laws; coded_shape.h where bytes lie.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "codec/format/rope_turn.h"
#include "codec/host/coded/weighted_rows.h"
#include "store/rows/coded/coded_shape.h"
#include "store/rows/coded/layer_books.h"
#include "store/rows/row_format.h"

namespace tierkv::store {

class CodedRows final : public RowFormat {
 public:
  explicit CodedRows(const StoreConfig& config);
  // Sizes, rotations, and what the profile says of every row. kInvalidArgument naming the field,
  // kOutOfRange.
  Status prepare();

  const FormatSizes& sizes() const override { return sizes_; }
  void bind(const PagesView& pages) override { pages_ = pages; }
  int64_t layer_pages(int32_t layer, int32_t tokens, bool at_most) const override;
  Result<std::unique_ptr<BodyPlan>> plan(const std::vector<BodyWork>& works) override;
  PageRanges place(const HostLayer& layer, BodyPlan& plan, size_t work) override;
  void finish(BodyPlan& plan) override;
  void read(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end, float* k, float* v,
            uint8_t* pruned) const override;
  void read_decided(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end,
                    RawScore* scores) const override;
  std::vector<SideCounts> cut_counts(const HostLayer& layer, int32_t body_end) const override;
  void relocate(const HostLayer& layer, const PageCopy* copies) override;
  int64_t nominal_bytes(const HostLayer& layer) const override;
  std::vector<uint8_t> identity() const override;
  std::vector<uint8_t> export_shared(const HostLayer& layer) const override;
  int64_t body_bytes(const HostLayer& layer, int32_t kv_head) const override;
  ExportedBody export_body(const HostLayer& layer, int32_t kv_head) const override;
  Result<std::unique_ptr<BodyPlan>> plan_import(const ImportWork& work) override;

  // The tokens of a block of one row before they are coded.
  struct BlockTokens {
    int32_t first = 0, count = 0;
    std::vector<float> x[2];                // [count, head_dim]
    std::vector<int8_t> importance;         // G
    std::vector<DecidedExponents> decided;  // with the value's exponent of tokens that have one
  };
  struct BlockCodes {
    std::vector<int16_t> codes[2];
    std::vector<int8_t> exponents[2];
  };

  template <class T>
  T* state_at(const HostLayer& layer, int64_t byte) const {
    return reinterpret_cast<T*>(layer.state + byte);
  }

  // What the same format in device memory shares with this one.
  const CodedShape& shape() const { return shape_; }
  const CodedFormat& format() const { return format_; }
  bool is_raw_layer(int32_t layer) const { return is_raw_layer_[layer] != 0; }
  const RopeTable* rope(int32_t layer) const;
  // [head_dim]; empty: ones.
  const std::vector<float>& key_weight(int32_t layer, int32_t kv_head) const {
    return start(layer, kv_head).key_weight;
  }
  // Whether means or steps of a layer's rows come from their own tokens.
  bool needs_tokens(int32_t layer) const;
  bool is_fixed(const HostLayer& layer) const { return *state_at<int32_t>(layer, 0) != 0; }
  const LayerBooks& books(int32_t layer) const { return books_[layer]; }
  void set_books(int32_t layer, LayerBooks books) { books_[layer] = std::move(books); }
  // The row with means and steps that are known. means: [head_dim] fp16.
  WeightedRow row_of(int32_t layer, int32_t kv_head, const CodedRowState& state,
                     const uint16_t* means) const;
  // Means and steps of a row. keys [tokens, head_dim]: its first body tokens; read where it needs
  // tokens.
  Result<WeightedRow> fit_row(int32_t layer, int32_t kv_head, const std::vector<float>& keys) const;
  // The same of all rows of a layer and, where `books` is not null, its codebooks, from its first
  // blocks: [num_kv_heads, blocks].
  Status fit_layer(int32_t layer, const std::vector<BlockTokens>& tokens,
                   std::vector<WeightedRow>* rows, LayerBooks* books) const;

 private:
  Status prepare_sizes();
  struct LayerDraft {
    int32_t first_block = 0, end_block = 0;  // that are written
    bool fixed = false;                      // afterwards
    std::vector<CodedRowState> rows;         // [num_kv_heads]
    std::vector<std::vector<uint16_t>> means;
    // [blocks][num_kv_heads][2], in the order of the pages: bytes that were made, and their sizes.
    std::vector<std::vector<uint8_t>> blocks;
    std::vector<uint32_t> units;
    // The blocks of an import that stay as they are, [num_kv_heads], those of a row one behind the
    // other; empty: blocks has the bytes.
    std::vector<const uint8_t*> brought;
  };
  struct CodedPlan final : BodyPlan {
    std::vector<LayerDraft> drafts;      // [works]
    std::map<int32_t, LayerBooks> made;  // by layer: books that the store did not have
  };
  // What is known of a row before its tokens.
  struct RowStart {
    std::vector<double> query_energy;  // empty: unknown
    std::vector<uint16_t> key_mean;    // fp16; empty: of the row's own tokens
    std::vector<float> key_weight;     // empty: ones
    double key_scale = 1, value_scale = 1;
    bool needs_tokens() const { return query_energy.empty() || key_mean.empty(); }
  };

  CodedBlockRef* refs(const HostLayer& layer, int32_t kv_head, Component c) const {
    return state_at<CodedBlockRef>(layer, shape_.refs_byte(kv_head, c));
  }
  // Units of the layer's blocks before `block`.
  int32_t units_before(const HostLayer& layer, int32_t block) const {
    const auto* ends = state_at<int32_t>(layer, shape_.ends_byte());
    return block == 0 ? 0 : ends[block - 1];
  }
  uint8_t* block_bytes(const CodedBlockRef& ref) const {
    return pages_.base + int64_t{ref.offset} * kUnitBytes;
  }
  // Points into `row`.
  WeightedFit fit_of(const RowStart& row) const;
  const RowStart& start(int32_t layer, int32_t kv_head) const {
    return starts_[layer * shape_.num_kv_heads + kv_head];
  }
  const LayerBooks* find_books(int32_t layer, const CodedPlan& plan) const;

  Status draft(const BodyWork& work, CodedPlan* plan, LayerDraft* draft) const;
  // books null: blocks stay raw.
  Status draft_blocks(const BodyWork& work, const LayerBooks* books, LayerDraft* draft) const;
  // The tokens of a block that have no codes yet: out of its raw block, where it has one, and raw
  // tokens, about which decide() decides.
  void gather(const BodyWork& work, int32_t kv_head, int32_t block, CodedRowState* state,
              BlockTokens* out) const;
  void decide(const RawTokens& tokens, Positions range, CodedRowState* state,
              BlockTokens* out) const;
  Status quantize(const WeightedRow& row, const BlockTokens& tokens, BlockCodes* out) const;
  // Codes that a block has already go before those of its new tokens.
  Status prepend(const BodyWork& work, int32_t kv_head, int32_t block, BlockCodes* codes) const;
  // Means, steps and, where the store has none, codebooks of a layer that is not fixed.
  Status fix(const BodyWork& work, CodedPlan* plan, LayerDraft* draft) const;
  Status encode(const LayerBooks& books, int32_t kv_head, int32_t count, const BlockCodes& codes,
                LayerDraft* draft) const;
  std::vector<uint8_t> raw_block(const BlockTokens& tokens, Component c) const;
  void add_layer_plan(const HostLayer& layer, LayerDraft* draft, CodedPlan* plan) const;

  // x null: codes and exponents alone.
  Status decode(const WeightedRow& row, const LayerBooks& books, const uint8_t* const bytes[2],
                const int64_t size[2], Positions range, BlockCodes* codes, float* const* x) const;
  void read_block(const HostLayer& layer, int32_t kv_head, int32_t block, BlockCodes* codes,
                  float* const x[2]) const;

  // `books`: of the layer where it is fixed, those of the sequence, unless the store has them.
  // is_left: whether blocks that decode later must be decoded now.
  Status import_layer(const ImportWork& work, LayerBooks* books, LayerDraft* draft,
                      bool* is_left) const;
  Status import_row(const ImportWork& work, int32_t kv_head, LayerDraft* draft,
                    std::vector<WeightedRow>* rows) const;
  int64_t head_bytes(bool fixed, int32_t blocks) const;
  // Checks everything but its values.
  Status check_raw_block(const uint8_t* bytes, int64_t size, int32_t tokens) const;

  StoreConfig config_;
  CodedFormat format_;
  FormatSizes sizes_;
  CodedShape shape_;
  PagesView pages_;
  std::vector<uint8_t> is_raw_layer_;  // [num_layers]
  std::vector<RopeTable> ropes_;       // [1] or [num_layers]; empty: none is rotated
  std::vector<RowStart> starts_;       // [num_layers * num_kv_heads]
  std::vector<LayerBooks> books_;      // [num_layers]
};

}  // namespace tierkv::store

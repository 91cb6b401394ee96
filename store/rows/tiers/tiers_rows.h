// SPDX-License-Identifier: Apache-2.0
// Body tokens at fixed widths by importance, in host memory: the reference of its kernels.
// store/ENGINE.md, "Tiers", has the laws; tiers_shape.h where the state lies.
#pragma once

#include <memory>
#include <vector>

#include "codec/host/page_codec.h"
#include "store/rows/row_format.h"
#include "store/rows/tiers/tiers_shape.h"
#include "tierkv/basis.h"

namespace tierkv::store {

struct alignas(kPageAlignment) StagedBlock {
  uint8_t bytes[kPageAlignment] = {};
};

class TiersRows final : public RowFormat {
 public:
  explicit TiersRows(const StoreConfig& config) : config_(config) {}
  // Pages, classes and bases. kInvalidArgument, kUnsupported with the field of the format.
  Status prepare();

  const FormatSizes& sizes() const override { return sizes_; }
  void bind(const PagesView& pages) override { pages_ = pages; }
  int64_t layer_pages(int32_t layer, int32_t tokens, bool at_most) const override;
  Result<std::unique_ptr<BodyPlan>> plan(const std::vector<BodyWork>& works) override;
  PageRanges place(const HostLayer& layer, BodyPlan& plan, size_t work) override;
  void read(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end, float* k, float* v,
            uint8_t* pruned) const override;
  std::vector<SideCounts> cut_counts(const HostLayer& layer, int32_t body_end) const override;
  void cut(const HostLayer& layer, int32_t body_end) override;
  int64_t nominal_bytes(const HostLayer& layer) const override;
  std::vector<uint8_t> identity() const override;
  int64_t body_bytes(const HostLayer& layer, int32_t kv_head) const override;
  ExportedBody export_body(const HostLayer& layer, int32_t kv_head) const override;
  Result<std::unique_ptr<BodyPlan>> plan_import(const ImportWork& work) override;
  void clear_behind(const HostLayer& layer) override;

  // For the same rows in device memory: what prepare() made.
  const StoreConfig& config() const { return config_; }
  const TiersShape& shape() const { return shape_; }
  // The format's, and raw behind them where there are raw layers.
  const std::vector<RowClass>& classes() const { return classes_; }
  const std::vector<uint8_t>& class_of_head() const { return class_of_head_; }
  // Pages of so many tokens that follow each other: the most, or typically.
  int64_t row_pages(int32_t layer, int32_t kv_head, int32_t tokens, bool at_most) const;
  const std::vector<Basis>& bases(Component c) const {
    return c == Component::kKey ? keys_ : values_;
  }

 private:
  // Tokens of a side from token `first` on, in pages of their own: slots are those that they get.
  struct StagedSide {
    int32_t first = 0, end = 0;
    std::vector<StagedBlock> bytes;  // whole pages, from that of `first` on
    const uint8_t* tiles = nullptr;  // of an import, in their stead: those with tokens
  };
  struct RowDraft {
    TiersRow row;                 // afterwards
    int32_t position = 0;         // of the first token that comes
    std::vector<BodyTier> tiers;  // of each; of an import empty, for which there is the map
    const uint8_t* map = nullptr;
    StagedSide sides[2];
  };
  struct TiersPlan final : BodyPlan {
    std::vector<RowDraft> rows;  // [works * num_kv_heads]
  };
  // Where tokens of one side go or are: `count` of them, slots from `slot` on of a page.
  struct PageRun {
    HostPage page;
    int32_t slot = 0, count = 0;
  };

  Status prepare_classes(const TiersFormat& format);
  Status prepare_heads(const TiersFormat& format);
  void prepare_bases(const TiersFormat& format);
  Result<RowClass> row_class_of(const TierFormat& high, const TierFormat& low) const;

  const RowClass& row_class(int32_t layer, int32_t kv_head) const {
    return classes_[class_of_head_[layer * shape_.num_kv_heads + kv_head]];
  }
  // Null in raw layers and where the component is not rotated.
  const Basis* basis(Component c, int32_t layer, int32_t kv_head) const;
  TiersRow& row_state(const HostLayer& layer, int32_t kv_head) const {
    return *reinterpret_cast<TiersRow*>(layer.state + shape_.row_byte(kv_head));
  }
  uint8_t* map_of(const HostLayer& layer, int32_t kv_head) const {
    return layer.state + shape_.map_byte(kv_head);
  }
  int32_t body_first(const LayerTokens& at) const { return most(at.body_end, config_.sink_tokens); }
  // Tokens of positions before `end`, by side.
  TiersRow counts_before(const HostLayer& layer, int32_t kv_head, int32_t end) const;
  // The run that begins at token `token` of a side and has at most `count` tokens.
  PageRun page_run(const HostLayer& layer, int32_t kv_head, int32_t side, int32_t token,
                   int32_t count) const;
  // The slots of token `token` and of those behind it, before `end`, that lie in its tile.
  void clear_slots(const HostLayer& layer, int32_t kv_head, int32_t side, int32_t token,
                   int32_t end) const;
  HostPage page_at(const RowClass& row_class, int32_t side, uint8_t* bytes) const;
  RowDraft draft_behind(const TiersRow& row, int32_t position) const;
  // The run of `count` more tokens of a side behind those that are staged, or of as many as its
  // page holds.
  PageRun stage(const RowClass& row_class, int32_t side, int32_t count, StagedSide* staged) const;

  Status encode(const BodyWork& work, int32_t kv_head, RowDraft* draft) const;
  void write_side(const HostLayer& layer, int32_t kv_head, int32_t side,
                  const StagedSide& staged) const;
  void write_state(const HostLayer& layer, int32_t kv_head, const RowDraft& draft) const;

  void place_side(const HostLayer& layer, int32_t kv_head, int32_t side, const StagedSide& staged,
                  PageRanges* ranges) const;
  Status import_row(const ImportWork& work, int32_t kv_head, RowDraft* draft) const;

  StoreConfig config_;
  FormatSizes sizes_;
  TiersShape shape_;
  PagesView pages_;
  std::vector<RowClass> classes_;       // the format's, and raw behind them
  std::vector<uint8_t> class_of_head_;  // [num_layers * num_kv_heads], raw ones too
  std::vector<Basis> keys_, values_;    // likewise; empty: none is rotated
};

}  // namespace tierkv::store

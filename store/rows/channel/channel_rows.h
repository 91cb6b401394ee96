// SPDX-License-Identifier: Apache-2.0
// Body tokens as blocks of channel-wise keys (codec/format/channel_block.h), in host memory.
//
// Block b of a row holds the positions T b to T (b + 1) - 1; the places of sinks hold copies of the
// row's first body token, which nobody reads. A raw layer has raw tiles in their stead: keys, then
// values. Places of blocks follow from their numbers, so a layer keeps no state.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codec/format/channel_block.h"
#include "store/rows/raw_tiles.h"
#include "store/rows/row_format.h"

namespace tierkv::store {

// Where blocks lie: what host and device share. Block b of kv_head h of a layer is number
// b * num_kv_heads + h. Numbers lie one behind the other on the pages of (sequence, layer), as many
// on each as fit. The allocator counts units of 16 bytes, page ends included.
struct ChannelBody {
  static constexpr int32_t kUnit = 16;
  static constexpr int32_t kBlockUnit = 128;  // bytes, that ids of blocks on a device count

  ChannelLayout layout{};
  int32_t num_kv_heads = 0;
  int64_t page_bytes = 0;

  // A block of a raw layer: tiles of keys, then of values.
  TKV_HD constexpr int32_t raw_bytes() const {
    return 2 * layout.tiles() * TileLayout{kRawCodes, layout.head_dim()}.bytes();
  }
  TKV_HD constexpr int32_t raw_byte(Component c, int32_t place, int32_t dim) const {
    return static_cast<int32_t>(c) * (raw_bytes() / 2) +
           raw_tile_byte(layout.head_dim(), c, place, dim);
  }
  TKV_HD constexpr int32_t block_bytes(bool is_raw) const {
    return is_raw ? raw_bytes() : layout.bytes;
  }
  TKV_HD constexpr int32_t per_page(bool is_raw) const {
    return static_cast<int32_t>(page_bytes / block_bytes(is_raw));
  }
  TKV_HD constexpr int32_t blocks_of(int32_t tokens) const { return tokens / layout.tokens; }
  // What the table row counts of `blocks` blocks of all kv_heads.
  TKV_HD constexpr int32_t units_of(bool is_raw, int32_t blocks) const {
    const int64_t count = int64_t{blocks} * num_kv_heads;
    return static_cast<int32_t>(
        (count / per_page(is_raw) * page_bytes + count % per_page(is_raw) * block_bytes(is_raw)) /
        kUnit);
  }
  struct BlockPlace {
    int32_t page;  // index in the table row
    int64_t byte;  // there
  };
  TKV_HD constexpr BlockPlace place_of(bool is_raw, int32_t kv_head, int32_t block) const {
    const int64_t number = int64_t{block} * num_kv_heads + kv_head;
    return {static_cast<int32_t>(number / per_page(is_raw)),
            number % per_page(is_raw) * block_bytes(is_raw)};
  }
};

class ChannelRows final : public RowFormat {
 public:
  explicit ChannelRows(const StoreConfig& config);
  // Blocks and pages. kInvalidArgument, kUnsupported naming the field.
  Status prepare();

  const FormatSizes& sizes() const override { return sizes_; }
  void bind(const PagesView& pages) override { pages_ = pages; }
  int64_t layer_pages(int32_t layer, int32_t tokens, bool at_most) const override;
  Result<std::unique_ptr<BodyPlan>> plan(const std::vector<BodyWork>& works) override;
  PageRanges place(const HostLayer& layer, BodyPlan& plan, size_t work) override;
  void read(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end, float* k, float* v,
            uint8_t* pruned) const override;
  std::vector<SideCounts> cut_counts(const HostLayer& layer, int32_t body_end) const override {
    return counts_of(layer.layer, blocks_of(body_end));
  }
  int64_t nominal_bytes(const HostLayer& layer) const override {
    return config_.layout.num_kv_heads * body_bytes(layer, 0);
  }
  std::vector<uint8_t> identity() const override;
  int64_t body_bytes(const HostLayer& layer, int32_t) const override {
    return int64_t{blocks_of(layer.at.body_end)} * block_bytes(layer.layer);
  }
  ExportedBody export_body(const HostLayer& layer, int32_t kv_head) const override;
  Result<std::unique_ptr<BodyPlan>> plan_import(const ImportWork& work) override;

  // For the same rows in device memory.
  const ChannelBody& body() const { return body_; }
  const std::vector<uint8_t>& is_raw_layer() const { return is_raw_layer_; }

 private:
  // The blocks [first, end) of every kv_head, one behind the other.
  struct LayerDraft {
    int32_t first = 0, end = 0;
    std::vector<uint8_t> made;         // empty where they come in
    std::vector<const uint8_t*> from;  // [num_kv_heads]
  };
  struct ChannelPlan final : BodyPlan {
    std::vector<LayerDraft> drafts;  // [works]
  };
  bool is_raw(int32_t layer) const { return is_raw_layer_[layer] != 0; }
  int32_t block_bytes(int32_t layer) const { return body_.block_bytes(is_raw(layer)); }
  int32_t blocks_of(int32_t tokens) const { return body_.blocks_of(tokens); }
  // What the table row of a layer with so many blocks of a row holds.
  std::vector<SideCounts> counts_of(int32_t layer, int32_t blocks) const {
    return {SideCounts{{body_.units_of(is_raw(layer), blocks)}}};
  }
  uint8_t* block_at(const HostLayer& layer, int32_t kv_head, int32_t block) const;
  void encode(int32_t layer, const float* k, const float* v, uint8_t* block) const;
  // All places of a block, [T, head_dim] each.
  void decode(int32_t layer, const uint8_t* block, float* k, float* v) const;

  StoreConfig config_;
  ChannelLayout layout_;
  ChannelBody body_;
  FormatSizes sizes_;
  PagesView pages_;
  std::vector<uint8_t> is_raw_layer_;  // [num_layers]
};

}  // namespace tierkv::store

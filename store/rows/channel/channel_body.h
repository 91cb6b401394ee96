// SPDX-License-Identifier: Apache-2.0
// Where the blocks of channel rows lie: what host and device share.
//
// Block b of kv_head h of a layer is number b * num_kv_heads + h. Numbers lie one behind the other
// on the pages of (sequence, layer), as many on each as fit. The allocator counts units of 16
// bytes, page ends included.
#pragma once

#include <cstdint>

#include "codec/format/channel_block.h"
#include "store/rows/raw_tiles.h"

namespace tierkv::store {

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

}  // namespace tierkv::store

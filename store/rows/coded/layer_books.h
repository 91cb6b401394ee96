// SPDX-License-Identifier: Apache-2.0
// The codebooks of one layer: a family for keys and one for values, made once from the sample of
// the first sequence that fixes the layer, or brought by the first sequence that is imported; then
// they serve every sequence of the store.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "codec/host/coded/weighted_books.h"
#include "tierkv/kv_store.h"
#include "tierkv/status.h"

namespace tierkv::store {

struct LayerBooks {
  BookChoice choice[2];        // by component
  std::vector<uint8_t> bytes;  // as a sequence has them

  bool empty() const { return choice[0].family.books.empty(); }
  const BookFamily& family(Component c) const { return choice[static_cast<int32_t>(c)].family; }
  // The book that each dim block of a row takes, [dim blocks].
  const uint8_t* book_of(Component c, int32_t kv_head, int32_t head_dim) const {
    return choice[static_cast<int32_t>(c)].book_of.data() + kv_head * dim_block_count(head_dim);
  }
};

// sample: of each component, the codes of a layer's first blocks by kv_head.
Result<LayerBooks> make_layer_books(const CodedFormat& format, int32_t head_dim,
                                    const std::vector<RowCodes> (&sample)[2]);

// kCorrupt unless they are as make_layer_books() makes them for the format and shape.
Result<LayerBooks> parse_books(const CodedFormat& format, const CacheLayout& layout,
                               std::span<const uint8_t> bytes);

}  // namespace tierkv::store

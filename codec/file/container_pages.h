// SPDX-License-Identifier: Apache-2.0
// Tiers of a row as unified pages in a container, one page a chunk: where the formats of a tier
// have a page layout, its bytes in the file are those of a pool's pages, written and read by the
// page codec. Everything else is stored as segments (container_chunks.h).
//
// A page holds consecutive tokens of its part, ascending. The last one of a row is laid out for as
// many tiles as it needs. Bytes: docs/reference/format.md.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/host/page_codec.h"
#include "tierkv/basis.h"

namespace tierkv {

// What the pages of a (sequence, layer, part) or, with classes of heads, of a (sequence, layer,
// kv_head, part) have in common.
struct StoredPageFormat {
  PageShape shape{};                  // tokens: of a full page
  DType raw_dtype = DType::kFloat16;  // of components with 16 bits
  // False: a page ends before its scores and positions, which a scheme without tiers does not need.
  bool has_scores = false;
  BasisKind basis[2] = {BasisKind::kNone, BasisKind::kNone};  // of keys, of values
  StepRule rule[2] = {StepRule::kMinMax, StepRule::kMinMax};  // likewise, as in HostPage

  bool has_basis() const { return basis[0] != BasisKind::kNone || basis[1] != BasisKind::kNone; }
  int64_t pages(int64_t tokens) const { return (tokens + shape.tokens - 1) / shape.tokens; }
  PageLayout layout(int32_t tokens) const;  // of a page with so many tokens
  int64_t bytes(int32_t tokens) const;      // that such a page takes in the file
};

Result<StoredPageFormat> parse_page_format(const std::vector<uint8_t>& bytes, int32_t head_dim);

// The tokens of one page of a row.
struct PageTokens {
  const int32_t* positions = nullptr;  // [count], ascending
  int32_t count = 0;                   // at most format.shape.tokens
};

struct PageSink {
  float* k = nullptr;  // [tokens of the row, head_dim]: rows `positions` are written
  float* v = nullptr;
  const Basis* basis[2] = {nullptr, nullptr};
};

// kCorrupt: the size is not that of a page of so many tokens, or it names other positions.
Status decode_page(const StoredPageFormat& format, const std::vector<uint8_t>& bytes,
                   const PageTokens& tokens, const PageSink& sink);

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// What a page pool would hold for a row: page_ratio counts whole pages, as an allocator hands them
// out.
#pragma once

#include "tierkv/page.h"
#include "tools/analysis/scheme/row_codec.h"

namespace tierkv::analysis {

// The formats of the tiers of a scheme with fixed-width pages, each once, high first: what one page
// size is chosen for. With classes of heads: of all classes, without the raw tokens, which lie in
// slabs of their own, in tiles of 16.
std::vector<TierFormat> page_formats(const Scheme& scheme);
PageSizing page_sizing(const Scheme& scheme);

// Bytes of the pages that the row's tokens occupy, 0 where the scheme or head_dim has no pages.
// body_bytes: stored bytes of the coded body (RowCodec::body_bytes()).
int64_t row_page_bytes(const Scheme& scheme, const RowPlan& plan, int32_t head_dim,
                       int64_t body_bytes);

}  // namespace tierkv::analysis

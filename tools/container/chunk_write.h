// SPDX-License-Identifier: Apache-2.0
// The writers of what codec/file reads: segments, row maps, bases, values and pages of a container
// (docs/reference/format.md).
#pragma once

#include <cstdint>
#include <vector>

#include "codec/file/container_chunks.h"
#include "codec/file/container_pages.h"
#include "codec/file/row_plan.h"
#include "datasets/row_data.h"

namespace tierkv::analysis {

// kUnsupported for a segment of more than 4 GiB.
Result<std::vector<uint8_t>> serialize_segment(const SegmentFormat& format,
                                               const EncodedSegment& segment);
std::vector<uint8_t> serialize_row(const RowPlan& plan);
std::vector<uint8_t> serialize_basis(const StoredBasis& basis);
std::vector<uint8_t> serialize_weighted_row(const WeightedRow& row);
// Floats in the narrowest of fp16, bf16 and fp32 that holds all of them exactly.
std::vector<uint8_t> serialize_values(const std::vector<float>& values);
std::vector<uint8_t> serialize_page_format(const StoredPageFormat& format);

struct PageSource {
  RowInput input;
  const float* significance = nullptr;  // [tokens of the row]; null: no scores
  const Basis* basis[2] = {nullptr, nullptr};
};

// kNonFinite, kOutOfRange: a value its format cannot hold.
Status encode_page(const StoredPageFormat& format, const PageSource& source,
                   const PageTokens& tokens, std::vector<uint8_t>* bytes);

}  // namespace tierkv::analysis

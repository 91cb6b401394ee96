// SPDX-License-Identifier: Apache-2.0
// The chunks of a container that hold a row: segments, bases, values. Their bytes are
// docs/reference/format.md; parsing checks every size and field before it is used and says what is
// wrong, so that what it returns can be decoded without further checks. The writers are in
// tools/container/chunk_write.h.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/file/segment.h"
#include "tierkv/basis.h"
#include "tierkv/container.h"

namespace tierkv {

struct StoredSegment {
  // Basis, codebook and row are null; see needs_basis() and format.coded. weighted.first_position
  // is set.
  SegmentFormat format;
  EncodedSegment data;
  bool needs_basis() const {
    return format.format.basis != BasisKind::kNone ||
           format.format.step_rule == StepRule::kAbsolute;
  }
};
Result<StoredSegment> parse_segment(const std::vector<uint8_t>& bytes, int32_t head_dim);

struct StoredBasis {
  Basis basis;
  float step = 0;  // 0: no absolute step
};
Result<StoredBasis> parse_basis(const std::vector<uint8_t>& bytes, int32_t head_dim);

// The row's rope is null.
Result<WeightedRow> parse_weighted_row(const std::vector<uint8_t>& bytes, int32_t head_dim);

// kCorrupt unless there are `count` of them, all finite.
Result<std::vector<float>> parse_values(const std::vector<uint8_t>& bytes, int64_t count);

}  // namespace tierkv

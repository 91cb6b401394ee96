// SPDX-License-Identifier: Apache-2.0
#include "codec/format/page_layout.h"

#include <algorithm>
#include <set>
#include <string>

#include "codec/format/errors.h"

namespace tierkv {
namespace {

int32_t round_up(int32_t n, int32_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Sub-groups per token of a component that pages can hold.
Result<int32_t> page_groups(const ComponentFormat& f, int32_t head_dim) {
  if (Status s = f.validate(head_dim); !s) return s;
  if (f.step_rule != StepRule::kMinMax && f.step_rule != StepRule::kNorm)
    return unsupported("pages hold min-max codes and 2 bits clipped at the norm only");
  if (f.entropy != Entropy::kNone) return unsupported("entropy-coded codes have their own pages");
  if (f.type == CodeType::uniform(1)) return unsupported("1 bit has no page layout");
  if (f.is_raw()) return 0;
  if (f.unit != Unit::kToken) return unsupported("pages hold token-wise codes only");
  const int32_t group = f.group == 0 ? head_dim : f.group;
  if (group % kDimBlock != 0) {
    return unsupported("group " + std::to_string(group) + " is not a multiple of 16 dims");
  }
  return head_dim / group;
}

bool is_component_shape(CodeType type, int32_t groups, int32_t head_dim) {
  if (type == kRawCodes) return groups == 0;
  return (type == kCodes8 || type == kCodes4 || type == kCodes2) && groups >= 1 &&
         head_dim % groups == 0 && head_dim / groups % kDimBlock == 0;
}

struct Candidate {
  int32_t page_bytes;
  double worst_waste;
};

double waste_of(int32_t page_bytes, int32_t tile_bytes) {
  return 1.0 - static_cast<double>(page_bytes / tile_bytes * tile_bytes) / page_bytes;
}

// Sizes that one of the formats fills exactly, ascending.
std::set<int32_t> candidate_sizes(const std::vector<int32_t>& tile_bytes,
                                  const PageSizing& sizing) {
  const int32_t smallest = *std::min_element(tile_bytes.begin(), tile_bytes.end());
  const int32_t largest = *std::max_element(tile_bytes.begin(), tile_bytes.end());
  const int64_t min_tiles =
      (static_cast<int64_t>(sizing.min_tokens) + kTileTokens - 1) / kTileTokens;
  const int64_t least = std::max<int64_t>(largest, smallest * min_tiles);
  std::set<int32_t> sizes;
  for (const int32_t tile : tile_bytes) {
    for (int64_t n = (least + tile - 1) / tile; n * tile <= sizing.max_page_bytes; ++n) {
      const int32_t page = round_up(static_cast<int32_t>(n * tile), kPageAlignment);
      if (page <= sizing.max_page_bytes) sizes.insert(page);
    }
  }
  return sizes;
}

}  // namespace

Status PageSizing::validate() const {
  if (!(max_waste >= 0 && max_waste < 1))
    return invalid("max_waste must be at least 0 and below 1");
  if (min_tokens < 1) return invalid("min_tokens must be positive");
  if (max_page_bytes < kPageAlignment || max_page_bytes > kMaxPageBytes) {
    return invalid("max_page_bytes must be 128 to 1 MiB");
  }
  return Status::ok();
}

bool is_page_layout(const PageLayout& p) {
  const PageShape s{p.k_tile.head_dim, p.k_tile.type, p.v_tile.type,  p.k_groups,
                    p.v_groups,        p.tokens,      p.has_records()};
  if (!is_known_head_dim(s.head_dim) || p.v_tile.head_dim != s.head_dim) return false;
  if (!is_component_shape(s.k_type, s.k_groups, s.head_dim)) return false;
  if (!is_component_shape(s.v_type, s.v_groups, s.head_dim)) return false;
  if (s.tokens < kTileTokens || s.tokens % kTileTokens != 0) return false;
  if (s.tokens / kTileTokens > kMaxPageBytes / page_tile_bytes(s)) return false;
  const PageLayout q = page_layout(s);
  return q.k_codes == p.k_codes && q.k_metadata == p.k_metadata && q.v_codes == p.v_codes &&
         q.v_metadata == p.v_metadata && q.scores == p.scores && q.positions == p.positions &&
         q.used_bytes == p.used_bytes;
}

Result<PageShape> page_shape(const TierFormat& format, int32_t head_dim) {
  if (!is_known_head_dim(head_dim)) {
    return unsupported("pages need head_dim 64, 96, 128 or 256, not " + std::to_string(head_dim));
  }
  const Result<int32_t> k = page_groups(format.k, head_dim);
  if (!k) return k.status().with_context("key format");
  const Result<int32_t> v = page_groups(format.v, head_dim);
  if (!v) return v.status().with_context("value format");
  return PageShape{head_dim, format.k.type, format.v.type, *k, *v, 0};
}

Result<PageLayout> make_page_layout(const TierFormat& format, int32_t head_dim, int64_t page_bytes,
                                    bool records) {
  Result<PageShape> shape = page_shape(format, head_dim);
  if (!shape) return shape.status();
  if (page_bytes <= 0 || page_bytes > kMaxPageBytes || page_bytes % kPageAlignment != 0) {
    return invalid("page_bytes must be a multiple of 128, at most 1 MiB");
  }
  const auto bytes = static_cast<int32_t>(page_bytes);
  shape->records = records;
  shape->tokens = bytes / page_tile_bytes(*shape) * kTileTokens;
  if (shape->tokens == 0) {
    return invalid("a page of " + std::to_string(bytes) + " bytes holds no tile of " +
                   to_string(format));
  }
  return page_layout(*shape);
}

Result<PageChoice> choose_page_size(const std::vector<TierFormat>& formats, int32_t head_dim,
                                    const PageSizing& sizing) {
  if (Status s = sizing.validate(); !s) return s;
  if (formats.empty()) return invalid("no formats to choose a page size for");
  std::vector<int32_t> tile_bytes;
  for (const TierFormat& format : formats) {
    Result<PageShape> shape = page_shape(format, head_dim);
    if (!shape) return shape.status();
    shape->records = sizing.records;
    tile_bytes.push_back(page_tile_bytes(*shape));
  }
  Candidate best{0, 1.0};
  for (const int32_t page : candidate_sizes(tile_bytes, sizing)) {
    double worst = 0;
    for (const int32_t tile : tile_bytes) worst = std::max(worst, waste_of(page, tile));
    if (worst < best.worst_waste) best = {page, worst};
    if (worst <= sizing.max_waste) break;
  }
  if (best.page_bytes == 0) {
    return invalid("no page of at most " + std::to_string(sizing.max_page_bytes) + " bytes holds " +
                   std::to_string(sizing.min_tokens) +
                   " tokens of the smallest format and a tile of each");
  }
  PageChoice choice;
  choice.page_bytes = best.page_bytes;
  choice.worst_waste = best.worst_waste;
  choice.within_limit = best.worst_waste <= sizing.max_waste;
  for (const int32_t tile : tile_bytes) {
    choice.tokens.push_back(best.page_bytes / tile * kTileTokens);
    choice.waste.push_back(waste_of(best.page_bytes, tile));
  }
  return choice;
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "codec/file/row_plan.h"

#include <string>

#include "codec/format/byte_cursor.h"
#include "codec/format/errors.h"

namespace tierkv {
namespace {

bool token_in(const RowPlan& plan, Component c, Part part, int64_t token) {
  switch (part) {
    case Part::kSinks:
      return token < plan.body_begin;
    case Part::kWindow:
      return token >= plan.window_begin();
    case Part::kKeyGap:
      return c == Component::kKey && token >= plan.key_body_end && token < plan.body_end;
    default:
      break;
  }
  const int64_t end = c == Component::kKey ? plan.key_body_end : plan.body_end;
  if (token < plan.body_begin || token >= end) return false;
  if (plan.tiers.empty()) return part == Part::kHigh;
  return plan.tiers[token] == (part == Part::kHigh ? Tier::kHigh : Tier::kLow);
}

}  // namespace

std::vector<int64_t> part_tokens(const RowPlan& plan, Component c, Part part) {
  std::vector<int64_t> list;
  for (int64_t t = 0; t < plan.tokens; ++t) {
    if (token_in(plan, c, part, t)) list.push_back(t);
  }
  return list;
}

Result<RowPlan> parse_row(const std::vector<uint8_t>& bytes, int64_t tokens) {
  RowPlan plan;
  ByteReader r(bytes);
  const uint64_t stated = r.u64(), body_begin = r.u64(), key_end = r.u64(), body_end = r.u64();
  const uint64_t tiered = r.u64();
  if (!r.ok()) return corrupt("cut short");
  const auto count = static_cast<uint64_t>(tokens);
  if (stated != count) return corrupt("not of as many tokens as the sequence");
  if (body_begin > key_end || key_end > body_end || body_end > count) {
    return corrupt("ranges are not in order");
  }
  if (tiered > 1 || r.left() != (tiered ? (count + 3) / 4 : 0)) {
    return corrupt("size disagrees with its fields");
  }
  plan.tokens = tokens;
  plan.body_begin = static_cast<int64_t>(body_begin);
  plan.key_body_end = static_cast<int64_t>(key_end);
  plan.body_end = static_cast<int64_t>(body_end);
  if (!tiered) return plan;
  if (key_end != body_end) return corrupt("tiers and a key gap");
  for (uint64_t i = 0; i < count; i += 4) {
    const uint32_t byte = r.u8();
    for (uint64_t j = i; j < i + 4; ++j) {
      const auto tier = static_cast<Tier>(byte >> (2 * (j - i)) & 3);
      const bool in_body = j >= body_begin && j < body_end;
      if ((tier != Tier::kWindow) != in_body) {
        return corrupt("token " + std::to_string(j) + " has a tier that its place excludes");
      }
      if (j < count) plan.tiers.push_back(tier);
    }
  }
  return plan;
}

}  // namespace tierkv

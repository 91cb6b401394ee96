// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "attention/core/workspace.h"
#include "attention/tiers/decode.h"
#include "codec/format/element.h"
#include "codec/format/errors.h"
#include "codec/format/page_layout.h"
#include "tierkv/attention.h"

namespace tierkv {
namespace {

constexpr int32_t kMaxHeads = 65535;  // CTAs along one side of a grid
constexpr int32_t kMaxLayers = 1 << 12;
constexpr int32_t kMaxGroup = 16;

Status validate_heads(const AttentionConfig& c) {
  if (c.num_layers < 1 || c.num_layers > kMaxLayers) return invalid("num_layers must be 1 to 4096");
  if (c.num_kv_heads < 1 || c.num_kv_heads > kMaxHeads) {
    return invalid("num_kv_heads must be 1 to 65535");
  }
  if (c.num_q_heads < 1 || c.num_q_heads > kMaxHeads || c.num_q_heads % c.num_kv_heads != 0) {
    return invalid("num_q_heads must be a multiple of num_kv_heads, at most 65535");
  }
  if (c.group_size() > kMaxGroup) {
    return unsupported("group of " + std::to_string(c.group_size()) +
                       " q heads per kv_head; attention needs 1 to 16");
  }
  if (!is_known_head_dim(c.head_dim)) {
    return unsupported("head_dim " + std::to_string(c.head_dim) +
                       "; attention needs 64, 96, 128 or 256");
  }
  return Status::ok();
}

Status validate_modes(const AttentionConfig& c) {
  if (c.q_len < 1) return invalid("q_len must be positive");
  if (c.q_len > kMaxQueryTokens) {
    return unsupported("q_len " + std::to_string(c.q_len) + "; attention needs 1 to 8");
  }
  if (!is_raw_dtype(c.dtype)) {
    return unsupported(std::string("dtype ") + dtype_name(c.dtype) +
                       "; attention needs float16 or bfloat16");
  }
  if (!(c.sm_scale > 0 && c.sm_scale <= kMaxSmScale)) {
    return invalid("sm_scale must be positive and finite, at most 2^80");
  }
  if (c.sliding_window_tokens < 0) return invalid("sliding_window_tokens is negative");
  if (c.sliding_window_tokens != 0) return unsupported("sliding_window_tokens");
  return Status::ok();
}

Status validate_format(const AttentionConfig& c, const TierFormat& tier) {
  const Result<PageLayout> layout =
      make_page_layout(tier, c.head_dim, c.page_bytes, c.page_records);
  if (!layout) return layout.status();
  for (const Component part : {Component::kKey, Component::kValue}) {
    const ComponentFormat& format = tier.of(part);
    const char* name = part == Component::kKey ? "key format: " : "value format: ";
    if (layout->groups(part) > 1) return unsupported(std::string(name) + "sub-groups of a head");
    if (format.basis != BasisKind::kNone) return unsupported(std::string(name) + "basis");
  }
  return Status::ok();
}

// The kernels for several classes have the loops of these pairs only.
Status validate_class_format(const AttentionConfig& c, int32_t head_class, int32_t tier) {
  const TierFormat& format = tier_format(c, tier, head_class);
  if (Status s = validate_format(c, format); !s) return s;
  const bool is_pair =
      format.k.is_raw() == format.v.is_raw() && format.v.type.bits() <= format.k.type.bits();
  return is_pair
             ? Status::ok()
             : unsupported(to_string(format) + "; values of classes have no more bits than keys");
}

Status validate_classes(const AttentionConfig& c) {
  const HeadClasses& classes = c.classes;
  if (classes.count < 1 || classes.count > kMaxAttentionClasses) {
    return invalid("classes.count must be 1 to 4");
  }
  if (classes.count == 1) return Status::ok();
  if (classes.of_head == nullptr) return invalid("classes.of_head is null");
  if (c.num_kv_heads > kClassHeads) return unsupported("classes of more than 64 kv_heads");
  if (c.num_layers > kClassLayers) return unsupported("classes of more than 128 layers");
  for (int32_t i = 0; i < c.num_layers * c.num_kv_heads; ++i) {
    if (classes.of_head[i] >= classes.count) {
      return invalid("classes.of_head[" + std::to_string(i) + "] is not below classes.count");
    }
  }
  for (int32_t k = 0; k < classes.count; ++k) {
    for (int32_t t = 0; t < c.num_tiers; ++t) {
      const std::string name = "class " + std::to_string(k) + ": tier " + std::to_string(t);
      if (Status s = validate_class_format(c, k, t); !s) return s.with_context(name);
    }
  }
  return Status::ok();
}

}  // namespace

Status AttentionConfig::validate() const {
  if (Status s = validate_heads(*this); !s) return s;
  if (Status s = validate_modes(*this); !s) return s;
  if (num_tiers < 1 || num_tiers > kMaxAttentionTiers) return invalid("num_tiers must be 1 to 3");
  for (int32_t t = 0; t < num_tiers; ++t) {
    const std::string name = "tier " + std::to_string(t);
    if (tiers[t].side < 0 || tiers[t].side >= kMaxSides) {
      return invalid(name + ": side must be 0 to 3");
    }
    if (Status s = validate_format(*this, tiers[t].format); !s) return s.with_context(name);
    for (int32_t before = 0; before < t; ++before) {
      if (tiers[before].side == tiers[t].side) return invalid(name + ": side is used twice");
    }
  }
  return validate_classes(*this);
}

Status validate_tail(const AttentionConfig& config, const AttentionTail& tail) {
  if (config.q_len == 1 || tail.is_elsewhere) return Status::ok();
  if (tail.tier < -1 || tail.tier >= config.num_tiers) return invalid("tail.tier is out of range");
  if (tail.ring_first < 0 || tail.ring_first > kMaxTierTokens) {
    return invalid("tail.ring_first is out of range");
  }
  if (tail.ring_tokens < 0 || tail.ring_tokens > kMaxTierTokens) {
    return invalid("tail.ring_tokens is out of range");
  }
  if (tail.ring_tokens > 0 && tail.ring_tokens < config.q_len) {
    return invalid("tail.ring_tokens is below q_len");
  }
  if (tail.ring_tokens > 0 && tail.newest == nullptr) {
    return invalid("tail.newest is null, which a ring needs");
  }
  return Status::ok();
}

Status check_workspace(const AttentionWorkspace& workspace, size_t needed) {
  if (workspace.memory == nullptr ||
      reinterpret_cast<uintptr_t>(workspace.memory) % kWorkspaceAlignment != 0) {
    return invalid("workspace is null or not aligned to 256 bytes");
  }
  if (workspace.bytes >= needed) return Status::ok();
  return Status(StatusCode::kBufferTooSmall, "workspace has " + std::to_string(workspace.bytes) +
                                                 " bytes, needs " + std::to_string(needed));
}

size_t attention_workspace_bytes(const AttentionConfig& config, const AttentionGrid& grid,
                                 int32_t num_sequences) {
  return workspace_layout(config, grid, num_sequences).bytes;
}

const int32_t* attention_row_status(const AttentionConfig& config, const AttentionGrid& grid,
                                    int32_t num_sequences, int32_t layer,
                                    const AttentionWorkspace& workspace) {
  const WorkspaceLayout layout = workspace_layout(config, grid, num_sequences);
  return workspace_at<const int32_t>(workspace, layout.row_status) +
         static_cast<int64_t>(layer) * num_sequences * config.num_kv_heads;
}

}  // namespace tierkv

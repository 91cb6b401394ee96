// SPDX-License-Identifier: Apache-2.0
#include "codec/format/block_cache.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "codec/format/element.h"
#include "codec/format/errors.h"
#include "codec/host/page_codec.h"

namespace tierkv {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

HostPage page_of(const BlockCache& c, int64_t block, int32_t kv_head) {
  return {c.page(block, kv_head), c.layout, c.raw_dtype, {c.rule[0], c.rule[1]}};
}

void count_error(int32_t* errors, EngineError error) {
  if (errors != nullptr) ++errors[static_cast<int32_t>(error)];
}

// The normal of a component's reflection; null: none.
const float* normal_of(const BlockCache& c, Component component, int32_t kv_head) {
  return component == Component::kKey ? c.reflection_of(kv_head) : nullptr;
}

double length(const std::vector<double>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

void write_token(const SlotEncode& e, int64_t token, int32_t kv_head) {
  const BlockCache& c = e.cache;
  const int64_t slot = e.slots[token];
  const HostPage page = page_of(c, slot / c.layout.tokens, kv_head);
  const auto in_page = static_cast<int32_t>(slot % c.layout.tokens);
  TokenCodes codes{};
  StatusCode worst = StatusCode::kOk;
  for (const Component part : kComponents) {
    const bool is_key = part == Component::kKey;
    const EngineStrides& strides = is_key ? e.k_strides : e.v_strides;
    float x[kMaxPageHeadDim];
    for (int32_t d = 0; d < c.layout.head_dim(); ++d) {
      x[d] = load_element(is_key ? e.k : e.v, e.dtype,
                          token * strides.token + kv_head * strides.head + d);
    }
    rotation_basis(c.rotation, c.layout.head_dim()).apply(x, 1);
    reflect(normal_of(c, part, kv_head), c.layout.head_dim(), x);
    worst = std::max(worst, quantize_side(page, part, x, &codes.of(part)));
  }
  if (worst == StatusCode::kOk) return store_token(page, in_page, codes);
  count_error(e.errors, worst == StatusCode::kNonFinite ? EngineError::kNonFiniteTokens
                                                        : EngineError::kOutOfRangeTokens);
  clear_slot(page, in_page);
}

}  // namespace

Basis rotation_basis(const Rotation& rotation, int32_t head_dim) {
  return rotation.is_on ? Basis::hadamard(head_dim) : Basis::none(head_dim);
}

Rotation hadamard_rotation(int32_t head_dim) {
  Rotation r;
  r.is_on = true;
  const std::vector<float> signs = hadamard_signs(head_dim);
  for (int32_t d = 0; d < head_dim; ++d) {
    if (signs[d] < 0) r.negative[d / 32] |= 1u << (d % 32);
  }
  return r;
}

Status key_reflections(const Rotation& rotation, const float* key_mean, int32_t num_kv_heads,
                       int32_t head_dim, float* out) {
  for (int64_t i = 0; i < int64_t{num_kv_heads} * head_dim; ++i) {
    if (!std::isfinite(key_mean[i])) {
      return Status(StatusCode::kNonFinite,
                    "key_mean of kv_head " + std::to_string(i / head_dim) + " is not finite");
    }
  }
  std::vector<double> x(head_dim);
  for (int32_t h = 0; h < num_kv_heads; ++h) {
    const int64_t row = int64_t{h} * head_dim;
    for (int32_t d = 0; d < head_dim; ++d) x[d] = rotation.with_sign(d, key_mean[row + d]);
    if (rotation.is_on) hadamard(x.data(), head_dim);
    const double norm = length(x);
    const double sum = std::accumulate(x.begin(), x.end(), 0.0);
    for (double& y : x) {
      y = norm == 0 ? 0
                    : y / norm + std::copysign(1 / std::sqrt(static_cast<double>(head_dim)), sum);
    }
    const double farther = norm == 0 ? 1 : length(x);
    for (int32_t d = 0; d < head_dim; ++d) out[row + d] = static_cast<float>(x[d] / farther);
  }
  return Status::ok();
}

Status BlockCache::validate() const {
  if (base == nullptr || reinterpret_cast<uintptr_t>(base) % kPageAlignment != 0) {
    return invalid("cache is null or not aligned to 128 bytes");
  }
  if (!is_page_layout(layout) || layout.has_records() || layout.k_groups > 1 ||
      layout.v_groups > 1) {
    return invalid("layout is not one of an engine's pages");
  }
  if (num_blocks < 1) return invalid("num_blocks must be positive");
  if (num_kv_heads < 1 || num_kv_heads > 1 << 16) {
    return invalid("num_kv_heads must be 1 to 65536");
  }
  if (page_bytes < layout.used_bytes || page_bytes % kPageAlignment != 0) {
    return invalid("page_bytes is below a page or no multiple of 128");
  }
  if (block_stride < int64_t{num_kv_heads} * page_bytes || block_stride % kPageAlignment != 0) {
    return invalid("block_stride is below a block or no multiple of 128");
  }
  if (num_blocks > INT64_MAX / block_stride) return invalid("num_blocks is out of range");
  if (!is_raw_dtype(raw_dtype)) return invalid("raw_dtype must be float16 or bfloat16");
  for (const Component c : kComponents) {
    if (!is_page_rule(rule[static_cast<int>(c)], layout.tile(c).type)) {
      return invalid("rule is none that pages of these bits have");
    }
  }
  return Status::ok();
}

Status SlotEncode::validate() const {
  if (Status s = cache.validate(); !s) return s;
  if (!is_raw_dtype(dtype)) return invalid("dtype must be float16 or bfloat16");
  if (count < 0 || count > INT32_MAX / cache.num_kv_heads) {
    return invalid("count of tokens is out of range");
  }
  if (count > 0 && (k == nullptr || v == nullptr || slots == nullptr)) {
    return invalid("keys, values or slots are null");
  }
  return Status::ok();
}

Status BlockDecode::validate() const {
  if (Status s = cache.validate(); !s) return s;
  if (!is_raw_dtype(dtype)) return invalid("dtype must be float16 or bfloat16");
  if (count < 0 || max_tokens < 0 || num_rows < 0) return invalid("a count is negative");
  if (count == 0 || max_tokens == 0) return Status::ok();
  if (int64_t{count} * max_tokens > INT32_MAX / cache.num_kv_heads) {
    return invalid("count times max_tokens is out of range");
  }
  if (block_table == nullptr || starts == nullptr) {
    return invalid("block_table or starts is null");
  }
  if (num_sequences < 1 || table_stride < 1) {
    return invalid("the block table has no sequences or no columns");
  }
  for (const void* p : {k, v}) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) {
      return invalid("keys or values are not aligned to 16 bytes");
    }
  }
  return Status::ok();
}

Status encode_slots_host(const SlotEncode& e) {
  if (Status s = e.validate(); !s) return s;
  const BlockCache& c = e.cache;
  const int64_t end = c.num_blocks * c.layout.tokens;
  for (int64_t i = 0; i < e.count; ++i) {
    const int64_t slot = e.slots[i];
    if (slot < -1 || slot >= end) count_error(e.errors, EngineError::kStraySlots);
    if (slot < 0 || slot >= end || slot % kTileTokens != 0) continue;
    for (int32_t h = 0; h < c.num_kv_heads; ++h) {
      clear_tile(page_of(c, slot / c.layout.tokens, h),
                 static_cast<int32_t>(slot % c.layout.tokens) / kTileTokens);
    }
  }
  for (int64_t i = 0; i < e.count; ++i) {
    if (e.slots[i] < 0 || e.slots[i] >= end) continue;
    for (int32_t h = 0; h < c.num_kv_heads; ++h) write_token(e, i, h);
  }
  return Status::ok();
}

Status decode_blocks_host(const BlockDecode& d) {
  if (Status s = d.validate(); !s) return s;
  const BlockCache& c = d.cache;
  const int32_t dim = c.layout.head_dim();
  for (int32_t i = 0; i < d.count && d.max_tokens > 0; ++i) {
    const int32_t sequence = d.sequences == nullptr ? i : d.sequences[i];
    for (int32_t t = 0; t < d.starts[i + 1] - d.starts[i] && t < d.max_tokens; ++t) {
      const int64_t row = int64_t{d.starts[i]} + t;
      const int64_t token = (d.first == nullptr ? 0 : int64_t{d.first[i]}) + t;
      const int64_t column = token / c.layout.tokens;
      if (row < 0 || row >= d.num_rows) continue;
      const bool is_there =
          sequence >= 0 && sequence < d.num_sequences && token >= 0 && column < d.table_stride;
      const int64_t block = is_there ? d.block_table[sequence * d.table_stride + column] : -1;
      const bool is_stray = block < 0 || block >= c.num_blocks;
      for (int32_t h = 0; h < c.num_kv_heads; ++h) {
        TokenCodes codes;
        if (is_stray) {
          count_error(d.errors, EngineError::kStrayBlocks);
        } else {
          load_token(page_of(c, block, h), static_cast<int32_t>(token % c.layout.tokens), &codes);
        }
        for (const Component part : kComponents) {
          void* to = part == Component::kKey ? d.k : d.v;
          if (to == nullptr) continue;
          float x[kMaxPageHeadDim] = {};
          if (!is_stray) {
            dequantize_side(page_of(c, block, h), part, codes.of(part), x);
            reflect(normal_of(c, part, h), dim, x);
            rotation_basis(c.rotation, c.layout.head_dim()).undo(x, 1);
          }
          for (int32_t at = 0; at < dim; ++at) {
            store_element(to, d.dtype, (row * c.num_kv_heads + h) * dim + at, x[at]);
          }
        }
      }
    }
  }
  return Status::ok();
}

}  // namespace tierkv

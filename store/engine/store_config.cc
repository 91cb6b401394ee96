// SPDX-License-Identifier: Apache-2.0
// What a config must satisfy, and what follows from it.
#include <algorithm>
#include <functional>
#include <ranges>
#include <string>

#include "codec/format/element.h"
#include "codec/format/errors.h"
#include "codec/policy/profile.h"
#include "store/engine/engine.h"
#include "store/rows/row_format.h"

namespace tierkv {
namespace {

using store::kMaxSinkTokens;
using store::kMaxWindowTokens;

Status check_range(const char* name, int64_t x, int64_t least, int64_t most) {
  if (x >= least && x <= most) return Status::ok();
  return invalid(std::string(name) + ": " + std::to_string(x) + " is not " + std::to_string(least) +
                 " to " + std::to_string(most));
}

Status check_layout(const CacheLayout& layout) {
  if (Status s = layout.validate(); !s) return s.with_context("layout");
  if (!is_raw_dtype(layout.dtype)) return unsupported("layout.dtype: not float16 or bfloat16");
  if (!is_known_head_dim(layout.head_dim)) {
    return unsupported("layout.head_dim: " + std::to_string(layout.head_dim) +
                       "; a store needs 64, 96, 128 or 256");
  }
  return Status::ok();
}

Status check_raw_layers(const StoreConfig& config) {
  const std::vector<int32_t>& layers = config.raw_layers;
  if (layers.empty()) return Status::ok();
  const bool ascend = std::ranges::adjacent_find(layers, std::greater_equal()) == layers.end();
  if (ascend && layers.front() >= 0 && layers.back() < config.layout.num_layers) {
    return Status::ok();
  }
  return invalid("raw_layers: they must ascend and be below num_layers");
}

Status check_rope(const StoreConfig& config) {
  const size_t count = config.rope.size();
  if (count > 1 && count != static_cast<size_t>(config.layout.num_layers)) {
    return invalid("rope: one of all layers, or num_layers");
  }
  const Rope* rotated = nullptr;
  for (const Rope& rope : config.rope) {
    if (Status s = rope.validate(config.layout.head_dim); !s) return s.with_context("rope");
    if (rope.pairing == RopePairing::kNone) continue;
    if (rotated == nullptr) rotated = &rope;
    if (rope.pairing != rotated->pairing || rope.rotary_dims != rotated->rotary_dims) {
      return invalid("rope: layers that rotate differ in pairing or rotary_dims");
    }
  }
  return Status::ok();
}

Status check_profile(const StoreConfig& config) {
  if (config.profile == nullptr) return Status::ok();
  const Profile& profile = *config.profile;
  Status s = profile.validate();
  if (s) s = profile.check_model(config.layout, "");
  for (int32_t l = 0; s && l < config.layout.num_layers && !config.rope.empty(); ++l) {
    const Rope* known = profile.rope_of(l);
    const Rope& given = config.rope[config.rope.size() == 1 ? 0 : l];
    if (known != nullptr && *known != given) {
      s = invalid("its rotation of layer " + std::to_string(l) + " is not rope's");
    }
  }
  return s.with_context("profile");
}

}  // namespace

Status StoreConfig::validate() const {
  if (Status s = check_layout(layout); !s) return s;
  if (Status s = check_range("sink_tokens", sink_tokens, 0, kMaxSinkTokens); !s) return s;
  if (Status s = check_range("window_tokens", window_tokens, kMaxStepTokens, kMaxWindowTokens); !s)
    return s;
  if (Status s = check_range("max_sequences", max_sequences, 1, kMaxSequences); !s) return s;
  if (Status s = check_range("max_tokens", max_tokens, 1, 1 << 24); !s) return s;
  if (Status s = check_range("memory_bytes", memory_bytes, 1, int64_t{1} << 46); !s) return s;
  if (Status s = check_range("page_bytes", page_bytes, 0, kMaxPageBytes); !s) return s;
  if (page_bytes % kPageAlignment != 0) return invalid("page_bytes: not a multiple of 128");
  if (Status s = check_raw_layers(*this); !s) return s;
  if (Status s = check_rope(*this); !s) return s;
  if (Status s = check_profile(*this); !s) return s;
  const Result<std::unique_ptr<store::RowFormat>> rows = store::make_row_format(*this);
  if (!rows) return rows.status();
  return store::store_layout(*this, **rows).status();
}

Result<TokenCapacity> tokens_that_fit(const StoreConfig& config) {
  if (Status s = config.validate(); !s) return s;
  const Result<std::unique_ptr<store::RowFormat>> rows = store::make_row_format(config);
  const Result<store::StoreLayout> layout = store::store_layout(config, **rows);
  const int64_t pages = layout->allocator.num_pages;
  const auto fits = [&](int32_t tokens, bool at_most) {
    int64_t needed = 0;
    for (int32_t l = 0; l < config.layout.num_layers; ++l) {
      needed += (*rows)->layer_pages(l, tokens, at_most);
    }
    return needed * config.max_sequences <= pages;
  };
  const auto longest = [&](bool at_most) {
    const auto lengths = std::views::iota(1, config.max_tokens + 1);
    const auto end = std::ranges::partition_point(
        lengths, [&](int32_t tokens) { return fits(tokens, at_most); });
    return int64_t{end - lengths.begin()} * config.max_sequences;
  };
  return TokenCapacity{longest(false), longest(true)};
}

namespace store {

Result<StoreLayout> store_layout(const StoreConfig& config, const RowFormat& format) {
  const FormatSizes& sizes = format.sizes();
  StoreLayout at;
  at.laws = {config.sink_tokens, config.window_tokens, sizes.unit_tokens,
             most(sizes.unit_tokens, sizes.cut_tokens), sizes.ring_tokens};
  at.raw = RawLayout(at.laws, config.layout.head_dim);
  at.raw_bytes = int64_t{at.raw.row_bytes} * config.layout.num_kv_heads;
  at.layer_bytes = round_up(at.raw_bytes + sizes.state_bytes, 128);
  at.slot_bytes = at.layer_bytes * config.layout.num_layers;
  at.page_bytes = sizes.page_bytes;
  at.allocator.table = sizes.table;
  at.allocator.table.num_sequences = config.max_sequences;
  at.allocator.table.rows_per_sequence = sizes.rows_per_layer * config.layout.num_layers;
  at.allocator.num_pages = 1;
  if (Status s = at.allocator.validate(); !s)
    return s.with_context("max_tokens, max_sequences, num_layers");
  if (at.slot_bytes > config.memory_bytes / config.max_sequences) {
    return Status(StatusCode::kOutOfRange,
                  "memory_bytes: " + std::to_string(config.memory_bytes) +
                      " is too little; each of " + std::to_string(config.max_sequences) +
                      " sequences takes " + std::to_string(at.slot_bytes) + " without its pages");
  }
  const auto fixed = static_cast<int64_t>(allocator_bytes(at.allocator).total);
  const int64_t per_page = sizes.page_bytes + 28;  // ring, record, mark
  const int64_t left = config.memory_bytes - fixed - at.slot_bytes * config.max_sequences;
  const int64_t pages = (left - 4096) / per_page;
  if (left < 4096 + per_page) {
    return Status(StatusCode::kOutOfRange,
                  "memory_bytes: " + std::to_string(config.memory_bytes) + " is too little; " +
                      std::to_string(config.max_sequences) + " sequences take " +
                      std::to_string(config.memory_bytes - left) + " without their pages");
  }
  if (pages > sizes.most_pages) {
    return Status(StatusCode::kOutOfRange, "memory_bytes: the format can address " +
                                               std::to_string(sizes.most_pages * sizes.page_bytes) +
                                               " bytes of pages; take several stores");
  }
  at.allocator.num_pages = static_cast<int32_t>(pages);
  return at;
}

}  // namespace store
}  // namespace tierkv

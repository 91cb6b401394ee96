#include <cstdio>
#include <string>
#include <utility>

#include "store/channel/channel_shape.h"
#include "store/coded/coded_shape.h"
#include "store/tiers/store_shape.h"

namespace tierkv {
namespace {

constexpr const char* kSideNames[kStoreSides] = {"high_format", "low_format", "window_format"};

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

Status validate_formats(const KvStoreConfig& c) {
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const TierFormat& format = side_format(c, side);
    if (Status s = page_shape(format, c.layout.head_dim).status(); !s) {
      return s.with_context(kSideNames[side]);
    }
    if (format.k.step_rule == StepRule::kNorm || format.v.step_rule == StepRule::kNorm) {
      return Status(StatusCode::kUnsupported,
                    std::string(kSideNames[side]) + ": codes clipped at the norm");
    }
    if (format.k.basis != BasisKind::kNone || format.v.basis != BasisKind::kNone) {
      return Status(StatusCode::kUnsupported,
                    std::string(kSideNames[side]) + ": basis of a tier alone; set config.basis");
    }
  }
  for (const Component part : {Component::kKey, Component::kValue}) {
    const int32_t window = c.window_format.of(part).type.bits();
    const int32_t high = c.high_format.of(part).type.bits();
    if (high > window) return invalid("high_format is wider than window_format");
    if (c.low_format.of(part).type.bits() > high)
      return invalid("low_format is wider than high_format");
  }
  return Status::ok();
}

Status validate_counts(const KvStoreConfig& c) {
  if (c.policy.window_tokens < kMaxStepTokens) {
    return invalid("policy.window_tokens must be at least " + std::to_string(kMaxStepTokens));
  }
  if (c.score_interval < 1) return invalid("score_interval must be positive");
  if (c.num_pages < 1) return invalid("num_pages must be positive");
  if (c.max_sequences < 1 || c.max_sequences > kMaxSequences) {
    return invalid("max_sequences must be 1 to 1048576");
  }
  // Positions, and positions plus a window, are int32_t.
  if (c.max_tokens < 1 || c.max_tokens > (1 << 29)) return invalid("max_tokens must be 1 to 2^29");
  if (c.policy.window_tokens > (1 << 29) || c.policy.sink_tokens > (1 << 29)) {
    return invalid("policy: window_tokens and sink_tokens must be at most 2^29");
  }
  return Status::ok();
}

Result<int64_t> chosen_page_bytes(const KvStoreConfig& c) {
  if (c.page_bytes != 0) return c.page_bytes;
  const Result<PageChoice> choice =
      choose_page_size({c.window_format, c.high_format, c.low_format}, c.layout.head_dim);
  if (!choice) return choice.status();
  return int64_t{choice->page_bytes};
}

std::string component_json(const ComponentFormat& f) {
  return "{\"bits\":" + std::to_string(f.type.bits()) + ",\"group\":" + std::to_string(f.group) +
         "}";
}
std::string format_json(const TierFormat& f) {
  return "{\"k\":" + component_json(f.k) + ",\"v\":" + component_json(f.v) + "}";
}
std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", x);
  return text;
}
std::string layout_json(const CacheLayout& l) {
  return "{\"num_layers\":" + std::to_string(l.num_layers) +
         ",\"num_q_heads\":" + std::to_string(l.num_q_heads) +
         ",\"num_kv_heads\":" + std::to_string(l.num_kv_heads) +
         ",\"head_dim\":" + std::to_string(l.head_dim) + ",\"dtype\":\"" + dtype_name(l.dtype) +
         "\",\"rope_applied\":" + (l.rope_applied ? "true" : "false") +
         ",\"rope_theta\":" + number(l.rope_theta) + ",\"sm_scale\":" + number(l.sm_scale) + "}";
}

bool same_layout(const CacheLayout& a, const CacheLayout& b) {
  return a.num_layers == b.num_layers && a.num_q_heads == b.num_q_heads &&
         a.num_kv_heads == b.num_kv_heads && a.head_dim == b.head_dim && a.dtype == b.dtype &&
         a.rope_applied == b.rope_applied && a.rope_theta == b.rope_theta &&
         a.sm_scale == b.sm_scale;
}

bool same_basis(const CacheBasis* a, const CacheBasis* b) {
  return a == b || (a != nullptr && b != nullptr && *a == *b);
}

std::string basis_json(const CacheBasis* basis) {
  if (basis == nullptr) return "null";
  constexpr const char* kNames[] = {"none", "mean", "hadamard", "matrix"};
  char identity[20];
  std::snprintf(identity, sizeof(identity), "%016llx",
                static_cast<unsigned long long>(basis->identity()));
  std::string text = "{";
  for (const Component c : {Component::kKey, Component::kValue}) {
    const bool known = !basis->of(c).empty();
    text += std::string(c == Component::kKey ? "\"keys\":" : "\"values\":") +
            (known ? "\"" + std::string(kNames[static_cast<int32_t>(basis->of(c)[0].kind)]) + "\""
                   : "null") +
            ",";
  }
  return text + "\"identity\":\"" + identity + "\"}";
}

double ratio(int64_t raw, int64_t stored) {
  return stored == 0 ? 0.0 : static_cast<double>(raw) / static_cast<double>(stored);
}

}  // namespace

Status KvStoreConfig::validate() const {
  if (channel.enabled) return channel_shape(*this).status();
  if (coded.enabled) return coded_shape(*this).status();
  if (basis != nullptr) {
    if (Status s = basis->validate(layout); !s) return s.with_context("basis");
  }
  return store_shape(*this).status();
}

bool operator==(const KvStoreConfig& a, const KvStoreConfig& b) {
  return same_layout(a.layout, b.layout) && a.window_format == b.window_format &&
         a.high_format == b.high_format && a.low_format == b.low_format && a.policy == b.policy &&
         a.score_interval == b.score_interval && a.page_bytes == b.page_bytes &&
         a.num_pages == b.num_pages && a.max_sequences == b.max_sequences &&
         a.max_tokens == b.max_tokens && same_basis(a.basis.get(), b.basis.get()) &&
         a.coded == b.coded && a.channel == b.channel;
}

std::string to_json(const KvStoreConfig& c) {
  return "{\"layout\":" + layout_json(c.layout) +
         ",\"window_format\":" + format_json(c.window_format) +
         ",\"high_format\":" + format_json(c.high_format) +
         ",\"low_format\":" + format_json(c.low_format) +
         ",\"policy\":{\"alpha_high\":" + number(c.policy.alpha_high) +
         ",\"alpha_low\":" + number(c.policy.alpha_low) +
         ",\"window_tokens\":" + std::to_string(c.policy.window_tokens) +
         ",\"sink_tokens\":" + std::to_string(c.policy.sink_tokens) +
         "},\"score_interval\":" + std::to_string(c.score_interval) +
         ",\"page_bytes\":" + std::to_string(c.page_bytes) +
         ",\"num_pages\":" + std::to_string(c.num_pages) +
         ",\"max_sequences\":" + std::to_string(c.max_sequences) +
         ",\"max_tokens\":" + std::to_string(c.max_tokens) +
         ",\"basis\":" + basis_json(c.basis.get()) + ",\"coded\":" + to_json(c.coded) +
         ",\"channel\":" + to_json(c.channel) + "}";
}

Result<StoreShape> store_shape(const KvStoreConfig& c) {
  if (c.coded.enabled) {
    return Status(StatusCode::kUnsupported, "coded: this back end has no coded pages");
  }
  if (c.channel.enabled) {
    return Status(StatusCode::kUnsupported, "channel: this back end has no channel blocks");
  }
  if (Status s = c.layout.validate(); !s) return s.with_context("layout");
  if (Status s = c.policy.validate(); !s) return s.with_context("policy");
  if (Status s = validate_formats(c); !s) return s;
  if (Status s = validate_counts(c); !s) return s;
  const Result<int64_t> page_bytes = chosen_page_bytes(c);
  if (!page_bytes) return page_bytes.status().with_context("page_bytes");
  StoreShape shape;
  shape.page_bytes = *page_bytes;
  shape.raw_dtype = c.layout.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  PageTableShape& table = shape.allocator.table;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const Result<PageLayout> layout =
        make_page_layout(side_format(c, side), c.layout.head_dim, *page_bytes);
    if (!layout) return layout.status().with_context("page_bytes");
    shape.layouts[side] = *layout;
    table.tokens_per_page[side] = layout->tokens;
  }
  const int64_t rows = int64_t{c.layout.num_layers} * c.layout.num_kv_heads;
  if (rows > INT32_MAX) return invalid("layout: num_layers * num_kv_heads exceeds 2^31 - 1");
  table.num_sequences = c.max_sequences;
  table.rows_per_sequence = static_cast<int32_t>(rows);
  table.num_sides = kStoreSides;
  table.table_slots[0] =
      worst_case_pages(c.max_tokens, table.tokens_per_page[0], table.tokens_per_page[1]);
  table.table_slots[1] = pages_for(c.max_tokens, table.tokens_per_page[kWindowSide]);
  shape.allocator.num_pages = c.num_pages;
  if (Status s = shape.allocator.validate(); !s) return s.with_context("capacity");
  return shape;
}

StoreView store_view(const KvStoreConfig& config, const StoreShape& shape) {
  StoreView view;
  for (int32_t side = 0; side < kStoreSides; ++side) view.layouts[side] = shape.layouts[side];
  view.raw_dtype = shape.raw_dtype;
  view.policy = config.policy;
  view.score_interval = config.score_interval;
  view.num_kv_heads = config.layout.num_kv_heads;
  return view;
}

void count_row(const StoreView& s, const SideCounts& tokens, int32_t num_tokens,
               StoreStats* stats) {
  constexpr Tier kTiers[kStoreSides] = {Tier::kHigh, Tier::kLow, Tier::kWindow};
  int64_t kept = 0;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const PageLayout& layout = s.layouts[side];
    stats->tokens[static_cast<int32_t>(kTiers[side])] += tokens.of[side];
    stats->nominal_bytes += int64_t{tokens.of[side]} * (layout.used_bytes / layout.tokens);
    kept += tokens.of[side];
  }
  stats->tokens[static_cast<int32_t>(Tier::kPruned)] += num_tokens - kept;
  stats->raw_bytes += int64_t{num_tokens} * s.layouts[kHighSide].head_dim() * 4;
}

double StoreStats::nominal_ratio() const {
  return ratio(raw_bytes, nominal_bytes);
}
double StoreStats::pool_gain() const {
  return ratio(raw_bytes, held_bytes());
}

}  // namespace tierkv

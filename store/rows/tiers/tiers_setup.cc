// SPDX-License-Identifier: Apache-2.0
// What a config of tiers must satisfy, and what follows from it.
#include <algorithm>
#include <cmath>
#include <string>

#include "codec/format/element.h"
#include "codec/format/errors.h"
#include "codec/policy/profile.h"
#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {
namespace {

constexpr size_t kMaxClasses = 4;

// As attention over classes takes them: codes, values with no more bits than keys.
Status check_tier(const TierFormat& tier, int32_t head_dim) {
  const Result<PageShape> shape = page_shape(tier, head_dim);
  if (!shape) return shape.status();
  if (tier.k.is_raw() || tier.v.is_raw()) return unsupported("16 bits; tiers have 8, 4 or 2");
  if (shape->k_groups > 1 || shape->v_groups > 1) return unsupported("sub-groups of a head");
  if (tier.k.basis != BasisKind::kNone || tier.v.basis != BasisKind::kNone) {
    return unsupported("a basis of its own; rotate_keys and rotate_values say it");
  }
  if (tier.v.type.bits() > tier.k.type.bits()) {
    return unsupported(to_string(tier) + "; values have no more bits than keys");
  }
  return Status::ok();
}

void clip_two_bits(TierFormat* tier) {
  for (ComponentFormat* c : {&tier->k, &tier->v}) {
    if (c->type == kCodes2 && c->step_rule == StepRule::kMinMax) c->step_rule = StepRule::kNorm;
  }
}

Status check_class(const TierClass& c, int32_t head_dim) {
  if (Status s = check_tier(c.high, head_dim); !s) return s.with_context("high");
  if (Status s = check_tier(c.low, head_dim); !s) return s.with_context("low");
  const bool ordered = c.alpha_low >= 0 && c.alpha_low <= c.alpha_high;
  if (!ordered || !std::isfinite(c.alpha_high)) {
    return invalid("alpha_low must be 0 to alpha_high, both finite");
  }
  if (!(c.share >= 0 && c.share <= 1)) return invalid("share must be 0 to 1");
  return Status::ok();
}

}  // namespace

Result<RowClass> TiersRows::row_class_of(const TierFormat& high, const TierFormat& low) const {
  RowClass c;
  for (const TierFormat* tier : {&high, &low}) {
    const int32_t side = tier == &low ? kLowSide : kHighSide;
    const Result<PageLayout> layout =
        make_page_layout(*tier, config_.layout.head_dim, sizes_.page_bytes, false);
    if (!layout) return layout.status().with_context("page_bytes");
    c.layout[side] = *layout;
    c.rule[side][0] = tier->k.step_rule;
    c.rule[side][1] = tier->v.step_rule;
    c.token_bytes[side] = layout->scores / layout->tokens;
  }
  return c;
}

Status TiersRows::prepare_classes(const TiersFormat& format) {
  const int32_t dim = config_.layout.head_dim;
  if (format.classes.empty() || format.classes.size() > kMaxClasses) {
    return invalid("format.classes: 1 to 4 are needed");
  }
  std::vector<TierFormat> formats;
  for (size_t i = 0; i < format.classes.size(); ++i) {
    const TierClass& c = format.classes[i];
    if (Status s = check_class(c, dim); !s) {
      return s.with_context("format.classes[" + std::to_string(i) + "]");
    }
    formats.push_back(c.high);
    formats.push_back(c.low);
  }
  if (!config_.raw_layers.empty()) formats.push_back(raw_tier());
  sizes_.page_bytes = config_.page_bytes;
  if (config_.page_bytes == 0) {
    PageSizing sizing;
    sizing.records = false;
    const Result<PageChoice> choice = choose_page_size(formats, dim, sizing);
    if (!choice) return choice.status().with_context("format");
    sizes_.page_bytes = choice->page_bytes;
  }
  for (const TierClass& c : format.classes) {
    Result<RowClass> row_class = row_class_of(c.high, c.low);
    if (!row_class) return row_class.status();
    row_class->alphas = {c.alpha_high, c.alpha_low};
    classes_.push_back(*row_class);
  }
  if (config_.raw_layers.empty()) return Status::ok();
  Result<RowClass> raw = row_class_of(raw_tier(), raw_tier());
  if (!raw) return raw.status();
  raw->alphas = {0, 0};
  classes_.push_back(*raw);
  return Status::ok();
}

Status TiersRows::prepare_heads(const TiersFormat& format) {
  const auto heads = static_cast<size_t>(config_.layout.num_layers) * shape_.num_kv_heads;
  class_of_head_.assign(heads, 0);
  if (!format.class_of_head.empty()) {
    if (format.class_of_head.size() != heads) {
      return invalid("format.class_of_head: num_layers * num_kv_heads are needed");
    }
    for (const uint8_t c : format.class_of_head) {
      if (c >= format.classes.size()) return invalid("format.class_of_head: no such class");
    }
    class_of_head_ = format.class_of_head;
  } else if (format.classes.size() > 1) {
    if (config_.profile == nullptr || config_.profile->joint_sensitivity.empty()) {
      return invalid(
          "format.classes: several classes need a profile with the sensitivities of heads "
          "(/joint_sensitivity), which python -m tierkv.calibrate_model makes, or in C++ "
          "class_of_head");
    }
    std::vector<double> shares;
    for (size_t i = 0; i + 1 < format.classes.size(); ++i) {
      shares.push_back(format.classes[i].share);
    }
    const std::vector<int32_t> classes = assign_classes(shares, config_.profile->joint_sensitivity);
    std::copy(classes.begin(), classes.end(), class_of_head_.begin());
  }
  for (const int32_t layer : config_.raw_layers) {
    std::fill_n(class_of_head_.begin() + int64_t{layer} * shape_.num_kv_heads, shape_.num_kv_heads,
                static_cast<uint8_t>(classes_.size() - 1));
  }
  return Status::ok();
}

void TiersRows::prepare_bases(const TiersFormat& format) {
  const int32_t dim = config_.layout.head_dim;
  for (size_t i = 0; i < class_of_head_.size(); ++i) {
    if (format.rotate_keys) {
      std::vector<float> means;
      if (config_.profile != nullptr) means = config_.profile->rows[i].key_mean;
      for (float& x : means) x = saturate_to_half_range(x);
      keys_.push_back(Basis::hadamard(dim, std::move(means)));
    }
    if (format.rotate_values) values_.push_back(Basis::hadamard(dim));
  }
}

Status TiersRows::prepare() {
  auto& format = std::get<TiersFormat>(config_.format);
  for (TierClass& c : format.classes) {
    clip_two_bits(&c.high);
    clip_two_bits(&c.low);
  }
  shape_ = TiersShape(config_.layout.num_kv_heads, config_.max_tokens);
  if (Status s = prepare_classes(format); !s) return s;
  if (Status s = prepare_heads(format); !s) return s;
  prepare_bases(format);
  sizes_.unit_tokens = 1;
  sizes_.ring_tokens = static_cast<int32_t>(round_up(config_.window_tokens, kTileTokens));
  sizes_.state_bytes = shape_.state_bytes();
  sizes_.rows_per_layer = shape_.num_kv_heads;
  PageTableShape& table = sizes_.table;
  table.num_sides = 2;
  table.tokens_per_page[kHighSide] = table.tokens_per_page[kLowSide] = kFullPage;
  for (const RowClass& c : classes_) {
    table.table_slots[0] =
        most(table.table_slots[0],
             worst_case_pages(config_.max_tokens, c.layout[0].tokens, c.layout[1].tokens));
  }
  if (table.table_slots[0] > kMaxTableSlots) {
    return invalid("max_tokens: a layer may take " + std::to_string(table.table_slots[0]) +
                   " pages, a table has " + std::to_string(kMaxTableSlots) +
                   "; larger page_bytes take fewer");
  }
  return Status::ok();
}

}  // namespace tierkv::store

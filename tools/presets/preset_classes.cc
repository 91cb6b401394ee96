// SPDX-License-Identifier: Apache-2.0
#include "tools/presets/preset_classes.h"

#include <charconv>
#include <cmath>
#include <string>

#include "tools/presets/preset_text.h"

namespace tierkv::analysis {
namespace {

bool read_number(std::string_view text, double low, double high, double* value) {
  const char* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, *value);
  return error == std::errc() && end == last && *value >= low && *value <= high;
}

// Cuts `text` before the first `separator`; false where there is none.
bool cut(std::string_view* text, char separator, std::string_view* rest) {
  const size_t at = text->find(separator);
  if (at == std::string_view::npos) return false;
  *rest = text->substr(at + 1);
  *text = text->substr(0, at);
  return true;
}

Status read_format(std::string_view text, TierFormat* format) {
  const std::string quoted = "'" + std::string(text) + "'";
  Result<TierFormat> parsed = parse_tier_format(text);
  if (!parsed) return bad_preset(text.empty() ? "a format is missing" : parsed.status().message());
  for (const Component c : {Component::kKey, Component::kValue}) {
    ComponentFormat& f = parsed->of(c);
    if (f.type.bits() != 8 && f.type.bits() != 4 && f.type.bits() != 2)
      return bad_preset(quoted + ": classes of heads have 8, 4 or 2 bits");
    if (f.type.bits() == 2) f = norm_clipped();
  }
  *format = *parsed;
  return Status::ok();
}

Status read_alphas(std::string_view text, HeadClass* c) {
  const std::string quoted = "'@" + std::string(text) + "'";
  std::string_view low;
  const bool has_low = cut(&text, ':', &low);
  if (!read_number(text, 0, 1e9, &c->alpha_high) ||
      (has_low && !read_number(low, 0, 1e9, &c->alpha_low)))
    return bad_preset(quoted + ": expected @ALPHA_H or @ALPHA_H:ALPHA_L, numbers from 0 to 1e9");
  if (c->alpha_low > c->alpha_high) return bad_preset(quoted + ": alpha_l is above alpha_h");
  return Status::ok();
}

// share: 0 where it is left out.
Status read_class(std::string_view text, HeadClass* c) {
  std::string_view rest, alphas, low;
  c->share = 0;
  if (cut(&text, '*', &rest)) {
    if (!read_number(text, 0, 1, &c->share) || c->share == 0)
      return bad_preset("'" + std::string(text) + "': a share is a number above 0, up to 1");
    text = rest;
  }
  if (cut(&text, '@', &alphas)) {
    if (Status s = read_alphas(alphas, c); !s) return s;
  }
  const bool has_low = cut(&text, '/', &low);
  if (Status s = read_format(text, &c->high); !s) return s;
  c->low = c->high;
  if (!has_low) return Status::ok();
  if (Status s = read_format(low, &c->low); !s) return s;
  if (c->low.k.type.bits() > c->high.k.type.bits() || c->low.v.type.bits() > c->high.v.type.bits())
    return bad_preset("its low format is wider than its high one");
  return Status::ok();
}

Status settle_shares(std::vector<HeadClass>* classes) {
  double sum = 0;
  for (size_t i = 0; i + 1 < classes->size(); ++i) {
    if ((*classes)[i].share == 0)
      return bad_preset("class " + std::to_string(i + 1) +
                        " has no share; only the last class may leave its share out");
    sum += (*classes)[i].share;
  }
  double* last = &classes->back().share;
  if (*last == 0) *last = 1 - sum;
  if (!(*last > 0)) return bad_preset("the shares leave nothing for the last class");
  if (std::abs(sum + *last - 1) > 1e-6)
    return bad_preset("the shares sum to " + std::to_string(sum + *last) + ", not to 1");
  return Status::ok();
}

}  // namespace

Result<std::vector<HeadClass>> parse_classes(std::string_view text) {
  const auto fail = [&](const Status& s) { return s.with_context("classes=" + std::string(text)); };
  std::vector<HeadClass> classes;
  std::string_view left = text;
  for (bool more = true; more;) {
    std::string_view one = left;
    more = cut(&one, '|', &left);
    if (classes.size() == kMaxHeadClasses)
      return fail(bad_preset("more than " + std::to_string(kMaxHeadClasses) + " classes"));
    classes.emplace_back();
    if (Status s = read_class(one, &classes.back()); !s)
      return fail(s.with_context("class " + std::to_string(classes.size())));
  }
  if (Status s = settle_shares(&classes); !s) return fail(s);
  return classes;
}

}  // namespace tierkv::analysis

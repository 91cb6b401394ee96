// SPDX-License-Identifier: Apache-2.0
#include "tools/presets/scheme.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace tierkv::analysis {
namespace {

Status validate_classes(const Scheme& s, int32_t head_dim) {
  const auto invalid = [](const std::string& why) {
    return Status(StatusCode::kInvalidArgument, why);
  };
  if (s.classes.size() > kMaxHeadClasses)
    return invalid("more than " + std::to_string(kMaxHeadClasses) + " classes of heads");
  double sum = 0;
  for (size_t c = 0; c < s.classes.size(); ++c) {
    const Scheme own = s.of_class(static_cast<int32_t>(c));
    const std::string where = "class " + std::to_string(c + 1);
    const double share = s.classes[c].share;
    if (!(share > 0 && share <= 1)) return invalid(where + ": its share is not above 0, up to 1");
    sum += share;
    for (const TierFormat* f : {&own.high, &own.low}) {
      if (Status status = f->validate(head_dim); !status) return status.with_context(where);
    }
    if (Status status = own.policy.validate(); !status) return status.with_context(where);
  }
  if (!s.classes.empty() && std::abs(sum - 1) > 1e-6)
    return invalid("the shares of the classes sum to " + std::to_string(sum) + ", not to 1");
  return Status::ok();
}

}  // namespace

bool Scheme::has_fixed_pages() const {
  if (coder == Coder::kZstd || has_baseline_coder()) return false;
  const auto fixed = [](const ComponentFormat& f) {
    const bool rule = f.step_rule == StepRule::kMinMax || f.step_rule == StepRule::kNorm;
    return f.unit == Unit::kToken && rule && f.entropy == Entropy::kNone && f.type.bits() >= 2;
  };
  const auto both = [&](const TierFormat& f) { return fixed(f.k) && fixed(f.v); };
  for (const HeadClass& c : classes) {
    if (!both(c.high) || !both(c.low)) return false;
  }
  return both(high) && both(window) && (!tiered || both(low));
}

Scheme Scheme::of_class(int32_t c) const {
  Scheme s = *this;
  if (classes.empty()) return s;
  const HeadClass& own = classes[c];
  s.high = own.high;
  s.low = own.low;
  s.policy.alpha_high = own.alpha_high;
  s.policy.alpha_low = own.alpha_low;
  s.tiered = own.tiered();
  return s;
}

bool Scheme::has_unlike_classes() const {
  return std::any_of(classes.begin(), classes.end(),
                     [&](const HeadClass& c) { return !c.same_formats(classes[0]); });
}

Scheme Scheme::for_head_dim(int32_t head_dim) const {
  Scheme s = *this;
  if (s.high.k.unit == Unit::kChannel && s.high.v.unit == Unit::kToken && s.high.v.group > head_dim)
    s.high.v.group = 0;
  return s;
}

Status Scheme::validate(int32_t head_dim) const {
  if (Status s = high.validate(head_dim); !s) return s;
  if (Status s = window.validate(head_dim); !s) return s;
  if (tiered) {
    if (Status s = low.validate(head_dim); !s) return s;
  }
  if (Status s = validate_classes(*this, head_dim); !s) return s;
  return policy.validate();
}

}  // namespace tierkv::analysis

#include "codec/file/scheme.h"

namespace tierkv {

bool Scheme::has_fixed_pages() const {
  if (coder == Coder::kZstd || has_baseline_coder()) return false;
  const auto fixed = [](const ComponentFormat& f) {
    return f.unit == Unit::kToken && f.step_rule == StepRule::kMinMax &&
           f.entropy == Entropy::kNone && f.bits >= 2;
  };
  const auto both = [&](const TierFormat& f) { return fixed(f.k) && fixed(f.v); };
  return both(high) && both(window) && (!tiered || both(low));
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
  return policy.validate();
}

}  // namespace tierkv

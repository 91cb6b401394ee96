// SPDX-License-Identifier: Apache-2.0
#include "tierkv/format.h"

#include <cmath>
#include <iterator>

#include "codec/format/errors.h"
#include "tierkv/layout.h"
#include "tierkv/policy.h"
#include "tierkv/status.h"

namespace tierkv {

namespace {

constexpr const char* kStatusNames[] = {  // by StatusCode
    "ok",      "invalid_argument", "unsupported",    "non_finite", "out_of_range", "out_of_pages",
    "corrupt", "buffer_too_small", "stale_sequence", "not_found",  "io",           "cuda",
    "version", "out_of_memory"};
static_assert(std::size(kStatusNames) == static_cast<size_t>(StatusCode::kOutOfMemory) + 1);
constexpr const char* kDTypeNames[] = {"float16", "bfloat16", "float32"};  // by DType

template <class Enum, size_t kCount>
const char* name_in(const char* const (&names)[kCount], Enum value) {
  const auto i = static_cast<size_t>(value);
  return i < kCount ? names[i] : "unknown";
}

bool has_width(CodeType type) {
  const int32_t bits = type.bits();
  return type.is_raw() || bits == 8 || bits == 4 || bits == 2 || bits == 1;
}

}  // namespace

const char* status_name(StatusCode code) {
  return name_in(kStatusNames, code);
}
const char* dtype_name(DType type) {
  return name_in(kDTypeNames, type);
}

Status ComponentFormat::validate(int32_t head_dim) const {
  if (group < 0) return invalid("group is negative");
  if (!std::isfinite(step) || step < 0) return invalid("step is negative or not finite");
  if (step_rule == StepRule::kNorm) {
    if (type != CodeType::uniform(2))
      return invalid("bits must be 2 for codes clipped at the norm");
    if (unit != Unit::kToken) return invalid("codes clipped at the norm need unit=token");
  } else if (step_rule == StepRule::kMinMax) {
    if (!has_width(type)) return invalid("bits must be 16, 8, 4, 2 or 1");
    if (unit == Unit::kGlobal) return invalid("unit=global needs an absolute step");
  } else {
    if (type != CodeType::uniform(0))
      return invalid("bits must be 0 where the step decides the levels");
    if (step <= 0) return invalid("step must be positive");
  }
  if (step_rule == StepRule::kAbsolute && unit != Unit::kGlobal) {
    return invalid("an absolute step needs unit=global");
  }
  if (step_rule == StepRule::kWeighted && (unit != Unit::kToken || group != 0)) {
    return invalid("weighted steps need unit=token without groups");
  }
  if (step_rule == StepRule::kWeighted && basis != BasisKind::kNone) {
    return invalid("weighted steps have no basis");
  }
  if (unit == Unit::kToken && group > 0 && (group > head_dim || head_dim % group != 0)) {
    return invalid("group " + std::to_string(group) + " does not divide head_dim " +
                   std::to_string(head_dim));
  }
  if ((unit == Unit::kChannel || unit == Unit::kBlock) && group == 0) {
    return invalid("channel and block units need a group of tokens");
  }
  return Status::ok();
}

Status TierFormat::validate(int32_t head_dim) const {
  if (Status s = k.validate(head_dim); !s) return s.with_context("key format");
  if (Status s = v.validate(head_dim); !s) return s.with_context("value format");
  return Status::ok();
}

ComponentFormat token_wise(int32_t bits, int32_t group) {
  ComponentFormat f;
  f.type = CodeType::of_bits(bits);
  f.group = group;
  return f;
}

ComponentFormat norm_clipped(int32_t group) {
  ComponentFormat f = token_wise(2, group);
  f.step_rule = StepRule::kNorm;
  return f;
}

TierFormat token_wise_tier(int32_t k_bits, int32_t v_bits) {
  return {token_wise(k_bits), token_wise(v_bits)};
}

Result<TierFormat> parse_tier_format(std::string_view name) {
  int32_t bits[2] = {0, 0};
  bool clipped[2] = {false, false};
  size_t i = 0;
  for (int c = 0; c < 2; ++c) {
    const char letter = c == 0 ? 'k' : 'v';
    if (i >= name.size() || (name[i] | 0x20) != letter) {
      return invalid("'" + std::string(name) + "' is not of the form k8v4");
    }
    ++i;
    while (i < name.size() && name[i] >= '0' && name[i] <= '9' && bits[c] < 100) {
      bits[c] = bits[c] * 10 + (name[i++] - '0');
    }
    clipped[c] = bits[c] == 2 && i < name.size() && (name[i] | 0x20) == 'n';
    i += clipped[c];
  }
  TierFormat format = token_wise_tier(bits[0], bits[1]);
  if (i != name.size() || !has_width(format.k.type) || !has_width(format.v.type)) {
    return invalid("'" + std::string(name) +
                   "' is not of the form k8v4 with 16, 8, 4, 2, 2n or 1 bits");
  }
  if (clipped[0]) format.k = norm_clipped();
  if (clipped[1]) format.v = norm_clipped();
  return format;
}

std::string to_string(const ComponentFormat& f) {
  const std::string bits = std::to_string(f.type.bits()) + " bits";
  const std::string step = " step " + std::to_string(f.step);
  std::string s = f.step_rule == StepRule::kMinMax     ? (f.is_raw() ? "raw" : bits)
                  : f.step_rule == StepRule::kNorm     ? bits + " clipped at the norm"
                  : f.step_rule == StepRule::kRelative ? "relative" + step
                  : f.step_rule == StepRule::kAbsolute ? "absolute" + step
                                                       : "weighted" + step;
  static constexpr const char* kUnits[] = {"token", "channel", "block", "global"};
  if (!f.is_raw()) s += std::string(" per ") + kUnits[static_cast<int>(f.unit)];
  if (f.group > 0) s += " in groups of " + std::to_string(f.group);
  static constexpr const char* kBases[] = {"", ", means removed", ", Hadamard"};
  s += kBases[static_cast<int>(f.basis)];
  if (f.entropy == Entropy::kHuffman) s += ", Huffman";
  return s;
}

std::string to_string(const TierFormat& format) {
  const auto plain = [](const ComponentFormat& f) {
    const int32_t bits = f.type.bits();
    return f == norm_clipped() ? "2n" : f == token_wise(bits) ? std::to_string(bits) : "";
  };
  const std::string k = plain(format.k), v = plain(format.v);
  if (!k.empty() && !v.empty()) return "k" + k + "v" + v;
  return "keys " + to_string(format.k) + "; values " + to_string(format.v);
}

Status TierPolicy::validate() const {
  if (!std::isfinite(alpha_high) || !std::isfinite(alpha_low) || alpha_low < 0) {
    return invalid("alpha_high and alpha_low must be finite and not negative");
  }
  if (alpha_low > alpha_high) return invalid("alpha_l (alpha_low) is above alpha_h (alpha_high)");
  if (window_tokens < 0) return invalid("window is negative");
  if (sink_tokens < 0) return invalid("sinks is negative");
  return Status::ok();
}

Status CacheLayout::validate() const {
  if (num_layers < 1 || num_layers > 4096) return invalid("num_layers must be 1 to 4096");
  if (num_q_heads < 1 || num_q_heads > 4096) return invalid("num_q_heads must be 1 to 4096");
  if (num_kv_heads < 1 || num_kv_heads > num_q_heads) {
    return invalid("num_kv_heads must be 1 to num_q_heads");
  }
  if (num_q_heads % num_kv_heads != 0)
    return invalid("num_q_heads is not a multiple of num_kv_heads");
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    return invalid("head_dim must be 1 to " + std::to_string(kMaxHeadDim));
  }
  if (!std::isfinite(rope_theta) || rope_theta < 0) {
    return invalid("rope_theta must be finite and not negative");
  }
  if (!(sm_scale > 0 && sm_scale <= kMaxSmScale)) {
    return invalid("sm_scale must be positive and finite, at most 2^80");
  }
  return Status::ok();
}

}  // namespace tierkv

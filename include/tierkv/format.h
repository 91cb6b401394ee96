// SPDX-License-Identifier: Apache-2.0
// What a compressed token looks like, as data: a TierFormat is a ComponentFormat for keys and one
// for values.
//
// A ComponentFormat says how an element is stored (type), how its step is found (step_rule), which
// values share that step (unit, group), whether the codes are entropy coded and in which basis they
// are taken. Formats are plain values: compare them, print them, send them; code never branches on
// named combinations.
//
// Sources: DiffKV section 4 (token-wise K8V4/K4V2), KVComp section 3.1 (relative steps per block,
// channel and token), KIVI (channel-wise keys); the absolute step and the bases are ours
// (docs/internals/architecture.md, "Quantisation").
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tierkv/export.h"
#include "tierkv/half.h"
#include "tierkv/status.h"

namespace tierkv {

enum class Component : int32_t { kKey = 0, kValue = 1 };

enum class CodeKind : int32_t {
  kUniform = 0,  // integers, at equal distances
  kRaw16 = 1,    // fp16 or bfloat16 as it came
};

// How one element of keys or values is stored. Kind and bits share one word, so that kernels
// compare types in one instruction; make a type by name, not from a word.
struct CodeType {
  int32_t word;

  CodeType() = default;
  // Explicit, so that no number of bits passes for a type.
  TKV_HD explicit constexpr CodeType(int32_t from) : word(from) {}

  TKV_HD static constexpr CodeType raw16() { return make(CodeKind::kRaw16, 16); }
  // 0 bits: the step decides how many levels there are. A width outside 0 to 255 becomes 255, which
  // no format takes.
  TKV_HD static constexpr CodeType uniform(int32_t bits) {
    return make(CodeKind::kUniform, bits >= 0 && bits < 256 ? bits : 255);
  }
  // The number by which files and the C interface name a type, and back: bits().
  TKV_HD static constexpr CodeType of_bits(int32_t bits) {
    return bits == 16 ? raw16() : uniform(bits);
  }

  TKV_HD constexpr CodeKind kind() const { return static_cast<CodeKind>(word >> 8); }
  TKV_HD constexpr int32_t bits() const { return word & 255; }
  TKV_HD constexpr bool is_raw() const { return word == raw16().word; }
  // A group of codes has a scale and a zero point.
  TKV_HD constexpr bool has_params() const { return !is_raw(); }
  TKV_HD constexpr int32_t levels() const { return 1 << bits(); }
  TKV_HD constexpr int64_t bytes_of(int64_t codes) const { return (codes * bits() + 7) / 8; }
  TKV_HD friend constexpr bool operator==(CodeType a, CodeType b) { return a.word == b.word; }
  TKV_HD friend constexpr bool operator!=(CodeType a, CodeType b) { return a.word != b.word; }

 private:
  TKV_HD static constexpr CodeType make(CodeKind kind, int32_t bits) {
    return CodeType(static_cast<int32_t>(kind) << 8 | bits);
  }
};

enum class StepRule : int32_t {
  kMinMax = 0,    // scale = (max - min) / (levels - 1) of the unit
  kRelative = 1,  // scale = rel_step * (max - min) of the unit; the number of levels follows
  kAbsolute = 2,  // one step per (layer, kv_head, component), no zero point
  kWeighted = 3,  // one step per row, a power of 2^(1/8) per token, a weight per channel
  kNorm = 4,      // 2 bits: scale = 0.9957 root mean squares of the unit, codes clipped
};

enum class Unit : int32_t {
  kToken = 0,    // one token of one head, or `group` channels of it
  kChannel = 1,  // one channel over `group` consecutive tokens
  kBlock = 2,    // `group` consecutive tokens of one head, all channels
  kGlobal = 3,   // everything of one (layer, kv_head, component): StepRule::kAbsolute only
};

enum class Entropy : int32_t { kNone = 0, kHuffman = 1 };

enum class BasisKind : int32_t {
  kNone = 0,
  kMean = 1,      // static channel means removed
  kHadamard = 2,  // orthonormal Hadamard with seeded signs
};

struct TKV_API ComponentFormat {
  // kMinMax: raw, or 8, 4, 2 or 1 bits. kNorm: 2 bits. 0 bits where the step decides.
  CodeType type = CodeType::raw16();
  StepRule step_rule = StepRule::kMinMax;
  Unit unit = Unit::kToken;
  int32_t group =
      0;  // kToken: channels per group, 0 = head_dim. kChannel, kBlock: tokens per unit (required)
  double step = 0;  // kRelative: fraction of the range. kAbsolute, kWeighted: k or v, the error
                    // the step aims at
  Entropy entropy = Entropy::kNone;
  BasisKind basis = BasisKind::kNone;

  bool is_raw() const { return type.is_raw(); }
  // kInvalidArgument or kUnsupported with the field's name, for head_dim channels.
  Status validate(int32_t head_dim) const;
  friend bool operator==(const ComponentFormat& a, const ComponentFormat& b) {
    return a.type == b.type && a.step_rule == b.step_rule && a.unit == b.unit &&
           a.group == b.group && a.step == b.step && a.entropy == b.entropy && a.basis == b.basis;
  }
  friend bool operator!=(const ComponentFormat& a, const ComponentFormat& b) { return !(a == b); }
};

struct TKV_API TierFormat {
  ComponentFormat k;
  ComponentFormat v;

  const ComponentFormat& of(Component c) const { return c == Component::kKey ? k : v; }
  ComponentFormat& of(Component c) { return c == Component::kKey ? k : v; }
  Status validate(int32_t head_dim) const;
  friend bool operator==(const TierFormat& a, const TierFormat& b) {
    return a.k == b.k && a.v == b.v;
  }
  friend bool operator!=(const TierFormat& a, const TierFormat& b) { return !(a == b); }
};

// Token-wise min-max (bits < 16) or raw (bits = 16).
TKV_API ComponentFormat token_wise(int32_t bits, int32_t group = 0);
// Token-wise 2 bits, clipped at the norm.
TKV_API ComponentFormat norm_clipped(int32_t group = 0);
TKV_API TierFormat token_wise_tier(int32_t k_bits, int32_t v_bits);
inline TierFormat raw_tier() {
  return {};
}

// "k8v4" or "K8V4" with bits in {16, 8, 4, 2, 1} or "2n", 2 bits clipped at the norm;
// kInvalidArgument otherwise.
TKV_API Result<TierFormat> parse_tier_format(std::string_view name);
// "k8v4" where the format is token-wise or raw; a longer description otherwise.
TKV_API std::string to_string(const TierFormat& format);
TKV_API std::string to_string(const ComponentFormat& format);

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// How a dump and a profile say that keys are rotated.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/analysis/layer_data.h"

namespace tierkv::analysis {
namespace {

// Frequencies of one model that were computed in other ways differ by roundings of fp32.
constexpr float kTolerance = 1e-5f;

bool agree(const Rope& a, const Rope& b) {
  if (a.pairing != b.pairing || a.rotary_dims != b.rotary_dims) return false;
  for (size_t i = 0; i < a.inv_freq.size(); ++i) {
    const float x = a.inv_freq[i], y = b.inv_freq[i];
    if (std::abs(x - y) > kTolerance * std::max(x, y)) return false;
  }
  return true;
}

const char* pairing_name(const Rope& rope) {
  return rope.pairing == RopePairing::kHalves ? "halves" : "neighbours";
}

}  // namespace

const Rope* rope_of(const datasets::DumpInfo& info, const Profile* profile, int32_t layer) {
  if (!info.rope.empty()) return &info.rope[info.rope.size() == 1 ? 0 : layer];
  return profile == nullptr ? nullptr : profile->rope_of(layer);
}

Status check_rope(const datasets::DumpInfo& info, const Profile* profile) {
  if (profile == nullptr || info.rope.empty() || profile->rope.empty()) return Status::ok();
  for (int32_t l = 0; l < info.layout.num_layers; ++l) {
    if (agree(*rope_of(info, nullptr, l), *profile->rope_of(l))) continue;
    return Status(StatusCode::kInvalidArgument,
                  info.path + ": the rotation of keys (RoPE) in layer " + std::to_string(l) +
                      " is not that of the profile");
  }
  return Status::ok();
}

std::string describe_rope(const datasets::DumpInfo& info, const Profile* profile) {
  const Rope* first = rope_of(info, profile, 0);
  if (first == nullptr) return "rotation of keys unknown: keys compressed as stored";
  if (first->pairing == RopePairing::kNone) return "keys are not rotated";
  const std::string source = info.rope.empty() ? ", by the profile" : "";
  const CacheLayout& l = info.layout;
  for (int32_t layer = 1; layer < l.num_layers; ++layer) {
    if (*rope_of(info, profile, layer) == *first) continue;
    return fmt::format("keys before RoPE: {} of {} dims, frequencies by layer{}",
                       pairing_name(*first), first->rotary_dims, source);
  }
  if (l.rope_theta > 0 && agree(*first, Rope::plain(l.rope_theta, l.head_dim))) {
    return fmt::format("keys before RoPE: plain, theta {}{}", l.rope_theta, source);
  }
  return fmt::format("keys before RoPE: {} of {} dims, own frequencies{}", pairing_name(*first),
                     first->rotary_dims, source);
}

}  // namespace tierkv::analysis

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

bool turns(const Rope& rope) {
  return std::any_of(rope.inv_freq.begin(), rope.inv_freq.end(), [](float f) { return f > 0; });
}

// Frequencies that are all 0 are no rotation, whatever the pairing.
bool agree(const Rope& a, const Rope& b) {
  if (!turns(a) && !turns(b)) return true;
  if (a.pairing != b.pairing || a.rotary_dims != b.rotary_dims) return false;
  for (size_t i = 0; i < a.inv_freq.size(); ++i) {
    const float x = a.inv_freq[i], y = b.inv_freq[i];
    if (std::abs(x - y) > kTolerance * std::max(x, y)) return false;
  }
  return true;
}

}  // namespace

const Rope* rope_of(const datasets::DumpInfo& info, const Profile* profile, int32_t layer) {
  if (!info.rope.empty()) return &info.rope[info.rope.size() == 1 ? 0 : layer];
  return profile == nullptr ? nullptr : profile->rope_of(layer);
}

Status check_rope(const datasets::DumpInfo& info, const Profile* profile) {
  if (profile == nullptr || profile->rope.empty()) return Status::ok();
  if (info.rope.empty()) {
    const bool rotated =
        std::any_of(profile->rope.begin(), profile->rope.end(),
                    [](const Rope& rope) { return rope.pairing != RopePairing::kNone; });
    if (info.layout.rope_applied == rotated) return Status::ok();
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("{}: rope_applied is {}, but keys of the profile are {}rotated (RoPE)",
                    info.path, info.layout.rope_applied ? 1 : 0, rotated ? "" : "not "));
  }
  for (int32_t l = 0; l < info.layout.num_layers; ++l) {
    if (agree(*rope_of(info, nullptr, l), *profile->rope_of(l))) continue;
    return Status(StatusCode::kInvalidArgument,
                  info.path + ": the rotation of keys (RoPE) in layer " + std::to_string(l) +
                      " is not that of the profile");
  }
  return Status::ok();
}

std::string rotation_text(const std::vector<Rope>& rope, const CacheLayout& layout) {
  if (rope.empty()) return "rotation unknown";
  const auto first = std::find_if(rope.begin(), rope.end(), turns);
  if (first == rope.end()) return "no rotation";
  const bool same =
      std::all_of(rope.begin(), rope.end(), [&](const Rope& r) { return agree(r, *first); });
  if (same && layout.rope_theta > 0 &&
      agree(*first, Rope::plain(layout.rope_theta, layout.head_dim))) {
    return fmt::format("plain, theta {}", layout.rope_theta);
  }
  return fmt::format("{} of {} dims, {}",
                     first->pairing == RopePairing::kHalves ? "halves" : "neighbours",
                     first->rotary_dims, same ? "own frequencies" : "frequencies by layer");
}

std::string describe_rope(const datasets::DumpInfo& info, const Profile* profile) {
  const bool own = !info.rope.empty() || profile == nullptr;
  const std::vector<Rope>& rope = own ? info.rope : profile->rope;
  if (rope.empty()) return "rotation of keys unknown: keys compressed as stored";
  if (std::none_of(rope.begin(), rope.end(), turns)) return "keys are not rotated";
  return "keys before RoPE: " + rotation_text(rope, info.layout) + (own ? "" : ", by the profile");
}

}  // namespace tierkv::analysis

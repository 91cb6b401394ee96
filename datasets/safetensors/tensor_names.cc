// SPDX-License-Identifier: Apache-2.0
#include "datasets/safetensors/tensor_names.h"

#include <string_view>

namespace tierkv::datasets {
namespace {

constexpr std::string_view kSeq = "{seq}", kLayer = "{layer}", kPart = "{part}";

size_t count_of(const std::string& text, std::string_view what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

std::string replaced(std::string text, std::string_view what, const std::string& by) {
  const size_t at = text.find(what);
  return at == std::string::npos ? text : text.replace(at, what.size(), by);
}

// Matches a name against a pattern, left to right. A sequence's id may have any length: the matcher
// tries them all, the shortest first.
class Matcher {
 public:
  Matcher(const TensorNames& names, TensorNames::Place* place) : names_(names), place_(*place) {}

  bool match(std::string_view pattern, std::string_view name) {
    while (!pattern.empty() && pattern[0] != '{') {
      if (name.empty() || name[0] != pattern[0]) return false;
      pattern.remove_prefix(1);
      name.remove_prefix(1);
    }
    if (pattern.empty()) return name.empty();
    if (pattern.starts_with(kLayer)) return match_layer(pattern.substr(kLayer.size()), name);
    if (pattern.starts_with(kPart)) return match_part(pattern.substr(kPart.size()), name);
    pattern.remove_prefix(kSeq.size());
    for (size_t n = 1; n <= name.size(); ++n) {
      if (!match(pattern, name.substr(n))) continue;
      place_.seq = name.substr(0, n);
      return true;
    }
    return false;
  }

 private:
  bool match_layer(std::string_view pattern, std::string_view name) {
    constexpr size_t kMaxDigits = 5;
    int32_t layer = 0;
    size_t n = 0;
    while (n < name.size() && n < kMaxDigits && name[n] >= '0' && name[n] <= '9') {
      layer = 10 * layer + (name[n++] - '0');
    }
    if (n == 0 || (n > 1 && name[0] == '0') || !match(pattern, name.substr(n))) return false;
    place_.layer = layer;
    return true;
  }
  bool match_part(std::string_view pattern, std::string_view name) {
    for (const DumpPart part : kDumpParts) {
      const std::string& text = names_.parts[static_cast<int>(part)];
      if (!name.starts_with(text) || !match(pattern, name.substr(text.size()))) continue;
      place_.part = part;
      return true;
    }
    return false;
  }

  const TensorNames& names_;
  TensorNames::Place& place_;
};

}  // namespace

TensorNames TensorNames::hugging_face() {
  TensorNames names;
  names.layer = "past_key_values.{layer}.{part}";
  names.tokens = "input_ids";
  names.parts = {"key", "value", "query", "query_positions", "significance"};
  names.axes = TensorAxes::kBatchHeadTokenDim;
  return names;
}

Status TensorNames::validate() const {
  const auto refuse = [](const char* what, const std::string& text, const std::string& why) {
    return Status(StatusCode::kInvalidArgument, std::string(what) + " '" + text + "': " + why);
  };
  if (count_of(layer, kLayer) != 1 || count_of(layer, kPart) != 1 || count_of(layer, kSeq) > 1)
    return refuse("names", layer, "expected {layer} and {part} once each and {seq} at most once");
  if (count_of(layer, "{") != 2 + count_of(layer, kSeq))
    return refuse("names", layer, "a '{' that begins none of {seq}, {layer}, {part}");
  if (layer.find("}{") != std::string::npos)
    return refuse("names", layer, "there must be text between {...} and {...}");
  if (count_of(tokens, kSeq) != count_of(layer, kSeq) ||
      count_of(tokens, "{") != count_of(tokens, kSeq) || tokens.empty()) {
    return refuse("tokens-name", tokens,
                  "expected {seq} as often as in '" + layer + "', and no other '{'");
  }
  for (int i = 0; i < kNumDumpParts; ++i) {
    if (parts[i].empty()) return refuse("part", parts[i], "a part has no name");
    for (int j = 0; j < i; ++j) {
      if (parts[i] == parts[j]) return refuse("part", parts[i], "two parts have this name");
    }
  }
  return Status::ok();
}

std::string TensorNames::layer_name(const std::string& seq, int32_t layer_index,
                                    DumpPart part) const {
  // The sequence comes last: its id may hold braces.
  return replaced(replaced(replaced(layer, kLayer, std::to_string(layer_index)), kPart,
                           parts[static_cast<int>(part)]),
                  kSeq, seq);
}

std::string TensorNames::tokens_name(const std::string& seq) const {
  return replaced(tokens, kSeq, seq);
}

bool TensorNames::match_layer(const std::string& name, Place* place) const {
  *place = {};
  return Matcher(*this, place).match(layer, name);
}

bool TensorNames::match_tokens(const std::string& name, std::string* seq) const {
  Place place;
  if (!Matcher(*this, &place).match(tokens, name)) return false;
  *seq = place.seq;
  return true;
}

}  // namespace tierkv::datasets

// SPDX-License-Identifier: Apache-2.0
#include "tools/presets/preset_text.h"

#include <charconv>

namespace tierkv::analysis {
namespace {

constexpr std::pair<const char*, Coder> kStages[] = {{"huffman", Coder::kHuffman},
                                                     {"fse", Coder::kFse},
                                                     {"fixed", Coder::kFixed},
                                                     {"bitshuffle", Coder::kBitshuffle}};

Status read_suffix(std::string_view suffix, PresetText* parts) {
  const auto twice = [&] {
    return bad_preset("suffix '+" + std::string(suffix) +
                      "' is given twice, or after another stage");
  };
  if (suffix == "rot") {
    if (parts->rotate) return twice();
    parts->rotate = true;
    return Status::ok();
  }
  for (const auto& [name, coder] : kStages) {
    if (suffix != name) continue;
    if (parts->stage != Coder::kNone) return twice();
    parts->stage = coder;
    return Status::ok();
  }
  return bad_preset("unknown suffix '+" + std::string(suffix) +
                    "' (there are +huffman, +fse, +fixed, +bitshuffle and +rot)");
}

std::string short_number(double v) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), v);
  return error == std::errc() ? std::string(buffer, end) : "?";
}

}  // namespace

Status bad_preset(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

Result<PresetText> split_preset(std::string_view text) {
  PresetText parts;
  std::string_view rest = text;
  const size_t plus = rest.find('+');
  std::string_view suffixes = plus == std::string_view::npos ? "" : rest.substr(plus);
  rest = rest.substr(0, plus);
  while (!suffixes.empty()) {
    suffixes.remove_prefix(1);
    const std::string_view suffix = suffixes.substr(0, suffixes.find('+'));
    suffixes.remove_prefix(suffix.size());
    if (Status status = read_suffix(suffix, &parts); !status) return status;
  }
  const size_t colon = rest.find(':');
  parts.name = std::string(rest.substr(0, colon));
  if (colon == std::string_view::npos) return parts;
  rest.remove_prefix(colon + 1);
  for (bool more = true; more;) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos || equals == 0) {
      return bad_preset("'" + std::string(item) + "' is not key=value");
    }
    const std::string key(item.substr(0, equals));
    if (!parts.keys.emplace(key, std::string(item.substr(equals + 1))).second) {
      return bad_preset("key '" + key + "' is given twice");
    }
    more = comma != std::string_view::npos;
    if (more) rest.remove_prefix(comma + 1);
  }
  return parts;
}

void KeyReader::number(const char* key, double* value, double low, double high) {
  std::string text;
  if (!take(key, &text)) return;
  double v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc() || end != text.data() + text.size() || !(v >= low && v <= high)) {
    fail(key, text, "a number from " + short_number(low) + " to " + short_number(high));
    return;
  }
  *value = v;
}

void KeyReader::count(const char* key, int32_t* value, int32_t low, int32_t high) {
  std::string text;
  if (!take(key, &text)) return;
  int32_t v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc() || end != text.data() + text.size() || v < low || v > high) {
    fail(key, text, "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
    return;
  }
  *value = v;
}

void KeyReader::word(const char* key, std::string* value, const std::vector<std::string>& allowed) {
  std::string text;
  if (!take(key, &text)) return;
  std::string list;
  for (const std::string& a : allowed) {
    if (a == text) {
      *value = text;
      return;
    }
    list += (list.empty() ? "" : ", ") + a;
  }
  fail(key, text, "one of " + list);
}

void KeyReader::format(const char* key, TierFormat* value) {
  std::string text;
  if (!take(key, &text)) return;
  Result<TierFormat> parsed = parse_tier_format(text);
  if (!parsed) {
    fail(key, text, "a format such as k8v4");
    return;
  }
  *value = *parsed;
}

bool KeyReader::take(const char* key, std::string* value) {
  const auto it = keys_.find(key);
  if (it == keys_.end()) return false;
  *value = it->second;
  keys_.erase(it);
  return true;
}

void KeyReader::refuse(const char* key, const std::string& why) {
  std::string text;
  if (take(key, &text) && status_) status_ = bad_preset(std::string(key) + "=" + text + ": " + why);
}

Status KeyReader::finish(const std::string& name) const {
  if (!status_) return status_;
  if (!keys_.empty())
    return bad_preset("preset '" + name + "' has no key '" + keys_.begin()->first + "'");
  return Status::ok();
}

void KeyReader::fail(const char* key, const std::string& text, const std::string& expected) {
  if (status_) status_ = bad_preset(std::string(key) + "=" + text + ": expected " + expected);
}

}  // namespace tierkv::analysis

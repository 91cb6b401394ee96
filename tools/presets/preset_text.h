// SPDX-License-Identifier: Apache-2.0
// The text of a preset before it means anything: its name, keys and suffixes.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tools/presets/preset.h"

namespace tierkv::analysis {

// kInvalidArgument with the message.
Status bad_preset(const std::string& message);

// The parts of `NAME[:key=value,...][+suffix]...`, still text.
struct PresetText {
  std::string name;
  std::map<std::string, std::string> keys;
  Coder stage = Coder::kNone;  // of a suffix
  bool rotate = false;
};

// kInvalidArgument for an unknown suffix, one too many, and keys without value or given twice.
Result<PresetText> split_preset(std::string_view text);

// Takes values out of the keys; the first failure is kept, what is left over at the end is unknown.
// A key that is not there leaves the value as it is.
class KeyReader {
 public:
  explicit KeyReader(std::map<std::string, std::string> keys) : keys_(std::move(keys)) {}

  void number(const char* key, double* value, double low, double high);
  void count(const char* key, int32_t* value, int32_t low, int32_t high);
  void word(const char* key, std::string* value, const std::vector<std::string>& allowed);
  void format(const char* key, TierFormat* value);
  bool take(const char* key, std::string* value);
  // Fails where the key is there.
  void refuse(const char* key, const std::string& why);
  Status finish(const std::string& name) const;

 private:
  void fail(const char* key, const std::string& text, const std::string& expected);

  std::map<std::string, std::string> keys_;
  Status status_;
};

}  // namespace tierkv::analysis

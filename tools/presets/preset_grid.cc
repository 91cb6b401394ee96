// SPDX-License-Identifier: Apache-2.0
#include "tools/presets/preset_grid.h"

namespace tierkv::analysis {
namespace {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (bool more = true; more;) {
    const size_t at = text.find(separator);
    parts.emplace_back(text.substr(0, at));
    more = at != std::string_view::npos;
    if (more) text.remove_prefix(at + 1);
  }
  return parts;
}

// Appends every alternative to every preset so far.
Status multiply(const std::string& prefix, const std::vector<std::string>& alternatives,
                bool may_be_empty, std::vector<std::string>* presets) {
  std::vector<std::string> product;
  for (const std::string& preset : *presets) {
    for (const std::string& a : alternatives) {
      if (a.empty() && !may_be_empty && alternatives.size() > 1) {
        return Status(StatusCode::kInvalidArgument, "an alternative between '/' is empty");
      }
      product.push_back(a.empty() && may_be_empty ? preset : preset + prefix + a);
      if (product.size() > kMaxGridPresets) {
        return Status(StatusCode::kInvalidArgument,
                      "more than " + std::to_string(kMaxGridPresets) + " presets");
      }
    }
  }
  *presets = std::move(product);
  return Status::ok();
}

}  // namespace

Result<std::vector<std::string>> expand_grid(std::string_view text) {
  const auto fail = [&](const Status& s) {
    return s.with_context("grid '" + std::string(text) + "'");
  };
  const std::vector<std::string> by_suffix = split(text, '+');
  const std::string& head = by_suffix[0];
  const size_t colon = head.find(':');
  std::vector<std::string> presets = {""};
  if (Status s = multiply("", split(head.substr(0, colon), '/'), false, &presets); !s) {
    return fail(s);
  }
  if (colon != std::string::npos) {
    std::string separator = ":";
    for (const std::string& item : split(head.substr(colon + 1), ',')) {
      const size_t equals = item.find('=');
      const std::string key = item.substr(0, equals == std::string::npos ? 0 : equals + 1);
      const std::string value = item.substr(key.size());
      // In classes of heads '/' stands between high and low.
      const std::vector<std::string> alternatives =
          key == "classes=" ? std::vector<std::string>{value} : split(value, '/');
      if (Status s = multiply(separator + key, alternatives, false, &presets); !s) return fail(s);
      separator = ",";
    }
  }
  for (size_t i = 1; i < by_suffix.size(); ++i) {
    const std::vector<std::string> alternatives = split(by_suffix[i], '/');
    if (Status s = multiply("+", alternatives, alternatives.size() > 1, &presets); !s) {
      return fail(s);
    }
  }
  return presets;
}

}  // namespace tierkv::analysis

// SPDX-License-Identifier: Apache-2.0
#include "capi/dumps/files.h"

#include "datasets/profile_file.h"

namespace tierkv::capi {

Result<std::vector<datasets::DumpReader>> open_dumps(const char* const* files, size_t num_files) {
  if (files == nullptr || num_files == 0) return invalid("no files were given");
  std::vector<datasets::DumpReader> readers;
  for (size_t i = 0; i < num_files; ++i) {
    if (files[i] == nullptr) return invalid("file " + std::to_string(i) + " is null");
    Result<datasets::DumpReader> reader = datasets::DumpReader::open(files[i]);
    if (!reader) return reader.status();
    readers.push_back(std::move(*reader));
  }
  return readers;
}

Result<std::optional<Profile>> open_profile(const char* path) {
  if (path == nullptr) return std::optional<Profile>();
  Result<Profile> profile = datasets::read_profile(path);
  if (!profile) return profile.status();
  return std::optional<Profile>(std::move(*profile));
}

Result<analysis::Preset> read_preset(const char* text) {
  if (text == nullptr) return invalid("preset is null");
  return analysis::parse_preset(text);
}

Result<std::function<void(double)>> read_progress(const tkv_progress* progress, size_t part,
                                                  size_t parts) {
  if (progress == nullptr) return std::function<void(double)>();
  tkv_progress p;
  if (Status s = read_struct(progress, "progress", &p); !s) return s;
  if (p.update == nullptr) return invalid("progress: update is null");
  return std::function<void(double)>([p, part, parts](double fraction) {
    p.update(p.user, (static_cast<double>(part) + fraction) / static_cast<double>(parts));
  });
}

}  // namespace tierkv::capi

extern "C" {

const char* tkv_text_data(const tkv_text* text) {
  return text == nullptr ? "" : text->text.c_str();
}

size_t tkv_text_size(const tkv_text* text) {
  return text == nullptr ? 0 : text->text.size();
}

void tkv_text_destroy(tkv_text* text) {
  delete text;
}

}  // extern "C"

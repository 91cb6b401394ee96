// SPDX-License-Identifier: Apache-2.0
// Recorded results: a CSV file of tests/golden whose every line a test computes again.
//
// ./dev golden (TIERKV_REGENERATE_GOLDEN=1 in the environment of test_golden) writes the files
// anew: do that only when a format or what an encoder chooses is meant to change, and say so in the
// commit.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "codec/file/container_format.h"

namespace tierkv::golden {

inline bool regenerating() {
  const char* set = std::getenv("TIERKV_REGENERATE_GOLDEN");
  return set != nullptr && std::string(set) == "1";
}

inline std::string path(const std::string& name) {
  return TIERKV_SOURCE_DIR "/tests/golden/" + name;
}

inline std::vector<uint8_t> read_file(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  EXPECT_TRUE(in.good()) << file;
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_file(const std::string& file, const std::vector<uint8_t>& bytes) {
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  EXPECT_TRUE(out.good()) << file;
}

// 16 hexadecimal digits.
template <class T>
std::string hash(const std::vector<T>& values) {
  char text[17];
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  std::snprintf(text, sizeof(text), "%016llx",
                static_cast<unsigned long long>(xxh3(bytes, values.size() * sizeof(T))));
  return text;
}

class Table {
 public:
  Table(const std::string& name, const std::string& header) : file_(path(name)), text_(header) {
    text_ += "\n";
    if (regenerating()) return;
    std::ifstream in(file_);
    std::string line;
    EXPECT_TRUE(std::getline(in, line) && line == header) << file_;
    while (std::getline(in, line)) recorded_.push_back(line);
  }
  // The next line. Fields hold no commas.
  void expect(const std::vector<std::string>& fields) {
    std::string line;
    for (const std::string& field : fields) line += (line.empty() ? "" : ",") + field;
    text_ += line + "\n";
    if (regenerating()) return;
    ASSERT_LT(next_, recorded_.size()) << file_ << " has no line for " << line;
    EXPECT_EQ(line, recorded_[next_++]) << file_;
  }
  ~Table() {
    if (regenerating()) {
      write_file(file_, {text_.begin(), text_.end()});
    } else {
      EXPECT_EQ(next_, recorded_.size()) << file_ << " has lines that nothing computes";
    }
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

 private:
  std::string file_, text_;
  std::vector<std::string> recorded_;
  size_t next_ = 0;
};

}  // namespace tierkv::golden

// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target over files: fuzz_NAME_replay FILE|FOLDER... Every input that once failed lives
// in tests/fuzz/corpus and is replayed by plain ctest, with any compiler.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

namespace fs = std::filesystem;

bool collect(const std::string& root, std::vector<fs::path>* files) {
  std::error_code error;
  if (fs::is_regular_file(root, error)) {
    files->push_back(root);
    return true;
  }
  fs::recursive_directory_iterator it(root, error);
  if (error) {
    std::fprintf(stderr, "%s: %s\n", root.c_str(), error.message().c_str());
    return false;
  }
  for (const fs::directory_entry& entry : it) {
    if (entry.is_regular_file()) files->push_back(entry.path());
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<fs::path> files;
  for (int i = 1; i < argc; ++i) {
    if (!collect(argv[i], &files)) return 1;
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& file : files) {
    std::ifstream in(file, std::ios::binary);
    if (!in) {
      std::fprintf(stderr, "%s: cannot be read\n", file.c_str());
      return 1;
    }
    const std::vector<char> bytes((std::istreambuf_iterator<char>(in)), {});
    // Named before it runs, so that a crash says on which input.
    std::fprintf(stderr, "%s\n", file.c_str());
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  std::printf("%zu inputs replayed\n", files.size());
  return files.empty() ? 1 : 0;  // an empty corpus tests nothing
}

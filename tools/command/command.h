// SPDX-License-Identifier: Apache-2.0
// What the subcommands share. Each add_*() registers one subcommand, which leaves its exit code in
// *exit_code.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tierkv/status.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace tierkv::tools {

inline constexpr int kExitOk = 0;
inline constexpr int kExitVerification = 1;
inline constexpr int kExitUsage = 2;     // an unknown or missing word or option
inline constexpr int kExitBadInput = 3;  // a value, preset or file that is wrong

void add_info(CLI::App& app, int* exit_code);
void add_analyze(CLI::App& app, int* exit_code);
void add_sweep(CLI::App& app, int* exit_code);
void add_calibrate(CLI::App& app, int* exit_code);
void add_synth(CLI::App& app, int* exit_code);
void add_compress(CLI::App& app, int* exit_code);
void add_decompress(CLI::App& app, int* exit_code);
void add_verify(CLI::App& app, int* exit_code);
void add_convert(CLI::App& app, int* exit_code);

// "tierkv: message" on stderr; returns `exit_code`.
int report_error(const std::string& message, int exit_code);
// All of the text on stdout; kExitBadInput with a message when it cannot be written (a full disk, a
// closed pipe).
int print_result(const std::string& text);

// Whether a file begins with these bytes; false for what is no regular file, which is not opened.
bool begins_with(const std::string& path, const std::string& bytes);

// --force: an output that exists is replaced.
void add_force(CLI::App* command, bool* force);
// kExitOk, or kExitBadInput with a message where check_output() (codec/file/output_file.h) refuses.
int check_output_file(const std::string& path, bool force, const std::vector<std::string>& inputs);

int32_t default_threads();
void add_threads(CLI::App* command, int32_t* threads);   // --threads
void add_profile(CLI::App* command, std::string* path);  // --profile

// Values of the option are numbers of a range, or for a text several with commas between them; NaN
// is none.
void require_whole(CLI::Option* option, int64_t least, int64_t most);
void require_number(CLI::Option* option, double least, double most);

// A progress bar on stderr while it is a terminal, nothing otherwise. finish() clears the line.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  ~ProgressBar();
  void update(double fraction);
  void finish();

 private:
  std::string label_;
  bool active_;
  int shown_ = -1;
};

}  // namespace tierkv::tools

// SPDX-License-Identifier: Apache-2.0
#include "tools/command/command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "codec/file/output_file.h"

namespace tierkv::tools {
namespace {

template <class T>
void require(CLI::Option* option, const char* kind, T least, T most) {
  const std::string range = fmt::format("{} to {}", least, most);
  const auto why_not = [=](const std::string& given) {
    // The comma keeps an empty last item.
    for (const std::string& text : CLI::detail::split(given + ",", ',')) {
      T value{};
      const char* last = text.data() + text.size();
      const auto [end, error] = std::from_chars(text.data(), last, value);
      const bool in_range = value >= least && value <= most;
      if (error == std::errc() && end == last && in_range) continue;
      return fmt::format("'{}' is not a {} from {}", text, kind, range);
    }
    return std::string();
  };
  option->check(why_not, range);
}

}  // namespace

int report_error(const std::string& message, int exit_code) {
  std::fprintf(stderr, "tierkv: %s\n", message.c_str());
  return exit_code;
}

int print_result(const std::string& text) {
  const bool ok =
      std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  return ok ? kExitOk : report_error("standard output cannot be written", kExitBadInput);
}

bool begins_with(const std::string& path, const std::string& bytes) {
  std::error_code error;
  std::string start(bytes.size(), '\0');
  return std::filesystem::is_regular_file(path, error) &&
         std::ifstream(path, std::ios::binary).read(start.data(), std::ssize(start)) &&
         start == bytes;
}

void add_force(CLI::App* command, bool* force) {
  command->add_flag("--force", *force, "Replace an output that exists");
}

int check_output_file(const std::string& path, bool force, const std::vector<std::string>& inputs) {
  const Status s = check_output(path, force, inputs);
  return s ? kExitOk : report_error(s.message(), kExitBadInput);
}

int32_t default_threads() {
  return static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
}

void add_threads(CLI::App* command, int32_t* threads) {
  require_whole(command->add_option("--threads", *threads, "Worker threads (default: all cores)"),
                1, 1024);
}

void add_profile(CLI::App* command, std::string* path) {
  command->add_option(
      "--profile", *path,
      "Profile: statistics of the model, which replace each sequence's own. Made once "
      "by `python -m tierkv.calibrate_model`, or by `tierkv calibrate` (no sensitivities)");
}

void require_whole(CLI::Option* option, int64_t least, int64_t most) {
  require(option, "whole number", least, most);
}

void require_number(CLI::Option* option, double least, double most) {
  require(option, "number", least, most);
}

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)), active_(isatty(STDERR_FILENO) == 1) {}
ProgressBar::~ProgressBar() {
  finish();
}

void ProgressBar::update(double fraction) {
  constexpr int kWidth = 40;
  const int percent = static_cast<int>(100 * std::clamp(fraction, 0.0, 1.0));
  if (!active_ || percent == shown_) return;
  shown_ = percent;
  const std::string bar(kWidth * percent / 100, '#');
  std::fprintf(stderr, "\r%s [%-*s] %3d%%", label_.c_str(), kWidth, bar.c_str(), percent);
  std::fflush(stderr);
}

void ProgressBar::finish() {
  if (active_ && shown_ >= 0) std::fprintf(stderr, "\r\033[K");
  shown_ = -1;
}

}  // namespace tierkv::tools

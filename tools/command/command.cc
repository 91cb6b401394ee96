#include "tools/command/command.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <thread>

namespace tierkv::tools {

int report_error(const std::string& message, int exit_code) {
  std::fprintf(stderr, "tierkv: %s\n", message.c_str());
  return exit_code;
}

int print_result(const std::string& text) {
  const bool ok =
      std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  return ok ? kExitOk : report_error("standard output cannot be written", kExitBadInput);
}

int write_text_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp." + std::to_string(getpid());
  std::FILE* file = std::fopen(temporary.c_str(), "wbx");
  if (file == nullptr) {
    return report_error(path + ": cannot be written: " + std::strerror(errno), kExitBadInput);
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (written && closed && std::rename(temporary.c_str(), path.c_str()) == 0) return kExitOk;
  const std::string why = std::strerror(errno);
  std::remove(temporary.c_str());
  return report_error(path + ": cannot be written: " + why, kExitBadInput);
}

int32_t default_threads() {
  return static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
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

// SPDX-License-Identifier: Apache-2.0
#include "codec/file/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace tierkv {
namespace {

constexpr int kMaxLinks = 40;
constexpr char kExists[] = "it exists; --force (overwrite) replaces it";

Status refused(const std::string& path, const std::string& why) {
  return Status(StatusCode::kIo, path + ": cannot be written: " + why);
}

bool is_same(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

}  // namespace

Result<std::string> output_target(const std::string& path) {
  std::filesystem::path target = path;
  std::error_code error;
  for (int links = 0; std::filesystem::is_symlink(target, error); ++links) {
    const std::filesystem::path next = std::filesystem::read_symlink(target, error);
    if (error) return refused(path, error.message());
    if (links == kMaxLinks) return refused(path, std::strerror(ELOOP));
    target = target.parent_path() / next;
  }
  struct stat given = {}, found = {};
  if (stat(path.c_str(), &given) != 0) return target.string();
  if (S_ISDIR(given.st_mode)) return refused(path, std::strerror(EISDIR));
  // A descriptor under /proc is a link whose text need not name the file.
  if (!S_ISREG(given.st_mode) || stat(target.c_str(), &found) != 0 || !is_same(given, found)) {
    return refused(path, "is not a regular file");
  }
  return target.string();
}

Status check_output(const std::string& path, bool overwrite,
                    const std::vector<std::string>& inputs) {
  struct stat out = {}, in = {};
  if (stat(path.c_str(), &out) != 0 || !S_ISREG(out.st_mode)) return Status::ok();
  if (fstat(STDOUT_FILENO, &in) == 0 && is_same(out, in)) {
    return refused(path, "it is the standard output");
  }
  for (const std::string& input : inputs) {
    if (input.empty() || stat(input.c_str(), &in) != 0 || !is_same(out, in)) continue;
    return refused(path, "it is the same file as the input " + input);
  }
  if (overwrite) return Status::ok();
  return refused(path, kExists);
}

Status publish(const std::string& temporary, const std::string& target, bool overwrite) {
  const char *from = temporary.c_str(), *to = target.c_str();
  struct stat old = {};
  if (overwrite && stat(to, &old) == 0 && chmod(from, old.st_mode & 07777) != 0) {
    return refused(target, std::strerror(errno));
  }
  int result =
      overwrite ? std::rename(from, to) : renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);
  if (result != 0 && errno == EINVAL && !overwrite) {
    // Some file systems, NFS among them, cannot look and rename at once.
    if (access(to, F_OK) == 0) return refused(target, kExists);
    result = std::rename(from, to);
  }
  if (result == 0) return Status::ok();
  return refused(target, errno == EEXIST ? kExists : std::strerror(errno));
}

std::string temporary_name(const std::string& path) {
  static std::atomic<uint32_t> calls{0};
  return path + "." + std::to_string(getpid()) + "-" + std::to_string(calls++) + ".part";
}

}  // namespace tierkv

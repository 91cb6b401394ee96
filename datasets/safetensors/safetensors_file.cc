// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "codec/file/output_file.h"
#include "datasets/hdf5/hdf5_util.h"
#include "datasets/safetensors/safetensors.h"

namespace tierkv::datasets {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }
  int get() const { return fd_; }
  void reset(int fd) {
    close();
    fd_ = fd;
  }
  bool close() {
    const int fd = fd_;
    fd_ = -1;
    return fd < 0 || ::close(fd) == 0;
  }

 private:
  int fd_;
};

Status io_error(const std::string& path, const std::string& what) {
  return Status(StatusCode::kIo, path + ": " + what + ": " + std::strerror(errno));
}

bool read_fully(int fd, uint64_t at, uint64_t count, void* out) {
  auto* p = static_cast<char*>(out);
  while (count > 0) {
    const ssize_t n = pread(fd, p, std::min<uint64_t>(count, 1 << 30), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;  // shorter than it was when it was opened
    if (n <= 0) return false;
    p += n;
    at += n;
    count -= n;
  }
  return true;
}

bool write_fully(int fd, uint64_t at, uint64_t count, const void* bytes) {
  const auto* p = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t n = pwrite(fd, p, std::min<uint64_t>(count, 1 << 30), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    p += n;
    at += n;
    count -= n;
  }
  return true;
}

uint64_t little_endian(const uint8_t bytes[8]) {
  uint64_t x = 0;
  for (int i = 7; i >= 0; --i) x = x << 8 | bytes[i];
  return x;
}

}  // namespace

struct SafetensorsReader::Impl {
  std::string path;
  Descriptor file;
  SafetensorsHeader header;
};

SafetensorsReader::SafetensorsReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept = default;
SafetensorsReader::~SafetensorsReader() = default;

const std::string& SafetensorsReader::path() const {
  return impl_->path;
}
const SafetensorsHeader& SafetensorsReader::header() const {
  return impl_->header;
}

Result<SafetensorsReader> SafetensorsReader::open(const std::string& path) {
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  // O_NONBLOCK: a pipe is refused below, not waited for.
  impl->file.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (impl->file.get() < 0) return io_error(path, "cannot be opened");
  struct stat info = {};
  if (fstat(impl->file.get(), &info) != 0) return io_error(path, "cannot be read");
  const auto corrupt = [&](const std::string& what) {
    return Status(StatusCode::kCorrupt, path + ": " + what);
  };
  if (!S_ISREG(info.st_mode)) return corrupt("is not a regular file");
  const auto size = static_cast<uint64_t>(info.st_size);
  uint8_t prefix[8];
  if (size < sizeof(prefix)) return corrupt("too short to be a safetensors file");
  if (!read_fully(impl->file.get(), 0, sizeof(prefix), prefix)) return io_error(path, "reading");
  const uint64_t length = little_endian(prefix);
  if (length > kMaxSafetensorsHeader) {
    return corrupt("not a safetensors file (a header of " + std::to_string(length) + " bytes)");
  }
  if (length > size - sizeof(prefix)) return corrupt("truncated inside the header");
  std::string json(length, '\0');
  if (!read_fully(impl->file.get(), sizeof(prefix), length, json.data()))
    return io_error(path, "reading");
  Result<SafetensorsHeader> header =
      parse_safetensors_header(json.data(), json.size(), size - sizeof(prefix) - length);
  if (!header) return header.status().with_context(path);
  impl->header = std::move(header.value());
  return SafetensorsReader(std::move(impl));
}

Status SafetensorsReader::read(const TensorInfo& tensor, uint64_t offset, uint64_t count,
                               void* out) const {
  if (offset > tensor.bytes() || count > tensor.bytes() - offset) {
    return Status(StatusCode::kInvalidArgument,
                  impl_->path + ": tensor '" + printable(tensor.name) + "': read beyond its end");
  }
  const uint64_t at = impl_->header.data_start + tensor.begin + offset;
  return read_fully(impl_->file.get(), at, count, out)
             ? Status::ok()
             : io_error(impl_->path, "reading tensor '" + printable(tensor.name) + "'");
}

struct SafetensorsWriter::Impl {
  std::string path, target, temporary;
  Descriptor file;
  uint64_t data_start = 0;
  std::map<std::string, TensorInfo> tensors;  // by name; `begin` is what is written so far
  bool finished = false;

  ~Impl() {
    if (!finished && !temporary.empty()) std::remove(temporary.c_str());
  }
};

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

Result<SafetensorsWriter> SafetensorsWriter::create(
    const std::string& path, std::vector<TensorInfo> tensors,
    const std::map<std::string, std::string>& metadata) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return safetensors_bits(a.dtype) > safetensors_bits(b.dtype);
  });
  auto impl = std::make_unique<Impl>();
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t end = 0;
  for (TensorInfo& t : tensors) {
    uint64_t bits = safetensors_bits(t.dtype);
    bool good = bits >= 8 && t.name != "__metadata__";
    for (const int64_t n : t.shape) {
      good &= n >= 0 && !__builtin_mul_overflow(bits, static_cast<uint64_t>(n), &bits);
    }
    t.begin = end;
    good &= !__builtin_add_overflow(end, bits / 8, &end) && end <= INT64_MAX;
    t.end = end;
    if (!good || !impl->tensors.emplace(t.name, t).second) {
      return Status(StatusCode::kInvalidArgument, path + ": tensor '" + printable(t.name) +
                                                      "': its name, dtype or shape cannot be used");
    }
    header[t.name] = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {t.begin, t.end}}};
  }
  std::string json = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  json.append((8 - json.size() % 8) % 8, ' ');
  // Names and texts that are no UTF-8 were replaced above and are found here.
  const Result<SafetensorsHeader> check = parse_safetensors_header(json.data(), json.size(), end);
  if (!check) return check.status().with_context(path);
  const bool same = check->metadata == metadata &&
                    std::equal(tensors.begin(), tensors.end(), check->tensors.begin(),
                               check->tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
                                 return a.name == b.name && a.begin == b.begin;
                               });
  if (!same) {
    return Status(StatusCode::kInvalidArgument, path + ": a name or text is no valid UTF-8");
  }
  impl->path = path;
  Result<std::string> target = output_target(path);
  if (!target) return target.status();
  impl->target = *target;
  const std::string temporary = temporary_name(*target);
  impl->file.reset(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (impl->file.get() < 0) return io_error(path, "cannot be created");
  impl->temporary = temporary;
  uint8_t prefix[8];
  for (int i = 0; i < 8; ++i) prefix[i] = static_cast<uint8_t>(json.size() >> (8 * i));
  impl->data_start = sizeof(prefix) + json.size();
  if (!write_fully(impl->file.get(), 0, sizeof(prefix), prefix) ||
      !write_fully(impl->file.get(), sizeof(prefix), json.size(), json.data())) {
    return io_error(path, "cannot be written");
  }
  return SafetensorsWriter(std::move(impl));
}

Status SafetensorsWriter::append(const std::string& name, const void* bytes, uint64_t count) {
  const auto it = impl_->tensors.find(name);
  if (it == impl_->tensors.end() || count > it->second.bytes()) {
    return Status(StatusCode::kInvalidArgument,
                  impl_->path + ": tensor '" + printable(name) + "' has no such bytes");
  }
  if (!write_fully(impl_->file.get(), impl_->data_start + it->second.begin, count, bytes))
    return io_error(impl_->path, "cannot be written");
  it->second.begin += count;
  return Status::ok();
}

Status SafetensorsWriter::finish(bool overwrite) {
  for (const auto& [name, tensor] : impl_->tensors) {
    if (tensor.bytes() == 0) continue;
    return Status(StatusCode::kInvalidArgument,
                  impl_->path + ": tensor '" + printable(name) + "' was not written to its end");
  }
  if (!impl_->file.close()) return io_error(impl_->path, "cannot be written");
  if (Status s = publish(impl_->temporary, impl_->target, overwrite); !s) return s;
  impl_->finished = true;
  return Status::ok();
}

}  // namespace tierkv::datasets

// SPDX-License-Identifier: Apache-2.0
#include "tierkv/container.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <tuple>

#include "codec/file/container_format.h"
#include "codec/file/output_file.h"
#include "codec/host/large_vector.h"

namespace tierkv {
namespace {

std::string system_error() {
  return std::strerror(errno);
}

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { close(); }

  bool ok() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  bool write(const uint8_t* bytes, size_t size, int64_t offset) {
    return move_all(::pwrite, bytes, size, offset);
  }
  bool read(uint8_t* bytes, size_t size, int64_t offset) const {
    return move_all(::pread, bytes, size, offset);
  }
  bool close() {
    if (descriptor_ < 0) return true;
    const int result = ::close(descriptor_);
    descriptor_ = -1;
    return result == 0;
  }

 private:
  // By pread() or pwrite(), which may move fewer bytes than they are asked for.
  template <class Move, class Byte>
  bool move_all(Move move, Byte* bytes, size_t size, int64_t offset) const {
    while (size > 0) {
      const ssize_t n = move(descriptor_, bytes, size, offset);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      bytes += n;
      offset += n;
      size -= static_cast<size_t>(n);
    }
    return true;
  }

  int descriptor_;
};

}  // namespace

bool operator<(const ChunkKey& a, const ChunkKey& b) {
  return std::tie(a.kind, a.sequence, a.layer, a.head, a.component, a.part, a.page) <
         std::tie(b.kind, b.sequence, b.layer, b.head, b.component, b.part, b.page);
}

std::string to_string(const ChunkKey& key) {
  static constexpr const char* kNames[] = {
      "model",       "sequence",        "basis",     "codebook",     "row map",
      "segment",     "query positions", "queries",   "significance", "page",
      "page format", "store",           "store row", "store page",   "fixed-rate format",
      "weighted row"};
  const auto kind = static_cast<size_t>(key.kind);
  std::string s = kind >= 1 && kind <= std::size(kNames) ? kNames[kind - 1]
                                                         : "chunk of kind " + std::to_string(kind);
  const char* separator = " of ";
  const auto add = [&](const std::string& text) {
    s += separator + text;
    separator = ", ";
  };
  if (key.sequence >= 0) add("sequence " + std::to_string(key.sequence));
  if (key.layer >= 0) add("layer " + std::to_string(key.layer));
  if (key.head >= 0) add("head " + std::to_string(key.head));
  const bool component = key.kind == ChunkKind::kBasis || key.kind == ChunkKind::kCodebook ||
                         key.kind == ChunkKind::kSegment;
  if (component) add(key.component == 0 ? "keys" : "values");
  const bool page = key.kind == ChunkKind::kPage || key.kind == ChunkKind::kStorePage;
  const bool paged = page || key.kind == ChunkKind::kPageFormat;
  if (paged || (component && key.kind != ChunkKind::kBasis)) {
    add("part " + std::to_string(key.part));
  }
  if (page) add("page " + std::to_string(key.page));
  if (key.kind == ChunkKind::kCodebook && key.page > 0) add("number " + std::to_string(key.page));
  return s;
}

struct ContainerWriter::Impl {
  std::string path, target, temporary;
  File file{-1};
  std::vector<ChunkEntry> chunks;
  int64_t bytes = kContainerHeaderBytes;
  bool finished = false;

  Impl(std::string name, std::string place, std::string part, int descriptor)
      : path(std::move(name)),
        target(std::move(place)),
        temporary(std::move(part)),
        file(descriptor) {}
  ~Impl() {
    if (finished) return;
    file.close();
    std::remove(temporary.c_str());
  }
  Status fail() const {
    return Status(StatusCode::kIo, path + ": cannot be written: " + system_error());
  }
};

ContainerWriter::ContainerWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ContainerWriter::ContainerWriter(ContainerWriter&&) noexcept = default;
ContainerWriter& ContainerWriter::operator=(ContainerWriter&&) noexcept = default;
ContainerWriter::~ContainerWriter() = default;

Result<ContainerWriter> ContainerWriter::create(const std::string& path) {
  Result<std::string> target = output_target(path);
  if (!target) return target.status();
  const std::string temporary = temporary_name(*target);
  const int descriptor = ::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) {
    return Status(StatusCode::kIo, path + ": cannot be created: " + system_error());
  }
  return ContainerWriter(std::make_unique<Impl>(path, *target, temporary, descriptor));
}

struct ChunkBlock::Impl {
  std::vector<ChunkEntry> chunks;  // offsets from the start of the block
  LargeBytes bytes;
};

ChunkBlock::ChunkBlock() : impl_(std::make_unique<Impl>()) {}
ChunkBlock::ChunkBlock(ChunkBlock&&) noexcept = default;
ChunkBlock& ChunkBlock::operator=(ChunkBlock&&) noexcept = default;
ChunkBlock::~ChunkBlock() = default;

void ChunkBlock::add(const ChunkKey& key, const std::vector<uint8_t>& payload, bool optional) {
  LargeBytes& bytes = impl_->bytes;
  ChunkEntry c;
  c.key = key;
  c.optional = optional;
  c.offset = bytes.size();
  c.bytes = payload.size();
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  bytes.resize(c.offset + align_chunk(c.bytes), 0);
  c.checksum = xxh3(bytes.data() + c.offset, bytes.size() - c.offset);
  impl_->chunks.push_back(c);
}

void ChunkBlock::reserve(int64_t bytes) {
  impl_->bytes.reserve(impl_->bytes.size() + static_cast<size_t>(bytes));
}

void ChunkBlock::clear() {
  impl_->chunks.clear();
  impl_->bytes.clear();
}

int64_t ChunkBlock::optional_bytes() const {
  uint64_t n = 0;
  for (const ChunkEntry& c : impl_->chunks) n += c.optional ? c.bytes : 0;
  return static_cast<int64_t>(n);
}

Status ContainerWriter::add(const ChunkKey& key, const std::vector<uint8_t>& payload,
                            bool optional) {
  ChunkBlock block;
  block.add(key, payload, optional);
  return add(block);
}

Status ContainerWriter::add(const ChunkBlock& block) {
  const LargeBytes& bytes = block.impl_->bytes;
  if (!impl_->file.write(bytes.data(), bytes.size(), impl_->bytes)) return impl_->fail();
  for (ChunkEntry c : block.impl_->chunks) {
    c.offset += static_cast<uint64_t>(impl_->bytes);
    impl_->chunks.push_back(c);
  }
  impl_->bytes += static_cast<int64_t>(bytes.size());
  return Status::ok();
}

Status ContainerWriter::finish(bool overwrite) {
  Impl& w = *impl_;
  const std::vector<uint8_t> index = store_index(w.chunks);
  const ContainerHeader header = header_before(w.bytes, index);
  uint8_t bytes[kContainerHeaderBytes];
  store_container_header(header, bytes);
  const bool written = w.file.write(index.data(), index.size(), w.bytes) &&
                       w.file.write(bytes, sizeof(bytes), 0) && ::fsync(w.file.descriptor()) == 0;
  if (!written || !w.file.close()) return w.fail();
  if (Status s = publish(w.temporary, w.target, overwrite); !s) return s;
  w.bytes = static_cast<int64_t>(header.file_bytes);
  w.finished = true;
  return Status::ok();
}

int64_t ContainerWriter::file_bytes() const {
  return impl_->bytes;
}

std::vector<uint8_t> assemble_container(const std::vector<ChunkBlock>& blocks) {
  size_t size = kContainerHeaderBytes;
  for (const ChunkBlock& block : blocks) size += block.impl_->bytes.size();
  std::vector<uint8_t> bytes(kContainerHeaderBytes);
  bytes.reserve(size);
  std::vector<ChunkEntry> chunks;
  for (const ChunkBlock& block : blocks) {
    for (ChunkEntry c : block.impl_->chunks) {
      c.offset += bytes.size();
      chunks.push_back(c);
    }
    bytes.insert(bytes.end(), block.impl_->bytes.begin(), block.impl_->bytes.end());
  }
  const std::vector<uint8_t> index = store_index(chunks);
  store_container_header(header_before(static_cast<int64_t>(bytes.size()), index), bytes.data());
  bytes.insert(bytes.end(), index.begin(), index.end());
  return bytes;
}

struct ContainerReader::Impl {
  std::string path;
  ContainerReadOptions options;
  File file;
  const uint8_t* all = nullptr;  // the container itself where there is no file
  std::vector<uint8_t> memory;   // which may own it
  uint64_t size = 0;
  std::vector<ChunkEntry> chunks;
  std::vector<ChunkPlace> index;  // sorted

  Impl(std::string name, const ContainerReadOptions& given, int descriptor)
      : path(std::move(name)), options(given), file(descriptor) {}

  Status corrupt(const std::string& what) const {
    return Status(StatusCode::kCorrupt, path + ": " + what);
  }
  // The range lies within the file.
  Status fetch(uint64_t offset, uint64_t count, uint8_t* out) const {
    if (!file.ok()) {
      std::copy_n(all + offset, count, out);
      return Status::ok();
    }
    errno = 0;
    if (file.read(out, count, static_cast<int64_t>(offset))) return Status::ok();
    return Status(StatusCode::kIo,
                  path + ": byte " + std::to_string(offset) + " cannot be read: " + system_error());
  }
  Status load();
  // `padded`: the chunk's bytes up to the next one.
  Status verify(const ChunkEntry& c, const uint8_t* padded) const {
    if (!options.verify_checksums || xxh3(padded, align_chunk(c.bytes)) == c.checksum) {
      return Status::ok();
    }
    return corrupt(to_string(c.key) + " at byte " + std::to_string(c.offset) +
                   ": checksum does not match");
  }
  Status find(int64_t chunk, const ChunkEntry** entry) const {
    const auto count = static_cast<int64_t>(chunks.size());
    if (chunk < 0 || chunk >= count) {
      return Status(StatusCode::kInvalidArgument, path + ": there is no such chunk");
    }
    *entry = &chunks[chunk];
    return Status::ok();
  }
};

Status ContainerReader::Impl::load() {
  uint8_t bytes[kContainerHeaderBytes];
  const uint64_t have = std::min<uint64_t>(size, sizeof(bytes));
  if (Status s = fetch(0, have, bytes); !s) return s;
  ContainerHeader header;
  if (Status s = load_container_header(bytes, have, size, options.verify_checksums, &header); !s) {
    return s.with_context(path);
  }
  std::vector<uint8_t> stored(size - header.index_offset);
  if (Status s = fetch(header.index_offset, stored.size(), stored.data()); !s) return s;
  if (options.verify_checksums && xxh3(stored.data(), stored.size()) != header.index_checksum) {
    return corrupt("index: checksum does not match");
  }
  Status s = load_index(stored, header, &chunks, &index);
  return s ? s : s.with_context(path);
}

ContainerReader::ContainerReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ContainerReader::ContainerReader(ContainerReader&&) noexcept = default;
ContainerReader& ContainerReader::operator=(ContainerReader&&) noexcept = default;
ContainerReader::~ContainerReader() = default;

Result<ContainerReader> ContainerReader::open(const std::string& path,
                                              const ContainerReadOptions& options) {
  // O_NONBLOCK: a pipe is refused below, not waited for.
  auto impl = std::make_unique<Impl>(path, options,
                                     ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status;
  if (!impl->file.ok() || ::fstat(impl->file.descriptor(), &status) != 0) {
    return Status(StatusCode::kIo, path + ": cannot be opened: " + system_error());
  }
  if (!S_ISREG(status.st_mode)) return Status(StatusCode::kIo, path + ": is not a regular file");
  impl->size = static_cast<uint64_t>(status.st_size);
  if (Status s = impl->load(); !s) return s;
  return ContainerReader(std::move(impl));
}

Result<ContainerReader> ContainerReader::from_bytes(std::vector<uint8_t> bytes,
                                                    const std::string& name,
                                                    const ContainerReadOptions& options) {
  Result<ContainerReader> reader = over_bytes(bytes.data(), bytes.size(), name, options);
  if (reader) reader->impl_->memory = std::move(bytes);  // whose buffer moves along
  return reader;
}

Result<ContainerReader> ContainerReader::over_bytes(const uint8_t* bytes, size_t size,
                                                    const std::string& name,
                                                    const ContainerReadOptions& options) {
  auto impl = std::make_unique<Impl>(name, options, -1);
  impl->all = bytes;
  impl->size = size;
  if (Status s = impl->load(); !s) return s;
  return ContainerReader(std::move(impl));
}

const std::string& ContainerReader::path() const {
  return impl_->path;
}
int64_t ContainerReader::file_bytes() const {
  return static_cast<int64_t>(impl_->size);
}
const std::vector<ChunkEntry>& ContainerReader::chunks() const {
  return impl_->chunks;
}

int64_t ContainerReader::find(const ChunkKey& key) const {
  const ChunkPlace first = {key, 0};
  const auto found = std::lower_bound(impl_->index.begin(), impl_->index.end(), first);
  return found == impl_->index.end() || found->first != key ? -1 : found->second;
}

Status ContainerReader::read(int64_t chunk, std::vector<uint8_t>* payload) const {
  const ChunkEntry* c = nullptr;
  if (Status s = impl_->find(chunk, &c); !s) return s;
  payload->resize(align_chunk(c->bytes));
  if (Status s = impl_->fetch(c->offset, payload->size(), payload->data()); !s) return s;
  if (Status s = impl_->verify(*c, payload->data()); !s) return s;
  payload->resize(c->bytes);
  return Status::ok();
}

Status ContainerReader::view(int64_t chunk, const uint8_t** payload) const {
  const ChunkEntry* c = nullptr;
  if (Status s = impl_->find(chunk, &c); !s) return s;
  if (impl_->all == nullptr) {
    return Status(StatusCode::kUnsupported, impl_->path + ": a file is read, not viewed");
  }
  const uint8_t* const at = impl_->all + c->offset;
  if (Status s = impl_->verify(*c, at); !s) return s;
  *payload = at;
  return Status::ok();
}

Status ContainerReader::read(const ChunkKey& key, std::vector<uint8_t>* payload) const {
  const int64_t chunk = find(key);
  if (chunk >= 0) return read(chunk, payload);
  return Status(StatusCode::kNotFound, impl_->path + ": has no " + to_string(key));
}

}  // namespace tierkv

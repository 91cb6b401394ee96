// SPDX-License-Identifier: Apache-2.0
// The container's own layer: header, index, checksums. What its chunks hold is tested in
// tests/analysis/container_file_test.cc and tests/cli/container_test.py.
#include "tierkv/container.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "codec/file/container_format.h"

namespace tierkv {
namespace {

using testing::HasSubstr;

class ContainerTest : public testing::Test {
 protected:
  ContainerTest() : seed_(std::random_device{}()), rng_(seed_) {
    folder_ =
        std::filesystem::temp_directory_path() / ("tierkv_container_" + std::to_string(seed_));
    std::filesystem::create_directory(folder_);
    path_ = folder_ / "a.tkv";
  }
  ~ContainerTest() override { std::filesystem::remove_all(folder_); }

  std::vector<uint8_t> random_bytes(size_t n) {
    std::vector<uint8_t> bytes(n);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng_());
    return bytes;
  }

  struct Chunk {
    ChunkKey key;
    std::vector<uint8_t> payload;
    bool optional;
  };
  // Sizes around the alignment, one chunk empty, one of a kind nobody knows.
  std::vector<Chunk> some_chunks() {
    return {{{ChunkKind::kModel, -1, -1, -1, 0, 0}, random_bytes(61), false},
            {{ChunkKind::kSegment, 0, 2, 1, 1, 4}, random_bytes(32), false},
            {{ChunkKind::kSequence, 0, -1, -1, 0, 0}, {}, false},
            {{static_cast<ChunkKind>(700), 0, -1, -1, 0, 0}, random_bytes(17), true},
            {{ChunkKind::kSegment, 0, 2, 1, 0, 4}, random_bytes(1), false}};
  }
  std::vector<uint8_t> write(const std::vector<Chunk>& chunks) {
    Result<ContainerWriter> writer = ContainerWriter::create(path_);
    EXPECT_TRUE(writer.is_ok()) << writer.status().message();
    for (const Chunk& c : chunks) EXPECT_TRUE(writer->add(c.key, c.payload, c.optional).is_ok());
    EXPECT_TRUE(writer->finish().is_ok());
    std::ifstream in(path_, std::ios::binary);
    std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(in), {}};
    EXPECT_EQ(writer->file_bytes(), static_cast<int64_t>(bytes.size()));
    return bytes;
  }
  // Opens and reads every chunk; the first failure.
  static Status read_all(std::vector<uint8_t> bytes) {
    Result<ContainerReader> reader = ContainerReader::from_bytes(std::move(bytes), "a.tkv");
    if (!reader) return reader.status();
    std::vector<uint8_t> payload;
    for (size_t i = 0; i < reader->chunks().size(); ++i) {
      if (Status s = reader->read(static_cast<int64_t>(i), &payload); !s) return s;
    }
    return Status::ok();
  }

  uint32_t seed_;
  std::mt19937 rng_;
  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(ContainerTest, ChunksComeBackFromAFileAndFromMemory) {
  const std::vector<Chunk> chunks = some_chunks();
  const std::vector<uint8_t> bytes = write(chunks);
  Result<ContainerReader> readers[] = {ContainerReader::open(path_),
                                       ContainerReader::from_bytes(bytes, path_)};
  for (Result<ContainerReader>& reader : readers) {
    ASSERT_TRUE(reader.is_ok()) << reader.status().message();
    ASSERT_EQ(reader->chunks().size(), chunks.size());
    for (const Chunk& c : chunks) {
      std::vector<uint8_t> payload = {1, 2, 3};
      ASSERT_TRUE(reader->read(c.key, &payload).is_ok());
      EXPECT_EQ(payload, c.payload) << seed_;
      const ChunkEntry& entry = reader->chunks()[reader->find(c.key)];
      EXPECT_EQ(entry.offset % kChunkAlignment, 0u);
      EXPECT_EQ(entry.optional, c.optional);
    }
    std::vector<uint8_t> payload;
    const Status absent = reader->read({ChunkKind::kSegment, 1, 2, 1, 0, 4}, &payload);
    EXPECT_EQ(absent.code(), StatusCode::kNotFound);
    EXPECT_THAT(absent.message(),
                HasSubstr("segment of sequence 1, layer 2, head 1, keys, part 4"));
  }
}

TEST_F(ContainerTest, AnyFlippedBitIsRefusedWithAMessage) {
  const std::vector<uint8_t> bytes = write(some_chunks());
  ASSERT_TRUE(read_all(bytes).is_ok());
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<uint8_t> damaged = bytes;
      damaged[i] ^= static_cast<uint8_t>(1 << bit);
      const Status s = read_all(damaged);
      ASSERT_FALSE(s.is_ok()) << "byte " << i << " bit " << bit << ", seed " << seed_;
      ASSERT_THAT(s.message(), HasSubstr("a.tkv: ")) << i;
    }
  }
}

TEST_F(ContainerTest, AnyTruncationAndAnyGrowthIsRefused) {
  std::vector<uint8_t> bytes = write(some_chunks());
  for (size_t n = 0; n < bytes.size(); ++n) {
    const Status s = read_all({bytes.begin(), bytes.begin() + static_cast<int64_t>(n)});
    ASSERT_EQ(s.code(), n < kMagicBytes ? StatusCode::kInvalidArgument : StatusCode::kCorrupt) << n;
  }
  bytes.push_back(0);
  EXPECT_THAT(read_all(bytes).message(), HasSubstr("its header says"));
}

TEST_F(ContainerTest, MessagesNameTheChunkThatIsDamaged) {
  const std::vector<Chunk> chunks = some_chunks();
  std::vector<uint8_t> bytes = write(chunks);
  bytes[kContainerHeaderBytes + 64 + 5] ^= 1;  // the second chunk; the first takes 61 bytes
  EXPECT_THAT(read_all(bytes).message(),
              HasSubstr("segment of sequence 0, layer 2, head 1, values, part 4 at byte 128: "
                        "checksum does not match"));
}

TEST_F(ContainerTest, AnotherMajorVersionIsRefusedANewerMinorIsRead) {
  const std::vector<uint8_t> bytes = write(some_chunks());
  ContainerHeader header;
  ASSERT_TRUE(
      load_container_header(bytes.data(), bytes.size(), bytes.size(), true, &header).is_ok());
  const struct {
    uint16_t major, minor;
    const char* message;  // null: it is read
  } kVersions[] = {{2, 0, nullptr},
                   {2, 7, nullptr},
                   {3, 0, "major version 3 is not known; this build reads version 2: read it with"},
                   {1, 0, "major version 1 is not known; this build reads version 2: write the"}};
  for (const auto& version : kVersions) {
    ContainerHeader changed = header;
    changed.major = version.major;
    changed.minor = version.minor;
    std::vector<uint8_t> other = bytes;
    store_container_header(changed, other.data());
    const Status s = read_all(other);
    EXPECT_EQ(s.code(), version.message == nullptr ? StatusCode::kOk : StatusCode::kVersion)
        << s.message();
    if (version.message != nullptr) {
      EXPECT_THAT(s.message(), HasSubstr(version.message));
    }
  }
}

// A minor version may use them; this one does not.
TEST_F(ContainerTest, ReservedBytesOfTheHeaderAreZeroInThisMinorVersion) {
  const std::vector<uint8_t> bytes = write(some_chunks());
  for (const int32_t byte : {40, 47, 48, 55}) {
    for (const uint8_t minor : {0, 1}) {
      std::vector<uint8_t> other = bytes;
      other[10] = minor;
      other[byte] = 7;
      const uint64_t checksum = xxh3(other.data(), 56);
      std::memcpy(other.data() + 56, &checksum, sizeof(checksum));
      const Status s = read_all(other);
      EXPECT_EQ(s.code(), minor == 0 ? StatusCode::kCorrupt : StatusCode::kOk) << byte;
      if (minor == 0) {
        EXPECT_THAT(s.message(), HasSubstr("reserved bytes"));
      }
    }
  }
}

TEST_F(ContainerTest, AnUnknownChunkIsRefusedUnlessItIsOptional) {
  std::vector<Chunk> chunks = some_chunks();
  chunks[3].optional = false;
  const Status s = read_all(write(chunks));
  EXPECT_EQ(s.code(), StatusCode::kUnsupported);
  EXPECT_THAT(s.message(), HasSubstr("index entry 3: chunk of kind 700"));
}

TEST_F(ContainerTest, TwoChunksOfOneKeyAreRefused) {
  std::vector<Chunk> chunks = some_chunks();
  chunks.push_back(chunks[1]);
  EXPECT_THAT(read_all(write(chunks)).message(), HasSubstr("two chunks are the segment"));
}

// Sizes that lie are found without the help of a checksum.
TEST_F(ContainerTest, HostileSizesAreRefusedWithoutChecksums) {
  const std::vector<uint8_t> bytes = write(some_chunks());
  ContainerReadOptions options;
  options.verify_checksums = false;
  const size_t index = bytes.size() - 5 * kIndexEntryBytes;
  const size_t fields[] = {12, 16, 24, index + 24, index + 32, index + kIndexEntryBytes + 24};
  for (const size_t field : fields) {
    for (int byte = 0; byte < (field == 12 ? 4 : 8); ++byte) {
      std::vector<uint8_t> hostile = bytes;
      hostile[field + byte] ^= 0xff;
      Result<ContainerReader> reader = ContainerReader::from_bytes(hostile, "a.tkv", options);
      EXPECT_EQ(reader.status().code(), StatusCode::kCorrupt) << field << "+" << byte;
    }
  }
}

TEST_F(ContainerTest, NothingIsLeftBehindWithoutFinish) {
  {
    Result<ContainerWriter> writer = ContainerWriter::create(path_);
    ASSERT_TRUE(writer.is_ok());
    ASSERT_TRUE(writer->add({ChunkKind::kModel, -1, -1, -1, 0, 0}, random_bytes(10)).is_ok());
    EXPECT_FALSE(std::filesystem::is_empty(folder_));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
  const Result<ContainerWriter> nowhere = ContainerWriter::create(folder_ / "no" / "a.tkv");
  EXPECT_EQ(nowhere.status().code(), StatusCode::kIo);
}

TEST_F(ContainerTest, AReplacedFileKeepsItsPermissions) {
  using std::filesystem::perms;
  for (const perms mode : {perms::owner_read | perms::owner_write, perms::all}) {
    write(some_chunks());
    std::filesystem::permissions(path_, mode);
    write(some_chunks());
    EXPECT_EQ(std::filesystem::status(path_).permissions(), mode);
  }
}

// A new file has the permissions that the umask leaves it, as files of other programs have.
TEST_F(ContainerTest, ANewFileHasThePermissionsOfTheUmask) {
  const mode_t before = ::umask(0007);
  std::ofstream(folder_ / "other") << "x";
  write(some_chunks());
  ::umask(before);
  EXPECT_EQ(std::filesystem::status(path_).permissions(),
            std::filesystem::status(folder_ / "other").permissions());
}

TEST_F(ContainerTest, OtherFilesAreNotContainers) {
  EXPECT_EQ(ContainerReader::open(path_).status().code(), StatusCode::kIo);
  EXPECT_EQ(ContainerReader::open(folder_).status().code(), StatusCode::kIo);
  std::vector<uint8_t> bytes = random_bytes(4096);
  bytes[0] = 0;
  EXPECT_EQ(read_all(bytes).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv

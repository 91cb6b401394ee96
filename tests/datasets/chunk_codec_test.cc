// SPDX-License-Identifier: Apache-2.0
// Chunks decoded outside HDF5 against HDF5's own reading of the same file, and damaged chunks.
#include "datasets/hdf5/chunk_codec.h"

#include <hdf5.h>
#include <zlib.h>
#include <zstd.h>

#include "datasets/hdf5/hdf5_dataset.h"
#include "datasets/slab.h"
#include "tests/datasets/dump_files.h"
#include "tests/datasets/zstd_filter.h"

namespace tierkv::datasets {
namespace {

class ChunkTest : public DumpTest {
 protected:
  std::vector<uint8_t> bytes(int64_t n) {
    std::vector<uint8_t> x(n);
    for (uint8_t& b : x) b = static_cast<uint8_t>(rng_() % 5);
    return x;
  }
  int64_t pick(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng_);
  }
  std::vector<uint8_t> gzip(const std::vector<uint8_t>& x) {
    uLongf size = compressBound(x.size());
    std::vector<uint8_t> out(size);
    EXPECT_EQ(compress(out.data(), &size, x.data(), x.size()), Z_OK);
    out.resize(size);
    return out;
  }
  std::vector<uint8_t> zstd(const std::vector<uint8_t>& x) {
    std::vector<uint8_t> out(ZSTD_compressBound(x.size()));
    out.resize(ZSTD_compress(out.data(), out.size(), x.data(), x.size(), 3));
    return out;
  }
};

enum class Layout { kContiguous, kCompact, kChunked };

struct Storage {
  const char* name;
  Layout layout;
  std::vector<Filter> filters;
};

const std::vector<Storage>& storages() {
  using F = Filter;
  static const std::vector<Storage> all = {
      {"contiguous", Layout::kContiguous, {}},
      {"compact", Layout::kCompact, {}},
      {"chunked", Layout::kChunked, {}},
      {"gzip", Layout::kChunked, {F::kDeflate}},
      {"zstd", Layout::kChunked, {F::kZstd}},
      {"shuffle", Layout::kChunked, {F::kShuffle}},
      {"fletcher32", Layout::kChunked, {F::kFletcher32}},
      {"shuffle+gzip", Layout::kChunked, {F::kShuffle, F::kDeflate}},
      {"shuffle+zstd", Layout::kChunked, {F::kShuffle, F::kZstd}},
      {"shuffle+zstd+fletcher32", Layout::kChunked, {F::kShuffle, F::kZstd, F::kFletcher32}},
      {"fletcher32+gzip", Layout::kChunked, {F::kFletcher32, F::kDeflate}},
      {"gzip+shuffle", Layout::kChunked, {F::kDeflate, F::kShuffle}},
  };
  return all;
}

Handle create(hid_t file, const Storage& s, hid_t type, const std::vector<hsize_t>& dims,
              const std::vector<hsize_t>& chunk) {
  const Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
  const Handle plist(H5Pcreate(H5P_DATASET_CREATE));
  EXPECT_TRUE(register_zstd_filter());
  if (s.layout == Layout::kCompact) H5Pset_layout(plist.id(), H5D_COMPACT);
  if (s.layout == Layout::kChunked) {
    H5Pset_chunk(plist.id(), static_cast<int>(chunk.size()), chunk.data());
  }
  for (const Filter f : s.filters) {
    const unsigned level = 3;
    if (f == Filter::kDeflate) H5Pset_deflate(plist.id(), 6);
    if (f == Filter::kShuffle) H5Pset_shuffle(plist.id());
    if (f == Filter::kFletcher32) H5Pset_fletcher32(plist.id());
    if (f == Filter::kZstd) H5Pset_filter(plist.id(), kZstdFilterId, 0, 1, &level);
  }
  return Handle(H5Dcreate2(file, "x", type, space.id(), H5P_DEFAULT, plist.id(), H5P_DEFAULT));
}

// Random shapes, chunks across all dimensions, ragged edges; random slabs of each.
TEST_F(ChunkTest, EveryFilterReadsWhatHdf5Reads) {
  for (const Storage& storage : storages()) {
    // Compact data lies in the object header, which takes 64 KiB: 20^3 elements of 8 bytes fit.
    const int64_t longest = storage.layout == Layout::kCompact ? 20 : 24;
    for (int trial = 0; trial < 8; ++trial) {
      const size_t rank = pick(1, 3);
      const int64_t width = std::vector<int64_t>{2, 4, 8}[pick(0, 2)];
      std::vector<hsize_t> dims, chunk;
      size_t n = 1;
      for (size_t i = 0; i < rank; ++i) {
        dims.push_back(pick(1, longest));
        chunk.push_back(pick(1, dims.back()));
        n *= dims.back();
      }
      SCOPED_TRACE(std::string(storage.name) + " trial " + std::to_string(trial));
      const std::vector<uint8_t> x = bytes(n * width);
      const hid_t type = width == 2 ? H5T_STD_I16LE : width == 4 ? H5T_IEEE_F32LE : H5T_STD_U64LE;
      const Hdf5Lock lock;
      const std::string name = path("x.h5");
      const Handle file(H5Fcreate(name.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
      {
        const Handle d = create(file.id(), storage, type, dims, chunk);
        ASSERT_GE(H5Dwrite(d.id(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, x.data()), 0);
      }
      std::vector<uint8_t> theirs(x.size());
      {
        const Handle d(H5Dopen2(file.id(), "x", H5P_DEFAULT));
        ASSERT_GE(H5Dread(d.id(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, theirs.data()), 0);
        ASSERT_EQ(theirs, x);
      }
      for (int part = 0; part < 4; ++part) {
        Slab slab;
        for (size_t i = 0; i < rank; ++i) {
          slab.start.push_back(pick(0, static_cast<int64_t>(dims[i]) - 1));
          slab.count.push_back(pick(1, static_cast<int64_t>(dims[i]) - slab.start[i]));
        }
        LargeBytes ours(7, 0xee), expected;
        const Status s = read_slab(file.id(), "/x", slab, &ours);
        ASSERT_TRUE(s) << s.message();
        for (int64_t e = 0; e < slab.elements(); ++e) {
          int64_t rest = e, index = 0, stride = 1;
          for (size_t i = rank; i-- > 0;) {
            index += stride * (slab.start[i] + rest % slab.count[i]);
            rest /= slab.count[i];
            stride *= static_cast<int64_t>(dims[i]);
          }
          expected.insert(expected.end(), x.begin() + index * width,
                          x.begin() + (index + 1) * width);
        }
        ASSERT_EQ(ours, expected);
      }
    }
  }
}

TEST_F(ChunkTest, ConvertedSlabsKeepTheirValues) {
  const Hdf5Lock lock;
  const Handle file(H5Fcreate(path("x.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
  const std::vector<int16_t> x = {-32768, -1, 0, 1, 32767};
  {
    const Handle d =
        create(file.id(), {"gzip", Layout::kChunked, {Filter::kDeflate}}, H5T_STD_I16BE, {5}, {2});
    ASSERT_GE(H5Dwrite(d.id(), H5T_NATIVE_INT16, H5S_ALL, H5S_ALL, H5P_DEFAULT, x.data()), 0);
  }
  std::vector<int64_t> integers;
  std::vector<double> doubles;
  std::vector<float> floats;
  ASSERT_TRUE(read_slab_as(file.id(), "/x", {{0}, {5}}, &integers));
  ASSERT_TRUE(read_slab_as(file.id(), "/x", {{1}, {4}}, &doubles));
  ASSERT_TRUE(read_slab_as(file.id(), "/x", {{4}, {1}}, &floats));
  EXPECT_EQ(integers, (std::vector<int64_t>{-32768, -1, 0, 1, 32767}));
  EXPECT_EQ(doubles, (std::vector<double>{-1, 0, 1, 32767}));
  EXPECT_EQ(floats, (std::vector<float>{32767}));
}

TEST_F(ChunkTest, SlabsOutsideAreRefused) {
  const Hdf5Lock lock;
  const Handle file(H5Fcreate(path("x.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
  { const Handle d = create(file.id(), storages()[0], H5T_IEEE_F32LE, {4, 6}, {}); }
  LargeBytes out;
  for (const Slab& slab : std::vector<Slab>{{{0}, {4}},
                                            {{0, 0}, {5, 6}},
                                            {{0, 1}, {4, 6}},
                                            {{-1, 0}, {1, 1}},
                                            {{0, 0}, {0, 6}},
                                            {{0, INT64_MAX}, {1, 1}},
                                            {{0, 1}, {1, INT64_MAX}}}) {
    EXPECT_EQ(read_slab(file.id(), "/x", slab, &out).code(), StatusCode::kInvalidArgument);
  }
}

// HDF5 1.10 itself reads past its buffer here: the stored chunk is shorter than its shape.
TEST_F(ChunkTest, ShortChunksAreRefused) {
  for (const uint32_t skipped : {0u, 1u}) {
    const Hdf5Lock lock;
    const Handle file(H5Fcreate(path("x.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
    {
      const Handle d = create(file.id(), {"gzip", Layout::kChunked, {Filter::kDeflate}},
                              H5T_IEEE_F32LE, {4096}, {4096});
      const std::vector<uint8_t> stored = skipped != 0 ? bytes(100) : gzip(bytes(100));
      const hsize_t origin = 0;
      ASSERT_GE(H5Dwrite_chunk(d.id(), H5P_DEFAULT, skipped, &origin, stored.size(), stored.data()),
                0);
    }
    LargeBytes out;
    const Status s = read_slab(file.id(), "/x", {{0}, {4096}}, &out);
    EXPECT_EQ(s.code(), StatusCode::kCorrupt);
    EXPECT_EQ(s.message(), "/x: a chunk decodes to 100 bytes, expected 16384");
  }
}

// What HDF5 stores of an unfiltered chunk may be longer than the shape that it names as its size.
TEST_F(ChunkTest, LongChunksAreRefused) {
  const Hdf5Lock lock;
  const Handle file(H5Fcreate(path("x.h5").c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
  {
    const Handle d = create(file.id(), storages()[2], H5T_IEEE_F32LE, {16}, {16});
    const std::vector<uint8_t> stored = bytes(2000);
    const hsize_t origin = 0;
    ASSERT_GE(H5Dwrite_chunk(d.id(), H5P_DEFAULT, 0, &origin, stored.size(), stored.data()), 0);
  }
  LargeBytes out;
  const Status s = read_slab(file.id(), "/x", {{0}, {16}}, &out);
  EXPECT_EQ(s.code(), StatusCode::kCorrupt);
  EXPECT_EQ(s.message(), "/x: a chunk decodes to 2000 bytes, expected 64");
}

TEST_F(ChunkTest, DamageIsAStatus) {
  const std::vector<uint8_t> x = bytes(1000);
  const ChunkPipeline plain = {{}, 2, 1000}, deflate = {{Filter::kDeflate}, 2, 1000},
                      zstandard = {{Filter::kZstd}, 2, 1000},
                      checksum = {{Filter::kFletcher32}, 2, 1000};
  const auto refuses = [](const ChunkPipeline& p, std::vector<uint8_t> data, uint32_t skipped = 0) {
    return decode_chunk(p, skipped, &data).code() == StatusCode::kCorrupt;
  };
  std::vector<uint8_t> good = gzip(x);
  ASSERT_TRUE(decode_chunk(deflate, 0, &good));
  EXPECT_EQ(good, x);
  good = x;
  ASSERT_TRUE(decode_chunk(deflate, 1, &good));  // the filter was not applied to this chunk
  EXPECT_EQ(good, x);
  EXPECT_TRUE(refuses(plain, {}));
  EXPECT_TRUE(refuses(plain, bytes(1001)));
  EXPECT_TRUE(refuses(deflate, gzip(bytes(999))));
  EXPECT_TRUE(refuses(deflate, gzip(std::vector<uint8_t>(1 << 20))));  // a thousandfold expansion
  EXPECT_TRUE(refuses(zstandard, zstd(std::vector<uint8_t>(1 << 20))));
  EXPECT_TRUE(refuses(zstandard, gzip(x)));
  EXPECT_TRUE(refuses(deflate, zstd(x)));
  EXPECT_TRUE(refuses(checksum, {1, 2, 3}));
  EXPECT_TRUE(refuses(checksum, bytes(1004)));
  for (const ChunkPipeline& p : {deflate, zstandard}) {
    const std::vector<uint8_t> stored = p.filters == deflate.filters ? gzip(x) : zstd(x);
    for (size_t n = 0; n < stored.size(); ++n) {
      EXPECT_TRUE(refuses(p, {stored.begin(), stored.begin() + n})) << n;
    }
  }
}

// Any bytes in any pipeline: a result of the right size or kCorrupt.
TEST_F(ChunkTest, RandomChunksNeverCrash) {
  const Filter all[] = {Filter::kDeflate, Filter::kShuffle, Filter::kFletcher32, Filter::kZstd};
  for (int trial = 0; trial < 3000; ++trial) {
    ChunkPipeline p;
    p.element_bytes = static_cast<int32_t>(pick(1, 8));
    p.chunk_bytes = pick(1, 300);
    for (int64_t i = pick(0, 4); i > 0; --i) p.filters.push_back(all[pick(0, 3)]);
    std::vector<uint8_t> data = bytes(pick(0, 300));
    if (trial % 3 == 1) data = gzip(data);
    if (trial % 3 == 2) data = zstd(data);
    if (!data.empty() && trial % 2 == 0) data[pick(0, data.size() - 1)] ^= 1 << pick(0, 7);
    const Status s = decode_chunk(p, static_cast<uint32_t>(rng_()), &data);
    if (s) {
      EXPECT_EQ(static_cast<int64_t>(data.size()), p.chunk_bytes);
    } else {
      EXPECT_EQ(s.code(), StatusCode::kCorrupt);
    }
  }
}

}  // namespace
}  // namespace tierkv::datasets

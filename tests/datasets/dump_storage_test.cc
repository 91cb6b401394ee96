// SPDX-License-Identifier: Apache-2.0
#include "tests/datasets/bad_dumps.h"

namespace tierkv::datasets {
namespace {

size_t no_filter(unsigned, size_t, const unsigned*, size_t bytes, size_t*, void**) {
  return bytes;
}

const std::vector<Case>& storage_cases() {
  using S = StatusCode;
  static const std::vector<Case> cases = {
      {"SoftLink",
       [](hid_t f) {
         remove(f, kKeys);
         ASSERT_GE(H5Lcreate_soft("/seq/a/layer/0/v", f, kKeys, H5P_DEFAULT, H5P_DEFAULT), 0);
       },
       S::kUnsupported, "/seq/a/layer/0/k: soft and external links are refused"},
      {"ExternalLink",
       [](hid_t f) {
         remove(f, "/seq/a/layer");
         ASSERT_GE(H5Lcreate_external("other.h5", "/seq/a/layer", f, "/seq/a/layer", H5P_DEFAULT,
                                      H5P_DEFAULT),
                   0);
       },
       S::kUnsupported, "/seq/a/layer: soft and external links are refused"},
      {"ExternalSequence",
       [](hid_t f) {
         ASSERT_GE(H5Lcreate_external("other.h5", "/", f, "/seq/b", H5P_DEFAULT, H5P_DEFAULT), 0);
       },
       S::kUnsupported, "/seq: member 'b': soft and external links are refused"},
      {"ExternalStorage",
       [](hid_t f) {
         create_keys(f, [](hid_t p) { H5Pset_external(p, "/etc/passwd", 0, 2 * kTokens * 8 * 2); });
       },
       S::kUnsupported, "/seq/a/layer/0/k: external storage is refused"},
      {"VirtualDataset",
       [](hid_t f) {
         const hsize_t dims[3] = {2, kTokens, 8};
         const Handle space(H5Screate_simple(3, dims, nullptr));
         create_keys(f,
                     [&](hid_t p) { H5Pset_virtual(p, space.id(), "other.h5", "/k", space.id()); });
       },
       S::kUnsupported, "/seq/a/layer/0/k: virtual datasets are refused"},
      {"UnknownFilter",
       [](hid_t f) {
         static const H5Z_class2_t kClass = {H5Z_CLASS_T_VERS, 300,     1,       1,
                                             "test",           nullptr, nullptr, no_filter};
         ASSERT_GE(H5Zregister(&kClass), 0);
         create_keys(f, [](hid_t p) {
           const hsize_t chunk[3] = {1, kTokens, 8};
           H5Pset_chunk(p, 3, chunk);
           H5Pset_filter(p, 300, H5Z_FLAG_OPTIONAL, 0, nullptr);
         });
         H5Zunregister(300);
       },
       S::kUnsupported,
       "/seq/a/layer/0/k: filter 300 is not known (gzip, shuffle, fletcher32 and zstd 32015 are)"},
      {"ScaleOffsetFilter",
       [](hid_t f) {
         create_keys(f, [](hid_t p) {
           const hsize_t chunk[3] = {1, kTokens, 8};
           H5Pset_chunk(p, 3, chunk);
           const unsigned values[2] = {0, 2};
           H5Pset_filter(p, H5Z_FILTER_NBIT, H5Z_FLAG_OPTIONAL, 2, values);
         });
       },
       S::kUnsupported, "/seq/a/layer/0/k: filter 5 is not known"},
      {"ChunksNeverWritten",
       [](hid_t f) {
         create_keys(f, [](hid_t p) {
           const hsize_t chunk[3] = {1, 2, 8};
           H5Pset_chunk(p, 3, chunk);
         });
       },
       S::kCorrupt, "/seq/a/layer/0/k: has 0 chunks, its shape needs 6"},
      {"ContiguousNeverWritten", [](hid_t f) { create_keys(f, [](hid_t) {}); }, S::kCorrupt,
       "/seq/a/layer/0/k: holds 0 bytes, its shape needs 160"},
      {"AbsurdTokens",
       [](hid_t f) {
         remove(f, "/seq/a/tokens");
         const Handle d = create_dataset(f, "/seq/a/tokens", H5T_STD_I32LE, {int64_t{1} << 27},
                                         {int64_t{1} << 20});
         ASSERT_TRUE(d.ok());
       },
       S::kCorrupt, "/seq/a/tokens: has 0 chunks, its shape needs 128"},
      {"AbsurdExtent",
       [](hid_t f) {
         remove(f, kKeys);
         const Handle d = create_dataset(f, kKeys, hdf5_type(DType::kFloat16).id(),
                                         {int64_t{1} << 20, int64_t{1} << 20, 8}, {1, 1, 8});
         ASSERT_TRUE(d.ok());
       },
       S::kCorrupt, "/seq/a/layer/0/k: is absurdly large (more than 2^40 elements)"},
      {"AbsurdChunk",
       [](hid_t f) {
         remove(f, kKeys);
         const hsize_t dims[3] = {2, kTokens, 8}, chunk[3] = {1, hsize_t{1} << 26, 8};
         const hsize_t most[3] = {2, H5S_UNLIMITED, 8};
         const Handle space(H5Screate_simple(3, dims, most)), p(H5Pcreate(H5P_DATASET_CREATE));
         H5Pset_chunk(p.id(), 3, chunk);
         const Handle d(H5Dcreate2(f, kKeys, hdf5_type(DType::kFloat16).id(), space.id(),
                                   H5P_DEFAULT, p.id(), H5P_DEFAULT));
         ASSERT_TRUE(d.ok());
       },
       S::kCorrupt, "/seq/a/layer/0/k: has chunks of more than 268435456 bytes"},
  };
  return cases;
}

class StorageTest : public DumpTest, public testing::WithParamInterface<Case> {};

TEST_P(StorageTest, IsNamedAndRefused) {
  expect_refused(GetParam(), path("bad.h5"));
}

INSTANTIATE_TEST_SUITE_P(Bad, StorageTest, testing::ValuesIn(storage_cases()), case_name);

}  // namespace
}  // namespace tierkv::datasets

// Every way in which a dump can contradict its format: a valid dump is changed through the HDF5
// API, then the reader must name the file, the object and what is wrong with it.
#include <hdf5.h>
#include <sys/stat.h>

#include <functional>

#include "datasets/hdf5_dataset.h"
#include "tests/datasets/dump_files.h"

namespace tierkv::datasets {
namespace {

constexpr int64_t kTokens = 5;
constexpr char kKeys[] = "/seq/a/layer/0/k";

void remove(hid_t file, const char* name) {
  ASSERT_GE(H5Ldelete(file, name, H5P_DEFAULT), 0);
}

// Replaces a dataset by a contiguous one of another type or shape, filled with `fill`.
void replace(hid_t file, const char* name, hid_t type, const std::vector<int64_t>& shape,
             double fill = 0.5) {
  if (H5Lexists(file, name, H5P_DEFAULT) > 0) remove(file, name);
  const Handle d = create_dataset(file, name, type, shape, {});
  ASSERT_TRUE(d.ok());
  int64_t n = 1;
  for (const int64_t s : shape) n *= s;
  const std::vector<double> x(n, fill);
  if (n > 0) {
    ASSERT_GE(H5Dwrite(d.id(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, x.data()), 0);
  }
}

void replace_f16(hid_t file, const char* name, const std::vector<int64_t>& shape,
                 double fill = 0.5) {
  replace(file, name, hdf5_type(DType::kFloat16).id(), shape, fill);
}

void write_integers(hid_t file, const char* name, const std::vector<int64_t>& values) {
  remove(file, name);
  const Handle d =
      create_dataset(file, name, H5T_STD_I64LE, {static_cast<int64_t>(values.size())}, {});
  ASSERT_GE(H5Dwrite(d.id(), H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), 0);
}

void drop_attribute(hid_t file, const char* name) {
  ASSERT_GE(H5Adelete(file, name), 0);
}
void set_int(hid_t file, const char* name, int64_t value) {
  drop_attribute(file, name);
  ASSERT_TRUE(write_int_attribute(file, name, value));
}
void set_double(hid_t file, const char* name, double value) {
  drop_attribute(file, name);
  ASSERT_TRUE(write_double_attribute(file, name, value));
}
void set_string(hid_t file, const char* name, const std::string& value) {
  drop_attribute(file, name);
  ASSERT_TRUE(write_string_attribute(file, name, value));
}

// k of shape [2, kTokens, 8] created with a property list that the case changes.
void create_keys(hid_t file, const std::function<void(hid_t)>& change) {
  remove(file, kKeys);
  const hsize_t dims[3] = {2, kTokens, 8};
  const Handle space(H5Screate_simple(3, dims, nullptr)), plist(H5Pcreate(H5P_DATASET_CREATE));
  change(plist.id());
  const Handle d(H5Dcreate2(file, kKeys, hdf5_type(DType::kFloat16).id(), space.id(), H5P_DEFAULT,
                            plist.id(), H5P_DEFAULT));
  ASSERT_TRUE(d.ok());
}

size_t no_filter(unsigned, size_t, const unsigned*, size_t bytes, size_t*, void**) {
  return bytes;
}

struct Case {
  const char* name;
  std::function<void(hid_t)> change;
  StatusCode code;
  const char* message;  // after "FILE: "
};

const std::vector<Case>& attribute_cases() {
  using S = StatusCode;
  static const std::vector<Case> cases = {
      {"NoFormat", [](hid_t f) { drop_attribute(f, "format"); }, S::kNotFound,
       "/: attribute 'format' is missing"},
      {"OtherFormat", [](hid_t f) { set_string(f, "format", "kv-\x1b[31mdump"); }, S::kCorrupt,
       "/: attribute 'format' is 'kv-?[31mdump' (expected 'kv-dump')"},
      {"LongFormat", [](hid_t f) { set_string(f, "format", std::string(60000, 'x')); }, S::kCorrupt,
       "xxx...' (expected 'kv-dump')"},
      {"FormatIsANumber", [](hid_t f) { set_int(f, "format", 1); }, S::kCorrupt,
       "/: attribute 'format' is not a string"},
      {"NewerVersion", [](hid_t f) { set_int(f, "format_version", 2); }, S::kVersion,
       "/: format_version 2 is not known (this build reads 1)"},
      {"VersionIsText", [](hid_t f) { set_string(f, "format_version", "1"); }, S::kCorrupt,
       "/: attribute 'format_version' is not an integer"},
      {"NoLayers", [](hid_t f) { drop_attribute(f, "num_layers"); }, S::kNotFound,
       "/: attribute 'num_layers' is missing"},
      {"ZeroLayers", [](hid_t f) { set_int(f, "num_layers", 0); }, S::kCorrupt,
       "/: attribute num_layers must be 1 to 4096"},
      {"AbsurdLayers", [](hid_t f) { set_int(f, "num_layers", int64_t{1} << 40); }, S::kCorrupt,
       "/: attribute 'num_layers' is absurd (1099511627776)"},
      {"NegativeHeads", [](hid_t f) { set_int(f, "num_kv_heads", -2); }, S::kCorrupt,
       "/: attribute num_kv_heads must be 1 to num_q_heads"},
      {"UnevenGroups", [](hid_t f) { set_int(f, "num_q_heads", 5); }, S::kCorrupt,
       "/: attribute num_q_heads is not a multiple of num_kv_heads"},
      {"HeadDim0", [](hid_t f) { set_int(f, "head_dim", 0); }, S::kCorrupt,
       "/: attribute head_dim must be 1 to 4096"},
      {"HeadDim4097", [](hid_t f) { set_int(f, "head_dim", 4097); }, S::kCorrupt,
       "/: attribute head_dim must be 1 to 4096"},
      {"OtherHeadDim", [](hid_t f) { set_int(f, "head_dim", 16); }, S::kCorrupt,
       "/seq/a/layer/0/k: has shape [2, 5, 8] (expected [2, 5, 16])"},
      {"ScaleZero", [](hid_t f) { set_double(f, "sm_scale", 0); }, S::kCorrupt,
       "/: attribute sm_scale must be positive and finite"},
      {"ScaleNan", [](hid_t f) { set_double(f, "sm_scale", NAN); }, S::kCorrupt,
       "/: attribute sm_scale must be positive and finite"},
      {"ScaleIsText", [](hid_t f) { set_string(f, "sm_scale", "0.1"); }, S::kCorrupt,
       "/: attribute 'sm_scale' is not a number"},
      {"ThetaInfinite", [](hid_t f) { set_double(f, "rope_theta", INFINITY); }, S::kCorrupt,
       "/: attribute 'rope_theta' must be finite and not negative"},
      {"ThetaIsText", [](hid_t f) { set_string(f, "rope_theta", "1e6"); }, S::kCorrupt,
       "/: attribute 'rope_theta' is not a number"},
      {"RopeTwo", [](hid_t f) { set_int(f, "rope_applied", 2); }, S::kCorrupt,
       "/: attribute 'rope_applied' must be 0 or 1"},
      {"NoDtype", [](hid_t f) { drop_attribute(f, "dtype"); }, S::kNotFound,
       "/: attribute 'dtype' is missing"},
      {"OtherDtype", [](hid_t f) { set_string(f, "dtype", "bfloat16"); }, S::kCorrupt,
       "/seq/a/layer/0/k: is float16 (expected bfloat16, as the attribute 'dtype' says)"},
      {"UnknownDtype", [](hid_t f) { set_string(f, "dtype", "float8"); }, S::kCorrupt,
       "/: attribute 'dtype' is 'float8' (expected float16, bfloat16 or float32)"},
      {"ModelIsANumber", [](hid_t f) { set_int(f, "model_id", 3); }, S::kCorrupt,
       "/: attribute 'model_id' is not a string"},
      {"ArrayAttribute",
       [](hid_t f) {
         drop_attribute(f, "head_dim");
         const hsize_t n = 1000;
         const Handle space(H5Screate_simple(1, &n, nullptr));
         const Handle a(
             H5Acreate2(f, "head_dim", H5T_NATIVE_INT, space.id(), H5P_DEFAULT, H5P_DEFAULT));
         ASSERT_TRUE(a.ok());
       },
       S::kCorrupt, "/: attribute 'head_dim' is not one value"},
  };
  return cases;
}

const std::vector<Case>& structure_cases() {
  using S = StatusCode;
  static const std::vector<Case> cases = {
      {"NoSequences", [](hid_t f) { remove(f, "/seq/a"); }, S::kCorrupt, "/seq: has no sequences"},
      {"NoSeqGroup", [](hid_t f) { remove(f, "/seq"); }, S::kNotFound, "/seq: is missing"},
      {"SeqIsADataset",
       [](hid_t f) {
         remove(f, "/seq");
         replace_f16(f, "/seq", {3});
       },
       S::kCorrupt, "/seq: is not a group"},
      {"SequenceIsADataset", [](hid_t f) { replace_f16(f, "/seq/b", {3}); }, S::kCorrupt,
       "/seq/b: is not a group"},
      {"SequenceNameWithEscape",
       [](hid_t f) {
         const Handle g(H5Gcreate2(f, "/seq/\x1b[2J", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
       },
       S::kCorrupt, "/seq: member '?[2J': has a name of more than 100 bytes or with control"},
      {"NoTokens", [](hid_t f) { remove(f, "/seq/a/tokens"); }, S::kNotFound,
       "/seq/a/tokens: is missing"},
      {"ZeroTokens",
       [](hid_t f) {
         replace(f, "/seq/a/tokens", H5T_STD_I32LE, {0});
         replace_f16(f, kKeys, {2, 0, 8});
       },
       S::kCorrupt, "/seq/a/tokens: has no tokens"},
      {"FloatTokens", [](hid_t f) { replace_f16(f, "/seq/a/tokens", {kTokens}); }, S::kCorrupt,
       "/seq/a/tokens: is float16 (expected int32)"},
      {"MoreTokensThanKeys", [](hid_t f) { replace(f, "/seq/a/tokens", H5T_STD_I32LE, {6}); },
       S::kCorrupt, "/seq/a/layer/0/k: has shape [2, 5, 8] (expected [2, 6, 8])"},
      {"MissingLayer", [](hid_t f) { remove(f, "/seq/a/layer/1"); }, S::kCorrupt,
       "/seq/a/layer: has 1 layers (expected num_layers = 2)"},
      {"LayerByAnotherName",
       [](hid_t f) {
         ASSERT_GE(H5Lmove(f, "/seq/a/layer/1", f, "/seq/a/layer/01", H5P_DEFAULT, H5P_DEFAULT), 0);
       },
       S::kNotFound, "/seq/a/layer/1/k: is missing"},
      {"MissingKeys", [](hid_t f) { remove(f, kKeys); }, S::kNotFound,
       "/seq/a/layer/0/k: is missing"},
      {"MissingValues", [](hid_t f) { remove(f, "/seq/a/layer/1/v"); }, S::kNotFound,
       "/seq/a/layer/1/v: is missing"},
      {"RaggedLayers",
       [](hid_t f) {
         replace_f16(f, "/seq/a/layer/1/k", {2, 4, 8});
       },
       S::kCorrupt, "/seq/a/layer/1/k: has shape [2, 4, 8] (expected [2, 5, 8])"},
      {"RaggedComponents",
       [](hid_t f) {
         replace_f16(f, "/seq/a/layer/0/v", {2, 6, 8});
       },
       S::kCorrupt, "/seq/a/layer/0/v: has shape [2, 6, 8] (expected [2, 5, 8])"},
      {"WrongRank",
       [](hid_t f) {
         replace_f16(f, kKeys, {2, 40});
       },
       S::kCorrupt, "/seq/a/layer/0/k: has shape [2, 40] (expected [2, 5, 8])"},
      {"RankFour",
       [](hid_t f) {
         replace_f16(f, kKeys, {1, 2, 5, 8});
       },
       S::kCorrupt, "/seq/a/layer/0/k: has rank 4 (expected 1 to 3)"},
      {"ScalarKeys",
       [](hid_t f) {
         remove(f, kKeys);
         const Handle space(H5Screate(H5S_SCALAR));
         const Handle d(H5Dcreate2(f, kKeys, H5T_IEEE_F32LE, space.id(), H5P_DEFAULT, H5P_DEFAULT,
                                   H5P_DEFAULT));
       },
       S::kCorrupt, "/seq/a/layer/0/k: is not an array"},
      {"KeysAreAGroup",
       [](hid_t f) {
         remove(f, kKeys);
         const Handle g(H5Gcreate2(f, kKeys, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
       },
       S::kCorrupt, "/seq/a/layer/0/k: is not a dataset"},
      {"IntegerKeys",
       [](hid_t f) {
         replace(f, kKeys, H5T_STD_I16LE, {2, 5, 8});
       },
       S::kCorrupt,
       "/seq/a/layer/0/k: is 16-bit integer (expected little-endian float16, bfloat16 or float32)"},
      {"DoubleKeys",
       [](hid_t f) {
         replace(f, kKeys, H5T_IEEE_F64LE, {2, 5, 8});
       },
       S::kCorrupt, "/seq/a/layer/0/k: is 64-bit float (expected"},
      {"BigEndianKeys",
       [](hid_t f) {
         replace(f, kKeys, H5T_IEEE_F32BE, {2, 5, 8});
       },
       S::kCorrupt, "/seq/a/layer/0/k: is 32-bit float, big-endian (expected"},
      {"StringKeys",
       [](hid_t f) {
         remove(f, kKeys);
         const Handle type(H5Tcopy(H5T_C_S1));
         H5Tset_size(type.id(), H5T_VARIABLE);
         const Handle d = create_dataset(f, kKeys, type.id(), {2, 5, 8}, {});
       },
       S::kCorrupt, "/seq/a/layer/0/k: is not an array of numbers"},
      {"SignificanceShape",
       [](hid_t f) {
         replace(f, "/seq/a/layer/0/significance", H5T_IEEE_F32LE, {2, 4});
       },
       S::kCorrupt, "/seq/a/layer/0/significance: has shape [2, 4] (expected [2, 5])"},
      {"SignificanceType",
       [](hid_t f) {
         replace_f16(f, "/seq/a/layer/0/significance", {2, 5});
       },
       S::kCorrupt, "/seq/a/layer/0/significance: is float16 (expected float32)"},
      {"QueriesWithoutPositions", [](hid_t f) { remove(f, "/seq/a/layer/0/q_positions"); },
       S::kNotFound, "/seq/a/layer/0/q_positions: is missing"},
      {"PositionsWithoutQueries", [](hid_t f) { remove(f, "/seq/a/layer/0/q"); }, S::kCorrupt,
       "/seq/a/layer/0/q: is missing beside q_positions"},
      {"QueriesOfOtherHeads",
       [](hid_t f) {
         replace_f16(f, "/seq/a/layer/0/q", {2, 2, 8});
       },
       S::kCorrupt, "/seq/a/layer/0/q: has shape [2, 2, 8] (expected [4, any, 8])"},
      {"NoQueryPositions",
       [](hid_t f) {
         replace_f16(f, "/seq/a/layer/0/q", {4, 0, 8});
       },
       S::kCorrupt, "/seq/a/layer/0/q: has 0 positions (expected 1 to 5)"},
      {"MoreQueriesThanPositions",
       [](hid_t f) {
         replace_f16(f, "/seq/a/layer/0/q", {4, 3, 8});
       },
       S::kCorrupt, "/seq/a/layer/0/q_positions: has shape [2] (expected [3])"},
  };
  return cases;
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

// Refused when values are read, not when the file is opened.
const std::vector<Case>& value_cases() {
  using S = StatusCode;
  static const std::vector<Case> cases = {
      {"InfiniteKeys",
       [](hid_t f) {
         replace_f16(f, kKeys, {2, 5, 8}, INFINITY);
       },
       S::kNonFinite, "/seq/a/layer/0/k: element [0, 0, 0] is not finite"},
      {"NanQueries",
       [](hid_t f) {
         replace_f16(f, "/seq/a/layer/1/q", {4, 2, 8}, NAN);
       },
       S::kNonFinite, "/seq/a/layer/1/q: element [0, 0, 0] is not finite"},
      {"NanSignificance",
       [](hid_t f) {
         replace(f, "/seq/a/layer/0/significance", H5T_IEEE_F32LE, {2, 5}, NAN);
       },
       S::kNonFinite, "/seq/a/layer/0/significance: element [0, 0] is not finite"},
      {"NegativeSignificance",
       [](hid_t f) {
         replace(f, "/seq/a/layer/0/significance", H5T_IEEE_F32LE, {2, 5}, -1);
       },
       S::kCorrupt, "/seq/a/layer/0/significance: element [0, 0] is negative"},
      {"PositionBeyondTheEnd",
       [](hid_t f) {
         write_integers(f, "/seq/a/layer/0/q_positions", {3, 5});
       },
       S::kCorrupt, "/seq/a/layer/0/q_positions: element [1] is 5 (expected increasing positions"},
      {"NegativePosition",
       [](hid_t f) {
         write_integers(f, "/seq/a/layer/0/q_positions", {-1, 3});
       },
       S::kCorrupt, "/seq/a/layer/0/q_positions: element [0] is -1"},
      {"RepeatedPosition",
       [](hid_t f) {
         write_integers(f, "/seq/a/layer/0/q_positions", {3, 3});
       },
       S::kCorrupt, "/seq/a/layer/0/q_positions: element [1] is 3"},
      {"TokenBeyondInt32",
       [](hid_t f) {
         write_integers(f, "/seq/a/tokens", {1, 2, 3, int64_t{1} << 31, 5});
       },
       S::kCorrupt, "/seq/a/tokens: element [3] is 2147483648 (expected an int32)"},
  };
  return cases;
}

class CheckTest : public DumpTest, public testing::WithParamInterface<Case> {};

TEST_P(CheckTest, IsNamedAndRefused) {
  const Case& c = GetParam();
  const std::string file = path("bad.h5");
  ASSERT_TRUE(write_small(file, kTokens));
  {
    const Hdf5Lock lock;
    const Handle f(H5Fopen(file.c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    ASSERT_TRUE(f.ok());
    c.change(f.id());
  }
  const Result<DumpReader> dump = DumpReader::open(file);
  const Status s = dump ? read_everything(*dump) : dump.status();
  EXPECT_EQ(s.code(), c.code) << s.message();
  EXPECT_EQ(s.message().rfind(file + ": /", 0), 0u) << s.message();
  EXPECT_NE(s.message().find(c.message), std::string::npos) << s.message();
  EXPECT_LT(s.message().size(), file.size() + 300);
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Attributes, CheckTest, testing::ValuesIn(attribute_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Structure, CheckTest, testing::ValuesIn(structure_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Storage, CheckTest, testing::ValuesIn(storage_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Values, CheckTest, testing::ValuesIn(value_cases()), case_name);

class OpenTest : public DumpTest {
 protected:
  void expect_refused(const std::string& file, StatusCode code, const std::string& message) {
    const Status s = DumpReader::open(file).status();
    EXPECT_EQ(s.code(), code) << s.message();
    EXPECT_EQ(s.message(), file + ": " + message);
  }
};

TEST_F(OpenTest, WhatIsNoFileOfOursIsRefused) {
  expect_refused(path("nothing"), StatusCode::kIo, "No such file or directory");
  expect_refused(dir_.string(), StatusCode::kIo, "is not a regular file");
  ASSERT_EQ(mkfifo(path("fifo").c_str(), 0600), 0);
  expect_refused(path("fifo"), StatusCode::kIo, "is not a regular file");
  std::ofstream(path("empty")).close();
  expect_refused(path("empty"), StatusCode::kCorrupt, "is empty");
  std::string noise(10000, '\0');
  for (char& c : noise) c = static_cast<char>(rng_());
  std::ofstream(path("noise"), std::ios::binary) << noise;
  expect_refused(path("noise"), StatusCode::kCorrupt, "is not an HDF5 file");
}

// As h5py writes Python values: True is an enumeration, 10000 an integer.
TEST_F(OpenTest, AttributesOfPythonsTypesAreRead) {
  ASSERT_TRUE(write_small(path("d.h5"), kTokens));
  {
    const Hdf5Lock lock;
    const Handle f(H5Fopen(path("d.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    drop_attribute(f.id(), "rope_applied");
    const Handle type(H5Tenum_create(H5T_NATIVE_INT8)), space(H5Screate(H5S_SCALAR));
    int8_t value = 0;
    H5Tenum_insert(type.id(), "FALSE", &value);
    value = 1;
    H5Tenum_insert(type.id(), "TRUE", &value);
    const Handle a(
        H5Acreate2(f.id(), "rope_applied", type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT));
    ASSERT_GE(H5Awrite(a.id(), type.id(), &value), 0);
    set_int(f.id(), "rope_theta", 500000);
    set_int(f.id(), "sm_scale", 1);
    drop_attribute(f.id(), "model_id");
  }
  const Result<DumpReader> dump = DumpReader::open(path("d.h5"));
  ASSERT_TRUE(dump) << dump.status().message();
  EXPECT_TRUE(dump->info().layout.rope_applied);
  EXPECT_EQ(dump->info().layout.rope_theta, 500000);
  EXPECT_EQ(dump->info().layout.sm_scale, 1);
  EXPECT_EQ(dump->info().model_id, "");
}

TEST_F(OpenTest, TheFirstBadElementIsNamedByItsIndex) {
  ASSERT_TRUE(write_small(path("d.h5"), kTokens));
  {
    const Hdf5Lock lock;
    const Handle f(H5Fopen(path("d.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    const Handle d(H5Dopen2(f.id(), "/seq/a/layer/1/v", H5P_DEFAULT));
    std::vector<float> x(2 * kTokens * 8, 1.0f);
    x[(1 * kTokens + 3) * 8 + 6] = NAN;
    x[(1 * kTokens + 4) * 8 + 1] = NAN;
    ASSERT_GE(H5Dwrite(d.id(), H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, x.data()), 0);
  }
  const Result<DumpReader> dump = DumpReader::open(path("d.h5"));
  ASSERT_TRUE(dump);
  RowData row;
  EXPECT_TRUE(dump->read_row(0, 1, 0, Component::kValue, &row));
  const Status s = dump->read_row(0, 1, 1, Component::kValue, &row);
  EXPECT_EQ(s.code(), StatusCode::kNonFinite);
  EXPECT_NE(s.message().find("/seq/a/layer/1/v: element [1, 3, 6] is not finite"),
            std::string::npos)
      << s.message();
}

TEST_F(OpenTest, TheCallersErrorPrinterIsPutBack) {
  H5E_auto2_t before = nullptr, after = nullptr;
  void *before_data = nullptr, *after_data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &before, &before_data);
  ASSERT_TRUE(write_small(path("d.h5"), kTokens));
  ASSERT_TRUE(DumpReader::open(path("d.h5")));
  H5Eget_auto2(H5E_DEFAULT, &after, &after_data);
  EXPECT_NE(before, nullptr);
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace tierkv::datasets

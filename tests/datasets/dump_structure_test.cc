// SPDX-License-Identifier: Apache-2.0
#include "tests/datasets/bad_dumps.h"

namespace tierkv::datasets {
namespace {

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
      {"QueriesOfAnotherType",
       [](hid_t f) {
         replace(f, "/seq/a/layer/0/q", H5T_IEEE_F32LE, {4, 2, 8});
       },
       S::kCorrupt,
       "/seq/a/layer/0/q: is float32 (expected float16, as the attribute 'dtype' says)"},
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

class StructureTest : public DumpTest, public testing::WithParamInterface<Case> {};

TEST_P(StructureTest, IsNamedAndRefused) {
  expect_refused(GetParam(), path("bad.h5"));
}

INSTANTIATE_TEST_SUITE_P(Bad, StructureTest, testing::ValuesIn(structure_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(BadValues, StructureTest, testing::ValuesIn(value_cases()), case_name);

}  // namespace
}  // namespace tierkv::datasets

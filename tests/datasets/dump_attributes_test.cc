// SPDX-License-Identifier: Apache-2.0
#include "tests/datasets/bad_dumps.h"

namespace tierkv::datasets {
namespace {

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

class AttributesTest : public DumpTest, public testing::WithParamInterface<Case> {};

TEST_P(AttributesTest, IsNamedAndRefused) {
  expect_refused(GetParam(), path("bad.h5"));
}

INSTANTIATE_TEST_SUITE_P(Bad, AttributesTest, testing::ValuesIn(attribute_cases()), case_name);

}  // namespace
}  // namespace tierkv::datasets

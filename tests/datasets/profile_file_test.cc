#include "datasets/profile_file.h"

#include "tests/datasets/bad_dumps.h"

namespace tierkv::datasets {
namespace {

class ProfileTest : public DumpTest {
 protected:
  Profile random_profile(bool matrices) {
    Profile p;
    p.num_layers = 3;
    p.num_kv_heads = 2;
    p.head_dim = 8;
    p.alpha_high = 1.5;
    p.alpha_low = 0.25;
    p.rows.resize(6);
    if (matrices) p.balance = {0.025, 0.2, 0.15};
    for (RowProfile& r : p.rows) {
      if (matrices) r.key_step_scale = 2.5, r.value_step_scale = 0.75;
      r.query_trace = values(1, DType::kFloat32)[0];
      r.value_signal = 2 * r.query_trace;
      r.key_matrix_trace = 3 * r.query_trace;
      r.value_matrix_trace = 4 * r.query_trace;
      r.key_mean = values(8, DType::kFloat32);
      r.value_mean = values(8, DType::kFloat32);
      for (auto* m : {&r.key_forward, &r.key_inverse, &r.value_forward, &r.value_inverse}) {
        if (matrices) *m = values(64, DType::kFloat32);
      }
    }
    return p;
  }
  void change(const std::function<void(hid_t)>& edit) {
    const Hdf5Lock lock;
    const Handle f(H5Fopen(path("p.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    edit(f.id());
  }
};

TEST_F(ProfileTest, RoundTripKeepsEverything) {
  for (const bool matrices : {false, true}) {
    const Profile p = random_profile(matrices);
    const Status s = write_profile(path("p.h5"), p);
    ASSERT_TRUE(s) << s.message();
    const Result<Profile> r = read_profile(path("p.h5"));
    ASSERT_TRUE(r) << r.status().message();
    EXPECT_EQ(r->num_layers, 3);
    EXPECT_EQ(r->alpha_high, 1.5);
    EXPECT_EQ(r->alpha_low, 0.25);
    EXPECT_EQ(r->balance.error, p.balance.error);
    EXPECT_EQ(r->balance.k, p.balance.k);
    EXPECT_EQ(r->balance.v, p.balance.v);
    for (int i = 0; i < 6; ++i) {
      const RowProfile &a = p.rows[i], &b = r->rows[i];
      EXPECT_EQ(a.query_trace, b.query_trace);
      EXPECT_EQ(a.value_signal, b.value_signal);
      EXPECT_EQ(a.key_matrix_trace, b.key_matrix_trace);
      EXPECT_EQ(a.value_matrix_trace, b.value_matrix_trace);
      EXPECT_EQ(a.key_step_scale, b.key_step_scale);
      EXPECT_EQ(a.value_step_scale, b.value_step_scale);
      EXPECT_EQ(a.key_mean, b.key_mean);
      EXPECT_EQ(a.value_mean, b.value_mean);
      EXPECT_EQ(a.key_forward, b.key_forward);
      EXPECT_EQ(a.key_inverse, b.key_inverse);
      EXPECT_EQ(a.value_forward, b.value_forward);
      EXPECT_EQ(a.value_inverse, b.value_inverse);
    }
    EXPECT_EQ(files_in_dir(), 1);
  }
}

TEST_F(ProfileTest, BadProfilesAreNamed) {
  const struct {
    std::function<void(hid_t)> edit;
    StatusCode code;
    const char* message;
  } cases[] = {
      {[](hid_t f) { set_string(f, "format", "kv-dump"); }, StatusCode::kCorrupt,
       "/: attribute 'format' is 'kv-dump' (expected 'kv-profile')"},
      {[](hid_t f) { set_int(f, "format_version", 2); }, StatusCode::kVersion,
       "/: format_version 2 is not known"},
      {[](hid_t f) { set_int(f, "head_dim", 4097); }, StatusCode::kCorrupt,
       "/: attribute 'head_dim' must be 1 to 4096"},
      {[](hid_t f) { set_int(f, "num_layers", 4); }, StatusCode::kCorrupt,
       "/statistics: has another shape"},
      {[](hid_t f) { set_double(f, "alpha_h", NAN); }, StatusCode::kCorrupt,
       "/: attributes must satisfy alpha_h >= alpha_l >= 0"},
      {[](hid_t f) { set_double(f, "alpha_l", 2); }, StatusCode::kCorrupt,
       "/: attributes must satisfy alpha_h >= alpha_l >= 0"},
      {[](hid_t f) { drop_attribute(f, "alpha_l"); }, StatusCode::kNotFound,
       "/: attribute 'alpha_l' is missing"},
      {[](hid_t f) { remove(f, "/key_mean"); }, StatusCode::kNotFound, "/key_mean: is missing"},
      {[](hid_t f) {
         replace(f, "/key_mean", H5T_IEEE_F32LE, {6, 8}, INFINITY);
       },
       StatusCode::kNonFinite, "/key_mean: holds a value that is not finite"},
      {[](hid_t f) {
         replace(f, "/key_forward", H5T_IEEE_F32LE, {6, 8, 7});
       },
       StatusCode::kCorrupt, "/key_forward: has another shape"},
      {[](hid_t f) { set_double(f, "balance_v", 0); }, StatusCode::kCorrupt,
       "/: attribute 'balance_v' must be positive"},
      {[](hid_t f) { drop_attribute(f, "balance_k"); }, StatusCode::kNotFound,
       "/: attribute 'balance_k' is missing"},
      {[](hid_t f) {
         replace(f, "/step_scales", H5T_IEEE_F64LE, {6, 2}, -1);
       },
       StatusCode::kCorrupt, "/step_scales: scales must be positive"},
      {[](hid_t f) {
         replace(f, "/step_scales", H5T_IEEE_F64LE, {6, 1}, 1);
       },
       StatusCode::kCorrupt, "/step_scales: has another shape"},
      {[](hid_t f) {
         remove(f, "/value_mean");
         ASSERT_GE(H5Lcreate_external("o.h5", "/x", f, "/value_mean", H5P_DEFAULT, H5P_DEFAULT), 0);
       },
       StatusCode::kUnsupported, "/value_mean: soft and external links are refused"},
  };
  for (const auto& c : cases) {
    ASSERT_TRUE(write_profile(path("p.h5"), random_profile(true)));
    change(c.edit);
    const Status s = read_profile(path("p.h5")).status();
    EXPECT_EQ(s.code(), c.code) << s.message();
    EXPECT_NE(s.message().find(path("p.h5") + ": " + c.message), std::string::npos) << s.message();
  }
  EXPECT_EQ(read_profile(path("none")).status().code(), StatusCode::kIo);
  EXPECT_EQ(write_profile(path("x.h5"), Profile()).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(write_small(path("d.h5"), 3));
  EXPECT_EQ(read_profile(path("d.h5")).status().code(), StatusCode::kCorrupt);
}

}  // namespace
}  // namespace tierkv::datasets

// SPDX-License-Identifier: Apache-2.0
#include "datasets/profile_file.h"

#include <cmath>

#include "tests/datasets/bad_dumps.h"

namespace tierkv::datasets {
namespace {

class ProfileTest : public DumpTest {
 protected:
  std::vector<double> positive(int n) {
    std::vector<double> out;
    for (const float v : values(n, DType::kFloat32)) out.push_back(1e-5 + std::abs(v));
    return out;
  }
  // Everything that a profile can hold, or only what it must.
  Profile random_profile(bool full) {
    Profile p;
    p.model_id = "a/model";
    p.num_layers = 3;
    p.num_q_heads = 6;
    p.num_kv_heads = 2;
    p.head_dim = 8;
    p.sm_scale = 0.375;
    p.alpha_high = 1.5;
    p.alpha_low = 0.25;
    p.rows.resize(6);
    for (RowProfile& r : p.rows) {
      r.query_trace = positive(1)[0];
      r.value_signal = positive(1)[0];
      r.key_mean = values(8, DType::kFloat32);
      r.value_mean = values(8, DType::kFloat32);
      if (!full) continue;
      r.key_scale = positive(1)[0];
      r.value_scale = positive(1)[0];
      r.key_mean_before_rope = values(8, DType::kFloat32);
      for (const double e : positive(8)) r.query_energy.push_back(static_cast<float>(e));
    }
    if (!full) return p;
    p.key_sensitivity = positive(6);
    p.value_sensitivity = positive(6);
    p.joint_sensitivity = positive(6);
    p.rope = {{RopePairing::kNeighbours, 6, {1, 0.5f, 0.25f}},
              Rope(),
              {RopePairing::kNeighbours, 6, {1, 0.125f, 0}}};
    return p;
  }
  void change(const std::function<void(hid_t)>& edit) {
    const Hdf5Lock lock;
    const Handle f(H5Fopen(path("p.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    edit(f.id());
  }
};

void expect_equal(const Profile& a, const Profile& b) {
  EXPECT_EQ(a.model_id, b.model_id);
  EXPECT_EQ(a.num_layers, b.num_layers);
  EXPECT_EQ(a.num_q_heads, b.num_q_heads);
  EXPECT_EQ(a.num_kv_heads, b.num_kv_heads);
  EXPECT_EQ(a.head_dim, b.head_dim);
  EXPECT_EQ(a.sm_scale, b.sm_scale);
  EXPECT_EQ(a.alpha_high, b.alpha_high);
  EXPECT_EQ(a.alpha_low, b.alpha_low);
  EXPECT_EQ(a.rope, b.rope);
  EXPECT_EQ(a.key_sensitivity, b.key_sensitivity);
  EXPECT_EQ(a.value_sensitivity, b.value_sensitivity);
  EXPECT_EQ(a.joint_sensitivity, b.joint_sensitivity);
  ASSERT_EQ(a.rows.size(), b.rows.size());
  for (size_t i = 0; i < a.rows.size(); ++i) {
    for (const auto field : {&RowProfile::key_mean, &RowProfile::value_mean,
                             &RowProfile::key_mean_before_rope, &RowProfile::query_energy}) {
      EXPECT_EQ(a.rows[i].*field, b.rows[i].*field);
    }
    for (const auto field : {&RowProfile::query_trace, &RowProfile::value_signal,
                             &RowProfile::key_scale, &RowProfile::value_scale}) {
      EXPECT_EQ(a.rows[i].*field, b.rows[i].*field);
    }
  }
}

TEST_F(ProfileTest, RoundTripKeepsEverything) {
  Profile same_rope = random_profile(true), no_rope = random_profile(true);
  same_rope.rope = {Rope::plain(1e4, 8)};
  no_rope.rope = {Rope()};
  for (const Profile& p : {random_profile(false), random_profile(true), same_rope, no_rope}) {
    const Status s = write_profile(path("p.h5"), p);
    ASSERT_TRUE(s) << s.message();
    const Result<Profile> r = read_profile(path("p.h5"));
    ASSERT_TRUE(r) << r.status().message();
    expect_equal(p, *r);
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
      {[](hid_t f) { set_int(f, "format_version", 1); }, StatusCode::kVersion,
       "/: format_version 1 is not known (this build reads 2)"},
      {[](hid_t f) { drop_attribute(f, "model_id"); }, StatusCode::kNotFound,
       "/: attribute 'model_id' is missing"},
      {[](hid_t f) { set_int(f, "num_q_heads", 7); }, StatusCode::kCorrupt,
       "/: attribute 'num_q_heads' is not a multiple of 'num_kv_heads'"},
      {[](hid_t f) { set_double(f, "sm_scale", 0); }, StatusCode::kCorrupt,
       "/: attribute 'sm_scale' must be positive"},
      {[](hid_t f) { set_string(f, "rope_pairing", "quarters"); }, StatusCode::kCorrupt,
       "/: attribute 'rope_pairing' is 'quarters'"},
      {[](hid_t f) { set_string(f, "rope_pairing", "none"); }, StatusCode::kCorrupt,
       "/: attribute 'rope_dims' must be 0 with rope_pairing 'none'"},
      {[](hid_t f) { set_int(f, "rope_dims", 10); }, StatusCode::kCorrupt,
       "/: attribute 'rope_dims' must be even and 2 to 8"},
      {[](hid_t f) { set_int(f, "rope_dims", 4); }, StatusCode::kCorrupt,
       "/rope_inv_freq: has another shape"},
      {[](hid_t f) {
         replace(f, "/rope_inv_freq", H5T_IEEE_F32LE, {3, 3}, -1);
       },
       StatusCode::kCorrupt, "/rope_inv_freq: rope: a frequency is negative"},
      {[](hid_t f) { set_int(f, "head_dim", 4097); }, StatusCode::kCorrupt,
       "/: attribute 'head_dim' must be 1 to 4096"},
      {[](hid_t f) { set_int(f, "num_layers", 4); }, StatusCode::kCorrupt,
       "/rope_inv_freq: has another shape"},
      {[](hid_t f) { set_int(f, "num_kv_heads", 3); }, StatusCode::kCorrupt,
       "/key_mean: has another shape"},
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
         replace(f, "/query_energy", H5T_IEEE_F32LE, {6, 7});
       },
       StatusCode::kCorrupt, "/query_energy: has another shape"},
      {[](hid_t f) {
         replace(f, "/query_energy", H5T_IEEE_F32LE, {6, 8}, -1);
       },
       StatusCode::kCorrupt, "/query_energy: holds a negative value"},
      {[](hid_t f) { replace(f, "/key_scale", H5T_IEEE_F64LE, {6}, 0); }, StatusCode::kCorrupt,
       "/key_scale: holds a value that is not positive"},
      {[](hid_t f) { remove(f, "/value_scale"); }, StatusCode::kNotFound,
       "/value_scale: is missing"},
      {[](hid_t f) { replace(f, "/query_trace", H5T_IEEE_F64LE, {6}, -1); }, StatusCode::kCorrupt,
       "/query_trace: holds a value that is negative"},
      {[](hid_t f) { replace(f, "/joint_sensitivity", H5T_IEEE_F64LE, {5}, 1); },
       StatusCode::kCorrupt, "/joint_sensitivity: has another shape"},
      {[](hid_t f) { replace(f, "/key_sensitivity", H5T_IEEE_F64LE, {6}, NAN); },
       StatusCode::kNonFinite, "/key_sensitivity: holds a value that is not finite"},
      {[](hid_t f) { replace(f, "/value_sensitivity", H5T_IEEE_F64LE, {6}, 0); },
       StatusCode::kCorrupt, "/value_sensitivity: holds a value that is not positive"},
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
  ASSERT_TRUE(write_small(path("d.h5"), 3));
  EXPECT_EQ(read_profile(path("d.h5")).status().code(), StatusCode::kCorrupt);
}

TEST_F(ProfileTest, ProfilesThatAreNotValidAreNotWritten) {
  const struct {
    std::function<void(Profile*)> edit;
    const char* message;
  } cases[] = {
      {[](Profile* p) { p->model_id.clear(); }, "model_id: is empty"},
      {[](Profile* p) { p->rows.pop_back(); }, "rows: a profile needs a row"},
      {[](Profile* p) { p->rows[4].query_energy.clear(); }, "query_energy: some rows have it"},
      {[](Profile* p) { p->rows[0].key_mean.pop_back(); }, "key_mean: row 0 has 7 numbers, not 8"},
      {[](Profile* p) { p->joint_sensitivity.pop_back(); }, "joint_sensitivity: has 5 numbers"},
      {[](Profile* p) { p->rope.pop_back(); }, "rope: has 2 layers, not 1 or 3"},
      {[](Profile* p) { p->rope[0].pairing = RopePairing::kHalves; }, "rope: layers differ"},
      {[](Profile* p) {
         p->rope = {{RopePairing::kHalves, 0, {}}};
       },
       "rope: a pairing without rotary dims"},
      {[](Profile* p) { p->model_id.assign(65537, 'x'); }, "model_id has 65537 bytes"},
      {[](Profile* p) { p->alpha_low = 2; }, "alpha_high, alpha_low"},
  };
  for (const auto& c : cases) {
    Profile p = random_profile(true);
    c.edit(&p);
    const Status s = write_profile(path("x.h5"), p);
    EXPECT_FALSE(s);
    EXPECT_NE(s.message().find(path("x.h5") + ": " + c.message), std::string::npos) << s.message();
  }
  EXPECT_EQ(files_in_dir(), 0);
}

}  // namespace
}  // namespace tierkv::datasets

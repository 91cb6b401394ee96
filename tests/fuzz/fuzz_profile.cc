// SPDX-License-Identifier: Apache-2.0
// Profiles whose attributes, shapes, types, filters and links are drawn from the input, built by
// HDF5 itself in memory. The files are sound HDF5 (fuzz_dump_attributes.cc says why).
#include <hdf5.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "datasets/profile_file.h"
#include "tests/fuzz/hdf5_input.h"

namespace tierkv::datasets {
namespace {

void rope(Input& in, hid_t file, hid_t root, hsize_t layers, hsize_t head_dim) {
  const char* pairings[] = {"halves", "neighbours", "none"};
  const uint8_t choice = in.byte() % 4;
  if (choice == 3) return;
  const hsize_t dims = choice == 2 ? 0 : head_dim / 2 * 2;
  attribute_string(in, root, "rope_pairing", pairings[choice]);
  attribute_int(in, root, "rope_dims", static_cast<int64_t>(dims));
  if (dims == 0) return;
  std::vector<hsize_t> shape = {dims / 2};
  if (in.one_in(2)) shape.insert(shape.begin(), layers);
  dataset(in, file, "rope_inv_freq", H5T_IEEE_F32LE, shape);
}

void build(Input& in, hid_t file) {
  const hsize_t layers = 1 + in.byte() % 3, heads = 1 + in.byte() % 2, dim = 2 + in.byte() % 8;
  const Handle root(H5Gopen2(file, "/", H5P_DEFAULT));
  attribute_string(in, root.id(), "format", "kv-profile");
  attribute_int(in, root.id(), "format_version", 2);
  attribute_string(in, root.id(), "model_id", "fuzz");
  attribute_int(in, root.id(), "num_layers", static_cast<int64_t>(layers));
  attribute_int(in, root.id(), "num_q_heads", static_cast<int64_t>(heads * 2));
  attribute_int(in, root.id(), "num_kv_heads", static_cast<int64_t>(heads));
  attribute_int(in, root.id(), "head_dim", static_cast<int64_t>(dim));
  attribute_double(in, root.id(), "sm_scale", 0.5);
  attribute_double(in, root.id(), "alpha_h", 1);
  attribute_double(in, root.id(), "alpha_l", 0);
  rope(in, file, root.id(), layers, dim);
  const hsize_t rows = layers * heads;
  for (const char* name : {"key_mean", "value_mean", "key_mean_before_rope", "query_energy"})
    dataset(in, file, name, H5T_IEEE_F32LE, {rows, dim});
  for (const char* name : {"query_trace", "value_signal", "key_scale", "value_scale",
                           "key_sensitivity", "value_sensitivity", "joint_sensitivity"}) {
    dataset(in, file, name, H5T_IEEE_F64LE, {rows}, 1);
  }
}

std::vector<char> make_image(Input& in) {
  const Hdf5Lock lock;
  const Handle access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_fapl_core(access.id(), 1 << 16, false);
  const Handle file(H5Fcreate("fuzz", H5F_ACC_TRUNC, H5P_DEFAULT, access.id()));
  build(in, file.id());
  H5Fflush(file.id(), H5F_SCOPE_GLOBAL);
  std::vector<char> image(std::max<ssize_t>(0, H5Fget_file_image(file.id(), nullptr, 0)));
  H5Fget_file_image(file.id(), image.data(), image.size());
  return image;
}

// What was read keeps every promise of codec/policy/profile.h.
void use(const Profile& p) {
  if (!p.validate()) std::abort();
  if (!p.rope.empty() && p.rope_of(p.num_layers - 1) == nullptr) std::abort();
  if (p.joint_sensitivity.empty()) return;
  for (const double scale : head_scales(p.joint_sensitivity)) {
    if (!(scale >= 1.0 / 8 && scale <= 8)) std::abort();
  }
  for (const int32_t c : assign_classes({0.1, 0.4}, p.joint_sensitivity)) {
    if (c < 0 || c > 2) std::abort();
  }
}

}  // namespace
}  // namespace tierkv::datasets

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tierkv::datasets;
  static const herr_t limits = H5set_free_list_limits(-1, -1, -1, -1, -1, -1);
  if (limits < 0) return 0;
  Input in(data, size);
  const std::vector<char> image = make_image(in);
  const tierkv::Result<tierkv::Profile> profile =
      read_profile_image("fuzz", image.data(), image.size());
  if (profile) {
    use(*profile);
  } else if (profile.status().message().rfind("fuzz: ", 0) != 0) {
    std::abort();
  }
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
#include "datasets/profile_file.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <utility>

#include "codec/file/output_file.h"
#include "datasets/dump_rope.h"
#include "datasets/hdf5/hdf5_dataset.h"
#include "datasets/slab.h"
#include "tierkv/layout.h"

namespace tierkv::datasets {
namespace {

constexpr int32_t kVersion = 2;
constexpr const char* kInvFreq = "rope_inv_freq";

struct ScalarField {
  const char* name;
  double RowProfile::*field;
};
constexpr ScalarField kScalars[] = {{"query_trace", &RowProfile::query_trace},
                                    {"value_signal", &RowProfile::value_signal},
                                    {"key_scale", &RowProfile::key_scale},
                                    {"value_scale", &RowProfile::value_scale}};

struct SensitivityField {
  const char* name;
  std::vector<double> Profile::*field;
};
constexpr SensitivityField kSensitivities[] = {{"key_sensitivity", &Profile::key_sensitivity},
                                               {"value_sensitivity", &Profile::value_sensitivity},
                                               {"joint_sensitivity", &Profile::joint_sensitivity}};

// Writes arrays until one fails.
class ArrayWriter {
 public:
  ArrayWriter(hid_t file, const std::function<void()>& between) : file_(file), between_(between) {}

  void write(const char* name, const std::vector<int64_t>& shape, const std::vector<float>& data) {
    write(name, H5T_NATIVE_FLOAT, shape, data.data());
  }
  void write(const char* name, const std::vector<int64_t>& shape, const std::vector<double>& data) {
    write(name, H5T_NATIVE_DOUBLE, shape, data.data());
  }
  bool ok() const { return ok_; }

 private:
  void write(const char* name, hid_t type, const std::vector<int64_t>& shape, const void* data) {
    if (!ok_) return;
    if (between_) between_();
    const Handle d = create_dataset(file_, name, type, shape, {});
    ok_ = flushed(d, d.ok() && H5Dwrite(d.id(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
  }

  hid_t file_;
  const std::function<void()>& between_;
  bool ok_ = true;
};

// The rotation that all layers share, but for those that have none. Null: no layer has one.
const Rope* common_rope(const Profile& p) {
  const Rope* found = nullptr;
  for (const Rope& r : p.rope) {
    if (r.pairing != RopePairing::kNone) found = &r;
  }
  return found;
}

Status check_rope(const Profile& p) {
  const Rope* common = common_rope(p);
  for (const Rope& r : p.rope) {
    if (r.pairing == RopePairing::kNone) continue;
    if (r.pairing != common->pairing || r.rotary_dims != common->rotary_dims)
      return Status(StatusCode::kUnsupported,
                    "rope: layers differ in pairing or in the number of rotated dims");
    if (r.rotary_dims == 0)
      return Status(StatusCode::kInvalidArgument, "rope: a pairing without rotary dims");
  }
  return Status::ok();
}

bool write_rope(hid_t root, const Profile& p, ArrayWriter* arrays) {
  if (p.rope.empty()) return true;
  const Rope* common = common_rope(p);
  const int32_t dims = common == nullptr ? 0 : common->rotary_dims;
  const auto pairing = common == nullptr ? RopePairing::kNone : common->pairing;
  if (!write_string_attribute(root, "rope_pairing", kPairingNames[static_cast<int32_t>(pairing)]) ||
      !write_int_attribute(root, "rope_dims", dims)) {
    return false;
  }
  if (dims == 0) return true;
  std::vector<float> all;
  for (const Rope& r : p.rope) {
    all.insert(all.end(), r.inv_freq.begin(), r.inv_freq.end());
    all.resize(all.size() + dims / 2 - r.inv_freq.size());
  }
  std::vector<int64_t> shape = {dims / 2};
  if (p.rope.size() > 1) shape.insert(shape.begin(), p.num_layers);
  arrays->write(kInvFreq, shape, all);
  return arrays->ok();
}

bool write_attributes(hid_t root, const Profile& p) {
  return write_string_attribute(root, "format", "kv-profile") &&
         write_int_attribute(root, "format_version", kVersion) &&
         write_string_attribute(root, "model_id", p.model_id) &&
         write_int_attribute(root, "num_layers", p.num_layers) &&
         write_int_attribute(root, "num_q_heads", p.num_q_heads) &&
         write_int_attribute(root, "num_kv_heads", p.num_kv_heads) &&
         write_int_attribute(root, "head_dim", p.head_dim) &&
         write_double_attribute(root, "sm_scale", p.sm_scale) &&
         write_double_attribute(root, "alpha_h", p.alpha_high) &&
         write_double_attribute(root, "alpha_l", p.alpha_low);
}

bool write_all(const Handle& file, const Profile& p, const std::function<void()>& between) {
  const Handle root(H5Gopen2(file.id(), "/", H5P_DEFAULT));
  ArrayWriter arrays(file.id(), between);
  if (!write_attributes(root.id(), p) || !write_rope(root.id(), p, &arrays)) return false;
  const auto rows = static_cast<int64_t>(p.rows.size());
  for (const ProfileField& f : kProfileFields) {
    if ((p.rows[0].*f.field).empty()) continue;
    std::vector<float> all;
    for (const RowProfile& r : p.rows)
      all.insert(all.end(), (r.*f.field).begin(), (r.*f.field).end());
    arrays.write(f.name, {rows, p.head_dim}, all);
  }
  for (const ScalarField& f : kScalars) {
    std::vector<double> all;
    for (const RowProfile& r : p.rows) all.push_back(r.*f.field);
    arrays.write(f.name, {rows}, all);
  }
  for (const SensitivityField& f : kSensitivities) {
    if (!(p.*f.field).empty()) arrays.write(f.name, {rows}, p.*f.field);
  }
  return arrays.ok();
}

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

bool exists(hid_t file, const char* name) {
  return H5Lexists(file, name, H5P_DEFAULT) > 0;
}

// A dataset of exactly this shape, finite.
template <class T>
Status read_array(hid_t file, const char* name, const std::vector<int64_t>& shape,
                  std::vector<T>* out) {
  const std::string path = std::string("/") + name;
  {
    const Result<Dataset> d = open_dataset(file, path);
    if (!d) return d.status().with_context(path);
    if (d->shape != shape || H5Tget_class(d->type.id()) != H5T_FLOAT)
      return corrupt(path + ": has another shape or type than the attributes say");
    if (Status s = check_complete(*d); !s) return s.with_context(path);
  }
  const Slab all = {std::vector<int64_t>(shape.size(), 0), shape};
  if (Status s = read_slab_as(file, path, all, out); !s) return s;
  for (const T v : *out) {
    if (!std::isfinite(v))
      return Status(StatusCode::kNonFinite, path + ": holds a value that is not finite");
  }
  return Status::ok();
}

Status read_integers(hid_t root, Profile* p) {
  struct IntField {
    const char* name;
    int32_t* value;
    int64_t max;
  };
  int32_t version = 0;
  for (const IntField& f : {IntField{"format_version", &version, INT32_MAX},
                            {"num_layers", &p->num_layers, 4096},
                            {"num_q_heads", &p->num_q_heads, 4096},
                            {"num_kv_heads", &p->num_kv_heads, 4096},
                            {"head_dim", &p->head_dim, kMaxHeadDim}}) {
    Result<int64_t> v = read_int_attribute(root, f.name);
    if (!v) return v.status().with_context("/");
    if (*v < 1 || *v > f.max)
      return corrupt("/: attribute '" + std::string(f.name) + "' must be 1 to " +
                     std::to_string(f.max));
    *f.value = static_cast<int32_t>(*v);
    if (version != kVersion)
      return Status(StatusCode::kVersion, "/: format_version " + std::to_string(version) +
                                              " is not known (this build reads " +
                                              std::to_string(kVersion) + ")");
  }
  if (p->num_q_heads % p->num_kv_heads != 0)
    return corrupt("/: attribute 'num_q_heads' is not a multiple of 'num_kv_heads'");
  return Status::ok();
}

Status read_attributes(hid_t root, Profile* p) {
  Result<std::string> format = read_string_attribute(root, "format");
  if (!format) return format.status().with_context("/");
  if (*format != "kv-profile")
    return corrupt("/: attribute 'format' is '" + printable(*format) + "' (expected 'kv-profile')");
  if (Status s = read_integers(root, p); !s) return s;
  Result<std::string> id = read_string_attribute(root, "model_id");
  if (!id) return id.status().with_context("/");
  if (id->empty()) return corrupt("/: attribute 'model_id' is empty");
  p->model_id = *id;
  struct DoubleField {
    const char* name;
    double* value;
  };
  for (const DoubleField& f : {DoubleField{"sm_scale", &p->sm_scale},
                               {"alpha_h", &p->alpha_high},
                               {"alpha_l", &p->alpha_low}}) {
    const Result<double> v = read_double_attribute(root, f.name);
    if (!v) return v.status().with_context("/");
    *f.value = *v;
  }
  if (!std::isfinite(p->sm_scale) || p->sm_scale <= 0)
    return corrupt("/: attribute 'sm_scale' must be positive");
  if (!std::isfinite(p->alpha_high) || !(p->alpha_low >= 0) || p->alpha_low > p->alpha_high)
    return corrupt("/: attributes must satisfy alpha_h >= alpha_l >= 0");
  return Status::ok();
}

Status read_rope(hid_t file, hid_t root, Profile* p) {
  if (H5Aexists(root, "rope_pairing") <= 0) return Status::ok();
  const Result<std::string> pairing = read_string_attribute(root, "rope_pairing");
  if (!pairing) return pairing.status().with_context("/");
  const auto* known = std::find(std::begin(kPairingNames), std::end(kPairingNames), *pairing);
  if (known == std::end(kPairingNames))
    return corrupt("/: attribute 'rope_pairing' is '" + printable(*pairing) +
                   "' (expected 'none', 'halves' or 'neighbours')");
  Rope rope;
  rope.pairing = static_cast<RopePairing>(known - std::begin(kPairingNames));
  const Result<int64_t> dims = read_int_attribute(root, "rope_dims");
  if (!dims) return dims.status().with_context("/");
  const bool none = rope.pairing == RopePairing::kNone;
  if (none ? *dims != 0 : *dims < 2 || *dims > p->head_dim || *dims % 2 != 0)
    return corrupt("/: attribute 'rope_dims' must be " +
                   (none ? std::string("0 with rope_pairing 'none'")
                         : "even and 2 to " + std::to_string(p->head_dim)));
  p->rope = {rope};
  if (none) return Status::ok();
  const std::string path = std::string("/") + kInvFreq;
  std::vector<int64_t> shape = {*dims / 2};
  {
    const Result<Dataset> d = open_dataset(file, path);
    if (!d) return d.status().with_context(path);
    if (d->shape.size() == 2) shape.insert(shape.begin(), p->num_layers);
  }
  std::vector<float> all;
  if (Status s = read_array(file, kInvFreq, shape, &all); !s) return s;
  p->rope.assign(shape.size() == 2 ? p->num_layers : 1, Rope());
  for (size_t i = 0; i < p->rope.size(); ++i) {
    const auto begin = all.begin() + static_cast<int64_t>(i) * (*dims / 2);
    const std::vector<float> inv_freq(begin, begin + *dims / 2);
    if (shape.size() == 2 &&
        std::all_of(inv_freq.begin(), inv_freq.end(), [](float f) { return f == 0; })) {
      continue;
    }
    p->rope[i] = {rope.pairing, static_cast<int32_t>(*dims), inv_freq};
    if (Status s = p->rope[i].validate(p->head_dim); !s) return corrupt(path + ": " + s.message());
  }
  return Status::ok();
}

Status read_rows(hid_t file, Profile* p) {
  const int64_t rows = static_cast<int64_t>(p->num_layers) * p->num_kv_heads;
  bool sized = false;
  for (const ProfileField& f : kProfileFields) {
    if (f.optional && !exists(file, f.name)) continue;
    std::vector<float> all;
    if (Status s = read_array(file, f.name, {rows, p->head_dim}, &all); !s) return s;
    // Only now is it known that the file has as many rows as its attributes say.
    if (!std::exchange(sized, true)) p->rows.resize(rows);
    for (int64_t r = 0; r < rows; ++r) {
      const auto begin = all.begin() + r * p->head_dim;
      (p->rows[r].*f.field).assign(begin, begin + p->head_dim);
    }
  }
  for (const ScalarField& f : kScalars) {
    std::vector<double> all;
    if (Status s = read_array(file, f.name, {rows}, &all); !s) return s;
    for (int64_t r = 0; r < rows; ++r) p->rows[r].*f.field = all[r];
  }
  for (const SensitivityField& f : kSensitivities) {
    if (!exists(file, f.name)) continue;
    if (Status s = read_array(file, f.name, {rows}, &(p->*f.field)); !s) return s;
  }
  return Status::ok();
}

Status read_all(hid_t file, Profile* p) {
  const Handle root(H5Gopen2(file, "/", H5P_DEFAULT));
  if (Status s = read_attributes(root.id(), p); !s) return s;
  if (Status s = read_rope(file, root.id(), p); !s) return s;
  if (Status s = read_rows(file, p); !s) return s;
  // Messages begin with the name of a field, which is that of its dataset.
  if (Status s = p->validate(); !s) return corrupt("/" + s.message());
  return Status::ok();
}

Result<Profile> read_opened(const Result<Handle>& file, const std::string& name) {
  if (!file) return file.status().with_context(name);
  Profile profile;
  if (Status s = read_all(file->id(), &profile); !s) return s.with_context(name);
  return profile;
}

// A file under its temporary name, closed in any case before it is renamed or removed.
struct Draft {
  std::string path;
  Handle file;
  bool kept = false;

  ~Draft() {
    if (file.ok()) {
      discard_writes(file.id());
      file.close();
    }
    if (!kept) std::remove(path.c_str());
  }
};

}  // namespace

Status write_profile(const std::string& path, const Profile& profile,
                     const std::function<void()>& between, bool overwrite) {
  Status valid = profile.validate();
  if (valid) valid = check_rope(profile);
  if (valid) valid = check_text("model_id", profile.model_id);
  if (!valid) return valid.with_context(path);
  const Hdf5Lock lock;
  const Result<std::string> target = output_target(path);
  if (!target) return target.status();
  Draft draft{temporary_name(*target), Handle()};
  forget_write_error();
  draft.file = create_file(draft.path);
  if (!draft.file.ok())
    return Status(StatusCode::kIo, path + ": cannot be created" + write_error());
  const auto unwritten = [&](const std::string& why) {
    return Status(StatusCode::kIo, path + ": cannot be written" + why);
  };
  if (!write_all(draft.file, profile, between)) return unwritten(write_error());
  if (H5Fflush(draft.file.id(), H5F_SCOPE_LOCAL) < 0 || !draft.file.close()) {
    return unwritten(write_error());
  }
  if (Status s = publish(draft.path, *target, overwrite); !s) return s;
  draft.kept = true;
  return Status::ok();
}

Result<Profile> read_profile(const std::string& path) {
  const Hdf5Lock lock;
  return read_opened(open_file(path), path);
}

Result<Profile> read_profile_image(const std::string& name, const void* bytes, size_t size) {
  const Hdf5Lock lock;
  return read_opened(open_image(bytes, size), name);
}

}  // namespace tierkv::datasets

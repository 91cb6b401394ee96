#include "datasets/profile_file.h"

#include <cmath>
#include <cstdio>
#include <filesystem>

#include "codec/output_file.h"
#include "datasets/hdf5_dataset.h"
#include "datasets/slab.h"
#include "tierkv/layout.h"

namespace tierkv::datasets {
namespace {

constexpr int kStatistics = 4;
constexpr const char* kStepScales = "step_scales";
using Field = std::vector<float> RowProfile::*;

struct NamedField {
  const char* name;
  Field field;
  bool matrix;
};
constexpr NamedField kFields[] = {{"key_mean", &RowProfile::key_mean, false},
                                  {"value_mean", &RowProfile::value_mean, false},
                                  {"key_forward", &RowProfile::key_forward, true},
                                  {"key_inverse", &RowProfile::key_inverse, true},
                                  {"value_forward", &RowProfile::value_forward, true},
                                  {"value_inverse", &RowProfile::value_inverse, true}};

bool write_array(hid_t file, const char* name, hid_t type, const std::vector<int64_t>& shape,
                 const void* data) {
  const Handle d = create_dataset(file, name, type, shape, {});
  return flushed(d, d.ok() && H5Dwrite(d.id(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
}

bool write_balance(hid_t file, hid_t root, const Profile& p) {
  if (!(p.balance.error > 0)) return true;
  std::vector<double> scales;
  for (const RowProfile& r : p.rows)
    scales.insert(scales.end(), {r.key_step_scale, r.value_step_scale});
  return write_double_attribute(root, "balance_error", p.balance.error) &&
         write_double_attribute(root, "balance_k", p.balance.k) &&
         write_double_attribute(root, "balance_v", p.balance.v) &&
         write_array(file, kStepScales, H5T_NATIVE_DOUBLE, {static_cast<int64_t>(p.rows.size()), 2},
                     scales.data());
}

bool write_all(const Handle& file, const Profile& p, const std::function<void()>& between) {
  const Handle root(H5Gopen2(file.id(), "/", H5P_DEFAULT));
  bool ok = write_string_attribute(root.id(), "format", "kv-profile") &&
            write_int_attribute(root.id(), "format_version", 1) &&
            write_int_attribute(root.id(), "num_layers", p.num_layers) &&
            write_int_attribute(root.id(), "num_kv_heads", p.num_kv_heads) &&
            write_int_attribute(root.id(), "head_dim", p.head_dim) &&
            write_double_attribute(root.id(), "alpha_h", p.alpha_high) &&
            write_double_attribute(root.id(), "alpha_l", p.alpha_low);
  const auto rows = static_cast<int64_t>(p.rows.size());
  std::vector<double> statistics;
  for (const RowProfile& r : p.rows) {
    statistics.insert(statistics.end(),
                      {r.query_trace, r.value_signal, r.key_matrix_trace, r.value_matrix_trace});
  }
  ok = ok && write_array(file.id(), "statistics", H5T_NATIVE_DOUBLE, {rows, kStatistics},
                         statistics.data());
  ok = ok && write_balance(file.id(), root.id(), p);
  for (const NamedField& f : kFields) {
    if ((p.rows[0].*f.field).empty()) continue;
    if (between) between();
    std::vector<float> all;
    for (const RowProfile& r : p.rows)
      all.insert(all.end(), (r.*f.field).begin(), (r.*f.field).end());
    std::vector<int64_t> shape = {rows, p.head_dim};
    if (f.matrix) shape.push_back(p.head_dim);
    ok = ok && write_array(file.id(), f.name, H5T_NATIVE_FLOAT, shape, all.data());
  }
  return ok;
}

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

// A dataset of exactly this shape, finite.
template <class T>
Status read_array(hid_t file, const std::string& path, const std::vector<int64_t>& shape,
                  std::vector<T>* out) {
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

Status read_balance(hid_t file, hid_t root, Profile* p) {
  if (H5Lexists(file, kStepScales, H5P_DEFAULT) <= 0) return Status::ok();
  struct DoubleField {
    const char* name;
    double* value;
  };
  for (const DoubleField& f : {DoubleField{"balance_error", &p->balance.error},
                               {"balance_k", &p->balance.k},
                               {"balance_v", &p->balance.v}}) {
    const Result<double> v = read_double_attribute(root, f.name);
    if (!v) return v.status().with_context("/");
    if (!(*v > 0) || !std::isfinite(*v))
      return corrupt("/: attribute '" + std::string(f.name) + "' must be positive");
    *f.value = *v;
  }
  std::vector<double> scales;
  const std::string path = std::string("/") + kStepScales;
  const auto rows = static_cast<int64_t>(p->rows.size());
  if (Status s = read_array(file, path, {rows, 2}, &scales); !s) return s;
  for (int64_t r = 0; r < rows; ++r) {
    RowProfile& row = p->rows[r];
    row.key_step_scale = scales[2 * r];
    row.value_step_scale = scales[2 * r + 1];
    if (!(row.key_step_scale > 0) || !(row.value_step_scale > 0))
      return corrupt(path + ": scales must be positive");
  }
  return Status::ok();
}

Status read_all(hid_t file, Profile* p) {
  const Handle root(H5Gopen2(file, "/", H5P_DEFAULT));
  Result<std::string> format = read_string_attribute(root.id(), "format");
  if (!format) return format.status().with_context("/");
  if (*format != "kv-profile")
    return corrupt("/: attribute 'format' is '" + printable(*format) + "' (expected 'kv-profile')");
  struct IntField {
    const char* name;
    int32_t* value;
    int64_t max;
  };
  int32_t version = 0;
  for (const IntField& f : {IntField{"format_version", &version, INT32_MAX},
                            {"num_layers", &p->num_layers, 4096},
                            {"num_kv_heads", &p->num_kv_heads, 4096},
                            {"head_dim", &p->head_dim, kMaxHeadDim}}) {
    Result<int64_t> v = read_int_attribute(root.id(), f.name);
    if (!v) return v.status().with_context("/");
    if (*v < 1 || *v > f.max)
      return corrupt("/: attribute '" + std::string(f.name) + "' must be 1 to " +
                     std::to_string(f.max));
    *f.value = static_cast<int32_t>(*v);
    if (version != 1)
      return Status(StatusCode::kVersion, "/: format_version " + std::to_string(version) +
                                              " is not known (this build reads 1)");
  }
  const Result<double> high = read_double_attribute(root.id(), "alpha_h"),
                       low = read_double_attribute(root.id(), "alpha_l");
  if (!high) return high.status().with_context("/");
  if (!low) return low.status().with_context("/");
  if (!std::isfinite(*high) || !(*low >= 0) || *low > *high)
    return corrupt("/: attributes must satisfy alpha_h >= alpha_l >= 0");
  p->alpha_high = *high;
  p->alpha_low = *low;
  const int64_t rows = static_cast<int64_t>(p->num_layers) * p->num_kv_heads;
  std::vector<double> statistics;
  if (Status s = read_array(file, "/statistics", {rows, kStatistics}, &statistics); !s) return s;
  p->rows.resize(rows);
  for (int64_t r = 0; r < rows; ++r) {
    p->rows[r].query_trace = statistics[r * kStatistics];
    p->rows[r].value_signal = statistics[r * kStatistics + 1];
    p->rows[r].key_matrix_trace = statistics[r * kStatistics + 2];
    p->rows[r].value_matrix_trace = statistics[r * kStatistics + 3];
  }
  if (Status s = read_balance(file, root.id(), p); !s) return s;
  for (const NamedField& f : kFields) {
    if (f.matrix && H5Lexists(file, f.name, H5P_DEFAULT) <= 0) continue;
    std::vector<int64_t> shape = {rows, p->head_dim};
    if (f.matrix) shape.push_back(p->head_dim);
    std::vector<float> all;
    if (Status s = read_array(file, std::string("/") + f.name, shape, &all); !s) return s;
    const int64_t n = static_cast<int64_t>(all.size()) / rows;
    for (int64_t r = 0; r < rows; ++r)
      (p->rows[r].*f.field).assign(all.begin() + r * n, all.begin() + (r + 1) * n);
  }
  return Status::ok();
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
                     const std::function<void()>& between) {
  if (profile.rows.empty() || static_cast<int64_t>(profile.rows.size()) !=
                                  static_cast<int64_t>(profile.num_layers) * profile.num_kv_heads) {
    return Status(StatusCode::kInvalidArgument,
                  path + ": a profile needs a row per layer and head");
  }
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
  std::error_code error;
  std::filesystem::rename(draft.path, *target, error);
  if (error) return unwritten(": " + error.message());
  draft.kept = true;
  return Status::ok();
}

Result<Profile> read_profile(const std::string& path) {
  const Hdf5Lock lock;
  const Result<Handle> file = open_file(path);
  if (!file) return file.status().with_context(path);
  Profile profile;
  if (Status s = read_all(file->id(), &profile); !s) return s.with_context(path);
  return profile;
}

}  // namespace tierkv::datasets

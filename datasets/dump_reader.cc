#include <algorithm>
#include <cstring>

#include "datasets/dump.h"
#include "datasets/hdf5_util.h"
#include "tierkv/half.h"

namespace tierkv::datasets {

struct DumpReader::Impl {
  DumpInfo info;
  Handle file;
};

namespace {

constexpr int64_t kMaxSequenceTokens = int64_t{1} << 27;

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

std::string layer_path(const std::string& seq, int32_t layer) {
  return "/seq/" + seq + "/layer/" + std::to_string(layer);
}

bool exists(hid_t file, const std::string& path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    if (H5Lexists(file, path.substr(0, slash).c_str(), H5P_DEFAULT) <= 0) return false;
    if (slash == std::string::npos) return true;
  }
}

// What the structure of a dump must satisfy, checked once at opening.
class Checker {
 public:
  Checker(hid_t file, DumpInfo* info) : file_(file), info_(*info) {}

  Status run() {
    if (Status s = read_attributes(); !s) return s;
    Result<std::vector<std::string>> ids = list_group(file_, "/seq");
    if (!ids) return ids.status().with_context("/seq");
    if (ids->empty()) return corrupt("/seq: has no sequences");
    for (const std::string& id : *ids) {
      SequenceInfo seq;
      seq.id = id;
      if (Status s = check_sequence(&seq); !s) return s;
      info_.sequences.push_back(std::move(seq));
    }
    info_.layout.dtype = info_.sequences[0].layers[0].dtype;
    return Status::ok();
  }

 private:
  Status read_attributes() {
    const Handle root(H5Gopen2(file_, "/", H5P_DEFAULT));
    Result<std::string> format = read_string_attribute(root.id(), "format");
    if (!format) return format.status().with_context("/");
    if (*format != "kv-dump")
      return corrupt("/: attribute 'format' is '" + *format + "', not 'kv-dump'");
    CacheLayout& l = info_.layout;
    struct Field {
      const char* name;
      int32_t* value;
    };
    int32_t rope = 1;
    const Field fields[] = {{"format_version", &info_.format_version},
                            {"num_layers", &l.num_layers},
                            {"num_q_heads", &l.num_q_heads},
                            {"num_kv_heads", &l.num_kv_heads},
                            {"head_dim", &l.head_dim},
                            {"rope_applied", &rope}};
    for (const Field& f : fields) {
      Result<int64_t> v = read_int_attribute(root.id(), f.name);
      if (!v) return v.status().with_context("/");
      if (*v < INT32_MIN || *v > INT32_MAX)
        return corrupt("/: attribute '" + std::string(f.name) + "' is absurd");
      *f.value = static_cast<int32_t>(*v);
    }
    if (info_.format_version != 1) {
      return Status(StatusCode::kVersion, "/: format_version " +
                                              std::to_string(info_.format_version) +
                                              " is not known (this build reads 1)");
    }
    l.rope_applied = rope != 0;
    Result<double> scale = read_double_attribute(root.id(), "sm_scale");
    if (!scale) return scale.status().with_context("/");
    l.sm_scale = *scale;
    if (Result<double> theta = read_double_attribute(root.id(), "rope_theta"); theta)
      l.rope_theta = *theta;
    if (Result<std::string> m = read_string_attribute(root.id(), "model_id"); m)
      info_.model_id = *m;
    if (Result<std::string> m = read_string_attribute(root.id(), "created_by"); m)
      info_.created_by = *m;
    if (Status s = l.validate(); !s) return corrupt("/: attribute " + s.message());
    return Status::ok();
  }

  // Opens a dataset and compares its shape; -1 in `shape` is filled in. `dtype` null: any number
  // type is converted.
  Status check(const std::string& path, std::vector<int64_t>* shape, DType* dtype) {
    Result<Dataset> d = open_dataset(file_, path);
    if (!d) return d.status().with_context(path);
    bool same = d->shape.size() == shape->size();
    for (size_t i = 0; same && i < shape->size(); ++i)
      same = (*shape)[i] < 0 || (*shape)[i] == d->shape[i];
    if (!same)
      return corrupt(path + ": has shape " + shape_text(d->shape) + ", expected " +
                     shape_text(*shape));
    *shape = d->shape;
    if (dtype == nullptr) return Status::ok();
    const std::optional<DType> type = dtype_of(d->type.id());
    if (!type) return corrupt(path + ": is not float16, bfloat16 or float32");
    *dtype = *type;
    return Status::ok();
  }

  Status check_class(const std::string& path, H5T_class_t wanted, const char* what) {
    Result<Dataset> d = open_dataset(file_, path);
    if (!d) return d.status().with_context(path);
    if (H5Tget_class(d->type.id()) != wanted) return corrupt(path + ": is not " + what);
    return Status::ok();
  }

  Status check_sequence(SequenceInfo* seq) {
    const std::string base = "/seq/" + seq->id;
    const Handle group(H5Gopen2(file_, base.c_str(), H5P_DEFAULT));
    if (!group.ok()) return corrupt(base + ": is not a group");
    if (Result<std::string> kind = read_string_attribute(group.id(), "kind"); kind)
      seq->kind = *kind;
    std::vector<int64_t> shape = {-1};
    if (Status s = check(base + "/tokens", &shape, nullptr); !s) return s;
    if (Status s = check_class(base + "/tokens", H5T_INTEGER, "an array of integers"); !s) return s;
    seq->num_tokens = shape[0];
    if (seq->num_tokens == 0) return corrupt(base + "/tokens: has no tokens");
    if (seq->num_tokens > kMaxSequenceTokens) return corrupt(base + "/tokens: is absurdly long");
    Result<std::vector<std::string>> layers = list_group(file_, base + "/layer");
    if (!layers) return layers.status().with_context(base + "/layer");
    if (static_cast<int32_t>(layers->size()) != info_.layout.num_layers) {
      return corrupt(base + "/layer: has " + std::to_string(layers->size()) +
                     " layers, num_layers says " + std::to_string(info_.layout.num_layers));
    }
    seq->layers.resize(info_.layout.num_layers);
    for (int32_t l = 0; l < info_.layout.num_layers; ++l) {
      if (Status s = check_layer(*seq, l, &seq->layers[l]); !s) return s;
    }
    return Status::ok();
  }

  Status check_layer(const SequenceInfo& seq, int32_t layer, LayerInfo* out) {
    const std::string base = layer_path(seq.id, layer);
    const CacheLayout& l = info_.layout;
    std::vector<int64_t> shape = {l.num_kv_heads, seq.num_tokens, l.head_dim};
    if (Status s = check(base + "/k", &shape, &out->dtype); !s) return s;
    DType v_type;
    if (Status s = check(base + "/v", &shape, &v_type); !s) return s;
    if (v_type != out->dtype) return corrupt(base + "/v: has another type than k");
    out->has_significance = exists(file_, base + "/significance");
    if (out->has_significance) {
      shape = {l.num_kv_heads, seq.num_tokens};
      if (Status s = check(base + "/significance", &shape, nullptr); !s) return s;
      if (Status s = check_class(base + "/significance", H5T_FLOAT, "an array of numbers"); !s)
        return s;
    }
    if (!exists(file_, base + "/q")) return Status::ok();
    shape = {l.num_q_heads, -1, l.head_dim};
    DType q_type;
    if (Status s = check(base + "/q", &shape, &q_type); !s) return s;
    out->num_queries = shape[1];
    if (out->num_queries == 0 || out->num_queries > seq.num_tokens) {
      return corrupt(base + "/q: has " + std::to_string(out->num_queries) + " positions for " +
                     std::to_string(seq.num_tokens) + " tokens");
    }
    out->has_q = true;
    shape = {out->num_queries};
    if (Status s = check(base + "/q_positions", &shape, nullptr); !s) return s;
    return check_class(base + "/q_positions", H5T_INTEGER, "an array of integers");
  }

  hid_t file_;
  DumpInfo& info_;
};

// Reads the hyperslab `start`, `count` of a dataset into `out` as `memory_type`.
Status read_slab(hid_t file, const std::string& path, const std::vector<hsize_t>& start,
                 const std::vector<hsize_t>& count, hid_t memory_type, void* out) {
  Result<Dataset> d = open_dataset(file, path);
  if (!d) return d.status().with_context(path);
  const Handle space(H5Dget_space(d->handle.id()));
  const Handle memory(H5Screate_simple(static_cast<int>(count.size()), count.data(), nullptr));
  if (H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, start.data(), nullptr, count.data(),
                          nullptr) < 0 ||
      H5Dread(d->handle.id(), memory_type, memory.id(), space.id(), H5P_DEFAULT, out) < 0) {
    return corrupt(path + ": cannot be read (damaged data or filter)");
  }
  return Status::ok();
}

Status find_non_finite(const std::string& path, int64_t first_index, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (is_finite(x[i])) continue;
    return Status(StatusCode::kNonFinite,
                  path + ": element " + std::to_string(first_index + i) + " is not finite");
  }
  return Status::ok();
}

}  // namespace

void row_to_float(const RowData& row, int64_t first, int64_t count, float* out) {
  const int64_t begin = first * row.head_dim, n = count * row.head_dim;
  if (row.dtype == DType::kFloat32) {
    std::memcpy(out, row.bytes.data() + 4 * begin, 4 * n);
    return;
  }
  const uint8_t* p = row.bytes.data() + 2 * begin;
  for (int64_t i = 0; i < n; ++i) {
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    out[i] = row.dtype == DType::kFloat16 ? half_to_float(h) : bfloat16_to_float(h);
  }
}

DumpReader::DumpReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DumpReader::DumpReader(DumpReader&&) noexcept = default;
DumpReader& DumpReader::operator=(DumpReader&&) noexcept = default;
DumpReader::~DumpReader() = default;
const DumpInfo& DumpReader::info() const {
  return impl_->info;
}

Result<DumpReader> DumpReader::open(const std::string& path) {
  const Hdf5Lock lock;
  auto impl = std::make_unique<Impl>();
  impl->info.path = path;
  FILE* probe = std::fopen(path.c_str(), "rb");
  if (probe == nullptr) return Status(StatusCode::kIo, path + ": " + std::strerror(errno));
  std::fclose(probe);
  if (H5Fis_hdf5(path.c_str()) <= 0) return corrupt(path + ": is not an HDF5 file");
  impl->file = Handle(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
  if (!impl->file.ok()) return corrupt(path + ": cannot be opened as HDF5 (truncated or damaged)");
  if (Status s = Checker(impl->file.id(), &impl->info).run(); !s) return s.with_context(path);
  return DumpReader(std::move(impl));
}

Status DumpReader::read_row(int32_t seq, int32_t layer, int32_t kv_head, Component c,
                            RowData* out) {
  const Hdf5Lock lock;
  const DumpInfo& info = impl_->info;
  const std::string path =
      layer_path(info.sequences[seq].id, layer) + (c == Component::kKey ? "/k" : "/v");
  const int64_t tokens = info.sequences[seq].num_tokens;
  const int32_t d = info.layout.head_dim;
  out->dtype = info.sequences[seq].layers[layer].dtype;
  out->tokens = tokens;
  out->head_dim = d;
  out->bytes.resize(tokens * d * dtype_bytes(out->dtype));
  const Handle type = hdf5_type(out->dtype);
  Status s = read_slab(impl_->file.id(), path, {static_cast<hsize_t>(kv_head), 0, 0},
                       {1, static_cast<hsize_t>(tokens), static_cast<hsize_t>(d)}, type.id(),
                       out->bytes.data());
  std::vector<float> x(d);
  for (int64_t t = 0; s && t < tokens; ++t) {
    row_to_float(*out, t, 1, x.data());
    s = find_non_finite(path, (kv_head * tokens + t) * d, x.data(), d);
  }
  return s.with_context(info.path);
}

Status DumpReader::read_queries(int32_t seq, int32_t layer, int32_t first_head, int32_t num_heads,
                                std::vector<float>* q) {
  const Hdf5Lock lock;
  const DumpInfo& info = impl_->info;
  const std::string path = layer_path(info.sequences[seq].id, layer) + "/q";
  const int64_t n = info.sequences[seq].layers[layer].num_queries;
  const int32_t d = info.layout.head_dim;
  q->resize(num_heads * n * d);
  Status s =
      read_slab(impl_->file.id(), path, {static_cast<hsize_t>(first_head), 0, 0},
                {static_cast<hsize_t>(num_heads), static_cast<hsize_t>(n), static_cast<hsize_t>(d)},
                H5T_NATIVE_FLOAT, q->data());
  if (s) s = find_non_finite(path, first_head * n * d, q->data(), static_cast<int64_t>(q->size()));
  return s.with_context(info.path);
}

Status DumpReader::read_query_positions(int32_t seq, int32_t layer,
                                        std::vector<int32_t>* positions) {
  const Hdf5Lock lock;
  const DumpInfo& info = impl_->info;
  const std::string path = layer_path(info.sequences[seq].id, layer) + "/q_positions";
  const int64_t n = info.sequences[seq].layers[layer].num_queries;
  std::vector<int64_t> wide(n);
  Status s = read_slab(impl_->file.id(), path, {0}, {static_cast<hsize_t>(n)}, H5T_NATIVE_INT64,
                       wide.data());
  positions->clear();
  for (int64_t i = 0; s && i < n; ++i) {
    if (wide[i] < 0 || wide[i] >= info.sequences[seq].num_tokens ||
        (i > 0 && wide[i] <= wide[i - 1])) {
      s = corrupt(path + ": element " + std::to_string(i) + " is " + std::to_string(wide[i]) +
                  "; positions must increase and lie within the sequence");
    }
    positions->push_back(static_cast<int32_t>(wide[i]));
  }
  return s.with_context(info.path);
}

Status DumpReader::read_significance(int32_t seq, int32_t layer, int32_t kv_head,
                                     std::vector<float>* significance) {
  const Hdf5Lock lock;
  const DumpInfo& info = impl_->info;
  const std::string path = layer_path(info.sequences[seq].id, layer) + "/significance";
  const int64_t n = info.sequences[seq].num_tokens;
  significance->resize(n);
  Status s = read_slab(impl_->file.id(), path, {static_cast<hsize_t>(kv_head), 0},
                       {1, static_cast<hsize_t>(n)}, H5T_NATIVE_FLOAT, significance->data());
  if (s) s = find_non_finite(path, kv_head * n, significance->data(), n);
  return s.with_context(info.path);
}

Status DumpReader::read_tokens(int32_t seq, std::vector<int32_t>* tokens) {
  const Hdf5Lock lock;
  const DumpInfo& info = impl_->info;
  const std::string path = "/seq/" + info.sequences[seq].id + "/tokens";
  tokens->resize(info.sequences[seq].num_tokens);
  return read_slab(impl_->file.id(), path, {0}, {static_cast<hsize_t>(tokens->size())},
                   H5T_NATIVE_INT32, tokens->data())
      .with_context(info.path);
}

}  // namespace tierkv::datasets

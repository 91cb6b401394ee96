#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "datasets/dump.h"
#include "datasets/hdf5_util.h"
#include "tierkv/half.h"

namespace tierkv::datasets {

struct DumpWriter::Impl {
  std::string path, temporary;
  DumpInfo info;
  Handle file, sequence, layers, layer;
  int64_t tokens = 0;
  int64_t queries = 0;
  int32_t next_layer = 0;
  bool finished = false;

  ~Impl() {
    layer = Handle();
    layers = Handle();
    sequence = Handle();
    file = Handle();
    if (!finished) std::remove(temporary.c_str());
  }
  Status fail(const std::string& what) const {
    return Status(StatusCode::kIo, path + ": " + what + " cannot be written");
  }
};

namespace {

// Values rounded to a dump's type, as bytes. False when one is beyond fp16's range.
bool round_values(const float* x, int64_t n, DType t, std::vector<uint8_t>* out) {
  out->resize(n * dtype_bytes(t));
  if (t == DType::kFloat32) {
    std::memcpy(out->data(), x, out->size());
    return true;
  }
  bool in_range = true;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t h = t == DType::kFloat16 ? float_to_half(x[i]) : float_to_bfloat16(x[i]);
    in_range &= is_finite(t == DType::kFloat16 ? half_to_float(h) : bfloat16_to_float(h));
    std::memcpy(out->data() + 2 * i, &h, 2);
  }
  return in_range;
}

bool write_slab(hid_t group, const char* name, const std::vector<hsize_t>& start,
                const std::vector<hsize_t>& count, hid_t type, const void* data) {
  const Handle dataset(H5Dopen2(group, name, H5P_DEFAULT));
  const Handle space(H5Dget_space(dataset.id()));
  const Handle memory(H5Screate_simple(static_cast<int>(count.size()), count.data(), nullptr));
  return H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, start.data(), nullptr, count.data(),
                             nullptr) >= 0 &&
         H5Dwrite(dataset.id(), type, memory.id(), space.id(), H5P_DEFAULT, data) >= 0;
}

}  // namespace

DumpWriter::DumpWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DumpWriter::DumpWriter(DumpWriter&&) noexcept = default;
DumpWriter& DumpWriter::operator=(DumpWriter&&) noexcept = default;
DumpWriter::~DumpWriter() = default;

Result<DumpWriter> DumpWriter::create(const std::string& path, const DumpInfo& info) {
  if (Status s = info.layout.validate(); !s) return s.with_context(path);
  const Hdf5Lock lock;
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  impl->temporary = path + ".part";
  impl->info = info;
  impl->file = Handle(H5Fcreate(impl->temporary.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
  if (!impl->file.ok()) return Status(StatusCode::kIo, path + ": cannot be created");
  const Handle root(H5Gopen2(impl->file.id(), "/", H5P_DEFAULT));
  const Handle seq(H5Gcreate2(impl->file.id(), "/seq", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  const CacheLayout& l = info.layout;
  const bool ok = seq.ok() && write_string_attribute(root.id(), "format", "kv-dump") &&
                  write_int_attribute(root.id(), "format_version", 1) &&
                  write_string_attribute(root.id(), "model_id", info.model_id) &&
                  write_int_attribute(root.id(), "num_layers", l.num_layers) &&
                  write_int_attribute(root.id(), "num_q_heads", l.num_q_heads) &&
                  write_int_attribute(root.id(), "num_kv_heads", l.num_kv_heads) &&
                  write_int_attribute(root.id(), "head_dim", l.head_dim) &&
                  write_string_attribute(root.id(), "dtype", dtype_name(l.dtype)) &&
                  write_int_attribute(root.id(), "rope_applied", l.rope_applied ? 1 : 0) &&
                  write_double_attribute(root.id(), "rope_theta", l.rope_theta) &&
                  write_double_attribute(root.id(), "sm_scale", l.sm_scale) &&
                  write_string_attribute(root.id(), "created_by", info.created_by);
  if (!ok) return impl->fail("the header");
  return DumpWriter(std::move(impl));
}

Status DumpWriter::begin_sequence(const std::string& id, const std::string& kind,
                                  const std::vector<int32_t>& tokens) {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  if (id.empty() || id.find('/') != std::string::npos || tokens.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  w.path + ": a sequence needs an id without '/' and at least one token");
  }
  const std::string base = "/seq/" + id;
  w.layer = Handle();
  w.sequence = Handle(H5Gcreate2(w.file.id(), base.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  if (!w.sequence.ok()) return w.fail(base);
  w.layers = Handle(H5Gcreate2(w.sequence.id(), "layer", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  w.tokens = static_cast<int64_t>(tokens.size());
  w.next_layer = 0;
  const Handle d = create_dataset(w.sequence.id(), "tokens", H5T_STD_I32LE, {w.tokens}, {});
  const bool ok =
      w.layers.ok() && d.ok() && write_string_attribute(w.sequence.id(), "kind", kind) &&
      H5Dwrite(d.id(), H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, tokens.data()) >= 0;
  return ok ? Status::ok() : w.fail(base + "/tokens");
}

Status DumpWriter::begin_layer(const std::vector<int32_t>& q_positions, bool significance) {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  const CacheLayout& l = w.info.layout;
  const std::string name = std::to_string(w.next_layer++);
  w.layer = Handle(H5Gcreate2(w.layers.id(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  if (!w.layer.ok()) return w.fail("layer " + name);
  const Handle type = hdf5_type(l.dtype);
  const int64_t d = l.head_dim, chunk = std::min<int64_t>(256, w.tokens);
  bool ok =
      create_dataset(w.layer.id(), "k", type.id(), {l.num_kv_heads, w.tokens, d}, {1, chunk, d})
          .ok() &&
      create_dataset(w.layer.id(), "v", type.id(), {l.num_kv_heads, w.tokens, d}, {1, chunk, d})
          .ok();
  if (significance) {
    ok = ok && create_dataset(w.layer.id(), "significance", H5T_IEEE_F32LE,
                              {l.num_kv_heads, w.tokens}, {})
                   .ok();
  }
  w.queries = static_cast<int64_t>(q_positions.size());
  if (w.queries > 0) {
    const int64_t q_chunk = std::min<int64_t>(256, w.queries);
    const Handle p = create_dataset(w.layer.id(), "q_positions", H5T_STD_I32LE, {w.queries}, {});
    ok =
        ok && p.ok() &&
        H5Dwrite(p.id(), H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, q_positions.data()) >=
            0 &&
        create_dataset(w.layer.id(), "q", type.id(), {l.num_q_heads, w.queries, d}, {1, q_chunk, d})
            .ok();
  }
  return ok ? Status::ok() : w.fail("layer " + name);
}

static Status write_values(DumpInfo& info, hid_t layer, const char* name, int32_t head,
                           int64_t tokens, const float* x, const std::string& path) {
  std::vector<uint8_t> bytes;
  const int64_t d = info.layout.head_dim;
  if (!round_values(x, tokens * d, info.layout.dtype, &bytes)) {
    return Status(StatusCode::kOutOfRange, path + ": " + name + " of head " + std::to_string(head) +
                                               " has values beyond " +
                                               dtype_name(info.layout.dtype));
  }
  const Handle type = hdf5_type(info.layout.dtype);
  const bool ok = write_slab(layer, name, {static_cast<hsize_t>(head), 0, 0},
                             {1, static_cast<hsize_t>(tokens), static_cast<hsize_t>(d)}, type.id(),
                             bytes.data());
  return ok ? Status::ok() : Status(StatusCode::kIo, path + ": " + name + " cannot be written");
}

Status DumpWriter::write_row(int32_t kv_head, Component c, const float* values) {
  const Hdf5Lock lock;
  const char* name = c == Component::kKey ? "k" : "v";
  return write_values(impl_->info, impl_->layer.id(), name, kv_head, impl_->tokens, values,
                      impl_->path);
}

Status DumpWriter::write_queries(int32_t q_head, const float* values) {
  const Hdf5Lock lock;
  return write_values(impl_->info, impl_->layer.id(), "q", q_head, impl_->queries, values,
                      impl_->path);
}

Status DumpWriter::write_significance(int32_t kv_head, const float* values) {
  const Hdf5Lock lock;
  const bool ok = write_slab(impl_->layer.id(), "significance", {static_cast<hsize_t>(kv_head), 0},
                             {1, static_cast<hsize_t>(impl_->tokens)}, H5T_NATIVE_FLOAT, values);
  return ok ? Status::ok() : impl_->fail("significance");
}

Status DumpWriter::annotate(const std::string& name, const std::string& value) {
  const Hdf5Lock lock;
  return write_string_attribute(impl_->sequence.id(), name.c_str(), value) ? Status::ok()
                                                                           : impl_->fail(name);
}

Status DumpWriter::finish() {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  w.layer = Handle();
  w.layers = Handle();
  w.sequence = Handle();
  if (!w.file.close()) return w.fail("the file");
  std::error_code error;
  std::filesystem::rename(w.temporary, w.path, error);
  if (error) return Status(StatusCode::kIo, w.path + ": " + error.message());
  w.finished = true;
  return Status::ok();
}

}  // namespace tierkv::datasets

// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "codec/file/output_file.h"
#include "codec/host/convert.h"
#include "datasets/dump.h"
#include "datasets/dump_rope.h"
#include "datasets/hdf5/hdf5_dataset.h"
#include "tierkv/half.h"

namespace tierkv::datasets {

struct DumpWriter::Impl {
  std::string path, target, temporary;
  DumpInfo info;
  DumpWriteOptions options;
  Handle file, sequence, layers, layer;
  std::string where;  // the current sequence or layer, for messages
  int64_t tokens = 0;
  int64_t queries = 0;
  bool in_sequence = false;
  int32_t next_layer = 0;
  // Heads of the current layer that were not written yet, by dataset.
  std::vector<bool> k, v, q, significance;
  // Rows deferred and not written yet.
  std::shared_ptr<std::atomic<int64_t>> deferred = std::make_shared<std::atomic<int64_t>>(0);
  bool finished = false;

  ~Impl() {
    const Hdf5Lock lock;
    if (!finished && file.ok()) discard_writes(file.id());
    close_groups();
    file = Handle();
    if (!finished) std::remove(temporary.c_str());
  }
  void close_groups() {
    layer = Handle();
    layers = Handle();
    sequence = Handle();
  }
  Status fail(const std::string& what) const {
    return Status(StatusCode::kIo, path + ": " + what + " cannot be written" + write_error());
  }
  Status misuse(const std::string& what) const {
    return Status(StatusCode::kInvalidArgument, path + ": " + where + ": " + what);
  }
  Status check_layer_written() const;
  Status check_sequence_written() const;
  Status write_head(const char* name, std::vector<bool>* missing, int32_t head, int64_t positions,
                    const float* values);
};

namespace {

Status unrepresentable(float x, int64_t index, DType t) {
  const std::string element = "element " + std::to_string(index);
  return is_finite(x) ? Status(StatusCode::kOutOfRange, element + " is beyond " + dtype_name(t))
                      : Status(StatusCode::kNonFinite, element + " is not finite");
}

// Values rounded to a dump's type, as bytes.
Status round_values(const float* x, int64_t n, DType t, std::vector<uint8_t>* out) {
  out->resize(n * dtype_bytes(t));
  const int64_t i = float_to_elements(t, x, n, out->data());
  return i == n ? Status::ok() : unrepresentable(x[i], i, t);
}

bool write_slab(hid_t group, const char* name, const std::vector<hsize_t>& start,
                const std::vector<hsize_t>& count, hid_t type, const void* data) {
  const Handle dataset(H5Dopen2(group, name, H5P_DEFAULT));
  const Handle space(H5Dget_space(dataset.id()));
  const Handle memory(H5Screate_simple(static_cast<int>(count.size()), count.data(), nullptr));
  const bool ok = H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, start.data(), nullptr,
                                      count.data(), nullptr) >= 0 &&
                  H5Dwrite(dataset.id(), type, memory.id(), space.id(), H5P_DEFAULT, data) >= 0;
  return flushed(dataset, ok);
}

bool write_integers(hid_t group, const char* name, const std::vector<int32_t>& values) {
  const Handle d =
      create_dataset(group, name, H5T_STD_I32LE, {static_cast<int64_t>(values.size())}, {});
  return flushed(d, d.ok() && H5Dwrite(d.id(), H5T_NATIVE_INT32, H5S_ALL, H5S_ALL, H5P_DEFAULT,
                                       values.data()) >= 0);
}

bool write_header(hid_t file, const DumpInfo& info) {
  const Handle root(H5Gopen2(file, "/", H5P_DEFAULT));
  const Handle seq = create_group(file, "seq");
  const CacheLayout& l = info.layout;
  return seq.ok() && write_string_attribute(root.id(), "format", "kv-dump") &&
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
         write_string_attribute(root.id(), "created_by", info.created_by) &&
         write_rope(file, info.rope, l);
}

bool is_increasing_below(const std::vector<int32_t>& x, int64_t end) {
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] < 0 || x[i] >= end || (i > 0 && x[i] <= x[i - 1])) return false;
  }
  return true;
}

}  // namespace

DumpWriter::DumpWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DumpWriter::DumpWriter(DumpWriter&&) noexcept = default;
DumpWriter& DumpWriter::operator=(DumpWriter&&) noexcept = default;
DumpWriter::~DumpWriter() = default;

Status DumpWriter::Impl::check_layer_written() const {
  const struct {
    const char* name;
    const std::vector<bool>& missing;
  } datasets[] = {{"k", k}, {"v", v}, {"q", q}, {"significance", significance}};
  for (const auto& d : datasets) {
    const auto head = std::find(d.missing.begin(), d.missing.end(), true);
    if (head == d.missing.end()) continue;
    return misuse(std::string(d.name) + " of head " + std::to_string(head - d.missing.begin()) +
                  " was not written");
  }
  return Status::ok();
}

Status DumpWriter::Impl::check_sequence_written() const {
  if (Status s = check_layer_written(); !s) return s;
  if (in_sequence && next_layer != info.layout.num_layers) {
    return misuse("ends after layer " + std::to_string(next_layer - 1));
  }
  return Status::ok();
}

Status DumpWriter::Impl::write_head(const char* name, std::vector<bool>* missing, int32_t head,
                                    int64_t positions, const float* values) {
  if (head < 0 || head >= static_cast<int64_t>(missing->size())) {
    return misuse(std::string(name) + " has no head " + std::to_string(head));
  }
  std::vector<uint8_t> bytes;
  const int64_t d = info.layout.head_dim;
  Status rounded = round_values(values, positions * d, info.layout.dtype, &bytes);
  if (!rounded) {
    return rounded.with_context(path + ": " + where + "/" + name + " of head " +
                                std::to_string(head));
  }
  const Handle type = hdf5_type(info.layout.dtype);
  if (!write_slab(layer.id(), name, {static_cast<hsize_t>(head), 0, 0},
                  {1, static_cast<hsize_t>(positions), static_cast<hsize_t>(d)}, type.id(),
                  bytes.data())) {
    return fail(where + "/" + name);
  }
  (*missing)[head] = false;
  return Status::ok();
}

Result<DumpWriter> DumpWriter::create(const std::string& path, const DumpInfo& info,
                                      const DumpWriteOptions& options) {
  if (Status s = info.layout.validate(); !s) return s.with_context(path);
  if (Status s = check_rope(info.rope, info.layout); !s) return s.with_context(path);
  if (Status s = check_text("model_id", info.model_id); !s) return s.with_context(path);
  if (Status s = check_text("created_by", info.created_by); !s) return s.with_context(path);
  if (options.gzip_level < 0 || options.gzip_level > 9) {
    return Status(StatusCode::kInvalidArgument, path + ": gzip_level must be 0 to 9");
  }
  const Hdf5Lock lock;
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  impl->info = info;
  impl->options = options;
  Result<std::string> target = output_target(path);
  if (!target) return target.status();
  impl->target = *target;
  const std::string temporary = temporary_name(*target);
  forget_write_error();
  errno = 0;
  impl->file = create_file(temporary);
  if (!impl->file.ok()) {
    const std::string why = errno != 0 ? std::string(": ") + std::strerror(errno) : "";
    if (errno != EEXIST) std::remove(temporary.c_str());
    return Status(StatusCode::kIo, path + ": cannot be created" + why);
  }
  impl->temporary = temporary;
  if (!write_header(impl->file.id(), info)) return impl->fail("the header");
  return DumpWriter(std::move(impl));
}

Status DumpWriter::begin_sequence(const std::string& id, const std::string& kind,
                                  const std::vector<int32_t>& tokens) {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  if (Status s = w.check_sequence_written(); !s) return s;
  w.where = "/seq/" + printable(id);
  if (id.empty() || id == "." || id.find('/') != std::string::npos || id != printable(id)) {
    return w.misuse("an id is 1 to 100 bytes, not '.', without '/' and control characters");
  }
  if (tokens.empty()) return w.misuse("has no tokens");
  if (Status s = check_text("kind", kind); !s) return w.misuse(s.message());
  w.close_groups();
  w.in_sequence = false;
  for (auto* missing : {&w.k, &w.v, &w.q, &w.significance}) missing->clear();
  w.sequence = create_group(w.file.id(), w.where.c_str());
  w.layers = create_group(w.sequence.id(), "layer");
  const bool ok = w.layers.ok() && write_string_attribute(w.sequence.id(), "kind", kind) &&
                  write_integers(w.sequence.id(), "tokens", tokens);
  if (!ok) return w.fail(w.where);
  w.tokens = static_cast<int64_t>(tokens.size());
  w.next_layer = 0;
  w.in_sequence = true;
  return Status::ok();
}

Status DumpWriter::begin_layer(const std::vector<int32_t>& q_positions, bool significance) {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  const CacheLayout& l = w.info.layout;
  if (!w.in_sequence) return w.misuse("no sequence was begun");
  if (Status s = w.check_layer_written(); !s) return s;
  if (w.next_layer == l.num_layers) return w.misuse("already has all its layers");
  const std::string name = std::to_string(w.next_layer);
  w.where = w.where.substr(0, w.where.find("/layer/")) + "/layer/" + name;
  if (!is_increasing_below(q_positions, w.tokens)) {
    return w.misuse("q positions must increase and lie within the sequence");
  }
  ++w.next_layer;
  w.layer = create_group(w.layers.id(), name.c_str());
  const Handle type = hdf5_type(l.dtype);
  const auto create = [&](const char* dataset, int64_t heads, int64_t positions) {
    std::vector<int64_t> chunk;
    if (w.options.gzip_level > 0) chunk = {1, std::min<int64_t>(256, positions), l.head_dim};
    return create_dataset(w.layer.id(), dataset, type.id(), {heads, positions, l.head_dim}, chunk,
                          w.options.gzip_level)
        .ok();
  };
  bool ok = w.layer.ok() && create("k", l.num_kv_heads, w.tokens) &&
            create("v", l.num_kv_heads, w.tokens);
  if (significance) {
    ok = ok && create_dataset(w.layer.id(), "significance", H5T_IEEE_F32LE,
                              {l.num_kv_heads, w.tokens}, {})
                   .ok();
  }
  w.queries = static_cast<int64_t>(q_positions.size());
  if (w.queries > 0) {
    ok = ok && write_integers(w.layer.id(), "q_positions", q_positions) &&
         create("q", l.num_q_heads, w.queries);
  }
  if (!ok) return w.fail(w.where);
  w.k.assign(l.num_kv_heads, true);
  w.v.assign(l.num_kv_heads, true);
  w.q.assign(w.queries > 0 ? l.num_q_heads : 0, true);
  w.significance.assign(significance ? l.num_kv_heads : 0, true);
  return Status::ok();
}

Status DumpWriter::write_row(int32_t kv_head, Component c, const float* values) {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  return c == Component::kKey ? w.write_head("k", &w.k, kv_head, w.tokens, values)
                              : w.write_head("v", &w.v, kv_head, w.tokens, values);
}

Result<RowTarget> DumpWriter::defer_row(int32_t kv_head, Component c) {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  const char* name = c == Component::kKey ? "k" : "v";
  std::vector<bool>& missing = c == Component::kKey ? w.k : w.v;
  if (kv_head < 0 || kv_head >= static_cast<int64_t>(missing.size())) {
    return w.misuse(std::string(name) + " has no head " + std::to_string(kv_head));
  }
  const Handle access(H5Fget_access_plist(w.file.id()));
  const Handle dataset(H5Dopen2(w.layer.id(), name, H5P_DEFAULT));
  const haddr_t offset = H5Dget_offset(dataset.id());
  void* descriptor = nullptr;
  if (w.options.gzip_level > 0 || offset == HADDR_UNDEF ||
      H5Fget_vfd_handle(w.file.id(), access.id(), &descriptor) < 0 || descriptor == nullptr) {
    return Status(StatusCode::kUnsupported,
                  w.path + ": " + w.where + "/" + name + ": its rows have no place of their own");
  }
  RowTarget target;
  target.descriptor_ = *static_cast<int*>(descriptor);
  target.elements_ = w.tokens * w.info.layout.head_dim;
  target.dtype_ = w.info.layout.dtype;
  target.offset_ =
      static_cast<int64_t>(offset) + kv_head * target.elements_ * dtype_bytes(w.info.layout.dtype);
  target.where_ = w.path + ": " + w.where + "/" + name;
  target.head_ = kv_head;
  target.missing_ = w.deferred;
  ++*w.deferred;
  missing[kv_head] = false;
  return target;
}

Status RowTarget::write(const float* values) const {
  // Piece by piece, each still in the cache when it is written.
  constexpr int64_t kPiece = 1 << 17;
  const int64_t width = dtype_bytes(dtype_);
  std::vector<uint8_t> bytes(std::min(kPiece, elements_) * width);
  for (int64_t first = 0; first < elements_; first += kPiece) {
    const int64_t n = std::min(kPiece, elements_ - first);
    const int64_t good = float_to_elements(dtype_, values + first, n, bytes.data());
    if (good < n) {
      return unrepresentable(values[first + good], first + good, dtype_)
          .with_context(where_ + " of head " + std::to_string(head_));
    }
    for (int64_t done = 0; done < n * width;) {
      const ssize_t written = pwrite(descriptor_, bytes.data() + done, n * width - done,
                                     offset_ + first * width + done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        return Status(StatusCode::kIo, where_ + " cannot be written: " + std::strerror(errno));
      }
      done += written;
    }
  }
  --*missing_;
  return Status::ok();
}

Status DumpWriter::write_queries(int32_t q_head, const float* values) {
  const Hdf5Lock lock;
  return impl_->write_head("q", &impl_->q, q_head, impl_->queries, values);
}

Status DumpWriter::write_significance(int32_t kv_head, const float* values) {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  if (kv_head < 0 || kv_head >= static_cast<int64_t>(w.significance.size())) {
    return w.misuse("significance has no head " + std::to_string(kv_head));
  }
  for (int64_t i = 0; i < w.tokens; ++i) {
    if (is_finite(values[i]) && values[i] >= 0) continue;
    return w.misuse("significance of token " + std::to_string(i) + " is negative or not finite");
  }
  if (!write_slab(w.layer.id(), "significance", {static_cast<hsize_t>(kv_head), 0},
                  {1, static_cast<hsize_t>(w.tokens)}, H5T_NATIVE_FLOAT, values)) {
    return w.fail(w.where + "/significance");
  }
  w.significance[kv_head] = false;
  return Status::ok();
}

Status DumpWriter::write_pruned(int32_t kv_head, const uint8_t* flags) {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  if (kv_head < 0 || kv_head >= static_cast<int64_t>(w.k.size())) {
    return w.misuse("pruned has no head " + std::to_string(kv_head));
  }
  const hid_t layer = w.layer.id();
  const bool exists =
      H5Lexists(layer, "pruned", H5P_DEFAULT) > 0 ||
      create_dataset(layer, "pruned", H5T_STD_U8LE, {w.info.layout.num_kv_heads, w.tokens}, {})
          .ok();
  const bool ok =
      exists && write_slab(layer, "pruned", {static_cast<hsize_t>(kv_head), 0},
                           {1, static_cast<hsize_t>(w.tokens)}, H5T_NATIVE_UINT8, flags);
  return ok ? Status::ok() : w.fail(w.where + "/pruned");
}

Status DumpWriter::annotate(const std::string& name, const std::string& value) {
  const Hdf5Lock lock;
  if (!impl_->in_sequence) return impl_->misuse("no sequence was begun");
  if (Status s = check_text(name.c_str(), value); !s) return impl_->misuse(s.message());
  return write_string_attribute(impl_->sequence.id(), name.c_str(), value)
             ? Status::ok()
             : impl_->fail(impl_->where + ": attribute " + name);
}

Status DumpWriter::finish(bool overwrite) {
  const Hdf5Lock lock;
  Impl& w = *impl_;
  if (w.finished) return w.misuse("is finished already");
  if (Status s = w.check_sequence_written(); !s) return s;
  if (!w.in_sequence) return w.misuse("a dump needs at least one sequence");
  if (*w.deferred != 0) {
    return w.misuse(std::to_string(*w.deferred) + " deferred rows were not written");
  }
  w.close_groups();
  w.in_sequence = false;
  if (H5Fflush(w.file.id(), H5F_SCOPE_LOCAL) < 0 || !w.file.close()) return w.fail("the file");
  if (Status s = publish(w.temporary, w.target, overwrite); !s) return s;
  w.finished = true;
  return Status::ok();
}

void leave_hdf5_as_it_is_at_exit() {
  H5dont_atexit();
}

}  // namespace tierkv::datasets

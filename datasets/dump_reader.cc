// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <optional>

#include "codec/host/convert.h"
#include "datasets/dump.h"
#include "datasets/dump_check.h"
#include "datasets/hdf5/hdf5_dataset.h"
#include "datasets/slab.h"
#include "tierkv/half.h"

namespace tierkv::datasets {

struct DumpReader::Impl {
  DumpInfo info;
  Handle file;
  std::optional<SlabFile> slabs;  // of the file
};

namespace {

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

// Where element `index` of a slab lies in its dataset.
std::string index_text(const Slab& slab, int64_t index) {
  std::string text;
  for (size_t i = slab.count.size(); i-- > 0;) {
    text = (i > 0 ? ", " : "[") + std::to_string(slab.start[i] + index % slab.count[i]) + text;
    index /= slab.count[i];
  }
  return text + "]";
}

Status check_finite(const std::string& path, const Slab& slab, const std::vector<float>& x) {
  for (size_t i = 0; i < x.size(); ++i) {
    if (is_finite(x[i])) continue;
    return Status(
        StatusCode::kNonFinite,
        path + ": element " + index_text(slab, static_cast<int64_t>(i)) + " is not finite");
  }
  return Status::ok();
}

// The first of n elements whose highest 16 bits, `stride` bytes apart, have all of `exponent` set,
// or n. Looks at runs without a branch per element first.
template <int32_t stride, uint16_t exponent>
int64_t find_special(const uint8_t* high, int64_t n) {
  constexpr int64_t kRun = 256;
  const auto is_special = [&](int64_t i) {
    uint16_t h;
    std::memcpy(&h, high + i * stride, 2);
    return static_cast<uint16_t>((h & exponent) == exponent);
  };
  for (int64_t begin = 0; begin < n; begin += kRun) {
    const int64_t end = std::min(n, begin + kRun);
    uint16_t any = 0;
    for (int64_t i = begin; i < end; ++i) any |= is_special(i);
    if (any == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (is_special(i) != 0) return i;
    }
  }
  return n;
}

// Without converting: an exponent of all ones is infinity or NaN in all three types.
Status check_finite(const std::string& path, const Slab& slab, const RowData& row) {
  const auto report = [&](int64_t i) {
    return Status(StatusCode::kNonFinite,
                  path + ": element " + index_text(slab, i) + " is not finite");
  };
  const uint8_t* high = row.bytes.data() + dtype_bytes(row.dtype) - 2;
  const int64_t n = row.tokens * row.head_dim;
  const int64_t i = row.dtype == DType::kFloat16    ? find_special<2, 0x7c00>(high, n)
                    : row.dtype == DType::kBFloat16 ? find_special<2, 0x7f80>(high, n)
                                                    : find_special<4, 0x7f80>(high, n);
  return i == n ? Status::ok() : report(i);
}

Status check_index(const char* what, int64_t index, int64_t count) {
  if (index >= 0 && index < count) return Status::ok();
  return Status(StatusCode::kInvalidArgument, std::string(what) + " " + std::to_string(index) +
                                                  " is not one of " + std::to_string(count));
}

Status check_layer(const DumpInfo& info, int32_t seq, int32_t layer) {
  const auto sequences = static_cast<int64_t>(info.sequences.size());
  if (Status s = check_index("sequence", seq, sequences); !s) return s;
  return check_index("layer", layer, info.layout.num_layers);
}

}  // namespace

DumpReader::DumpReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DumpReader::DumpReader(DumpReader&&) noexcept = default;
DumpReader& DumpReader::operator=(DumpReader&&) noexcept = default;
DumpReader::~DumpReader() = default;
const DumpInfo& DumpReader::info() const {
  return impl_->info;
}

Result<DumpReader> DumpReader::open(const std::string& path) {
  const Hdf5Lock lock;
  Result<Handle> file = open_file(path);
  if (!file) return file.status().with_context(path);
  auto impl = std::make_unique<Impl>();
  impl->info.path = path;
  impl->file = std::move(*file);
  if (Status s = check_dump(impl->file.id(), &impl->info); !s) return s.with_context(path);
  impl->slabs.emplace(impl->file.id());
  return DumpReader(std::move(impl));
}

Result<DumpReader> DumpReader::open_image(const std::string& name, const void* bytes, size_t size) {
  const Hdf5Lock lock;
  Result<Handle> file = datasets::open_image(bytes, size);
  if (!file) return file.status().with_context(name);
  auto impl = std::make_unique<Impl>();
  impl->info.path = name;
  impl->file = std::move(*file);
  if (Status s = check_dump(impl->file.id(), &impl->info); !s) return s.with_context(name);
  impl->slabs.emplace(impl->file.id());
  return DumpReader(std::move(impl));
}

Status DumpReader::read_row(int32_t seq, int32_t layer, int32_t kv_head, Component c,
                            RowData* out) const {
  const DumpInfo& info = impl_->info;
  Status s = check_layer(info, seq, layer);
  if (s) s = check_index("kv_head", kv_head, info.layout.num_kv_heads);
  if (!s) return s.with_context(info.path);
  const std::string path =
      layer_path(info.sequences[seq].id, layer) + (c == Component::kKey ? "/k" : "/v");
  out->dtype = info.sequences[seq].layers[layer].dtype;
  out->tokens = info.sequences[seq].num_tokens;
  out->head_dim = info.layout.head_dim;
  const Slab slab = {{kv_head, 0, 0}, {1, out->tokens, out->head_dim}};
  s = read_slab(*impl_->slabs, path, slab, &out->bytes);
  if (s) s = check_finite(path, slab, *out);
  return s.with_context(info.path);
}

Status DumpReader::read_queries(int32_t seq, int32_t layer, int32_t first_head, int32_t num_heads,
                                std::vector<float>* q) const {
  const DumpInfo& info = impl_->info;
  Status s = check_layer(info, seq, layer);
  if (s) s = check_index("q_head", first_head, info.layout.num_q_heads);
  if (s)
    s = check_index("number of q_heads less one", int64_t{num_heads} - 1,
                    info.layout.num_q_heads - first_head);
  if (!s) return s.with_context(info.path);
  const std::string path = layer_path(info.sequences[seq].id, layer) + "/q";
  const LayerInfo& l = info.sequences[seq].layers[layer];
  if (!l.has_q) return Status(StatusCode::kNotFound, info.path + ": " + path + ": is missing");
  const Slab slab = {{first_head, 0, 0}, {num_heads, l.num_queries, info.layout.head_dim}};
  LargeBytes bytes;
  s = read_slab(*impl_->slabs, path, slab, &bytes);
  if (!s) return s.with_context(info.path);
  q->resize(slab.elements());
  elements_to_float(l.dtype, bytes.data(), slab.elements(), q->data());
  return check_finite(path, slab, *q).with_context(info.path);
}

Status DumpReader::read_query_positions(int32_t seq, int32_t layer,
                                        std::vector<int32_t>* positions) const {
  const DumpInfo& info = impl_->info;
  if (Status s = check_layer(info, seq, layer); !s) return s.with_context(info.path);
  const std::string path = layer_path(info.sequences[seq].id, layer) + "/q_positions";
  const int64_t n = info.sequences[seq].layers[layer].num_queries;
  const int64_t tokens = info.sequences[seq].num_tokens;
  if (n == 0) return Status(StatusCode::kNotFound, info.path + ": " + path + ": is missing");
  std::vector<int64_t> wide;
  Status s = read_slab_as(*impl_->slabs, path, {{0}, {n}}, &wide);
  if (!s) return s.with_context(info.path);
  for (int64_t i = 0; i < n; ++i) {
    if (wide[i] >= 0 && wide[i] < tokens && (i == 0 || wide[i] > wide[i - 1])) continue;
    return corrupt(info.path + ": " + path + ": element [" + std::to_string(i) + "] is " +
                   std::to_string(wide[i]) + " (expected increasing positions below " +
                   std::to_string(tokens) + ")");
  }
  positions->assign(wide.begin(), wide.end());
  return Status::ok();
}

Status DumpReader::read_significance(int32_t seq, int32_t layer, int32_t kv_head,
                                     std::vector<float>* significance) const {
  const DumpInfo& info = impl_->info;
  Status s = check_layer(info, seq, layer);
  if (s) s = check_index("kv_head", kv_head, info.layout.num_kv_heads);
  if (!s) return s.with_context(info.path);
  const std::string path = layer_path(info.sequences[seq].id, layer) + "/significance";
  const Slab slab = {{kv_head, 0}, {1, info.sequences[seq].num_tokens}};
  s = read_slab_as(*impl_->slabs, path, slab, significance);
  if (s) s = check_finite(path, slab, *significance);
  if (!s) return s.with_context(info.path);
  for (size_t i = 0; i < significance->size(); ++i) {
    if ((*significance)[i] >= 0) continue;
    return corrupt(info.path + ": " + path + ": element " +
                   index_text(slab, static_cast<int64_t>(i)) + " is negative");
  }
  return Status::ok();
}

Status DumpReader::read_tokens(int32_t seq, std::vector<int32_t>* tokens) const {
  const DumpInfo& info = impl_->info;
  const auto sequences = static_cast<int64_t>(info.sequences.size());
  if (Status s = check_index("sequence", seq, sequences); !s) return s.with_context(info.path);
  const std::string path = "/seq/" + info.sequences[seq].id + "/tokens";
  std::vector<int64_t> wide;
  Status s = read_slab_as(*impl_->slabs, path, {{0}, {info.sequences[seq].num_tokens}}, &wide);
  if (!s) return s.with_context(info.path);
  for (size_t i = 0; i < wide.size(); ++i) {
    if (wide[i] >= INT32_MIN && wide[i] <= INT32_MAX) continue;
    return corrupt(info.path + ": " + path + ": element [" + std::to_string(i) + "] is " +
                   std::to_string(wide[i]) + " (expected an int32)");
  }
  tokens->assign(wide.begin(), wide.end());
  return Status::ok();
}

}  // namespace tierkv::datasets

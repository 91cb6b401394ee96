#include "store/host_basis.h"

#include <cmath>

#include "codec/element.h"

namespace tierkv {

Result<std::unique_ptr<HostBasisStore>> HostBasisStore::make(const KvStoreConfig& config) {
  if (Status s = config.validate(); !s) return s;
  Result<std::unique_ptr<HostStore>> inner = HostStore::make(coordinates_config(config));
  if (!inner) return inner.status();
  return std::unique_ptr<HostBasisStore>(new HostBasisStore(config, std::move(*inner)));
}

Result<std::vector<float>> HostBasisStore::coordinates(const void* x, Component c,
                                                       const AppendCall& call) const {
  const CacheLayout& layout = config_.layout;
  const int64_t vectors = int64_t{call.sequences.count} * call.tokens * layout.num_kv_heads;
  if (Status s = check_values(x, layout.dtype, vectors * layout.head_dim); !s) return s;
  std::vector<float> y(vectors * layout.head_dim);
  for (size_t i = 0; i < y.size(); ++i) {
    y[i] = load_element(x, layout.dtype, static_cast<int64_t>(i));
  }
  for (int64_t i = 0; i < vectors; ++i) {
    row_basis(c, call.layer, i % layout.num_kv_heads).apply(y.data() + i * layout.head_dim, 1);
  }
  return y;
}

Status HostBasisStore::append(const AppendCall& call) {
  if (Status s = inner_->sequences().admit_append(call).status(); !s) return s;
  const Result<std::vector<float>> k = coordinates(call.k, Component::kKey, call);
  if (!k) return k.status().with_context("k");
  const Result<std::vector<float>> v = coordinates(call.v, Component::kValue, call);
  if (!v) return v.status().with_context("v");
  AppendCall inner = call;
  inner.k = k->data();
  inner.v = v->data();
  return inner_->append(inner);
}

Status HostBasisStore::attend(const AttendRequest& request) {
  if (Status s = inner_->sequences().admit_attend(request).status(); !s) return s;
  if (Status s = check_query_dtype(config_, request.dtype); !s) return s;
  if (Status s = check_sinks_in(basis(), request.sinks); !s) return s;
  const CacheLayout& layout = config_.layout;
  const int32_t dim = layout.head_dim, group = layout.group_size();
  const int64_t queries = int64_t{request.sequences.count} * request.q_len * layout.num_q_heads;
  if (Status s = check_values(request.q, request.dtype, queries * dim); !s) {
    return s.with_context("q");
  }
  std::vector<float> x(dim), shift(queries), lse(queries);
  std::vector<uint16_t> q(queries * dim), out(queries * dim);
  for (int64_t i = 0; i < queries; ++i) {
    const Basis& keys = row_basis(Component::kKey, request.layer, i % layout.num_q_heads / group);
    for (int32_t d = 0; d < dim; ++d) x[d] = load_element(request.q, request.dtype, i * dim + d);
    shift[i] = static_cast<float>(layout.sm_scale * keys.mean_product(x.data()));
    keys.apply_to_queries(x.data(), 1);
    if (Status s = check_values(x.data(), DType::kFloat32, dim); !s) {
      return s.with_context("q in the basis");
    }
    for (int32_t d = 0; d < dim; ++d) q[i * dim + d] = float_to_half(x[d]);
  }
  AttendRequest inner = request;
  inner.dtype = DType::kFloat16;
  inner.q = q.data();
  inner.out = out.data();
  inner.lse = lse.data();
  if (Status s = inner_->attend(inner); !s) return s;
  auto* to = static_cast<uint16_t*>(request.out);
  for (int64_t i = 0; i < queries; ++i) {
    for (int32_t d = 0; d < dim; ++d) x[d] = half_to_float(out[i * dim + d]);
    row_basis(Component::kValue, request.layer, i % layout.num_q_heads / group).undo(x.data(), 1);
    // Nothing was attended to: no mean either.
    const bool is_empty = lse[i] == -INFINITY;
    for (int32_t d = 0; d < dim; ++d) {
      to[i * dim + d] = output_to_raw(request.dtype, is_empty ? 0.0f : x[d]);
    }
    if (request.lse != nullptr) request.lse[i] = lse[i] + shift[i];
  }
  return Status::ok();
}

}  // namespace tierkv

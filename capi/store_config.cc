#include "capi/store_config.h"

#include <utility>

#include "capi/tier_format.h"

namespace tierkv::capi {
namespace {

Status read_policy(const tkv_tier_policy* in, TierPolicy* out) {
  if (in == nullptr) return Status::ok();
  tkv_tier_policy p;
  if (Status s = read_struct(in, "policy", &p); !s) return s;
  *out = {p.alpha_high, p.alpha_low, p.window_tokens, p.sink_tokens};
  return Status::ok();
}

Status read_formats(const tkv_store_config& in, KvStoreConfig* out) {
  if (Status s = read_tier_format(in.window_format, "window_format", &out->window_format); !s) {
    return s;
  }
  if (Status s = read_tier_format(in.high_format, "high_format", &out->high_format); !s) return s;
  return read_tier_format(in.low_format, "low_format", &out->low_format);
}

Status read_layout(const tkv_store_config& in, CacheLayout* out) {
  out->num_layers = in.num_layers;
  out->num_q_heads = in.num_q_heads;
  out->num_kv_heads = in.num_kv_heads;
  out->head_dim = in.head_dim;
  out->rope_applied = in.before_rope == 0;
  out->rope_theta = in.rope_theta;
  out->sm_scale = read_sm_scale(in.sm_scale, in.head_dim);
  return read_dtype(in.dtype, &out->dtype);
}

// Part `row` of an array of parts of `count` floats.
std::vector<float> part_of(const float* array, int64_t row, int64_t count) {
  return std::vector<float>(array + row * count, array + (row + 1) * count);
}

// The basis of one row. The kind was checked.
Basis row_basis(const tkv_basis& b, int64_t row, int32_t head_dim) {
  std::vector<float> mean;
  if (b.means != nullptr) mean = Basis::mean_removed(part_of(b.means, row, head_dim)).mean;
  Basis out = Basis::none(head_dim);
  if (b.kind == TKV_BASIS_MEAN) return Basis::mean_removed(std::move(mean));
  if (b.kind == TKV_BASIS_HADAMARD) out = Basis::hadamard(head_dim);
  if (b.kind == TKV_BASIS_MATRIX) {
    const int64_t values = int64_t{head_dim} * head_dim;
    out = Basis::matrix({}, part_of(b.forward, row, values), part_of(b.inverse, row, values));
    out.head_dim = head_dim;
  }
  out.mean = std::move(mean);
  return out;
}

// null: no basis, for every row.
Status read_component_basis(const tkv_basis* in, const CacheLayout& layout,
                            std::vector<Basis>* out) {
  tkv_basis b{};
  if (in != nullptr) {
    if (Status s = read_struct(in, "basis", &b); !s) return s;
  }
  if (b.kind < TKV_BASIS_NONE || b.kind > TKV_BASIS_MATRIX) return invalid("kind is unknown");
  if (b.kind == TKV_BASIS_NONE && b.means != nullptr) return invalid("means without a basis");
  if (b.kind == TKV_BASIS_MEAN && b.means == nullptr) return invalid("means is null");
  if (b.kind == TKV_BASIS_MATRIX && (b.forward == nullptr || b.inverse == nullptr)) {
    return invalid("forward or inverse is null");
  }
  const int64_t rows = int64_t{layout.num_layers} * layout.num_kv_heads;
  for (int64_t row = 0; row < rows; ++row) out->push_back(row_basis(b, row, layout.head_dim));
  return Status::ok();
}

Status read_basis(const tkv_store_config& in, KvStoreConfig* out) {
  if (in.key_basis == nullptr && in.value_basis == nullptr) return Status::ok();
  CacheBasis basis;
  basis.num_layers = out->layout.num_layers;
  basis.num_kv_heads = out->layout.num_kv_heads;
  if (Status s = read_component_basis(in.key_basis, out->layout, &basis.keys); !s) {
    return s.with_context("key_basis");
  }
  if (Status s = read_component_basis(in.value_basis, out->layout, &basis.values); !s) {
    return s.with_context("value_basis");
  }
  out->basis = std::make_shared<const CacheBasis>(std::move(basis));
  return out->validate();
}

}  // namespace

Status read_store_config(const tkv_store_config* in, KvStoreConfig* out) {
  tkv_store_config c;
  if (Status s = read_struct(in, "config", &c); !s) return s;
  if (Status s = read_layout(c, &out->layout); !s) return s;
  if (Status s = read_formats(c, out); !s) return s;
  if (Status s = read_policy(c.policy, &out->policy); !s) return s;
  if (c.score_interval != 0) out->score_interval = c.score_interval;
  out->page_bytes = c.page_bytes;
  out->num_pages = c.num_pages;
  out->max_sequences = c.max_sequences;
  out->max_tokens = c.max_tokens;
  // Before anything is read whose size it says.
  if (Status s = out->validate(); !s) return s;
  return read_basis(c, out);
}

}  // namespace tierkv::capi

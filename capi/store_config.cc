#include "capi/store_config.h"

#include <utility>

#include "capi/codebook.h"
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
  bool before_rope = false;
  if (Status s = read_flag(in.before_rope, "before_rope", &before_rope); !s) return s;
  out->rope_applied = !before_rope;
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

// `count` floats, or none where there is no array.
std::vector<float> optional(const float* array, int64_t count) {
  return array == nullptr ? std::vector<float>() : part_of(array, 0, count);
}

Status read_sources(const tkv_coded_config& in, CodedConfig* out) {
  switch (in.means) {
    case TKV_MEANS_OF_PROMPT:
      out->means = MeanSource::kPrompt;
      break;
    case TKV_MEANS_NONE:
      out->means = MeanSource::kNone;
      break;
    case TKV_MEANS_GIVEN:
      out->means = MeanSource::kGiven;
      break;
    default:
      return invalid("means is unknown");
  }
  switch (in.steps) {
    case TKV_STEPS_GIVEN:
      out->steps = StepSource::kGiven;
      break;
    case TKV_STEPS_OF_PROMPT:
      out->steps = StepSource::kPrompt;
      break;
    default:
      return invalid("steps is unknown");
  }
  switch (in.codebooks) {
    case TKV_CODEBOOKS_OF_HOST:
      out->codebooks = CodebookSource::kHost;
      break;
    case TKV_CODEBOOKS_OF_DEVICE:
      out->codebooks = CodebookSource::kDevice;
      break;
    case TKV_CODEBOOKS_GIVEN:
      out->codebooks = CodebookSource::kGiven;
      break;
    default:
      return invalid("codebooks is unknown");
  }
  return Status::ok();
}

Status read_given(const tkv_coded_config& in, CodedConfig* out) {
  if (in.num_given < 0 || in.num_given > (1 << 16)) return invalid("num_given is out of range");
  if (in.num_given > 0 && in.given == nullptr) return invalid("given is null");
  for (int32_t i = 0; i < in.num_given; ++i) {
    if (in.given[i] == nullptr) return invalid("codebook " + std::to_string(i) + " is null");
    serialize_codebook(in.given[i]->book, &out->given.emplace_back());
  }
  return Status::ok();
}

// null leaves the store one of tiers.
Status read_coded(const tkv_coded_config* in, const CacheLayout& layout, CodedConfig* out) {
  if (in == nullptr) return Status::ok();
  tkv_coded_config c;
  if (Status s = read_struct(in, "config", &c); !s) return s;
  if (c.steps == TKV_STEPS_GIVEN && (c.key_steps == nullptr || c.value_steps == nullptr)) {
    return invalid("key_steps or value_steps is null");
  }
  if (Status s = read_sources(c, out); !s) return s;
  if (Status s = read_given(c, out); !s) return s;
  const int64_t rows = int64_t{layout.num_layers} * layout.num_kv_heads;
  out->enabled = true;
  out->key_steps = optional(c.key_steps, rows);
  out->value_steps = optional(c.value_steps, rows);
  out->key_relative = c.key_relative;
  out->value_relative = c.value_relative;
  out->key_means = optional(c.key_means, rows * layout.head_dim);
  out->value_means = optional(c.value_means, rows * layout.head_dim);
  if (c.max_length != 0) out->max_length = c.max_length;
  if (c.streams_per_lane != 0) out->streams_per_lane = c.streams_per_lane;
  out->fixed_blocks = c.fixed_format != nullptr;
  if (Status s = read_tier_format(c.fixed_format, "fixed_format", &out->fixed_format); !s) return s;
  return Status::ok();
}

// null leaves the store one of tiers.
Status read_channel(const tkv_channel_config* in, ChannelConfig* out) {
  if (in == nullptr) return Status::ok();
  tkv_channel_config c;
  if (Status s = read_struct(in, "config", &c); !s) return s;
  out->enabled = true;
  if (c.k_bits != 0) out->k_bits = c.k_bits;
  if (c.v_bits != 0) out->v_bits = c.v_bits;
  if (c.block_tokens != 0) out->block_tokens = c.block_tokens;
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
  return Status::ok();
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
  if (Status s = out->layout.validate(); !s) return s.with_context("layout");
  if (Status s = read_basis(c, out); !s) return s;
  if (Status s = read_coded(c.coded, out->layout, &out->coded); !s) return s.with_context("coded");
  if (Status s = read_channel(c.channel, &out->channel); !s) return s.with_context("channel");
  return out->validate();
}

}  // namespace tierkv::capi

// SPDX-License-Identifier: Apache-2.0
// Attention over caller-owned pages.
#include "tierkv/attention.h"

#include "capi/tier_format.h"

struct tkv_attention {
  tierkv::AttentionConfig config;
  tierkv::AttentionGrid grid;
};

namespace tierkv::capi {
namespace {

Status read_tiers(const tkv_attention_config& in, AttentionConfig* out) {
  if (in.num_tiers < 1 || in.num_tiers > kMaxAttentionTiers) {
    return invalid("num_tiers must be 1 to 3");
  }
  if (in.tiers == nullptr) return invalid("tiers is null");
  const auto* bytes = reinterpret_cast<const unsigned char*>(in.tiers);
  for (int32_t t = 0; t < in.num_tiers; ++t) {
    // A caller of another version has elements of another size.
    const auto* element =
        reinterpret_cast<const tkv_attention_tier*>(bytes + t * in.tiers->struct_size);
    tkv_attention_tier tier;
    if (Status s = read_struct(element, "tier", &tier); !s) return s;
    if (element->struct_size != in.tiers->struct_size)
      return invalid("tiers differ in struct_size");
    if (tier.format == nullptr) return invalid("tier: format is null");
    out->tiers[t].side = tier.side;
    if (Status s = read_tier_format(tier.format, "tier: format", &out->tiers[t].format); !s) {
      return s;
    }
  }
  out->num_tiers = in.num_tiers;
  return Status::ok();
}

Status read_config(const tkv_attention_config* in, AttentionConfig* out) {
  tkv_attention_config c;
  if (Status s = read_struct(in, "config", &c); !s) return s;
  if (c.num_layers != 0) out->num_layers = c.num_layers;
  out->num_q_heads = c.num_q_heads;
  out->num_kv_heads = c.num_kv_heads;
  out->head_dim = c.head_dim;
  if (c.q_len != 0) out->q_len = c.q_len;
  out->sm_scale = read_sm_scale(c.sm_scale, c.head_dim);
  out->page_bytes = c.page_bytes;
  out->sliding_window_tokens = c.sliding_window_tokens;
  if (Status s = read_dtype(c.dtype, &out->dtype); !s) return s;
  if (Status s = read_tiers(c, out); !s) return s;
  return out->validate();
}

Status create(const tkv_attention_config* config, tkv_attention** out) {
  AttentionConfig c;
  if (out == nullptr) return invalid("attention is null");
  if (Status s = read_config(config, &c); !s) return s;
  const Result<AttentionGrid> grid = attention_grid(c);
  if (grid) *out = new tkv_attention{c, *grid};
  return grid.status();
}

Status check_count(int32_t num_sequences) {
  if (num_sequences >= 1 && num_sequences <= kMaxSequences) return Status::ok();
  return invalid("num_sequences must be 1 to 1048576");
}

Status read_table(const tkv_page_table* in, PageTableView* out) {
  tkv_page_table t;
  if (Status s = read_struct(in, "table", &t); !s) return s;
  out->shape.num_sequences = t.num_sequences;
  out->shape.rows_per_sequence = t.rows_per_sequence;
  out->shape.num_sides = t.num_sides;
  std::copy_n(t.table_slots, kMaxTables, out->shape.table_slots);
  std::copy_n(t.tokens_per_page, kMaxSides, out->shape.tokens_per_page);
  out->slots = t.slots;
  static_assert(sizeof(SideCounts) == kMaxSides * sizeof(int32_t), "tokens is [rows, 4]");
  if (reinterpret_cast<uintptr_t>(t.tokens) % alignof(SideCounts) != 0) {
    return invalid("table: tokens is not aligned to 16 bytes");
  }
  out->tokens = reinterpret_cast<const SideCounts*>(t.tokens);
  return Status::ok();
}

Status read_pool(const tkv_page_pool* in, PageView* out) {
  tkv_page_pool p;
  if (Status s = read_struct(in, "pool", &p); !s) return s;
  *out = {static_cast<uint8_t*>(p.pages), p.page_bytes, p.num_pages};
  return Status::ok();
}

Status read_tail(const tkv_attention_tail* in, AttentionTail* out) {
  if (in == nullptr) return Status::ok();
  tkv_attention_tail t;
  if (Status s = read_struct(in, "tail", &t); !s) return s;
  if (t.tier < 0) return invalid("tail: tier is negative");
  *out = {t.tier, t.newest, t.ring_first, t.ring_tokens};
  return Status::ok();
}

static_assert(TKV_SETTLED_NOTHING == static_cast<int>(Settled::kNothing));
static_assert(TKV_SETTLED_ALL_BUT_LAST_PAGE == static_cast<int>(Settled::kAllButLastPage));
static_assert(TKV_SETTLED_ALL == static_cast<int>(Settled::kAll));
Status read_settled(const tkv_attend_call& in, AttendCall* out) {
  if (Status s = read_flag(in.plan_is_settled, "plan_is_settled", &out->plan_is_settled); !s) {
    return s;
  }
  for (int32_t t = 0; t < kMaxAttentionTiers; ++t) {
    if (in.settled[t] < TKV_SETTLED_NOTHING || in.settled[t] > TKV_SETTLED_ALL) {
      return invalid("settled must be TKV_SETTLED_NOTHING, _ALL_BUT_LAST_PAGE or _ALL");
    }
    out->settled[t] = static_cast<Settled>(in.settled[t]);
  }
  return Status::ok();
}

// What every call on a handle needs: the handle, and the struct.
Status read_call(const tkv_attention* attention, const tkv_attend_call* in, tkv_attend_call* out) {
  if (attention == nullptr) return invalid("attention is null");
  if (Status s = read_struct(in, "call", out); !s) return s;
  return check_count(out->num_sequences);
}

Status plan(const tkv_attention* attention, const tkv_attend_call* call, GpuStream stream) {
  tkv_attend_call c;
  PageTableView table;
  if (Status s = read_call(attention, call, &c); !s) return s;
  if (Status s = read_table(c.table, &table); !s) return s;
  return plan_attention(attention->config, attention->grid, table, {c.sequences, c.num_sequences},
                        {c.workspace, c.workspace_bytes}, stream);
}

Status attend(const tkv_attention* attention, const tkv_attend_call* call, GpuStream stream) {
  tkv_attend_call c;
  AttendCall out;
  if (Status s = read_call(attention, call, &c); !s) return s;
  if (Status s = read_table(c.table, &out.table); !s) return s;
  if (Status s = read_pool(c.pool, &out.pages); !s) return s;
  if (Status s = read_tail(c.tail, &out.tail); !s) return s;
  if (Status s = read_settled(c, &out); !s) return s;
  out.batch = {c.sequences, c.num_sequences};
  out.layer = c.layer;
  out.q = c.q;
  out.out = c.out;
  out.lse = c.lse;
  out.sinks = c.sinks;
  return tierkv::attend(attention->config, attention->grid, out, {c.workspace, c.workspace_bytes},
                        stream);
}

Status row_status(const tkv_attention* attention, const tkv_attend_call* call,
                  const int32_t** status) {
  tkv_attend_call c;
  if (status == nullptr) return invalid("status is null");
  if (Status s = read_call(attention, call, &c); !s) return s;
  if (c.workspace == nullptr) return invalid("workspace is null");
  if (c.layer < 0 || c.layer >= attention->config.num_layers) {
    return invalid("layer is out of range");
  }
  if (c.workspace_bytes <
      attention_workspace_bytes(attention->config, attention->grid, c.num_sequences)) {
    return Status(StatusCode::kBufferTooSmall, "workspace_bytes");
  }
  *status = attention_row_status(attention->config, attention->grid, c.num_sequences, c.layer,
                                 {c.workspace, c.workspace_bytes});
  return Status::ok();
}

Status read_merge(const tkv_merge_call* in, MergeCall* out) {
  tkv_merge_call c;
  if (Status s = read_struct(in, "call", &c); !s) return s;
  out->a = {c.a_out, c.a_lse};
  out->b = {c.b_out, c.b_lse};
  out->out = c.out;
  out->lse = c.lse;
  out->rows = c.rows;
  out->head_dim = c.head_dim;
  return read_dtype(c.dtype, &out->dtype);
}

Status read_sinks(const tkv_sink_call* in, SinkCall* out) {
  tkv_sink_call c;
  if (Status s = read_struct(in, "call", &c); !s) return s;
  out->out = c.out;
  out->lse = c.lse;
  out->sinks = c.sinks;
  out->rows = c.rows;
  out->num_q_heads = c.num_q_heads;
  out->head_dim = c.head_dim;
  return read_dtype(c.dtype, &out->dtype);
}

}  // namespace
}  // namespace tierkv::capi

namespace capi = tierkv::capi;
using tierkv::Status;

extern "C" {

tkv_status tkv_attention_validate(const tkv_attention_config* config, tkv_error* error) {
  return capi::guarded(error, [&] {
    tierkv::AttentionConfig c;
    return capi::read_config(config, &c);
  });
}

tkv_status tkv_attention_create(const tkv_attention_config* config, tkv_attention** attention,
                                tkv_error* error) {
  return capi::guarded(error, [&] { return capi::create(config, attention); });
}

void tkv_attention_destroy(tkv_attention* attention) {
  delete attention;
}

tkv_status tkv_attention_workspace_bytes(const tkv_attention* attention, int32_t num_sequences,
                                         size_t* bytes, tkv_error* error) {
  return capi::guarded(error, [&]() -> Status {
    if (attention == nullptr || bytes == nullptr)
      return capi::invalid("attention or bytes is null");
    if (Status s = capi::check_count(num_sequences); !s) return s;
    *bytes = tierkv::attention_workspace_bytes(attention->config, attention->grid, num_sequences);
    return Status::ok();
  });
}

tkv_status tkv_plan_attention(const tkv_attention* attention, const tkv_attend_call* call,
                              void* stream, tkv_error* error) {
  return capi::guarded(
      error, [&] { return capi::plan(attention, call, static_cast<tierkv::GpuStream>(stream)); });
}

tkv_status tkv_attend(const tkv_attention* attention, const tkv_attend_call* call, void* stream,
                      tkv_error* error) {
  return capi::guarded(
      error, [&] { return capi::attend(attention, call, static_cast<tierkv::GpuStream>(stream)); });
}

tkv_status tkv_attention_row_status(const tkv_attention* attention, const tkv_attend_call* call,
                                    const int32_t** status, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::row_status(attention, call, status); });
}

tkv_status tkv_merge_attention(const tkv_merge_call* call, void* stream, tkv_error* error) {
  return capi::guarded(error, [&]() -> Status {
    tierkv::MergeCall c;
    if (Status s = capi::read_merge(call, &c); !s) return s;
    return tierkv::merge_attention(c, static_cast<tierkv::GpuStream>(stream));
  });
}

tkv_status tkv_merge_attention_host(const tkv_merge_call* call, tkv_error* error) {
  return capi::guarded(error, [&]() -> Status {
    tierkv::MergeCall c;
    if (Status s = capi::read_merge(call, &c); !s) return s;
    return tierkv::merge_attention_host(c);
  });
}

tkv_status tkv_apply_sinks(const tkv_sink_call* call, void* stream, tkv_error* error) {
  return capi::guarded(error, [&]() -> Status {
    tierkv::SinkCall c;
    if (Status s = capi::read_sinks(call, &c); !s) return s;
    return tierkv::apply_sinks(c, static_cast<tierkv::GpuStream>(stream));
  });
}

tkv_status tkv_apply_sinks_host(const tkv_sink_call* call, tkv_error* error) {
  return capi::guarded(error, [&]() -> Status {
    tierkv::SinkCall c;
    if (Status s = capi::read_sinks(call, &c); !s) return s;
    return tierkv::apply_sinks_host(c);
  });
}

}  // extern "C"

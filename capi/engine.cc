// SPDX-License-Identifier: Apache-2.0
// Caches of engines with block tables of their own.
#include "tierkv/engine.h"

#include "capi/tier_format.h"
#include "tierkv/tierkv_engine_c.h"

struct tkv_engine {
  tierkv::EngineConfig config;
  tierkv::EngineGrid grid;
  bool has_grid;
};

namespace tierkv::capi {
namespace {

ComponentFormat component_of(int32_t bits) {
  return bits == 2 ? norm_clipped() : token_wise(bits);
}

Status read_config(const tkv_engine_config* in, EngineConfig* out) {
  tkv_engine_config c;
  bool is_plain = false;
  if (Status s = read_struct(in, "config", &c); !s) return s;
  if (Status s = read_flag(c.no_rotation, "no_rotation", &is_plain); !s) return s;
  if (Status s = read_dtype(c.dtype, &out->dtype); !s) return s;
  out->num_q_heads = c.num_q_heads;
  out->num_kv_heads = c.num_kv_heads;
  out->head_dim = c.head_dim;
  out->format = {component_of(c.k_bits), component_of(c.v_bits)};
  out->rotate = !is_plain;
  out->sm_scale = read_sm_scale(c.sm_scale, c.head_dim);
  if (c.block_tokens != 0) out->block_tokens = c.block_tokens;
  out->max_sequences = c.max_sequences;
  if (c.max_queries != 0) out->max_queries = c.max_queries;
  out->max_blocks = c.max_blocks;
  out->sliding_window_tokens = c.sliding_window_tokens;
  return Status::ok();
}

Status read_valid_config(const tkv_engine_config* in, EngineConfig* out) {
  if (Status s = read_config(in, out); !s) return s;
  return out->validate();
}

Status page_bytes(const tkv_engine_config* in, int64_t* bytes) {
  EngineConfig c;
  if (bytes == nullptr) return invalid("page_bytes is null");
  if (Status s = read_config(in, &c); !s) return s;
  // What a page's bytes do not depend on.
  c.num_q_heads = c.num_kv_heads = c.max_sequences = c.max_queries = c.max_blocks = 1;
  c.sm_scale = 1;
  c.sliding_window_tokens = 0;
  c.dtype = DType::kFloat16;
  if (Status s = c.validate(); !s) return s;
  *bytes = c.page_bytes();
  return Status::ok();
}

Status create(const tkv_engine_config* config, bool on_device, tkv_engine** out) {
  EngineConfig c;
  if (out == nullptr) return invalid("engine is null");
  if (Status s = read_valid_config(config, &c); !s) return s;
  EngineGrid grid;
  if (on_device) {
    const Result<EngineGrid> of_device = engine_grid(c);
    if (!of_device) return of_device.status();
    grid = *of_device;
  }
  *out = new tkv_engine{c, grid, on_device};
  return Status::ok();
}

Status check_engine(const tkv_engine* engine, bool needs_grid) {
  if (engine == nullptr) return invalid("engine is null");
  if (needs_grid && !engine->has_grid) {
    return invalid("engine was made by tkv_engine_create_host; this call needs tkv_engine_create");
  }
  return Status::ok();
}

Status read_layer(const tkv_engine_layer* in, EngineLayer* out) {
  tkv_engine_layer l;
  if (Status s = read_struct(in, "layer", &l); !s) return s;
  *out = {l.blocks, l.block_stride, l.num_blocks, l.key_reflection};
  return Status::ok();
}

Status read_tokens(const tkv_engine_tokens* in, EngineTokens* out) {
  tkv_engine_tokens t;
  if (Status s = read_struct(in, "tokens", &t); !s) return s;
  out->k = t.k;
  out->v = t.v;
  out->k_strides = {t.k_token_stride, t.k_head_stride};
  out->v_strides = {t.v_token_stride, t.v_head_stride};
  out->slots = t.slots;
  out->count = t.count;
  out->errors = t.errors;
  return Status::ok();
}

Status read_batch(const tkv_engine_batch* in, EngineBatch* out, AttentionWorkspace* workspace) {
  tkv_engine_batch b;
  if (Status s = read_struct(in, "batch", &b); !s) return s;
  out->block_table = b.block_table;
  out->table_stride = b.table_stride;
  out->table_columns = b.table_columns;
  out->num_sequences = b.num_sequences;
  out->seq_lens = b.seq_lens;
  out->sequences = b.sequences;
  out->count = b.count;
  out->query_start_loc = b.query_start_loc;
  out->queries = b.queries == 0 ? 1 : b.queries;
  out->block_stride = b.block_stride;
  out->num_blocks = b.num_blocks;
  *workspace = {b.workspace, b.workspace_bytes};
  return Status::ok();
}

Status read_queries(const tkv_engine_queries* in, EngineAttend* out) {
  tkv_engine_queries q;
  if (Status s = read_struct(in, "queries", &q); !s) return s;
  out->q = q.q;
  out->out = q.out;
  out->q_strides = {q.q_token_stride, q.q_head_stride};
  out->out_strides = {q.out_token_stride, q.out_head_stride};
  out->lse = q.lse;
  out->lse_strides = {q.lse_token_stride, q.lse_head_stride};
  out->num_tokens = q.num_tokens;
  out->errors = q.errors;
  return Status::ok();
}

Status read_ranges(const tkv_engine_ranges* in, EngineRanges* out) {
  tkv_engine_ranges r;
  if (Status s = read_struct(in, "ranges", &r); !s) return s;
  out->block_table = r.block_table;
  out->table_stride = r.table_stride;
  out->num_sequences = r.num_sequences;
  out->sequences = r.sequences;
  out->first = r.first;
  out->starts = r.starts;
  out->count = r.count;
  out->max_tokens = r.max_tokens;
  out->num_rows = r.num_rows;
  out->k = r.k;
  out->v = r.v;
  out->errors = r.errors;
  return Status::ok();
}

// What attends on both places.
struct AttendStructs {
  const tkv_engine_batch* batch;
  const tkv_engine_layer* layer;
  const tkv_engine_queries* queries;
};
Status read_attend(const AttendStructs& in, EngineAttend* out, AttentionWorkspace* workspace) {
  if (Status s = read_batch(in.batch, &out->batch, workspace); !s) return s;
  if (Status s = read_layer(in.layer, &out->layer); !s) return s;
  return read_queries(in.queries, out);
}

Status plan(const tkv_engine* engine, const tkv_engine_batch* batch, void* stream) {
  EngineBatch b;
  AttentionWorkspace workspace;
  if (Status s = check_engine(engine, true); !s) return s;
  if (Status s = read_batch(batch, &b, &workspace); !s) return s;
  return engine_plan(engine->config, engine->grid, b, workspace, static_cast<GpuStream>(stream));
}

Status attend(const tkv_engine* engine, const AttendStructs& in, void* stream) {
  EngineAttend call;
  AttentionWorkspace workspace;
  if (Status s = check_engine(engine, true); !s) return s;
  if (Status s = read_attend(in, &call, &workspace); !s) return s;
  return engine_attend(engine->config, engine->grid, call, workspace,
                       static_cast<GpuStream>(stream));
}

Status attend_host(const tkv_engine* engine, const AttendStructs& in) {
  EngineAttend call;
  AttentionWorkspace workspace;
  if (Status s = check_engine(engine, false); !s) return s;
  if (Status s = read_attend(in, &call, &workspace); !s) return s;
  return engine_attend_host(engine->config, call);
}

// Reads a layer and what goes with it, and calls.
template <class In, class Out, class Read, class Call>
Status with_layer(const tkv_engine* engine, const tkv_engine_layer* layer, const In* in,
                  const Read& read, const Call& call) {
  EngineLayer l;
  Out out;
  if (Status s = check_engine(engine, false); !s) return s;
  if (Status s = read_layer(layer, &l); !s) return s;
  if (Status s = read(in, &out); !s) return s;
  return call(engine->config, l, out);
}

}  // namespace
}  // namespace tierkv::capi

namespace capi = tierkv::capi;
using tierkv::GpuStream;
using tierkv::Status;

extern "C" {

tkv_status tkv_engine_page_bytes(const tkv_engine_config* config, int64_t* page_bytes,
                                 tkv_error* error) {
  return capi::guarded(error, [&] { return capi::page_bytes(config, page_bytes); });
}

tkv_status tkv_engine_validate(const tkv_engine_config* config, tkv_error* error) {
  return capi::guarded(error, [&] {
    tierkv::EngineConfig c;
    return capi::read_valid_config(config, &c);
  });
}

tkv_status tkv_engine_create(const tkv_engine_config* config, tkv_engine** engine,
                             tkv_error* error) {
  return capi::guarded(error, [&] { return capi::create(config, true, engine); });
}

tkv_status tkv_engine_create_host(const tkv_engine_config* config, tkv_engine** engine,
                                  tkv_error* error) {
  return capi::guarded(error, [&] { return capi::create(config, false, engine); });
}

void tkv_engine_destroy(tkv_engine* engine) {
  delete engine;
}

tkv_status tkv_engine_workspace_bytes(const tkv_engine* engine, size_t* bytes, tkv_error* error) {
  return capi::guarded(error, [&]() -> Status {
    if (bytes == nullptr) return capi::invalid("bytes is null");
    if (Status s = capi::check_engine(engine, true); !s) return s;
    *bytes = tierkv::engine_workspace_bytes(engine->config, engine->grid);
    return Status::ok();
  });
}

tkv_status tkv_engine_key_reflections(const tkv_engine* engine, const float* key_mean, float* out,
                                      tkv_error* error) {
  return capi::guarded(error, [&]() -> Status {
    if (Status s = capi::check_engine(engine, false); !s) return s;
    return tierkv::engine_key_reflections(engine->config, key_mean, out);
  });
}

tkv_status tkv_engine_encode(const tkv_engine* engine, const tkv_engine_layer* layer,
                             const tkv_engine_tokens* tokens, void* stream, tkv_error* error) {
  return capi::guarded(error, [&] {
    return capi::with_layer<tkv_engine_tokens, tierkv::EngineTokens>(
        engine, layer, tokens, capi::read_tokens,
        [&](const auto& config, const auto& l, const auto& t) {
          return tierkv::engine_encode(config, l, t, static_cast<GpuStream>(stream));
        });
  });
}

tkv_status tkv_engine_encode_host(const tkv_engine* engine, const tkv_engine_layer* layer,
                                  const tkv_engine_tokens* tokens, tkv_error* error) {
  return capi::guarded(error, [&] {
    return capi::with_layer<tkv_engine_tokens, tierkv::EngineTokens>(
        engine, layer, tokens, capi::read_tokens, tierkv::engine_encode_host);
  });
}

tkv_status tkv_engine_plan(const tkv_engine* engine, const tkv_engine_batch* batch, void* stream,
                           tkv_error* error) {
  return capi::guarded(error, [&] { return capi::plan(engine, batch, stream); });
}

tkv_status tkv_engine_attend(const tkv_engine* engine, const tkv_engine_batch* batch,
                             const tkv_engine_layer* layer, const tkv_engine_queries* queries,
                             void* stream, tkv_error* error) {
  return capi::guarded(error, [&] {
    return capi::attend(engine, {batch, layer, queries}, stream);
  });
}

tkv_status tkv_engine_attend_host(const tkv_engine* engine, const tkv_engine_batch* batch,
                                  const tkv_engine_layer* layer, const tkv_engine_queries* queries,
                                  tkv_error* error) {
  return capi::guarded(error, [&] { return capi::attend_host(engine, {batch, layer, queries}); });
}

tkv_status tkv_engine_decode(const tkv_engine* engine, const tkv_engine_layer* layer,
                             const tkv_engine_ranges* ranges, void* stream, tkv_error* error) {
  return capi::guarded(error, [&] {
    return capi::with_layer<tkv_engine_ranges, tierkv::EngineRanges>(
        engine, layer, ranges, capi::read_ranges,
        [&](const auto& config, const auto& l, const auto& r) {
          return tierkv::engine_decode(config, l, r, static_cast<GpuStream>(stream));
        });
  });
}

tkv_status tkv_engine_decode_host(const tkv_engine* engine, const tkv_engine_layer* layer,
                                  const tkv_engine_ranges* ranges, tkv_error* error) {
  return capi::guarded(error, [&] {
    return capi::with_layer<tkv_engine_ranges, tierkv::EngineRanges>(
        engine, layer, ranges, capi::read_ranges, tierkv::engine_decode_host);
  });
}

}  // extern "C"

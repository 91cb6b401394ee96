// Attention of a coded store's device back end: blocks and raw tokens together by the kernels of
// coded_attention.h; while there are no codebooks, and so no blocks, by those of attention.h.

#include <cuda_runtime.h>

#include <algorithm>

#include "codec/cuda_device.cuh"
#include "store/coded_device.h"

namespace tierkv {
namespace {

// Of the tokens that are not coded.
AttentionConfig raw_attention(const KvStoreConfig& c) {
  AttentionConfig a;
  a.num_layers = c.layout.num_layers;
  a.num_q_heads = c.layout.num_q_heads;
  a.num_kv_heads = c.layout.num_kv_heads;
  a.head_dim = c.layout.head_dim;
  a.sm_scale = c.layout.sm_scale;
  a.page_bytes = coded_page_bytes(c.layout.head_dim);
  a.num_tiers = 1;
  a.tiers[0] = {kRawSide, raw_tier()};
  return a;
}

}  // namespace

Status CodedDeviceStore::allocate_attention() {
  const KvStoreConfig& c = config();
  raw_attention_ = raw_attention(c);
  if (Status s = raw_attention_.validate(); !s) return s;
  const Result<AttentionGrid> grid = attention_grid(raw_attention_);
  if (!grid) return grid.status();
  raw_grid_ = *grid;
  raw_workspace_.bytes = attention_workspace_bytes(raw_attention_, raw_grid_, c.max_sequences);
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  // As coded_attention_workspace_bytes(), for any codebooks: a warp or a row each has a partial.
  CodedAttention largest;
  largest.num_rows = c.max_sequences * c.layout.num_kv_heads;
  largest.columns = c.layout.group_size();
  largest.head_dim = c.layout.head_dim;
  CodedAttentionGrid any;
  any.num_ctas = limits->sms;
  const size_t rows = static_cast<size_t>(largest.num_rows);
  const size_t queries = static_cast<size_t>(c.max_sequences) * c.layout.num_q_heads;
  uint8_t *raw = nullptr, *coded = nullptr;
  if (Status s = take(raw_workspace_.bytes, &raw); !s) return s;
  if (Status s = take(coded_attention_workspace_bytes(largest, any), &coded); !s) return s;
  if (Status s = take(rows, &rows_); !s) return s;
  if (Status s = take(1, &item_count_); !s) return s;
  if (Status s = take(rows, &row_status_); !s) return s;
  if (Status s = take(queries * c.layout.head_dim, &raw_out_); !s) return s;
  if (Status s = take(queries, &raw_lse_); !s) return s;
  raw_workspace_.memory = raw;
  coded_workspace_ = coded;
  return cuda_status(cudaMemsetAsync(raw, 0, raw_workspace_.bytes, stream_), "create");
}

Status CodedDeviceStore::attend_raw(const AttendRequest& request, const Slots& slots) {
  const AttentionBatch batch = {state_.common.batch, static_cast<int32_t>(slots.size())};
  if (slots != planned_) {
    // Another layout of the workspace, which must begin with zeros.
    if (planned_count_ != 0 && slots.size() != planned_count_) {
      const cudaError_t error =
          cudaMemsetAsync(raw_workspace_.memory, 0, raw_workspace_.bytes, stream_);
      if (error != cudaSuccess) return cuda_status(error, "attend");
    }
    planned_count_ = slots.size();
    if (Status s = plan_attention(raw_attention_, raw_grid_, state_.s.allocator.table(), batch,
                                  raw_workspace_, stream_);
        !s) {
      return s;
    }
    planned_ = slots;
  }
  AttendCall call;
  call.table = state_.s.allocator.table();
  call.pages = state_.s.pages;
  call.batch = batch;
  call.layer = request.layer;
  call.q = request.q;
  call.out = raw_out_;
  call.lse = raw_lse_;
  if (Status s = tierkv::attend(raw_attention_, raw_grid_, call, raw_workspace_, stream_); !s) {
    return s;
  }
  RawJoin join;
  join.q = static_cast<const uint16_t*>(request.q);
  join.raw_out = raw_out_;
  join.raw_lse = raw_lse_;
  join.out = static_cast<uint16_t*>(request.out);
  join.lse = request.lse;
  join.count = static_cast<int32_t>(slots.size());
  join.layer = request.layer;
  join.group = config().layout.group_size();
  join.sm_scale = static_cast<float>(config().layout.sm_scale);
  return join_raw(state_, join, stream_);
}

Status CodedDeviceStore::attend_coded_rows(const AttendRequest& request, const Slots& slots) {
  const CodedView& s = state_.s;
  const auto count = static_cast<int32_t>(slots.size());
  const PageTableShape& table = s.allocator.shape.table;
  if (planned_ != slots) {
    if (Status t = plan_coded_rows(state_, {rows_, item_count_, count}, stream_); !t) return t;
    planned_ = slots;
  }
  // The plan is that of layer 0.
  const int32_t rows_before = request.layer * s.num_kv_heads;
  const int32_t rows_left = table.num_rows() - rows_before;
  CodedAttention call;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const bool key = c == Component::kKey;
    CodedComponent& component = key ? call.keys : call.values;
    component.bytes = s.pages.base;
    component.blocks = s.blocks(c, rows_before);
    component.steps = &s.step(c, rows_before);
    component.means = s.means(c, rows_before);
    component.size = s.pages.page_bytes * s.pages.num_pages;
    component.codebook = books_[2 * request.layer + (key ? 0 : 1)];
  }
  call.rows = rows_;
  call.window = s.pages.base;
  call.window_size = s.pages.page_bytes * s.pages.num_pages;
  call.window_page_bytes = s.pages.page_bytes;
  call.window_pages = s.allocator.slots + int64_t{rows_before} * table.row_stride();
  call.num_window_pages = int64_t{rows_left} * table.row_stride();
  call.q = request.q;
  call.out = request.out;
  call.lse = request.lse;
  call.row_status = row_status_;
  call.workspace = coded_workspace_;
  call.num_rows = count * s.num_kv_heads;
  const int64_t most_items = int64_t{call.num_rows} * (s.max_blocks + 1);
  call.num_items = static_cast<int32_t>(std::min<int64_t>(most_items, INT32_MAX));
  call.item_count = item_count_;
  call.num_blocks = rows_left * s.max_blocks;
  call.num_steps = rows_left;
  call.num_means = rows_left;
  call.columns = config().layout.group_size();
  call.head_dim = s.head_dim;
  call.sm_scale = static_cast<float>(config().layout.sm_scale);
  call.max_block_bytes = most_coded_block_bytes(s.head_dim);
  const Result<CodedAttentionGrid> grid = coded_attention_grid(call);
  if (!grid) return grid.status();
  if (Status t = attend_coded(call, *grid, stream_); !t) return t;
  return report_coded_rows(state_, {row_status_, count, request.layer}, stream_);
}

Status CodedDeviceStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table().admit_attend(request);
  if (!slots) return slots.status();
  if (Status s = validate_coded_request(request); !s) return s;
  if (request.q_len != 1) {
    return Status(StatusCode::kUnsupported, "q_len of a coded cache on a device; it needs 1");
  }
  if (request.sinks != nullptr) {
    return Status(StatusCode::kUnsupported, "sinks with a coded cache on a device");
  }
  if (request.probabilities != nullptr) {
    return Status(StatusCode::kUnsupported, "probabilities of a coded cache on a device");
  }
  if (Status s = use_batch(DeviceCall::kAttend, *slots); !s) return s;
  return books_.empty() ? attend_raw(request, *slots) : attend_coded_rows(request, *slots);
}

}  // namespace tierkv

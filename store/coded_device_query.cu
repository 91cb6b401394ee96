// Attention of a coded store's device back end: blocks and raw tokens together by the kernels of
// coded_attention.h.

#include <cuda_runtime.h>

#include <algorithm>

#include "codec/cuda_device.cuh"
#include "store/coded_device.h"

namespace tierkv {
namespace {

// What blocks are coded with before there are any.
DeviceCodebook no_codebook(Component component, const uint32_t* table) {
  DeviceCodebook book;
  book.table = table;
  book.max_length = 1;
  book.levels = 2;
  book.component = component;
  return book;
}

}  // namespace

Status CodedDeviceStore::allocate_attention() {
  const KvStoreConfig& c = config();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  // As coded_attention_workspace_bytes(), for any codebooks and queries: a warp or a row each has a
  // partial.
  CodedAttention largest;
  largest.num_rows = c.max_sequences * c.layout.num_kv_heads;
  largest.columns = c.layout.group_size();
  largest.head_dim = c.layout.head_dim;
  largest.q_len = kMaxQueryTokens;
  CodedAttentionGrid any;
  any.num_ctas = limits->sms;
  const auto rows = static_cast<size_t>(largest.num_rows);
  uint8_t* workspace = nullptr;
  if (Status s = take(coded_attention_workspace_bytes(largest, any), &workspace); !s) return s;
  for (Plan& plan : plans_) {
    if (Status s = take(rows, &plan.rows); !s) return s;
    if (Status s = take(1, &plan.item_count); !s) return s;
  }
  if (Status s = take(rows, &row_status_); !s) return s;
  const size_t queries = static_cast<size_t>(c.max_sequences) * kMaxQueryTokens;
  if (Status s = take(queries * c.layout.num_q_heads, &lse_); !s) return s;
  coded_workspace_ = workspace;
  return Status::ok();
}

CodedAttention CodedDeviceStore::layer_attention(int32_t layer) const {
  CodedAttention call;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const bool key = c == Component::kKey;
    CodedComponent& component = key ? call.keys : call.values;
    if (books_.empty()) {
      component.codebook = no_codebook(c, empty_table_);
      continue;
    }
    const DeviceCodebook* list =
        books_.data() + layer * state_.num_books() + (key ? 0 : state_.num_key_books);
    component.codebook = list[0];
    component.others = list + 1;
    component.num_others = state_.books_of(c) - 1;
  }
  call.columns = config().layout.group_size();
  call.num_kv_heads = state_.s.num_kv_heads;
  call.head_dim = state_.s.head_dim;
  call.sm_scale = static_cast<float>(config().layout.sm_scale);
  call.max_block_bytes = most_coded_block_bytes(state_.s.head_dim);
  call.fixed = state_.s.fixed.format;
  return call;
}

Status CodedDeviceStore::check_attention() const {
  return coded_attention_grid(layer_attention(0)).status();
}

Status CodedDeviceStore::attend_coded_rows(const AttendRequest& request, const Slots& slots) {
  const CodedView& s = state_.s;
  const auto count = static_cast<int32_t>(slots.size());
  const PageTableShape& table = s.allocator.shape.table;
  const Plan& plan = plans_[calls_.index()];
  if (!calls_.has_plan(slots, request.q_len)) {
    calls_.begin_plan();
    if (Status t = plan_coded_rows(state_, {plan.rows, plan.item_count, count}, stream_); !t) {
      return t;
    }
    calls_.wrote_plan(slots, request.q_len);
  }
  // The plan is that of layer 0.
  const int32_t rows_before = request.layer * s.num_kv_heads;
  const int32_t rows_left = table.num_rows() - rows_before;
  CodedAttention call = layer_attention(request.layer);
  for (const Component c : {Component::kKey, Component::kValue}) {
    const bool key = c == Component::kKey;
    CodedComponent& component = key ? call.keys : call.values;
    component.bytes = s.pages.base;
    component.blocks = s.blocks(c, rows_before);
    component.steps = &s.step(c, rows_before);
    component.means = s.means(c, rows_before);
    component.size = s.pages.page_bytes * s.pages.num_pages;
  }
  call.rows = plan.rows;
  call.window = s.pages.base;
  call.window_size = s.pages.page_bytes * s.pages.num_pages;
  call.window_page_bytes = s.pages.page_bytes;
  call.window_pages = s.allocator.slots + int64_t{rows_before} * table.row_stride();
  call.num_window_pages = int64_t{rows_left} * table.row_stride();
  call.q = request.q;
  call.out = request.out;
  call.lse = request.lse;
  call.sinks = request.sinks;
  if (request.probabilities != nullptr) {
    if (call.lse == nullptr) call.lse = lse_;
    call.probabilities = request.probabilities;
    call.probability_stride = request.stride;
  }
  call.row_status = row_status_;
  call.workspace = coded_workspace_;
  call.num_rows = count * s.num_kv_heads;
  const int64_t most_items = int64_t{call.num_rows} * (s.max_blocks + 1);
  call.num_items = static_cast<int32_t>(std::min<int64_t>(most_items, INT32_MAX));
  call.item_count = plan.item_count;
  call.num_blocks = rows_left * s.max_blocks;
  call.num_steps = rows_left;
  call.num_means = rows_left;
  call.q_len = request.q_len;
  call.dtype = request.dtype;
  const Result<CodedAttentionGrid> grid = coded_attention_grid(call);
  if (!grid) return grid.status();
  if (Status t = attend_coded(call, *grid, stream_); !t) return t;
  return report_coded_rows(state_, {row_status_, count, request.layer}, stream_);
}

Status CodedDeviceStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table().admit_attend(request);
  if (!slots) return slots.status();
  if (Status s = validate_coded_request(request); !s) return s;
  if (Status s = use_batch(DeviceCall::kAttend, *slots); !s) return s;
  return attend_coded_rows(request, *slots);
}

}  // namespace tierkv

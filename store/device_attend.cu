// Attention of the device back end: the plan and its lifetime, the launches of a call.

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>

#include "attention/workspace.h"
#include "codec/cuda_device.cuh"
#include "store/attention_config.h"
#include "store/device_store.h"

namespace tierkv {
namespace {

Result<AttentionGrid> find_grid(const AttentionConfig& config) {
  if (Status s = config.validate(); !s) return s;
  return attention_grid(config);
}

AttentionConfig of_queries(AttentionConfig config, int32_t q_len) {
  config.q_len = q_len;
  return config;
}

}  // namespace

// A workspace serves calls of any q_len, one after another.
Status DeviceStore::allocate_attention() {
  const KvStoreConfig& c = config();
  const size_t queries = static_cast<size_t>(c.max_sequences) * kMaxQueryTokens;
  size_t largest = 0;
  attention_ = attention_config(c, page_bytes());
  for (int32_t q_len = 1; q_len <= kMaxQueryTokens; ++q_len) {
    const AttentionConfig attention = of_queries(attention_, q_len);
    grids_.push_back(find_grid(attention));
    if (!grids_.back()) continue;  // attend() will tell
    const size_t bytes = attention_workspace_bytes(attention, *grids_.back(), c.max_sequences);
    largest = std::max(largest, bytes);
  }
  largest = (largest + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  if (Status s = take(queries * c.layout.num_q_heads, &lse_); !s) return s;
  for (int32_t i = 0; i < kCallMemories; ++i) {
    uint8_t* memory = nullptr;
    if (Status s = take(static_cast<size_t>(c.max_sequences), &newest_[i]); !s) return s;
    if (Status s = take(largest, &memory); !s) return s;
    attention_workspaces_[i].memory = memory;
    attention_workspaces_[i].bytes = largest;
  }
  return Status::ok();
}

Status DeviceStore::plan_attention_of(const AttentionConfig& attention, const Slots& slots) {
  const int32_t q_len = attention.q_len;
  if (calls_.has_plan(slots, q_len)) return Status::ok();
  const AttentionWorkspace& workspace = attention_workspaces_[calls_.index()];
  calls_.begin_plan();
  if (!calls_.has_layout(slots.size(), q_len)) {
    if (Status s = clear(workspace.memory, workspace.bytes); !s) return s.with_context("attend");
    calls_.set_layout(slots.size(), q_len);
  }
  const auto count = static_cast<int32_t>(slots.size());
  if (q_len > 1) {
    if (Status s = find_newest(state_, newest_[calls_.index()], count, stream_); !s) return s;
  }
  if (Status s = plan_attention(attention, *grid(q_len), state_.s.allocator.table(),
                                {state_.batch, count}, workspace, stream_);
      !s) {
    return s;
  }
  calls_.wrote_plan(slots, q_len);
  return Status::ok();
}

bool DeviceStore::is_any_counted(const Slots& slots, int32_t q_len) const {
  return std::any_of(slots.begin(), slots.end(), [&](int32_t slot) {
    const SequenceInfo& info = mirror_->table_.info(slot);
    const CountSchedule schedule = {info.prompt_tokens, state_.s.score_interval};
    for (int32_t back = 0; back < q_len; ++back) {
      if (schedule.is_counted(info.num_tokens - 1 - back)) return true;
    }
    return false;
  });
}

Status DeviceStore::validate_scratch(const AttendRequest& request, const AttentionConfig& attention,
                                     const Slots& slots) const {
  int32_t longest = 0;
  for (const int32_t slot : slots) {
    longest = std::max(longest, mirror_->table_.info(slot).num_tokens);
  }
  const auto count = static_cast<int32_t>(slots.size());
  if (request.scratch_bytes < attention_score_bytes(attention, count, longest)) {
    return Status(StatusCode::kBufferTooSmall, "scratch_bytes is below count_scratch_bytes()");
  }
  if (request.scratch == nullptr) {
    return Status(StatusCode::kInvalidArgument, "scratch is null");
  }
  return Status::ok();
}

Status DeviceStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table().admit_attend(request);
  if (!slots) return slots.status();
  if (!grid(request.q_len)) return grid(request.q_len).status();
  Result<AttentionConfig> attention =
      attention_config(attention_, request.dtype, state_.s.raw_dtype);
  if (!attention) return attention.status();
  attention->q_len = request.q_len;
  AttendCall call;
  call.table = state_.s.allocator.table();
  call.pages = state_.s.pages;
  call.layer = request.layer;
  call.q = request.q;
  call.out = request.out;
  call.lse = request.lse != nullptr ? request.lse : lse_;
  call.sinks = request.sinks;
  const bool counts = request.count_query && is_any_counted(*slots, request.q_len);
  if (counts) {
    if (Status s = validate_scratch(request, *attention, *slots); !s) return s;
    call.scores = {request.scratch, request.scratch_bytes};
  }
  if (Status s = use_batch(*slots); !s) return s;
  call.batch = {state_.batch, static_cast<int32_t>(slots->size())};
  call.tail = window_tail(config(), newest_[calls_.index()]);
  if (Status s = plan_attention_of(*attention, *slots); !s) return s;
  // What changes high and low pages drops the plan; the window's are appended to at any time.
  call.plan_is_settled = calls_.settled().is_settled();
  call.settled[kHighSide] = call.settled[kLowSide] = Settled::kAll;
  if (Status s = tierkv::attend(*attention, *grid(request.q_len), call,
                                attention_workspaces_[calls_.index()], stream_);
      !s) {
    return s;
  }
  calls_.settled().note_wait();
  if (counts) {
    if (Status s = count_queries(request, *attention, call); !s) return s;
  }
  return request.probabilities == nullptr ? Status::ok() : find_probabilities_of(request, call);
}

Status DeviceStore::count_queries(const AttendRequest& request, const AttentionConfig& attention,
                                  const AttendCall& call) {
  const QueryColumns columns = query_columns(attention);
  const int64_t rows = int64_t{call.batch.count} * attention.num_kv_heads * columns.passes;
  const TokenScores scores =
      token_scores(request.scratch, request.scratch_bytes, rows, columns.of_row);
  return count_query(state_, {scores, columns, call.lse, call.batch.count, request.layer}, stream_);
}

Status DeviceStore::find_probabilities_of(const AttendRequest& request, const AttendCall& call) {
  const CacheLayout& layout = config().layout;
  DeviceProbabilities p;
  p.q = request.q;
  p.dtype = request.dtype;
  p.lse = call.lse;
  p.values = request.probabilities;
  p.stride = request.stride;
  p.count = call.batch.count;
  p.layer = request.layer;
  p.group = layout.group_size();
  p.q_len = request.q_len;
  p.sm_scale = static_cast<float>(layout.sm_scale);
  return find_probabilities(state_, p, stream_);
}

}  // namespace tierkv

#include "store/channel_device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "attention/channel_pages.h"
#include "codec/cuda_device.cuh"
#include "store/tierless_config.h"

namespace tierkv {
namespace {

constexpr const char* kThisCache = "a channel-wise cache";

Status invalid(const char* why) {
  return Status(StatusCode::kInvalidArgument, why);
}
Status unsupported(const char* why) {
  return Status(StatusCode::kUnsupported, why);
}

// What the host can do and a device cannot.
Status check_device_request(const AttendRequest& request) {
  if (Status s = validate_channel_request(request); !s) return s;
  if (request.probabilities == nullptr) return Status::ok();
  return unsupported("probabilities of a channel-wise cache on a device");
}

}  // namespace

Result<std::unique_ptr<ChannelDeviceStore>> ChannelDeviceStore::make(const KvStoreConfig& config,
                                                                     GpuStream stream) {
  Result<std::unique_ptr<ChannelHostStore>> mirror = ChannelHostStore::make(config);
  if (!mirror) return mirror.status();
  if (Status s = validate_channel_group(config.layout.group_size()); !s) {
    return s.with_context("channel");
  }
  std::unique_ptr<ChannelDeviceStore> store(new ChannelDeviceStore(std::move(*mirror), stream));
  if (Status s = store->allocate(); !s) return s;
  return Result<std::unique_ptr<ChannelDeviceStore>>(std::move(store));
}

Status ChannelDeviceStore::allocate() {
  const ChannelView& host = mirror_->view_;
  const CacheLayout& layout = config().layout;
  if (Status s = sequences_.allocate(host.allocator.shape, host.pages.page_bytes); !s) return s;
  const int32_t rows = config().max_sequences * layout.num_kv_heads;
  size_t bytes = 0;
  int32_t items = 0;
  for (int32_t q_len = 1; q_len <= kMaxQueryTokens; ++q_len) {
    const ChannelCtas ctas = ctas_of(q_len);
    bytes = std::max(bytes, channel_pages_workspace_bytes(ctas, layout.head_dim, rows));
    items = std::max(items, ctas.most_items(rows));
  }
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  sms_ = limits->sms;
  for (Planned& p : planned_) {
    if (Status s = sequences_.take(config().max_sequences, &p.sequences); !s) return s;
    if (Status s = sequences_.take(items, &p.plan.items); !s) return s;
    if (Status s = sequences_.take(rows, &p.plan.parts); !s) return s;
  }
  if (Status s = sequences_.take_bytes(bytes, &workspace_); !s) return s;
  state_.common = sequences_.state();
  state_.s = host;
  state_.s.allocator = state_.common.s.allocator;
  state_.s.pages = state_.common.s.pages;
  state_.s.infos = state_.common.s.infos;
  return Status::ok();
}

Status ChannelDeviceStore::set_batch(DeviceCall call, const Slots& slots, int32_t tokens) {
  const Status s = sequences_.set_batch(call, slots, tokens);
  state_.common.batch = sequences_.state().batch;
  return s;
}

Status ChannelDeviceStore::use_batch(DeviceCall call, const Slots& slots) {
  const Status s = sequences_.use_batch(call, slots);
  state_.common.batch = sequences_.state().batch;
  return s;
}

// A slot that is used again is another sequence: what is planned may be of the old one.
Result<SequenceId> ChannelDeviceStore::add_sequence() {
  forget_plans();
  return sequences_.add_sequence();
}

Status ChannelDeviceStore::release(SequenceId sequence) {
  forget_plans();
  return sequences_.release(sequence);
}

void ChannelDeviceStore::begin_in_table(const Slots& slots, int32_t tokens) {
  for (const int32_t slot : slots) table().set_info(slot, mirror_->after_begin(slot, tokens));
  forget_plans();  // its counts have changed
}

Status ChannelDeviceStore::begin_prompt(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_prompt(sequences, tokens);
  if (!slots) return slots.status();
  if (Status s = check_channel_prompt(config(), tokens); !s) return s;
  const ChannelBegin begin = {DeviceCall::kBeginPrompt, static_cast<int32_t>(slots->size()),
                              tokens};
  const DeviceState& d = state_.common;
  if (Status s = set_batch(begin.call, *slots, tokens); !s) return s;
  const SequenceBatch batch = sequences_.batch(*slots);
  if (Status s = plan_channel_begin(state_, begin, stream()); !s) return s;
  if (Status s = sequences_.run(PageOp::reserve(batch, d.entry_counts, d.report)); !s) return s;
  // Where nothing was reserved there is nothing to keep: that operation then refuses itself.
  if (Status s = sequences_.run(PageOp::keep(batch, d.row_counts, d.other_report)); !s) return s;
  if (Status s = finish_channel_begin(state_, begin, stream()); !s) return s;
  begin_in_table(*slots, tokens);
  return Status::ok();
}

Status ChannelDeviceStore::append(const AppendCall& call) {
  const Result<Slots> slots = table().admit_append(call);
  if (!slots) return slots.status();
  const DType dtype = config().layout.dtype;
  const auto is_aligned = [dtype](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(dtype_bytes(dtype)) == 0;
  };
  if (!is_aligned(call.k) || !is_aligned(call.v)) return invalid("k or v is misaligned");
  if (Status s = use_batch(DeviceCall::kAppend, *slots); !s) return s;
  ChannelAppendCall append;
  append.tokens = {call.k,      call.v,    dtype, static_cast<int32_t>(slots->size()),
                   call.tokens, call.layer};
  append.prompt = table().phase(slots->front()) == SequencePhase::kPrompt;
  for (const int32_t slot : *slots) {
    if (!append.prompt) break;
    const SequenceInfo& info = table().info(slot);
    const int32_t blocks = (info.window_first - info.prompt_tokens) / state_.s.layout.tokens;
    append.most_blocks = std::max(append.most_blocks, blocks);
  }
  if (Status s = append_channel_tokens(state_, append, stream()); !s) return s;
  for (const int32_t slot : *slots) {
    table().set_layer_tokens(slot, call.layer, table().info(slot).num_tokens);
  }
  return Status::ok();
}

Status ChannelDeviceStore::end_prompt(SequenceList sequences) {
  const Result<Slots> slots = table().admit_end_prompt(sequences);
  if (!slots) return slots.status();
  if (Status s = set_batch(DeviceCall::kEndPrompt, *slots, 0); !s) return s;
  const auto count = static_cast<int32_t>(slots->size());
  if (Status s = end_channel_prompts(state_, count, stream()); !s) return s;
  for (const int32_t slot : *slots) {
    table().set_info(slot, channel_info_after_prompt(table().info(slot)));
    table().set_phase(slot, SequencePhase::kLive);
  }
  return Status::ok();
}

Status ChannelDeviceStore::score_prompt(const PromptScores&) {
  return no_scores(kThisCache);
}
Status ChannelDeviceStore::update_scores(const ScoreUpdate&) {
  return no_scores(kThisCache);
}

Status ChannelDeviceStore::begin_step(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  const ChannelBegin begin = {DeviceCall::kBeginStep, static_cast<int32_t>(slots->size()), tokens};
  const DeviceState& d = state_.common;
  if (Status s = set_batch(begin.call, *slots, tokens); !s) return s;
  if (Status s = plan_channel_begin(state_, begin, stream()); !s) return s;
  const PageOp grow = PageOp::append(sequences_.batch(*slots), d.row_counts, d.report);
  if (Status s = sequences_.run(grow); !s) return s;
  if (Status s = finish_channel_begin(state_, begin, stream()); !s) return s;
  begin_in_table(*slots, tokens);
  return Status::ok();
}

Status ChannelDeviceStore::note_replay(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  begin_in_table(*slots, tokens);
  for (const int32_t slot : *slots) table().set_complete(slot);
  return Status::ok();
}

ChannelCtas ChannelDeviceStore::ctas_of(int32_t q_len) const {
  const CacheLayout& l = config().layout;
  return channel_ctas(l.group_size(), q_len, l.num_kv_heads, l.head_dim);
}

ChannelLengths ChannelDeviceStore::lengths_of(const Slots& slots) {
  ChannelLengths lengths;
  for (const int32_t slot : slots) {
    const int32_t units = attended_sequence(state_.s, slot, table().info(slot)).units();
    lengths.units += units;
    lengths.most = std::max(lengths.most, units);
  }
  return lengths;
}

Result<const ChannelPlan*> ChannelDeviceStore::plan(const Slots& slots, int32_t q_len) {
  CallMemory& calls = sequences_.calls();
  Planned& planned = planned_[calls.index()];
  if (calls.has_plan(slots, q_len)) return &planned.plan;
  calls.begin_plan();
  const auto count = static_cast<int32_t>(slots.size());
  if (Status s = find_channel_sequences(state_, planned.sequences, count, stream()); !s) return s;
  const ChannelCtas ctas = ctas_of(q_len);
  const int32_t rows = count * ctas.columns.num_kv_heads;
  const int32_t resident = sms_ * channel_ctas_per_sm(config().layout.head_dim);
  planned.plan.num_items = choose_channel_items(ctas, lengths_of(slots), rows, resident);
  ChannelPlanCall call = channel_plan_call(channel_pages(state_.s, 0), ctas);
  call.sequences = planned.sequences;
  call.num_sequences = count;
  call.plan = planned.plan;
  call.status = &state_.common.failure->status;
  if (Status s = plan_channel(call, stream()); !s) return s;
  calls.wrote_plan(slots, q_len);
  return &planned.plan;
}

Status ChannelDeviceStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table().admit_attend(request);
  if (!slots) return slots.status();
  if (Status s = check_device_request(request); !s) return s;
  if (Status s = use_batch(DeviceCall::kAttend, *slots); !s) return s;
  const Result<const ChannelPlan*> planned = plan(*slots, request.q_len);
  if (!planned) return planned.status();
  ChannelPagesCall call;
  call.ctas = ctas_of(request.q_len);
  call.num_sequences = static_cast<int32_t>(slots->size());
  call.plan = **planned;
  call.sm_scale = static_cast<float>(config().layout.sm_scale);
  call.dtype = request.dtype;
  call.q = static_cast<const uint16_t*>(request.q);
  call.out = static_cast<uint16_t*>(request.out);
  call.lse = request.lse;
  call.sinks = request.sinks;
  call.status = &state_.common.failure->status;
  return attend_channel_pages(channel_pages(state_.s, request.layer), call, workspace_, stream());
}

}  // namespace tierkv

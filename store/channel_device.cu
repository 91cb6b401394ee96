#include "store/channel_device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

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
  if (request.q_len != 1) {
    return unsupported("q_len of a channel-wise cache on a device; it needs 1");
  }
  if (request.sinks != nullptr) return unsupported("sinks with a channel-wise cache on a device");
  if (request.probabilities == nullptr) return Status::ok();
  return unsupported("probabilities of a channel-wise cache on a device");
}

}  // namespace

Result<std::unique_ptr<ChannelDeviceStore>> ChannelDeviceStore::make(const KvStoreConfig& config,
                                                                     GpuStream stream) {
  Result<std::unique_ptr<ChannelHostStore>> mirror = ChannelHostStore::make(config);
  if (!mirror) return mirror.status();
  if (Status s = validate_channel_pages((*mirror)->view_.layout, config.layout.group_size()); !s) {
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
  uint8_t* workspace = nullptr;
  if (Status s = sequences_.take(rows, &rows_); !s) return s;
  const size_t bytes = channel_pages_workspace_bytes(host.layout, rows, layout.group_size());
  if (Status s = sequences_.take(bytes, &workspace); !s) return s;
  workspace_ = workspace;
  state_.common = sequences_.state();
  state_.s = host;
  state_.s.allocator = state_.common.s.allocator;
  state_.s.pages = state_.common.s.pages;
  state_.s.infos = state_.common.s.infos;
  return Status::ok();
}

// A slot that is used again is another sequence: what is planned may be of the old one.
Result<SequenceId> ChannelDeviceStore::add_sequence() {
  planned_.clear();
  return sequences_.add_sequence();
}

Status ChannelDeviceStore::release(SequenceId sequence) {
  planned_.clear();
  return sequences_.release(sequence);
}

void ChannelDeviceStore::begin_in_table(const Slots& slots, int32_t tokens) {
  for (const int32_t slot : slots) table().set_info(slot, mirror_->after_begin(slot, tokens));
  planned_.clear();  // its counts have changed
}

Status ChannelDeviceStore::begin_prompt(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_prompt(sequences, tokens);
  if (!slots) return slots.status();
  if (Status s = check_channel_prompt(config(), tokens); !s) return s;
  const ChannelBegin begin = {DeviceCall::kBeginPrompt, static_cast<int32_t>(slots->size()),
                              tokens};
  const DeviceState& d = state_.common;
  const SequenceBatch batch = sequences_.batch(*slots);
  if (Status s = sequences_.set_batch(begin.call, *slots, tokens); !s) return s;
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
  if (Status s = sequences_.use_batch(DeviceCall::kAppend, *slots); !s) return s;
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
  if (Status s = sequences_.set_batch(DeviceCall::kEndPrompt, *slots, 0); !s) return s;
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
  if (Status s = sequences_.set_batch(begin.call, *slots, tokens); !s) return s;
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
  sequences_.assume_batch(*slots);
  return Status::ok();
}

int32_t ChannelDeviceStore::most_units(const Slots& slots) {
  int32_t most = 1;
  for (const int32_t slot : slots) {
    const SequenceInfo& info = table().info(slot);
    const int32_t raw_tiles = pages_for(ChannelView::raw_tokens(info), kTileTokens);
    most = std::max(most, state_.s.blocks_of(info) + raw_tiles);
  }
  return most;
}

Status ChannelDeviceStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table().admit_attend(request);
  if (!slots) return slots.status();
  if (Status s = check_device_request(request); !s) return s;
  if (Status s = sequences_.use_batch(DeviceCall::kAttend, *slots); !s) return s;
  const ChannelView& s = state_.s;
  const auto count = static_cast<int32_t>(slots->size());
  if (planned_ != *slots) {
    if (Status t = plan_channel_rows(state_, rows_, count, stream()); !t) return t;
    planned_ = *slots;
  }
  // The plan is that of layer 0.
  const PageTableShape& table_shape = s.allocator.shape.table;
  const int32_t rows_before = request.layer * s.num_kv_heads;
  ChannelPages pages;
  pages.layout = s.layout;
  pages.base = s.pages.base;
  pages.page_bytes = s.pages.page_bytes;
  pages.num_pages = s.pages.num_pages;
  pages.block_shift = s.blocks_per_page - 1;
  pages.raw_page_tokens = s.raw_page_tokens;
  pages.slots = s.allocator.slots + int64_t{rows_before} * table_shape.row_stride();
  pages.num_table_rows = table_shape.num_rows() - rows_before;
  pages.row_stride = table_shape.row_stride();
  pages.block_slots = table_shape.table_slots[0];
  pages.raw_slots = table_shape.table_slots[1];
  pages.rows = rows_;
  pages.num_rows = count * s.num_kv_heads;
  ChannelPagesCall call;
  call.group = config().layout.group_size();
  call.sm_scale = static_cast<float>(config().layout.sm_scale);
  call.q = static_cast<const uint16_t*>(request.q);
  call.out = static_cast<uint16_t*>(request.out);
  call.lse = request.lse;
  call.status = &state_.common.failure->status;
  call.units = most_units(*slots);
  return attend_channel_pages(pages, call, workspace_, stream());
}

}  // namespace tierkv

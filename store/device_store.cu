#include "store/device_store.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "codec/cuda_device.cuh"
#include "store/channel_device.h"
#include "store/coded_device.h"
#include "store/device_basis.h"
#include "store/stream_capture.cuh"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

bool is_aligned(const void* p, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(p) % alignment == 0;
}

}  // namespace

Result<std::unique_ptr<DeviceKvStore>> create_device_store(const KvStoreConfig& config,
                                                           GpuStream stream) {
  if (config.channel.enabled) {
    Result<std::unique_ptr<ChannelDeviceStore>> channel = ChannelDeviceStore::make(config, stream);
    if (!channel) return channel.status();
    return std::unique_ptr<DeviceKvStore>(std::move(*channel));
  }
  if (config.coded.enabled) {
    Result<std::unique_ptr<CodedDeviceStore>> coded = CodedDeviceStore::make(config, stream);
    if (!coded) return coded.status();
    return std::unique_ptr<DeviceKvStore>(std::move(*coded));
  }
  if (config.basis != nullptr) {
    Result<std::unique_ptr<DeviceBasisStore>> store = DeviceBasisStore::make(config, stream);
    if (!store) return store.status();
    return std::unique_ptr<DeviceKvStore>(std::move(*store));
  }
  Result<std::unique_ptr<DeviceStore>> store = DeviceStore::make(config, stream);
  if (!store) return store.status();
  return std::unique_ptr<DeviceKvStore>(std::move(*store));
}

Result<std::unique_ptr<DeviceStore>> DeviceStore::make(const KvStoreConfig& config,
                                                       GpuStream stream) {
  Result<std::unique_ptr<HostStore>> mirror = HostStore::make(config);
  if (!mirror) return mirror.status();
  std::unique_ptr<DeviceStore> store(new DeviceStore(std::move(*mirror), stream));
  if (Status s = store->allocate(); !s) return s;
  if (Status s = store->allocate_attention(); !s) return s;
  if (Status s = cuda_status(cudaStreamSynchronize(stream), "create"); !s) return s;
  return Result<std::unique_ptr<DeviceStore>>(std::move(store));
}

DeviceStore::~DeviceStore() {
  (void)cudaStreamSynchronize(stream_);
  for (void* p : memory_) (void)cudaFree(p);
}

Status DeviceStore::take_bytes(size_t bytes, void** memory) {
  if (Status s = device_allocate(bytes, "create", memory); !s) return s;
  memory_.push_back(*memory);
  return Status::ok();
}

Status DeviceStore::clear(void* memory, size_t bytes) {
  return cuda_status(cudaMemsetAsync(memory, 0, bytes, stream_), "create");
}

Status DeviceStore::allocate() {
  const KvStoreConfig& c = config();
  const StoreView& host = mirror_->view_;
  const auto sequences = static_cast<size_t>(c.max_sequences);
  const size_t rows = sequences * host.rows_per_sequence();
  const size_t allocator = allocator_bytes(host.allocator.shape).total;
  const size_t workspace = page_op_workspace_bytes(host.allocator.shape, c.max_sequences);
  const size_t layer_rows = sequences * c.layout.num_kv_heads;
  const size_t groups = (sequences * step_groups(host) + 3) / 4 * 4;
  uint8_t *pool = nullptr, *tables = nullptr, *scratch = nullptr;
  float* neutral = nullptr;
  int32_t* counting = nullptr;
  state_.s = host;
  if (Status s = take(host.pages.page_bytes * c.num_pages, &pool); !s) return s;
  if (Status s = take(allocator, &tables); !s) return s;
  if (Status s = take(workspace, &scratch); !s) return s;
  if (Status s = take(sequences, &state_.s.infos); !s) return s;
  if (Status s = take(1, &state_.failure); !s) return s;
  if (Status s = take(kCallMemories * sequences, &batches_); !s) return s;
  if (Status s = take(sequences, &state_.before); !s) return s;
  if (Status s = take(sequences, &state_.entry_counts); !s) return s;
  if (Status s = take(rows, &state_.row_counts); !s) return s;
  if (Status s = take(rows * kMaxStepTokens, &state_.moves); !s) return s;
  if (Status s = take(rows, &state_.growth); !s) return s;
  if (Status s = take(groups, &state_.group_pages); !s) return s;
  uint8_t* totals = nullptr;
  if (Status s = take(step_totals_bytes(), &totals); !s) return s;
  state_.totals = reinterpret_cast<StepTotals*>(totals);
  if (Status s = take(host.rows_per_sequence() * kMaxSides, &state_.copies); !s) return s;
  if (Status s = take(1, &state_.report); !s) return s;
  if (Status s = take(1, &state_.other_report); !s) return s;
  if (Status s = take(rows, &state_.appended); !s) return s;
  if (Status s = take(layer_rows, &chunk_.status); !s) return s;
  if (Status s = take(c.max_tokens, &neutral); !s) return s;
  if (Status s = take(c.max_tokens, &counting); !s) return s;
  const Result<PageAllocator> a = make_page_allocator(host.allocator.shape, tables, allocator);
  if (!a) return a.status();
  state_.s.allocator = *a;
  state_.s.pages.base = pool;
  state_.s.pages.records = a->records;
  state_.max_tokens = c.max_tokens;
  allocator_memory_ = tables;
  op_workspace_ = {scratch, workspace};
  chunk_.neutral = neutral;
  chunk_.counting = counting;
  std::vector<int32_t> numbers(c.max_tokens);
  std::iota(numbers.begin(), numbers.end(), 0);
  if (Status t = copy(counting, numbers.data(), numbers.size() * sizeof(int32_t)); !t) return t;
  std::vector<float> unscored(c.max_tokens);
  for (int32_t i = 0; i < c.max_tokens; ++i) unscored[i] = neutral_significance(i + 1);
  if (Status t = copy(neutral, unscored.data(), unscored.size() * sizeof(float)); !t) return t;
  if (Status t = copy(state_.failure, &kNoFailure, sizeof(kNoFailure)); !t) return t;
  if (Status t = clear_totals(state_, stream_); !t) return t;
  if (Status t = clear(state_.group_pages, groups * sizeof(int32_t)); !t) return t;
  // What no segment of a page covers, what lies between the tables and what free sequences have
  // travels to the host with the rest: it must not be what other programs left there.
  if (Status t = clear(pool, host.pages.page_bytes * c.num_pages); !t) return t;
  if (Status t = clear(tables, allocator); !t) return t;
  if (Status t = clear(state_.s.infos, sequences * sizeof(SequenceInfo)); !t) return t;
  if (Status t = clear(state_.appended, rows * sizeof(int32_t)); !t) return t;
  return initialize_device(*a, stream_);
}

Status DeviceStore::grow_jobs(size_t jobs) {
  if (jobs <= num_jobs_) return Status::ok();
  uint8_t* memory = nullptr;
  if (Status s = take(jobs * chunk_job_bytes(), &memory); !s) return s;
  chunk_.jobs = memory;  // the smaller one goes with the store: the stream may still use it
  num_jobs_ = jobs;
  return Status::ok();
}

Status DeviceStore::enter_call() {
  const Result<uint64_t> capture = capture_id(stream_);
  if (!capture) return capture.status();
  calls_.enter(*capture);
  state_.batch = batches_ + int64_t{calls_.index()} * config().max_sequences;
  return Status::ok();
}

Status DeviceStore::set_batch(DeviceCall call, const Slots& slots, int32_t tokens) {
  if (Status s = enter_call(); !s) return s;
  calls_.wrote_batch(slots);
  return begin_batch(state_, {call, static_cast<int32_t>(slots.size()), tokens}, slots.data(),
                     stream_);
}

Status DeviceStore::use_batch(const Slots& slots) {
  if (Status s = enter_call(); !s) return s;
  return calls_.has_batch(slots) ? Status::ok() : set_batch(DeviceCall::kNone, slots, 0);
}

Status DeviceStore::run(const PageOp& op) {
  return run_page_op_device(state_.s.allocator, op, op_workspace_, stream_);
}

Result<SequenceId> DeviceStore::add_sequence() {
  const Result<int32_t> slot = table().free_slot();
  if (!slot) return slot.status();
  const Slots slots = {*slot};
  if (Status s = set_batch(DeviceCall::kNone, slots, 0); !s) return s;
  if (Status s = run(PageOp::open(batch(slots), state_.other_report)); !s) return s;
  if (Status s = reset_sequences(state_, 1, stream_); !s) return s;
  return table().claim(*slot, SequencePhase::kPrompt, SequenceInfo{});
}

Status DeviceStore::release(SequenceId sequence) {
  const Result<int32_t> slot = table().slot_of(sequence);
  if (!slot) return slot.status();
  const Slots slots = {*slot};
  if (Status s = set_batch(DeviceCall::kNone, slots, 0); !s) return s;
  if (Status s = run(PageOp::release(batch(slots), state_.other_report)); !s) return s;
  calls_.forget_plans();
  table().release(*slot);
  return Status::ok();
}

Status DeviceStore::begin_prompt(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_prompt(sequences, tokens);
  if (!slots) return slots.status();
  const auto count = static_cast<int32_t>(slots->size());
  if (Status s = set_batch(DeviceCall::kBeginPrompt, *slots, tokens); !s) return s;
  if (Status s = plan_chunk(state_, count, tokens, stream_); !s) return s;
  if (Status s = run(PageOp::reserve(batch(*slots), state_.entry_counts, state_.report)); !s)
    return s;
  // Where nothing was reserved there is nothing to keep: that operation then refuses itself.
  if (Status s = run(PageOp::keep(batch(*slots), state_.row_counts, state_.other_report)); !s)
    return s;
  if (Status s = finish_chunk(state_, count, tokens, stream_); !s) return s;
  calls_.forget_plans();
  for (const int32_t slot : *slots) {
    table().set_info(slot, {table().info(slot).num_tokens + tokens, 0, kInPrompt, 0});
  }
  return Status::ok();
}

Status DeviceStore::append(const AppendCall& call) {
  const Result<Slots> slots = table().admit_append(call);
  if (!slots) return slots.status();
  const DType dtype = config().layout.dtype;
  const bool prompt = table().phase(slots->front()) == SequencePhase::kPrompt;
  const int64_t alignment = prompt ? 16 : dtype_bytes(dtype);
  if (!is_aligned(call.k, alignment) || !is_aligned(call.v, alignment)) {
    return invalid("k or v is misaligned");
  }
  if (Status s = use_batch(*slots); !s) return s;
  const auto count = static_cast<int32_t>(slots->size());
  const DeviceTokens tokens = {
      call.k, call.v, dtype, count, call.tokens, call.layer, calls_.settled().is_settled()};
  if (prompt) {
    const size_t rows = slots->size() * config().layout.num_kv_heads;
    if (Status s = grow_jobs(rows * chunk_jobs(state_.s, call.tokens)); !s) return s;
    if (Status s = append_chunk(state_, chunk_, tokens, stream_); !s) return s;
  } else {
    if (Status s = append_step(state_, tokens, slots->data(), stream_); !s) return s;
    calls_.settled().note_wait();
  }
  for (const int32_t slot : *slots) {
    table().set_layer_tokens(slot, call.layer, table().info(slot).num_tokens);
  }
  return Status::ok();
}

Status DeviceStore::score_prompt(const PromptScores& scores) {
  const Result<Slots> slots = table().admit_scores(scores);
  if (!slots) return slots.status();
  if (Status s = use_batch(*slots); !s) return s;
  return tierkv::score_prompt(
      state_,
      {scores.significance, scores.stride, static_cast<int32_t>(slots->size()), scores.layer, 0},
      stream_);
}

Status DeviceStore::end_prompt(SequenceList sequences) {
  const Result<Slots> slots = table().admit_end_prompt(sequences);
  if (!slots) return slots.status();
  const auto count = static_cast<int32_t>(slots->size());
  if (Status s = set_batch(DeviceCall::kEndPrompt, *slots, 0); !s) return s;
  if (Status s = plan_prompt_end(state_, count, stream_); !s) return s;
  if (Status s = run(PageOp::reserve(batch(*slots), state_.entry_counts, state_.report)); !s)
    return s;
  if (Status s = place_prompt(state_, count, stream_); !s) return s;
  if (Status s = run(PageOp::keep(batch(*slots), state_.row_counts, state_.other_report)); !s)
    return s;
  if (Status s = finish_prompt(state_, count, stream_); !s) return s;
  calls_.forget_plans();
  for (const int32_t slot : *slots) {
    table().set_info(slot, info_after_prompt(state_.s.policy, table().info(slot).num_tokens));
    table().set_phase(slot, SequencePhase::kLive);
  }
  return Status::ok();
}

Status DeviceStore::begin_step(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  const auto count = static_cast<int32_t>(slots->size());
  if (Status s = enter_call(); !s) return s;
  calls_.wrote_batch(*slots);
  const StepCall call = {slots->data(), count, tokens};
  if (Status s = plan_step(state_, call, stream_); !s) return s;
  if (Status s = apply_step(state_, call, stream_); !s) return s;
  calls_.forget_plans();  // its token counts have changed
  for (const int32_t slot : *slots) {
    table().set_info(slot, info_after_step(state_.s.policy, table().info(slot), tokens));
  }
  return Status::ok();
}

Status DeviceStore::note_replay(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  for (const int32_t slot : *slots) {
    table().set_info(slot, info_after_step(state_.s.policy, table().info(slot), tokens));
    table().set_complete(slot);
  }
  calls_.forget_plans();
  return Status::ok();
}

Status DeviceStore::update_scores(const ScoreUpdate& update) {
  const Result<Slots> slots = table().admit_update(update);
  if (!slots) return slots.status();
  if (Status s = use_batch(*slots); !s) return s;
  return tierkv::update_scores(state_,
                               {update.probabilities, update.stride,
                                static_cast<int32_t>(slots->size()), update.layer, update.back},
                               stream_);
}

}  // namespace tierkv

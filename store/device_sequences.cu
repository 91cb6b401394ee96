#include "store/device_sequences.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "codec/cuda_device.cuh"
#include "store/stream_capture.cuh"

namespace tierkv {
namespace {

std::string text_of(const DeviceFailure& f) {
  constexpr const char* kNames[] = {"store",      "begin_prompt", "append",        "score_prompt",
                                    "end_prompt", "begin_step",   "update_scores", "attend"};
  std::string text = kNames[static_cast<int32_t>(f.call)];
  if (f.layer >= 0) text += ", layer " + std::to_string(f.layer);
  if (f.slot >= 0) text += ", sequence " + std::to_string(f.slot);
  return text;
}

}  // namespace

DeviceSequences::~DeviceSequences() {
  (void)cudaStreamSynchronize(stream_);
  for (void* p : memory_) (void)cudaFree(p);
}

Status DeviceSequences::take_bytes(size_t bytes, void** memory) {
  if (Status s = device_allocate(bytes, "create", memory); !s) return s;
  memory_.push_back(*memory);
  return Status::ok();
}

Status DeviceSequences::allocate(const AllocatorShape& shape, int64_t page_bytes) {
  const auto sequences = static_cast<size_t>(shape.table.num_sequences);
  const auto rows = static_cast<size_t>(shape.table.num_rows());
  const size_t allocator = allocator_bytes(shape).total;
  const size_t workspace = page_op_workspace_bytes(shape, shape.table.num_sequences);
  uint8_t *pool = nullptr, *tables = nullptr, *scratch = nullptr;
  if (Status s = take(static_cast<size_t>(page_bytes) * shape.num_pages, &pool); !s) return s;
  if (Status s = take(allocator, &tables); !s) return s;
  if (Status s = take(workspace, &scratch); !s) return s;
  if (Status s = take(sequences, &state_.s.infos); !s) return s;
  if (Status s = take(1, &state_.failure); !s) return s;
  if (Status s = take(kCallMemories * sequences, &batches_); !s) return s;
  if (Status s = take(sequences, &state_.before); !s) return s;
  if (Status s = take(sequences, &state_.entry_counts); !s) return s;
  if (Status s = take(rows, &state_.row_counts); !s) return s;
  if (Status s = take(1, &state_.report); !s) return s;
  if (Status s = take(1, &state_.other_report); !s) return s;
  if (Status s = take(rows, &state_.appended); !s) return s;
  const Result<PageAllocator> a = make_page_allocator(shape, tables, allocator);
  if (!a) return a.status();
  state_.s.allocator = *a;
  state_.s.pages = {pool, a->records, page_bytes, shape.num_pages};
  state_.s.num_kv_heads = config_.layout.num_kv_heads;
  state_.max_tokens = config_.max_tokens;
  allocator_memory_ = tables;
  op_workspace_ = {scratch, workspace};
  if (Status s = copy(state_.failure, &kNoFailure, sizeof(kNoFailure)); !s) return s;
  if (Status s = initialize_device(*a, stream_); !s) return s;
  return wait();
}

Status DeviceSequences::enter_call() {
  const Result<uint64_t> capture = capture_id(stream_);
  if (!capture) return capture.status();
  calls_.enter(*capture);
  state_.batch = batches_ + int64_t{calls_.index()} * config_.max_sequences;
  return Status::ok();
}

Status DeviceSequences::set_batch(DeviceCall call, const Slots& slots, int32_t tokens) {
  if (Status s = enter_call(); !s) return s;
  calls_.wrote_batch(slots);
  return begin_batch(state_, {call, static_cast<int32_t>(slots.size()), tokens}, slots.data(),
                     stream_);
}

Status DeviceSequences::use_batch(DeviceCall call, const Slots& slots) {
  if (Status s = enter_call(); !s) return s;
  return calls_.has_batch(slots) ? Status::ok() : set_batch(call, slots, 0);
}

Status DeviceSequences::run(const PageOp& op) const {
  return run_page_op_device(state_.s.allocator, op, op_workspace_, stream_);
}

Result<SequenceId> DeviceSequences::add_sequence() {
  const Result<int32_t> slot = table_.free_slot();
  if (!slot) return slot.status();
  const Slots slots = {*slot};
  if (Status s = set_batch(DeviceCall::kNone, slots, 0); !s) return s;
  if (Status s = run(PageOp::open(batch(slots), state_.other_report)); !s) return s;
  if (Status s = reset_sequences(state_, 1, stream_); !s) return s;
  return table_.claim(*slot, SequencePhase::kPrompt, SequenceInfo{});
}

Status DeviceSequences::release(SequenceId sequence) {
  const Result<int32_t> slot = table_.slot_of(sequence);
  if (!slot) return slot.status();
  const Slots slots = {*slot};
  if (Status s = set_batch(DeviceCall::kNone, slots, 0); !s) return s;
  if (Status s = run(PageOp::release(batch(slots), state_.other_report)); !s) return s;
  table_.release(*slot);
  return Status::ok();
}

Status DeviceSequences::copy(void* to, const void* from, size_t bytes) const {
  return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copy");
}

Status DeviceSequences::wait() const {
  return cuda_status(cudaStreamSynchronize(stream_), "wait");
}

Status DeviceSequences::settle() const {
  DeviceFailure failure;
  if (Status s = copy(&failure, state_.failure, sizeof(failure)); !s) return s;
  if (Status s = wait(); !s) return s;
  if (failure.status == StatusCode::kOk) return Status::ok();
  return Status(StatusCode::kInvalidArgument,
                "take_status() has a failure to tell: " + text_of(failure));
}

Status DeviceSequences::take_status() {
  DeviceFailure failure;
  if (Status s = copy(&failure, state_.failure, sizeof(failure)); !s) return s;
  if (Status s = wait(); !s) return s;
  if (failure.status == StatusCode::kOk) return Status::ok();
  if (Status s = copy(state_.failure, &kNoFailure, sizeof(kNoFailure)); !s) return s;
  if (Status s = read_bookkeeping(); !s) return s;
  return Status(failure.status, text_of(failure));
}

Status DeviceSequences::read_bookkeeping() {
  const int32_t sequences = config_.max_sequences, heads = config_.layout.num_kv_heads;
  std::vector<SequenceInfo> infos(sequences);
  std::vector<int32_t> appended(static_cast<size_t>(sequences) * rows_per_sequence());
  if (Status s = copy(infos.data(), state_.s.infos, infos.size() * sizeof(SequenceInfo)); !s) {
    return s;
  }
  if (Status s = copy(appended.data(), state_.appended, appended.size() * sizeof(int32_t)); !s) {
    return s;
  }
  if (Status s = wait(); !s) return s;
  for (int32_t slot = 0; slot < sequences; ++slot) {
    if (table_.phase(slot) == SequencePhase::kFree) continue;
    table_.set_info(slot, infos[slot]);
    table_.set_phase(slot, infos[slot].window_origin == kInPrompt ? SequencePhase::kPrompt
                                                                  : SequencePhase::kLive);
    for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
      const auto first = appended.begin() + state_.s.row_of(slot, layer, 0);
      table_.set_layer_tokens(slot, layer, *std::min_element(first, first + heads));
    }
  }
  calls_.forget_batches();
  return Status::ok();
}

Status DeviceSequences::send_info(int32_t slot) {
  std::vector<int32_t> appended(rows_per_sequence());
  for (int32_t w = 0; w < rows_per_sequence(); ++w) {
    appended[w] = table_.layer_tokens(slot, w / config_.layout.num_kv_heads);
  }
  const SequenceInfo& info = table_.info(slot);
  if (Status s = copy(state_.s.infos + slot, &info, sizeof(info)); !s) return s;
  int32_t* to = state_.appended + static_cast<int64_t>(slot) * rows_per_sequence();
  if (Status s = copy(to, appended.data(), appended.size() * sizeof(int32_t)); !s) return s;
  return wait();  // the source goes
}

}  // namespace tierkv

// The calls of a coded store's device back end that go through host memory, and take_status().

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "codec/cuda_device.cuh"
#include "store/coded_device.h"

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

Status CodedDeviceStore::copy(void* to, const void* from, size_t bytes) {
  return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copy");
}

Status CodedDeviceStore::wait() {
  return cuda_status(cudaStreamSynchronize(stream_), "wait");
}

Status CodedDeviceStore::settle() {
  DeviceFailure failure;
  if (Status s = copy(&failure, state_.common.failure, sizeof(failure)); !s) return s;
  if (Status s = wait(); !s) return s;
  if (failure.status == StatusCode::kOk) return Status::ok();
  return Status(StatusCode::kInvalidArgument,
                "take_status() has a failure to tell: " + text_of(failure));
}

Status CodedDeviceStore::take_status() {
  DeviceFailure failure;
  if (Status s = copy(&failure, state_.common.failure, sizeof(failure)); !s) return s;
  if (Status s = wait(); !s) return s;
  if (failure.status == StatusCode::kOk) return Status::ok();
  if (Status s = copy(state_.common.failure, &kNoFailure, sizeof(kNoFailure)); !s) return s;
  if (Status s = read_bookkeeping(); !s) return s;
  return Status(failure.status, text_of(failure));
}

Status CodedDeviceStore::read_bookkeeping() {
  const CacheLayout& layout = config().layout;
  const int32_t sequences = config().max_sequences, heads = layout.num_kv_heads;
  std::vector<SequenceInfo> infos(sequences);
  std::vector<int32_t> appended(static_cast<size_t>(sequences) * rows_per_sequence());
  if (Status s = copy(infos.data(), state_.s.infos, infos.size() * sizeof(SequenceInfo)); !s) {
    return s;
  }
  if (Status s = copy(appended.data(), state_.common.appended, appended.size() * sizeof(int32_t));
      !s) {
    return s;
  }
  if (Status s = wait(); !s) return s;
  for (int32_t slot = 0; slot < sequences; ++slot) {
    if (table().phase(slot) == SequencePhase::kFree) continue;
    table().set_info(slot, infos[slot]);
    table().set_phase(slot, infos[slot].window_origin == kInPrompt ? SequencePhase::kPrompt
                                                                   : SequencePhase::kLive);
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      const auto first = appended.begin() + state_.s.row_of(slot, layer, 0);
      table().set_layer_tokens(slot, layer, *std::min_element(first, first + heads));
    }
  }
  calls_.forget_batches();
  calls_.forget_plans();
  return Status::ok();
}

template <class Copy>
Status CodedDeviceStore::for_each_page(int32_t slot, Copy copy_page) {
  const CodedView& host = mirror_->view_;
  for (int32_t w = 0; w < rows_per_sequence(); ++w) {
    const int32_t row = slot * rows_per_sequence() + w;
    for (const int32_t side : {kCodedSide, kRawSide}) {
      for (int32_t i = 0; i < host.allocator.pages[row].of[side]; ++i) {
        const int32_t page = host.page_id(row, side, i);
        if (Status s = copy_page(page, state_.s.page_bytes(page), host.page_bytes(page)); !s) {
          return s;
        }
      }
    }
  }
  return Status::ok();
}

Status CodedDeviceStore::copy_directory(int32_t slot, const CodedView& from, const CodedView& to) {
  const size_t rows = rows_per_sequence();
  const int32_t first = slot * rows_per_sequence();
  for (const Component c : {Component::kKey, Component::kValue}) {
    const size_t blocks = rows * from.max_blocks * sizeof(CodedBlockRef);
    if (Status s = copy(to.blocks(c, first), from.blocks(c, first), blocks); !s) return s;
    const size_t means = rows * from.head_dim * sizeof(float);
    if (Status s = copy(to.means(c, first), from.means(c, first), means); !s) return s;
    const size_t steps = rows * sizeof(float);
    if (Status s = copy(&to.step(c, first), &from.step(c, first), steps); !s) return s;
  }
  return Status::ok();
}

Status CodedDeviceStore::to_mirror(const Slots& slots, Content content) {
  if (Status s = settle(); !s) return s;
  const size_t bytes = allocator_bytes(state_.s.allocator.shape).total;
  if (Status s = copy(mirror_->allocator_memory_.get(), allocator_memory_, bytes); !s) return s;
  if (Status s = wait(); !s) return s;
  const auto download_page = [this](int32_t, uint8_t* device, uint8_t* host) {
    return copy(host, device, page_bytes());
  };
  for (const int32_t slot : slots) {
    if (Status s = copy_directory(slot, state_.s, mirror_->view_); !s) return s;
    if (content == Content::kBlocks) continue;
    if (Status s = for_each_page(slot, download_page); !s) return s;
  }
  return wait();
}

Status CodedDeviceStore::from_mirror(const Slots& slots) {
  const CodedView& host = mirror_->view_;
  const size_t bytes = allocator_bytes(host.allocator.shape).total;
  if (Status s = copy(allocator_memory_, mirror_->allocator_memory_.get(), bytes); !s) return s;
  const auto upload_page = [this, &host](int32_t page, uint8_t* to, uint8_t* from) {
    return is_frozen(host.allocator, page) ? Status::ok() : copy(to, from, page_bytes());
  };
  std::vector<int32_t> appended(rows_per_sequence());
  for (const int32_t slot : slots) {
    if (Status s = copy_directory(slot, host, state_.s); !s) return s;
    if (Status s = for_each_page(slot, upload_page); !s) return s;
    const SequenceInfo& info = host.infos[slot];
    if (Status s = copy(state_.s.infos + slot, &info, sizeof(info)); !s) return s;
    for (int32_t w = 0; w < rows_per_sequence(); ++w) {
      appended[w] = table().layer_tokens(slot, w / state_.s.num_kv_heads);
    }
    int32_t* to = state_.common.appended + static_cast<int64_t>(slot) * rows_per_sequence();
    if (Status s = copy(to, appended.data(), appended.size() * sizeof(int32_t)); !s) return s;
    if (Status s = wait(); !s) return s;
  }
  calls_.forget_plans();
  return upload_books();
}

Result<SequenceId> CodedDeviceStore::fork(SequenceId source) {
  const Result<int32_t> slot = table().complete_live_slot_of(source);
  if (!slot) return slot.status();
  if (Status s = to_mirror({*slot}, Content::kPages); !s) return s;
  const Result<SequenceId> copy_id = mirror_->fork(source);
  if (!copy_id) return copy_id;
  if (Status s = from_mirror({copy_id->slot}); !s) return s;
  return copy_id;
}

Status CodedDeviceStore::truncate(SequenceId sequence, int32_t tokens) {
  const Result<int32_t> slot = table().complete_slot_of(sequence);
  if (!slot) return slot.status();
  if (Status s = to_mirror({*slot}, Content::kPages); !s) return s;
  if (Status s = mirror_->truncate(sequence, tokens); !s) return s;
  return from_mirror({*slot});
}

Result<int32_t> CodedDeviceStore::num_tokens(SequenceId sequence) {
  return mirror_->num_tokens(sequence);
}

Result<StoreStats> CodedDeviceStore::stats() {
  Slots open;
  for (int32_t slot = 0; slot < config().max_sequences; ++slot) {
    if (table().phase(slot) != SequencePhase::kFree) open.push_back(slot);
  }
  if (Status s = to_mirror(open, Content::kBlocks); !s) return s;
  unsigned long long fixed = 0;
  if (state_.s.fixed.format.any()) {  // what blocks are only their bytes say
    const cudaError_t error = cudaMemsetAsync(fixed_count_, 0, sizeof(fixed), stream_);
    if (error != cudaSuccess) return cuda_status(error, "stats");
    if (Status s = count_fixed_blocks(state_, fixed_count_, stream_); !s) return s;
    if (Status s = copy(&fixed, fixed_count_, sizeof(fixed)); !s) return s;
    if (Status s = wait(); !s) return s;
  }
  return mirror_->count_stats(static_cast<int64_t>(fixed));
}

Result<std::vector<uint8_t>> CodedDeviceStore::export_sequence(SequenceId sequence) {
  const Result<int32_t> slot = table().complete_live_slot_of(sequence);
  if (!slot) return slot.status();
  if (Status s = to_mirror({*slot}, Content::kPages); !s) return s;
  return mirror_->export_sequence(sequence);
}

Result<SequenceId> CodedDeviceStore::import_sequence(const uint8_t* bytes, size_t size) {
  if (Status s = to_mirror({}, Content::kBlocks); !s) return s;
  const Result<SequenceId> id = mirror_->import_sequence(bytes, size);
  if (!id) return id;
  if (Status s = from_mirror({id->slot}); !s) return s;
  return id;
}

Result<const CodedHostStore*> CodedDeviceStore::download() {
  Slots open;
  for (int32_t slot = 0; slot < config().max_sequences; ++slot) {
    if (table().phase(slot) != SequencePhase::kFree) open.push_back(slot);
  }
  if (Status s = to_mirror(open, Content::kPages); !s) return s;
  return static_cast<const CodedHostStore*>(mirror_.get());
}

}  // namespace tierkv

// The calls of the device back end that go through host memory, and take_status().

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "codec/cuda_device.cuh"
#include "store/device_store.h"

namespace tierkv {
namespace {

const char* name_of(DeviceCall call) {
  constexpr const char* kNames[] = {"store",      "begin_prompt", "append",        "score_prompt",
                                    "end_prompt", "begin_step",   "update_scores", "attend"};
  return kNames[static_cast<int32_t>(call)];
}

std::string text_of(const DeviceFailure& f) {
  std::string text = name_of(f.call);
  if (f.layer >= 0) text += ", layer " + std::to_string(f.layer);
  if (f.slot >= 0) text += ", sequence " + std::to_string(f.slot);
  return text;
}

}  // namespace

Status DeviceStore::copy(void* to, const void* from, size_t bytes) {
  return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copy");
}

Status DeviceStore::settle() {
  DeviceFailure failure;
  if (Status s = copy(&failure, state_.failure, sizeof(failure)); !s) return s;
  if (Status s = cuda_status(cudaStreamSynchronize(stream_), "wait"); !s) return s;
  if (failure.status == StatusCode::kOk) return Status::ok();
  return Status(StatusCode::kInvalidArgument,
                "take_status() has a failure to tell: " + text_of(failure));
}

Status DeviceStore::take_status() {
  DeviceFailure failure;
  if (Status s = copy(&failure, state_.failure, sizeof(failure)); !s) return s;
  if (Status s = cuda_status(cudaStreamSynchronize(stream_), "wait"); !s) return s;
  if (failure.status == StatusCode::kOk) return Status::ok();
  if (Status s = copy(state_.failure, &kNoFailure, sizeof(kNoFailure)); !s) return s;
  if (Status s = read_bookkeeping(); !s) return s;
  return Status(failure.status, text_of(failure));
}

Status DeviceStore::read_bookkeeping() {
  const CacheLayout& layout = config().layout;
  const int32_t sequences = config().max_sequences, heads = layout.num_kv_heads;
  std::vector<SequenceInfo> infos(sequences);
  std::vector<int32_t> appended(static_cast<size_t>(sequences) * rows_per_sequence());
  if (Status s = copy(infos.data(), state_.s.infos, infos.size() * sizeof(SequenceInfo)); !s)
    return s;
  if (Status s = copy(appended.data(), state_.appended, appended.size() * sizeof(int32_t)); !s)
    return s;
  if (Status s = cuda_status(cudaStreamSynchronize(stream_), "wait"); !s) return s;
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
Status DeviceStore::for_each_page(int32_t slot, Copy copy_page) {
  const StoreView& host = mirror_->view_;
  for (int32_t w = 0; w < rows_per_sequence(); ++w) {
    const int32_t row = slot * rows_per_sequence() + w;
    for (int32_t side = 0; side < kStoreSides; ++side) {
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

Status DeviceStore::to_mirror(const Slots& slots) {
  if (Status s = settle(); !s) return s;
  const size_t bytes = allocator_bytes(state_.s.allocator.shape).total;
  if (Status s = copy(mirror_->allocator_memory_.get(), allocator_memory_, bytes); !s) return s;
  if (Status s = cuda_status(cudaStreamSynchronize(stream_), "wait"); !s) return s;
  const auto download_page = [this](int32_t, uint8_t* device, uint8_t* host) {
    return copy(host, device, page_bytes());
  };
  for (const int32_t slot : slots) {
    if (Status s = for_each_page(slot, download_page); !s) return s;
  }
  return cuda_status(cudaStreamSynchronize(stream_), "wait");
}

Status DeviceStore::from_mirror(const Slots& slots) {
  const StoreView& host = mirror_->view_;
  const size_t bytes = allocator_bytes(host.allocator.shape).total;
  if (Status s = copy(allocator_memory_, mirror_->allocator_memory_.get(), bytes); !s) return s;
  const auto upload_page = [this, &host](int32_t page, uint8_t* to, uint8_t* from) {
    return is_frozen(host.allocator, page) ? Status::ok() : copy(to, from, page_bytes());
  };
  std::vector<int32_t> appended(rows_per_sequence());
  for (const int32_t slot : slots) {
    if (Status s = for_each_page(slot, upload_page); !s) return s;
    const SequenceInfo& info = host.infos[slot];
    if (Status s = copy(state_.s.infos + slot, &info, sizeof(info)); !s) return s;
    appended.assign(appended.size(), info.num_tokens);
    int32_t* to = state_.appended + static_cast<int64_t>(slot) * rows_per_sequence();
    if (Status s = copy(to, appended.data(), appended.size() * sizeof(int32_t)); !s) return s;
    if (Status s = cuda_status(cudaStreamSynchronize(stream_), "wait"); !s) return s;
  }
  calls_.forget_plans();
  return Status::ok();
}

Status DeviceStore::truncate(SequenceId sequence, int32_t tokens) {
  const Result<int32_t> slot = table().complete_slot_of(sequence);
  if (!slot) return slot.status();
  if (Status s = to_mirror({*slot}); !s) return s;
  if (Status s = mirror_->truncate(sequence, tokens); !s) return s;
  return from_mirror({*slot});
}

Result<int32_t> DeviceStore::num_tokens(SequenceId sequence) {
  return mirror_->num_tokens(sequence);
}

Result<StoreStats> DeviceStore::stats() {
  if (Status s = to_mirror({}); !s) return s;
  return mirror_->stats();
}

Result<std::vector<uint8_t>> DeviceStore::export_sequence(SequenceId sequence) {
  const Result<int32_t> slot = table().complete_live_slot_of(sequence);
  if (!slot) return slot.status();
  if (Status s = to_mirror({*slot}); !s) return s;
  return mirror_->export_sequence(sequence);
}

Result<SequenceId> DeviceStore::import_sequence(const uint8_t* bytes, size_t size) {
  if (Status s = to_mirror({}); !s) return s;
  const Result<SequenceId> id = mirror_->import_sequence(bytes, size);
  if (!id) return id;
  if (Status s = from_mirror({id->slot}); !s) return s;
  return id;
}

Result<StoreView> DeviceStore::download() {
  Slots open;
  for (int32_t slot = 0; slot < config().max_sequences; ++slot) {
    if (table().phase(slot) != SequencePhase::kFree) open.push_back(slot);
  }
  if (Status s = to_mirror(open); !s) return s;
  return mirror_->view_;
}

}  // namespace tierkv

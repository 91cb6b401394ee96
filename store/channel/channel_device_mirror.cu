// The calls of a channel-wise store's device back end that go through host memory, and
// take_status().

#include <cuda_runtime.h>

#include "store/channel/channel_device.h"

namespace tierkv {

Status ChannelDeviceStore::take_status() {
  const Status status = sequences_.take_status();
  if (!status) forget_plans();
  return status;
}

Slots ChannelDeviceStore::open_slots() {
  Slots open;
  for (int32_t slot = 0; slot < config().max_sequences; ++slot) {
    if (table().phase(slot) != SequencePhase::kFree) open.push_back(slot);
  }
  return open;
}

template <class Copy>
Status ChannelDeviceStore::for_each_page(int32_t slot, Copy copy_page) {
  const ChannelView& host = mirror_->view_;
  for (int32_t w = 0; w < host.rows_per_sequence(); ++w) {
    const int32_t row = slot * host.rows_per_sequence() + w;
    for (const int32_t side : {kBlockSide, kResidualSide}) {
      for (int32_t i = 0; i < host.allocator.pages[row].of[side]; ++i) {
        const int32_t page = host.page_ids(row, side)[i];
        if (Status s = copy_page(page, state_.s.page_bytes(page), host.page_bytes(page)); !s) {
          return s;
        }
      }
    }
  }
  return Status::ok();
}

Status ChannelDeviceStore::to_mirror(const Slots& slots) {
  if (Status s = sequences_.settle(); !s) return s;
  const size_t bytes = allocator_bytes(state_.s.allocator.shape).total;
  void* tables = mirror_->pool_.allocator_memory();
  if (Status s = sequences_.copy(tables, sequences_.allocator_memory(), bytes); !s) return s;
  if (Status s = sequences_.wait(); !s) return s;
  for (const int32_t slot : slots) {
    const auto download_page = [this](int32_t, uint8_t* device, uint8_t* host) {
      return sequences_.copy(host, device, page_bytes());
    };
    if (Status s = for_each_page(slot, download_page); !s) return s;
  }
  return sequences_.wait();
}

Status ChannelDeviceStore::from_mirror(int32_t slot) {
  const PageAllocator& host = mirror_->view_.allocator;
  const size_t bytes = allocator_bytes(host.shape).total;
  const void* tables = mirror_->pool_.allocator_memory();
  if (Status s = sequences_.copy(sequences_.allocator_memory(), tables, bytes); !s) return s;
  const auto upload_page = [this, &host](int32_t page, uint8_t* to, uint8_t* from) {
    return is_frozen(host, page) ? Status::ok() : sequences_.copy(to, from, page_bytes());
  };
  if (Status s = for_each_page(slot, upload_page); !s) return s;
  forget_plans();
  return sequences_.send_info(slot);
}

Result<SequenceId> ChannelDeviceStore::fork(SequenceId source) {
  const Result<int32_t> slot = table().complete_live_slot_of(source);
  if (!slot) return slot.status();
  if (Status s = to_mirror({*slot}); !s) return s;
  const Result<SequenceId> copy_id = mirror_->fork(source);
  if (!copy_id) return copy_id;
  if (Status s = from_mirror(copy_id->slot); !s) return s;
  return copy_id;
}

Status ChannelDeviceStore::truncate(SequenceId sequence, int32_t tokens) {
  const Result<int32_t> slot = table().complete_slot_of(sequence);
  if (!slot) return slot.status();
  if (Status s = to_mirror({*slot}); !s) return s;
  if (Status s = mirror_->truncate(sequence, tokens); !s) return s;
  return from_mirror(*slot);
}

Result<int32_t> ChannelDeviceStore::num_tokens(SequenceId sequence) {
  return mirror_->num_tokens(sequence);
}

Result<StoreStats> ChannelDeviceStore::stats() {
  if (Status s = to_mirror({}); !s) return s;
  return mirror_->stats();
}

Result<std::vector<uint8_t>> ChannelDeviceStore::export_sequence(SequenceId sequence) {
  const Result<int32_t> slot = table().complete_live_slot_of(sequence);
  if (!slot) return slot.status();
  if (Status s = to_mirror({*slot}); !s) return s;
  return mirror_->export_sequence(sequence);
}

Result<SequenceId> ChannelDeviceStore::import_sequence(const uint8_t* bytes, size_t size) {
  if (Status s = to_mirror({}); !s) return s;
  const Result<SequenceId> id = mirror_->import_sequence(bytes, size);
  if (!id) return id;
  if (Status s = from_mirror(id->slot); !s) return s;
  return id;
}

Result<const ChannelHostStore*> ChannelDeviceStore::download() {
  if (Status s = to_mirror(open_slots()); !s) return s;
  return static_cast<const ChannelHostStore*>(mirror_.get());
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// Making a store in device memory.
#include <cuda_runtime.h>

#include <string>
#include <utility>
#include <variant>

#include "gpu/cuda_device.cuh"
#include "store/place/device/device_place.h"

namespace tierkv {

Result<std::unique_ptr<KvStore>> KvStore::create_device(const StoreConfig& config,
                                                        GpuStream stream) {
  if (Status s = config.validate(); !s) return s;
  const StoreConfig resolved = store::resolve(config);
  Result<std::unique_ptr<store::DevicePlace>> place = store::DevicePlace::make(resolved, stream);
  if (!place) return place.status();
  return store::Engine::make(resolved, std::move(*place));
}

namespace store {
namespace {

constexpr int32_t kMostGroup = 16;

Result<std::unique_ptr<DeviceRowFormat>> make_device_row_format(const StoreConfig& config,
                                                                RowFormat* host) {
  if (std::holds_alternative<CodedFormat>(config.format)) {
    return make_device_coded_rows(config, host);
  }
  if (std::holds_alternative<TiersFormat>(config.format)) {
    return make_device_tiers_rows(config, host);
  }
  return make_device_channel_rows(config, host);
}

}  // namespace

Result<std::unique_ptr<DevicePlace>> DevicePlace::make(const StoreConfig& config,
                                                       GpuStream stream) {
  if (config.layout.group_size() > kMostGroup) {
    return Status(StatusCode::kUnsupported,
                  "layout.num_q_heads: more than 16 for a kv_head, in a store on a device");
  }
  auto place = std::unique_ptr<DevicePlace>(new DevicePlace(config, stream));
  if (Status s = cuda_status(cudaGetDevice(&place->device_), "create_device"); !s) return s;
  Result<std::unique_ptr<RowFormat>> host = make_row_format(config);
  if (!host) return host.status();
  place->host_format_ = std::move(*host);
  Result<std::unique_ptr<DeviceRowFormat>> format =
      make_device_row_format(config, place->host_format_.get());
  if (!format) return format.status();
  place->format_ = std::move(*format);
  if (Status s = place->allocate(); !s) return s;
  return std::unique_ptr<DevicePlace>(std::move(place));
}

DevicePlace::~DevicePlace() {
  (void)cudaStreamSynchronize(stream_);
}

DeviceStoreView DevicePlace::view_of(const StoreLayout& layout, const PageAllocator& allocator,
                                     uint8_t* pages, uint8_t* slots) const {
  DeviceStoreView view;
  static_cast<RawRows&>(view) = layout;
  view.pages = {allocator, pages, layout.page_bytes, host_format_->sizes().rows_per_layer};
  view.slots = {slots, layout.slot_bytes, layout.layer_bytes, layout.raw_bytes};
  view.num_layers = config_.layout.num_layers;
  view.num_kv_heads = config_.layout.num_kv_heads;
  view.head_dim = config_.layout.head_dim;
  return view;
}

// What the format takes beside pages and slots, which it says once it is bound.
Result<int64_t> DevicePlace::measure_format(const StoreLayout& layout) const {
  Result<std::unique_ptr<DeviceRowFormat>> format =
      make_device_row_format(config_, host_format_.get());
  if (!format) return format.status();
  PageAllocator allocator;
  allocator.shape = layout.allocator;
  const DeviceStoreView view = view_of(layout, allocator, nullptr, nullptr);
  if (Status s = (*format)->bind(view, nullptr, stream_); !s) return s;
  if (Status s = wait(); !s) return s;
  return (*format)->workspace_bytes();
}

Status DevicePlace::take_word() {
  const Result<PinnedMemory> word = pinned_memory(sizeof(uint64_t));
  if (!word) return word.status();
  word_ = *word;
  void* mapped = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&mapped, word_.get(), 0);
  published_ = static_cast<uint64_t*>(mapped);
  return cuda_status(error, "create_device");
}

Status DevicePlace::allocate() {
  const Result<StoreLayout> whole = store_layout(config_, *host_format_);
  if (!whole) return whole.status();
  const Result<int64_t> workspace_of_format = measure_format(*whole);
  if (!workspace_of_format) return workspace_of_format.status();
  const int64_t sequences = config_.max_sequences, layers = config_.layout.num_layers;
  const int64_t rows = sequences * whole->allocator.table.rows_per_sequence;
  const auto workspace_bytes =
      static_cast<int64_t>(page_op_workspace_bytes(whole->allocator, config_.max_sequences));
  uint8_t *pages = nullptr, *tables = nullptr, *slots = nullptr, *workspace = nullptr;
  const auto take = [&](int64_t count, auto**... memory) {
    memory_.take_zeros(stream_, count, memory...);
  };
  take(workspace_bytes, &workspace);
  take(sequences * layers, &counts_);
  for (DeviceBatch& b : batches_) {
    take(sequences, &b.slots);
    take(sequences * layers, &b.from, &b.to, &b.at);
  }
  take(rows, &kept_, &target_);
  take(rows * kMaxSides, &copies_);
  take(1, &report_, &needs_, &least_free_, &fault_);
  take(2, &op_slots_);
  take(2 + sequences, &replayed_);
  take(sequences * kMaxStepTokens * config_.layout.num_q_heads, &raw_lse_, &whole_lse_);
  take(sequences * config_.layout.num_kv_heads * kKeptTiles * kTileTokens * kRawColumns,
       &kept_scores_);
  if (!memory_.status()) return memory_.status();
  StoreConfig rest = config_;
  const int64_t workspaces = memory_.bytes() + *workspace_of_format;
  rest.memory_bytes -= workspaces;
  const Result<StoreLayout> layout = store_layout(rest, *host_format_);
  if (!layout) {
    return Status(StatusCode::kOutOfRange,
                  "memory_bytes: " + std::to_string(config_.memory_bytes) +
                      " is too little on a device, where workspaces take " +
                      std::to_string(workspaces));
  }
  layout_ = *layout;
  const auto tables_bytes = static_cast<int64_t>(allocator_bytes(layout_.allocator).total);
  take(layout_.page_bytes * layout_.allocator.num_pages, &pages);
  take(tables_bytes, &tables);
  take(layout_.slot_bytes * sequences, &slots);
  if (!memory_.status()) return memory_.status();
  if (Status s = take_word(); !s) return s;
  op_workspace_ = {workspace, static_cast<size_t>(workspace_bytes)};
  const Result<PageAllocator> a =
      make_page_allocator(layout_.allocator, tables, static_cast<size_t>(tables_bytes));
  if (!a) return a.status();
  if (Status s = initialize_device(*a, stream_); !s) return s;
  const int64_t num_pages = layout_.allocator.num_pages;
  auto* const word = static_cast<uint64_t*>(word_.get());
  *word = static_cast<uint64_t>(num_pages) << 32 | 1u;
  free_.set(word);
  if (Status s = clear_fault(); !s) return s;
  if (Status s = copy(least_free_, &num_pages, sizeof(num_pages)); !s) return s;
  view_ = view_of(layout_, *a, pages, slots);
  if (Status s = format_->bind(view_, fault_, stream_); !s) return s;
  return wait();
}

}  // namespace store
}  // namespace tierkv

#include "store/rows/coded/device_coded_rows.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "attention/coded/coded_attention.h"
#include "gpu/cuda_device.cuh"
#include "store/rows/coded/device_attend.cuh"
#include "store/rows/coded/device_coded_format.cuh"

namespace tierkv::store {
namespace {

template <class Body>
__global__ void __launch_bounds__(Body::kThreads) run_body(const __grid_constant__ Body body) {
  extern __shared__ __align__(1024) uint8_t shared[];
  body(shared);
}
template <class Body>
__global__ void __launch_bounds__(Body::kThreads, Body::kCtas)
    run_dense_body(const __grid_constant__ Body body) {
  extern __shared__ __align__(1024) uint8_t shared[];
  body(shared);
}

class CudaMachine {
 public:
  explicit CudaMachine(const DeviceLimits& limits) : limits_(limits) {}

  void set_stream(GpuStream stream) { stream_ = stream; }
  GpuStream stream() const { return stream_; }
  int32_t sms() const { return limits_.sms; }
  int32_t shared_bytes() const { return limits_.shared_bytes; }

  Status allocate(int64_t bytes, const char* what, void** memory) const {
    return device_allocate(static_cast<size_t>(bytes), what, memory);
  }
  void free(void* memory) const {
    if (memory != nullptr) (void)cudaFree(memory);
  }
  Status upload(void* to, const void* from, int64_t bytes) const {
    if (bytes == 0) return Status::ok();
    return cuda_status(
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_),
        "coded rows: upload");
  }
  Status download(void* to, const void* from, int64_t bytes) const {
    Status s = cuda_status(
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
        "coded rows: download");
    return s ? cuda_status(cudaStreamSynchronize(stream_), "coded rows: download") : s;
  }
  Status clear(void* memory, int64_t bytes) const {
    return cuda_status(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream_),
                       "coded rows: clear");
  }
  template <class Body>
  Status launch(const Body& body, MachineGrid grid, int32_t shared, int32_t threads) const {
    void (*kernel)(const Body);
    if constexpr (requires { Body::kCtas; }) {
      kernel = run_dense_body<Body>;
    } else {
      kernel = run_body<Body>;
    }
    if (shared > 0) {
      Status s = cuda_status(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
          "coded rows: shared memory");
      if (!s) return s;
    }
    kernel<<<dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y)),
             static_cast<unsigned>(threads), static_cast<size_t>(shared), stream_>>>(body);
    return cuda_status(cudaGetLastError(), "coded rows: kernel launch");
  }

 private:
  DeviceLimits limits_;
  GpuStream stream_ = nullptr;
};

// A slice that is coded has fewer bytes: words of pairs, all exceptions, and what precedes them.
int32_t most_coded_slice_bytes(const CodedFormat& format, int32_t head_dim) {
  const int32_t dims = std::min(head_dim, kSliceDims);
  const int32_t words = kBlockTokens * dims / 2 * format.max_length / 8;
  const int32_t lengths = kWarpLanes * format.streams_per_lane * kMaxLengthBits / 8;
  return static_cast<int32_t>(round_up(kCodedBlockHeaderBytes + kBlockTokens + lengths + words +
                                           kExceptionBytes * kMaxWeightedExceptions + 8,
                                       kBlockAlignment));
}

class CudaCodedRows final : public DeviceCodedRows<CudaMachine> {
 public:
  using Base = DeviceCodedRows<CudaMachine>;
  using Base::Base;
  ~CudaCodedRows() override { machine_.free(attention_memory_); }

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) override;
  int64_t workspace_bytes() const override { return memory_bytes_ + attention_bytes_; }
  Status attend(const DeviceAttendBody& body) override;

 private:
  CodedAttention call_of_layer(int32_t layer) const;
  Status attend_rows(const DeviceAttendBody& body, AttendedRows which);

  void* attention_memory_ = nullptr;
  int64_t attention_bytes_ = 0;
  CodedRow* rows_ = nullptr;  // [max_sequences, heads]
  int32_t* item_count_ = nullptr;
  StatusCode* row_status_ = nullptr;
  uint8_t* workspace_ = nullptr;
  std::vector<WeightedRows> weighted_;  // of each layer: its turns
};

int64_t most_workspace_bytes(CodedAttention call, int32_t most_rows, const DeviceLimits& limits) {
  call.num_rows = most_rows;
  call.q_len = kMaxStepTokens;
  call.dtype = DType::kBFloat16;
  CodedAttentionGrid grid;
  grid.num_ctas = limits.sms;
  grid.warps = coded_warps(call.head_dim);
  return static_cast<int64_t>(coded_attention_workspace_bytes(call, grid));
}

Status CudaCodedRows::bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) {
  machine_.set_stream(stream);
  if (Status s = Base::bind(view, fault, stream); !s) return s;
  if (view.slots.slot_bytes / 8 * config_.max_sequences > INT32_MAX) {
    return Status(StatusCode::kUnsupported, "coded rows: slots of more than 16 GiB on a device");
  }
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  const int32_t rows = config_.max_sequences * heads();
  const int64_t workspace = most_workspace_bytes(call_of_layer(0), rows, *limits);
  std::vector<WeightedTurns> made;
  std::vector<int32_t> turns_of(layers(), -1);
  for (int32_t l = 0; l < layers(); ++l) {
    const RopeTable* rope = host_->rope(l);
    if (rope == nullptr || host_->is_raw_layer(l)) continue;
    for (int32_t other = 0; other < l; ++other) {
      if (host_->rope(other) == rope && turns_of[other] >= 0) turns_of[l] = turns_of[other];
    }
    if (turns_of[l] >= 0) continue;
    Result<WeightedTurns> turns = weighted_turns(*rope, head_dim(), device_.shape.sink_tokens);
    if (!turns) return turns.status();
    turns_of[l] = static_cast<int32_t>(made.size());
    made.push_back(std::move(*turns));
  }
  std::vector<std::pair<uint16_t*, float*>> at(made.size());
  const auto carve = [&](Carving* memory) {
    rows_ = memory->take<CodedRow>(rows);
    item_count_ = memory->take<int32_t>(1);
    row_status_ = memory->take<StatusCode>(rows);
    workspace_ = memory->take<uint8_t>(workspace);
    for (size_t i = 0; i < made.size(); ++i) {
      at[i].first = memory->take<uint16_t>(static_cast<int64_t>(made[i].place.size()));
      at[i].second = memory->take<float>(static_cast<int64_t>(made[i].block.size()));
    }
  };
  Carving sizes{nullptr};
  carve(&sizes);
  attention_bytes_ = sizes.bytes;
  if (Status s = machine_.allocate(attention_bytes_, "attention of coded rows", &attention_memory_);
      !s) {
    return s;
  }
  Carving memory{static_cast<uint8_t*>(attention_memory_)};
  carve(&memory);
  for (size_t i = 0; i < made.size(); ++i) {
    const std::vector<uint16_t>& place = made[i].place;
    const std::vector<float>& block = made[i].block;
    Status of_place =
        machine_.upload(at[i].first, place.data(), static_cast<int64_t>(2 * place.size()));
    if (!of_place) return of_place;
    Status of_block =
        machine_.upload(at[i].second, block.data(), static_cast<int64_t>(4 * block.size()));
    if (!of_block) return of_block;
  }
  weighted_.assign(layers(), WeightedRows{});
  for (int32_t l = 0; l < layers(); ++l) {
    WeightedRows& w = weighted_[l];
    w.key_scales = device_.tables.query_scales;
    w.key_means = device_.tables.query_means;
    w.sink_tokens = device_.shape.sink_tokens;
    w.blocks_only = true;
    if (turns_of[l] < 0) continue;
    const RopeTable& rope = *host_->rope(l);
    w.place_turns = at[turns_of[l]].first;
    w.block_turns = at[turns_of[l]].second;
    w.num_block_turns = rope.blocks;
    w.rotary_dims = 2 * rope.pairs;
    w.pairing = rope.pairing;
  }
  return Status::ok();
}

// Of any rows of a layer, but for what its codebooks are.
CodedAttention CudaCodedRows::call_of_layer(int32_t layer) const {
  CodedAttention call;
  for (const Component c : {Component::kKey, Component::kValue}) {
    CodedComponent& of = c == Component::kKey ? call.keys : call.values;
    of.bytes = device_.view.pages.base;
    of.size = device_.pool_bytes;
    of.blocks = directory(0, layer, c);
    of.steps = c == Component::kKey ? device_.tables.query_units : device_.tables.value_steps;
  }
  // The directory of values begins behind that of keys.
  const auto* end = reinterpret_cast<const CodedBlockRef*>(
      device_.view.slots.base + device_.view.slots.slot_bytes * config_.max_sequences);
  call.num_blocks = static_cast<int32_t>(std::min<int64_t>(end - call.values.blocks, INT32_MAX));
  call.num_steps = device_.tables.rows;
  call.columns = config_.layout.num_q_heads / heads();
  call.head_dim = head_dim();
  call.num_kv_heads = heads();
  call.sm_scale = static_cast<float>(config_.layout.sm_scale);
  call.max_block_bytes = most_coded_slice_bytes(host_->format(), head_dim());
  return call;
}

Status CudaCodedRows::attend_rows(const DeviceAttendBody& body, AttendedRows which) {
  const MakeAttentionRows make{device_, body, which, rows_, item_count_};
  if (Status s = machine_.launch(make, MachineGrid{}, 8 * body.count, MakeAttentionRows::kThreads);
      !s) {
    return s;
  }
  CodedAttention call = call_of_layer(body.layer);
  if (which == AttendedRows::kCoded) {
    call.weighted = weighted_[body.layer];
    for (const Component c : {Component::kKey, Component::kValue}) {
      CodedComponent& of = c == Component::kKey ? call.keys : call.values;
      of.codebook = host_books_[2 * body.layer + static_cast<int32_t>(c)];
    }
  } else {
    call.raw_blocks = true;
  }
  call.rows = rows_;
  call.q = body.q, call.out = body.out, call.lse = body.lse;
  call.row_status = row_status_;
  call.workspace = workspace_;
  call.item_count = item_count_;
  call.num_rows = body.count * heads();
  call.num_items = call.num_rows * block_count(std::min(body.most_tokens, config_.max_tokens));
  call.q_len = body.q_len;
  call.dtype = body.dtype;
  const Result<CodedAttentionGrid> grid = coded_attention_grid(call);
  if (!grid) return grid.status();
  return attend_coded(call, *grid, machine_.stream());
}

Status CudaCodedRows::attend(const DeviceAttendBody& body) {
  const bool has_books = host_layers_[body.layer].families[0].books != nullptr;
  if (host_->is_raw_layer(body.layer) || !has_books) {
    return attend_rows(body, AttendedRows::kAllAsRaw);
  }
  Status s = attend_rows(body, AttendedRows::kCoded);
  return s && states_.any_waits(body.layer) ? attend_rows(body, AttendedRows::kRaw) : s;
}

}  // namespace

Result<std::unique_ptr<DeviceRowFormat>> make_device_coded_rows(const StoreConfig& config,
                                                                RowFormat* host) {
  auto* const coded = static_cast<CodedRows*>(host);
  if (coded->format().key_books > 1) {
    return Status(StatusCode::kUnsupported, "format.key_books: a device takes 1");
  }
  for (int32_t l = 0; l < config.layout.num_layers; ++l) {
    if (coded->is_raw_layer(l) || coded->needs_tokens(l)) continue;
    for (int32_t h = 0; h < config.layout.num_kv_heads; ++h) {
      const Result<WeightedRow> row = coded->fit_row(l, h, {});
      const Status s = row ? weighted_key_channels(*row).status() : row.status();
      if (!s) {
        return s.with_context("profile, layer " + std::to_string(l) + ", kv_head " +
                              std::to_string(h));
      }
    }
  }
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  return std::unique_ptr<DeviceRowFormat>(
      std::make_unique<CudaCodedRows>(config, coded, CudaMachine(*limits)));
}

}  // namespace tierkv::store

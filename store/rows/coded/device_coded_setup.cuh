// SPDX-License-Identifier: Apache-2.0
// Device memory of coded rows, and what it holds for all sequences: tables of rows, rotations,
// codebooks. Kernels are structs: all threads call one with the CTA's shared memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "codec/format/coded_block_format.h"
#include "codec/format/weighted_step.h"
#include "codec/gpu/coded/coded_batch.h"
#include "codec/host/coded/weighted_rows.h"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"
#include "store/rows/coded/coded_rows.h"
#include "store/rows/coded/device_coded_call.cuh"
#include "store/rows/device_memory.cuh"

namespace tierkv::store {

// CTAs of a Body that an SM has at once; 0: as the compiler likes.
template <class Body>
inline constexpr int32_t kCtasOf = [] {
  if constexpr (requires { Body::kCtas; }) return Body::kCtas;
  return 0;
}();
// A Body with is_settled touches nothing that the kernel before it writes, and writes nothing that
// that one reads; and that kernel has let this one start only when all work before it had ended.
template <class Body>
__global__ void __launch_bounds__(Body::kThreads, kCtasOf<Body>)
    run_body(const __grid_constant__ Body body) {
  extern __shared__ __align__(1024) uint8_t shared[];
  if constexpr (requires { body.is_settled; }) {
    if (!body.is_settled) wait_for_previous_kernel();
    let_next_kernel_start();
    body(shared);
    wait_for_previous_kernel();  // whoever waits for this kernel waits for that one
  } else {
    wait_for_previous_kernel();
    body(shared);
  }
}

// ---- means and steps of rows into the tables that kernels read ----

// As MakeRowTables takes it.
inline void put_record(const WeightedRow& row, uint8_t* record) {
  CodedRowState state;
  state.key_step = row.key_step, state.value_step = row.value_step;
  std::memcpy(record, &state, sizeof(state));
  if (row.key_mean.empty()) return;
  std::memcpy(record + sizeof(state), row.key_mean.data(), 2 * row.key_mean.size());
}

// A warp for a row of layers of a slot. records: [layers, kv_heads] of a CodedRowState and means,
// record_bytes() apart; null: those of the layers that are fixed.
struct MakeRowTables {
  static constexpr int32_t kThreads = 128;
  CodedDevice device;
  const uint8_t* records = nullptr;
  int32_t slot = 0;
  Positions layers;

  __device__ void operator()(uint8_t*) const {
    const int32_t heads = device.heads();
    for (int32_t i = warp_of_grid(); i < layers.count() * heads; i += warps_of_grid()) {
      const int32_t layer = layers.first + i / heads, h = i % heads;
      const uint8_t* record = records + i * device.shape.record_bytes();
      if (records == nullptr) {
        if (!device.is_fixed(slot, layer)) continue;
        record = device.state<uint8_t>(slot, layer, device.shape.row_byte(h));
      }
      make(device.row(slot, layer, h), layer * heads + h, record);
    }
  }

 private:
  // What quantises the row, and its part of WeightedRows. constants: the row's place among the
  // layers' rows.
  __device__ void make(int32_t row, int32_t constants, const uint8_t* record) const {
    const auto& state = *reinterpret_cast<const CodedRowState*>(record);
    const auto* means = reinterpret_cast<const uint16_t*>(record + sizeof(CodedRowState));
    const DeviceRowTables& to = device.tables;
    const int32_t dims = device.shape.head_dim;
    const int64_t first = int64_t{row} * dims;
    float largest = 0;
    for (int32_t d = lane_index(); d < dims; d += kWarpLanes) {
      const float scale = scale_of(state.key_step, constants, d);
      to.key_scales[first + d] = scale;
      to.key_means[first + d] = means[d];
      largest = largest > scale ? largest : scale;
    }
    for (int32_t i = 16; i > 0; i /= 2) {
      const float other = __shfl_xor_sync(kFullWarp, largest, i);
      largest = largest > other ? largest : other;
    }
    for (int32_t i = lane_index(); i < dims; i += kWarpLanes) {
      to.query_scales[first + i] = div_rn(scale_of(state.key_step, constants, i), 2 * largest);
      const int32_t pair = i / 2 % 4, lane = i / 8 % 4;
      const int32_t f = key_block_at(dims / kDimBlock, i / 32 * 2 + pair / 2);
      const int32_t d = f * kDimBlock + pair % 2 * 8 + lane * 2 + i % 2;
      const float mean = mul_rn(0x1p-9f, half_to_float(means[d]));
      to.query_means[first + i] =
          float_to_half(div_rn(mean, scale_of(state.key_step, constants, d)));
    }
    if (lane_index() != 0) return;
    to.key_steps[row] = state.key_step;
    to.value_steps[row] = state.value_step;
    to.query_units[row] = mul_rn(0x1p10f, largest);
  }
  __device__ float scale_of(float step, int32_t constants, int32_t d) const {
    const float* weights = device.tables.key_weights;
    return dim_scale(step, weights[int64_t{constants} * device.shape.head_dim + d]);
  }
};

// What the host knows of the blocks of a (sequence, layer), whose kernels may still be under way.
struct LayerState {
  bool fixed = false, waits = false;  // coded, or raw blocks; neither where only replays made some
  bool shares = false;                // another sequence may read the pages of the newest block
};

inline constexpr int32_t kCheapestOfBook = 128;

// The part of DeviceCodedRows that all others need.
class CodedMemory : public DeviceRowFormat {
 public:
  // Staging memory, unless the store's longest call takes less.
  static constexpr int64_t kStagingBytes = int64_t{64} << 20;

  CodedMemory(const StoreConfig& config, CodedRows* host) : config_(config), host_(host) {}

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) override {
    const Result<DeviceLimits> limits = device_limits();
    if (!limits) return limits.status();
    limits_ = *limits;
    stream_ = stream;
    device_.view = view;
    device_.shape = host_->shape();
    device_.fault = fault;
    device_.pool_bytes = int64_t{view.pages.allocator.shape.num_pages} * view.pages.page_bytes;
    states_.assign(size_t{1} * config_.max_sequences * layers(), {});
    for (int32_t l = 0; l < layers(); ++l) {
      per_slot_ |= !host_->is_raw_layer(l) && host_->needs_tokens(l);
    }
    if (Status s = take_memory(); !s) return s;
    if (Status s = upload_tables(); !s) return s;
    scratch_.device = device_;
    return Status::ok();
  }
  int64_t workspace_bytes() const override { return memory_.bytes(); }
  void released(int32_t slot) override { std::fill_n(&state_of(slot, 0), layers(), LayerState{}); }
  Status download_shared(RowFormat* host) override {
    auto* const to = static_cast<CodedRows*>(host);
    // Books of a layer stay what they are once it has some.
    for (int32_t l = 0; l < layers(); ++l) {
      if (to->books(l).empty() != host_->books(l).empty()) to->set_books(l, host_->books(l));
    }
    return Status::ok();
  }

  Status upload_shared(const RowFormat& host, std::span<const HostLayer> imported) override {
    const auto& from = static_cast<const CodedRows&>(host);
    bool any_new = false;
    for (int32_t l = 0; l < layers(); ++l) {
      if (from.books(l).empty() || has_books(l)) continue;
      if (Status s = upload_books(l, from.books(l)); !s) return s;
      set_books(l, from.books(l));
      any_new = true;
    }
    if (any_new) {
      if (Status s = upload_layers(); !s) return s;
    }
    for (const HostLayer& layer : imported) {
      LayerState& state = state_of(layer.slot, layer.layer);
      state.fixed = from.is_fixed(layer), state.waits = !state.fixed && layer.at.body_end > 0;
    }
    if (!per_slot_) return Status::ok();
    return make_row_tables(nullptr, imported[0].slot, {0, layers()});
  }

  // For tests: fewer bytes of staging memory, before bind().
  void set_staging_bytes(int64_t bytes) { staging_bytes_ = bytes; }

 protected:
  int32_t layers() const { return config_.layout.num_layers; }
  int32_t heads() const { return config_.layout.num_kv_heads; }
  int32_t head_dim() const { return config_.layout.head_dim; }
  bool has_books(int32_t layer) const { return !host_->books(layer).empty(); }
  LayerState& state_of(int32_t slot, int32_t layer) {
    return states_[static_cast<size_t>(slot) * layers() + layer];
  }
  const LayerState& state_of(int32_t slot, int32_t layer) const {
    return states_[static_cast<size_t>(slot) * layers() + layer];
  }
  // Whether the layer's blocks, if there are any, are coded.
  bool is_fixed(const LayerMove& move) const {
    const LayerState& s = state_of(move.slot, move.layer);
    return s.fixed || (!s.waits && move.from.body_end > 0);
  }
  dim3 grid_of(int64_t items, int32_t per_cta) const {
    const int64_t ctas = (items + per_cta - 1) / per_cta;
    return dim3(static_cast<uint32_t>(std::clamp<int64_t>(ctas, 1, 8 * limits_.sms)));
  }
  // `from` may change afterwards.
  Status upload(void* to, const void* from, size_t bytes) const {
    if (bytes == 0) return Status::ok();
    return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_),
                       "coded rows: upload");
  }
  template <class T>
  Status upload(void* to, const std::vector<T>& from) const {
    return upload(to, from.data(), from.size() * sizeof(T));
  }
  // Waits.
  Status download(void* to, const void* from, size_t bytes) const {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
    return cuda_status(error, "coded rows: download");
  }
  template <class Body>
  Status launch(const Body& body, dim3 grid, int32_t shared, int32_t threads) const {
    void (*const kernel)(const Body) = run_body<Body>;
    if (shared > 0) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      if (Status s = cuda_status(error, "coded rows: shared memory"); !s) return s;
    }
    return launch_after_previous(kernel, grid, static_cast<uint32_t>(threads),
                                 static_cast<size_t>(shared), stream_, body);
  }
  template <class Body>
  Status run(const Body& body, int64_t items, int32_t per_cta) const {
    return launch(body, grid_of(items, per_cta), 0, Body::kThreads);
  }

  Status make_row_tables(const uint8_t* records, int32_t slot, Positions of_layers) const {
    const int64_t rows = int64_t{of_layers.count()} * heads();
    return run(MakeRowTables{device_, records, slot, of_layers}, rows,
               MakeRowTables::kThreads / kWarpLanes);
  }

  // Zeros.
  Status take_memory() {
    const auto take = [&](int64_t count, auto**... memory) {
      memory_.take_zeros(stream_, count, memory...);
    };
    const CodedShape& shape = device_.shape;
    const int64_t entries = int64_t{config_.max_sequences} * layers();
    const int64_t rows = int64_t{per_slot_ ? config_.max_sequences : 1} * layers() * heads();
    DeviceRowTables& t = device_.tables;
    t.rows = static_cast<int32_t>(rows);
    t.per_slot = per_slot_;
    take(rows, &t.key_steps, &t.value_steps, &t.query_units);
    take(rows * head_dim(), &t.key_scales, &t.query_scales, &t.key_means, &t.query_means);
    take(int64_t{layers()} * heads() * shape.record_bytes(), &records_);
    take(layers(), &device_layers_);
    device_.layers = device_layers_;
    take(2 * layers(), &books_);
    take(int64_t{2 * layers()} << host_->format().max_length, &book_tables_);
    take(int64_t{2 * layers()} * kMaxSymbols, &book_words_);
    take(int64_t{2 * layers()} * kCheapestOfBook, &book_cheapest_);
    // A step has few blocks of all layers, a prompt many of one.
    constexpr int32_t kStepBlocks = kSampleBlocks + 3;
    const int64_t cells =
        int64_t{config_.max_sequences} * most(layers() * kStepBlocks, shape.max_blocks + 1);
    cells_ = static_cast<int32_t>(std::min<int64_t>(cells, INT32_MAX / (4 * heads())));
    const int64_t cell_rows = int64_t{cells_} * heads();
    take(entries + 1, &hints_);
    CodedCall& s = scratch_;
    take(entries, &s.entries);
    take(entries * heads(), &s.rows);
    take(cell_rows, &s.places[0], &s.places[1], &s.sums);
    take(2, &s.left);
    take(cells_, &s.ends, &s.lists);
    take(layers() + 1, &s.list_begins);
    take(2 * cell_rows, &s.status, &s.kept);
    const int64_t cell_bytes = int64_t{heads()} * kBlockTokens * (4 * head_dim() + 4);
    s.group_cells = static_cast<int32_t>(
        std::clamp<int64_t>(staging_bytes_ / cell_bytes, kSampleBlocks, cells_));
    const int64_t group_rows = int64_t{s.group_cells} * heads();
    take(2 * group_rows * kBlockTokens * head_dim(), &s.staging);
    take(group_rows * kBlockTokens, &s.decided);
    take(group_rows, &s.ranges);
    return memory_.status();
  }

  Status upload_tables() {
    const int64_t record_bytes = device_.shape.record_bytes();
    std::vector<float> weights;
    std::vector<uint8_t> records(static_cast<size_t>(layers() * heads() * record_bytes));
    for (int32_t l = 0; l < layers(); ++l) {
      for (int32_t h = 0; h < heads(); ++h) {
        const std::vector<float>& known = host_->key_weight(l, h);
        for (int32_t d = 0; d < head_dim(); ++d) weights.push_back(known.empty() ? 1.0f : known[d]);
        if (per_slot_ || host_->is_raw_layer(l)) continue;
        const Result<WeightedRow> row = host_->fit_row(l, h, {});
        if (!row) return row.status();
        put_record(*row, records.data() + (l * heads() + h) * record_bytes);
      }
    }
    memory_.put(weights, &device_.tables.key_weights);
    if (!memory_.status()) return memory_.status();
    if (Status s = upload(records_, records); !s) return s;
    if (!per_slot_) {
      if (Status s = make_row_tables(records_, 0, {0, layers()}); !s) return s;
    }
    host_layers_.assign(layers(), DeviceLayer{});
    host_books_.assign(2 * layers(), DeviceCodebook{});
    for (int32_t l = 0; l < layers(); ++l) {
      const RopeTable* rope = host_->rope(l);
      DeviceLayer& layer = host_layers_[l];
      layer.is_raw = host_->is_raw_layer(l) ? 1 : 0;
      if (rope == nullptr) continue;
      if (l > 0 && rope == host_->rope(0)) {
        layer.rope = host_layers_[0].rope;
        continue;
      }
      layer.rope = {nullptr, nullptr, rope->pairing, rope->pairs, rope->blocks};
      memory_.put(rope->place, &layer.rope.place);
      memory_.put(rope->block, &layer.rope.block);
    }
    return memory_.status() ? upload_layers() : memory_.status();
  }

  // Puts the books of a layer that has none where kernels find them after upload_layers().
  Status upload_books(int32_t layer, const LayerBooks& books) {
    for (const Component c : {Component::kKey, Component::kValue}) {
      const auto i = static_cast<int32_t>(c);
      const Codebook& book = books.family(c).books.front();
      const int64_t at = 2 * layer + i;
      DeviceCodebook on_device = device_codebook(book);
      uint32_t* const table = book_tables_ + (at << host_->format().max_length);
      uint32_t* const words = book_words_ + at * kMaxSymbols;
      uint16_t* const cheapest = book_cheapest_ + at * kCheapestOfBook;
      on_device.table = table, on_device.words = words, on_device.cheapest = cheapest;
      const std::vector<uint32_t> table_of_book = device_table(book),
                                  words_of = encoder_words(book);
      if (book.cheapest.size() > kCheapestOfBook || words_of.size() > kMaxSymbols) {
        return Status(StatusCode::kUnsupported, "a codebook of a layer is too large for a device");
      }
      if (Status s = upload(table, table_of_book); !s) return s;
      if (Status s = upload(words, words_of); !s) return s;
      if (Status s = upload(cheapest, book.cheapest); !s) return s;
      if (Status s = upload(books_ + at, &on_device, sizeof(on_device)); !s) return s;
      host_books_[at] = on_device;
      host_layers_[layer].books[i] = {books_ + at, book.max_length};
    }
    return Status::ok();
  }
  // The layer has the books that upload_books() put there; upload_layers() tells the kernels.
  void set_books(int32_t layer, LayerBooks books) {
    host_->set_books(layer, std::move(books));
    host_layers_[layer].is_ready = per_slot_ ? 0 : 1;
  }
  Status upload_layers() {
    told_layers_ = true;
    return upload(device_layers_, host_layers_);
  }
  // The layer has no books; tell_layers() tells the kernels.
  void clear_books(int32_t layer) {
    for (DeviceBook& book : host_layers_[layer].books) book = {};
    told_layers_ = false;
  }
  Status tell_layers() { return told_layers_ ? Status::ok() : upload_layers(); }

  StoreConfig config_;
  CodedRows* host_;
  DeviceLimits limits_;
  GpuStream stream_ = nullptr;
  CodedDevice device_;
  std::vector<LayerState> states_;  // [max_sequences, layers]
  bool per_slot_ = false;
  int64_t staging_bytes_ = kStagingBytes;

  DeviceMemory memory_{"coded rows"};
  int32_t cells_ = 0;  // that a call may have
  // In memory_.
  CodedCall scratch_;
  DeviceLayer* device_layers_ = nullptr;
  uint8_t* records_ = nullptr;  // [layers, heads]
  uint32_t* hints_ = nullptr;
  DeviceCodebook* books_ = nullptr;  // [layers, 2]
  uint32_t* book_tables_ = nullptr;
  uint32_t* book_words_ = nullptr;
  uint16_t* book_cheapest_ = nullptr;
  std::vector<DeviceLayer> host_layers_;
  bool told_layers_ = true;                 // the device has host_layers_
  std::vector<DeviceCodebook> host_books_;  // [layers, 2]: what books_ holds
};

}  // namespace tierkv::store

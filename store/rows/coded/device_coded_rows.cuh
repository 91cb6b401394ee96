// SPDX-License-Identifier: Apache-2.0
// Coded rows in device memory: the bytes of CodedRows (coded_rows.h), made, read and attended to by
// kernels. Kernels are structs: all threads call one with the CTA's shared memory.
//
// Steps of sequences whose layers are fixed run without the host. A call that fixes a layer waits
// for the device where the host has to work out something from tokens: codebooks, once for a layer
// of the store, and without a profile's means and query energies means and steps of each sequence.
// It also allocates for a moment as much as the raw blocks of the layers that it fixes take.
//
// Where the newest block is continued on a page that a fork shares, a captured step puts the block
// behind all others and leaves the old one as it is; the host's table is shorter then.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attention/coded/coded_attention.h"
#include "attention/coded/weighted_tables.h"
#include "codec/format/element.h"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"
#include "store/rows/coded/coded_rows.h"
#include "store/rows/coded/device_encode.cuh"
#include "store/rows/coded/device_places.cuh"
#include "store/rows/coded/device_row_tables.cuh"
#include "store/rows/coded/device_tokens.cuh"
#include "store/rows/device_memory.cuh"

namespace tierkv::store {

template <class Body>
__global__ void __launch_bounds__(Body::kThreads) run_body(const __grid_constant__ Body body) {
  extern __shared__ __align__(1024) uint8_t shared[];
  wait_for_previous_kernel();
  body(shared);
}
template <class Body>
__global__ void __launch_bounds__(Body::kThreads, Body::kCtas)
    run_dense_body(const __grid_constant__ Body body) {
  extern __shared__ __align__(1024) uint8_t shared[];
  wait_for_previous_kernel();
  body(shared);
}

enum class AttendedRows : int32_t;
struct ReadTarget;

// What the host knows of the blocks of a (sequence, layer), whose kernels may still be under way.
struct LayerState {
  bool fixed = false, waits = false;  // coded, or raw blocks; neither where only replays made some
  bool shares = false;                // another sequence may read the pages of the newest block
};

class DeviceCodedRows final : public DeviceRowFormat {
 public:
  // Staging memory, unless the store's longest call takes less.
  static constexpr int64_t kStagingBytes = int64_t{64} << 20;

  DeviceCodedRows(const StoreConfig& config, CodedRows* host) : config_(config), host_(host) {}

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) override;
  int64_t workspace_bytes() const override { return memory_.bytes(); }
  void released(int32_t slot) override { std::fill_n(&state_of(slot, 0), layers(), LayerState{}); }
  bool checks_chunks() const override { return true; }
  bool may_rewrite(const DeviceWorks& works) const override;
  Status require_capturable(const DeviceWorks& works) const override;
  int64_t most_pages(const DeviceWorks& works) const override;
  Status plan(const DeviceWorks& works, const DeviceRowCounts& counts) override;
  Status write(const DeviceWorks& works, const PageCopy* copies) override;
  Status attend(const DeviceAttendBody& body) override;
  Status read(const LayerMove& at, Positions range, DType dtype, void* k, void* v) override;
  Status restore(const LayerMove& move, Positions range) override;
  Status cut_counts(const DeviceWorks& works, const DeviceRowCounts& counts) override;
  Status cut(const DeviceWorks& works, const PageCopy* copies) override;
  void forked(int32_t from, int32_t to) override {
    for (int32_t l = 0; l < layers(); ++l) {
      state_of(from, l).shares = true;
      state_of(to, l) = state_of(from, l);
    }
    if (per_slot_) copies_.push_back(to);
  }
  Status download_shared(RowFormat* host) override;
  Status check_imported(const std::vector<HostLayer>& layers, const LayerTokens* counts) override;
  Status upload_shared(const RowFormat& host, const std::vector<HostLayer>& layers) override;

  // For tests: fewer bytes of staging memory, before bind().
  void set_staging_bytes(int64_t bytes) { staging_bytes_ = bytes; }

 private:
  // What plan() and write() of a call share on the host.
  struct HostPlan {
    std::vector<uint32_t> hints;   // [entries]; empty: all are 0
    std::vector<int32_t> fits;     // entries whose means and steps come from their tokens
    std::vector<int32_t> samples;  // entries whose tokens make a layer's codebooks
    int32_t saved = 0;             // entries that rewrite
    bool continues = false;        // a block that is there may grow
    bool leaves_raw = false;       // a block may stay raw
  };

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
    void (*kernel)(const Body);
    if constexpr (requires { Body::kCtas; }) {
      kernel = run_dense_body<Body>;
    } else {
      kernel = run_body<Body>;
    }
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

  Status take_memory();
  Status upload_tables();
  // upload_layers() follows.
  Status upload_books(int32_t layer);
  Status upload_layers() { return upload(device_layers_, host_layers_); }
  // What the host finds of a call; changes nothing.
  HostPlan host_plan(const DeviceWorks& works) const;
  int32_t most_blocks(const DeviceWorks& works, const HostPlan& host) const;
  Status prepare(const DeviceWorks& works, const HostPlan& host);
  Status sample(const DeviceWorks& works, int32_t entry, bool makes_books);
  Status make_tables(const LayerMove& move, const std::vector<WeightedRow>& rows);
  Status download_tokens(const CodedCall& call, int32_t body_end,
                         std::vector<CodedRows::BlockTokens>* tokens);
  Result<CodedCall> call_of(const DeviceWorks& works, int32_t blocks) const;
  template <class Each>
  Status for_groups(const CodedCall& call, const Each& each);
  bool is_one_group(const CodedCall& call) const {
    return int64_t{call.layer_cells()} * call.works.num_layers <= call.group_cells;
  }
  Status load_group(const CodedCall& call, const CellGroup& group);
  Status encode_group(const CodedCall& call, const CellGroup& group, bool writes);
  Status read_to(const ReadTarget& to);
  // Warps of a CTA that decodes, which takes *bytes of shared memory.
  int32_t decode_warps(const WeightedDecode& decode, int32_t* bytes) const {
    const int32_t base = weighted_region_bytes(decode) + weighted_decode_cta_bytes(decode) + 16;
    const int32_t each = weighted_decode_warp_bytes(decode);
    const int32_t warps = std::min(kDecodeWarps, (limits_.shared_bytes - base) / each);
    *bytes = base + warps * each;
    return warps;
  }
  Status bind_attention();
  Status bind_turns(int32_t layer);
  CodedAttention call_of_layer(int32_t layer) const;
  Status attend_rows(const DeviceAttendBody& body, AttendedRows which);
  Status save(CodedCall* call);
  void note(const DeviceWorks& works);
  // The directory of kv_head 0 of a (slot, layer).
  const CodedBlockRef* directory(int32_t slot, int32_t layer, Component c) const {
    return device_.refs(slot, layer, 0, c);
  }
  template <int32_t kPer>
  Status encode_group_of(const CodedCall& call, const CellGroup& group, bool writes);

  StoreConfig config_;
  CodedRows* host_;
  DeviceLimits limits_;
  GpuStream stream_ = nullptr;
  CodedDevice device_;
  std::vector<LayerState> states_;  // [max_sequences, layers]
  bool per_slot_ = false;
  int64_t staging_bytes_ = kStagingBytes;

  DeviceMemory memory_{"coded rows"};
  std::unique_ptr<DeviceMemory> saved_;  // of the call between plan() and write()
  uint8_t* saved_blocks_ = nullptr;
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
  std::vector<DeviceCodebook> host_books_;  // [layers, 2]: what books_ holds
  HostPlan planned_;

  CodedRow* attended_rows_ = nullptr;  // [max_sequences, heads]
  int32_t* item_count_ = nullptr;
  StatusCode* row_status_ = nullptr;  // [max_sequences, heads]
  uint8_t* workspace_ = nullptr;
  std::vector<WeightedRows> weighted_;  // of each layer: its turns
  std::vector<int32_t> copies_;  // slots that became copies; their row tables are not made yet
};

}  // namespace tierkv::store

#include "store/rows/coded/device_coded_attention.cuh"
#include "store/rows/coded/device_coded_cut.cuh"
#include "store/rows/coded/device_coded_plan.cuh"
#include "store/rows/coded/device_coded_setup.cuh"

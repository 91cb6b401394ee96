// SPDX-License-Identifier: Apache-2.0
// The coded format of a device place, over a machine that has the memory and runs the kernels:
// CUDA's in device_coded_rows.cu, an emulated one in tests.
//
// Machine:
//   sms(), shared_bytes()             of the device; shared_bytes: the most of a CTA
//   allocate(bytes, what, &memory)    device memory, in the stream's order; free(memory)
//   upload(to, from, bytes)           `from` may change afterwards
//   download(to, from, bytes)         waits
//   clear(memory, bytes)
//   attention_workspace(call, grid)   as coded_attention_workspace_bytes(); attend(call) with its
//   grid set_stream(stream)                of the calls that follow launch(body, {x, y} CTAs,
//   shared bytes, threads)    body(shared memory) by all threads
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/coded/coded_attention.h"
#include "attention/coded/weighted_tables.h"
#include "codec/format/element.h"
#include "store/rows/coded/coded_rows.h"
#include "store/rows/coded/device_attend.cuh"
#include "store/rows/coded/device_coded_rows.h"
#include "store/rows/coded/device_encode.cuh"
#include "store/rows/coded/device_layer_states.h"
#include "store/rows/coded/device_places.cuh"
#include "store/rows/coded/device_read.cuh"
#include "store/rows/coded/device_row_tables.cuh"
#include "store/rows/coded/device_tokens.cuh"

namespace tierkv::store {

struct MachineGrid {
  int32_t x = 1, y = 1;
};

// A run of device memory to be carved.
struct Carving {
  uint8_t* base;
  int64_t bytes = 0;
  template <class T>
  T* take(int64_t count) {
    T* at = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += round_up(count * static_cast<int64_t>(sizeof(T)), 256);
    return at;
  }
};

template <class Machine>
class DeviceCodedRows : public DeviceRowFormat {
 public:
  // Staging memory, unless the store's longest call takes less.
  static constexpr int64_t kStagingBytes = int64_t{64} << 20;

  DeviceCodedRows(const StoreConfig& config, CodedRows* host, Machine machine)
      : config_(config), host_(host), machine_(std::move(machine)) {}
  ~DeviceCodedRows() override {
    for (void* memory : {memory_, saved_, attention_memory_}) machine_.free(memory);
  }

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) override;
  int64_t workspace_bytes() const override { return memory_bytes_ + attention_bytes_; }
  void released(int32_t slot) override { states_.open(slot); }
  Status open(int32_t slot) override {
    states_.open(slot);
    return Status::ok();
  }
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
    states_.fork(from, to);
    if (per_slot_) copies_.push_back(to);
  }
  Status download_shared(RowFormat* host) override;
  Status check_imported(const std::vector<HostLayer>& layers, const LayerTokens* counts) override;
  Status upload_shared(const RowFormat& host, const std::vector<HostLayer>& layers) override;

  // For tests: fewer bytes of staging memory, before bind().
  void set_staging_bytes(int64_t bytes) { staging_bytes_ = bytes; }

 protected:
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
  MachineGrid grid_of(int64_t items, int32_t per_cta) const {
    const int64_t ctas = (items + per_cta - 1) / per_cta;
    return {static_cast<int32_t>(std::clamp<int64_t>(ctas, 1, 8 * machine_.sms())), 1};
  }
  template <class T>
  Status upload(void* to, const std::vector<T>& from) {
    return machine_.upload(to, from.data(), static_cast<int64_t>(from.size() * sizeof(T)));
  }
  int32_t saved_bytes() const {
    return most(device_.shape.most_block_bytes(), device_.shape.raw_block_bytes(kBlockTokens));
  }
  template <class Body>
  Status run(const Body& body, int64_t items, int32_t per_cta) {
    return machine_.launch(body, grid_of(items, per_cta), 0, Body::kThreads);
  }

  void carve(Carving* at);
  Status upload_tables();
  Status upload_books(int32_t layer);
  Status upload_layers();
  // What the host finds of a call; changes nothing.
  HostPlan host_plan(const DeviceWorks& works) const;
  int32_t most_blocks(const DeviceWorks& works, const HostPlan& host) const;
  Status prepare(const DeviceWorks& works, const HostPlan& host);
  Status sample(const DeviceWorks& works, int32_t entry, bool makes_books);
  Status download_tokens(const CodedCall& call, int32_t body_end,
                         std::vector<CodedRows::BlockTokens>* tokens);
  Status make_books(int32_t layer, const std::vector<WeightedRow>& rows,
                    const std::vector<CodedRows::BlockTokens>& tokens);
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
    const int32_t warps = std::min(kDecodeWarps, (machine_.shared_bytes() - base) / each);
    *bytes = base + warps * each;
    return warps;
  }
  Status bind_attention();
  Status make_turns(std::vector<WeightedTurns>* made, std::vector<int32_t>* turns_of) const;
  int64_t most_workspace(int32_t rows) const;
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
  Machine machine_;
  CodedDevice device_;
  DeviceLayerStates states_;
  bool per_slot_ = false;
  int64_t staging_bytes_ = kStagingBytes;

  void* memory_ = nullptr;
  int64_t memory_bytes_ = 0;
  void* saved_ = nullptr;  // of the call between plan() and write()
  int32_t cells_ = 0;      // that a call may have
  // In memory_.
  CodedCall scratch_;
  DeviceLayer* device_layers_ = nullptr;
  float* key_weights_ = nullptr;
  uint8_t* records_ = nullptr;  // [layers, heads]
  uint32_t* hints_ = nullptr;
  DeviceCodebook* books_ = nullptr;  // [layers, 2]
  uint32_t* book_tables_ = nullptr;
  uint32_t* book_words_ = nullptr;
  uint16_t* book_cheapest_ = nullptr;
  std::vector<Turn*> turns_;  // of each rotation: places, then blocks
  std::vector<DeviceLayer> host_layers_;
  std::vector<DeviceCodebook> host_books_;  // [layers, 2]: what books_ holds
  HostPlan planned_;

  void* attention_memory_ = nullptr;
  int64_t attention_bytes_ = 0;
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
#include "store/rows/coded/device_coded_sample.cuh"
#include "store/rows/coded/device_coded_setup.cuh"

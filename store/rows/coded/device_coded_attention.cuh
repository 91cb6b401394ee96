// SPDX-License-Identifier: Apache-2.0
// Attention over the bodies of coded rows by attend_coded(): directories in the slots are read
// where they are.
#pragma once

#include "attention/coded/coded_attention.h"
#include "attention/coded/weighted_tables.h"
#include "store/rows/coded/device_coded_setup.cuh"

namespace tierkv::store {

// Whose bodies a call attends to; rows that it leaves out have step -1.
enum class AttendedRows : int32_t {
  kCoded,     // of fixed layers, and those without a body
  kRaw,       // those that wait in raw blocks
  kAllAsRaw,  // of a layer that has raw blocks alone
};

// One CTA. Shared memory: kSequenceBytes of each sequence.
inline constexpr int32_t kSequenceBytes = 8;
struct MakeAttentionRows {
  static constexpr int32_t kThreads = 256;
  CodedDevice device;
  DeviceAttendBody call;
  AttendedRows which = AttendedRows::kCoded;
  CodedRow* rows = nullptr;  // [count, num_kv_heads]
  int32_t* item_count = nullptr;
  bool is_settled = false;

  __device__ void operator()(uint8_t* shared) const {
    auto* const blocks = reinterpret_cast<int32_t*>(shared);
    int32_t* const first = blocks + call.count;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    for (int32_t i = thread; i < call.count; i += kThreads) blocks[i] = blocks_of(i);
    __syncthreads();
    if (thread == 0) {
      int32_t items = 0;
      for (int32_t i = 0; i < call.count; ++i) {
        first[i] = items;
        items += most(0, blocks[i]) * device.heads();
      }
      *item_count = items;
    }
    __syncthreads();
    for (int32_t i = thread; i < call.count * device.heads(); i += kThreads) {
      const int32_t sequence = i / device.heads(), h = i % device.heads();
      rows[i] = row_of(sequence, h, blocks[sequence], first[sequence]);
    }
  }

 private:
  // -1: the call leaves the sequence out.
  __device__ int32_t blocks_of(int32_t i) const {
    const int32_t body = body_count(device.view.laws, call.at[i]);
    const bool fixed = device.is_fixed(call.slots[i], call.layer);
    const bool taken = which == AttendedRows::kCoded ? fixed || body == 0
                       : which == AttendedRows::kRaw ? !fixed && body > 0
                                                     : true;
    if (!taken) return -1;
    return body > 0 ? block_count(call.at[i].body_end) : 0;
  }
  // Directories begin with those of slot 0; the layer's offset is in the call's pointers.
  __device__ CodedRow row_of(int32_t i, int32_t h, int32_t blocks, int32_t first) const {
    CodedRow row;
    row.first_item = first + most(0, blocks) * h;
    row.step = -1;
    if (blocks < 0) return row;
    const int64_t slot = call.slots[i];
    row.step = device.row(call.slots[i], call.layer, h);
    row.first_block = static_cast<int32_t>(slot * (device.view.slots.slot_bytes / 8)) +
                      2 * h * device.shape.max_blocks;
    row.coded_tokens = body_count(device.view.laws, call.at[i]);
    row.sink_tokens = blocks > 0 ? device.shape.sink_tokens : 0;
    return row;
  }
};

// A slice that is coded has fewer bytes: words of pairs, all exceptions, and what precedes them.
inline int32_t most_coded_slice_bytes(const CodedFormat& format, int32_t head_dim) {
  const int32_t dims = std::min(head_dim, kSliceDims);
  const int32_t words = kBlockTokens * dims / 2 * format.max_length / 8;
  const int32_t lengths = kWarpLanes * format.streams_per_lane * kMaxLengthBits / 8;
  return static_cast<int32_t>(round_up(kCodedBlockHeaderBytes + kBlockTokens + lengths + words +
                                           kExceptionBytes * kMaxExceptions + 8,
                                       kBlockAlignment));
}

class AttendedCodedRows : public CodedMemory {
 public:
  using CodedMemory::CodedMemory;

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) override {
    if (Status s = CodedMemory::bind(view, fault, stream); !s) return s;
    if (device_.view.slots.slot_bytes / 8 * config_.max_sequences > INT32_MAX) {
      return Status(StatusCode::kUnsupported, "coded rows: slots of more than 16 GiB on a device");
    }
    const int32_t most_sequences = limits_.shared_bytes / kSequenceBytes;
    if (config_.max_sequences > most_sequences) {
      return Status(
          StatusCode::kUnsupported,
          "coded rows: more than " + std::to_string(most_sequences) + " sequences on a device");
    }
    const int64_t rows = int64_t{config_.max_sequences} * heads();
    CodedAttention call = call_of_layer(0);
    call.num_rows = static_cast<int32_t>(rows);
    call.q_len = kMaxStepTokens;
    call.dtype = DType::kBFloat16;
    CodedAttentionGrid grid;
    grid.num_ctas = limits_.sms;
    grid.warps = coded_warps(call.head_dim);
    const auto bytes = static_cast<int64_t>(coded_attention_workspace_bytes(call, grid));
    memory_.take(rows, &attended_rows_);
    memory_.take(1, &item_count_);
    memory_.take(bytes, &workspace_);
    if (!memory_.status()) return memory_.status();
    weighted_.assign(layers(), WeightedRows{});
    for (int32_t l = 0; l < layers(); ++l) {
      if (Status s = bind_turns(l); !s) return s;
      if (Status s = check_room(l); !s) return s;
    }
    return Status::ok();
  }
  Status attend(const DeviceAttendBody& body) override {
    if (host_->is_raw_layer(body.layer) || !has_books(body.layer)) {
      return attend_rows(body, AttendedRows::kAllAsRaw);
    }
    bool any_waits = false;
    for (int32_t slot = 0; slot < config_.max_sequences; ++slot) {
      any_waits |= state_of(slot, body.layer).waits;
    }
    Status s = attend_rows(body, AttendedRows::kCoded);
    return s && any_waits ? attend_rows(body, AttendedRows::kRaw) : s;
  }

 private:
  // Layers with the same rotation share its turns.
  Status bind_turns(int32_t layer) {
    WeightedRows& w = weighted_[layer];
    w.key_scales = device_.tables.query_scales;
    w.key_means = device_.tables.query_means;
    w.sink_tokens = device_.shape.sink_tokens;
    const RopeTable* rope = host_->rope(layer);
    if (rope == nullptr || host_->is_raw_layer(layer)) return Status::ok();
    for (int32_t l = 0; l < layer; ++l) {
      if (host_->rope(l) != rope || host_->is_raw_layer(l)) continue;
      w = weighted_[l];
      return Status::ok();
    }
    const Result<WeightedTurns> turns =
        weighted_turns(*rope, head_dim(), device_.shape.sink_tokens);
    if (!turns) return turns.status();
    w.num_block_turns = rope->blocks;
    w.pairing = rope->pairing;
    w.pairs = rope->pairs;
    memory_.put(turns->place, &w.place_turns);
    memory_.put(turns->block, &w.block_turns);
    return memory_.status();
  }

  // Whether shared memory has room for the longest words that the format allows.
  Status check_room(int32_t layer) const {
    if (host_->is_raw_layer(layer)) return Status::ok();
    CodedAttention call = call_of_layer(layer);
    call.weighted = weighted_[layer];
    for (const Component c : {Component::kKey, Component::kValue}) {
      CodebookShape& book = c == Component::kKey ? call.keys.codebook : call.values.codebook;
      book.component = c;
      book.levels = 2;
      book.max_length = host_->format().max_length;
      book.streams_per_lane = host_->format().streams_per_lane;
    }
    if (Status s = call.validate(); !s) return s;
    const Result<CodedAttentionGrid> grid = choose_coded_grid(call, limits_);
    return grid ? Status::ok() : grid.status().with_context("format.max_length");
  }

  // The call for any rows of a layer, without its codebooks.
  CodedAttention call_of_layer(int32_t layer) const {
    CodedAttention call;
    for (const Component c : {Component::kKey, Component::kValue}) {
      CodedComponent& of = c == Component::kKey ? call.keys : call.values;
      of.bytes = device_.view.pages.base;
      of.size = device_.pool_bytes;
      of.blocks = device_.refs(0, layer, 0, c);
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

  Status attend_rows(const DeviceAttendBody& body, AttendedRows which) {
    // The second call of a layer takes the memory of the first.
    const bool is_settled = which != AttendedRows::kRaw;
    const MakeAttentionRows make{device_, body, which, attended_rows_, item_count_, is_settled};
    Status made = launch(make, dim3(1), kSequenceBytes * body.count, MakeAttentionRows::kThreads);
    if (!made) return made;
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
    call.rows = attended_rows_;
    call.q = body.q, call.out = body.out, call.lse = body.lse, call.prior = body.prior;
    call.q_is_settled = is_settled;
    // A row that attention gives up is a fault. Attention gives up damaged rows, and with head_dim
    // 256 also blocks whose coded and raw slices do not fit (CodedAttention::max_block_bytes).
    call.row_status = &device_.fault->status;
    call.status_stride = 0;
    call.workspace = workspace_;
    call.item_count = item_count_;
    call.num_rows = body.count * heads();
    call.num_items = call.num_rows * block_count(std::min(body.most_tokens, config_.max_tokens));
    call.q_len = body.q_len;
    call.dtype = body.dtype;
    const Result<CodedAttentionGrid> grid = coded_attention_grid(call);
    return grid ? attend_coded(call, *grid, stream_) : grid.status();
  }

  CodedRow* attended_rows_ = nullptr;  // [max_sequences, heads]
  int32_t* item_count_ = nullptr;
  uint8_t* workspace_ = nullptr;
  std::vector<WeightedRows> weighted_;  // of each layer: its turns
};

}  // namespace tierkv::store

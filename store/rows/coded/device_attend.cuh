// SPDX-License-Identifier: Apache-2.0
// The rows of a call of attention over bodies, as attend_coded() takes them.
#pragma once

#include "attention/coded/coded_attention.h"
#include "store/rows/coded/device_coded_call.cuh"

namespace tierkv::store {

// Whose bodies a call attends to; rows that it leaves out have step -1.
enum class AttendedRows : int32_t {
  kCoded,     // of fixed layers, and those without a body
  kRaw,       // those that wait in raw blocks
  kAllAsRaw,  // of a layer that has raw blocks alone
};

// One CTA. Shared memory: 8 bytes of each sequence.
struct MakeAttentionRows {
  static constexpr int32_t kThreads = 256;
  CodedDevice device;
  DeviceAttendBody call;
  AttendedRows which = AttendedRows::kCoded;
  CodedRow* rows = nullptr;  // [count, num_kv_heads]
  int32_t* item_count = nullptr;

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

}  // namespace tierkv::store

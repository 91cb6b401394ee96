// SPDX-License-Identifier: Apache-2.0
// Means and steps of rows into the tables that kernels read.
#pragma once

#include <cstring>

#include "codec/format/element.h"
#include "codec/host/coded/weighted_rows.h"
#include "store/rows/coded/device_coded_call.cuh"

namespace tierkv::store {

// As MakeRowTables takes it.
inline void put_record(const WeightedRow& row, uint8_t* record) {
  CodedRowState state;
  state.key_step = row.key_step, state.value_step = row.value_step;
  std::memcpy(record, &state, sizeof(state));
  if (row.key_mean.empty()) return;
  std::memcpy(record + sizeof(state), row.key_mean.data(), 2 * row.key_mean.size());
}

// A warp for a row, of the layers [first_layer, first_layer + layers) of the slots [first_slot,
// first_slot + slots). records: [slots, layers, kv_heads] of a CodedRowState and means,
// record_bytes apart; null: those of the slots that are fixed.
struct MakeRowTables {
  static constexpr int32_t kThreads = 128;
  CodedDevice device;
  const uint8_t* records = nullptr;
  int64_t record_bytes = 0;
  int32_t first_slot = 0, slots = 1, first_layer = 0, layers = 0;

  __device__ void operator()(uint8_t*) const {
    const int32_t heads = device.heads();
    for (int32_t i = warp_of_grid(); i < slots * layers * heads; i += warps_of_grid()) {
      const int32_t slot = first_slot + i / heads / layers, h = i % heads;
      const int32_t layer = first_layer + i / heads % layers;
      const uint8_t* record = records + i * record_bytes;
      if (records == nullptr) {
        if (!device.is_fixed(slot, layer)) continue;
        record = device.state<uint8_t>(slot, layer, device.shape.row_byte(h));
      }
      make(device.row(slot, layer, h), layer * heads + h, record);
    }
  }

 private:
  // As weighted_key_channels(). constants: the row's place among the layers' rows.
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

}  // namespace tierkv::store

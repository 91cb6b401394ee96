// SPDX-License-Identifier: Apache-2.0
// Attention over the bodies of channel rows: the kernels of attention/channel over pages that
// belong to (sequence, layer).
#pragma once

#include <cstdint>
#include <vector>

#include "attention/channel/channel_plan.h"
#include "store/rows/channel/channel_body.h"
#include "store/rows/device_row_format.h"

namespace tierkv::store {

// What it needs beside the call. is_raw: of the layer.
struct ChannelAttend {
  DeviceStoreView view;
  ChannelBody body;
  bool is_raw = false;
  int32_t num_q_heads = 0;
  float sm_scale = 0;
  StatusCode* status = nullptr;  // device; kCorrupt where a page is not there
  void* workspace = nullptr;     // channel_attention_bytes(), 16-byte aligned
};
// It serves calls with any number of sequences and queries.
int64_t channel_attention_bytes(int32_t head_dim);
Status attend_channel_bodies(const ChannelAttend& a, const DeviceAttendBody& call,
                             GpuStream stream);

}  // namespace tierkv::store

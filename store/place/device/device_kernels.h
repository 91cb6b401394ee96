// SPDX-License-Identifier: Apache-2.0
// The kernels of a place in device memory, launched on a stream. kCuda where a launch fails.
#pragma once

#include <vector>

#include "store/place/device/device_calls.h"
#include "tierkv/status.h"

namespace tierkv::store {

// Writes the batch of these sequences; first and count are filled in.
Status launch_counts(CountCall call, const std::vector<int32_t>& slots, GpuStream stream);
Status launch_commit(const CommitCall& call, GpuStream stream);
Status launch_row_counts(const RowCountsCall& call, GpuStream stream);
// needs: device memory, zeros.
Status launch_needs(const RowCountsCall& call, PageNeeds* needs, GpuStream stream);
// to: device [slots.size()].
Status launch_ids(const std::vector<int32_t>& slots, int32_t* to, GpuStream stream);
// copies: device [rows * kMaxSides].
Status launch_page_copies(const DevicePagesView& pages, const PageCopy* copies, int32_t rows,
                          GpuStream stream);
Status launch_staged_layer(const DevicePagesView& pages, const StagedLayer& call, GpuStream stream);

// `count` sequences, all kv_heads.
Status launch_raw_append(const RawAppendCall& call, int32_t count, GpuStream stream);
Status launch_raw_read(const RawReadCall& call, GpuStream stream);
Status launch_raw_attend(const RawAttendCall& call, int32_t count, GpuStream stream);

}  // namespace tierkv::store

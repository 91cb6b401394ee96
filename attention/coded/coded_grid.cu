// SPDX-License-Identifier: Apache-2.0
// How a device runs a call of coded attention: tables with as many copies as there is room for,
// then slots.

#include <algorithm>
#include <string>

#include "attention/coded/coded_params.h"
#include "attention/coded/coded_shared.h"
#include "codec/gpu/coded/coded_stream.cuh"
#include "codec/host/coded/coded_block.h"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

// Numbers of copies there are kernels for, most first.
constexpr int32_t kCopies[] = {4, 3, 0};
constexpr int32_t kSlotStep = 128;  // bytes; a slot is a multiple of it

int32_t shared_bytes(const CodedAttention& call, const DeviceLimits& limits,
                     const CodedAttentionGrid& grid, uint32_t table_bytes) {
  const auto start = static_cast<uint32_t>(limits.reserved_bytes);
  const CodedSharedLayout at = coded_shared_layout(
      start, table_bytes, static_cast<uint32_t>(grid.slot_bytes), static_cast<uint32_t>(grid.warps),
      weighted_tail_bytes(call.head_dim, call.weighted.pairing != RopePairing::kNone, grid.warps));
  return static_cast<int32_t>(at.end - start);
}

// As many copies as fit beside one block a warp, then the largest slots, up to two blocks; false
// where not even one copy fits.
bool fit(const CodedAttention& call, const DeviceLimits& limits, CodedAttentionGrid* grid) {
  const int32_t longest = longest_word(call);
  const int32_t least =
      (slice_count(call.head_dim) * call.max_block_bytes + kSlotStep - 1) / kSlotStep * kSlotStep;
  for (int32_t copies_log : kCopies) {
    // An index, its copy and two code words share a word.
    const bool fits_word = 2 + copies_log + 2 * longest <= 32;
    if (!fits_word || find_coded_kernel(call, copies_log) == nullptr) continue;
    const auto table_bytes = static_cast<uint32_t>(table_region_bytes(longest, copies_log));
    for (grid->slot_bytes = 2 * least; grid->slot_bytes >= least; grid->slot_bytes -= kSlotStep) {
      grid->shared_bytes = shared_bytes(call, limits, *grid, table_bytes);
      if (grid->shared_bytes > limits.shared_bytes) continue;
      grid->copies_log = copies_log;
      return true;
    }
  }
  return false;
}

}  // namespace

Result<CodedAttentionGrid> choose_coded_grid(const CodedAttention& call,
                                             const DeviceLimits& limits) {
  if (Status s = call.validate(); !s) return s;
  CodedAttentionGrid grid;
  grid.num_ctas = limits.sms;
  if (call.raw_blocks) {
    grid.warps = coded_warps(call.head_dim);
    return grid;
  }
  for (grid.warps = coded_warps(call.head_dim); grid.warps > 0; grid.warps /= 2) {
    if (fit(call, limits, &grid)) return grid;
  }
  return Status(StatusCode::kUnsupported,
                "coded attention: shared memory has no room for two tables of words of " +
                    std::to_string(longest_word(call)) + " bits and a block of max_block_bytes");
}

Result<CodedAttentionGrid> coded_attention_grid(const CodedAttention& call) {
  const Result<DeviceLimits> limits = device_limits();
  return limits ? choose_coded_grid(call, *limits) : limits.status();
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// How a device runs a call of coded attention: tables with as many copies as there is room for,
// then slots.

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "attention/coded/coded_params.h"
#include "attention/coded/coded_shared.h"
#include "codec/format/coded_block.h"
#include "codec/gpu/coded/coded_stream.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

// Numbers of copies there are kernels for, most first.
constexpr int32_t kCopies[] = {5, 4, 3, 0};
constexpr int32_t kSlotStep = 128;  // bytes; a slot is a multiple of it

// Shared memory of a CTA, which begins at `start`.
struct SharedPlan {
  uint32_t start;
  uint32_t slot_bytes;
  int32_t warps;
  uint32_t tail_bytes;

  SharedPlan(const CodedAttention& call, const DeviceLimits& limits, int32_t slot_bytes,
             int32_t warps)
      : start(static_cast<uint32_t>(limits.reserved_bytes)),
        slot_bytes(static_cast<uint32_t>(slot_bytes)),
        warps(warps),
        tail_bytes(call.weighted.any()
                       ? weighted_tail_bytes(call.head_dim,
                                             call.weighted.pairing != RopePairing::kNone, warps)
                       : 0) {}

  int32_t bytes(uint32_t table_bytes, int32_t slots_per_warp, int32_t tables) const {
    const CodedSharedLayout at = coded_shared_layout(start, table_bytes, slot_bytes,
                                                     static_cast<uint32_t>(warps * slots_per_warp),
                                                     static_cast<uint32_t>(tables), tail_bytes);
    return static_cast<int32_t>(at.end - start);
  }
};

}  // namespace

int32_t longest_word(const CodedAttention& call) {
  int32_t longest = 0;
  for (const CodedComponent* c : {&call.keys, &call.values}) {
    longest = std::max(longest, c->codebook.max_length);
    for (int32_t i = 0; i < c->num_others; ++i) {
      longest = std::max(longest, c->others[i].max_length);
    }
  }
  return longest;
}

namespace {

// As many copies as fit, then slots; false where not even one slot a warp does.
bool fit(const CodedAttention& call, int32_t most_copies_log, const DeviceLimits& limits,
         CodedAttentionGrid* grid) {
  const int32_t longest = longest_word(call), least = grid->slot_bytes;
  for (int32_t copies_log : kCopies) {
    // An index, its copy and two code words share a word.
    const bool fits_word = 2 + copies_log + 2 * longest <= 32;
    if (copies_log > most_copies_log || !fits_word ||
        find_coded_kernel(call, copies_log) == nullptr) {
      continue;
    }
    const auto table_bytes = static_cast<uint32_t>(table_region_bytes(longest, copies_log));
    // Two blocks a warp, or one; those of weighted blocks share a slot.
    const int32_t step = call.weighted.any() ? kSlotStep : least;
    for (int32_t room = 2 * least; room >= least; room -= step) {
      const int32_t slots = call.weighted.any() ? 1 : room / least;
      const SharedPlan plan(call, limits, room / slots, grid->warps);
      const int32_t bytes = plan.bytes(table_bytes, slots, call.num_tables());
      if (bytes > limits.shared_bytes) continue;
      grid->copies_log = copies_log;
      grid->slots_per_warp = call.weighted.any() ? 2 : slots;
      grid->slot_bytes = room / slots;
      grid->shared_bytes = bytes;
      return true;
    }
  }
  return false;
}

Result<DeviceLimits> limits_of(const CodedAttention& call) {
  Result<DeviceLimits> limits = device_limits();
  if (limits && call.most_shared_bytes > 0) {
    limits->shared_bytes = std::min(limits->shared_bytes, call.most_shared_bytes);
  }
  return limits;
}

}  // namespace

Result<CodedAttentionGrid> coded_attention_grid(const CodedAttention& call,
                                                int32_t most_copies_log) {
  if (Status s = call.validate(); !s) return s;
  const Result<DeviceLimits> limits = limits_of(call);
  if (!limits) return limits.status();
  CodedAttentionGrid grid;
  grid.num_ctas = limits->sms;
  if (call.raw_blocks) {
    grid.warps = coded_warps(call.head_dim), grid.slots_per_warp = 1;
    return grid;
  }
  grid.slot_bytes =
      (slice_count(call.head_dim) * call.max_block_bytes + kSlotStep - 1) / kSlotStep * kSlotStep;
  for (grid.warps = coded_warps(call.head_dim); grid.warps > 0; grid.warps /= 2) {
    if (fit(call, most_copies_log, *limits, &grid)) return grid;
  }
  const int32_t longest = longest_word(call);
  const SharedPlan plan(call, *limits, grid.slot_bytes, 1);
  int32_t most = call.num_tables();
  const auto table_bytes = static_cast<uint32_t>(table_region_bytes(longest, 0));
  while (most > 0 && plan.bytes(table_bytes, 1, most) > limits->shared_bytes) --most;
  return Status(StatusCode::kUnsupported,
                "coded attention: " + std::to_string(call.num_tables()) +
                    " codebooks; beside a block of max_block_bytes shared memory holds " +
                    std::to_string(most) + " of " + std::to_string(longest) + " bits");
}

}  // namespace tierkv

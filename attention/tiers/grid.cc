// SPDX-License-Identifier: Apache-2.0
#include "attention/tiers/grid.h"

#include <algorithm>
#include <string>

#include "attention/core/workspace.h"
#include "attention/tiers/decode.h"
#include "attention/tiers/shared_rows.h"
#include "attention/work/plan.h"

namespace tierkv {
namespace {

// The bytes that attention reads of the largest page, and at least a slot.
int32_t whole_page_bytes(const AttentionConfig& config) {
  int32_t bytes = least_slot_bytes(config);
  visit_layouts(config, [&](const PageLayout& page) { bytes = std::max(bytes, page.scores); });
  return ceil_div(bytes, kSlotAlignment) * kSlotAlignment;
}

// The largest chunk that tiers cut for slots of slot_bytes have, and at least a slot.
int32_t chunk_bytes(const AttentionConfig& config, int32_t slot_bytes) {
  int32_t bytes = least_slot_bytes(config);
  visit_layouts(config, [&](const PageLayout& page) {
    const int32_t tile_bytes = tile_read_bytes(page),
                  tiles = cut_page(page.tiles(), tile_bytes, slot_bytes);
    bytes = std::max(bytes, tiles == page.tiles() ? page.scores : tiles * tile_bytes);
  });
  return ceil_div(bytes, kSlotAlignment) * kSlotAlignment;
}

// Whole pages where they fit, so that a chunk is one copy; of large ones more than two, for copies
// that begin early (docs/internals/attention.md).
bool choose_slots(const AttentionConfig& config, int32_t shared_bytes, AttentionGrid* grid) {
  const int32_t columns = query_columns(config).of_row, warps = grid->warps_per_cta,
                page = whole_page_bytes(config);
  const int32_t most_of_page =
      page < kLargeChunkBytes ? kChunksInFlight : most_slots(config.head_dim);
  for (int32_t slots = most_of_page; slots > 0; --slots) {
    const int32_t left = shared_bytes - kSharedRowsRoom -
                         decode_shared(config.head_dim, columns, 0, slots, warps).bytes;
    const int32_t most = left / (warps * slots) / kSlotAlignment * kSlotAlignment;
    if (most < (slots > kChunksInFlight ? page : least_slot_bytes(config))) continue;
    grid->slots_per_warp = slots;
    grid->slot_bytes = chunk_bytes(config, std::min(page, most));
    grid->shared_bytes =
        decode_shared(config.head_dim, columns, grid->slot_bytes, slots, warps).bytes;
    return true;
  }
  return false;
}

}  // namespace

int32_t least_slot_bytes(const AttentionConfig& config) {
  int32_t bytes = config.head_dim * query_columns(config).of_row * 4;
  visit_layouts(config,
                [&](const PageLayout& page) { bytes = std::max(bytes, tile_read_bytes(page)); });
  return bytes;
}

Result<AttentionGrid> choose_grid(const AttentionConfig& config, int32_t sms,
                                  int32_t shared_bytes) {
  if (Status s = config.validate(); !s) return s;
  AttentionGrid grid;
  grid.num_ctas = std::min(sms, kMaxCtas);
  for (grid.warps_per_cta = kDecodeWarps; grid.warps_per_cta > 0; grid.warps_per_cta /= 2) {
    if (choose_slots(config, shared_bytes, &grid)) return grid;
  }
  return Status(StatusCode::kUnsupported, "the device has " + std::to_string(shared_bytes) +
                                              " bytes of shared memory for a CTA, too few");
}

}  // namespace tierkv

// Export and import.
#include <vector>

#include "store/cold/sequence_bytes.h"
#include "store/tiers/host_store.h"

namespace tierkv {

Result<std::vector<uint8_t>> HostStore::export_sequence(SequenceId sequence) {
  const Result<int32_t> slot = table_.complete_live_slot_of(sequence);
  if (!slot) return slot.status();
  std::vector<uint8_t> bytes = export_header(config_, view_, table_.info(*slot));
  for (int32_t w = 0; w < view_.rows_per_sequence(); ++w) {
    RowPages pages;
    pages.tokens = view_.allocator.tokens[row(*slot, w)];
    const SideCounts held = pages_of(view_, pages.tokens);
    for (int32_t side = 0; side < kStoreSides; ++side) {
      for (int32_t i = 0; i < held.of[side]; ++i) {
        pages.pages[side].push_back(row_page(view_, row(*slot, w), side, i).bytes);
      }
    }
    export_row(view_, pages, &bytes);
  }
  return bytes;
}

Result<SequenceId> HostStore::import_sequence(const uint8_t* bytes, size_t size) {
  const Result<ImportedSequence> sequence = read_sequence(config_, view_, bytes, size);
  if (!sequence) return sequence.status();
  const Result<int32_t> slot = table_.free_slot();
  if (!slot) return slot.status();
  std::vector<SideCounts> target;
  int64_t needed = 0;
  for (const ImportedRow& r : sequence->rows) {
    target.push_back(r.tokens);
    needed += total(pages_of(view_, r.tokens));
  }
  if (Status s = require_pages(needed); !s) return s;

  OpReport report;
  if (Status s = run(PageOp::open({&*slot, 1}, &report)); !s) return s;
  grow_to(*slot, target);
  for (int32_t w = 0; w < view_.rows_per_sequence(); ++w) {
    const uint8_t* packed = sequence->rows[w].pages;
    for (int32_t side = 0; side < kStoreSides; ++side) {
      const int32_t tokens = target[w].of[side], per_page = view_.page_tokens(side);
      for (int32_t i = 0; i < pages_for(tokens, per_page); ++i) {
        packed = unpack_page(view_.layouts[side], packed, view_.page_used(side, i, tokens),
                             row_page(view_, row(*slot, w), side, i).bytes);
      }
      if (side != kWindowSide) rescan_side(view_, row(*slot, w), side);
    }
  }
  return table_.claim(*slot, SequencePhase::kLive, sequence->info);
}

}  // namespace tierkv

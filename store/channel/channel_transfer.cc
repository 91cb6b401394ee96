// Export and import.
#include <algorithm>
#include <vector>

#include "store/channel/channel_bytes.h"
#include "store/channel/channel_host.h"
#include "store/shared/host_pages.h"

namespace tierkv {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

}  // namespace

Result<std::vector<uint8_t>> ChannelHostStore::export_sequence(SequenceId sequence) {
  const Result<int32_t> slot = table_.complete_live_slot_of(sequence);
  if (!slot) return slot.status();
  ChannelSequence content;
  content.info = table_.info(*slot);
  std::vector<uint16_t> x(view_.head_dim());
  for (int32_t w = 0; w < rows(); ++w) {
    const int32_t at = row(*slot, w);
    ChannelRowContent of_row;
    for (int32_t b = 0; b < view_.blocks_of(content.info); ++b) {
      const uint8_t* block = view_.block(at, b);
      of_row.blocks.insert(of_row.blocks.end(), block, block + view_.layout.bytes);
    }
    const RawSide raw = {&view_, at, content.info.window_first};
    for (const Component c : kComponents) {
      std::vector<uint16_t>& values = of_row.raw[static_cast<size_t>(c)];
      for (int32_t p = content.info.window_first; p < content.info.num_tokens; ++p) {
        raw.get(c, p, x.data());
        values.insert(values.end(), x.begin(), x.end());
      }
    }
    content.rows.push_back(std::move(of_row));
  }
  return channel_sequence_bytes(config_, content);
}

Result<SequenceId> ChannelHostStore::import_sequence(const uint8_t* bytes, size_t size) {
  const Result<ChannelSequence> sequence =
      read_channel_sequence(config_, view_.layout, bytes, size);
  if (!sequence) return sequence.status();
  const Result<int32_t> slot = table_.free_slot();
  if (!slot) return slot.status();
  const PageAllocator& a = view_.allocator;
  const SequenceInfo& info = sequence->info;
  SideCounts counts;
  counts.of[kBlockSide] = view_.blocks_of(info);
  counts.of[kResidualSide] = ChannelView::raw_tokens(info);
  const int64_t of_row = pages_for(counts.of[kBlockSide], view_.blocks_per_page) +
                         pages_for(counts.of[kResidualSide], view_.raw_page_tokens);
  if (Status s = require_pages(a, rows() * of_row); !s) return s;
  OpReport report;
  if (Status s = run_page_op(a, PageOp::open({&*slot, 1}, &report)); !s) return s;
  grow_sides(a, *slot, std::vector<SideCounts>(rows(), counts));
  for (int32_t w = 0; w < rows(); ++w) {
    const int32_t at = row(*slot, w);
    const ChannelRowContent& from = sequence->rows[w];
    for (int32_t b = 0; b < counts.of[kBlockSide]; ++b) {
      std::copy_n(from.blocks.data() + int64_t{b} * view_.layout.bytes, view_.layout.bytes,
                  view_.block(at, b));
    }
    const RawSide raw = {&view_, at, info.window_first};
    for (int32_t p = info.window_first; p < info.num_tokens; ++p) {
      for (const Component c : kComponents) {
        const int64_t first = int64_t{p - info.window_first} * view_.head_dim();
        raw.put(c, p, from.raw[static_cast<size_t>(c)].data() + first);
      }
    }
  }
  return table_.claim(*slot, SequencePhase::kLive, info);
}

}  // namespace tierkv

// Export and import.
#include <algorithm>
#include <vector>

#include "store/coded/coded_bytes.h"
#include "store/coded/coded_host.h"

namespace tierkv {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

CodedRowContent row_content(const CodedView& s, int32_t row, const SequenceInfo& info) {
  CodedRowContent content;
  std::vector<uint16_t> raw(s.head_dim);
  for (const Component c : kComponents) {
    const auto i = static_cast<size_t>(c);
    content.steps[i] = s.step(c, row);
    content.means[i].assign(s.means(c, row), s.means(c, row) + s.head_dim);
    for (int32_t b = 0; b < info.window_first / kBlockTokens; ++b) {
      const CodedBlockRef ref = s.blocks(c, row)[b];
      const uint8_t* first = s.pages.base + int64_t{ref.offset} * kBlockAlignment;
      content.blocks[i].emplace_back(first, first + int64_t{ref.units} * kBlockAlignment);
    }
    for (int32_t p = info.window_first; p < info.num_tokens; ++p) {
      get_raw_token(s, row, info, c, p, raw.data());
      content.raw[i].insert(content.raw[i].end(), raw.begin(), raw.end());
    }
  }
  return content;
}

// What attention on a device can decode: codebooks that the store could have made.
bool can_adopt(const CodedBooks& books, int32_t num_layers) {
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    for (const Component c : kComponents) {
      const std::vector<Codebook>& list = books.of(layer, c);
      if (list.size() != 1 || list.front().mode != BlockMode::kPair) return false;
    }
    if (books.of(layer, Component::kKey).front().streams_per_lane !=
        books.of(layer, Component::kValue).front().streams_per_lane) {
      return false;
    }
  }
  return true;
}

}  // namespace

Result<std::vector<uint8_t>> CodedHostStore::export_sequence(SequenceId sequence) {
  const Result<int32_t> slot = table_.complete_live_slot_of(sequence);
  if (!slot) return slot.status();
  const SequenceInfo& info = table_.info(*slot);
  std::vector<uint8_t> bytes = export_coded_header(config_, books_, info);
  for (int32_t w = 0; w < rows(); ++w) {
    export_coded_row(row_content(view_, row(*slot, w), info), &bytes);
  }
  return bytes;
}

// Blocks are coded anew with the store's own codebooks: the codes are the same.
Result<SequenceId> CodedHostStore::import_sequence(const uint8_t* bytes, size_t size) {
  Result<ImportedCodedSequence> sequence = read_coded_sequence(config_, bytes, size);
  if (!sequence) return sequence.status();
  const Result<int32_t> slot = table_.free_slot();
  if (!slot) return slot.status();
  const SequenceInfo& info = sequence->info;
  const bool adopts = !books_.ready() && sequence->books.ready();
  if (adopts && !can_adopt(sequence->books, config_.layout.num_layers)) {
    return Status(StatusCode::kInvalidArgument,
                  "the sequence's codebooks are none that a store makes");
  }
  const CodedBooks& books = adopts ? sequence->books : books_;
  std::vector<PendingBlocks> pending(rows());
  std::vector<SideCounts> target(rows());
  int64_t needed = 0;
  for (int32_t w = 0; w < rows(); ++w) {
    const ImportedCodedRow& from = sequence->rows[w];
    for (int32_t i = 0; i < info.window_first / kBlockTokens * 2; ++i) {
      const size_t before = pending[w].bytes.size();
      const std::vector<uint8_t>& fixed = from.fixed[i % 2][i / 2];
      pending[w].bytes.insert(pending[w].bytes.end(), fixed.begin(), fixed.end());
      if (fixed.empty()) {
        books.encode(&from.codes[i % 2][int64_t{i / 2} * kBlockTokens * view_.head_dim],
                     view_.head_dim, w / view_.num_kv_heads, kComponents[i % 2], &pending[w].bytes);
      }
      pending[w].units.push_back(
          static_cast<uint32_t>((pending[w].bytes.size() - before) / kBlockAlignment));
    }
    target[w].of[kCodedSide] = end_of_blocks(view_, 0, pending[w]);
    target[w].of[kRawSide] = CodedView::raw_tokens(info);
    needed += pages_for(target[w].of[kCodedSide], view_.page_units()) +
              pages_for(target[w].of[kRawSide], kBlockTokens);
    if (config_.coded.means == MeanSource::kPrompt) continue;
    for (const Component c : kComponents) {
      if (new_means(row(*slot, w), c) != from.means[static_cast<size_t>(c)]) {
        return Status(StatusCode::kInvalidArgument, "the sequence has other means");
      }
    }
  }
  if (Status s = require_pages(view_.allocator, needed); !s) return s;

  OpReport report;
  if (Status s = run_page_op(view_.allocator, PageOp::open({&*slot, 1}, &report)); !s) return s;
  grow_sides(view_.allocator, *slot, target);
  for (int32_t w = 0; w < rows(); ++w) {
    const int32_t at = row(*slot, w);
    const ImportedCodedRow& from = sequence->rows[w];
    write_blocks(view_, at, 0, 0, pending[w]);
    for (const Component c : kComponents) {
      const auto i = static_cast<size_t>(c);
      std::copy(from.means[i].begin(), from.means[i].end(), view_.means(c, at));
      view_.step(c, at) = from.steps[i];
      for (int32_t p = info.window_first; p < info.num_tokens; ++p) {
        put_raw_token(view_, at, info, c, p,
                      &from.raw[i][int64_t{p - info.window_first} * view_.head_dim]);
      }
    }
  }
  if (adopts) books_ = std::move(sequence->books);
  return table_.claim(*slot, SequencePhase::kLive, info);
}

}  // namespace tierkv

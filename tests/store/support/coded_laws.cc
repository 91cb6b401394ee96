#include "tests/store/support/coded_laws.h"

#include "allocator/invariants.h"

namespace tierkv::testing {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

// The blocks of a row lie in order on the row's own pages, none across two, and end where the
// allocator says that the side ends.
std::string broken_row(const CodedView& s, int32_t row, const SequenceInfo& info) {
  const int32_t blocks = info.window_first / kBlockTokens;
  int32_t end = 0;
  for (int32_t i = 0; i < 2 * blocks; ++i) {
    const CodedBlockRef ref = s.blocks(kComponents[i % 2], row)[i / 2];
    const int32_t page = static_cast<int32_t>(ref.offset / s.page_units());
    const int32_t offset = static_cast<int32_t>(ref.offset % s.page_units());
    const auto units = static_cast<int32_t>(ref.units);
    if (units < 1 || offset + units > s.page_units()) return "a block leaves its page";
    const int32_t index =
        end % s.page_units() + units <= s.page_units() && end % s.page_units() == offset
            ? end / s.page_units()
            : (end + s.page_units() - 1) / s.page_units();
    if (index >= s.allocator.pages[row].of[kCodedSide]) return "a block behind the last page";
    if (s.page_id(row, kCodedSide, index) != page) return "a block on another page";
    const int32_t begin = index * s.page_units() + offset;
    if (begin < end || (begin > end && offset != 0)) return "a block is not behind the one before";
    end = begin + units;
  }
  if (end != s.allocator.tokens[row].of[kCodedSide]) return "the units of the side";
  return "";
}

}  // namespace

std::string broken_law(const CodedView& s) {
  if (Status status = InvariantChecker().check(s.allocator); !status) return status.message();
  for (int32_t q = 0; q < s.allocator.shape.table.num_sequences; ++q) {
    if (s.allocator.sequences[q].state == SequenceState::kFree) continue;
    const SequenceInfo& info = s.infos[q];
    const bool prompt = info.window_origin == kInPrompt;
    if (prompt && info.window_first != 0) return "coded tokens in a prompt";
    if (info.window_first % kBlockTokens != 0) return "coded tokens that fill no block";
    if (!prompt && info.num_tokens - info.window_first >= s.window_tokens + kBlockTokens) {
      return "a block should have been coded";
    }
    for (int32_t w = 0; w < s.rows_per_sequence(); ++w) {
      const int32_t row = q * s.rows_per_sequence() + w;
      if (s.allocator.tokens[row].of[kRawSide] != info.num_tokens - info.window_first) {
        return "tokens of the raw side";
      }
      const std::string text = broken_row(s, row, info);
      if (!text.empty()) return text;
    }
  }
  return "";
}

}  // namespace tierkv::testing

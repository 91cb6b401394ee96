// An exported sequence: the bytes of store/README.md, "Exported sequences", the one place that
// knows them. Both back ends use it on pages in host memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/tiers/store_shape.h"
#include "tierkv/status.h"

namespace tierkv {

// What goes before the rows.
std::vector<uint8_t> export_header(const KvStoreConfig& config, const StoreView& s,
                                   const SequenceInfo& info);
// Appends a row whose pages lie in host memory; page_bytes_of(side, page_index) are the bytes of
// its pages.
struct RowPages {
  SideCounts tokens;
  std::vector<const uint8_t*> pages[kStoreSides];
};
void export_row(const StoreView& s, const RowPages& row, std::vector<uint8_t>* out);

// A page is packed as its defined bytes, segment after segment.
inline constexpr int32_t kPageSegments =
    6;  // codes, metadata of keys; of values; scores; positions
std::array<int32_t, kPageSegments> packed_segment_bytes(const PageLayout& layout, int32_t used);
int64_t packed_page_bytes(const PageLayout& layout, int32_t used);
// Appends a row of pages that are packed: those of side 0, then 1, then 2.
void export_packed_row(const SideCounts& tokens, const std::vector<uint8_t>& pages,
                       std::vector<uint8_t>* out);

// A row of an import: what each side holds and where the segments of its pages begin.
struct ImportedRow {
  SideCounts tokens;
  const uint8_t* pages = nullptr;  // the packed pages of side 0, then 1, then 2
};
struct ImportedSequence {
  SequenceInfo info;
  std::vector<ImportedRow> rows;  // [rows_per_sequence], pointing into the bytes
};
// That there can be a sequence like this: kCorrupt, kOutOfRange beyond max_tokens.
Status check_exported_info(const KvStoreConfig& config, const SequenceInfo& info);
// That a row of it can hold so many tokens. `info` was checked.
bool row_counts_fit(const StoreView& s, const SequenceInfo& info, const SideCounts& tokens);
// Finds the rows: headers, counts and checksums are looked at, tokens are not.
Result<ImportedSequence> split_sequence(const KvStoreConfig& config, const StoreView& s,
                                        const uint8_t* bytes, size_t size);
// Checks everything, every token included: what this returns can be put on pages and lived with.
// kVersion, kInvalidArgument for bytes of another config, kOutOfRange beyond max_tokens, kCorrupt.
Result<ImportedSequence> read_sequence(const KvStoreConfig& config, const StoreView& s,
                                       const uint8_t* bytes, size_t size);

// Writes the next packed page of a side with `used` tokens to `page` (page_bytes of it) and returns
// the bytes behind it.
const uint8_t* unpack_page(const PageLayout& layout, const uint8_t* packed, int32_t used,
                           uint8_t* page);

}  // namespace tierkv

// An exported sequence of a coded store: the bytes of store/CODED.md, "Exported sequences", the one
// place that knows them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/coded/coded_row.h"

namespace tierkv {

// A row of an export. Coded blocks keep the bytes they have.
struct CodedRowContent {
  float steps[2] = {};                          // of keys, of values
  std::vector<float> means[2];                  // [head_dim], likewise
  std::vector<std::vector<uint8_t>> blocks[2];  // bytes of each
  std::vector<uint16_t> raw[2];                 // [tokens, head_dim]
};

std::vector<uint8_t> export_coded_header(const KvStoreConfig& config, const CodedBooks& books,
                                         const SequenceInfo& info);
void export_coded_row(const CodedRowContent& row, std::vector<uint8_t>* out);
// Whether row `within` of a sequence can have these steps in a store: kCorrupt, kInvalidArgument.
Status check_coded_steps(const KvStoreConfig& config, int32_t within, const float (&steps)[2]);

// What the bytes hold, found and not yet looked at.
struct CodedSequenceContent {
  SequenceInfo info;
  bool fixed = false;  // blocks may be at a fixed rate
  CodedBooks books;    // not ready where the exporting store had none
  std::vector<CodedRowContent> rows;
};
// That there can be a sequence like this: kCorrupt, kOutOfRange beyond max_tokens.
Status check_coded_info(const KvStoreConfig& config, const SequenceInfo& info);
// Finds the rows: header, sizes, checksums and means are looked at, blocks and raw values are not.
Result<CodedSequenceContent> split_coded_sequence(const KvStoreConfig& config, const uint8_t* bytes,
                                                  size_t size);

struct ImportedCodedRow {
  float steps[2];
  std::vector<float> means[2];
  std::vector<int16_t> codes[2];               // [window_first, head_dim]; 0 at a fixed rate
  std::vector<std::vector<uint8_t>> fixed[2];  // of each block: its bytes; empty: coded
  std::vector<uint16_t> raw[2];                // [num_tokens - window_first, head_dim]
};
struct ImportedCodedSequence {
  SequenceInfo info;
  CodedBooks books;  // not ready where the exporting store had none
  std::vector<ImportedCodedRow> rows;
};
// Checks everything, every block and value included: what this returns can be stored and lived
// with. kVersion, kInvalidArgument for bytes of another config, kOutOfRange beyond max_tokens,
// kCorrupt.
Result<ImportedCodedSequence> read_coded_sequence(const KvStoreConfig& config, const uint8_t* bytes,
                                                  size_t size);

}  // namespace tierkv

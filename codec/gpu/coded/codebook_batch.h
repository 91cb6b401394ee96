// SPDX-License-Identifier: Apache-2.0
// Codebooks built on the GPU from histograms that lie there: those that build_codebook() makes of
// the same counts in mode kPair, bit for bit, and the arrays that kernels code and decode with.
//
// Three kernels: what codes there are; a CTA for each alphabet and rarity that build_codebook()
// tries, with package-merge by merge paths; the choice, its code words and tables.
#pragma once

#include <cstdint>

#include "codec/gpu/coded/code_histograms.h"
#include "codec/gpu/coded/coded_batch.h"
#include "tierkv/status.h"

namespace tierkv {

inline constexpr int32_t kCheapestEntries = 1 + 2 * 32;  // of kPair with the most levels

struct CodebookBuild {
  const uint32_t* pairs = nullptr;  // device, [num_books][kHistogramCounts]: code_histograms.h
  const uint32_t* wide = nullptr;   // likewise
  DeviceCodebook* books = nullptr;  // device, out: num_books, book_stride apart
  uint32_t* tables = nullptr;       // device, out: [num_books][2^max_length]
  uint32_t* words = nullptr;        // device, out: [num_books][kMaxSymbols]
  uint16_t* cheapest = nullptr;     // device, out: [num_books][kCheapestEntries]
  uint8_t* lengths = nullptr;       // device, out: [num_books][kMaxSymbols], 0 where there is none
  void* workspace = nullptr;        // device, codebook_workspace_bytes(), 16-byte aligned
  int32_t num_books = 0;
  int32_t book_stride = 1;
  int32_t max_length = 12;  // 8 to kMaxCodeLength, as in CodebookSpec
  int32_t streams_per_lane = 1;
  Component component = Component::kKey;
  uint8_t table_id = 0;

  // kInvalidArgument naming the field. Reads no array.
  Status validate() const;
};
int64_t codebook_workspace_bytes(int32_t num_books);

Status build_codebooks(const CodebookBuild& call, GpuStream stream);

// The codebook of scalars and lengths [kMaxSymbols] that were copied to host memory; kCorrupt where
// they are none.
Result<Codebook> codebook_of_device(const DeviceCodebook& book, const uint8_t* lengths);

}  // namespace tierkv

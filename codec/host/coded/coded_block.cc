// SPDX-License-Identifier: Apache-2.0
#include "codec/format/coded_block.h"

#include <algorithm>

#include "codec/format/coded_block_format.h"
#include "codec/format/errors.h"
#include "codec/host/coded/block_symbols.h"
#include "tierkv/layout.h"

namespace tierkv {
namespace {

void write_coded(const Slice& slice, const SliceBooks& books, const SymbolPlan& plan,
                 const CodedBlockLayout& at, uint8_t* block) {
  uint32_t start = 0;
  for (int32_t stream = 0; stream < books.streams(); ++stream) {
    store_u16(block + at.starts + 2 * stream, start);
    start += plan.stream_bits[stream];
  }
  write_plan(slice, books, plan, {block + at.low_plane, block + at.payload, block + at.exceptions});
}

CodedBlockHeader raw_header(const Slice& slice, Component component, const RawForm& raw) {
  CodedBlockHeader h;
  h.mode = raw.mode;
  h.component = component;
  h.tokens = static_cast<uint8_t>(slice.tokens);
  h.dims = static_cast<uint8_t>(slice.dims);
  h.base = raw.base;
  return h;
}

CodedBlockHeader coded_header(const CodedBlockHeader& raw, const Codebook& codebook,
                              const SymbolPlan& plan) {
  CodedBlockHeader h = raw;
  h.mode = codebook.mode;
  h.streams_per_lane = static_cast<uint8_t>(codebook.streams_per_lane);
  h.table_id = codebook.table_id;
  h.base = static_cast<int16_t>(codebook.base);
  h.payload_bits = static_cast<uint16_t>(plan.payload_bits);
  h.exceptions = static_cast<uint16_t>(plan.exception_count);
  return h;
}

void encode_slice(const Slice& slice, const Codebook& codebook, std::vector<uint8_t>* out) {
  const SliceBooks books(codebook);
  SymbolPlan plan;
  plan_symbols(slice, books, kMaxExceptions, &plan);
  const RawForm raw = raw_form(slice);
  CodedBlockHeader header = raw_header(slice, codebook.component, raw);
  CodedBlockLayout at = block_layout(header);
  bool coded = false;
  if (plan.possible) {
    const CodedBlockHeader candidate = coded_header(header, codebook, plan);
    const CodedBlockLayout candidate_at = block_layout(candidate);
    coded = candidate_at.bytes < at.bytes;
    if (coded) header = candidate, at = candidate_at;
  }
  header.units = static_cast<uint16_t>(at.bytes / kBlockAlignment);
  const size_t begin = out->size();
  out->resize(begin + static_cast<size_t>(at.bytes), 0);
  uint8_t* block = out->data() + begin;
  if (coded) {
    write_coded(slice, books, plan, at, block);
  } else {
    write_raw_codes(slice, header.component, raw, block + at.payload);
  }
  store_header(header, block);
  header.checksum = block_checksum(block, at.bytes);
  store_header(header, block);
}

}  // namespace

Status check_block_shape(int32_t tokens, int32_t head_dim) {
  if (tokens < 1 || tokens > kBlockTokens) return invalid("a block has 1 to 64 tokens");
  if (head_dim < 1 || head_dim > kMaxHeadDim) return invalid("head_dim must be 1 to 4096");
  return Status::ok();
}

Status encode_block(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, std::vector<uint8_t>* out) {
  if (Status s = check_block_shape(tokens, head_dim); !s) return s;
  for (int32_t first = 0; first < head_dim; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, head_dim - first);
    encode_slice({codes + first, tokens, dims, head_dim}, codebook, out);
  }
  return Status::ok();
}

}  // namespace tierkv

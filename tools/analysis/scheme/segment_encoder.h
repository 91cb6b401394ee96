// SPDX-License-Identifier: Apache-2.0
// The writer of what codec/file/segment.h reads, with the stages that only the analysis knows: zstd
// and the coders of baselines/block_coder.h.
#pragma once

#include <memory>
#include <vector>

#include "codec/file/segment.h"
#include "tools/analysis/baselines/block_coder.h"
#include "tools/presets/scheme.h"

namespace tierkv::analysis {

struct SegmentCoding {
  // As the segment is read once zstd is undone; codes have code_bits under zstd.
  SegmentFormat stored;
  Coder coder = Coder::kNone;
  const BlockCoder* blocks = nullptr;  // where given it codes the blocks, whatever `coder` says
  int32_t zstd_level = 3;
  // Weighted steps.
  const uint8_t* book_of = nullptr;  // [dim_block_count(head_dim)], null: book 0
  const int8_t* importance =
      nullptr;  // [tokens of the segment], see importance_exponents(); null: 0

  // Sets what `stored` says of the coder and its blocks.
  void code_with(Coder coder, const BlockCoder* blocks);
};

// y [tokens, head_dim] in the segment's coordinates. Not for weighted steps.
StatusCode quantize_chunk(const SegmentFormat& f, const float* y, int64_t tokens, ChunkCodes* out);
// Weighted steps: the exponents of the tokens [token, token + tokens) of a segment and their codes
// [tokens, head_dim]. x [tokens, head_dim] as the model stores them.
Status quantize_weighted_chunk(const SegmentCoding& f, const float* x, int64_t token,
                               int64_t tokens, int8_t* exponents, int16_t* codes);

// What a cache pays for a segment: 4 bytes for each block's offset and each raw unit beside the
// rest.
int64_t stored_bytes(const EncodedSegment& segment);

// Appends chunks of original values (basis not yet applied). A failed call leaves the segment
// unusable.
class SegmentEncoder {
 public:
  explicit SegmentEncoder(const SegmentCoding& coding);
  ~SegmentEncoder();
  // x [tokens, head_dim]: chunk_at(tokens so far) of them, fewer only in the last call. Overwrites
  // x with its coordinates.
  StatusCode append(float* x, int64_t tokens);
  StatusCode finish(EncodedSegment* out);

 private:
  struct Zstd;
  StatusCode append_raw(const float* x, int64_t count);
  StatusCode append_codes(int64_t tokens);
  StatusCode append_weighted(const float* x, int64_t tokens);
  StatusCode append_bytes(const std::vector<uint8_t>& bytes);

  SegmentCoding coding_;
  EncodedSegment out_;
  ChunkCodes chunk_;
  std::vector<uint8_t> bytes_;
  std::unique_ptr<Zstd> zstd_;
};

// Reads a segment of any coding; it outlives the reader.
class SegmentReader {
 public:
  SegmentReader(const SegmentCoding& coding, const EncodedSegment& segment);
  SegmentReader(const SegmentReader&) = delete;
  SegmentReader& operator=(const SegmentReader&) = delete;
  // As SegmentDecoder::read().
  StatusCode read(int64_t tokens, float* x) { return decoder_.read(tokens, x); }

 private:
  EncodedSegment plain_;  // of a zstd frame
  SegmentDecoder decoder_;
};

}  // namespace tierkv::analysis

// SPDX-License-Identifier: Apache-2.0
// A segment: consecutive tokens of one component of a row, stored in one format. Encoding and
// decoding stream chunk by chunk, so that a row never exists decoded as a whole; the bytes are
// those a cache would hold (codes packed or coded, parameters, offsets), without page padding.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codec/file/block_coder.h"
#include "codec/file/scheme.h"
#include "codec/format/basis.h"
#include "codec/format/coded_block.h"
#include "codec/format/quantize.h"
#include "codec/host/coded/weighted_block.h"
#include "codec/host/coded/weighted_rows.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"

namespace tierkv {

// What weighted steps need besides the format. Pointers outlive the segment's encoder and decoder.
struct WeightedSegment {
  Component component = Component::kKey;
  const WeightedRow* row = nullptr;
  const BookFamily* family = nullptr;  // null while only codes are looked at
  const uint8_t* book_of = nullptr;    // encoding: [dim_block_count(head_dim)], null: book 0
  // Encoding: [tokens of the segment] as importance_exponents() writes them; null: 0.
  const int8_t* importance = nullptr;
  int64_t first_position = 0;  // of the segment's first token; the others follow without a gap
};

// How the values of a segment become codes.
struct SegmentFormat {
  ComponentFormat format;
  const Basis* basis = nullptr;  // null: none
  float step = 0;                // StepRule::kAbsolute
  Coder coder = Coder::kNone;
  const Codebook* codebook = nullptr;  // Coder::kHuffman, null while only a histogram is taken
  const BlockCoder* blocks = nullptr;  // where given it codes the blocks, whatever `coder` says
  int32_t zstd_level = 3;
  DType raw_dtype = DType::kFloat16;  // raw values are kept as fp16 (from float32 too) or bf16
  int32_t head_dim = 0;
  WeightedSegment weighted;  // StepRule::kWeighted

  bool raw() const { return format.is_raw(); }
  bool has_blocks() const { return coder == Coder::kHuffman || blocks != nullptr; }
  // Tokens that share parameters and never straddle a chunk; chunks are whole coded blocks and
  // whole units.
  int64_t unit_tokens() const;
  int64_t chunk_tokens() const;
  // Tokens of the chunk that starts at a token of the segment, if as many are left. Weighted blocks
  // end where the position is a multiple of kBlockTokens.
  int64_t chunk_at(int64_t token) const;
  bool is_weighted() const { return format.step_rule == StepRule::kWeighted; }
};

// The codes of one chunk and what is needed to undo them.
struct ChunkCodes {
  std::vector<int16_t> codes;       // [tokens, head_dim]
  std::vector<QuantParams> params;  // per group or unit, in token-major order
  std::vector<uint8_t> raw_unit;    // relative steps: 1 where the unit is stored raw
};

// Weighted steps: the exponents of the tokens [token, token + tokens) of a segment and their codes
// [tokens, head_dim]. x [tokens, head_dim] as the model stores them.
Status quantize_weighted_chunk(const SegmentFormat& f, const float* x, int64_t token,
                               int64_t tokens, int8_t* exponents, int16_t* codes);

// y [tokens, head_dim] in the segment's coordinates. Not for weighted steps.
StatusCode quantize_chunk(const SegmentFormat& f, const float* y, int64_t tokens, ChunkCodes* out);
void dequantize_chunk(const SegmentFormat& f, const ChunkCodes& chunk, int64_t tokens, float* y);

struct EncodedSegment {
  int64_t tokens = 0;
  std::vector<uint8_t> data;           // packed codes, coded blocks, raw values, or one zstd frame
  std::vector<int64_t> block_offsets;  // where each coded block starts in `data`, if it has any
  std::vector<QuantParams> params;
  std::vector<uint8_t> raw_unit;     // one flag per unit of a relative step
  std::vector<uint16_t> raw_values;  // values of the raw units, in order

  int64_t stored_bytes()
      const;  // everything above as a cache stores it: 4 bytes per block offset and raw unit
  int64_t coded_bytes() const;  // Huffman blocks or the zstd frame alone
};

// Appends chunks of original values (basis not yet applied). A failed call leaves the segment
// unusable.
class SegmentEncoder {
 public:
  explicit SegmentEncoder(const SegmentFormat& format);
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
  StatusCode append_zstd(const uint8_t* bytes, size_t size, bool last);

  SegmentFormat format_;
  EncodedSegment out_;
  ChunkCodes chunk_;
  std::vector<uint8_t> bytes_;
  std::unique_ptr<Zstd> zstd_;
};

// Reads a segment back in order, any number of tokens at a time, as original values (basis undone).
class SegmentDecoder {
 public:
  SegmentDecoder(const SegmentFormat& format, const EncodedSegment& segment);
  ~SegmentDecoder();
  // x [tokens, head_dim]; kCorrupt when the segment has fewer left or its bytes contradict
  // themselves.
  StatusCode read(int64_t tokens, float* x);

 private:
  struct Zstd;
  StatusCode next_chunk();
  StatusCode unpack_codes(int64_t tokens);
  StatusCode read_weighted(int64_t tokens);
  // Where the next coded block lies in the segment's data.
  const uint8_t* block_bytes(int64_t* size) const;

  SegmentFormat format_;
  const EncodedSegment& segment_;
  std::vector<float> chunk_;  // decoded, [chunk_size_, head_dim]
  int64_t chunk_size_ = 0, chunk_used_ = 0, token_ = 0;
  size_t data_pos_ = 0, block_ = 0, param_pos_ = 0, unit_pos_ = 0, raw_pos_ = 0;
  ChunkCodes codes_;
  std::vector<uint8_t> bytes_;
  std::unique_ptr<Zstd> zstd_;
};

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// A segment: consecutive tokens of one component of a row, stored in one format. Decoding streams
// chunk by chunk, so that a row never exists decoded as a whole; the bytes are those a cache would
// hold (codes packed or coded, parameters, offsets), without page padding. The encoder is with the
// command that writes containers (tools/analysis/scheme/segment_encoder.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "codec/format/quantize.h"
#include "codec/host/coded/coded_block.h"
#include "codec/host/coded/weighted_rows.h"
#include "tierkv/basis.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"

namespace tierkv {

// What weighted steps need besides the format. Pointers outlive the segment's decoder.
struct WeightedSegment {
  Component component = Component::kKey;
  const WeightedRow* row = nullptr;
  const BookFamily* family = nullptr;
  int64_t first_position = 0;  // of the segment's first token; the others follow without a gap
};

// Blocks of another coder than the library's: baselines of the analysis.
class BlockDecoder {
 public:
  virtual ~BlockDecoder() = default;
  // All of the bytes of one block of at most kBlockTokens tokens; kCorrupt where they contradict
  // themselves.
  virtual StatusCode decode(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                            int16_t* codes) const = 0;
};

// How the values of a segment become codes.
struct SegmentFormat {
  ComponentFormat format;
  const Basis* basis = nullptr;  // null: none
  float step = 0;                // StepRule::kAbsolute
  bool coded = false;            // in blocks: of `weighted`, `codebook` or `blocks`
  const Codebook* codebook = nullptr;
  const BlockDecoder* blocks = nullptr;
  int32_t code_bits = 0;              // of a code that is in no block; 0: format.type.bits()
  DType raw_dtype = DType::kFloat16;  // raw values are kept as fp16 (from float32 too) or bf16
  int32_t head_dim = 0;
  WeightedSegment weighted;  // StepRule::kWeighted

  bool raw() const { return format.is_raw(); }
  // Tokens that share parameters and never straddle a chunk; chunks are whole coded blocks and
  // whole units.
  int64_t unit_tokens() const;
  int64_t chunk_tokens() const;
  // Tokens of the chunk that starts at a token of the segment, if as many are left. Coded blocks
  // end where the position is a multiple of kBlockTokens.
  int64_t chunk_at(int64_t token) const;
  bool is_weighted() const { return format.step_rule == StepRule::kWeighted; }
};

// Calls visit(first element, count, stride) for the groups of a chunk, in the order in which their
// parameters are stored.
template <class Visit>
void for_each_group(const SegmentFormat& f, int64_t tokens, const Visit& visit) {
  const int64_t d = f.head_dim;
  if (f.format.unit == Unit::kToken) {
    const int64_t group = f.format.group > 0 ? f.format.group : d;
    for (int64_t i = 0; i < tokens * d; i += group) visit(i, group, int64_t{1});
    return;
  }
  for (int64_t t = 0; t < tokens; t += f.format.group) {
    const int64_t n = std::min<int64_t>(f.format.group, tokens - t);
    if (f.format.unit == Unit::kBlock) {
      visit(t * d, n * d, int64_t{1});
    } else {
      for (int64_t c = 0; c < d; ++c) visit(t * d + c, n, d);
    }
  }
}

// The codes of one chunk and what is needed to undo them.
struct ChunkCodes {
  std::vector<int16_t> codes;       // [tokens, head_dim]
  std::vector<QuantParams> params;  // per group or unit, in token-major order
  std::vector<uint8_t> raw_unit;    // relative steps: 1 where the unit is stored raw
};

// y [tokens, head_dim] in the segment's coordinates. Not for weighted steps.
void dequantize_chunk(const SegmentFormat& f, const ChunkCodes& chunk, int64_t tokens, float* y);

struct EncodedSegment {
  int64_t tokens = 0;
  std::vector<uint8_t> data;           // packed codes, coded blocks or raw values
  std::vector<int64_t> block_offsets;  // where each coded block starts in `data`, if it has any
  std::vector<QuantParams> params;
  std::vector<uint8_t> raw_unit;     // one flag per unit of a relative step
  std::vector<uint16_t> raw_values;  // values of the raw units, in order
};

// Reads a segment back in order, any number of tokens at a time, as original values (basis undone).
class SegmentDecoder {
 public:
  SegmentDecoder(const SegmentFormat& format, const EncodedSegment& segment)
      : format_(format), segment_(segment) {}
  // x [tokens, head_dim]; kCorrupt when the segment has fewer left or its bytes contradict
  // themselves.
  StatusCode read(int64_t tokens, float* x);

 private:
  StatusCode next_chunk();
  StatusCode read_weighted(int64_t tokens);
  StatusCode read_blocks(int64_t tokens);
  StatusCode unpack(int64_t count);
  // The next bytes of codes or raw values in the segment's data; null where fewer are left.
  const uint8_t* take(int64_t bytes);
  // Where the next coded block lies in the segment's data.
  const uint8_t* block_bytes(int64_t* size) const;

  SegmentFormat format_;
  const EncodedSegment& segment_;
  std::vector<float> chunk_;  // decoded, [chunk_size_, head_dim]
  int64_t chunk_size_ = 0, chunk_used_ = 0, token_ = 0;
  size_t data_pos_ = 0, block_ = 0, param_pos_ = 0, unit_pos_ = 0, raw_pos_ = 0;
  ChunkCodes codes_;
};

}  // namespace tierkv

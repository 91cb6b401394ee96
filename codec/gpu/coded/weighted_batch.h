// SPDX-License-Identifier: Apache-2.0
// Weighted blocks in batches on the GPU: keys and values to blocks, and ranges of tokens back.
// Bytes and numbers are those of codec/host/coded/weighted_rows.h and
// codec/host/coded/weighted_block.h, bit for bit.
//
// Work comes as ranges of tokens of rows. A block holds the positions [64 b, 64 b + 64) of a row's
// body; the first one begins behind the sinks, the last one may end early. A warp works on a block.
// Pointers are to device memory unless a declaration says otherwise.
//
// head_dim: 64, 96, 128 or 256.
#pragma once

#include <cstdint>

#include "codec/format/rope_turn.h"
#include "codec/format/weighted_block_format.h"
#include "codec/gpu/coded/code_histograms.h"
#include "codec/gpu/coded/coded_batch.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv {

// The arrays of a RopeTable, copied.
struct DeviceRope {
  const Turn* place = nullptr;  // [64][pairs]
  const Turn* block = nullptr;  // [blocks][pairs]
  RopePairing pairing = RopePairing::kNone;
  int32_t pairs = 0;  // 0: keys are not rotated
  int32_t blocks = 0;
};

// What fixes the codes of rows, see WeightedRow.
struct DeviceWeightedRows {
  const float* key_scales = nullptr;    // [num_rows, head_dim]: dim_scale(S, w)
  const uint16_t* key_means = nullptr;  // [num_rows, head_dim] fp16 before RoPE; null: zeros
  const float* value_steps = nullptr;   // [num_rows]
  DeviceRope rope;
  int32_t num_rows = 0;
  int32_t head_dim = 0;

  // kInvalidArgument naming the field, kUnsupported for a head_dim. Reads no array.
  Status validate() const;
};

// The codebooks of a component, as build_codebooks() leaves them or uploaded. Book i has the table
// id of book 0 plus i; all have one mode and one number of streams.
struct DeviceFamily {
  const DeviceCodebook* books = nullptr;  // [count]
  const uint8_t* book_of = nullptr;       // [num_rows, head_dim / 16]; null: book 0. Encoding only
  int32_t count = 1;                      // 1 to kMaxFamilyBooks
  int32_t max_length = 12;                // of all books. Decoding only

  Status validate() const;
};

// Where the blocks (slices) of 64 positions and a component lie, in units of 16 bytes.
struct alignas(8) WeightedPlace {
  uint32_t unit = 0, units = 0;
};

// The positions [first, last) of a row.
struct alignas(16) WeightedRange {
  int64_t at = 0;            // of token `first` in the caller's tokens, in elements
  int64_t significance = 0;  // likewise in the significances or in `decided`. Encoding only
  int32_t first = 0, last = 0;
  int32_t row = 0;          // of DeviceWeightedRows
  int32_t first_block = 0;  // of position 0 in the places
  // Encoding, with `decided` only: the elements of tokens before body_first are codes already, i16
  // in the caller's order.
  // Decoding: the positions that the row's blocks hold: what a block must have. Where token `first`
  // goes; null: to `at` of the call's output. Elements from a token to the next; 0: the call's.
  int32_t body_first = 0, body_last = 0;
  uint16_t* out = nullptr;
  int64_t token_stride = 0;
};

// Whether a call for num_rows rows and most_blocks blocks a range can work on it.
TKV_HD bool is_valid_range(const WeightedRange& r, int32_t num_rows, int32_t most_blocks) {
  if (r.first < 0 || r.last < r.first || r.at < 0 || r.row < 0 || r.row >= num_rows) return false;
  return r.last == r.first || (r.last - 1) / kBlockTokens - r.first / kBlockTokens < most_blocks;
}

struct WeightedEncode {
  const uint16_t* keys = nullptr;       // after RoPE
  const uint16_t* values = nullptr;     // laid out as keys
  const float* significance = nullptr;  // of each token, not negative; null: G is 0
  // In place of significances where not null, of each token: G in byte 0; the exponent of its value
  // in byte 1, where byte 2 is not 0.
  const uint8_t (*decided)[4] = nullptr;
  const WeightedRange* ranges = nullptr;  // [num_ranges]; each begins and ends where blocks do
  DeviceWeightedRows rows;
  DeviceFamily families[2];  // by component; not read by count_weighted()
  // Out, of keys and of values, where block first_block + position / 64 lies. With neither `bytes`
  // nor `cursor` only units are written. With `bytes` alone unit is given and units is the room.
  WeightedPlace* places[2] = {nullptr, nullptr};
  uint8_t* bytes = nullptr;  // out: [size], 16-byte aligned
  unsigned long long* cursor =
      nullptr;  // in, out: the first free unit of `bytes`; null: see places
  // out: [num_ranges, most_blocks, 2], by block of the range and component; kOk where there is
  // none.
  StatusCode* status = nullptr;
  // Where not null, [num_ranges, most_blocks, 2] as status. Without `bytes`, out: 1 where the
  // block's bytes lie over its own tokens, which then are gone; only blocks of one slice do, and
  // ranges must have 64 contiguous tokens for each block, from 16-byte aligned addresses on. With
  // `bytes`, in: what is 1 is left alone.
  uint8_t* kept = nullptr;
  // A code beyond 16 bits becomes the nearest one: the status is kOutOfRange, the block is written.
  bool saturates = false;
  double scale = 1;               // of significances: u = (position + 1) * significance * scale
  int64_t size = 0;               // of bytes
  int64_t token_stride = 0;       // in elements, of keys and of values
  DType dtype = DType::kFloat16;  // or kBFloat16
  int32_t num_ranges = 0;
  int32_t most_blocks = 0;  // that a range meets

  // kInvalidArgument naming the field, kUnsupported. Reads no array.
  Status validate() const;
};
// One kernel: the bytes of encode_weighted_block(). A block's status is kOk, kNonFinite,
// kOutOfRange (a code beyond 16 bits, a position beyond the RoPE table), kInvalidArgument (the
// range, a book, a negative significance), kBufferTooSmall or kUnsupported (a codebook that is not
// of pairs); unless it is kOk its units are 0. With a cursor the places of two calls differ, but
// not the blocks; after kBufferTooSmall the cursor says what would have been enough.
Status encode_weighted(const WeightedEncode& call, GpuStream stream);

// Counts of pairs of neighbouring codes, by component; codec/gpu/coded/code_histograms.h says how
// they lie.
struct WeightedCounts {
  uint32_t* pairs[2] = {nullptr, nullptr};  // in, out: [kHistogramCounts], counts are added
  uint32_t* wide[2] = {nullptr, nullptr};   // likewise
};
// One kernel: the codes that encode_weighted() would write. Writes no places. The last token of an
// odd number of values in a block is left out, since it has no pair. Tokens of blocks that fail are
// counted in part.
Status count_weighted(const WeightedEncode& call, const WeightedCounts& counts, GpuStream stream);

struct WeightedDecode {
  const uint8_t* bytes = nullptr;         // [size], 16-byte aligned
  const WeightedPlace* places = nullptr;  // of the component
  const WeightedRange* ranges = nullptr;  // [num_ranges]
  // Out: fp16 or bf16, keys rotated to their positions unless rows.rope.pairs is 0. Null where each
  // range has its own. Addresses and strides that are multiples of 16 bytes are the fastest.
  uint16_t* out = nullptr;
  StatusCode* status = nullptr;  // out: [num_ranges, most_blocks]; kOk where there is none
  DeviceWeightedRows rows;
  DeviceFamily family;
  Component component = Component::kKey;
  DType dtype = DType::kFloat16;  // or kBFloat16
  int64_t size = 0;
  int64_t token_stride = 0;  // in elements
  int32_t num_ranges = 0;
  int32_t most_blocks = 0;  // that a range meets
  // The most bytes that a block (slice) may have: more warps fit with less. Larger blocks get
  // kOutOfRange.
  int32_t max_block_bytes = kMaxWeightedBlockBytes;

  // kInvalidArgument naming the field, kUnsupported. Reads no array.
  Status validate() const;
};
// One kernel: dequantize_weighted() of what decode_weighted_block() finds, rounded to dtype (fp16
// saturates). Everything in the bytes is checked before it is believed: a block that breaks a rule
// gets kCorrupt and its tokens zeros. kOutOfRange: max_block_bytes or the RoPE table; zeros.
// kInvalidArgument: the range itself; nothing is written.
Status decode_weighted(const WeightedDecode& call, GpuStream stream);

}  // namespace tierkv

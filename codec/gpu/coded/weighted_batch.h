// SPDX-License-Identifier: Apache-2.0
// What the kernels of coded blocks take: keys and values to blocks (weighted_encode.cuh), and
// ranges of tokens back (weighted_decode.cuh). Bytes and numbers are those of the host
// (codec/host/coded/), bit for bit.
//
// Work comes as ranges of tokens of rows. A block holds the positions [64 b, 64 b + 64) of a row's
// body; the first one begins behind the sinks, the last one may end early. A warp works on a block.
// Pointers are to device memory unless a declaration says otherwise. head_dim: 64, 96, 128 or 256.
#pragma once

#include <cstdint>

#include "codec/format/coded_block_format.h"
#include "codec/format/rope_turn.h"
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
};

// The codebook of a component: of pairs, with at most 32 levels.
struct DeviceBook {
  const DeviceCodebook* codebook = nullptr;
  int32_t max_length = 12;  // at least that of its words; else kUnsupported
};

// Where the blocks (slices) of 64 positions and a component lie, in units of 16 bytes.
struct alignas(8) WeightedPlace {
  uint32_t unit = 0, units = 0;
};

// The positions [first, last) of a row.
struct alignas(16) WeightedRange {
  int64_t at = 0;       // of token `first` in the caller's tokens, in elements
  int64_t decided = 0;  // likewise in WeightedEncode::decided
  int32_t first = 0, last = 0;
  int32_t row = 0;          // of DeviceWeightedRows
  int32_t first_block = 0;  // of position 0 in the places
  // Encoding: the elements of tokens before body_first are codes already, i16 in the caller's
  // order, and the exponents of their values are given in WeightedEncode::decided. Decoding: the
  // positions that the row's blocks hold: what a block must have. Where token `first` goes; null:
  // to `at` of the call's output. Elements from a token to the next; 0: the call's.
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
  const uint16_t* keys = nullptr;    // after RoPE
  const uint16_t* values = nullptr;  // laid out as keys
  // Each token has the exponent G of its importance in byte 0, and that of its value in byte 1
  // where byte 2 is not 0.
  const uint8_t (*decided)[4] = nullptr;
  const WeightedRange* ranges = nullptr;  // [num_ranges]; each begins and ends where blocks do
  DeviceWeightedRows rows;
  DeviceBook books[2];  // by component
  // In, out, of keys and of values: where block first_block + position / 64 goes, units being the
  // room there, then what it takes. Without `bytes` only units are written.
  WeightedPlace* places[2] = {nullptr, nullptr};
  uint8_t* bytes = nullptr;  // out: [size], 16-byte aligned
  // out: [num_ranges, most_blocks, 2], by block of the range and component; kOk where there is
  // none.
  StatusCode* status = nullptr;
  // Where not null, [num_ranges, most_blocks, 2] as status. Without `bytes`, out: 1 where the
  // block's bytes lie over its own tokens, which then are gone; only blocks of one slice do, and
  // ranges must have 64 contiguous tokens for each block, from 16-byte aligned addresses on. With
  // `bytes`, in: what is 1 is left alone.
  uint8_t* kept = nullptr;
  int64_t size = 0;               // of bytes
  int64_t token_stride = 0;       // in elements, of keys and of values
  DType dtype = DType::kFloat16;  // or kBFloat16
  int32_t num_ranges = 0;
  int32_t most_blocks = 0;  // that a range meets
};

struct WeightedDecode {
  const uint8_t* bytes = nullptr;         // [size], 16-byte aligned
  const WeightedPlace* places = nullptr;  // of the component
  const WeightedRange* ranges = nullptr;  // [num_ranges]
  // Out: fp16 or bf16, keys rotated to their positions unless rows.rope.pairs is 0. Null where each
  // range has its own. Addresses and strides that are multiples of 16 bytes are the fastest.
  uint16_t* out = nullptr;
  StatusCode* status = nullptr;  // out: [num_ranges, most_blocks]; kOk where there is none
  DeviceWeightedRows rows;
  DeviceBook book;
  Component component = Component::kKey;
  DType dtype = DType::kFloat16;  // or kBFloat16
  int64_t size = 0;
  int64_t token_stride = 0;  // in elements
  int32_t num_ranges = 0;
  int32_t most_blocks = 0;  // that a range meets
  // The most bytes that a block (slice) may have: more warps fit with less. Larger blocks get
  // kOutOfRange.
  int32_t max_block_bytes = kMaxCodedBlockBytes;
};
}  // namespace tierkv

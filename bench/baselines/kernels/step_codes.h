// SPDX-License-Identifier: Apache-2.0
// Codes of a global step for many rows at once: round(x / step), signed, 16 bits, of keys or values
// in the basis none or mean. What entropy coding takes (codec/format/coded_block.h).
//
// step_codes_host() loops over quantize_absolute(); step_codes() is one kernel that makes the same
// codes, with true divisions.
//
// Bound: memory, an element in and a code out.
#pragma once

#include <cstdint>

#include "tierkv/layout.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

// Tokens of one row. Offsets and strides are in elements and multiples of 8.
struct alignas(16) StepRow {
  int64_t input = 0;   // of token 0 in x
  int64_t output = 0;  // of token 0 in codes
  int32_t num_tokens = 0;
  int32_t step = 0;  // index of its step and mean: the (layer, kv_head)
};

// All pointers in host memory or all in device memory.
struct StepCodes {
  const void* x = nullptr;        // dtype, 16-byte aligned
  int16_t* codes = nullptr;       // 16-byte aligned
  const StepRow* rows = nullptr;  // [num_rows], aligned to 16 bytes
  const float* steps = nullptr;   // [num_steps], positive and finite
  const float* means = nullptr;   // [num_steps, head_dim], subtracted first; null: none
  StatusCode* status = nullptr;   // out: [num_rows]
  int64_t x_token_stride = 0, codes_token_stride = 0;
  int32_t num_rows = 0, num_steps = 0;
  int32_t max_tokens = 0;  // of a row, at least
  int32_t head_dim = 0;    // a multiple of 8, at most kMaxHeadDim
  DType dtype = DType::kFloat16;

  // kInvalidArgument naming the field. Reads no array.
  Status validate() const;
};

// Each row's status: kInvalidArgument for offsets, lengths or steps that are not there, kNonFinite,
// kOutOfRange for a code beyond 16 bits; the greatest that applies. The codes of a row that fails
// are not defined.
Status step_codes_host(const StepCodes& s);
// A kernel and a memset of the status. kCuda when one fails.
Status step_codes(const StepCodes& s, GpuStream stream);

}  // namespace tierkv

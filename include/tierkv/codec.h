// SPDX-License-Identifier: Apache-2.0
// Tokens into unified pages and back, on the host: the same bytes that the kernels write and read.
//
// Use it to fill or inspect pages without a GPU: to import and export caches, to test, to measure
// what a format does to your keys and values. A page belongs to one row (sequence, layer, kv_head);
// the caller owns its memory. choose_page_size() in tierkv/page.h finds a page_bytes that suits all
// formats of a pool.
//
//   PageFormat format{token_wise_tier(8, 4), 128, 13312};  // K8V4: 64 tokens of 128 channels
//   Status s = encode_page(format, page, 0, batch);        // TokenBatch: k, v, scores, positions
//   s = decode_page(format, page, 0, out);
#pragma once

#include <cstdint>

#include "tierkv/export.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv {

// Tokens to be written. Token i is row rows[i] of every array, or row i where rows is null.
struct TokenBatch {
  const void* k = nullptr;  // dtype [rows, head_dim], rows row_stride elements apart
  const void* v = nullptr;  // likewise
  // Both are read only for pages with records.
  const float* scores = nullptr;       // [rows], finite
  const int32_t* positions = nullptr;  // [rows], not negative
  const int32_t* rows = nullptr;       // [count] or null
  int64_t row_stride = 0;              // 0: head_dim
  int32_t count = 0;
  DType dtype = DType::kFloat16;
};

// Where tokens are read to; null pointers are skipped. Token i goes to row rows[i], or row i where
// rows is null.
struct TokenOutput {
  void* k = nullptr;              // dtype [rows, head_dim], rows row_stride elements apart
  void* v = nullptr;              // likewise
  float* scores = nullptr;        // [rows]; null where pages have no records
  int32_t* positions = nullptr;   // [rows]; likewise
  const int32_t* rows = nullptr;  // [count] or null
  int64_t row_stride = 0;         // 0: head_dim
  int32_t count = 0;
  DType dtype = DType::kFloat32;  // kFloat16 saturates at +-65504: fp16 parameters may carry a
                                  // value past the input's range
};

struct PageFormat {
  TierFormat tier;
  int32_t head_dim = 0;               // 64, 96, 128 or 256
  int32_t page_bytes = 0;             // a multiple of kPageAlignment
  DType raw_dtype = DType::kFloat16;  // of components with 16 bits: kFloat16 or kBFloat16
  bool records = true;                // false: pages end before their scores and positions
};

// Tokens that a page holds. kUnsupported names a format without pages, kInvalidArgument a
// page_bytes that holds none.
TKV_API Result<int32_t> page_tokens(const PageFormat& format);

// Appends tokens to a page of `used` tokens; memory that was never a page needs no initialisation
// when `used` is 0. kNonFinite, kOutOfRange: a value that its format cannot hold; the page still
// holds its `used` tokens, what lies behind them is unspecified.
TKV_API Status encode_page(const PageFormat& format, void* page, int32_t used,
                           const TokenBatch& batch);

// Reads slots first_slot, first_slot + 1, ... Any bytes can be read: damaged scales give NaN or
// infinity.
TKV_API Status decode_page(const PageFormat& format, const void* page, int32_t first_slot,
                           const TokenOutput& out);

}  // namespace tierkv

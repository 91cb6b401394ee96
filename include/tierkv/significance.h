// SPDX-License-Identifier: Apache-2.0
// How much later queries look at each token of a prompt, for a layer of a ragged batch. Also the
// log-sum-exp that this needs, where attention has not kept it.
//
//   significance[kv_head][t] = mean over the counted queries j > t of max over the heads h of the
//                              group of exp(sm_scale q_h,j . k_t - lse[h][j]), 0 where there is
//                              none
//   lse[h][j]                = log of the sum over t <= j of exp(sm_scale q_h,j . k_t)
//
// LayerAppend::significance of a store takes it. The queries n - 1, n - 1 - query_stride, ... of a
// prompt of n tokens are counted, at positions from 0: every token but the last has one behind it.
// query_stride 1 counts all, as DiffKV section 4 does. Work falls with the stride.
// docs/notes/2026-11-22-sampled-significance.md measures what sampling does to a compressed cache.
//
//   SignificanceCall p;          // shapes, strides, sm_scale
//   prompt_lse(p, lse, stream);  // or the lse of a prefill that kept it
//   prompt_significance(p, lse, significance, stream);
//
// Results repeat bit for bit on a device: sums run in an order that depends on the shape and on how
// many multiprocessors there are. A score that is not finite makes the significance of its token
// NaN or infinite.
#pragma once

#include <cstdint>

#include "tierkv/export.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

inline constexpr int32_t kMaxScoreGroup = 16;  // query heads of a kv_head
inline constexpr int32_t kMaxQueryStride = 4096;

// What makes the products. kAny: wgmma where the binary has it for the device, otherwise mma.sync.
// The others are for tests and comparisons.
enum class ScoreProducts : uint8_t { kAny, kMma, kWgmma };

// Queries and keys of all sequences, one after the other: both after RoPE, where there is one.
struct TKV_API SignificanceCall {
  const void* q = nullptr;  // dtype; token t, head h at t * q_token_stride + h * q_head_stride
  const void* k = nullptr;  // likewise; on a device both aligned to 16 bytes
  // [num_sequences + 1] first token of each sequence, ascending; null: num_sequences is 1
  const int32_t* starts = nullptr;
  // Elements, at least head_dim; on a device multiples of 8.
  int64_t q_token_stride = 0, q_head_stride = 0;
  int64_t k_token_stride = 0, k_head_stride = 0;
  int32_t num_sequences = 0;  // on a device at most 65535
  // On a device: at least the longest sequence, at most total_tokens; equal to it where starts is
  // null.
  int32_t max_tokens = 0;
  int32_t total_tokens = 0;  // of all
  int32_t num_q_heads = 0, num_kv_heads = 0;
  int32_t head_dim = 0;           // on a device 64, 96, 128 or 256
  DType dtype = DType::kFloat16;  // on a device kFloat16 or kBFloat16
  double sm_scale = 0;
  int32_t query_stride = 16;  // 1 to kMaxQueryStride
  ScoreProducts products = ScoreProducts::kAny;

  // For a device: kInvalidArgument or kUnsupported naming the field. Reads no array.
  Status validate() const;
};

// All pointers, also `starts`, are in device memory. lse [num_q_heads, total_tokens] in, of
// counted queries alone; significance [num_kv_heads, total_tokens] out, of every token. Runs on
// sm_80 and up; can be captured. kUnsupported where the binary has no code for the device, or not
// the products that were asked for, or where a sequence has more counted queries than a launch
// takes: half a million or more. kCuda when a launch fails.
TKV_API Status prompt_significance(const SignificanceCall& p, const float* lse, float* significance,
                                   GpuStream stream);

// lse [num_q_heads, total_tokens], natural logarithm, of counted queries. The call may use the
// entries of other queries: each of them keeps its value or becomes NaN.
TKV_API Status prompt_lse(const SignificanceCall& p, float* lse, GpuStream stream);

// The references, in double, one thread: all pointers in host memory, any head_dim, group and
// dtype. max_tokens and products are not looked at. kInvalidArgument as above, and where starts do
// not ascend from 0 to total_tokens; kNonFinite when a score is not finite: outputs are then
// unspecified.
TKV_API Status prompt_significance_host(const SignificanceCall& p, float* significance);
TKV_API Status prompt_lse_host(const SignificanceCall& p, float* lse);

}  // namespace tierkv

// Over the prompts of a ragged batch, on the tensor cores: how much later queries look at a token,
// and the log-sum-exp that it needs, where attention has not kept it.
//
//   significance[kv_head][t] = 1 / (n - t) sum over j > t of max over the heads h of the group of
//                              exp(sm_scale q_h,j . k_t - lse[h][j]),   t = 1 .. n, 0 for t = n
//   lse[h][j]                = log of the sum over t <= j of exp(sm_scale q_h,j . k_t)
//
// codec/policy/significance.h, exact_significance(), is the reference in double; sums run in an
// order that depends on the shape alone, so results repeat bit for bit. A score that is not finite
// makes the significance of its token NaN or infinite, which tiering refuses by name.
//
// Bound: matrix products, n^2 head_dim operations for each query head (half of them masked), a half
// of what causal attention does.
#pragma once

#include <cstdint>

#include "tierkv/layout.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

inline constexpr int32_t kMaxScoreGroup = 16;  // query heads of a kv_head

// What products are made with: wgmma where the binary has it for the device, otherwise mma.sync.
// The others are for tests and comparisons.
enum class ScoreProducts : uint8_t { kAny, kMma, kWgmma };

// Queries and keys of all sequences, one after the other; all pointers in device memory.
struct PromptScores {
  const void* q = nullptr;  // dtype; token t, head h at t * q_token_stride + h * q_head_stride
  const void* k = nullptr;  // likewise; both 16-byte aligned
  const int32_t* starts = nullptr;  // [num_sequences + 1] first token of each sequence, ascending
  int64_t q_token_stride = 0, q_head_stride = 0;  // elements, multiples of 8
  int64_t k_token_stride = 0, k_head_stride = 0;
  int32_t num_sequences = 0;
  int32_t max_tokens = 0;    // of a sequence, at least
  int32_t total_tokens = 0;  // of all
  int32_t num_q_heads = 0, num_kv_heads = 0;
  int32_t head_dim = 0;           // 64, 96, 128 or 256
  DType dtype = DType::kFloat16;  // kFloat16 or kBFloat16
  double sm_scale = 0;
  ScoreProducts products = ScoreProducts::kAny;

  // kInvalidArgument or kUnsupported naming the field. Reads no array.
  Status validate() const;
};

// lse [num_q_heads, total_tokens] in, significance [num_kv_heads, total_tokens] out; every token of
// a sequence is written. Runs on sm_80 and up. kUnsupported where the binary has no code for the
// device, or not the products that were asked for; kCuda when a launch fails.
Status prompt_significance(const PromptScores& p, const float* lse, float* significance,
                           GpuStream stream);

// lse [num_q_heads, total_tokens], natural logarithm.
Status prompt_lse(const PromptScores& p, float* lse, GpuStream stream);

}  // namespace tierkv

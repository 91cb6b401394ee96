#include "codec/gpu/prompt_scores.h"

#include <cmath>

#include "codec/format/page_layout.h"

namespace tierkv {
namespace {

Status invalid(const char* why) {
  return Status(StatusCode::kInvalidArgument, why);
}
bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}
bool is_stride(int64_t stride, int32_t head_dim) {
  return stride >= head_dim && stride % 8 == 0;
}

}  // namespace

Status PromptScores::validate() const {
  if (num_sequences < 0 || max_tokens < 0 || total_tokens < 0 || max_tokens > total_tokens) {
    return invalid("num_sequences, max_tokens or total_tokens is out of range");
  }
  if (num_sequences > 65535) return Status(StatusCode::kUnsupported, "num_sequences above 65535");
  if (num_kv_heads < 1 || num_q_heads < 1 || num_q_heads % num_kv_heads != 0) {
    return invalid("num_q_heads is not a multiple of num_kv_heads");
  }
  if (num_q_heads / num_kv_heads > kMaxScoreGroup) {
    return Status(StatusCode::kUnsupported, "more than 16 query heads for a kv_head");
  }
  if (!has_page_layout(head_dim)) {
    return Status(StatusCode::kUnsupported, "head_dim must be 64, 96, 128 or 256");
  }
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
    return Status(StatusCode::kUnsupported, "dtype must be float16 or bfloat16");
  }
  if (!std::isfinite(sm_scale) || sm_scale <= 0) {
    return invalid("sm_scale must be positive and finite");
  }
  if (total_tokens == 0 || num_sequences == 0) return Status::ok();
  if (q == nullptr || k == nullptr || starts == nullptr) return invalid("q, k or starts is null");
  if (!is_aligned(q) || !is_aligned(k)) return invalid("q or k is not aligned to 16 bytes");
  if (!is_stride(q_token_stride, head_dim) || !is_stride(q_head_stride, head_dim) ||
      !is_stride(k_token_stride, head_dim) || !is_stride(k_head_stride, head_dim)) {
    return invalid("a stride is below head_dim or no multiple of 8");
  }
  return Status::ok();
}

}  // namespace tierkv

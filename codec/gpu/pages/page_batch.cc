#include "codec/gpu/pages/page_batch.h"

#include "codec/format/element.h"

namespace tierkv {
namespace {

Status invalid(const char* why) {
  return Status(StatusCode::kInvalidArgument, why);
}

bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0;
}

}  // namespace

bool PageFormats::has_norm() const {
  for (int32_t i = 0; i < count; ++i) {
    if (rule[i][0] == StepRule::kNorm || rule[i][1] == StepRule::kNorm) return true;
  }
  return false;
}

Status PageFormats::validate(int64_t page_bytes) const {
  if (count < 1 || count > kMaxPageFormats) return invalid("formats: 1 to 4 are needed");
  if (!is_raw_dtype(raw_dtype)) return invalid("raw_dtype must be float16 or bfloat16");
  for (int32_t i = 0; i < count; ++i) {
    if (!is_page_layout(layout[i])) return invalid("a page layout is not one of ours");
    if (layout[i].used_bytes > page_bytes) return invalid("a layout is larger than a page");
    if (layout[i].head_dim() != layout[0].head_dim()) return invalid("formats differ in head_dim");
    if (layout[i].has_records() != layout[0].has_records()) {
      return invalid("some formats have records, others not");
    }
    for (const Component c : {Component::kKey, Component::kValue}) {
      const bool is_norm = rule_of(i, c) == StepRule::kNorm;
      if (is_norm ? layout[i].tile(c).type != kCodes2 : rule_of(i, c) != StepRule::kMinMax) {
        return invalid("a rule is none that pages of these bits have");
      }
    }
  }
  return Status::ok();
}

Status PageBatch::validate() const {
  if (Status s = pool.validate(); !s) return s;
  if (Status s = formats.validate(pool.page_bytes); !s) return s;
  if (num_jobs < 0) return invalid("num_jobs is negative");
  if (num_rows < 1) return invalid("num_rows must be positive");
  if (status == nullptr) return invalid("status is null");
  if (num_jobs > 0 && (jobs == nullptr || !is_aligned(jobs))) {
    return invalid("jobs are null or not aligned to 16 bytes");
  }
  if (dtype != DType::kFloat32 && !is_raw_dtype(dtype)) return invalid("bad dtype");
  if (token_stride < formats.layout[0].head_dim() ||
      token_stride * dtype_bytes(dtype) % kVectorBytes != 0) {
    return invalid("token_stride is below head_dim or no multiple of 16 bytes");
  }
  return Status::ok();
}

Status PageEncode::validate() const {
  if (Status s = batch.validate(); !s) return s;
  if (batch.num_jobs == 0) return Status::ok();
  if (k == nullptr || v == nullptr) return invalid("keys or values are null");
  if (scores == nullptr && batch.formats.layout[0].has_records()) {
    return invalid("scores are null");
  }
  if (!is_aligned(k) || !is_aligned(v)) return invalid("keys or values are not 16-byte aligned");
  return Status::ok();
}

Status PageDecode::validate() const {
  if (Status s = batch.validate(); !s) return s;
  if (!is_aligned(k) || !is_aligned(v)) return invalid("keys or values are not 16-byte aligned");
  return Status::ok();
}

}  // namespace tierkv

// What the kernels of a prompt's end share.
#pragma once

#include "store/coded/coded_device_encode.cuh"

namespace tierkv {

__device__ inline Component component_of(int64_t i) {
  return i % 2 == 0 ? Component::kKey : Component::kValue;
}

// That the prompt of a sequence codes, of each row.
__device__ inline int32_t coded_blocks(const CodedDeviceState& d, const SequenceInfo& info) {
  return coded_tokens_after_prompt(info.num_tokens, d.s.window_tokens) / kBlockTokens;
}

__device__ inline RawBlock prompt_block(const CodedDeviceState& d, const CodedRowOf& r, Component c,
                                        int32_t block) {
  return {d.s.page_bytes(d.s.page_id(r.row, kRawSide, block)), d.s.means(c, r.row), r.row, c};
}

// becomes_fixed() of a block of a prompt, by the whole warp.
__device__ inline bool becomes_fixed(const CodedDeviceState& d, const CodedRowOf& r,
                                     int32_t block) {
  if (!d.s.fixed.format.any()) return false;
  const uint8_t* page = d.s.page_bytes(d.s.page_id(r.row, kRawSide, block));
  bool takes = false;
  for (int32_t slot = lane_index(); slot < kBlockTokens; slot += kWarpLanes) {
    const float score = *reinterpret_cast<const float*>(page + raw_score_byte(d.s.head_dim, slot));
    takes |= d.s.fixed.takes(block * kBlockTokens + slot, score);
  }
  return __any_sync(kFullWarp, takes);
}

__device__ inline void report_code(const CodedDeviceState& d, const CodedRowOf& r) {
  report_failure(d.common, {StatusCode::kOutOfRange, DeviceCall::kEndPrompt,
                            r.within / d.s.num_kv_heads, r.sequence});
}

inline int32_t rows_of(const CodedDeviceState& d, int32_t count) {
  return count * d.s.rows_per_sequence();
}

// The means of the rows of the batch, then their steps.
Status find_prompt_basis(const CodedDeviceState& d, const PromptEnd& prompt, GpuStream stream);

}  // namespace tierkv

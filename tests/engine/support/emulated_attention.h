// SPDX-License-Identifier: Apache-2.0
// attend_coded() on the host, thread by thread: kernels of head_dim 64 and 128 whose keys turn in
// halves, and those of raw blocks; fp16.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/coded/coded_join.cuh"
#include "attention/coded/coded_kernel.cuh"
#include "attention/coded/raw_rows.cuh"
#include "codec/format/element.h"
#include "tierkv/status.h"

namespace tierkv {

__align__(1024) inline uint8_t shared[228 << 10];

struct EmulatedAttention {
  static constexpr int32_t kCtas = 2;
  const CodedAttention& call;

  Status run() const {
    if (Status s = call.validate(); !s) return s;
    if (Status s = call.validate_arrays(); !s) return s;
    const CodedKernel kernel = find_kernel();
    if (kernel == nullptr || call.dtype != DType::kFloat16) {
      return Status(StatusCode::kUnsupported, "emulated attention");
    }
    std::vector<uint16_t> halves;
    const QueryColumns columns = coded_columns(call);
    const auto* q = static_cast<const uint16_t*>(call.q);
    for (int32_t r = 0; r < call.num_rows; ++r) {
      for (int32_t c = 0; c < call.all_columns(); ++c) {
        const auto* from = q + columns.place(r, c) * call.head_dim;
        halves.insert(halves.end(), from, from + call.head_dim);
      }
    }
    for (int32_t first = 0; first < call.all_columns(); first += kCodedColumns) {
      run_pass(kernel, halves, first);
    }
    return Status::ok();
  }

 private:
  CodedKernel find_kernel() const {
    if (call.raw_blocks) {
      return call.head_dim == 64 ? raw_rows_kernel<4> : raw_rows_kernel<8>;
    }
    switch (key_turning(call.weighted, call.head_dim)) {
      case KeyTurning::kNone:
        return nullptr;
      case KeyTurning::kHalves:
        return of_turning<KeyTurning::kHalves>();
      case KeyTurning::kPartHalves:
        return of_turning<KeyTurning::kPartHalves>();
      default:
        return of_turning<KeyTurning::kNeighbours>();
    }
  }
  template <KeyTurning kTurning>
  CodedKernel of_turning() const {
    const bool one = call.keys.codebook.streams_per_lane == 1;
    if (call.head_dim == 64) return one ? kernel<4, 1, kTurning> : kernel<4, 2, kTurning>;
    return one ? kernel<8, 1, kTurning> : kernel<8, 2, kTurning>;
  }
  template <int kDimBlocks, int kStreams, KeyTurning kTurning>
  static constexpr CodedKernel kernel =
      coded_attention_kernel<kDimBlocks, WeightedCode<kStreams, 0, kTurning>>;

  CodedKernelParams params() const {
    CodedKernelParams p{};
    p.call = call;
    p.grid.num_ctas = kCtas;
    p.grid.warps = 2;
    p.row_columns = call.all_columns();
    p.queries = coded_columns(call);
    if (call.raw_blocks) return p;
    p.grid.slot_bytes = (2 * call.max_block_bytes + 127) / 128 * 128;
    p.headers = {expected_header(call.keys.codebook, call.head_dim),
                 expected_header(call.values.codebook, call.head_dim)};
    p.key_mask = table_mask(call.keys.codebook.max_length, 0);
    p.value_mask = table_mask(call.values.codebook.max_length, 0);
    p.table_bytes = static_cast<uint32_t>(table_region_bytes(longest_word(call), 0));
    const CodedSharedLayout at = coded_shared_layout(
        EmulatedShared::kStart, p.table_bytes, static_cast<uint32_t>(p.grid.slot_bytes),
        static_cast<uint32_t>(p.grid.warps),
        weighted_tail_bytes(call.head_dim, true, p.grid.warps));
    p.grid.shared_bytes = static_cast<int32_t>(at.end - EmulatedShared::kStart);
    return p;
  }

  void run_pass(CodedKernel kernel, const std::vector<uint16_t>& halves, int32_t first) const {
    CodedKernelParams p = params();
    p.first_column = first;
    p.call.columns = std::min(p.row_columns - first, kCodedColumns);
    p.call.q = halves.data() + int64_t{first} * call.head_dim;
    emulated_shared() = {shared, static_cast<uint32_t>(sizeof(shared))};
    for (int32_t cta = 0; cta < kCtas; ++cta) {
      emulator::cta().run(
          cta, p.grid.warps * 32, [&] { kernel(p); }, kCtas);
    }
    const JoinLaunch join = join_launch(p.call, 0);
    for (int32_t cta = 0; cta < join.ctas; ++cta) {
      emulator::cta().run(
          cta, join.warps * 32, [&] { join.kernel(p); }, join.ctas);
    }
  }
};

// In the stead of attention/coded's own.
inline size_t coded_attention_workspace_bytes(const CodedAttention& call,
                                              const CodedAttentionGrid&) {
  const size_t partials = EmulatedAttention::kCtas * 2 + call.num_rows;
  return partials * kCodedColumns * (call.head_dim + 2) * sizeof(float);
}
inline int32_t longest_attended_word = kMaxCodeLength;
inline Result<CodedAttentionGrid> choose_coded_grid(const CodedAttention& call,
                                                    const DeviceLimits&) {
  const CodebookShape &keys = call.keys.codebook, &values = call.values.codebook;
  if (std::max(keys.max_length, values.max_length) > longest_attended_word) {
    return Status(StatusCode::kUnsupported, "emulated attention: a long word");
  }
  return CodedAttentionGrid{};
}
inline Result<CodedAttentionGrid> coded_attention_grid(const CodedAttention&) {
  return CodedAttentionGrid{};
}
inline Status attend_coded(const CodedAttention& call, const CodedAttentionGrid&, GpuStream) {
  return EmulatedAttention{call}.run();
}

}  // namespace tierkv

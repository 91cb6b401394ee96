// SPDX-License-Identifier: Apache-2.0
// Rows that several CTAs of the decode kernel share: each leaves a part in global memory, and one
// of the kernels here, which follows, joins the parts of every such row: one where rows are fewer
// than CTAs, one where they are not (shared_rows.cuh).
//
// A kernel of its own, because it may begin while the decode kernel still runs and its few warps
// leave room for the next decode kernel beside them: the CTAs of that one then need not wait for a
// multiprocessor whose CTA joins, and nobody waits for memory to order arrivals.
#pragma once

#include <cstdint>

#include "attention/tiers/decode.h"
#include "tierkv/attention.h"

namespace tierkv {

// The place of a CTA's part: a CTA has at most one row that began before it and one that goes on
// behind it.
TKV_HD constexpr int32_t part_index(int32_t cta, bool began_before) {
  return 2 * cta + (began_before ? 0 : 1);
}

struct SharedRowsParams {
  const WorkItem* items = nullptr;            // of the launch, [num_ctas * warps + 1]
  const float* parts = nullptr;               // [2 * num_ctas][of_row][head_dim]
  const SoftmaxState* part_states = nullptr;  // [2 * num_ctas][of_row]
  int32_t num_ctas = 0;                       // of the decode kernel
  int32_t num_rows = 0;                       // of the launch
  QueryColumns columns;
  bool is_bfloat16 = false;      // out
  int32_t warps = kDecodeWarps;  // of a CTA of the decode kernel
  void* out = nullptr;           // [batch][q_len][num_q_heads][head_dim]
  float* lse = nullptr;          // [batch][q_len][num_q_heads] or null
  const float* sinks = nullptr;  // [num_q_heads] or null
};

// Shared memory that the decode kernel leaves on a multiprocessor for a CTA of this kernel.
inline constexpr int32_t kSharedRowsRoom = 1024;

template <int32_t kClasses>
SharedRowsParams shared_rows_params(const DecodeParamsOf<kClasses>& d, int32_t num_ctas) {
  return {d.items,       d.parts, d.part_states, num_ctas, d.rows.num_rows, d.columns,
          d.is_bfloat16, d.warps, d.out,         d.lse,    d.sinks};
}

// attend() of tierkv/attention.h without its last kernel: of rows that several CTAs share there are
// parts, and *shared says where. Whoever reads the outputs joins them (engine_kernels.cuh).
Status attend_parts(const AttentionConfig& config, const AttentionGrid& grid,
                    const AttendCall& call, const AttentionWorkspace& workspace, GpuStream stream,
                    SharedRowsParams* shared);

// Behind a decode kernel, which must let the next kernel start only when its plan
// is complete.
Status launch_shared_rows(const SharedRowsParams& params, int32_t head_dim, GpuStream stream);

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// The rungs of the ladder that the fused decode kernel climbed, each a runnable kernel: what
// bench/gpu/bench_rungs.cu times side by side and docs/notes/2026-11-22-attention-ladder.md
// explains. Not part of libtierkv.
//
// Every rung computes what attend() computes, for head_dim 128, groups of 1 to 8 q heads, fp16, and
// tiers of raw, K8V4, K4V4 and K4V2 pages (the first: whatever DiffKV's layout can hold). All
// but the first read our pages; the first reads pages that transcode_pages() has rewritten. Work is
// cut on the host: every row into `splits` equal parts, whatever its length. A page id or count
// outside its pool or table is left out, without a report.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tierkv/attention.h"

namespace tierkv {

enum class Rung : int32_t {
  kDiffkv,    // CUDA cores, DiffKV's page layout
  kQueryAsA,  // tensor cores, queries as operand A, cooperative softmax: BitDecoding's form
  kKvAsA,     // keys and values as operand A, bulk copies; warps in rounds, a second kernel merges
  // The product but for one of its steps; all of them with a fixed split of the rows.
  kSyncLoads,    // copies through registers instead of bulk copies
  kCtaRounds,    // the warps of a CTA take chunks in rounds instead of items of their own
  kSecondMerge,  // a second kernel merges instead of the last to arrive
  kFixedSplit,   // nothing but the fixed split instead of the plan
};
inline constexpr int32_t kRungs = 7;

const char* rung_name(Rung rung);

struct RungGrid {
  int32_t splits = 1;
  int32_t device_shared_bytes = 0;  // that a CTA may have
};

// Splits that fill the current device's CTAs, for `count` sequences. kUnsupported, by name, for
// what the rung cannot do; kCuda when the device cannot be asked.
Result<RungGrid> rung_grid(Rung rung, const AttentionConfig& config, int32_t count);

// Device memory, aligned to 256 bytes, zero before the first use.
size_t rung_workspace_bytes(const AttentionConfig& config, const RungGrid& grid, int32_t count);

// Like attend(), after no plan; plan_is_settled is not looked at.
Status run_rung(Rung rung, const AttentionConfig& config, const RungGrid& grid,
                const AttendCall& call, const AttentionWorkspace& workspace, GpuStream stream);

// Rewrites every page that the table names, from call.pages to the same place of a pool at `to` (of
// the same size; the same memory is allowed), for Rung::kDiffkv.
Status transcode_pages(const AttentionConfig& config, const AttendCall& call, uint8_t* to,
                       GpuStream stream);

// The splits that keep a device with room for `resident_ctas` busy: the fewest whose last wave of
// CTAs is nearly as full as that of the best choice. `row_ctas` CTAs work on a split of a row.
int32_t choose_splits(int32_t rows, int32_t row_ctas, int32_t resident_ctas);

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <string>

#include "attention/core/workspace.h"
#include "attention/tiers/config_rows.h"
#include "attention/tiers/decode.h"
#include "attention/tiers/grid.h"
#include "attention/tiers/shared_rows.h"
#include "attention/work/plan.h"
#include "codec/format/errors.h"
#include "gpu/launch.cuh"

namespace tierkv {
namespace {

bool is_aligned(const void* p, size_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

Status validate_grid(const AttentionConfig& config, const AttentionGrid& grid) {
  if (grid.num_ctas < 1 || grid.num_ctas > kMaxCtas || grid.slots_per_warp < 1 ||
      grid.slots_per_warp > most_slots(config.head_dim) || grid.warps_per_cta < 1 ||
      grid.warps_per_cta > kDecodeWarps || grid.slot_bytes < least_slot_bytes(config) ||
      grid.slot_bytes % kSlotAlignment != 0 || grid.tile_cost < 0 ||
      grid.tile_cost > kMaxTileCost) {
    return invalid("grid is not one that attention_grid() returned");
  }
  return Status::ok();
}

Status validate_table(const AttentionConfig& config, const PageTableView& table) {
  const PageTableShape& shape = table.shape;
  if (table.slots == nullptr || table.tokens == nullptr) return invalid("page table is null");
  if (shape.num_sequences < 1 || shape.num_sequences > kMaxSequences) {
    return invalid("page table num_sequences must be 1 to " + std::to_string(kMaxSequences));
  }
  if (shape.rows_per_sequence != config.num_layers * config.num_kv_heads) {
    return invalid("page table rows_per_sequence is not num_layers * num_kv_heads");
  }
  if (int64_t{shape.num_sequences} * shape.rows_per_sequence > INT32_MAX) {
    return invalid("page table has more than 2^31 - 1 rows");
  }
  if (shape.num_sides > kMaxSides) return invalid("page table num_sides is above 4");
  for (const int32_t slots : shape.table_slots) {
    if (slots < 0 || slots > kMaxTableSlots) {
      return invalid("page table table_slots must be 0 to " + std::to_string(kMaxTableSlots));
    }
  }
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    const std::string name = "tier " + std::to_string(t) + ": side ";
    const int32_t side = config.tiers[t].side;
    if (side >= shape.num_sides) return invalid(name + "is not in the page table");
    const Result<PageLayout> layout = tier_layout(config, t);
    if (!layout) return layout.status();
    if (config.classes.count == 1 && shape.tokens_per_page[side] != layout->tokens) {
      return invalid(name + "has another number of tokens per page than its format");
    }
    if (shape.table_slots[side / 2] < 1) return invalid(name + "has no slots");
  }
  return Status::ok();
}

// Everything that plan_attention() and attend() share.
Status validate_call(const AttentionConfig& config, const AttentionGrid& grid,
                     const PageTableView& table, const AttentionBatch& batch,
                     const AttentionWorkspace& workspace) {
  if (Status s = config.validate(); !s) return s;
  if (Status s = validate_grid(config, grid); !s) return s;
  if (Status s = validate_table(config, table); !s) return s;
  if (batch.count < 1) return invalid("batch is empty");
  if (batch.count > INT32_MAX / config.num_layers / config.num_q_heads / config.q_len) {
    return invalid("batch has too many rows");
  }
  if (batch.sequences == nullptr && batch.count > table.shape.num_sequences) {
    return invalid("batch is longer than the page table and names no sequences");
  }
  return check_workspace(workspace, workspace_layout(config, grid, batch.count).bytes);
}

Status validate_attend(const AttentionConfig& config, const AttendCall& call) {
  if (Status s = call.pages.validate(); !s) return s;
  if (call.pages.page_bytes != config.page_bytes)
    return invalid("page_bytes of pool and config differ");
  if (call.layer < 0 || call.layer >= config.num_layers) return invalid("layer is out of range");
  if (call.q == nullptr || !is_aligned(call.q, 16)) return invalid("q is null or not aligned");
  if (call.out == nullptr || !is_aligned(call.out, 16))
    return invalid("out is null or not aligned");
  if (!is_aligned(call.lse, 4)) return invalid("lse is not aligned");
  if (!is_aligned(call.sinks, 4)) return invalid("sinks are not aligned");
  return validate_tail(config, call.tail);
}

TailSource tail_source(const AttentionConfig& config, const AttentionTail& tail) {
  if (config.q_len == 1 || tail.is_elsewhere) return {};
  return {tail.tier < 0 ? config.num_tiers - 1 : tail.tier, tail.newest, tail.ring_first,
          tail.ring_tokens};
}

template <int32_t kClasses>
Status plan_of(const AttentionConfig& config, const AttentionGrid& grid, const PageTableView& table,
               const AttentionBatch& batch, const AttentionWorkspace& workspace, GpuStream stream) {
  const WorkspaceLayout layout = workspace_layout(config, grid, batch.count);
  PlanParamsOf<kClasses> params;
  params.rows = config_rows<kClasses>(config, grid, table, batch, 0);
  if constexpr (kClasses > 1) {
    for (int32_t i = 0; i < config.num_layers; ++i) params.layers[i] = head_planes(config, i);
  }
  params.items = workspace_at<WorkItem>(workspace, layout.items);
  params.row_status = workspace_at<int32_t>(workspace, layout.row_status);
  params.max_ctas = grid.num_ctas;
  params.even_ctas = even_ctas(params.rows.num_rows, grid.num_ctas);
  params.warps = grid.warps_per_cta;
  params.num_layers = config.num_layers;
  return launch_plan(params, stream);
}

// A validated call.
template <int32_t kClasses>
Status attend_of(const AttentionConfig& config, const AttentionGrid& grid, const AttendCall& call,
                 const AttentionWorkspace& workspace, GpuStream stream, SharedRowsParams* shared) {
  const WorkspaceLayout layout = workspace_layout(config, grid, call.batch.count);
  DecodeParamsOf<kClasses> params;
  params.rows = config_rows<kClasses>(config, grid, call.table, call.batch, call.layer);
  params.layer = call.layer;
  params.pool = call.pages.base;
  params.page_bytes = call.pages.page_bytes;
  params.num_pages = call.pages.num_pages;
  params.columns = query_columns(config);
  params.is_bfloat16 = config.dtype == DType::kBFloat16;
  params.tail = tail_source(config, call.tail);
  params.q = call.q;
  params.out = call.out;
  params.lse = call.lse;
  params.sinks = call.sinks;
  params.row_status = workspace_at<int32_t>(workspace, layout.row_status) +
                      static_cast<int64_t>(call.layer) * call.batch.count * config.num_kv_heads;
  params.items = workspace_at<WorkItem>(workspace, layout.items) +
                 static_cast<int64_t>(call.layer) * items_per_layer(grid);
  params.part_states = workspace_at<SoftmaxState>(workspace, layout.part_states);
  params.parts = workspace_at<float>(workspace, layout.parts);
  params.scale_log2 = static_cast<float>(config.sm_scale * 1.4426950408889634);
  params.slot_bytes = grid.slot_bytes;
  params.slots = grid.slots_per_warp;
  params.warps = static_cast<uint8_t>(grid.warps_per_cta);
  params.plan_is_settled = call.plan_is_settled;
  std::copy_n(call.settled, kAttentionTiers, params.settled);
  // Where a chunk lies in its tail is read with the chunk.
  if (params.tail.newest != nullptr) params.settled[params.tail.tier] = Settled::kNothing;
  *shared = shared_rows_params(params, grid.num_ctas);
  return launch_decode(params, config.head_dim, grid.num_ctas, stream);
}

// Lets the kernels of `config` use shared_bytes.
Status prepare(const AttentionConfig& config, int32_t shared_bytes) {
  if (Status s = prepare_plan(); !s) return s;
  const int32_t blocks = column_blocks(query_columns(config).of_row);
  return config.classes.count > 1
             ? prepare_decode<kMaxAttentionClasses>(config.head_dim, blocks, shared_bytes)
             : prepare_decode<1>(config.head_dim, blocks, shared_bytes);
}

}  // namespace

Result<AttentionGrid> attention_grid(const AttentionConfig& config) {
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  const Result<AttentionGrid> grid = choose_grid(config, limits->sms, limits->shared_bytes);
  if (!grid) return grid;
  if (Status s = prepare(config, limits->shared_bytes); !s) return s;
  return grid;
}

Status plan_attention(const AttentionConfig& config, const AttentionGrid& grid,
                      const PageTableView& table, const AttentionBatch& batch,
                      const AttentionWorkspace& workspace, GpuStream stream) {
  if (Status s = validate_call(config, grid, table, batch, workspace); !s) return s;
  return config.classes.count > 1
             ? plan_of<kMaxAttentionClasses>(config, grid, table, batch, workspace, stream)
             : plan_of<1>(config, grid, table, batch, workspace, stream);
}

Status attend_parts(const AttentionConfig& config, const AttentionGrid& grid,
                    const AttendCall& call, const AttentionWorkspace& workspace, GpuStream stream,
                    SharedRowsParams* shared) {
  if (Status s = validate_call(config, grid, call.table, call.batch, workspace); !s) return s;
  if (Status s = validate_attend(config, call); !s) return s;
  return config.classes.count > 1
             ? attend_of<kMaxAttentionClasses>(config, grid, call, workspace, stream, shared)
             : attend_of<1>(config, grid, call, workspace, stream, shared);
}

Status attend(const AttentionConfig& config, const AttentionGrid& grid, const AttendCall& call,
              const AttentionWorkspace& workspace, GpuStream stream) {
  SharedRowsParams shared;
  if (Status s = attend_parts(config, grid, call, workspace, stream, &shared); !s) return s;
  return launch_shared_rows(shared, config.head_dim, stream);
}

}  // namespace tierkv

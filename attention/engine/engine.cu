// SPDX-License-Identifier: Apache-2.0
#include "attention/engine/engine_kernels.cuh"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"

namespace tierkv {
namespace {

template <int32_t kDim>
uint32_t ctas_of(const EngineQueries& q) {
  return ctas_for(q.vectors(), kEngineWarps * kWarpTokens<kDim>);
}

AttentionWorkspace attention_part(const AttentionWorkspace& whole, const EngineWorkspace& layout) {
  return {workspace_at<void>(whole, layout.attention), layout.tokens - layout.attention};
}

PageTableView table_view(const EngineConfig& config, const EngineBatch& batch,
                         const AttentionWorkspace& workspace, const EngineWorkspace& layout) {
  return {table_shape(config, batch), workspace_at<int32_t>(workspace, layout.slots),
          workspace_at<SideCounts>(workspace, layout.tokens), nullptr};
}

}  // namespace

Status pack_queries(const EngineQueries& q, GpuStream stream) {
  return with_head_dim(q.head_dim, [&](auto dim) {
    return launch_after_previous(pack_queries_kernel<dim>, ctas_of<dim>(q), kEngineThreads, 0,
                                 stream, q)
        .with_context("queries of a batch");
  });
}

Status unpack_outputs(const EngineQueries& q, GpuStream stream) {
  return with_head_dim(q.head_dim, [&](auto dim) {
    return launch_after_previous(unpack_outputs_kernel<dim>, ctas_of<dim>(q), kEngineThreads, 0,
                                 stream, q)
        .with_context("outputs of a batch");
  });
}

Result<EngineGrid> engine_grid(const EngineConfig& config) {
  if (Status s = config.validate(); !s) return s;
  EngineGrid grid;
  for (int32_t queries = 1; queries <= config.max_queries; ++queries) {
    const Result<AttentionGrid> of = attention_grid(attention_config(config, queries));
    if (!of) return of.status();
    grid.of[queries - 1] = *of;
  }
  return grid;
}

Status engine_encode(const EngineConfig& config, const EngineLayer& layer,
                     const EngineTokens& tokens, GpuStream stream) {
  const Result<SlotEncode> e = slot_encode(config, layer, tokens);
  return e ? encode_slots(*e, stream) : e.status();
}

Status engine_decode(const EngineConfig& config, const EngineLayer& layer,
                     const EngineRanges& ranges, GpuStream stream) {
  const Result<BlockDecode> d = block_decode(config, layer, ranges);
  return d ? decode_blocks(*d, stream) : d.status();
}

Status engine_plan(const EngineConfig& config, const EngineGrid& grid, const EngineBatch& batch,
                   const AttentionWorkspace& workspace, GpuStream stream) {
  Result<BlockRows> rows = block_rows(config, batch);
  if (!rows) return rows.status();
  const EngineWorkspace layout = engine_workspace(config, grid);
  if (Status s = check_workspace(workspace, layout.bytes); !s) return s;
  rows->slots = workspace_at<int32_t>(workspace, layout.slots);
  rows->tokens = workspace_at<SideCounts>(workspace, layout.tokens);
  const dim3 ctas(static_cast<uint32_t>(batch.count), static_cast<uint32_t>(config.num_kv_heads));
  if (Status s = launch_kernel(block_rows_kernel, ctas, kEngineThreads, 0, stream, *rows); !s) {
    return s;
  }
  return plan_attention(attention_config(config, batch.queries), grid.of[batch.queries - 1],
                        table_view(config, batch, workspace, layout), {nullptr, batch.count},
                        attention_part(workspace, layout), stream);
}

Status engine_attend(const EngineConfig& config, const EngineGrid& grid, const EngineAttend& call,
                     const AttentionWorkspace& workspace, GpuStream stream) {
  Result<EngineQueries> q = engine_queries(config, call);
  if (!q) return q.status();
  const EngineWorkspace layout = engine_workspace(config, grid);
  if (Status s = check_workspace(workspace, layout.bytes); !s) return s;
  const AttentionConfig attention = attention_config(config, call.batch.queries);
  const AttentionGrid& of = grid.of[call.batch.queries - 1];
  q->packed_q = workspace_at<void>(workspace, layout.q);
  q->packed_out = workspace_at<void>(workspace, layout.out);
  q->packed_lse = workspace_at<float>(workspace, layout.lse);
  q->row_status =
      attention_row_status(attention, of, call.batch.count, 0, attention_part(workspace, layout));
  if (Status s = pack_queries(*q, stream); !s) return s;
  AttendCall attend_call;
  attend_call.table = table_view(config, call.batch, workspace, layout);
  attend_call.pages = page_view(config, call.layer);
  attend_call.batch = {nullptr, call.batch.count};
  attend_call.q = q->packed_q;
  attend_call.out = workspace_at<void>(workspace, layout.out);
  attend_call.lse = call.lse == nullptr ? nullptr : workspace_at<float>(workspace, layout.lse);
  // The packing of queries lets attention start when all work before it has ended, and writes
  // neither.
  attend_call.plan_is_settled = true;
  attend_call.settled[0] = Settled::kAll;
  if (Status s = attend_parts(attention, of, attend_call, attention_part(workspace, layout), stream,
                              &q->shared);
      !s) {
    return s;
  }
  return unpack_outputs(*q, stream);
}

}  // namespace tierkv

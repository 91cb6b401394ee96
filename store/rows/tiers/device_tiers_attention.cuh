// SPDX-License-Identifier: Apache-2.0
// Attention over the bodies of tiers: the plan and the calls of attention/tiers, for queries and
// outputs in the coordinates of the pages.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/core/workspace.h"
#include "attention/engine/engine.h"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"
#include "store/place/device/batch_book.h"
#include "store/rows/device_memory.cuh"
#include "store/rows/device_row_format.h"
#include "store/rows/tiers/tiers_rows.h"
#include "tierkv/attention.h"

namespace tierkv::store {

inline constexpr int32_t kGatherThreads = 128;

// What attention needs to know of the states of sequences: to[num_rows] of the tables gets the
// counts of their tokens. A thread a row of every layer.
inline __global__ void __launch_bounds__(kGatherThreads)
    gather_counts_kernel(const __grid_constant__ DeviceStoreView view,
                         const __grid_constant__ TiersShape shape,
                         const __grid_constant__ SequenceBatch batch, SideCounts* to) {
  wait_for_previous_kernel();
  const int32_t rows = view.num_layers * view.num_kv_heads;
  const int32_t i = static_cast<int32_t>(blockIdx.x) * kGatherThreads + threadIdx.x;
  if (i >= batch.count * rows) return;
  const int32_t slot = batch.sequences[i / rows], layer = i % rows / view.num_kv_heads,
                kv_head = i % view.num_kv_heads;
  const auto* row =
      reinterpret_cast<const TiersRow*>(view.slots.state(slot, layer) + shape.row_byte(kv_head));
  to[view.pages.row(slot, layer, kv_head)] = {{row->tokens[0], row->tokens[1]}};
}

// Layers whose pages have the formats of one config.
struct TiersAttention {
  AttentionConfig config;                // of one query
  AttentionGrid grids[kMaxQueryTokens];  // by queries
  AttentionWorkspace workspaces[kBatchMemories];

  AttentionConfig of_queries(int32_t q_len) const {
    AttentionConfig c = config;
    c.q_len = q_len;
    return c;
  }
};

class DeviceTiersAttention {
 public:
  DeviceTiersAttention(const StoreConfig& config, const TiersRows& rows)
      : config_(config),
        is_raw_layer_(config.layout.num_layers),
        class_of_head_(rows.class_of_head()) {
    const CacheLayout& shape = config.layout;
    for (const int32_t l : config.raw_layers) {
      is_raw_layer_[l] = 1;
      std::fill_n(class_of_head_.begin() + int64_t{l} * shape.num_kv_heads, shape.num_kv_heads,
                  uint8_t{0});
    }
    AttentionConfig coded;
    coded.num_layers = shape.num_layers;
    coded.num_q_heads = shape.num_q_heads;
    coded.num_kv_heads = shape.num_kv_heads;
    coded.head_dim = shape.head_dim;
    coded.sm_scale = shape.sm_scale;
    coded.page_bytes = rows.sizes().page_bytes;
    coded.page_records = false;
    AttentionConfig raw = coded;
    raw.num_tiers = 1;
    raw.tiers[0] = {kHighSide, raw_tier()};
    const std::vector<TierClass>& classes = std::get<TiersFormat>(rows.config().format).classes;
    coded.num_tiers = 2;
    coded.tiers[0] = {kHighSide, classes[0].high};
    coded.tiers[1] = {kLowSide, classes[0].low};
    coded.classes.count = static_cast<int32_t>(classes.size());
    for (size_t c = 1; c < classes.size(); ++c) {
      coded.classes.format[c - 1][0] = classes[c].high;
      coded.classes.format[c - 1][1] = classes[c].low;
    }
    if (classes.size() > 1) coded.classes.of_head = class_of_head_.data();
    const auto raw_layers = static_cast<int32_t>(config.raw_layers.size());
    if (raw_layers < shape.num_layers) parts_.emplace_back().config = coded;
    if (raw_layers > 0) parts_.emplace_back().config = raw;
  }
  // Grids and memory.
  Status bind(const DeviceStoreView& view, DeviceMemory* memory) {
    view_ = view;
    for (TiersAttention& part : parts_) {
      if (Status s = bind_part(&part, memory); !s) return s;
    }
    const int64_t vectors =
        int64_t{config_.max_sequences} * kMaxQueryTokens * config_.layout.num_q_heads;
    for (SideCounts*& tokens : tokens_) {
      if (Status s = memory->take(view.pages.allocator.shape.table.num_rows(), &tokens); !s)
        return s;
    }
    if (Status s = memory->take(vectors * config_.layout.head_dim, &q_); !s) return s;
    if (Status s = memory->take(vectors * config_.layout.head_dim, &out_); !s) return s;
    return memory->take(vectors, &lse_);
  }
  // codes: those of the kernels.
  Status attend(const DeviceAttendBody& call, const TiersCodes& codes, GpuStream stream) {
    const int32_t index = call.is_captured ? 1 : 0;
    if (call.new_plan) {
      if (Status s = plan(call, codes, index, stream); !s) return s;
    }
    const TiersAttention& part = is_raw_layer_[call.layer] != 0 ? parts_.back() : parts_.front();
    EngineQueries queries = queries_of(call, codes);
    // Attention reads the plan before it waits, so packing must have waited for a new one.
    queries.is_settled = !call.new_plan;
    if (Status s = pack_queries(queries, stream); !s) return s;
    AttendCall attend;
    attend.table = table(part, index);
    attend.pages = {view_.pages.base, view_.pages.page_bytes,
                    view_.pages.allocator.shape.num_pages};
    attend.batch = {call.slots, call.count};
    attend.layer = call.layer;
    attend.q = q_;
    attend.out = out_;
    attend.lse = lse_;
    attend.tail.is_elsewhere = true;
    // The packing of queries lets attention start when all work before it has ended, and writes
    // neither.
    attend.plan_is_settled = true;
    std::fill_n(attend.settled, part.config.num_tiers, Settled::kAll);
    if (Status s = attend_parts(part.of_queries(call.q_len), part.grids[call.q_len - 1], attend,
                                part.workspaces[index], stream, &queries.shared);
        !s) {
      return s;
    }
    return unpack_outputs(queries, stream);
  }

 private:
  Status bind_part(TiersAttention* part, DeviceMemory* memory) {
    size_t bytes = 0;
    for (int32_t q_len = 1; q_len <= kMaxQueryTokens; ++q_len) {
      const AttentionConfig config = part->of_queries(q_len);
      const Result<AttentionGrid> grid = attention_grid(config);
      if (!grid) return grid.status().with_context("attention");
      part->grids[q_len - 1] = *grid;
      bytes = std::max(bytes, attention_workspace_bytes(config, *grid, config_.max_sequences));
    }
    for (AttentionWorkspace& workspace : part->workspaces) {
      uint8_t* taken = nullptr;
      if (Status s = memory->take(static_cast<int64_t>(bytes), &taken); !s) return s;
      workspace = {taken, bytes};
    }
    return Status::ok();
  }
  // The allocator counts pages; attention counts tokens.
  PageTableView table(const TiersAttention& part, int32_t index) const {
    PageTableView table = view_.pages.allocator.table();
    for (int32_t t = 0; t < part.config.num_tiers; ++t) {
      const AttentionTier& tier = part.config.tiers[t];
      const Result<PageLayout> layout =
          make_page_layout(tier.format, part.config.head_dim, part.config.page_bytes, false);
      table.shape.tokens_per_page[tier.side] = layout->tokens;
    }
    table.tokens = tokens_[index];
    return table;
  }
  Status plan(const DeviceAttendBody& call, const TiersCodes& codes, int32_t index,
              GpuStream stream) {
    const int64_t rows = int64_t{call.count} * view_.num_layers * view_.num_kv_heads;
    const uint32_t ctas = ctas_for(rows, kGatherThreads);
    const Status launched =
        launch_after_previous(gather_counts_kernel, ctas, kGatherThreads, 0, stream, view_,
                              codes.shape, SequenceBatch{call.slots, call.count}, tokens_[index]);
    if (!launched) return launched.with_context("counts of bodies");
    for (const TiersAttention& part : parts_) {
      // Where things lie in it depends on the call, and it begins with zeros.
      const AttentionConfig config = part.of_queries(call.q_len);
      const AttentionGrid& grid = part.grids[call.q_len - 1];
      const cudaError_t error =
          cudaMemsetAsync(part.workspaces[index].memory, 0,
                          attention_workspace_bytes(config, grid, call.count), stream);
      if (Status s = cuda_status(error, "workspace of attention"); !s) return s;
      if (Status s = plan_attention(config, grid, table(part, index), {call.slots, call.count},
                                    part.workspaces[index], stream);
          !s) {
        return s;
      }
    }
    return Status::ok();
  }
  EngineQueries queries_of(const DeviceAttendBody& call, const TiersCodes& codes) const {
    const CacheLayout& shape = config_.layout;
    EngineQueries q;
    if (is_raw_layer_[call.layer] == 0) {
      q.rotation = codes.rotation[0];
      q.out_rotation = codes.rotation[1];
      if (codes.key_means != nullptr) {
        q.key_mean =
            codes.key_means + int64_t{call.layer} * shape.num_kv_heads * int64_t{shape.head_dim};
      }
    }
    q.rows.num_kv_heads = shape.num_kv_heads;
    q.rows.batch.count = q.rows.batch.num_sequences = call.count;
    q.rows.batch.queries = call.q_len;
    q.num_q_heads = shape.num_q_heads;
    q.head_dim = shape.head_dim;
    q.num_tokens = int64_t{call.count} * call.q_len;
    q.sm_scale = static_cast<float>(shape.sm_scale);
    q.dtype = call.dtype;
    q.q = call.q;
    q.out = call.out;
    q.lse = call.lse;
    q.prior = call.prior;
    q.q_strides = q.out_strides = {int64_t{shape.num_q_heads} * shape.head_dim, shape.head_dim};
    q.lse_strides = {shape.num_q_heads, 1};
    q.packed_q = q_;
    q.packed_out = out_;
    q.packed_lse = lse_;
    return q;
  }

  StoreConfig config_;
  // Attention of layers with codes, then of raw layers. Raw layers have a plan of their own, so
  // that one class of the others stays one.
  std::vector<TiersAttention> parts_;
  std::vector<uint8_t> is_raw_layer_;   // [num_layers]
  std::vector<uint8_t> class_of_head_;  // [num_layers * num_kv_heads], 0 in raw layers
  DeviceStoreView view_;
  SideCounts* tokens_[kBatchMemories] = {};  // [table rows]
  uint16_t *q_ = nullptr, *out_ = nullptr;
  float* lse_ = nullptr;
};

}  // namespace tierkv::store

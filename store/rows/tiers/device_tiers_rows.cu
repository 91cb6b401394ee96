// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "attention/core/workspace.h"
#include "attention/engine/engine.h"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "store/place/device/batch_book.h"
#include "store/rows/device_memory.cuh"
#include "store/rows/tiers/device_tiers_read.cuh"
#include "store/rows/tiers/device_tiers_tiles.cuh"
#include "store/rows/tiers/tiers_rows.h"
#include "tierkv/attention.h"

namespace tierkv::store {
namespace {

constexpr int64_t kMostWarpTokens = kWarpTokens<64>;

// Warps that hold so many tokens.
template <int32_t kDim>
int64_t warps_for(int64_t tokens) {
  return (tokens + kWarpTokens<kDim> - 1) / kWarpTokens<kDim>;
}

constexpr int32_t kGatherThreads = 128;

// What attention needs to know of the states of sequences: to[num_rows] of the tables gets the
// counts of their tokens. A thread a row of every layer.
__global__ void __launch_bounds__(kGatherThreads)
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

class DeviceTiersRows final : public DeviceRowFormat {
 public:
  DeviceTiersRows(const StoreConfig& config, const TiersRows& rows);

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) override;
  int64_t workspace_bytes() const override { return memory_.bytes(); }
  int64_t most_pages(const DeviceWorks& works) const override;
  Status plan(const DeviceWorks& works, const DeviceRowCounts& counts) override;
  Status write(const DeviceWorks& works, const PageCopy* copies) override;

  Status attend(const DeviceAttendBody& call) override;
  Status read(const DeviceRead& call) override;
  Status check_imported(std::span<const HostLayer> layers, const LayerTokens* counts,
                        int32_t* fault) override;

  Status cut_counts(const DeviceWorks& works, const DeviceRowCounts& counts) override;
  Status cut(const DeviceWorks& works, const PageCopy* copies) override;

 private:
  int64_t rows_of(const DeviceWorks& works) const {
    return int64_t{works.entries()} * config_.layout.num_kv_heads;
  }
  TiersCall call_of(const DeviceWorks& works) const;
  // Grid of warps.
  template <class Kernel, class Call>
  Status launch(Kernel kernel, int64_t warps, const Call& call, const char* what,
                size_t shared_bytes = 0) const;
  // Grid and memory.
  Status bind_part(TiersAttention* part);
  PageTableView table(const TiersAttention& part, int32_t index) const;
  Status plan_attention_of(const DeviceAttendBody& call, int32_t index);
  EngineQueries queries_of(const DeviceAttendBody& call) const;

  StoreConfig config_;
  const TiersRows& rows_;
  DeviceMemory memory_{"tiers"};
  DeviceStoreView view_;
  DeviceFault* fault_ = nullptr;
  GpuStream stream_ = nullptr;
  TiersCodes codes_;
  TiersScratch scratch_;
  int64_t most_scratch_groups_ = 0, most_scratch_rows_ = 0;

  // Attention of layers with codes, then of raw layers. Raw layers have a plan of their own, so
  // that one class of the others stays one.
  std::vector<TiersAttention> parts_;
  std::vector<uint8_t> is_raw_layer_;        // [num_layers]
  std::vector<uint8_t> class_of_head_;       // [num_layers * num_kv_heads], 0 in raw layers
  SideCounts* tokens_[kBatchMemories] = {};  // [table rows]
  uint16_t *q_ = nullptr, *out_ = nullptr;
  float* lse_ = nullptr;
};

DeviceTiersRows::DeviceTiersRows(const StoreConfig& config, const TiersRows& rows)
    : config_(config),
      rows_(rows),
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

Status DeviceTiersRows::bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) {
  view_ = view;
  fault_ = fault;
  stream_ = stream;
  codes_.shape = rows_.shape();
  std::copy(rows_.classes().begin(), rows_.classes().end(), codes_.classes);
  for (const Component c : {Component::kKey, Component::kValue}) {
    if (rows_.bases(c).empty()) continue;
    codes_.rotation[static_cast<int32_t>(c)] = hadamard_rotation(config_.layout.head_dim);
  }
  std::vector<float> key_means;
  for (const Basis& basis : rows_.bases(Component::kKey)) {
    key_means.insert(key_means.end(), basis.mean.begin(), basis.mean.end());
  }
  memory_.put(rows_.class_of_head(), &codes_.class_of_head);
  memory_.put(key_means, &codes_.key_means);
  // A step is of all layers; a longer chunk of one, with any number of tokens.
  const int64_t heads = config_.layout.num_kv_heads;
  most_scratch_rows_ = config_.max_sequences * config_.layout.num_layers * heads;
  most_scratch_groups_ = std::max(most_scratch_rows_ * most_groups(kMaxStepTokens),
                                  config_.max_sequences * heads * most_groups(config_.max_tokens));
  memory_.take(most_scratch_rows_, &scratch_.drafts);
  memory_.take(most_scratch_groups_, &scratch_.groups);
  for (TiersAttention& part : parts_) {
    if (Status s = bind_part(&part); !s) return s;
  }
  const int64_t vectors =
      int64_t{config_.max_sequences} * kMaxQueryTokens * config_.layout.num_q_heads;
  memory_.take(view.pages.allocator.shape.table.num_rows(), &tokens_[0], &tokens_[1]);
  memory_.take(vectors * config_.layout.head_dim, &q_, &out_);
  memory_.take(vectors, &lse_);
  return memory_.status();
}

int64_t DeviceTiersRows::most_pages(const DeviceWorks& works) const {
  int64_t pages = 0;
  for (int32_t e = 0; e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    const int32_t leaving =
        most(0, move.to.body_end - most(move.from.body_end, config_.sink_tokens));
    for (int32_t h = 0; leaving > 0 && h < config_.layout.num_kv_heads; ++h) {
      pages += rows_.row_pages(move.layer, h, leaving, true);
    }
  }
  return pages;
}

TiersCall DeviceTiersRows::call_of(const DeviceWorks& works) const {
  TiersCall call;
  call.view = view_;
  call.codes = codes_;
  call.works = works;
  call.num_rows = static_cast<int32_t>(rows_of(works));
  call.scratch = scratch_;
  call.scratch.groups_of_row = most_groups(works.most_leaving);
  call.fault = fault_;
  return call;
}

template <class Kernel, class Call>
Status DeviceTiersRows::launch(Kernel kernel, int64_t warps, const Call& call, const char* what,
                               size_t shared_bytes) const {
  if (warps > INT32_MAX / kMostWarpTokens) {
    return Status(StatusCode::kOutOfRange, "too many tokens in a call");
  }
  return launch_after_previous(kernel, ctas_for(warps, kTiersWarps), kTiersThreads, shared_bytes,
                               stream_, call)
      .with_context(what);
}

Status DeviceTiersRows::plan(const DeviceWorks& works, const DeviceRowCounts& counts) {
  if (works.most_leaving == 0) return Status::ok();
  const int64_t rows = rows_of(works);
  TiersCall call = call_of(works);
  call.counts = counts;
  if (rows > most_scratch_rows_ || rows * call.scratch.groups_of_row > most_scratch_groups_) {
    return Status(StatusCode::kInvalidArgument, "a chunk of several layers at once");
  }
  if (works.most_leaving <= kMaxStepTokens) {
    return launch(plan_tiers_kernel, (rows + 31) / 32, call, "plan of tiers");
  }
  return launch_after_previous(plan_tiers_chunk_kernel, static_cast<uint32_t>(rows),
                               32 * kChunkPlanWarps, sizeof(RowSums), stream_, call)
      .with_context("plan of tiers");
}

Status DeviceTiersRows::write(const DeviceWorks& works, const PageCopy*) {
  if (works.most_leaving == 0) return Status::ok();
  const TiersCall call = call_of(works);
  const bool is_step = works.most_leaving <= kMaxStepTokens;
  return with_head_dim(config_.layout.head_dim, [&](auto dim) {
    if (is_step) {
      const int64_t tokens = int64_t{call.num_rows} * works.most_leaving;
      return launch(write_tiers_kernel<dim>, warps_for<dim>(tokens), call, "tiers");
    }
    const int64_t warps = int64_t{call.num_rows} * 2 * most_tiles(works.most_leaving);
    return launch(write_tiers_tiles_kernel<dim>, warps, call, "tiles of tiers",
                  kTiersWarps * kTiersTileBytes<dim>);
  });
}

Status DeviceTiersRows::cut_counts(const DeviceWorks& works, const DeviceRowCounts& counts) {
  TiersCall call = call_of(works);
  call.counts = counts;
  return with_head_dim(config_.layout.head_dim, [&](auto dim) {
    return launch(cut_tiers_kernel<false, dim>, rows_of(works), call, "cut of tiers");
  });
}

Status DeviceTiersRows::cut(const DeviceWorks& works, const PageCopy*) {
  return with_head_dim(config_.layout.head_dim, [&](auto dim) {
    return launch(cut_tiers_kernel<true, dim>, rows_of(works), call_of(works), "cut of tiers");
  });
}

// One launch for all layers, behind the last.
Status DeviceTiersRows::check_imported(std::span<const HostLayer> layers, const LayerTokens*,
                                       int32_t*) {
  const Positions of_slot = {0, config_.layout.num_layers};
  if (layers.back().layer + 1 < of_slot.end) return Status::ok();
  const int64_t rows = int64_t{of_slot.end} * config_.layout.num_kv_heads;
  return with_head_dim(config_.layout.head_dim, [&](auto dim) {
    return launch_after_previous(clear_behind_kernel<dim>, ctas_for(rows, kTiersWarps),
                                 kTiersThreads, 0, stream_, view_, codes_, layers[0].slot, of_slot)
        .with_context("tiers that came in");
  });
}

Status DeviceTiersRows::read(const DeviceRead& call) {
  const TiersRead r = {call, view_, codes_, scratch_.groups,
                       (call.range.end + kGroupPositions - 1) / kGroupPositions};
  const int64_t heads = config_.layout.num_kv_heads, rows = call.range.count() * heads;
  if (Status s = launch(count_groups_kernel, heads, r, "tokens of tiers"); !s) return s;
  return with_head_dim(config_.layout.head_dim, [&](auto dim) {
    return launch(read_tiers_kernel<dim>, warps_for<dim>(rows), r, "reading of tiers");
  });
}

// ---- attention, as attention/tiers plans and runs it ----

Status DeviceTiersRows::bind_part(TiersAttention* part) {
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
    memory_.take(static_cast<int64_t>(bytes), &taken);
    workspace = {taken, bytes};
  }
  return Status::ok();
}

// The allocator counts pages; attention counts tokens.
PageTableView DeviceTiersRows::table(const TiersAttention& part, int32_t index) const {
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

Status DeviceTiersRows::plan_attention_of(const DeviceAttendBody& call, int32_t index) {
  const int64_t rows = int64_t{call.count} * view_.num_layers * view_.num_kv_heads;
  const uint32_t ctas = ctas_for(rows, kGatherThreads);
  const Status launched =
      launch_after_previous(gather_counts_kernel, ctas, kGatherThreads, 0, stream_, view_,
                            codes_.shape, SequenceBatch{call.slots, call.count}, tokens_[index]);
  if (!launched) return launched.with_context("counts of bodies");
  for (const TiersAttention& part : parts_) {
    // Where things lie in it depends on the call, and it begins with zeros.
    const AttentionConfig config = part.of_queries(call.q_len);
    const AttentionGrid& grid = part.grids[call.q_len - 1];
    const cudaError_t error =
        cudaMemsetAsync(part.workspaces[index].memory, 0,
                        attention_workspace_bytes(config, grid, call.count), stream_);
    if (Status s = cuda_status(error, "workspace of attention"); !s) return s;
    if (Status s = plan_attention(config, grid, table(part, index), {call.slots, call.count},
                                  part.workspaces[index], stream_);
        !s) {
      return s;
    }
  }
  return Status::ok();
}

EngineQueries DeviceTiersRows::queries_of(const DeviceAttendBody& call) const {
  const CacheLayout& shape = config_.layout;
  EngineQueries q;
  if (is_raw_layer_[call.layer] == 0) {
    q.rotation = codes_.rotation[0];
    q.out_rotation = codes_.rotation[1];
    if (codes_.key_means != nullptr) {
      q.key_mean =
          codes_.key_means + int64_t{call.layer} * shape.num_kv_heads * int64_t{shape.head_dim};
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

Status DeviceTiersRows::attend(const DeviceAttendBody& call) {
  const int32_t index = call.is_captured ? 1 : 0;
  if (call.new_plan) {
    if (Status s = plan_attention_of(call, index); !s) return s;
  }
  const TiersAttention& part = is_raw_layer_[call.layer] != 0 ? parts_.back() : parts_.front();
  EngineQueries queries = queries_of(call);
  // Attention reads the plan before it waits, so packing must have waited for a new one.
  queries.is_settled = !call.new_plan;
  if (Status s = pack_queries(queries, stream_); !s) return s;
  AttendCall attend;
  attend.table = table(part, index);
  attend.pages = {view_.pages.base, view_.pages.page_bytes, view_.pages.allocator.shape.num_pages};
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
                              part.workspaces[index], stream_, &queries.shared);
      !s) {
    return s;
  }
  return unpack_outputs(queries, stream_);
}

}  // namespace

Result<std::unique_ptr<DeviceRowFormat>> make_device_tiers_rows(const StoreConfig& config,
                                                                RowFormat* host) {
  return std::unique_ptr<DeviceRowFormat>(
      std::make_unique<DeviceTiersRows>(config, *static_cast<const TiersRows*>(host)));
}

}  // namespace tierkv::store

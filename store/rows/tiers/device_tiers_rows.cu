// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "gpu/launch.cuh"
#include "store/rows/device_memory.cuh"
#include "store/rows/tiers/device_tiers_attention.cuh"
#include "store/rows/tiers/device_tiers_read.cuh"
#include "store/rows/tiers/device_tiers_tiles.cuh"
#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {
namespace {

constexpr int64_t kMostWarpTokens = kWarpTokens<64>;

// Warps that hold so many tokens.
template <int32_t kDim>
int64_t warps_for(int64_t tokens) {
  return (tokens + kWarpTokens<kDim> - 1) / kWarpTokens<kDim>;
}

class DeviceTiersRows final : public DeviceRowFormat {
 public:
  DeviceTiersRows(const StoreConfig& config, const TiersRows& rows)
      : config_(config), rows_(rows), attention_(config, rows) {}

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) override;
  int64_t workspace_bytes() const override { return memory_.bytes(); }
  int64_t most_pages(const DeviceWorks& works) const override;
  Status plan(const DeviceWorks& works, const DeviceRowCounts& counts) override;
  Status write(const DeviceWorks& works, const PageCopy* copies) override;

  Status attend(const DeviceAttendBody& call) override {
    return attention_.attend(call, codes_, stream_);
  }
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

  StoreConfig config_;
  const TiersRows& rows_;
  DeviceMemory memory_{"tiers"};
  DeviceTiersAttention attention_;
  DeviceStoreView view_;
  DeviceFault* fault_ = nullptr;
  GpuStream stream_ = nullptr;
  TiersCodes codes_;
  TiersScratch scratch_;
  int64_t most_scratch_groups_ = 0, most_scratch_rows_ = 0;
};

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
  if (Status s = memory_.put(rows_.class_of_head(), &codes_.class_of_head); !s) return s;
  if (Status s = memory_.put(key_means, &codes_.key_means); !s) return s;
  // A step is of all layers; a longer chunk of one, with any number of tokens.
  const int64_t heads = config_.layout.num_kv_heads;
  most_scratch_rows_ = config_.max_sequences * config_.layout.num_layers * heads;
  most_scratch_groups_ = std::max(most_scratch_rows_ * most_groups(kMaxStepTokens),
                                  config_.max_sequences * heads * most_groups(config_.max_tokens));
  if (Status s = memory_.take(most_scratch_rows_, &scratch_.drafts); !s) return s;
  if (Status s = memory_.take(most_scratch_groups_, &scratch_.groups); !s) return s;
  return attention_.bind(view, &memory_);
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

}  // namespace

Result<std::unique_ptr<DeviceRowFormat>> make_device_tiers_rows(const StoreConfig& config,
                                                                RowFormat* host) {
  return std::unique_ptr<DeviceRowFormat>(
      std::make_unique<DeviceTiersRows>(config, *static_cast<const TiersRows*>(host)));
}

}  // namespace tierkv::store

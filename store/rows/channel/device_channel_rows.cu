// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "attention/channel/channel_kernel.cuh"
#include "attention/channel/channel_plan.h"
#include "gpu/launch.cuh"
#include "store/rows/channel/channel_rows.h"
#include "store/rows/channel/device_channel_kernels.cuh"
#include "store/rows/device_memory.cuh"

namespace tierkv::store {
namespace {

constexpr int32_t kWriteCtasPerSm = 16;  // several rounds of those that run at once
// Parts times query columns of a call: they keep the CTAs of short calls busy.
constexpr int64_t kMostPartColumns = 1 << 14;

class DeviceChannelRows final : public DeviceRowFormat {
 public:
  DeviceChannelRows(const StoreConfig& config, const ChannelRows& rows)
      : config_(config), rows_(rows) {}

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) override;
  int64_t workspace_bytes() const override { return memory_.bytes(); }
  int64_t most_pages(const DeviceWorks& works) const override;
  Status plan(const DeviceWorks& works, const DeviceRowCounts& counts) override;
  Status write(const DeviceWorks& works, const PageCopy* copies) override;

  Status attend(const DeviceAttendBody& call) override;
  Status read(const DeviceRead& call) override;
  Status restore(const LayerMove& move, Positions range) override {
    return read({move.slot, move.layer, move.from.body_end, range});
  }

 private:
  bool is_raw(int32_t layer) const { return rows_.is_raw_layer()[layer] != 0; }
  ChannelCall call_of(const DeviceWorks& works) const;

  StoreConfig config_;
  const ChannelRows& rows_;
  DeviceMemory memory_{"channel rows"};
  DeviceStoreView view_;
  GpuStream stream_ = nullptr;
  const uint8_t* is_raw_layer_ = nullptr;  // device
  int32_t sms_ = 1;
  DeviceFault* fault_ = nullptr;
  uint8_t* parts_ = nullptr;  // for calls with any number of sequences and queries
};

Status DeviceChannelRows::bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) {
  view_ = view;
  fault_ = fault;
  stream_ = stream;
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  sms_ = limits->sms;
  memory_.put(rows_.is_raw_layer(), &is_raw_layer_);
  const int64_t column_bytes = view.head_dim * 4 + static_cast<int64_t>(sizeof(SoftmaxState));
  memory_.take(kMostPartColumns * column_bytes, &parts_);
  return memory_.status();
}

int64_t DeviceChannelRows::most_pages(const DeviceWorks& works) const {
  const ChannelBody& body = rows_.body();
  const auto pages_of = [&](int32_t layer, int64_t blocks) {
    const int64_t per_page = body.per_page(is_raw(layer));
    return (blocks * body.num_kv_heads + per_page - 1) / per_page;
  };
  int64_t pages = 0;
  for (int32_t e = 0; e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    if (move.to.body_end <= move.from.body_end) continue;
    pages += pages_of(move.layer, body.blocks_of(move.to.body_end)) -
             pages_of(move.layer, body.blocks_of(move.from.body_end));
  }
  return pages;
}

ChannelCall DeviceChannelRows::call_of(const DeviceWorks& works) const {
  ChannelCall call;
  call.view = view_;
  call.body = rows_.body();
  call.is_raw_layer = is_raw_layer_;
  call.works = works;
  call.num_entries = works.entries();
  call.most_blocks = rows_.body().blocks_of(works.most_leaving + view_.laws.sink_tokens);
  return call;
}

Status DeviceChannelRows::plan(const DeviceWorks& works, const DeviceRowCounts& counts) {
  ChannelCall call = call_of(works);
  call.counts = counts;
  return launch_after_previous(count_channel_kernel, ctas_for(call.num_entries, kChannelThreads),
                               kChannelThreads, 0, stream_, call)
      .with_context("counts of channel rows");
}

Status DeviceChannelRows::write(const DeviceWorks& works, const PageCopy*) {
  const ChannelCall call = call_of(works);
  const int64_t blocks = int64_t{call.num_entries} * config_.layout.num_kv_heads * call.most_blocks;
  if (blocks == 0) return Status::ok();
  if (blocks > INT32_MAX / 2) return Status(StatusCode::kOutOfRange, "too many tokens in a call");
  const auto ctas = static_cast<uint32_t>(std::min(blocks, int64_t{kWriteCtasPerSm} * sms_));
  void (*kernel)(ChannelCall) = nullptr;
  size_t shared = 0;
  with_head_dim(call.body.layout.head_dim(), [&](auto dim) {
    kernel = write_channel_kernel<dim>;
    shared = sizeof(ChannelShared<dim>);
  });
  return launch_after_previous(kernel, ctas, kChannelThreads, shared, stream_, call)
      .with_context("channel rows");
}

Status DeviceChannelRows::attend(const DeviceAttendBody& call) {
  const int32_t head_dim = view_.head_dim, heads = view_.num_kv_heads;
  const ChannelBody& body = rows_.body();
  ChannelLaunch<ChannelBodies> p{};
  p.cache = bodies_of(view_, body, is_raw(call.layer), call);
  p.ctas = channel_ctas(config_.layout.group_size(), call.q_len, heads, head_dim);
  p.num_rows = call.count * heads;
  p.is_bfloat16 = call.dtype == DType::kBFloat16;
  p.q = static_cast<const uint16_t*>(call.q);
  p.out = static_cast<uint16_t*>(call.out);
  p.lse = call.lse;
  p.prior = call.prior;
  p.status = &fault_->status;  // kCorrupt where a page is not there
  p.scale_log2 = static_cast<float>(config_.layout.sm_scale) * kLog2E;
  const int64_t parts = kMostPartColumns / p.ctas.all_columns() / p.num_rows;
  const int32_t blocks = body.blocks_of(call.most_tokens);
  const tierkv::ChannelRows rows = {
      p.num_rows, is_raw(call.layer) ? blocks * body.layout.tiles() : blocks,
      static_cast<int32_t>(std::clamp<int64_t>(parts, 1, kMostChannelSplits))};
  p.splits = choose_channel_splits(p.ctas, rows, sms_ * channel_ctas_per_sm(head_dim));
  p.parts = reinterpret_cast<float*>(parts_);
  p.states = reinterpret_cast<SoftmaxState*>(p.parts + kMostPartColumns * head_dim);
  return launch_channel(p, p.num_rows * p.splits, p.splits > 1, stream_);
}

Status DeviceChannelRows::read(const DeviceRead& call) {
  const ChannelRead r = {call, view_, rows_.body(), is_raw(call.layer)};
  const int64_t values =
      int64_t{call.range.count()} * config_.layout.num_kv_heads * config_.layout.head_dim;
  return launch_after_previous(read_channel_kernel, ctas_for(values, kChannelThreads),
                               kChannelThreads, 0, stream_, r)
      .with_context("reading of channel rows");
}

}  // namespace

Result<std::unique_ptr<DeviceRowFormat>> make_device_channel_rows(const StoreConfig& config,
                                                                  RowFormat* host) {
  return std::unique_ptr<DeviceRowFormat>(
      std::make_unique<DeviceChannelRows>(config, *static_cast<const ChannelRows*>(host)));
}

}  // namespace tierkv::store

// SPDX-License-Identifier: Apache-2.0
// The kernels of channel rows, run on the host.
#include <algorithm>
#include <vector>

#include "store/rows/channel/device_channel_bodies.cuh"
#include "store/rows/channel/device_channel_kernels.cuh"
#include "tests/engine/support/emulated_format.h"
#include "tests/engine/support/emulated_rows.h"

namespace tierkv {

__align__(128) uint8_t shared_bytes[1 << 17];

namespace store {

__align__(16) uint8_t block_shared_bytes[1 << 16];

namespace test {
namespace {

class EmulatedChannelFormat final : public EmulatedFormat {
 public:
  EmulatedChannelFormat(const StoreConfig& config, const ChannelRows& rows, std::mt19937* rng)
      : EmulatedFormat(rng), config_(config), rows_(rows) {}

  Status plan(const DeviceWorks& works, const DeviceRowCounts& counts) override {
    const ChannelCall call = call_of(works, counts);
    run((call.num_entries + kChannelThreads - 1) / kChannelThreads, kChannelThreads,
        [&] { count_channel_kernel(call); });
    return Status::ok();
  }
  Status cut_counts(const DeviceWorks& works, const DeviceRowCounts& counts) override {
    return plan(works, counts);
  }
  Status write(const DeviceWorks& works, const PageCopy*) override {
    const ChannelCall call = call_of(works, {});
    with_channel_encoder(call.body.layout, [&](auto encoder) {
      const int32_t blocks = call.num_entries * view_.num_kv_heads * call.most_blocks;
      run(std::min(blocks, std::uniform_int_distribution<int32_t>(1, 20)(rng_)), kChannelThreads,
          [&] { write_channel_kernel<decltype(encoder)>(call); });
    });
    return Status::ok();
  }
  Status read(const DeviceRead& to) override {
    const ChannelRead r = {to, view_, rows_.body(), rows_.is_raw_layer()[to.layer] != 0};
    const int32_t values = to.range.count() * view_.num_kv_heads * view_.head_dim;
    run((values + kChannelThreads - 1) / kChannelThreads, kChannelThreads,
        [&] { read_channel_kernel(r); });
    return Status::ok();
  }
  Status restore(const LayerMove& move, Positions range) override {
    return read({move.slot, move.layer, move.from.body_end, range});
  }
  Status attend(const DeviceAttendBody& call) override {
    StatusCode status = StatusCode::kOk;
    std::vector<float4> workspace(channel_attention_bytes(view_.head_dim) / sizeof(float4),
                                  {NAN, NAN, NAN, NAN});
    ChannelAttend a;
    a.view = view_;
    a.body = rows_.body();
    a.is_raw = rows_.is_raw_layer()[call.layer] != 0;
    a.num_q_heads = config_.layout.num_q_heads;
    a.sm_scale = static_cast<float>(config_.layout.sm_scale);
    a.status = &status;
    a.workspace = workspace.data();
    const ChannelLaunch<ChannelBodies> p =
        channel_launch(a, call, std::uniform_int_distribution<int32_t>(1, 20)(rng_));
    run(p.num_rows * p.splits * p.ctas.groups, 32 * p.ctas.warps, [&] {
      if (threadIdx.x == 0) std::fill_n(shared_bytes, sizeof(shared_bytes), 0xff);
      __syncthreads();
      channel_kernel<ChannelBodies>(a.body.layout)(p);
    });
    if (p.splits > 1) {
      const int32_t tasks =
          p.num_rows * p.ctas.all_columns() * slices_of(view_.head_dim, kChannelJoinDims);
      run((tasks + kChannelJoinWarps - 1) / kChannelJoinWarps, 32 * kChannelJoinWarps,
          [&] { join_channel_kernel(channel_join(p)); });
    }
    return status == StatusCode::kOk ? Status::ok() : Status(status, "attend");
  }

 private:
  ChannelCall call_of(const DeviceWorks& works, const DeviceRowCounts& counts) const {
    ChannelCall call;
    call.view = view_;
    call.body = rows_.body();
    call.is_raw_layer = rows_.is_raw_layer().data();
    call.works = works;
    call.num_entries = works.entries();
    call.most_blocks = rows_.body().blocks_of(works.most_leaving);
    call.counts = counts;
    return call;
  }

  StoreConfig config_;
  const store::ChannelRows& rows_;
};

}  // namespace

std::unique_ptr<DeviceRowFormat> emulated_channel_rows(const StoreConfig& config,
                                                       const store::ChannelRows& rows,
                                                       std::mt19937* rng) {
  return std::make_unique<EmulatedChannelFormat>(config, rows, rng);
}

}  // namespace test
}  // namespace store
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// A world of tests/support/page_world.h on the device, and the check of one call.
#pragma once

#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "attention/tiers/grid.h"
#include "codec/format/element.h"
#include "gpu/cuda_device.cuh"
#include "tests/gpu/device_array.cuh"
#include "tests/support/page_world.h"
#include "tierkv/half.h"

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaGetLastError())

namespace tierkv::test {

// docs/internals/attention.md, "Error".
inline constexpr double kTolerance = 2e-3;
inline constexpr double kBFloat16Tolerance = 4e-3;
inline constexpr double kLseTolerance = 1e-3;

// A world's copy on the device, and the buffers of a call.
class DeviceWorld {
 public:
  // shared_bytes: of a CTA, as if the device had no more; 0: what it has.
  explicit DeviceWorld(World& world, std::vector<int32_t> sequences = {}, int32_t shared_bytes = 0)
      : host(world),
        grid(shared_bytes == 0 ? grid_of(world.config) : grid_within(world.config, shared_bytes)),
        count_(sequences.empty() ? world.sequences() : static_cast<int32_t>(sequences.size())),
        names_sequences_(!sequences.empty()),
        pool_(pool_of(world)),
        slots_(world.slots),
        sequences_(sequences),
        newest_(world.newest),
        tokens_(world.tokens),
        sinks_(world.sinks),
        q_(queries_of(world, columns())),
        out_(columns() * world.config.head_dim, 0xff),
        lse_(columns(), 0xff),
        workspace_(attention_workspace_bytes(world.config, grid, count_), 0) {}

  World& host;
  const AttentionGrid grid;

  void upload_tables() {
    slots_.write(host.slots);
    tokens_.write(host.tokens);
  }
  void poison_outputs() {
    out_.fill(0xff);
    lse_.fill(0xff);
  }
  AttentionBatch batch() const { return {names_sequences_ ? sequences_.get() : nullptr, count_}; }
  AttendCall call() {
    AttendCall call;
    call.table = {host.table_shape, slots_.get(), tokens_.get(), nullptr};
    call.pages = {pool_.get(), host.config.page_bytes, host.num_pages};
    call.batch = batch();
    call.q = q_.get();
    call.out = out_.get();
    call.lse = lse_.get();
    call.sinks = host.sinks.empty() ? nullptr : sinks_.get();
    call.tail = host.tail;
    if (host.tail.newest != nullptr) call.tail.newest = newest_.get();
    return call;
  }
  AttentionWorkspace space() { return {workspace_.get(), workspace_.size()}; }
  Status plan(cudaStream_t stream = nullptr) {
    return plan_attention(host.config, grid, call().table, batch(), space(), stream);
  }
  Status attend_now(cudaStream_t stream = nullptr) {
    return attend(host.config, grid, call(), space(), stream);
  }
  std::vector<uint16_t> out() const { return out_.read(); }
  std::vector<float> lse() const { return lse_.read(); }
  std::vector<int32_t> row_status(int32_t layer = 0) {
    const int32_t* from = attention_row_status(host.config, grid, count_, layer, space());
    std::vector<int32_t> status(static_cast<size_t>(count_) * host.config.num_kv_heads);
    EXPECT_EQ(cudaMemcpy(status.data(), from, status.size() * 4, cudaMemcpyDeviceToHost),
              cudaSuccess);
    return status;
  }

 private:
  static AttentionGrid grid_of(const AttentionConfig& config) {
    const Result<AttentionGrid> grid = attention_grid(config);
    EXPECT_TRUE(grid.is_ok()) << grid.status().message();
    return *grid;
  }
  static AttentionGrid grid_within(const AttentionConfig& config, int32_t shared_bytes) {
    const Result<DeviceLimits> limits = device_limits();
    EXPECT_TRUE(limits.is_ok()) << limits.status().message();
    const Result<AttentionGrid> grid = choose_grid(config, limits->sms, shared_bytes);
    EXPECT_TRUE(grid.is_ok()) << grid.status().message();
    EXPECT_LE(grid->shared_bytes, shared_bytes);
    grid_of(config);  // prepares the device for the kernels
    return *grid;
  }
  static std::vector<uint8_t> pool_of(World& world) {
    const PageView pages = world.pages();
    return {pages.base, pages.base + pages.num_pages * pages.page_bytes};
  }
  // The queries of all entries, with those of padding.
  static const std::vector<uint16_t>& queries_of(World& world, size_t columns) {
    world.q.resize(columns * world.config.head_dim, 0x3c00);
    return world.q;
  }
  size_t columns() const {
    return static_cast<size_t>(count_) * host.config.q_len * host.config.num_q_heads;
  }

  int32_t count_;
  bool names_sequences_;
  DeviceArray<uint8_t> pool_;
  DeviceArray<int32_t> slots_, sequences_, newest_;
  DeviceArray<SideCounts> tokens_;
  DeviceArray<float> sinks_;
  DeviceArray<uint16_t> q_, out_;
  DeviceArray<float> lse_;
  DeviceArray<uint8_t> workspace_;
};

// The relative error of the outputs.
inline double expect_output(DeviceWorld& device, const ReferenceOutput& expected) {
  std::vector<double> out;
  const DType dtype = device.host.config.dtype;
  for (const uint16_t x : device.out()) out.push_back(raw_to_float(dtype, x));
  const double error = relative_error(out, expected.out);
  EXPECT_LT(error, dtype == DType::kBFloat16 ? kBFloat16Tolerance : kTolerance);
  const std::vector<float> lse = device.lse();
  for (size_t i = 0; i < lse.size(); ++i) {
    if (expected.lse[i] == -INFINITY) {
      EXPECT_EQ(lse[i], -INFINITY) << "column " << i;
      for (int32_t d = 0; d < device.host.config.head_dim; ++d) {
        EXPECT_EQ(out[i * device.host.config.head_dim + d], 0.0);
      }
    } else {
      EXPECT_NEAR(lse[i], expected.lse[i], kLseTolerance) << "column " << i;
    }
  }
  return error;
}

// shared_bytes: as DeviceWorld; warps: of a CTA, if not null.
inline void check(WorldShape shape, int32_t shared_bytes = 0, int32_t* warps = nullptr) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  shape.page_records = rng() % 2 == 0;
  World world = make_world(shape, rng);
  const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
  ASSERT_TRUE(expected.is_ok()) << expected.status().message();
  DeviceWorld device(world, {}, shared_bytes);
  if (warps != nullptr) *warps = device.grid.warps_per_cta;
  for (int repeat = 0; repeat < 3; ++repeat) {
    device.poison_outputs();
    const Status planned = device.plan();
    ASSERT_TRUE(planned.is_ok()) << planned.message();
    const Status attended = device.attend_now();
    ASSERT_TRUE(attended.is_ok()) << attended.message();
    ASSERT_CUDA(cudaDeviceSynchronize());
    expect_output(device, *expected);
    EXPECT_THAT(device.row_status(), ::testing::Each(0));
  }
}

inline AttentionTier tier(int32_t side, int32_t k_bits, int32_t v_bits) {
  return {side, token_wise_tier(k_bits, v_bits)};
}
inline std::vector<AttentionTier> three_tiers() {
  return {tier(2, 16, 16), tier(0, 8, 4), tier(1, 4, 2)};
}

}  // namespace tierkv::test

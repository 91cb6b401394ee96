// SPDX-License-Identifier: Apache-2.0
// A row format whose kernels are run on the host: what all of them share. For emulated tests only.
#pragma once

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "store/rows/device_row_format.h"
#include "tests/support/emulator/cuda.h"

namespace tierkv::store::test {

class EmulatedFormat : public DeviceRowFormat {
 public:
  explicit EmulatedFormat(std::mt19937* rng) : rng_(*rng) {}

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream) override {
    view_ = view;
    fault_ = fault;
    return Status::ok();
  }
  int64_t workspace_bytes() const override { return 0; }
  int64_t most_pages(const DeviceWorks&) const override { return INT32_MAX; }
  Status attend(const DeviceAttendBody&) override { return missing(); }
  Status restore(const LayerMove&, Positions) override { return missing(); }

 protected:
  // CTAs in random order.
  template <class Kernel>
  void run(int32_t ctas, int32_t threads, const Kernel& kernel) {
    std::vector<int32_t> order(ctas);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng_);
    for (const int32_t i : order)
      emulator::cta().run(
          i, threads, [&] { kernel(); }, ctas);
  }
  static Status missing() { return Status(StatusCode::kUnsupported, "not emulated"); }

  std::mt19937& rng_;
  DeviceStoreView view_;
  DeviceFault* fault_ = nullptr;
};

}  // namespace tierkv::store::test

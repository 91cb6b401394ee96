// The kernels of tiers rows, run on the host over memory laid out as a device's. What it cannot see
// is warps that run at one time.
#include <gtest/gtest.h>

#include <algorithm>

#include "store/rows/tiers/device_tiers_kernels.cuh"
#include "store/rows/tiers/device_tiers_read.cuh"
#include "store/rows/tiers/tiers_rows.h"
#include "tests/engine/support/emulated_format.h"
#include "tests/engine/support/rows_twin.h"
#include "tests/engine/support/tiers_pages.h"
#include "tests/support/fresh_random.h"

namespace tierkv::store {
namespace {

class EmulatedTiersFormat final : public test::EmulatedFormat {
 public:
  EmulatedTiersFormat(const TiersRows& rows, std::mt19937* rng)
      : EmulatedFormat(rng), means_(tiers_key_means(rows)) {
    codes_ = tiers_codes(rows);
    codes_.class_of_head = rows.class_of_head().data();
    if (!means_.empty()) codes_.key_means = means_.data();
  }

  Status plan(const DeviceWorks& works, const DeviceRowCounts& counts) override {
    call_ = call_of(works);
    call_.counts = counts;
    drafts_.assign(call_.num_rows, {});
    groups_.assign(size_t{1} * call_.num_rows * call_.scratch.groups_of_row, {{-999, -999}});
    call_.scratch.drafts = drafts_.data();
    call_.scratch.groups = groups_.data();
    if (works.most_leaving == 0) return Status::ok();
    run_warps(call_.num_rows, [&] { plan_tiers_kernel(call_); });
    return Status::ok();
  }
  Status write(const DeviceWorks& works, const PageCopy*) override {
    if (works.most_leaving == 0) return Status::ok();
    run_warps(call_.num_rows * works.most_leaving, [&] { write_tiers_kernel(call_); });
    return Status::ok();
  }
  Status read(const LayerMove& at, Positions range, DType dtype, void* k, void* v) override {
    TiersRead r;
    r.view = view_;
    r.codes = codes_;
    r.slot = at.slot;
    r.layer = at.layer;
    r.range = range;
    r.dtype = dtype;
    r.k = static_cast<uint16_t*>(k);
    r.v = static_cast<uint16_t*>(v);
    r.groups_of_row = (range.end + kGroupPositions - 1) / kGroupPositions;
    groups_.assign(size_t{1} * view_.num_kv_heads * r.groups_of_row, {{-999, -999}});
    r.groups = groups_.data();
    run_warps(view_.num_kv_heads, [&] { count_groups_kernel(r); });
    run_warps(range.count() * view_.num_kv_heads, [&] { read_tiers_kernel(r); });
    return Status::ok();
  }
  Status cut_counts(const DeviceWorks& works, const DeviceRowCounts& counts) override {
    call_ = call_of(works);
    call_.counts = counts;
    run_warps(call_.num_rows, [&] { count_cut_tiers_kernel(call_); });
    return Status::ok();
  }
  Status cut(const DeviceWorks&, const PageCopy*) override {
    run_warps(call_.num_rows, [&] { cut_tiers_kernel(call_); });
    return Status::ok();
  }

 private:
  TiersCall call_of(const DeviceWorks& works) const {
    TiersCall call;
    call.view = view_;
    call.codes = codes_;
    call.works = works;
    call.num_rows = works.entries() * view_.num_kv_heads;
    call.scratch.groups_of_row = most_groups(works.most_leaving);
    call.fault = fault_;
    return call;
  }
  template <class Kernel>
  void run_warps(int32_t warps, const Kernel& kernel) {
    run((warps + kTiersWarps - 1) / kTiersWarps, kTiersThreads, kernel);
  }

  std::vector<float> means_;
  TiersCodes codes_;
  TiersCall call_;
  std::vector<TiersDraft> drafts_;
  std::vector<SideTokens> groups_;
};

class EmulatedTiersRows : public RandomTest {
 protected:
  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }
};

TEST_F(EmulatedTiersRows, BytesAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    const StoreConfig config = tiers_config(head_dim, 2000, pick(0, 1) == 1, &rng_);
    SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim);
    test::HostTwinMemory memory;
    test::RowsTwin twin(
        config, &memory,
        [&](const StoreConfig&, RowFormat* host) -> Result<std::unique_ptr<DeviceRowFormat>> {
          return std::unique_ptr<DeviceRowFormat>(
              std::make_unique<EmulatedTiersFormat>(*static_cast<const TiersRows*>(host), &rng_));
        },
        test::tiers_page_bytes, &rng_);
    twin.add();
    twin.add();
    for (int32_t i = 0; i < 12; ++i) {
      if (i == 5) twin.fork(0);
      std::vector<int32_t> places = {pick(0, twin.count() - 1)};
      if (i > 5 && pick(0, 2) == 0) twin.truncate(places[0], pick(1, twin.tokens(places[0])));
      if (HasFatalFailure()) return;
      if (pick(0, 2) == 0) places = {1, 0};
      int32_t room = config.max_tokens;
      for (const int32_t p : places) room = std::min(room, config.max_tokens - twin.tokens(p));
      const int32_t tokens = std::min(room, i < 3             ? pick(9, 150)
                                            : pick(0, 3) == 0 ? pick(9, 90)
                                                              : pick(1, 8));
      if (tokens == 0) continue;
      twin.extend(places, tokens, pick(0, 2) > 0);
      if (HasFatalFailure()) return;
      twin.read(places[0]);
      if (pick(0, 1) == 1) twin.count_queries(places[0]);
      if (HasFatalFailure()) return;
    }
    twin.truncate(0, 1);
    twin.spoil(0, config.window_tokens + pick(150, 300));
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tierkv::store

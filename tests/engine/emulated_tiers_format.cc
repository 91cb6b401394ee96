// The kernels of tiers rows, run on the host. What this cannot show is warps that run at one time.
#include <vector>

#include "store/rows/tiers/device_tiers_kernels.cuh"
#include "store/rows/tiers/device_tiers_read.cuh"
#include "tests/engine/support/emulated_format.h"
#include "tests/engine/support/emulated_rows.h"

namespace tierkv::store::test {
namespace {

class EmulatedTiersFormat final : public EmulatedFormat {
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

}  // namespace

std::unique_ptr<DeviceRowFormat> emulated_tiers_rows(const TiersRows& rows, std::mt19937* rng) {
  return std::make_unique<EmulatedTiersFormat>(rows, rng);
}

}  // namespace tierkv::store::test

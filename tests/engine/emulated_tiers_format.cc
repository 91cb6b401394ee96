// SPDX-License-Identifier: Apache-2.0
// The kernels of tiers rows, run on the host. What this cannot show is warps that run at one time.
#include <cmath>
#include <variant>
#include <vector>

#include "store/rows/tiers/device_tiers_kernels.cuh"
#include "store/rows/tiers/device_tiers_read.cuh"
#include "store/rows/tiers/device_tiers_tiles.cuh"
#include "tests/engine/support/emulated_format.h"
#include "tests/engine/support/emulated_rows.h"

namespace tierkv::store {
// The shared memory of a CTA.
alignas(1024) uint8_t shared_bytes[64 * 1024];
}  // namespace tierkv::store

namespace tierkv::store::test {
namespace {

class EmulatedTiersFormat final : public EmulatedFormat {
 public:
  EmulatedTiersFormat(const TiersRows& rows, std::mt19937* rng)
      : EmulatedFormat(rng), config_(rows.config()), means_(tiers_key_means(rows)) {
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
    if (works.most_leaving <= kMaxStepTokens) {
      run_warps(call_.num_rows, [&] { plan_tiers_kernel(call_); });
    } else {
      run_poisoned(call_.num_rows, 32 * kChunkPlanWarps, sizeof(RowSums<kChunkPlanWarps>),
                   [&] { plan_tiers_chunk_kernel(call_); });
    }
    return Status::ok();
  }
  Status write(const DeviceWorks& works, const PageCopy*) override {
    if (works.most_leaving == 0) return Status::ok();
    if (works.most_leaving <= kMaxStepTokens) {
      run_warps(call_.num_rows * works.most_leaving, [&] { write_tiers_kernel(call_); });
      return Status::ok();
    }
    switch (view_.head_dim) {
      case 64:
        return write_tiles<64>();
      case 96:
        return write_tiles<96>();
      case 128:
        return write_tiles<128>();
      default:
        return write_tiles<256>();
    }
  }
  Status check_imported(const std::vector<HostLayer>& layers, const LayerTokens*) override {
    run_warps(view_.num_layers * view_.num_kv_heads,
              [&] { clear_behind_kernel(view_, codes_, layers[0].slot); });
    return Status::ok();
  }
  Status read(const DeviceRead& to) override {
    TiersRead r = {to, view_, codes_, nullptr,
                   (to.range.end + kGroupPositions - 1) / kGroupPositions};
    groups_.assign(size_t{1} * view_.num_kv_heads * r.groups_of_row, {{-999, -999}});
    r.groups = groups_.data();
    run_warps(view_.num_kv_heads, [&] { count_groups_kernel(r); });
    run_warps(to.range.count() * view_.num_kv_heads, [&] { read_tiers_kernel(r); });
    return Status::ok();
  }
  // No kernel: a plain softmax over what read() gives, where nothing is pruned.
  Status attend(const DeviceAttendBody& call) override {
    const auto& classes = std::get<TiersFormat>(config_.format).classes;
    for (const TierClass& c : classes) {
      if (c.alpha_low > 0) return missing();
    }
    for (int32_t i = 0; i < call.count; ++i) {
      const Positions body = {view_.laws.sink_tokens, call.at[i].body_end};
      const size_t values = size_t{1} * most(0, body.count()) * view_.num_kv_heads * dim();
      std::vector<uint16_t> k(values), v(values);
      if (values > 0) {
        const DeviceRead to = {call.slots[i], call.layer,      call.at[i].body_end,
                               body,          DType::kFloat16, k.data(),
                               v.data()};
        if (Status s = read(to); !s) return s;
      }
      for (int32_t line = 0; line < call.q_len * config_.layout.num_q_heads; ++line) {
        attend_line(call, i * call.q_len * config_.layout.num_q_heads + line, k, v);
      }
    }
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
  int32_t dim() const { return view_.head_dim; }
  // k, v [tokens, num_kv_heads, head_dim], fp16.
  void attend_line(const DeviceAttendBody& call, int32_t line, const std::vector<uint16_t>& k,
                   const std::vector<uint16_t>& v) const {
    const CacheLayout& l = config_.layout;
    const int32_t kv_head = line % l.num_q_heads / l.group_size(), step = l.num_kv_heads * dim();
    const int64_t query = int64_t{line} * dim();
    const size_t tokens = k.size() / step;
    std::vector<double> p(tokens), out(dim());
    double sum = 0;
    for (size_t t = 0; t < tokens; ++t) {
      double logit = 0;
      for (int32_t d = 0; d < dim(); ++d) {
        const uint16_t q = static_cast<const uint16_t*>(call.q)[query + d];
        logit += static_cast<double>(raw_to_float(call.dtype, q)) *
                 static_cast<double>(half_to_float(k[t * step + kv_head * dim() + d]));
      }
      p[t] = std::exp(logit * l.sm_scale);
      sum += p[t];
    }
    for (size_t t = 0; t < tokens; ++t) {
      for (int32_t d = 0; d < dim(); ++d) {
        out[d] +=
            p[t] / sum * static_cast<double>(half_to_float(v[t * step + kv_head * dim() + d]));
      }
    }
    for (int32_t d = 0; d < dim(); ++d) {
      store_element(call.out, call.dtype, query + d, static_cast<float>(out[d]));
    }
    call.lse[line] = static_cast<float>(std::log(sum));
  }
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
  template <int32_t kDim>
  Status write_tiles() {
    const int32_t warps = 2 * call_.num_rows * most_tiles(call_.works.most_leaving);
    run_poisoned((warps + kTiersWarps - 1) / kTiersWarps, kTiersThreads,
                 kTiersWarps * kTiersTileBytes<kDim>,
                 [&] { write_tiers_tiles_kernel<kDim>(call_); });
    return Status::ok();
  }
  // Each CTA finds the same poison in the `bytes` of its shared memory.
  template <class Kernel>
  void run_poisoned(int32_t ctas, int32_t threads, int32_t bytes, const Kernel& kernel) {
    for (int32_t i = 0; i < ctas; ++i) {
      std::fill_n(shared_bytes, bytes, uint8_t{0xff});
      emulator::cta().run(i, threads, kernel, ctas);
    }
  }
  template <class Kernel>
  void run_warps(int32_t warps, const Kernel& kernel) {
    run((warps + kTiersWarps - 1) / kTiersWarps, kTiersThreads, kernel);
  }

  const StoreConfig& config_;
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

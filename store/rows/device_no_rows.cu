// Stands in for formats that do not exist on a device yet: sequences without bodies.
#include <cmath>

#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"
#include "store/rows/coded/device_coded_rows.h"

namespace tierkv::store {
namespace {

__global__ void no_bodies_kernel(float* lse, int32_t count) {
  wait_for_previous_kernel();
  const auto i = static_cast<int32_t>(blockIdx.x * 256 + threadIdx.x);
  if (i < count) lse[i] = -INFINITY;
}

class NoRows final : public DeviceRowFormat {
 public:
  explicit NoRows(const StoreConfig& config) : num_q_heads_(config.layout.num_q_heads) {}
  Status bind(const DeviceStoreView&, DeviceFault*, GpuStream stream) override {
    stream_ = stream;
    return Status::ok();
  }
  int64_t workspace_bytes() const override { return 0; }
  Status open(int32_t) override { return Status::ok(); }
  bool may_rewrite(const DeviceWorks&) const override { return false; }
  Status require_capturable(const DeviceWorks&) const override { return Status::ok(); }
  int64_t most_pages(const DeviceWorks&) const override { return 0; }
  Status plan(const DeviceWorks& works, const DeviceRowCounts&) override {
    return works.moves == nullptr ? Status::ok() : missing();
  }
  Status write(const DeviceWorks&, const PageCopy*) override { return Status::ok(); }
  Status attend(const DeviceAttendBody& call) override {
    const int32_t count = call.count * call.q_len * num_q_heads_;
    const auto ctas = static_cast<uint32_t>((count + 255) / 256);
    return launch_after_previous(no_bodies_kernel, ctas, 256, 0, stream_, call.lse, count);
  }
  Status read(const LayerMove&, Positions, DType, void*, void*) override { return missing(); }
  Status restore(const LayerMove&, Positions) override { return missing(); }
  Status cut_counts(const DeviceWorks&, const DeviceRowCounts&) override { return missing(); }
  Status cut(const DeviceWorks&, const PageCopy*) override { return Status::ok(); }
  Status download_shared(RowFormat*) override { return Status::ok(); }
  Status upload_shared(const RowFormat&) override { return Status::ok(); }

 private:
  static Status missing() { return Status(StatusCode::kUnsupported, "bodies on a device"); }
  int32_t num_q_heads_;
  GpuStream stream_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<DeviceRowFormat>> make_device_coded_rows(const StoreConfig& config,
                                                                RowFormat*) {
  return std::unique_ptr<DeviceRowFormat>(std::make_unique<NoRows>(config));
}

}  // namespace tierkv::store

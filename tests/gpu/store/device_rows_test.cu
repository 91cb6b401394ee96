// SPDX-License-Identifier: Apache-2.0
// Row formats in device memory beside those in host memory, which play the place: the same bytes
// after every call, and attention over bodies. Memory is managed, so that both see it.
#include <vector>

#include "store/rows/device_row_format.h"
#include "tests/engine/support/channel_pages.h"
#include "tests/engine/support/rows_twin.h"
#include "tests/engine/support/tiers_pages.h"
#include "tests/support/fresh_random.h"

namespace tierkv::store::test {
namespace {

class ManagedMemory final : public TwinMemory {
 public:
  ~ManagedMemory() override {
    for (void* p : taken_) cudaFree(p);
  }
  void* take(size_t bytes) override {
    void* p = nullptr;
    EXPECT_EQ(cudaMallocManaged(&p, bytes), cudaSuccess);
    taken_.push_back(p);
    EXPECT_EQ(cudaMemset(p, 0, bytes), cudaSuccess);
    wait();
    return p;
  }
  void wait() override {
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
  }

 private:
  std::vector<void*> taken_;
};

class DeviceRows : public RandomTest {
 protected:
  void soak(const StoreConfig& config, const RowsTwin::MakeFormat& make,
            const RowsTwin::PageBytes& page_bytes) {
    SCOPED_TRACE(::testing::Message() << "head_dim " << config.layout.head_dim << ", raw layers "
                                      << config.raw_layers.size());
    ManagedMemory memory;
    RowsTwin(config, &memory, make, page_bytes, &rng_).soak(30, 300, 1);
  }
};

TEST_F(DeviceRows, AreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const bool raw : {false, true}) {
      soak(tiers_config(head_dim, 2000, raw, &rng_), make_device_tiers_rows, tiers_page_bytes);
      if (HasFatalFailure()) return;
      soak(channel_config(head_dim, raw, &rng_), make_device_channel_rows, channel_page_bytes);
      if (HasFatalFailure()) return;
    }
  }
}

// One class alone, which has kernels of its own.
TEST_F(DeviceRows, TiersOfOneClassAreTheHosts) {
  for (const int32_t head_dim : {64, 128}) {
    StoreConfig config = tiers_config(head_dim, 2000, head_dim == 64, &rng_);
    auto& format = std::get<TiersFormat>(config.format);
    format.classes.resize(1);
    format.class_of_head.clear();
    give_pages(2000, &config);
    soak(config, make_device_tiers_rows, tiers_page_bytes);
    if (HasFatalFailure()) return;
  }
}

// As many classes as there may be beside raw layers, and as many queries as a kv_head may have.
TEST_F(DeviceRows, TiersOfFourClassesAreTheHosts) {
  for (const int32_t group : {5, 16}) {
    StoreConfig config = tiers_config(128, 2000, true, &rng_);
    config.profile = nullptr;
    config.layout.num_q_heads = group * config.layout.num_kv_heads;
    auto& format = std::get<TiersFormat>(config.format);
    format.classes.push_back({token_wise_tier(8, 8), token_wise_tier(2, 2), 1.5, 0.1});
    for (uint8_t& c : format.class_of_head) c = static_cast<uint8_t>(pick(0, 3));
    give_pages(2000, &config);
    soak(config, make_device_tiers_rows, tiers_page_bytes);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace tierkv::store::test

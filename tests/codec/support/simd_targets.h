// SPDX-License-Identifier: Apache-2.0
// The SIMD targets that this CPU has, to test each.
#pragma once

#include <hwy/targets.h>

#include <cstdint>
#include <vector>

namespace tierkv {

// choose(target) for each of list(); the destructor puts the dispatch back.
class SimdTargets {
 public:
  SimdTargets() {
    hwy::SetSupportedTargetsForTest(0);
    const int64_t supported = hwy::SupportedTargets();
    for (int64_t bit = 1; bit != 0 && bit <= supported; bit <<= 1) {
      if (supported & bit) list_.push_back(bit);
    }
  }
  ~SimdTargets() { choose(0); }
  const std::vector<int64_t>& list() const { return list_; }
  static void choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }

 private:
  std::vector<int64_t> list_;
};

}  // namespace tierkv

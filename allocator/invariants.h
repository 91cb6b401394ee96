// SPDX-License-Identifier: Apache-2.0
// The conservation laws of allocator/README.md as code: run after every operation in tests, and by
// whoever doubts a state that came back from a device.
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/allocator.h"

namespace tierkv {

class InvariantChecker {
 public:
  // `a` lies in host memory, between two operations. kCorrupt naming the law and the page, row or
  // sequence that breaks it. Reads nothing outside the allocator's memory whatever its bytes.
  Status check(const PageAllocator& a);

 private:
  Status check_ring(const PageAllocator& a);
  Status check_row(const PageAllocator& a, int32_t row, const SequenceEntry& sequence);
  Status check_line(const PageAllocator& a, int32_t row, int32_t side,
                    const SequenceEntry& sequence);
  Status check_references(const PageAllocator& a) const;

  std::vector<int32_t> tables_;  // per page: how many tables hold it
  enum class Holder : uint8_t { kTables, kRing, kReserve };
  std::vector<Holder> holder_;  // per page
};

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// Choices of a fuzz target, drawn from the bytes of its input one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tierkv::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  // Zero when the input has ended.
  uint8_t byte() { return at_ < end_ ? *at_++ : uint8_t{0}; }
  uint32_t u16() {
    const uint32_t low = byte();
    return low | static_cast<uint32_t>(byte()) << 8;
  }
  // Big-endian.
  uint64_t word() {
    uint64_t x = 0;
    for (int i = 0; i < 8; ++i) x = x << 8 | byte();
    return x;
  }
  bool one_in(int n) { return byte() % n == n - 1; }
  std::vector<uint8_t> rest() { return {at_, end_}; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

}  // namespace tierkv::fuzz

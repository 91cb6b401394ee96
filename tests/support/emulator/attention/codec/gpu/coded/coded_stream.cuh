// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for codec/gpu/coded/coded_stream.cuh: what its instructions do, without their
// schedule.
#pragma once

#include <cstdint>

#include "gpu/shared_memory.cuh"

namespace tierkv {

template <int kCopiesLog>
struct SharedTable {
  static constexpr int32_t kBias = 2 + kCopiesLog;
  uint32_t mask;
  uint32_t address;

  SharedTable(uint32_t table, uint32_t table_mask)
      : mask(table_mask),
        address(table | (static_cast<uint32_t>(threadIdx.x) & ((1u << kCopiesLog) - 1u)) * 4) {}
  uint32_t entry(uint32_t bits) const { return load_shared((bits & mask) | address); }
};

constexpr uint32_t table_mask(int32_t max_length, int32_t copies_log) {
  return ((1u << max_length) - 1u) << (2 + copies_log);
}
constexpr int32_t table_region_bytes(int32_t max_length, int32_t copies_log) {
  return 4 << (max_length + copies_log);
}

template <bool kAhead>
struct LaneStream {
  uint32_t low, high, ahead;
  uint32_t position;
  uint32_t next;
  static constexpr int32_t kWords = kAhead ? 3 : 2;

  void open(uint32_t payload, int32_t begin, int32_t bias) {
    position = static_cast<uint32_t>(begin - bias);
    const uint32_t word = payload + static_cast<uint32_t>((begin - bias) >> 5) * 4;
    low = load_shared(word);
    high = load_shared(word + 4);
    if (kAhead) ahead = load_shared(word + 8);
    next = word + 4 * kWords;
  }
  template <int kCopiesLog>
  void step(const SharedTable<kCopiesLog>& table, uint32_t* first, uint32_t* second) {
    const uint32_t bits = __funnelshift_r(low, high, position);
    *first = table.entry(bits);
    *second = table.entry(__funnelshift_r(bits, 0u, *first));
    advance(position + *first + *second);
  }
  int32_t end(uint32_t payload, int32_t bias) const {
    return static_cast<int32_t>(next - 4 * kWords - payload) * 8 +
           static_cast<int32_t>(position & 31u) + bias;
  }
  void advance(uint32_t after) {
    if (((after ^ position) & 32u) != 0) {
      low = high;
      high = kAhead ? ahead : load_shared(next);
      if (kAhead) ahead = load_shared(next);
      next += 4;
    }
    position = after;
  }
};

template <bool kAhead, int kCopiesLog>
void step_both(LaneStream<kAhead>& x, LaneStream<kAhead>& y, const SharedTable<kCopiesLog>& table,
               uint32_t (&first)[2], uint32_t (&second)[2]) {
  x.step(table, &first[0], &second[0]);
  y.step(table, &first[1], &second[1]);
}

}  // namespace tierkv

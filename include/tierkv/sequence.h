// SPDX-License-Identifier: Apache-2.0
// The sequences of a store and how calls name them.
#pragma once

#include <cstdint>

namespace tierkv {

inline constexpr int32_t kMaxStepTokens = 8;  // of a sequence, in one step

struct SequenceId {
  int32_t slot = -1;
  uint32_t generation = 0;  // a slot that is used again gives other ids

  friend bool operator==(const SequenceId& a, const SequenceId& b) {
    return a.slot == b.slot && a.generation == b.generation;
  }
};
// An id as one number, and back: slot + 1 in the low half, the generation in the high one. 0 names
// no sequence.
inline uint64_t number_of(SequenceId id) {
  return uint64_t{id.generation} << 32 | (static_cast<uint32_t>(id.slot) + 1);
}
inline SequenceId id_of(uint64_t number) {
  return {static_cast<int32_t>(static_cast<uint32_t>(number) - 1),
          static_cast<uint32_t>(number >> 32)};
}

// The sequences of a call: 1 to max_sequences, none twice. In host memory, also for a store on a
// device.
struct SequenceList {
  const SequenceId* ids = nullptr;  // [count]
  int32_t count = 0;
};

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/barrier.cuh. Copies are carried out when they are waited for, over
// memory that was poisoned when they started, so a read without a wait is seen.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "gpu/shared_memory.cuh"

namespace tierkv {

struct CopyPiece {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
};
inline constexpr int32_t kCopyPieces = 4;
struct CopyPieces {
  int32_t count;
  uint32_t total;
  CopyPiece piece[kCopyPieces];
};

// Per barrier: phases completed, and the pieces of the phase under way.
struct EmulatedBarrier {
  int32_t phase = 0;
  bool armed = false;
  std::vector<CopyPiece> pieces;

  bool has_ended(uint32_t parity) const { return static_cast<uint32_t>(phase) % 2 != parity; }
};
inline std::map<const void*, EmulatedBarrier>& emulated_barriers() {
  static std::map<const void*, EmulatedBarrier> barriers;
  return barriers;
}

// Shows the traces of the test, its seed among them, and aborts.
[[noreturn]] inline void refuse(const char* what) {
  ADD_FAILURE() << "emulator: " << what;
  std::abort();
}

// Aborts where a copy is under way.
inline void expect_no_copy(const uint8_t* at, size_t bytes) {
  for (const auto& [address, barrier] : emulated_barriers()) {
    for (const CopyPiece& piece : barrier.pieces) {
      if (at + bytes <= piece.to || at >= piece.to + piece.bytes) continue;
      refuse("memory that a copy may be writing");
    }
  }
}
template <class T>
T load_arrived(const uint8_t* from) {
  expect_no_copy(from, sizeof(T));
  return *reinterpret_cast<const T*>(from);
}

inline void init_barrier(uint64_t* barrier) {
  emulated_barriers()[barrier] = {};
}
inline void publish_barriers() {
  __syncwarp();
}

inline void wait_barrier(uint64_t* barrier, uint32_t parity) {
  __syncwarp();  // the copies have been started
  EmulatedBarrier& b = emulated_barriers().at(barrier);
  if (b.armed) {
    for (const CopyPiece& piece : b.pieces) std::memcpy(piece.to, piece.from, piece.bytes);
    b.pieces.clear();
    b.armed = false;
    ++b.phase;
  }
  if (!b.has_ended(parity)) refuse("waiting for a copy that nobody started");
}

// Either is possible.
inline bool has_arrived(const uint64_t*, uint32_t parity) {
  return parity != 0;
}

inline uint64_t* barrier_at(uint32_t address) {
  return reinterpret_cast<uint64_t*>(emulated_shared().at(address, 8));
}
inline void wait_barrier(uint32_t barrier, uint32_t parity) {
  wait_barrier(barrier_at(barrier), parity);
}

}  // namespace tierkv

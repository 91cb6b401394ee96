// The host's stand-in for bench/baselines/rungs/rung_ptx.cuh. A thread's asynchronous copies are
// carried out when it waits for them, over memory that was poisoned when they started.
#pragma once

#include <deque>

#include "gpu/ptx.cuh"

namespace tierkv {

// Per thread: the groups that are closed, and the open one at the back.
inline std::deque<std::vector<CopyPiece>>& emulated_copies() {
  static std::map<int32_t, std::deque<std::vector<CopyPiece>>> groups;
  auto& mine = groups[static_cast<int32_t>(threadIdx.x)];
  if (mine.empty()) mine.emplace_back();
  return mine;
}

inline void start_copy_16(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    std::abort();
  }
  std::memset(to, 0xff, 16);
  emulated_copies().back().push_back(
      {static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), 16});
}
inline void close_copy_group() {
  emulated_copies().emplace_back();
}
template <int32_t kLeft>
void wait_copies() {
  auto& groups = emulated_copies();
  while (groups.size() > kLeft + 1) {
    for (const CopyPiece& piece : groups.front()) std::memcpy(piece.to, piece.from, piece.bytes);
    groups.pop_front();
  }
}

inline void load_matrices(uint32_t (&x)[4], const void* row) {
  emulator::Cta& cta = emulator::cta();
  const int32_t g = cta.lane() / 4, t = cta.lane() % 4;
  const auto address = reinterpret_cast<uint64_t>(row);
  cta.exchange({static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32)},
               [&](emulator::Warp& w) {
                 for (int32_t i = 0; i < 4; ++i) {
                   const uint32_t* words = w.words[8 * i + g];
                   const uint64_t from = words[0] | static_cast<uint64_t>(words[1]) << 32;
                   std::memcpy(&x[i], reinterpret_cast<const uint8_t*>(from) + 4 * t, 4);
                 }
                 return 0;
               });
}

}  // namespace tierkv

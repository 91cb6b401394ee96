// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/copies.cuh. A thread's copies are carried out when it waits for them,
// over memory that was poisoned when they started.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "gpu/barrier.cuh"

namespace tierkv {

inline void copy_pieces(uint64_t* barrier, const CopyPieces& pieces) {
  if (emulator::cta().lane() != 0) return;
  EmulatedBarrier& b = emulated_barriers().at(barrier);
  if (b.armed) std::abort();
  uint32_t total = 0;
  for (int32_t i = 0; i < pieces.count; ++i) {
    const CopyPiece& piece = pieces.piece[i];
    total += piece.bytes;
    const bool aligned = piece.bytes % 16 == 0 && reinterpret_cast<uintptr_t>(piece.to) % 16 == 0 &&
                         reinterpret_cast<uintptr_t>(piece.from) % 16 == 0;
    if (!aligned) std::abort();
    if (piece.bytes == 0) continue;
    std::memset(piece.to, 0xff, piece.bytes);
    b.pieces.push_back(piece);
  }
  if (total != pieces.total) std::abort();
  b.armed = true;
}

inline void copy_page(uint64_t* barrier, const CopyPiece& piece) {
  copy_pieces(barrier, {1, piece.bytes, {piece}});
}

inline void copy_of_lane(int32_t owner, uint32_t barrier, uint32_t to, const uint8_t* from,
                         uint32_t bytes) {
  if (emulator::cta().lane() != owner) return;
  EmulatedBarrier& b = emulated_barriers().at(barrier_at(barrier));
  if (b.armed || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) std::abort();
  b.armed = true;
  if (bytes == 0) return;
  uint8_t* place = emulated_shared().at(to, 16);
  emulated_shared().at(to + bytes - 16, 16);
  expect_no_copy(place, bytes);
  std::memset(place, 0xff, bytes);
  b.pieces.push_back({place, from, bytes});
}

inline void prefetch_bytes(const uint8_t*, uint32_t) {}
inline void prefetch_pieces(const CopyPieces&) {}
// Per thread: the groups that are closed, and the open one at the back.
inline std::deque<std::vector<CopyPiece>>& emulated_copies() {
  static std::map<int32_t, std::deque<std::vector<CopyPiece>>> groups;
  auto& mine = groups[static_cast<int32_t>(threadIdx.x)];
  if (mine.empty()) mine.emplace_back();
  return mine;
}

// from: null for zeros.
inline void start_emulated_copy(void* to, const void* from, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 ||
      reinterpret_cast<uintptr_t>(from) % bytes != 0) {
    std::abort();
  }
  std::memset(to, 0xff, bytes);
  emulated_copies().back().push_back(
      {static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), bytes});
}
inline uint4 load_of_line(const void* from) {
  return *static_cast<const uint4*>(from);
}
inline void copy_async_16(void* to, const void* from, bool present) {
  start_emulated_copy(to, present ? from : nullptr, 16);
}
inline void copy_async_4(void* to, const void* from, bool present) {
  start_emulated_copy(to, present ? from : nullptr, 4);
}
inline void close_copy_group() {
  emulated_copies().emplace_back();
}
template <int32_t kLeft>
void wait_copies() {
  auto& groups = emulated_copies();
  while (groups.size() > kLeft + 1) {
    for (const CopyPiece& piece : groups.front()) {
      if (piece.from == nullptr) {
        std::memset(piece.to, 0, piece.bytes);
      } else {
        std::memcpy(piece.to, piece.from, piece.bytes);
      }
    }
    groups.pop_front();
  }
}
inline void wait_copies() {
  close_copy_group();
  wait_copies<0>();
}

}  // namespace tierkv

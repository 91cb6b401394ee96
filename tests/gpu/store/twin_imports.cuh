// SPDX-License-Identifier: Apache-2.0
// Sequences as bytes, between two stores that get the same calls.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/engine/support/changed_bytes.h"
#include "tests/gpu/store/kv_store_twins.cuh"

namespace tierkv::testing {

// A sequence of either store into both.
inline void exchange(KvTwins* t, size_t i) {
  auto& live = t->live();
  const auto bytes = t->chance(0.5) ? t->host().export_sequence(live[i].host)
                                    : t->device().export_sequence(live[i].device);
  ASSERT_TRUE(bytes);
  const auto a = t->host().import_sequence(bytes->data(), bytes->size());
  // Half of the time out of pinned memory, which gets the bytes once more.
  uint8_t* from = const_cast<uint8_t*>(bytes->data());
  std::shared_ptr<void> pinned;
  if (t->chance(0.5)) {
    void* memory = nullptr;
    ASSERT_EQ(cudaHostAlloc(&memory, bytes->size(), cudaHostAllocMapped), cudaSuccess);
    pinned = {memory, [](void* p) { (void)cudaFreeHost(p); }};
    from = static_cast<uint8_t*>(memory);
    std::memset(from, 0xa5, bytes->size());
    const auto room = [&](size_t size) { return size == bytes->size() ? from : nullptr; };
    ASSERT_TRUE(t->device().export_sequence(live[i].device, room));
    ASSERT_TRUE(std::equal(bytes->begin(), bytes->end(), from));
  }
  const auto b = t->device().import_sequence(from, bytes->size());
  ASSERT_TRUE(a) << a.status().message();
  ASSERT_TRUE(b) << b.status().message();
  live.push_back({*a, *b, live[i].tokens});
}

// Bodies that are damaged inside chunks whose checksums are right: both stores say the same, and
// a refused one leaves nothing behind. Returns how many were refused. There is a free slot.
inline int32_t expect_hostile(KvTwins* t, size_t i, int32_t tries) {
  const auto bytes = t->host().export_sequence(t->live()[i].host);
  EXPECT_TRUE(bytes);
  const std::vector<ChunkEntry> chunks = chunks_of(*bytes);
  const auto count = static_cast<int32_t>(chunks.size());
  const int64_t free = t->device().usage()->pages_free;
  int32_t refused = 0;
  for (int32_t tried = 0; tried < tries; ++tried) {
    int32_t victim = t->pick(0, count - 1);
    while (chunks[victim].key.kind != ChunkKind::kStorePage) victim = (victim + 1) % count;
    const auto bad = changed_bytes(*bytes, [&](size_t c, std::vector<uint8_t>* payload) {
      if (c != static_cast<size_t>(victim) || payload->empty()) return;
      // Often near the end, where slots have no token.
      const auto size = static_cast<int32_t>(payload->size());
      (*payload)[t->pick(t->chance(0.5) ? 0 : size - size / 8 - 1, size - 1)] ^= 1 << t->pick(0, 7);
    });
    const auto a = t->host().import_sequence(bad.data(), bad.size());
    const auto b = t->device().import_sequence(bad.data(), bad.size());
    EXPECT_EQ(a.status().code(), b.status().code());
    EXPECT_EQ(a.status().message(), b.status().message());
    if (a && b) {
      EXPECT_EQ(*t->host().export_sequence(*a), *t->device().export_sequence(*b));
    }
    if (a) KvTwins::expect_ok(t->host().release(*a));
    if (b) KvTwins::expect_ok(t->device().release(*b));
    EXPECT_EQ(t->device().usage()->pages_free, free);
    refused += a ? 0 : 1;
  }
  return refused;
}

}  // namespace tierkv::testing

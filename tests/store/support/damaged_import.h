// What every store must do with an exported sequence whose bytes have changed.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/support/random_input.h"
#include "tierkv/store.h"

namespace tierkv::testing {

struct DamagedImport {
  const std::vector<uint8_t>& bytes;  // that the store exports and takes
  int32_t header_bytes;               // hit more often than the rest
  uint8_t unknown_version;
};
// Bits flipped, cut, lengthened, of a version to come: refused, and no page is lost.
inline void expect_refused(KvStore* store, const DamagedImport& damage, RandomInput* input) {
  const auto& [bytes, header_bytes, unknown_version] = damage;
  const auto import = [&](const std::vector<uint8_t>& b) {
    return store->import_sequence(b.data(), b.size()).status().code();
  };
  const int32_t free = store->stats()->pages_free;
  const int32_t last = static_cast<int32_t>(bytes.size()) - 1;
  for (int32_t i = 0; i < 1500; ++i) {
    std::vector<uint8_t> damaged = bytes;
    const int32_t at = input->uniform(0, input->chance(0.3) ? header_bytes : last);
    damaged[at] ^= static_cast<uint8_t>(1 << input->uniform(0, 7));
    ASSERT_NE(import(damaged), StatusCode::kOk) << "byte " << at;
  }
  for (int32_t i = 0; i < 200; ++i) {
    std::vector<uint8_t> cut = bytes;
    cut.resize(input->uniform(0, last));
    ASSERT_EQ(import(cut), StatusCode::kCorrupt);
  }
  std::vector<uint8_t> changed = bytes;
  changed.push_back(0);
  EXPECT_EQ(import(changed), StatusCode::kCorrupt);
  changed = bytes;
  changed[4] = unknown_version;
  EXPECT_EQ(import(changed), StatusCode::kVersion);
  EXPECT_EQ(store->import_sequence(nullptr, 9).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(store->stats()->pages_free, free);
}

}  // namespace tierkv::testing

// SPDX-License-Identifier: Apache-2.0
// A random generator with a fresh seed, which every failure prints. TIERKV_TEST_SEED in the
// environment is taken instead: a failure runs again.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

namespace tierkv {

// Made and destroyed in one thread, in the body of a test or as the base of a fixture: GoogleTest
// keeps traces as a stack.
class FreshRandom {
 protected:
  FreshRandom()
      : seed_(choose_seed()),
        rng_(seed_),
        trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}

  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }

  uint32_t seed_;
  std::mt19937 rng_;

 private:
  static uint32_t choose_seed() {
    const char* const given = std::getenv("TIERKV_TEST_SEED");
    return given == nullptr ? std::random_device{}()
                            : static_cast<uint32_t>(std::strtoul(given, nullptr, 10));
  }

  ::testing::ScopedTrace trace_;
};

class RandomTest : public ::testing::Test, protected FreshRandom {};

}  // namespace tierkv

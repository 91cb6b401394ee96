// SPDX-License-Identifier: Apache-2.0
// A random generator with a fresh seed, which every failure prints.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

namespace tierkv {

// Made and destroyed in one thread, in the body of a test or as the base of a fixture: GoogleTest
// keeps traces as a stack.
class FreshRandom {
 protected:
  FreshRandom()
      : seed_(std::random_device{}()),
        rng_(seed_),
        trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}

  uint32_t seed_;
  std::mt19937 rng_;

 private:
  ::testing::ScopedTrace trace_;
};

class RandomTest : public ::testing::Test, protected FreshRandom {};

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// The parts of a sequence that left a place, as bytes of their own.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "store/place/place.h"

namespace tierkv {

struct OwnedParts {
  std::vector<store::LayerTokens> layers;
  std::vector<std::vector<uint8_t>> shared, raw, bodies;

  explicit OwnedParts(const store::SequenceSource& source)
      : layers(source.layers), shared(source.shared) {
    for (size_t row = 0; row < source.raw_bytes.size(); ++row) {
      raw.emplace_back(source.raw_bytes[row]);
      bodies.emplace_back(source.body_bytes[row]);
      EXPECT_TRUE(source.write(static_cast<int64_t>(row), raw.back().data(), bodies.back().data()));
    }
  }
  store::SequenceParts views() const {
    store::SequenceParts parts;
    parts.layers = layers;
    parts.shared.assign(shared.begin(), shared.end());
    parts.raw.assign(raw.begin(), raw.end());
    parts.bodies.assign(bodies.begin(), bodies.end());
    return parts;
  }
};

}  // namespace tierkv

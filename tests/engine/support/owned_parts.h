// SPDX-License-Identifier: Apache-2.0
// The parts of a sequence that left a place, as bytes of their own.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "codec/file/container_format.h"
#include "store/place/place.h"

namespace tierkv {

struct OwnedParts {
  std::vector<store::LayerTokens> layers;
  std::vector<std::vector<uint8_t>> shared, raw, bodies;

  explicit OwnedParts(const store::SequenceSource& source)
      : layers(source.layers), shared(source.shared) {
    std::vector<uint8_t*> places;
    raw.resize(source.part_bytes.size() / 2);
    bodies.resize(raw.size());
    for (size_t i = 0; i < source.part_bytes.size(); ++i) {
      std::vector<uint8_t>& part = part_of(i);
      part.resize(align_chunk(source.part_bytes[i]));
      places.push_back(part.data());
    }
    std::vector<uint64_t> checksums(places.size());
    EXPECT_TRUE(source.write(places, &checksums));
    for (size_t i = 0; i < places.size(); ++i) part_of(i).resize(source.part_bytes[i]);
  }
  store::SequenceParts views() const {
    store::SequenceParts parts;
    parts.layers = layers;
    parts.shared.assign(shared.begin(), shared.end());
    parts.raw.assign(raw.begin(), raw.end());
    parts.bodies.assign(bodies.begin(), bodies.end());
    return parts;
  }

 private:
  std::vector<uint8_t>& part_of(size_t i) { return i % 2 == 0 ? raw[i / 2] : bodies[i / 2]; }
};

}  // namespace tierkv

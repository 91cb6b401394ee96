// SPDX-License-Identifier: Apache-2.0
#include "datasets/safetensors/tensor_names.h"

#include <gtest/gtest.h>

#include <random>

namespace tierkv::datasets {
namespace {

TensorNames named(const std::string& layer, const std::string& tokens) {
  TensorNames names;
  names.layer = layer;
  names.tokens = tokens;
  return names;
}

TEST(TensorNames, MatchingUndoesNaming) {
  std::random_device device;
  const auto seed = device();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (const TensorNames& names :
       {TensorNames(), TensorNames::hugging_face(), named("{layer}/{part}/{seq}", "t-{seq}"),
        named("x{seq}.{layer}x{part}", "x{seq}")}) {
    ASSERT_TRUE(names.validate().is_ok());
    for (int i = 0; i < 200; ++i) {
      std::string seq;
      const size_t length = 1 + random() % 8;
      while (names.has_sequences() && seq.size() < length) seq += "ab{}/_"[random() % 6];
      const auto layer = static_cast<int32_t>(random() % 100000);
      const DumpPart part = kDumpParts[random() % kNumDumpParts];
      TensorNames::Place place;
      const std::string name = names.layer_name(seq, layer, part);
      ASSERT_TRUE(names.match_layer(name, &place)) << name;
      EXPECT_EQ(place.seq, seq) << name;
      EXPECT_EQ(place.layer, layer) << name;
      EXPECT_EQ(place.part, part) << name;
      std::string found;
      ASSERT_TRUE(names.match_tokens(names.tokens_name(seq), &found));
      EXPECT_EQ(found, seq);
    }
  }
}

// q is the beginning of q_positions, and a sequence may look like the rest of a pattern.
TEST(TensorNames, PartsAndSequencesAreToldApart) {
  TensorNames::Place place;
  const TensorNames names;
  ASSERT_TRUE(names.match_layer("seq.a.layer.1.layer.2.q_positions", &place));
  EXPECT_EQ(place.seq, "a.layer.1");
  EXPECT_EQ(place.layer, 2);
  EXPECT_EQ(place.part, DumpPart::kQueryPositions);
}

TEST(TensorNames, OtherNamesDoNotMatch) {
  TensorNames::Place place;
  std::string seq;
  const TensorNames names;
  for (const std::string name :
       {"", "seq.a.layer.1.x", "seq.a.layer.01.k", "seq.a.layer..k", "seq.a.layer.-1.k",
        "seq.a.layer.100000.k", "seq..layer.1.k", "seq.a.layer.1.k ", "Seq.a.layer.1.k"}) {
    EXPECT_FALSE(names.match_layer(name, &place)) << name;
  }
  for (const std::string name : {"", "seq.a", "seq..tokens", "seq.a.tokens2"})
    EXPECT_FALSE(names.match_tokens(name, &seq)) << name;
}

TEST(TensorNames, PatternsThatCannotBeUndoneAreRefused) {
  for (const std::string layer :
       {"{layer}", "{part}", "{layer}{part}", "{layer}.{part}.{layer}",
        "{seq}.{seq}.{layer}.{part}", "{layer}.{part}.{", "{layer}.{part}.{x}"}) {
    EXPECT_FALSE(named(layer, "tokens").validate().is_ok()) << layer;
  }
  EXPECT_FALSE(named("{layer}.{part}", "{seq}").validate().is_ok());
  EXPECT_FALSE(named("{seq}.{layer}.{part}", "tokens").validate().is_ok());
  TensorNames names;
  names.parts[1] = names.parts[0];
  EXPECT_FALSE(names.validate().is_ok());
  names.parts[1] = "";
  EXPECT_FALSE(names.validate().is_ok());
}

}  // namespace
}  // namespace tierkv::datasets

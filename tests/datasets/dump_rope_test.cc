// SPDX-License-Identifier: Apache-2.0
#include "datasets/dump_rope.h"

#include <map>

#include "tests/datasets/bad_dumps.h"

namespace tierkv::datasets {
namespace {

Rope random_rope(std::mt19937* rng, RopePairing pairing, int32_t dims) {
  std::uniform_real_distribution<float> frequency(0, 1);
  Rope rope{pairing, dims, {}};
  for (int32_t i = 0; i < dims / 2; ++i) rope.inv_freq.push_back(frequency(*rng));
  return rope;
}

class RopeTest : public DumpTest {
 protected:
  // The rotations that a written dump is read with.
  std::vector<Rope> read_back(const DumpInfo& info) {
    const Status written = write_small(path("dump.h5"), kTokens, info);
    EXPECT_TRUE(written) << written.message();
    const Result<DumpReader> dump = DumpReader::open(path("dump.h5"));
    EXPECT_TRUE(dump) << dump.status().message();
    return dump ? dump->info().rope : std::vector<Rope>{};
  }
  bool has_frequencies() const {
    const Hdf5Lock lock;
    const Result<Handle> file = open_file(path("dump.h5"));
    return H5Lexists(file->id(), "rope_inv_freq", H5P_DEFAULT) > 0;
  }
};

TEST_F(RopeTest, ThetaAloneIsPlainRopeInHalves) {
  const DumpInfo info = small_info();
  EXPECT_EQ(read_back(info), std::vector<Rope>{Rope::plain(10000, 8)});
  EXPECT_FALSE(has_frequencies());
}

TEST_F(RopeTest, AppliedWithoutThetaIsUnknown) {
  DumpInfo info = small_info();
  info.layout.rope_theta = 0;
  EXPECT_TRUE(read_back(info).empty());
}

TEST_F(RopeTest, NotAppliedTurnsNothing) {
  DumpInfo info = small_info();
  info.layout.rope_applied = false;
  EXPECT_EQ(read_back(info), std::vector<Rope>{Rope{}});
}

TEST_F(RopeTest, FrequenciesOfAllLayersComeBack) {
  for (const RopePairing pairing : {RopePairing::kHalves, RopePairing::kNeighbours}) {
    for (const int32_t dims : {2, 6, 8}) {
      for (const int32_t layers : {1, 2}) {
        DumpInfo info = small_info();
        for (int32_t l = 0; l < layers; ++l) info.rope.push_back(random_rope(&rng_, pairing, dims));
        EXPECT_EQ(read_back(info), info.rope) << dims << " dims, " << layers << " layers";
        EXPECT_TRUE(has_frequencies());
        std::filesystem::remove(path("dump.h5"));
      }
    }
  }
}

TEST_F(RopeTest, WriterRefusesWhatReaderWould) {
  const auto refused = [&](std::vector<Rope> rope, const char* why) {
    DumpInfo info = small_info();
    info.rope = std::move(rope);
    const Status s = write_small(path("dump.h5"), kTokens, info);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument) << why;
    EXPECT_EQ(s.message().find(path("dump.h5") + ": rope: "), 0u) << s.message();
    EXPECT_EQ(files_in_dir(), 0) << why;
  };
  const Rope good = random_rope(&rng_, RopePairing::kHalves, 8);
  refused({good, good, good}, "three of two layers");
  refused({good, random_rope(&rng_, RopePairing::kHalves, 6)}, "unequal dims");
  refused({good, random_rope(&rng_, RopePairing::kNeighbours, 8)}, "unequal pairings");
  refused({Rope{}}, "no rotation where RoPE is applied");
  refused({random_rope(&rng_, RopePairing::kHalves, 0)}, "no dims");
  refused({random_rope(&rng_, RopePairing::kHalves, 10)}, "more dims than the head");
  for (const float f : {NAN, INFINITY, -1e-3f}) {
    Rope bad = good;
    bad.inv_freq[2] = f;
    refused({bad}, "a frequency");
  }
}

TEST_F(RopeTest, TextsComeBack) {
  const CacheLayout layout = small_info().layout;
  const Rope first = random_rope(&rng_, RopePairing::kNeighbours, 6);
  const Rope second = random_rope(&rng_, RopePairing::kNeighbours, 6);
  for (const std::vector<Rope>& rope : {std::vector<Rope>{first}, std::vector<Rope>{first, second},
                                        std::vector<Rope>{Rope::plain(10000, 8)}}) {
    std::map<std::string, std::string> texts = rope_texts(rope, layout);
    texts["kind.a"] = "text";
    const Result<std::vector<Rope>> back = parse_rope_texts(texts, layout);
    ASSERT_TRUE(back) << back.status().message();
    EXPECT_EQ(*back, rope);
  }
}

TEST_F(RopeTest, BadTextsAreRefused) {
  const CacheLayout layout = small_info().layout;
  const std::map<std::string, std::string> good =
      rope_texts({random_rope(&rng_, RopePairing::kHalves, 6)}, layout);
  ASSERT_TRUE(parse_rope_texts(good, layout));
  const struct {
    const char *name, *text, *message;
  } cases[] = {
      {"rope_pairing", "thirds", "attribute 'rope_pairing' is 'thirds'"},
      {"rope_pairing", "none", "attribute 'rope_pairing' is 'none'"},
      {"rope_dims", "6x", "rope_dims is '6x' (expected a positive number)"},
      {"rope_dims", "", "rope_dims is ''"},
      {"rope_dims", "-6", "rope_dims is '-6'"},
      {"rope_dims", "1", "rope_inv_freq: has 3 numbers (expected 0"},
      {"rope_dims", "10", "rope_inv_freq: has 3 numbers (expected 5, or as many for each layer)"},
      {"rope_inv_freq", "", "rope_inv_freq: has 0 numbers"},
      {"rope_inv_freq", "1 0.5", "rope_inv_freq: has 2 numbers (expected 3"},
      {"rope_inv_freq", "1 0.5x 0.2", "rope_inv_freq: element 1 is no number in range"},
      {"rope_inv_freq", "1 1e99 0.2", "rope_inv_freq: element 1 is no number in range"},
      {"rope_inv_freq", "1 -0.5 0.2", "rope: a frequency is negative or not finite"},
      {"rope_inv_freq", "1 nan 0.2", "rope: a frequency is negative or not finite"},
  };
  for (const auto& c : cases) {
    std::map<std::string, std::string> texts = good;
    texts[c.name] = c.text;
    const Result<std::vector<Rope>> rope = parse_rope_texts(texts, layout);
    ASSERT_FALSE(rope) << c.name << " = " << c.text;
    EXPECT_EQ(rope.status().code(), StatusCode::kCorrupt);
    EXPECT_NE(rope.status().message().find(c.message), std::string::npos)
        << rope.status().message();
  }
}

// Adds a rotation to the valid dump: `dims` in halves with frequencies of `shape`, all `fill`.
void add_rope(hid_t f, int64_t dims, const std::vector<int64_t>& shape, double fill = 0.5,
              hid_t type = H5T_IEEE_F32LE) {
  ASSERT_TRUE(write_string_attribute(f, "rope_pairing", "halves"));
  ASSERT_TRUE(write_int_attribute(f, "rope_dims", dims));
  replace(f, "/rope_inv_freq", type, shape, fill);
}

const std::vector<Case>& rope_cases() {
  using S = StatusCode;
  static const std::vector<Case> cases = {
      {"UnknownPairing", [](hid_t f) { write_string_attribute(f, "rope_pairing", "thirds"); },
       S::kCorrupt,
       "/: attribute 'rope_pairing' is 'thirds' (expected 'halves' or 'neighbours', as "
       "rope_applied is 1)"},
      {"NoneButApplied", [](hid_t f) { write_string_attribute(f, "rope_pairing", "none"); },
       S::kCorrupt,
       "/: attribute 'rope_pairing' is 'none' (expected 'halves' or 'neighbours', as "
       "rope_applied is 1)"},
      {"HalvesButNotApplied",
       [](hid_t f) {
         add_rope(f, 8, {4});
         set_int(f, "rope_applied", 0);
       },
       S::kCorrupt,
       "/: attribute 'rope_pairing' is 'halves' (expected 'none', as rope_applied is 0)"},
      {"NoneWithFrequencies",
       [](hid_t f) {
         add_rope(f, 8, {4});
         set_int(f, "rope_applied", 0);
         set_string(f, "rope_pairing", "none");
       },
       S::kCorrupt, "/rope_inv_freq: is there although rope_pairing is 'none'"},
      {"NoPairing",
       [](hid_t f) {
         add_rope(f, 8, {4});
         drop_attribute(f, "rope_pairing");
       },
       S::kCorrupt, "/: attribute 'rope_pairing' is missing beside rope_dims or rope_inv_freq"},
      {"DimsAlone", [](hid_t f) { write_int_attribute(f, "rope_dims", 8); }, S::kCorrupt,
       "/: attribute 'rope_pairing' is missing beside rope_dims or rope_inv_freq"},
      {"NoDims",
       [](hid_t f) {
         add_rope(f, 8, {4});
         drop_attribute(f, "rope_dims");
       },
       S::kNotFound, "/: attribute 'rope_dims' is missing"},
      {"OddDims", [](hid_t f) { add_rope(f, 7, {3}); }, S::kCorrupt,
       "/: attribute 'rope_dims' is 7 (expected an even number up to head_dim = 8)"},
      {"TooManyDims", [](hid_t f) { add_rope(f, 10, {5}); }, S::kCorrupt,
       "/: attribute 'rope_dims' is 10 (expected an even number up to head_dim = 8)"},
      {"NegativeDims", [](hid_t f) { add_rope(f, -2, {1}); }, S::kCorrupt,
       "/: attribute 'rope_dims' is -2 (expected an even number up to head_dim = 8)"},
      {"NoFrequencies",
       [](hid_t f) {
         add_rope(f, 8, {4});
         remove(f, "/rope_inv_freq");
       },
       S::kNotFound, "/rope_inv_freq: is missing"},
      {"TooFewFrequencies", [](hid_t f) { add_rope(f, 8, {3}); }, S::kCorrupt,
       "/rope_inv_freq: has shape [3] (expected [4] or [2, 4], by rope_dims)"},
      {"OtherLayers",
       [](hid_t f) {
         add_rope(f, 8, {3, 4});
       },
       S::kCorrupt, "/rope_inv_freq: has shape [3, 4] (expected [4] or [2, 4], by rope_dims)"},
      {"Doubles", [](hid_t f) { add_rope(f, 8, {4}, 0.5, H5T_IEEE_F64LE); }, S::kCorrupt,
       "/rope_inv_freq: is not little-endian float32"},
      {"NotANumber",
       [](hid_t f) {
         add_rope(f, 8, {2, 4}, NAN);
       },
       S::kCorrupt, "/rope_inv_freq: element 0 is nan (expected radians a position, not negative)"},
      {"Negative", [](hid_t f) { add_rope(f, 8, {4}, -0.25); }, S::kCorrupt,
       "/rope_inv_freq: element 0 is -0.250000 (expected radians a position, not negative)"},
  };
  return cases;
}

class BadRopeTest : public DumpTest, public testing::WithParamInterface<Case> {};

TEST_P(BadRopeTest, IsNamedAndRefused) {
  expect_refused(GetParam(), path("bad.h5"));
}

INSTANTIATE_TEST_SUITE_P(Bad, BadRopeTest, testing::ValuesIn(rope_cases()), case_name);

}  // namespace
}  // namespace tierkv::datasets

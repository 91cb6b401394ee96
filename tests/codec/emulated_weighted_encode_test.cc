// SPDX-License-Identifier: Apache-2.0
// The warps that encode coded blocks, on the host, against encode_block():
// the same bytes.
#include "codec/gpu/coded/weighted_encode.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/fresh_random.h"
#include "tests/support/weighted_world.h"

namespace tierkv {
namespace {

constexpr uint32_t kSlotUnits = 2 * kMaxCodedBlockBytes / kBlockAlignment;

// A call over a world, with poisoned outputs.
struct EncodeRun {
  WeightedWorld& world;
  HostBook keys, values;
  std::vector<std::array<uint8_t, 4>> decided;
  std::vector<float> key_scales, value_steps;
  std::vector<uint16_t> key_means;
  std::vector<WeightedRange> ranges;
  std::vector<WeightedPlace> places[2];
  std::vector<StatusCode> status;
  std::vector<uint4> bytes;
  WeightedEncode call;

  explicit EncodeRun(WeightedWorld& w)
      : world(w),
        keys(w.book(0)),
        values(w.book(1)),
        decided(w.decided()),
        key_scales(w.key_scales()),
        value_steps(w.value_steps()),
        key_means(w.key_means()),
        ranges(w.ranges()) {
    const size_t blocks = static_cast<size_t>(w.shape.rows) * w.row_blocks();
    bytes.assign(2 * blocks * kSlotUnits, uint4{0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5});
    for (uint32_t i = 0; i < blocks; ++i) {
      for (uint32_t c = 0; c < 2; ++c) places[c].push_back({(2 * i + c) * kSlotUnits, kSlotUnits});
    }
    status.assign(2 * blocks, StatusCode::kIo);
    call.keys = w.x[0].data(), call.values = w.x[1].data();
    call.decided = reinterpret_cast<const uint8_t(*)[4]>(decided.data());
    call.ranges = ranges.data();
    call.rows.key_scales = key_scales.data();
    call.rows.key_means = key_means.empty() ? nullptr : key_means.data();
    call.rows.value_steps = value_steps.data();
    call.rows.rope = {w.rope.place.data(), w.rope.block.data(), w.rope.pairing, w.rope.pairs,
                      w.rope.blocks};
    call.rows.num_rows = w.shape.rows, call.rows.head_dim = w.shape.head_dim;
    call.books[0].codebook = &keys.codebook, call.books[1].codebook = &values.codebook;
    for (int32_t c = 0; c < 2; ++c) call.places[c] = places[c].data();
    call.bytes = reinterpret_cast<uint8_t*>(bytes.data());
    call.size = static_cast<int64_t>(bytes.size()) * 16;
    call.status = status.data();
    call.token_stride = w.stride();
    call.dtype = w.shape.dtype;
    call.num_ranges = w.shape.rows, call.most_blocks = w.row_blocks();
  }

  void run(int32_t warps = 2) {
    switch (call.rows.head_dim) {
      case 64:
        return run_as<2>(warps);
      case 96:
        return run_as<3>(warps);
      case 128:
        return run_as<4>(warps);
      default:
        return run_as<8>(warps);
    }
  }
  template <int32_t kPer>
  void run_as(int32_t warps) {
    const size_t size = kEncodeCtaBytes + warps * encode_warp_bytes(kPer * 32, longest_word(call));
    for (int32_t cta = 0; cta < 2; ++cta) {
      std::vector<uint4> shared(size / 16 + 1,
                                uint4{0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5, 0x80808080});
      emulator::cta().run(
          cta, 32 * warps,
          [&] { encode_weighted_items<kPer>(call, reinterpret_cast<uint8_t*>(shared.data())); }, 2);
    }
  }
  std::vector<uint8_t> block(int32_t c, size_t i) const {
    const auto* from =
        reinterpret_cast<const uint8_t*>(bytes.data()) + int64_t{16} * places[c][i].unit;
    return {from, from + int64_t{16} * places[c][i].units};
  }
  void expect_equal() const {
    for (size_t i = 0; i < world.blocks.size(); ++i) {
      for (int32_t c = 0; c < 2; ++c) {
        const std::string what = "block " + std::to_string(i) + " component " + std::to_string(c);
        ASSERT_EQ(status[2 * i + c], StatusCode::kOk) << what;
        ASSERT_EQ(places[c][i].units * size_t{16}, world.blocks[i].bytes[c].size()) << what;
        ASSERT_EQ(block(c, i), world.blocks[i].bytes[c]) << what;
      }
    }
  }
};

class EmulatedWeighted : public RandomTest {
 protected:
  void expect_hosts_bytes(const WeightedShape& shape) {
    SCOPED_TRACE("head_dim " + std::to_string(shape.head_dim) + " rotary " +
                 std::to_string(shape.rotary_dims));
    WeightedWorld world(rng_, shape);
    world.encode();
    if (HasFatalFailure()) return;
    EncodeRun run(world);
    run.run();
    run.expect_equal();
  }
};

TEST_F(EmulatedWeighted, EveryHeadDimAndRotation) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    WeightedShape shape;
    shape.head_dim = shape.rotary_dims = head_dim;
    shape.tokens = 129 + static_cast<int32_t>(rng_() % 63);
    expect_hosts_bytes(shape);
    shape.pairing = RopePairing::kNeighbours;
    shape.dtype = DType::kBFloat16;
    shape.streams = 2;
    shape.rows = 1;
    shape.sinks = static_cast<int32_t>(rng_() % 8);
    expect_hosts_bytes(shape);
    // Part of the channels, pairs that are no multiple of 32.
    shape.pairing = rng_() % 2 == 0 ? RopePairing::kHalves : RopePairing::kNeighbours;
    shape.rotary_dims = 2 + 2 * static_cast<int32_t>(rng_() % (head_dim / 2 - 1));
    shape.weights = false;
    expect_hosts_bytes(shape);
    shape.pairing = RopePairing::kNone;
    shape.rotary_dims = 0;
    shape.means = shape.significance = false;
    expect_hosts_bytes(shape);
    if (HasFatalFailure()) return;
  }
}

TEST_F(EmulatedWeighted, EveryLengthOfABlock) {
  WeightedShape shape;
  shape.head_dim = shape.rotary_dims = 64;
  shape.rows = 1;
  for (const int32_t sinks : {0, 4}) {
    for (const int32_t tokens : {1, 2, 8, 15, 16, 17, 33, 47, 63, 64}) {
      shape.sinks = sinks;
      shape.tokens = sinks + tokens;
      shape.streams = 1 + static_cast<int32_t>(rng_() % 2);
      expect_hosts_bytes(shape);
      if (HasFatalFailure()) return;
    }
  }
}

// Steps so fine that codes leave a byte, books have many exceptions and blocks stay raw.
TEST_F(EmulatedWeighted, WideCodesAndRawBlocks) {
  for (const int32_t head_dim : {96, 256}) {
    for (const double step : {0.2, 0.05, 0.002}) {
      WeightedShape shape;
      shape.head_dim = shape.rotary_dims = head_dim;
      shape.tokens = 100, shape.rows = 1;
      shape.key_step = step, shape.value_step = 2 * step;
      shape.outliers = false;
      WeightedWorld world(rng_, shape);
      world.encode();
      world.use_strange_books(rng_);
      world.encode_blocks();
      if (HasFatalFailure()) return;
      EncodeRun run(world);
      run.run(1);
      run.expect_equal();
      if (HasFatalFailure()) return;
    }
  }
}

// What fills up the last tile must not widen the range of a raw block.
TEST_F(EmulatedWeighted, RaggedRawBlocksFarFromZero) {
  for (const int32_t tokens : {7, 45}) {
    WeightedShape shape;
    shape.head_dim = shape.rotary_dims = 96;
    shape.tokens = shape.sinks + tokens, shape.rows = 1;
    shape.value_step = 0.2;
    shape.significance = false;
    WeightedWorld world(rng_, shape);
    for (uint16_t& x : world.x[1]) x = float_to_half(3.0f + static_cast<float>(rng_() % 7) / 100);
    world.encode();
    world.use_strange_books(rng_);
    world.encode_blocks();
    if (HasFatalFailure()) return;
    const BlockHeader h = load_header(world.blocks[0].bytes[1].data());
    ASSERT_TRUE(is_raw_mode(h.mode) && h.base_or_books > 1);
    EncodeRun run(world);
    run.run(1);
    run.expect_equal();
  }
}

TEST_F(EmulatedWeighted, GivenPlacesAndSizesAlone) {
  WeightedShape shape;
  WeightedWorld world(rng_, shape);
  world.encode();
  EncodeRun sizes(world);
  sizes.call.bytes = nullptr;
  sizes.run();
  EncodeRun placed(world);
  uint32_t unit = 1;
  for (size_t i = 0; i < world.blocks.size(); ++i) {
    for (int32_t c = 0; c < 2; ++c) {
      EXPECT_EQ(sizes.places[c][i].units * size_t{16}, world.blocks[i].bytes[c].size());
      placed.places[c][i] = {unit, sizes.places[c][i].units};
      unit += sizes.places[c][i].units + 1;
    }
  }
  placed.run();
  placed.expect_equal();
  // A unit less.
  EncodeRun tight(world);
  for (int32_t c = 0; c < 2; ++c) tight.places[c] = placed.places[c];
  --tight.places[1][2].units;
  tight.run();
  EXPECT_EQ(tight.status[2 * 2 + 1], StatusCode::kBufferTooSmall);
  EXPECT_EQ(tight.places[1][2].units, 0u);
  EXPECT_EQ(tight.status[2 * 2], StatusCode::kOk);
}

TEST_F(EmulatedWeighted, BadInputIsReportedByBlock) {
  WeightedShape shape;
  shape.tokens = 192, shape.rows = 1;
  WeightedWorld world(rng_, shape);
  world.encode();
  EncodeRun run(world);
  world.x[0][world.at(0, 70) + 99] = float_to_half(NAN);
  world.x[1][world.at(0, 150) + 3] = float_to_half(INFINITY);
  run.value_steps[0] = 1e-4f;  // codes beyond 16 bits
  run.run();
  const StatusCode expected[] = {StatusCode::kOk,        StatusCode::kOutOfRange,
                                 StatusCode::kNonFinite, StatusCode::kOutOfRange,
                                 StatusCode::kOk,        StatusCode::kNonFinite};
  for (int32_t i = 0; i < 6; ++i) {
    EXPECT_EQ(run.status[i], expected[i]) << i;
    EXPECT_EQ(run.places[i % 2][i / 2].units == 0, expected[i] == StatusCode::kNonFinite) << i;
  }
  EXPECT_EQ(run.block(0, 0), world.blocks[0].bytes[0]);

  EncodeRun beyond(world);
  beyond.ranges[0].row = 1;
  beyond.run();
  EXPECT_EQ(beyond.status[0], StatusCode::kInvalidArgument);
  EXPECT_EQ(beyond.places[0][0].units, kSlotUnits);
  EncodeRun no_turns(world);
  no_turns.call.rows.rope.blocks = 1;
  no_turns.run();
  EXPECT_EQ(no_turns.status[0], StatusCode::kOk);
  EXPECT_EQ(no_turns.status[2], StatusCode::kOutOfRange);
  EncodeRun not_pairs(world);
  not_pairs.keys.codebook.mode = BlockMode::kSingle;
  not_pairs.run();
  EXPECT_EQ(not_pairs.status[0], StatusCode::kUnsupported);
  // Words that are longer than the call says would not fit into the warps' memory.
  EncodeRun too_long(world);
  for (DeviceBook& book : too_long.call.books) {
    book.max_length = too_long.keys.codebook.max_length - 1;
  }
  too_long.run();
  EXPECT_EQ(too_long.status[0], StatusCode::kUnsupported);
}

// Codes that are vouched for are the law's, next to where it rounds the other way too; and most
// codes are vouched for.
TEST_F(EmulatedWeighted, QuickCodesAreRight) {
  const auto is_sure = [](const QuickCode& quick) {
    return quick.off < kSureOff && is_sure_code(quick.bits);
  };
  std::uniform_real_distribution<float> unit(1.0f, 2.0f);
  int64_t sure = 0, tried = 0;
  for (int32_t i = 0; i < 400000; ++i) {
    const int32_t e = static_cast<int32_t>(rng_() % 256) - 128;
    const float scale = std::ldexp(unit(rng_), static_cast<int32_t>(rng_() % 240) - 120);
    const float step = mul_rn(scale, exponent_factor(e));
    const bool near = i % 4 != 0;
    float y = mul_rn(static_cast<float>(static_cast<int32_t>(rng_() % 256) - 128) + 0.5f, step);
    if (!near) y = mul_rn(y, unit(rng_));
    for (int32_t ulps = static_cast<int32_t>(rng_() % 9) - 4; near && ulps != 0;) {
      y = std::nextafter(y, ulps < 0 ? -INFINITY : INFINITY);
      ulps += ulps < 0 ? 1 : -1;
    }
    const float inverse = mul_rn(QuickCode::inverse_of(scale), exponent_factor(-e));
    const QuickCode quick = QuickCode::of(y, inverse);
    if (!near) sure += is_sure(quick), ++tried;
    if (!is_sure(quick)) continue;
    ASSERT_EQ(static_cast<float>(quick_code(quick.bits)),
              weighted_code(y, 0, scale, exponent_factor(e)))
        << y << " " << scale << " " << e;
  }
  EXPECT_GT(sure, tried / 2);
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    EXPECT_FALSE(is_sure(QuickCode::of(bad, QuickCode::inverse_of(1))));
  }
}

}  // namespace
}  // namespace tierkv

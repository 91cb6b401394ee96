// SPDX-License-Identifier: Apache-2.0
// The kernels of attention over coded blocks on the host, thread by thread, against exact
// attention over decoded blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/coded/coded_join.cuh"
#include "attention/coded/coded_kernel.cuh"
#include "tests/support/fresh_random.h"
#include "tests/support/weighted_attention_world.h"

namespace tierkv {

__align__(1024) uint8_t shared[228 << 10];

namespace test::weighted {
namespace {

constexpr int32_t kCtas = 2;

// room: bytes of a slot over those of the largest block, in parts of 128.
CodedKernelParams params_of(const CodedAttention& call, int32_t room, int32_t warps) {
  CodedKernelParams p{};
  p.call = call;
  p.grid.num_ctas = kCtas;
  p.grid.warps = warps;
  p.grid.slot_bytes =
      (slice_count(call.head_dim) * call.max_block_bytes * room / 128 + 127) / 128 * 128;
  p.headers = {expected_header(call.keys.codebook, call.head_dim),
               expected_header(call.values.codebook, call.head_dim)};
  p.key_mask = table_mask(call.keys.codebook.max_length, 0);
  p.value_mask = table_mask(call.values.codebook.max_length, 0);
  p.row_columns = call.all_columns();
  p.queries = coded_columns(call);
  p.table_bytes = static_cast<uint32_t>(table_region_bytes(longest_word(call), 0));
  const CodedSharedLayout at = coded_shared_layout(
      EmulatedShared::kStart, p.table_bytes, static_cast<uint32_t>(p.grid.slot_bytes),
      static_cast<uint32_t>(warps),
      weighted_tail_bytes(call.head_dim, call.weighted.pairing != RopePairing::kNone, warps));
  p.grid.shared_bytes = static_cast<int32_t>(at.end - EmulatedShared::kStart);
  return p;
}

Attended attend_on_host(const World& w, CodedKernel kernel, int32_t room, int32_t warps) {
  CodedAttention call = call_of(w);
  const std::vector<uint32_t> tables[2] = {device_table(w.books[0].family.books.front()),
                                           device_table(w.books[1].family.books.front())};
  call.keys.codebook.table = tables[0].data();
  call.values.codebook.table = tables[1].data();
  const Status valid = call.validate();
  EXPECT_TRUE(valid) << valid.message();
  std::vector<uint16_t> halves;
  for (size_t r = 0; r < w.rows.size(); ++r) {
    for (int32_t c = 0; c < w.shape.all_columns(); ++c) {
      const auto first = w.q.begin() + static_cast<int64_t>(w.shape.place(r, c)) * w.shape.head_dim;
      halves.insert(halves.end(), first, first + w.shape.head_dim);
    }
  }
  call.q = halves.data();
  const auto most = static_cast<int32_t>(sizeof(shared));
  if (params_of(call, room, warps).grid.shared_bytes > most) room = 128;
  Attended to;
  to.out.resize(w.q.size(), 0x7e00);
  to.lse.resize(w.rows.size() * static_cast<size_t>(call.all_columns()), NAN);
  to.status.resize(w.rows.size(), StatusCode::kIo);
  call.out = to.out.data();
  call.lse = to.lse.data();
  call.row_status = to.status.data();
  for (int32_t first = 0; first < call.all_columns(); first += kCodedColumns) {
    CodedKernelParams p = params_of(call, room, warps);
    p.first_column = first;
    p.call.columns = std::min(p.row_columns - first, kCodedColumns);
    p.call.q = halves.data() + int64_t{first} * call.head_dim;
    std::vector<float> workspace(
        static_cast<size_t>((kCtas * warps + call.num_rows) * coded_partial_floats(p.call)), NAN);
    p.call.workspace = workspace.data();
    EXPECT_LE(p.grid.shared_bytes, most);
    emulated_shared() = {shared, static_cast<uint32_t>(p.grid.shared_bytes)};
    for (int32_t cta = 0; cta < kCtas; ++cta) {
      std::fill(std::begin(shared), std::end(shared), uint8_t{0xff});
      emulator::cta().run(
          cta, warps * 32, [&] { kernel(p); }, kCtas);
    }
    // Every choice of a join is right.
    const JoinLaunch join = join_launch(p.call, room % 4 * (4 * kJoinAhead));
    for (int32_t cta = 0; cta < join.ctas; ++cta) {
      emulator::cta().run(
          cta, join.warps * 32, [&] { join.kernel(p); }, join.ctas);
    }
  }
  return to;
}

template <int kDimBlocks, KeyTurning kTurning>
CodedKernel kernel_of(int32_t streams) {
  return streams == 1 ? coded_attention_kernel<kDimBlocks, WeightedCode<1, 0, kTurning>>
                      : coded_attention_kernel<kDimBlocks, WeightedCode<2, 0, kTurning>>;
}
CodedKernel kernel_of(const Shape& s) {
  constexpr auto kHalves = KeyTurning::kHalves, kPartHalves = KeyTurning::kPartHalves;
  if (s.pairing == RopePairing::kNone) return kernel_of<4, KeyTurning::kNone>(s.streams);
  if (s.pairing == RopePairing::kNeighbours) {
    return kernel_of<4, KeyTurning::kNeighbours>(s.streams);
  }
  if (s.rotary_dims != 0) {
    return s.head_dim == 96 ? kernel_of<6, kPartHalves>(s.streams)
                            : kernel_of<16, kPartHalves>(s.streams);
  }
  if (s.head_dim == 64) return kernel_of<4, kHalves>(s.streams);
  if (s.head_dim == 96) return kernel_of<6, kHalves>(s.streams);
  if (s.head_dim == 128) return kernel_of<8, kHalves>(s.streams);
  return kernel_of<16, kHalves>(s.streams);
}

class EmulatedWeightedAttention : public RandomTest {
 protected:
  EmulatedWeightedAttention() : source_(seed_) {}
  std::vector<int32_t> rows() {
    return {0, 60, 0, 1, source_.below(300), source_.below(300), 700, 0};
  }
  void check(Shape shape) {
    shape.columns = 1 + source_.below(10);
    if (source_.below(2) != 0) shape.q_len = 1 + source_.below(4);
    shape.streams = 1 + source_.below(2);
    shape.importance = source_.below(4) != 0;
    SCOPED_TRACE(shape.name());
    World w;
    make_world(&source_, shape, rows(), &w);
    if (HasFatalFailure()) return;
    const int32_t most = coded_warps(shape.head_dim);
    compare(
        w, attend_on_host(w, kernel_of(shape), 128 + source_.below(130), most >> source_.below(3)));
  }
  CodeSource source_;
};

TEST_F(EmulatedWeightedAttention, OfEveryHeadDim) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    Shape shape;
    shape.head_dim = head_dim;
    check(shape);
    if (HasFatalFailure()) return;
  }
}

TEST_F(EmulatedWeightedAttention, OfEveryPairing) {
  for (const RopePairing pairing : {RopePairing::kNone, RopePairing::kNeighbours}) {
    for (const int32_t rotary : {0, 32}) {
      Shape shape;
      shape.head_dim = 64;
      shape.pairing = pairing;
      shape.rotary_dims = rotary;
      shape.sinks = source_.below(9);
      check(shape);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(EmulatedWeightedAttention, OfHalvesOfPartOfTheHead) {
  for (const int32_t head_dim : {96, 256}) {
    Shape shape;
    shape.head_dim = head_dim;
    shape.rotary_dims = source_.below(2) == 0 ? 32 * (1 + source_.below(head_dim / 32 - 1))
                                              : 16 * (1 + source_.below(head_dim / 32));
    shape.sinks = source_.below(9);
    check(shape);
    if (HasFatalFailure()) return;
  }
}

// Blocks of about the same size: a slot holds one, or some neighbours, or any two.
TEST_F(EmulatedWeightedAttention, TwoBlocksInASlotWhereBothFit) {
  Shape shape;
  shape.head_dim = 64;
  shape.odd_blocks = false;
  World w;
  make_world(&source_, shape, {1200, 3000}, &w);
  if (HasFatalFailure()) return;
  std::vector<uint32_t> sums;
  for (size_t b = 0; b < w.refs[0].size(); ++b) {
    sums.push_back(16 * (w.refs[0][b].units + w.refs[1][b].units));
  }
  std::nth_element(sums.begin(), sums.begin() + static_cast<int64_t>(sums.size() / 2), sums.end());
  const auto usual = static_cast<int32_t>(sums[sums.size() / 2]);
  for (const int32_t room : {128, 128 * usual / w.max_block_bytes, 260}) {
    SCOPED_TRACE("room " + std::to_string(room));
    compare(w, attend_on_host(w, kernel_of(shape), room, 2));
    if (HasFatalFailure()) return;
  }
}

TEST_F(EmulatedWeightedAttention, OfLargeMeans) {
  Shape shape;
  shape.head_dim = 64;
  shape.large_means = true;
  check(shape);
}

// Pairs of q may be larger than fp16 once they are turned back.
TEST_F(EmulatedWeightedAttention, OfLargeQueries) {
  for (const int32_t head_dim : {64, 128}) {
    Shape shape;
    shape.head_dim = head_dim;
    shape.query_size = 15000;
    check(shape);
    if (HasFatalFailure()) return;
  }
}

// A row with a byte that is wrong is corrupt or right, never something else, and harms no other.
class WrongBytes : public EmulatedWeightedAttention {
 protected:
  // Whether a byte of a block's header can have one value only.
  static bool is_settled(const uint8_t* block, int32_t at) {
    const bool is_raw = is_raw_mode(load_header(block).mode);
    return at < 3 || at == 4 || at == 5 || (!is_raw && (at == 6 || at == 7)) || at == 8 ||
           at == 9 || at == 12 || at == 13;
  }
  void check_damage(int32_t head_dim, bool in_header, int32_t c) {
    Shape shape;
    shape.head_dim = head_dim;
    World w;
    make_world(&source_, shape, {150, 200, 100}, &w);
    if (HasFatalFailure()) return;
    const Attended right = attend_on_host(w, kernel_of(shape), 200, 4);
    const auto block = static_cast<size_t>(w.rows[1].first_block + source_.below(4));
    const CodedBlockRef ref = w.refs[c][block];
    uint8_t* bytes = w.bytes[c].data() + size_t{ref.offset} * 16;
    const int32_t at = source_.below(in_header ? 14 : static_cast<int32_t>(ref.units * 16));
    const bool settled = is_settled(bytes, at);
    bytes[at] ^= static_cast<uint8_t>(1u << source_.below(8));
    const Attended got = attend_on_host(w, kernel_of(shape), 200, 4);
    const auto row = static_cast<int64_t>(right.out.size() / 3);
    for (int64_t r = 0; r < 3; r += 2) {
      EXPECT_EQ(got.status[static_cast<size_t>(r)], StatusCode::kOk);
      EXPECT_TRUE(std::equal(got.out.begin() + r * row, got.out.begin() + (r + 1) * row,
                             right.out.begin() + r * row));
    }
    if (settled || got.status[1] != StatusCode::kOk) {
      EXPECT_EQ(got.status[1], StatusCode::kCorrupt) << "byte " << at;
      EXPECT_EQ(got.lse[static_cast<size_t>(shape.columns)], -INFINITY);
    }
  }
};

TEST_F(WrongBytes, HarmTheirRowAlone) {
  for (int32_t i = 0; i < 6; ++i) check_damage(64, i < 3, i % 2);
}
TEST_F(WrongBytes, OfTwoSlicesHarmTheirRowAlone) {
  for (int32_t i = 0; i < 6; ++i) check_damage(256, i < 4, i % 2);
}
// The first slice ends far behind shared memory.
TEST_F(WrongBytes, SlicesLargerThanTheirBlock) {
  Shape shape;
  shape.head_dim = 256;
  World w;
  make_world(&source_, shape, {100, 100}, &w);
  if (HasFatalFailure()) return;
  for (int32_t c = 0; c < 2; ++c) {
    const CodedBlockRef ref = w.refs[c][static_cast<size_t>(w.rows[1].first_block + c)];
    w.bytes[c][size_t{ref.offset} * 16 + 13] = 0xff;
  }
  const Attended got = attend_on_host(w, kernel_of(shape), 200, 4);
  EXPECT_EQ(got.status[0], StatusCode::kOk);
  EXPECT_EQ(got.status[1], StatusCode::kCorrupt);
}

// The head of such a query gets an output of 0, however its parts are joined.
TEST_F(EmulatedWeightedAttention, QueriesThatAreNotNumbersHarmThemselvesAlone) {
  Shape shape;
  shape.head_dim = 64;
  World w;
  make_world(&source_, shape, {20, 400, 20}, &w);
  if (HasFatalFailure()) return;
  const size_t row = w.q.size() / 3;
  for (const int32_t room : {128, 129, 130, 131}) {
    SCOPED_TRACE("room " + std::to_string(room));
    World wrong = w;
    const Attended right = attend_on_host(w, kernel_of(shape), room, 4);
    wrong.q[row] = 0x7e00;
    const Attended got = attend_on_host(wrong, kernel_of(shape), room, 4);
    for (size_t i = 0; i < w.q.size(); ++i) {
      const bool is_wrong = i / 64 == row / 64;
      ASSERT_EQ(got.out[i], is_wrong ? 0 : right.out[i]) << i;
    }
    EXPECT_EQ(got.lse[row / 64], -INFINITY);
    EXPECT_EQ(got.status, std::vector<StatusCode>(3, StatusCode::kOk));
  }
}

// A row that names what is not there is corrupt.
TEST_F(EmulatedWeightedAttention, WrongRowsHarmThemselvesAlone) {
  Shape shape;
  shape.head_dim = 64;
  shape.q_len = 2;
  World right;
  make_world(&source_, shape, {20, 100, 20}, &right);
  if (HasFatalFailure()) return;
  const std::vector<void (*)(World*)> wrongs = {
      [](World*) {},
      [](World* w) { w->rows[1].sink_tokens = 3; },
      [](World* w) { w->rows[1].sink_tokens = -1; },
      [](World* w) { w->rows[1].coded_tokens = 60; },
      [](World* w) { w->rows[1].step = kSteps; },
      [](World* w) { w->rows[1].first_block = 3; },
      [](World* w) { w->rope.blocks = 1; },
  };
  for (size_t i = 0; i < wrongs.size(); ++i) {
    World w = right;
    wrongs[i](&w);
    const Attended got = attend_on_host(w, kernel_of(shape), 128, 2);
    EXPECT_EQ(got.status[0], StatusCode::kOk) << i;
    EXPECT_EQ(got.status[1], i == 0 ? StatusCode::kOk : StatusCode::kCorrupt) << i;
    EXPECT_EQ(got.status[2], StatusCode::kOk) << i;
  }
}

TEST_F(EmulatedWeightedAttention, RefusesWhatItDoesNotSupport) {
  Shape shape;
  World w;
  make_world(&source_, shape, {100}, &w);
  CodedAttention call = call_of(w);
  ASSERT_TRUE(call.validate());
  call.weighted.block_turns = nullptr;
  EXPECT_EQ(call.validate().code(), StatusCode::kInvalidArgument);
  call = call_of(w);
  call.weighted.key_means += 1;
  EXPECT_EQ(call.validate().code(), StatusCode::kInvalidArgument);
  call = call_of(w);
  call.weighted.sink_tokens = 17;
  EXPECT_EQ(call.validate().code(), StatusCode::kInvalidArgument);
  auto partial = make_rope_table(Rope::plain(10000, 80), 128, 64);
  ASSERT_TRUE(partial.is_ok());
  EXPECT_EQ(weighted_turns(*partial, 128, 4).status().code(), StatusCode::kUnsupported);
  call = call_of(w);
  call.weighted.pairs = partial->pairs;
  EXPECT_EQ(call.validate().code(), StatusCode::kUnsupported);
  call.weighted.pairs = 65;
  EXPECT_EQ(call.validate().code(), StatusCode::kInvalidArgument);
  WeightedRow row = w.steps.front();
  ASSERT_TRUE(check_weighted_keys(row));
  row.key_weight.front() *= 2;
  EXPECT_EQ(check_weighted_keys(row).code(), StatusCode::kUnsupported);
  row = w.steps.front();
  row.key_step = 0x1p-20f;
  row.key_mean.front() = float_to_half(65504.0f);
  EXPECT_EQ(check_weighted_keys(row).code(), StatusCode::kUnsupported);
  for (const int32_t head_dim : {16, 48, 80, 112, 192}) {
    WeightedRow other;
    other.head_dim = head_dim;
    other.key_step = other.value_step = 1;
    EXPECT_EQ(check_weighted_keys(other).code(), StatusCode::kUnsupported) << head_dim;
  }
}

}  // namespace
}  // namespace test::weighted
}  // namespace tierkv

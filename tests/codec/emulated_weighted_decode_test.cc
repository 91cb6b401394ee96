// SPDX-License-Identifier: Apache-2.0
// The warps that decode ranges of coded blocks, on the host, against dequantize_weighted(): the
// same numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "codec/gpu/coded/weighted_decode.cuh"
#include "codec/host/coded/coded_block.h"
#include "tests/support/fresh_random.h"
#include "tests/support/weighted_world.h"

namespace tierkv {
namespace {

constexpr uint16_t kPoison = 0x7e5a;

// A call over a world's blocks of one component, with poisoned outputs.
struct DecodeRun {
  const WeightedWorld& world;
  int32_t c;
  HostBook book;
  std::vector<float> key_scales, value_steps;
  std::vector<uint16_t> key_means, out;
  std::vector<WeightedRange> ranges;
  struct Apart {
    std::vector<uint16_t> out;
    int32_t stride, shift;
  };
  std::map<int32_t, Apart> apart;
  std::vector<WeightedPlace> places;
  std::vector<StatusCode> status;
  std::vector<uint4> bytes;
  WeightedDecode call;

  DecodeRun(const WeightedWorld& w, Component component)
      : world(w),
        c(static_cast<int32_t>(component)),
        book(w.book(c)),
        key_scales(w.key_scales()),
        value_steps(w.value_steps()),
        key_means(w.key_means()),
        out(w.at(w.shape.rows, 0), kPoison),
        ranges(w.ranges()) {
    for (const HostBlock& b : w.blocks) {
      const size_t units = b.bytes[c].size() / 16;
      bytes.resize(bytes.size() + 3);  // between blocks
      places.push_back({static_cast<uint32_t>(bytes.size()), static_cast<uint32_t>(units)});
      bytes.resize(bytes.size() + units);
      std::memcpy(bytes.data() + bytes.size() - units, b.bytes[c].data(), b.bytes[c].size());
    }
    status.assign(static_cast<size_t>(w.shape.rows) * w.row_blocks(), StatusCode::kIo);
    call.bytes = reinterpret_cast<const uint8_t*>(bytes.data());
    call.places = places.data();
    call.ranges = ranges.data();
    call.out = out.data();
    call.status = status.data();
    call.rows.key_scales = key_scales.data();
    call.rows.key_means = key_means.empty() ? nullptr : key_means.data();
    call.rows.value_steps = value_steps.data();
    call.rows.rope = {w.rope.place.data(), w.rope.block.data(), w.rope.pairing, w.rope.pairs,
                      w.rope.blocks};
    call.rows.num_rows = w.shape.rows, call.rows.head_dim = w.shape.head_dim;
    call.book.codebook = &book.codebook;
    call.component = component;
    call.dtype = w.shape.dtype;
    call.size = static_cast<int64_t>(bytes.size()) * 16;
    call.token_stride = w.stride();
    call.num_ranges = w.shape.rows, call.most_blocks = w.row_blocks();
  }

  uint8_t* block_bytes(size_t i) {
    return reinterpret_cast<uint8_t*>(bytes.data()) + int64_t{16} * places[i].unit;
  }
  void run() {
    const int32_t warps = 2, size = weighted_region_bytes(call) + weighted_decode_cta_bytes(call) +
                                    16 + warps * weighted_decode_warp_bytes(call);
    for (int32_t cta = 0; cta < 2; ++cta) {
      std::vector<uint4> shared(size / 16, uint4{0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5});
      emulated_shared() = {reinterpret_cast<uint8_t*>(shared.data()), static_cast<uint32_t>(size)};
      emulator::cta().run(
          cta, 32 * warps,
          [&] { decode_weighted_items(call, reinterpret_cast<uint8_t*>(shared.data())); }, 2);
    }
  }
  // Asks for [first, last) of a row.
  void ask(int32_t row, int32_t first, int32_t last) {
    ranges[row].first = first, ranges[row].last = last;
    ranges[row].at = static_cast<int64_t>(world.at(row, first));
  }
  // The same into memory of the row's own, `shift` elements behind an address of 16 bytes.
  void ask_apart(int32_t row, int32_t first, int32_t last, int32_t stride, int32_t shift) {
    ask(row, first, last);
    Apart& a = apart[row];
    a.stride = stride, a.shift = shift;
    a.out.assign(static_cast<size_t>(last - first) * stride + shift + 8, kPoison);
    ranges[row].out = a.out.data() + shift;
    ranges[row].token_stride = stride;
  }
  // Checks all memory of a row that was asked for apart.
  void expect_apart(int32_t row) const {
    const Apart& a = apart.at(row);
    const WeightedRange& r = ranges[row];
    for (size_t i = 0; i < a.out.size(); ++i) {
      const int32_t at = static_cast<int32_t>(i) - a.shift;
      const int32_t position = at < 0 ? r.last : r.first + at / a.stride, d = at % a.stride;
      uint16_t expected = kPoison;
      if (position < r.last && d < world.shape.head_dim) expected = value(row, position, d);
      ASSERT_EQ(a.out[i], expected) << "row " << row << " position " << position << " dim " << d;
    }
  }
  uint16_t value(int32_t row, int32_t position, int32_t d) const {
    const HostBlock& b = world.blocks[row * world.row_blocks() + position / kBlockTokens];
    const size_t at = static_cast<size_t>(position - b.first) * world.shape.head_dim + d;
    return raw_element(world.shape.dtype, b.values[c][at]);
  }
  // What a token must be; `zero` where its block is not valid.
  void expect_token(int32_t row, int32_t position, bool asked, bool zero) const {
    const size_t at = world.at(row, position);
    for (int32_t d = 0; d < world.stride(); ++d) {
      uint16_t expected = kPoison;
      if (asked && d < world.shape.head_dim) {
        expected = zero ? raw_element(world.shape.dtype, 0.0f) : value(row, position, d);
      }
      ASSERT_EQ(out[at + d], expected) << "row " << row << " position " << position << " dim " << d;
    }
  }
  void expect_all(int32_t bad_block = -1) const {
    for (int32_t r = 0; r < world.shape.rows; ++r) {
      const bool away = apart.count(r) != 0;
      if (away) expect_apart(r);
      for (int32_t t = 0; t < world.shape.tokens; ++t) {
        expect_token(r, t, !away && t >= ranges[r].first && t < ranges[r].last,
                     r * world.row_blocks() + t / kBlockTokens == bad_block);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
};

class EmulatedWeightedDecode : public RandomTest {
 protected:
  int32_t below(int32_t n) { return static_cast<int32_t>(rng_() % static_cast<uint32_t>(n)); }

  void expect_hosts_numbers(const WeightedShape& shape) {
    SCOPED_TRACE("head_dim " + std::to_string(shape.head_dim) + " rotary " +
                 std::to_string(shape.rotary_dims));
    WeightedWorld world(rng_, shape);
    world.encode();
    if (HasFatalFailure()) return;
    for (const Component component : {Component::kKey, Component::kValue}) {
      DecodeRun run(world, component);
      for (int32_t r = 0; r < shape.rows; ++r) {
        if (below(3) == 0) continue;
        const int32_t first = shape.sinks + below(shape.tokens - shape.sinks);
        const int32_t last = first + below(shape.tokens - first + 1);
        if (below(2) == 0) {
          run.ask(r, first, last);
        } else {
          // Rows begin and end on multiples of 16 bytes, of 4, or of 2.
          const int32_t unit = std::vector{8, 8, 2, 1}[below(4)];
          run.ask_apart(r, first, last, shape.head_dim + unit * below(3), unit * below(2));
        }
      }
      run.run();
      for (const StatusCode code : run.status) ASSERT_EQ(code, StatusCode::kOk);
      run.expect_all();
      if (HasFatalFailure()) return;
    }
  }
};

TEST_F(EmulatedWeightedDecode, EveryHeadDimAndRotation) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    WeightedShape shape;
    shape.head_dim = shape.rotary_dims = head_dim;
    shape.tokens = 129 + below(63);
    shape.rows = 4;
    expect_hosts_numbers(shape);
    shape.pairing = RopePairing::kNeighbours;
    shape.dtype = DType::kBFloat16;
    shape.streams = 2;
    shape.sinks = below(8);
    expect_hosts_numbers(shape);
    shape.pairing = below(2) == 0 ? RopePairing::kHalves : RopePairing::kNeighbours;
    shape.rotary_dims = 2 + 2 * below(head_dim / 2 - 1);
    shape.weights = false;
    expect_hosts_numbers(shape);
    shape.pairing = RopePairing::kNone;
    shape.rotary_dims = 0;
    shape.means = shape.significance = false;
    expect_hosts_numbers(shape);
    if (HasFatalFailure()) return;
  }
}

// Codes beyond a byte, exceptions and raw blocks of all widths.
TEST_F(EmulatedWeightedDecode, RawBlocks) {
  for (const double step : {0.2, 0.05, 0.002}) {
    WeightedShape shape;
    shape.tokens = 100, shape.outliers = false;
    shape.key_step = step, shape.value_step = 2 * step;
    WeightedWorld world(rng_, shape);
    world.encode();
    world.use_strange_books(rng_);
    world.encode_blocks();
    for (const Component component : {Component::kKey, Component::kValue}) {
      DecodeRun run(world, component);
      run.run();
      for (const StatusCode code : run.status) ASSERT_EQ(code, StatusCode::kOk);
      run.expect_all();
      if (HasFatalFailure()) return;
    }
  }
}

// Bytes that are changed, with a checksum that agrees or not: judged as the host judges them, and
// the block's tokens are zeros then.
TEST_F(EmulatedWeightedDecode, HostileBytes) {
  for (int32_t round = 0; round < 100; ++round) {
    WeightedShape shape;
    shape.head_dim = shape.rotary_dims = below(4) == 0 ? 256 : 64;
    shape.rows = 1, shape.tokens = 66 + below(60);
    shape.streams = 1 + below(2);
    const bool fine = below(3) == 0;  // raw blocks
    if (fine) shape.key_step = 0.02, shape.value_step = 0.05, shape.outliers = false;
    WeightedWorld world(rng_, shape);
    world.encode();
    if (fine) {
      world.use_strange_books(rng_);
      world.encode_blocks();
    }
    const auto component = static_cast<Component>(below(2));
    DecodeRun run(world, component);
    const size_t bad = below(2);
    uint8_t* bytes = run.block_bytes(bad);
    const int32_t size = 16 * static_cast<int32_t>(run.places[bad].units);
    const int32_t changes = 1 + below(3);
    for (int32_t i = 0; i < changes; ++i) {
      const int32_t at = below(2) == 0 ? below(std::min(size, 64)) : below(size);
      bytes[at] ^= static_cast<uint8_t>(1u << below(8));
    }
    if (below(4) == 0) run.places[bad].units -= 1;
    const int32_t units = static_cast<int32_t>(load_u16(bytes + 12));
    if (below(3) != 0 && 16 * units <= size && units > 0) {
      store_u16(bytes + 14, block_checksum(bytes, 16 * units));
    }
    const HostBlock& b = world.blocks[bad];
    std::vector<int16_t> codes(static_cast<size_t>(b.last - b.first) * shape.head_dim);
    std::vector<int8_t> exponents(b.last - b.first);
    const Status host =
        decode_block(bytes, int64_t{16} * run.places[bad].units, world.books[run.c].family.books,
                     {codes.data(), exponents.data(), b.last - b.first, shape.head_dim});
    run.run();
    EXPECT_EQ(run.status[bad], host.code()) << host.message();
    EXPECT_EQ(run.status[1 - bad], StatusCode::kOk);
    if (host) continue;
    run.expect_all(static_cast<int32_t>(bad));
    if (HasFailure()) return;
  }
}

// A bit of each of the bytes around headers and fields, and at the end, with a checksum that
// agrees: judged as the host judges it.
TEST_F(EmulatedWeightedDecode, EveryFieldAndGap) {
  for (const bool raw : {false, true}) {
    WeightedShape shape;
    shape.head_dim = shape.rotary_dims = 64;
    shape.rows = 1, shape.tokens = 60 + below(4);
    if (raw) shape.key_step = 0.02, shape.value_step = 0.05, shape.outliers = false;
    WeightedWorld world(rng_, shape);
    world.encode();
    if (raw) world.use_strange_books(rng_);
    world.encode_blocks();
    const HostBlock& b = world.blocks[0];
    for (const Component component : {Component::kKey, Component::kValue}) {
      DecodeRun run(world, component);
      uint8_t* bytes = run.block_bytes(0);
      const int32_t size = 16 * static_cast<int32_t>(run.places[0].units);
      std::vector<int16_t> codes(static_cast<size_t>(b.last - b.first) * shape.head_dim);
      std::vector<int8_t> exponents(b.last - b.first);
      for (int32_t at = 0; at < size; at += at == 111 ? std::max(1, size - 127) : 1) {
        if (at == 14 || at == 15) continue;
        bytes[at] ^= static_cast<uint8_t>(1u << below(8));
        store_u16(bytes + 14, block_checksum(bytes, size));
        const Status host =
            decode_block(bytes, size, world.books[run.c].family.books,
                         {codes.data(), exponents.data(), b.last - b.first, shape.head_dim});
        run.run();
        ASSERT_EQ(run.status[0], host.code()) << "byte " << at << ": " << host.message();
        std::memcpy(bytes, b.bytes[run.c].data(), b.bytes[run.c].size());
      }
    }
  }
}

TEST_F(EmulatedWeightedDecode, WhatARangeMayBe) {
  WeightedShape shape;
  shape.rows = 3;
  WeightedWorld world(rng_, shape);
  world.encode();
  DecodeRun run(world, Component::kKey);
  run.ask(0, 2, 70);                                      // a sink
  run.ask(1, 100, 100);                                   // none
  run.places[2 * world.row_blocks() + 1].unit = 1 << 30;  // no bytes
  run.run();
  for (int32_t b = 0; b < world.row_blocks(); ++b) {
    EXPECT_EQ(run.status[b], StatusCode::kInvalidArgument);
    EXPECT_EQ(run.status[world.row_blocks() + b], StatusCode::kOk);
    EXPECT_EQ(run.status[2 * world.row_blocks() + b],
              b == 1 ? StatusCode::kCorrupt : StatusCode::kOk);
  }
  run.ask(0, 70, 70);
  run.expect_all(2 * world.row_blocks() + 1);

  DecodeRun few_turns(world, Component::kKey);
  few_turns.call.rows.rope.blocks = 1;
  few_turns.call.max_block_bytes = static_cast<int32_t>(world.blocks[0].bytes[0].size()) - 16;
  few_turns.run();
  EXPECT_EQ(few_turns.status[0], StatusCode::kOutOfRange);
  EXPECT_EQ(few_turns.status[1], StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace tierkv

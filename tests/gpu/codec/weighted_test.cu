// SPDX-License-Identifier: Apache-2.0
// Coded blocks on the GPU: the host's bytes from the host's coordinates, and the host's numbers
// from its bytes. Shapes that the emulated tests are too slow for.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/baselines/weighted/weighted_calls.h"
#include "codec/host/coded/coded_block.h"
#include "tests/gpu/device_array.cuh"
#include "tests/support/fresh_random.h"
#include "tests/support/weighted_world.h"

namespace tierkv {
namespace {

using test::DeviceArray;

// A codebook in device memory.
struct DeviceBookOf {
  DeviceArray<uint32_t> words, table;
  DeviceArray<uint16_t> cheapest;
  std::unique_ptr<DeviceArray<DeviceCodebook>> codebook;
  DeviceBook book;

  explicit DeviceBookOf(const Codebook& of)
      : words(encoder_words(of)), table(device_table(of)), cheapest(of.cheapest) {
    DeviceCodebook d = device_codebook(of);
    d.words = words.get(), d.table = table.get(), d.cheapest = cheapest.get();
    codebook = std::make_unique<DeviceArray<DeviceCodebook>>(std::vector<DeviceCodebook>{d});
    book.codebook = codebook->get();
  }
};

// What both directions take of a world.
struct DeviceRows {
  DeviceArray<float> scales, steps;
  DeviceArray<uint16_t> means;
  DeviceArray<Turn> place, block;
  DeviceArray<WeightedRange> ranges;
  DeviceWeightedRows rows;

  explicit DeviceRows(const WeightedWorld& w)
      : scales(w.key_scales()),
        steps(w.value_steps()),
        means(w.key_means()),
        place(w.rope.place),
        block(w.rope.block),
        ranges(w.ranges()) {
    rows.key_scales = scales.get(), rows.value_steps = steps.get();
    rows.key_means = w.shape.means ? means.get() : nullptr;
    rows.rope = {place.get(), block.get(), w.rope.pairing, w.rope.pairs, w.rope.blocks};
    rows.num_rows = w.shape.rows, rows.head_dim = w.shape.head_dim;
  }
};

class GpuWeighted : public RandomTest {
 protected:
  int32_t below(int32_t n) { return static_cast<int32_t>(rng_() % static_cast<uint32_t>(n)); }

  // 1200 positions of six rows.
  WeightedShape shape(int32_t head_dim, int32_t variant) {
    WeightedShape s;
    s.head_dim = s.rotary_dims = head_dim;
    s.rows = 6, s.tokens = 1100 + below(200), s.sinks = variant % 2 == 0 ? 4 : below(60);
    s.streams = 1 + variant % 2;
    s.dtype = variant % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
    s.key_step = variant == 3 ? 0.05 : 0.5;  // wide codes and raw blocks
    s.outliers = variant != 3;
    if (variant == 1) s.pairing = RopePairing::kNeighbours;
    if (variant == 2) s.rotary_dims = 2 + 2 * below(head_dim / 2 - 1);
    if (variant == 3) s.pairing = RopePairing::kNone, s.rotary_dims = 0, s.significance = false;
    return s;
  }
};

WeightedEncode encode_call(const WeightedWorld& w, const DeviceRows& rows) {
  WeightedEncode call;
  call.ranges = rows.ranges.get();
  call.rows = rows.rows;
  call.token_stride = w.stride();
  call.dtype = w.shape.dtype;
  call.num_ranges = w.shape.rows, call.most_blocks = w.row_blocks();
  return call;
}

void expect_hosts_bytes(const WeightedWorld& w) {
  const DeviceRows rows(w);
  const DeviceBookOf keys(w.book(0)), values(w.book(1));
  const DeviceArray<uint16_t> k(w.x[0]), v(w.x[1]);
  const DeviceArray<std::array<uint8_t, 4>> decided(w.decided());
  const size_t blocks = w.blocks.size();
  const uint32_t slot = 2 * kMaxCodedBlockBytes / 16;
  std::vector<WeightedPlace> slots[2];
  for (uint32_t i = 0; i < blocks; ++i) {
    for (uint32_t c = 0; c < 2; ++c) slots[c].push_back({(2 * i + c) * slot, slot});
  }
  const DeviceArray<WeightedPlace> places[2] = {DeviceArray<WeightedPlace>(slots[0]),
                                                DeviceArray<WeightedPlace>(slots[1])};
  const DeviceArray<uint4> bytes(2 * blocks * slot, 0xa5);
  const DeviceArray<StatusCode> status(2 * blocks, 0xa5);
  WeightedEncode call = encode_call(w, rows);
  call.keys = k.get(), call.values = v.get();
  call.decided = reinterpret_cast<const uint8_t(*)[4]>(decided.get());
  call.books[0] = keys.book, call.books[1] = values.book;
  for (int32_t c = 0; c < 2; ++c) call.places[c] = places[c].get();
  call.bytes = reinterpret_cast<uint8_t*>(bytes.get());
  call.size = static_cast<int64_t>(bytes.size()) * 16;
  call.status = status.get();
  const Status s = encode_weighted(call, nullptr);
  ASSERT_TRUE(s) << s.message();
  const std::vector<uint4> got = bytes.read();
  const auto* first = reinterpret_cast<const uint8_t*>(got.data());
  for (const StatusCode code : status.read()) ASSERT_EQ(code, StatusCode::kOk);
  for (int32_t c = 0; c < 2; ++c) {
    const std::vector<WeightedPlace> at = places[c].read();
    for (size_t i = 0; i < blocks; ++i) {
      const std::vector<uint8_t>& expected = w.blocks[i].bytes[c];
      ASSERT_EQ(at[i].units * size_t{16}, expected.size()) << "block " << i;
      ASSERT_TRUE(std::equal(expected.begin(), expected.end(), first + int64_t{16} * at[i].unit))
          << "block " << i << " component " << c;
    }
  }
}

TEST_F(GpuWeighted, EncodesTheHostsBytes) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (int32_t variant = 0; variant < 4; ++variant) {
      SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " variant " + std::to_string(variant));
      WeightedWorld w(rng_, shape(head_dim, variant));
      w.encode();
      if (HasFatalFailure()) return;
      expect_hosts_bytes(w);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(GpuWeighted, BadInputIsReportedByBlock) {
  WeightedWorld w(rng_, shape(128, 0));
  w.encode();
  w.x[0][w.at(1, 100) + 77] = 0x7e00;
  w.x[1][w.at(2, 200) + 5] = 0x7c00;
  const DeviceRows rows(w);
  const DeviceBookOf keys(w.book(0)), values(w.book(1));
  const DeviceArray<uint16_t> k(w.x[0]), v(w.x[1]);
  const DeviceArray<WeightedPlace> places(w.blocks.size(), 0), others(w.blocks.size(), 0);
  const DeviceArray<StatusCode> status(2 * w.blocks.size(), 0xa5);
  WeightedEncode call = encode_call(w, rows);
  call.keys = k.get(), call.values = v.get();
  const DeviceArray<std::array<uint8_t, 4>> decided(w.decided());
  call.decided = reinterpret_cast<const uint8_t(*)[4]>(decided.get());
  call.books[0] = keys.book, call.books[1] = values.book;
  call.places[0] = places.get(), call.places[1] = others.get();
  call.status = status.get();
  ASSERT_TRUE(encode_weighted(call, nullptr));
  const std::vector<StatusCode> got = status.read();
  const size_t bad_key = 2 * (static_cast<size_t>(w.row_blocks()) + 100 / 64);
  const size_t bad_value = 2 * (static_cast<size_t>(2 * w.row_blocks()) + 200 / 64) + 1;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool bad = i == bad_key || i == bad_value;
    EXPECT_EQ(got[i], bad ? StatusCode::kNonFinite : StatusCode::kOk) << i;
    const std::vector<WeightedPlace> sizes = (i % 2 == 0 ? places : others).read();
    EXPECT_EQ(sizes[i / 2].units == 0, bad) << i;
  }
}

void expect_hosts_numbers(std::mt19937& rng, const WeightedWorld& w, Component component,
                          int32_t bad_block) {
  const auto c = static_cast<int32_t>(component);
  DeviceRows rows(w);
  const DeviceBookOf book(w.book(c));
  std::vector<uint8_t> all;
  std::vector<WeightedPlace> at;
  for (size_t i = 0; i < w.blocks.size(); ++i) {
    const std::vector<uint8_t>& b = w.blocks[i].bytes[c];
    at.push_back({static_cast<uint32_t>(all.size() / 16), static_cast<uint32_t>(b.size() / 16)});
    all.insert(all.end(), b.begin(), b.end());
    if (static_cast<int32_t>(i) == bad_block) all[all.size() - b.size() + 40] ^= 4;
  }
  std::vector<WeightedRange> ranges = w.ranges();
  for (WeightedRange& r : ranges) {
    if (rng() % 3 == 0) continue;
    r.first += static_cast<int32_t>(rng() % static_cast<uint32_t>(r.last - r.first));
    r.last = r.first + static_cast<int32_t>(rng() % static_cast<uint32_t>(r.last - r.first + 1));
    r.at = static_cast<int64_t>(w.at(r.row, r.first));
  }
  // Every other row by an address of its own; now and then beside addresses of 16 bytes.
  const size_t shift = rng() % 3 == 0 ? 1 + rng() % 8 : 0;
  const DeviceArray<uint16_t> out(w.at(w.shape.rows, 0) + shift, 0x5a);
  for (WeightedRange& r : ranges) {
    if (r.row % 2 == 0) continue;
    r.out = out.get() + shift + r.at;
    r.token_stride = w.stride();
  }
  rows.ranges.write(ranges);
  const DeviceArray<uint8_t> bytes(all);
  const DeviceArray<WeightedPlace> places(at);
  const DeviceArray<StatusCode> status(w.blocks.size(), 0xa5);
  WeightedDecode call;
  call.bytes = bytes.get();
  call.places = places.get();
  call.ranges = rows.ranges.get();
  call.out = out.get() + shift;
  call.status = status.get();
  call.rows = rows.rows;
  call.book = book.book;
  call.component = component;
  call.dtype = w.shape.dtype;
  call.size = static_cast<int64_t>(all.size());
  call.token_stride = w.stride();
  call.num_ranges = w.shape.rows, call.most_blocks = w.row_blocks();
  const Status s = decode_weighted(call, nullptr);
  ASSERT_TRUE(s) << s.message();
  const std::vector<uint16_t> got = out.read();
  const std::vector<StatusCode> codes = status.read();
  for (const HostBlock& b : w.blocks) {
    const WeightedRange& r = ranges[b.row];
    const int32_t index = b.row * w.row_blocks() + b.block;
    for (int32_t t = b.first; t < b.last; ++t) {
      const bool asked = t >= r.first && t < r.last;
      for (int32_t d = 0; d < w.stride(); ++d) {
        uint16_t expected = 0x5a5a;
        const size_t from = static_cast<size_t>(t - b.first) * w.shape.head_dim + d;
        if (asked && d < w.shape.head_dim) {
          expected = raw_element(w.shape.dtype, index == bad_block ? 0.0f : b.values[c][from]);
        }
        ASSERT_EQ(got[shift + w.at(b.row, t) + d], expected) << b.row << " " << t << " " << d;
      }
    }
    const bool met = std::max(r.first, b.first) < std::min(r.last, b.last);
    if (!met) continue;
    // Blocks of a range are counted from its first one.
    const int32_t place = b.row * w.row_blocks() + b.block - r.first / kBlockTokens;
    EXPECT_EQ(codes[place], index == bad_block ? StatusCode::kCorrupt : StatusCode::kOk);
  }
}

TEST_F(GpuWeighted, DecodesTheHostsNumbers) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (int32_t variant = 0; variant < 4; ++variant) {
      SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " variant " + std::to_string(variant));
      WeightedWorld w(rng_, shape(head_dim, variant));
      w.encode();
      if (HasFatalFailure()) return;
      for (const Component component : {Component::kKey, Component::kValue}) {
        const int32_t bad = below(2) == 0 ? -1 : below(static_cast<int32_t>(w.blocks.size()));
        expect_hosts_numbers(rng_, w, component, bad);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace tierkv

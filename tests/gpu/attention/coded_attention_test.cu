// SPDX-License-Identifier: Apache-2.0
// Attention over coded blocks against a double reference on the host, which decodes with
// decode_block().
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/device_array.cuh"
#include "tests/support/coded_attention_world.h"

namespace tierkv::test::coded {
namespace {

// shared_bytes: of a CTA, as if the device had no more; 0: what it has.
Attended attend_on_gpu(const World& w, int32_t most_copies_log, int32_t shared_bytes = 0) {
  const DeviceArray<uint8_t> keys(w.bytes[0]), values(w.bytes[1]), window(w.window);
  const DeviceArray<CodedBlockRef> key_refs(w.refs[0]), value_refs(w.refs[1]);
  const DeviceArray<float> key_steps(w.steps[0]), value_steps(w.steps[1]);
  const DeviceArray<float> key_means(w.means[0]), value_means(w.means[1]);
  std::vector<std::unique_ptr<DeviceArray<uint32_t>>> tables;
  std::vector<DeviceCodebook> books[2];
  for (int32_t c = 0; c < 2; ++c) {
    for (const Codebook& book : w.books[c]) {
      tables.push_back(std::make_unique<DeviceArray<uint32_t>>(device_table(book)));
      books[c].push_back(device_codebook(book));
      books[c].back().table = tables.back()->get();
    }
  }
  const DeviceArray<CodedRow> rows(w.rows);
  const DeviceArray<int32_t> window_pages(w.window_pages);
  const DeviceArray<uint16_t> q(w.q), out(std::vector<uint16_t>(w.q.size(), 0x7e00));
  const size_t columns = static_cast<size_t>(w.shape.all_columns());
  const DeviceArray<float> lse(std::vector<float>(w.rows.size() * columns, NAN));
  const DeviceArray<float> sinks(w.sinks);
  const DeviceArray<StatusCode> status(std::vector<StatusCode>(w.rows.size(), StatusCode::kIo));
  CodedAttention call;
  const auto component = [&](int32_t c) {
    CodedComponent x;
    x.bytes = (c == 0 ? keys : values).get();
    x.blocks = (c == 0 ? key_refs : value_refs).get();
    x.steps = (c == 0 ? key_steps : value_steps).get();
    if (w.shape.means) x.means = (c == 0 ? key_means : value_means).get();
    x.size = static_cast<int64_t>(w.bytes[c].size());
    x.codebook = books[c].front();
    x.others = books[c].data() + 1;
    x.num_others = static_cast<int32_t>(books[c].size()) - 1;
    return x;
  };
  call.keys = component(0);
  call.values = component(1);
  call.rows = rows.get();
  call.window = window.get();
  call.window_size = static_cast<int64_t>(w.window.size());
  call.window_pages = window_pages.get();
  call.window_page_bytes = window_page_bytes(w.shape.head_dim);
  call.num_window_pages = static_cast<int64_t>(w.window_pages.size());
  call.q = q.get();
  call.out = out.get();
  call.lse = lse.get();
  if (!w.sinks.empty()) call.sinks = sinks.get();
  call.row_status = status.get();
  call.num_rows = static_cast<int32_t>(w.rows.size());
  call.num_items = w.items;
  call.num_blocks = static_cast<int32_t>(w.refs[0].size());
  call.num_steps = kSteps;
  call.num_means = kSteps;
  call.columns = w.shape.columns;
  call.q_len = w.shape.q_len;
  call.num_kv_heads = w.shape.kv_heads;
  call.dtype = w.shape.dtype;
  call.head_dim = w.shape.head_dim;
  call.sm_scale = static_cast<float>(1 / std::sqrt(w.shape.head_dim));
  call.max_block_bytes = w.max_block_bytes;
  call.most_shared_bytes = shared_bytes;
  auto grid = coded_attention_grid(call, most_copies_log);
  EXPECT_TRUE(grid.is_ok()) << grid.status().message();
  if (!grid.is_ok()) return {};
  const DeviceArray<uint8_t> workspace(
      std::vector<uint8_t>(coded_attention_workspace_bytes(call, *grid), 0xff));
  call.workspace = workspace.get();
  const Status s = attend_coded(call, *grid, nullptr);
  EXPECT_TRUE(s.is_ok()) << s.message();
  return {out.read(), lse.read(), status.read(), *grid};
}

class CodedAttentionTest : public ::testing::Test {
 protected:
  CodedAttentionTest() : seed_(std::random_device{}()), source_(seed_) {}
  ~CodedAttentionTest() override {
    if (HasFailure()) std::printf("seed %u\n", seed_);
  }
  RowData row(int32_t coded, int32_t window) {
    return {coded, window, source_.below(kSteps), source_.below(kSteps + 1) - 1};
  }
  std::vector<RowData> ragged_rows() {
    std::vector<RowData> rows = {row(0, 0), row(64, 0), row(0, 1), row(1, 0), row(0, 0)};
    for (int32_t i = 0; i < 12; ++i) rows.push_back(row(source_.below(700), source_.below(150)));
    rows.push_back(row(3000, 64));
    rows.push_back(row(64, 700));
    rows.push_back(row(0, 0));
    return rows;
  }
  uint32_t seed_;
  CodeSource source_;
};

TEST_F(CodedAttentionTest, EqualsTheReferenceOnRaggedRows) {
  for (int32_t head_dim : {64, 96, 128, 256}) {
    for (int32_t streams : {1, 2}) {
      for (int32_t columns : {1, 4, 7, 8, 1 + source_.below(20)}) {
        Shape shape;
        shape.head_dim = head_dim;
        shape.streams = streams;
        shape.columns = columns;
        shape.means = source_.below(2) != 0;
        shape.sinks = source_.below(2) != 0;
        if (columns == 7) shape.mode = BlockMode::kSingle;
        SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " streams " +
                     std::to_string(streams) + " columns " + std::to_string(columns));
        const World w = make_world(&source_, shape, ragged_rows());
        compare(w, attend_on_gpu(w, 5));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// As on devices with 99 KB of shared memory for a CTA, and on one with still less. Blocks of 8 bits
// in slots, so that not all warps have room.
TEST_F(CodedAttentionTest, SmallSharedMemoryTakesFewerWarps) {
  bool few = false;
  for (int32_t kilobytes : {99, 72}) {
    for (int32_t head_dim : {64, 96, 128, 256}) {
      for (bool raw : {false, true}) {
        Shape shape;
        shape.head_dim = head_dim;
        shape.columns = 1 + source_.below(9);
        shape.streams = 1 + source_.below(2);
        shape.all_raw = raw;
        SCOPED_TRACE(std::to_string(kilobytes) + " KB, head_dim " + std::to_string(head_dim) +
                     (raw ? " raw" : " coded") + " columns " + std::to_string(shape.columns));
        const World w = make_world(&source_, shape, ragged_rows());
        const Attended got = attend_on_gpu(w, 5, kilobytes << 10);
        if (HasFailure()) return;
        EXPECT_LE(got.grid.shared_bytes, kilobytes << 10);
        few |= got.grid.warps < coded_warps(head_dim);
        compare(w, got);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_TRUE(few);
}

// Queries of the newest tokens, each of which sees the tokens up to its own.
TEST_F(CodedAttentionTest, SeveralQueriesSeeTheTokensUpToTheirOwn) {
  for (int32_t head_dim : {64, 96, 128, 256}) {
    for (int32_t q_len : {1, 2, 3 + source_.below(5), 8}) {
      Shape shape;
      shape.head_dim = head_dim;
      shape.q_len = q_len;
      shape.kv_heads = 1 + source_.below(3);
      shape.columns = 1 + source_.below(16);
      shape.streams = 1 + source_.below(2);
      shape.means = source_.below(2) != 0;
      shape.sinks = source_.below(2) != 0;
      if (source_.below(4) == 0) shape.mode = BlockMode::kSingle;
      if (q_len == 1 || source_.below(2) != 0) shape.dtype = DType::kBFloat16;
      SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " q_len " + std::to_string(q_len) +
                   " columns " + std::to_string(shape.columns) + " kv heads " +
                   std::to_string(shape.kv_heads) + " dtype " + dtype_name(shape.dtype));
      std::vector<RowData> rows = ragged_rows();
      // Rows whose newest tokens begin an item, of which older queries see nothing.
      rows.insert(rows.end(), {row(64, 7), row(192, 64 + q_len - 1), row(0, 65), row(0, 3)});
      while (rows.size() % static_cast<size_t>(shape.kv_heads) != 0) rows.push_back(row(70, 9));
      const World w = make_world(&source_, shape, rows);
      compare(w, attend_on_gpu(w, 5));
      if (HasFatalFailure()) return;
    }
  }
}

// Blocks name their codebook, whose alphabets and longest words differ; a raw one names none.
TEST_F(CodedAttentionTest, AFamilyOfCodebooks) {
  for (int32_t head_dim : {64, 96, 128, 256}) {
    for (int32_t family : {2, 4}) {
      Shape shape;
      shape.head_dim = head_dim;
      shape.family = family;
      shape.streams = 1 + source_.below(2);
      shape.max_length = 8 + source_.below(4);
      shape.columns = 1 + source_.below(9);
      if (source_.below(3) == 0) shape.mode = BlockMode::kSingle;
      if (source_.below(2) != 0) shape.q_len = 3;
      SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " family " + std::to_string(family));
      const World w = make_world(&source_, shape, ragged_rows());
      compare(w, attend_on_gpu(w, 5));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CodedAttentionTest, RawBlocksAlone) {
  for (int32_t head_dim : {64, 96, 128, 256}) {
    for (int32_t columns : {4, 1 + source_.below(20)}) {
      Shape shape;
      shape.all_raw = true;
      shape.head_dim = head_dim;
      shape.columns = columns;
      shape.means = source_.below(2) != 0;
      if (source_.below(3) == 0) shape.q_len = 1 + source_.below(4);
      if (source_.below(3) == 0) shape.dtype = DType::kBFloat16;
      SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " columns " + std::to_string(columns) +
                   " q_len " + std::to_string(shape.q_len));
      const World w = make_world(&source_, shape, ragged_rows());
      compare(w, attend_on_gpu(w, 5));
      if (HasFatalFailure()) return;
    }
  }
}

// Every byte of a raw header but base and checksum, and references: the row fails, the others do
// not notice.
TEST_F(CodedAttentionTest, RawBlocksThatBreakARule) {
  for (int32_t head_dim : {64, 96, 128, 256}) {
    Shape shape;
    shape.all_raw = true;
    shape.head_dim = head_dim;
    const World w = make_world(&source_, shape, {row(640, 64), row(300, 10), row(200, 0)});
    for (int32_t byte : {0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 16, 17}) {
      World damaged = w;
      const int32_t c = source_.below(2), block = w.rows[1].first_block + source_.below(5);
      CodedBlockRef& ref = damaged.refs[c][static_cast<size_t>(block)];
      uint8_t* bytes = damaged.bytes[c].data() + ref.offset * size_t{16};
      if (head_dim > kSliceDims && source_.below(2) != 0) {
        bytes += load_header(bytes).units * kBlockAlignment;
      }
      if (byte == 16) {
        ref.offset = static_cast<uint32_t>(source_.rng()()) | 1u << 31;
      } else if (byte == 17) {
        ref.units += source_.below(2) != 0 ? 1u : 0xffffffffu;
      } else {
        bytes[byte] ^= static_cast<uint8_t>(1 + source_.below(255));
      }
      damaged.data[1].corrupt = true;
      SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " byte " + std::to_string(byte));
      compare(damaged, attend_on_gpu(damaged, 5));
      if (HasFatalFailure()) return;
    }
  }
}

// All queries of a row are times one power of two: large and small ones.
TEST_F(CodedAttentionTest, BFloat16QueriesOfAnySize) {
  for (const float size : {0x1p-60f, 0x1p-20f, 0x1p6f}) {
    Shape shape;
    shape.dtype = DType::kBFloat16;
    World w = make_world(&source_, shape, ragged_rows());
    for (uint16_t& x : w.q) x = float_to_bfloat16(bfloat16_to_float(x) * size);
    compare(w, attend_on_gpu(w, 5));
    if (HasFatalFailure()) return;
  }
}

TEST_F(CodedAttentionTest, EveryNumberOfCopiesGivesTheSameBits) {
  for (int32_t max_length : {8, 9, 10, 11, 12}) {
    Shape shape;
    shape.max_length = max_length;
    if (max_length == 8) shape.mode = BlockMode::kSingle;
    const World w = make_world(&source_, shape, ragged_rows());
    const Attended one = attend_on_gpu(w, 0);
    EXPECT_EQ(one.grid.copies_log, 0);
    compare(w, one);
    if (HasFatalFailure()) return;
    for (int32_t most : {3, 4, 5}) {
      const Attended more = attend_on_gpu(w, most);
      SCOPED_TRACE("length " + std::to_string(max_length) + " copies " +
                   std::to_string(more.grid.copies_log));
      EXPECT_EQ(more.out, one.out);
      EXPECT_EQ(more.lse, one.lse);
    }
  }
}

TEST_F(CodedAttentionTest, CodesOfSixteenBits) {
  Shape shape;
  shape.huge_codes = true;
  const World w = make_world(&source_, shape, ragged_rows());
  compare(w, attend_on_gpu(w, 5));
}

// A page number outside the window fails its row.
TEST_F(CodedAttentionTest, PagesOutsideTheWindow) {
  for (const int32_t page : {-1, 4, INT32_MAX, INT32_MIN}) {
    World w = make_world(&source_, Shape{}, {row(64, 64), row(0, 100), row(64, 10)});
    ASSERT_EQ(w.window_pages.size(), size_t{4});
    w.window_pages[2] = page;
    w.data[1].corrupt = true;
    compare(w, attend_on_gpu(w, 5));
    if (HasFatalFailure()) return;
  }
}

// Payload, starts, headers and references at random: the rows concerned fail or are as before, the
// others are bit for bit the same.
TEST_F(CodedAttentionTest, CorruptBlocksHarmTheirOwnRowOnly) {
  int32_t failed = 0;
  constexpr int32_t kRounds = 300;
  for (int32_t round = 0; round < kRounds; ++round) {
    Shape shape;
    shape.streams = 1 + round % 2;
    shape.head_dim = round % 3 == 0 ? 64 : round % 3 == 1 ? 128 : 256;
    if (round % 4 == 0) shape.max_length = 12;
    if (round % 5 == 0) shape.mode = BlockMode::kSingle;
    if (round % 7 == 0) shape.family = 3;
    World w = make_world(&source_, shape, {row(640, 64), row(320, 10), row(200, 0), row(128, 64)});
    const Attended before = attend_on_gpu(w, 5);
    const size_t victim = static_cast<size_t>(source_.below(4));
    const int32_t c = source_.below(2);
    const int32_t blocks = (w.data[victim].coded + 63) / 64;
    const int32_t block = w.rows[victim].first_block + source_.below(blocks);
    CodedBlockRef& ref = w.refs[c][static_cast<size_t>(block)];
    const int32_t kind = source_.below(8);
    if (kind == 0) {
      ref.offset = static_cast<uint32_t>(source_.rng()());
    } else if (kind == 1) {
      ref.units = source_.below(2) ? static_cast<uint32_t>(source_.rng()()) : ref.units + 1;
    } else {
      const int32_t size = static_cast<int32_t>(ref.units) * 16;
      for (int32_t i = 1 + source_.below(3); i > 0; --i) {
        const int32_t at = kind < 6 ? source_.below(std::min(size, 160)) : source_.below(size);
        w.bytes[c][ref.offset * size_t{16} + static_cast<size_t>(at)] ^=
            static_cast<uint8_t>(1 + source_.below(255));
      }
    }
    const Attended after = attend_on_gpu(w, 5);
    const size_t row_values = static_cast<size_t>(shape.columns * shape.head_dim);
    for (size_t r = 0; r < w.rows.size(); ++r) {
      const auto at = static_cast<int64_t>(r * row_values);
      const auto same = std::equal(after.out.begin() + at,
                                   after.out.begin() + at + static_cast<int64_t>(row_values),
                                   before.out.begin() + at);
      if (r != victim) {
        ASSERT_EQ(after.status[r], StatusCode::kOk) << "round " << round;
        ASSERT_TRUE(same) << "round " << round << " row " << r;
      } else if (after.status[r] != StatusCode::kOk) {
        ++failed;
        ASSERT_EQ(after.status[r], StatusCode::kCorrupt);
        for (size_t i = 0; i < row_values; ++i) {
          ASSERT_EQ(after.out[static_cast<size_t>(at) + i], 0) << "round " << round;
        }
      } else {
        for (size_t i = 0; i < row_values; ++i) {
          ASSERT_TRUE(is_finite(half_to_float(after.out[static_cast<size_t>(at) + i])));
        }
      }
    }
  }
  std::printf("%d of %d corrupt blocks noticed\n", failed, kRounds);
  EXPECT_GT(failed, kRounds / 2);
}

}  // namespace
}  // namespace tierkv::test::coded

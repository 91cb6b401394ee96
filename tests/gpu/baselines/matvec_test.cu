// SPDX-License-Identifier: Apache-2.0
// Coded products on the GPU against the host's reference.
#include "tests/support/matvec_world.h"

#include <random>
#include <string>

#include "tests/gpu/device_array.cuh"

namespace tierkv {
namespace {

using test::DeviceArray;

struct GpuRun {
  int32_t most_copies_log = 5;
  int32_t ctas = 0;         // 0: all of the device
  int32_t copies_log = -1;  // out
};

Multiplied multiply_on_gpu(const MatvecWorld& w, GpuRun* run) {
  const Multiplied poison = poisoned(w);
  const DeviceArray<uint8_t> bytes(w.bytes);
  const DeviceArray<CodedBlockRef> refs(w.refs);
  const DeviceArray<uint16_t> units(w.units), x(w.x);
  const DeviceArray<CodedMatvecRow> rows(w.rows);
  const DeviceArray<uint32_t> table(device_table(w.book));
  const DeviceArray<uint16_t> tree(w.book.tree);
  const DeviceArray<float> y(poison.y);
  const DeviceArray<StatusCode> status(poison.status);
  CodedMatvec call = w.call();
  call.bytes = bytes.get();
  call.blocks = refs.get();
  call.units = units.get();
  call.rows = rows.get();
  call.x = x.get();
  call.y = y.get();
  call.status = status.get();
  call.codebook.table = table.get();
  if (w.shape.walk_tree) call.tree.nodes = tree.get();
  auto grid = coded_matvec_grid(call, run->most_copies_log);
  EXPECT_TRUE(grid.is_ok()) << grid.status().message();
  if (!grid.is_ok()) return poison;
  if (run->ctas > 0) {
    grid->num_ctas = run->ctas;
    grid->items_per_warp = std::max(1, (w.items + 16 * run->ctas - 1) / (16 * run->ctas));
  }
  run->copies_log = grid->copies_log;
  const DeviceArray<uint8_t> workspace(
      std::vector<uint8_t>(coded_matvec_workspace_bytes(call, *grid), 0xff));
  call.workspace = workspace.get();
  const Status s = multiply_coded(call, *grid, nullptr);
  EXPECT_TRUE(s.is_ok()) << s.message();
  return {y.read(), status.read()};
}
Multiplied multiply_on_gpu(const MatvecWorld& w) {
  GpuRun run;
  return multiply_on_gpu(w, &run);
}

void compare_all(const MatvecWorld& w, const Multiplied& want, const Multiplied& got) {
  ASSERT_EQ(got.status, want.status);
  const MatvecComparison comparison(w, want, got);
  for (size_t r = 0; r < w.rows.size(); ++r) {
    comparison.row(r);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

class MatvecTest : public ::testing::Test {
 protected:
  MatvecTest() : seed_(std::random_device{}()), source_(seed_) {}
  ~MatvecTest() override {
    if (HasFailure()) std::printf("seed %u\n", seed_);
  }
  // Of either component, in every way to decode in turn.
  MatvecShape shape(Component component, int32_t way) {
    MatvecShape s;
    s.component = component;
    s.streams = 1 + way % 2;
    if (way % 6 < 2) {
      s.max_length = 9 + source_.below(4);
    } else {
      s.mode = BlockMode::kSingle;
      s.max_length = way % 6 < 4 ? 8 : 11;
      s.spread = way % 6 < 4 ? 1.5 : 12;
      s.walk_tree = way % 6 == 4;
    }
    return s;
  }
  std::vector<int32_t> ragged(int32_t most) {
    std::vector<int32_t> tokens = {0, 64, 1, 0, 128, 63, 65};
    for (int32_t i = 0; i < 5; ++i) tokens.push_back(source_.below(most));
    tokens.push_back(0);
    return tokens;
  }
  uint32_t seed_;
  CodeSource source_;
};

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

// Also run under the memory checker.
TEST_F(MatvecTest, EqualsTheReferenceOnSmallRows) {
  for (Component component : kComponents) {
    for (int32_t way = 0; way < 6; ++way) {
      const MatvecWorld w = make_matvec_world(&source_, shape(component, way), {70, 0, 1, 64, 200});
      compare_all(w, multiply_on_host(w), multiply_on_gpu(w));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(MatvecTest, EqualsTheReferenceOnRaggedRows) {
  for (Component component : kComponents) {
    for (int32_t head_dim : {64, 96, 128}) {
      for (int32_t way = 0; way < 6; ++way) {
        MatvecShape s = shape(component, way);
        s.head_dim = head_dim;
        const int32_t columns[] = {1, 4, 8, 3, 1 + source_.below(20), 7};
        s.columns = columns[(way + head_dim / 32) % 6];
        SCOPED_TRACE("component " + std::to_string(static_cast<int32_t>(component)) + " head_dim " +
                     std::to_string(head_dim) + " way " + std::to_string(way) + " columns " +
                     std::to_string(s.columns));
        const MatvecWorld w = make_matvec_world(&source_, s, ragged(500));
        compare_all(w, multiply_on_host(w), multiply_on_gpu(w));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Warps have runs of many blocks and of many rows.
TEST_F(MatvecTest, LongRunsOfAWarp) {
  for (Component component : kComponents) {
    for (int32_t way = 0; way < 6; ++way) {
      MatvecShape s = shape(component, way);
      s.head_dim = 64;
      s.columns = 2;
      std::vector<int32_t> tokens(40, 20);
      tokens.insert(tokens.begin() + 20, 40000);
      const MatvecWorld w = make_matvec_world(&source_, s, tokens);
      GpuRun run;
      run.ctas = 1;
      SCOPED_TRACE("component " + std::to_string(static_cast<int32_t>(component)) + " way " +
                   std::to_string(way));
      const Multiplied got = multiply_on_gpu(w, &run);
      compare_all(w, multiply_on_host(w), got);
      if (HasFatalFailure()) return;
      EXPECT_EQ(multiply_on_gpu(w, &run).y, got.y);
    }
  }
}

TEST_F(MatvecTest, EveryNumberOfCopiesGivesTheSameBits) {
  for (Component component : kComponents) {
    for (int32_t way : {1, 3, 5}) {
      MatvecShape s = shape(component, way);
      if (way == 1) s.max_length = 10;  // so that 16 copies fit
      const MatvecWorld w = make_matvec_world(&source_, s, ragged(2000));
      GpuRun one, more;
      one.most_copies_log = 0;
      const Multiplied first = multiply_on_gpu(w, &one), second = multiply_on_gpu(w, &more);
      EXPECT_EQ(one.copies_log, 0);
      if (way < 5) EXPECT_EQ(more.copies_log, 4);
      EXPECT_EQ(first.y, second.y);
      EXPECT_EQ(first.status, second.status);
    }
  }
}

TEST_F(MatvecTest, NothingToMultiply) {
  for (Component component : kComponents) {
    const MatvecWorld w = make_matvec_world(&source_, shape(component, 1), {0, 0, 0});
    const Multiplied got = multiply_on_gpu(w);
    for (float y : got.y) EXPECT_EQ(y, 0.0f);  // values; of keys there are none
    for (StatusCode s : got.status) EXPECT_EQ(s, StatusCode::kOk);
  }
}

// A row that leads outside the directory, or behind the columns of scores and weights.
TEST_F(MatvecTest, RefusesRowsThatAreNotThere) {
  for (Component component : kComponents) {
    for (int32_t kind = 0; kind < 3; ++kind) {
      MatvecWorld w = make_matvec_world(&source_, shape(component, 1), {130, 200, 70});
      const Multiplied want = multiply_on_host(w);
      CodedMatvecRow& row = w.rows[1];
      if (kind == 0) row.first_block = static_cast<int32_t>(w.refs.size()) - 1;
      if (kind == 1) row.first_block = -1;
      if (kind == 2) row.tokens = 1 << 20;
      const Multiplied got = multiply_on_gpu(w);
      for (size_t i = 0; i < got.status.size(); ++i) {
        const bool mine = w.is_key() ? static_cast<int32_t>(i) >= row.first_item &&
                                           static_cast<int32_t>(i) < row.first_item + 4
                                     : i == 1;
        EXPECT_EQ(got.status[i], mine ? StatusCode::kCorrupt : StatusCode::kOk) << i;
      }
      for (size_t r : {size_t{0}, size_t{2}}) MatvecComparison(w, want, got).row(r);
      if (HasFatalFailure()) return;
    }
  }
}

// Payload, starts, headers and references at random: a block (keys) or a row (values) is refused,
// and then the reference refuses it, too; or its product is finite, where what the kernels do not
// look at is wrong. Everything else is bit for bit as before.
class MatvecCorruptTest : public MatvecTest {
 protected:
  void corrupt_one(const MatvecShape& s, int32_t round, int32_t* failed);
};
void MatvecCorruptTest::corrupt_one(const MatvecShape& s, int32_t round, int32_t* failed) {
  MatvecWorld w = make_matvec_world(&source_, s, {640, 320, 200, 128});
  const Multiplied before = multiply_on_gpu(w);
  const auto victim = static_cast<size_t>(source_.below(4));
  const int32_t place = source_.below((w.rows[victim].tokens + 63) / 64);
  CodedBlockRef& ref = w.refs[static_cast<size_t>(w.rows[victim].first_block + place)];
  const int32_t kind = source_.below(8), size = static_cast<int32_t>(ref.units) * 16;
  if (kind == 0) {
    ref.offset = static_cast<uint32_t>(source_.rng()());
  } else if (kind == 1) {
    ref.units = source_.below(2) ? static_cast<uint32_t>(source_.rng()()) : ref.units + 1;
  } else {
    for (int32_t i = 1 + source_.below(3); i > 0; --i) {
      const int32_t at = kind < 6 ? source_.below(std::min(size, 160)) : source_.below(size);
      w.bytes[ref.offset * size_t{16} + static_cast<size_t>(at)] ^=
          static_cast<uint8_t>(1 + source_.below(255));
    }
  }
  const Multiplied want = multiply_on_host(w), after = multiply_on_gpu(w);
  const size_t hit = w.is_key() ? static_cast<size_t>(w.rows[victim].first_item + place) : victim;
  for (size_t i = 0; i < after.status.size(); ++i) {
    if (i != hit) ASSERT_EQ(after.status[i], StatusCode::kOk) << "round " << round;
  }
  if (after.status[hit] != StatusCode::kOk) {
    ++*failed;
    ASSERT_EQ(after.status[hit], StatusCode::kCorrupt);
    ASSERT_EQ(want.status[hit], StatusCode::kCorrupt) << "round " << round;
  }
  const auto stride = static_cast<size_t>(w.is_key() ? w.token_stride : s.head_dim);
  for (size_t i = 0; i < after.y.size(); ++i) {
    const size_t row = i / stride / static_cast<size_t>(s.columns), at = i % stride;
    const bool mine = row == victim &&
                      (!w.is_key() || static_cast<int32_t>(at) / kBlockTokens == place) &&
                      (!w.is_key() || static_cast<int32_t>(at) < w.rows[victim].tokens);
    if (!mine) {
      ASSERT_EQ(after.y[i], before.y[i]) << "round " << round;
    } else if (after.status[hit] != StatusCode::kOk) {
      ASSERT_EQ(after.y[i], 0.0f) << "round " << round;
    } else {
      ASSERT_TRUE(std::isfinite(after.y[i])) << "round " << round;
    }
  }
}

TEST_F(MatvecCorruptTest, BlocksHarmThemselvesOnly) {
  int32_t failed = 0;
  constexpr int32_t kRounds = 240;
  for (int32_t round = 0; round < kRounds && !HasFatalFailure(); ++round) {
    MatvecShape s = shape(kComponents[round % 2], round / 2);
    s.head_dim = round % 3 == 0 ? 64 : 128;
    corrupt_one(s, round, &failed);
  }
  std::printf("%d of %d corrupt blocks noticed\n", failed, kRounds);
  EXPECT_GT(failed, kRounds / 2);
}
TEST_F(MatvecCorruptTest, SmallNumberOfBlocks) {
  int32_t failed = 0;
  for (int32_t round = 0; round < 24 && !HasFatalFailure(); ++round) {
    corrupt_one(shape(kComponents[round % 2], round / 2), round, &failed);
  }
  EXPECT_GT(failed, 4);
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// The way of a batch through an engine's kernels on the host, with the decode kernel between them,
// against engine_attend_host(). tests/gpu/attention/engine_test.cu covers streams and graphs.
#include "attention/engine/engine_kernels.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "tests/attention/emulated_decode.h"
#include "tests/support/engine_world.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

using test::EngineShape;
using test::EngineWorld;

class EmulatedEngine : public RandomTest {
 protected:
  int32_t uniform(int32_t lo, int32_t hi) {
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }
  template <class Kernel>
  void run(int32_t ctas, int32_t rows, const Kernel& kernel) {
    std::vector<int32_t> order(ctas * rows);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng_);
    for (const int32_t i : order) {
      emulator::cta().run({i % ctas, i / ctas}, kEngineThreads, kernel, {ctas, rows});
    }
  }
  void pack(const EngineQueries& q) {
    with_head_dim(q.head_dim,
                  [&](auto dim) { run(ctas_of<dim>(q), 1, [&] { pack_queries_kernel<dim>(q); }); });
  }
  void unpack(const EngineQueries& q) {
    with_head_dim(q.head_dim, [&](auto dim) {
      run(ctas_of<dim>(q), 1, [&] { unpack_outputs_kernel<dim>(q); });
    });
  }
  template <int32_t kDim>
  static int32_t ctas_of(const EngineQueries& q) {
    constexpr int64_t kVectors = kEngineWarps * kWarpTokens<kDim>;
    return static_cast<int32_t>((q.vectors() + kVectors - 1) / kVectors);
  }
  EngineShape random_shape(int32_t head_dim, int32_t group) {
    static const char* const kFormats[] = {"k8v4", "k4v4", "k4v2", "k16v16"};
    EngineShape s;
    s.blocks.format = kFormats[uniform(0, 3)];
    s.blocks.head_dim = head_dim;
    s.blocks.num_kv_heads = uniform(1, 2);
    s.blocks.rotate = uniform(0, 2) > 0;
    s.blocks.has_reflections = uniform(0, 2) > 0;
    s.blocks.layers_apart = uniform(1, 2);
    s.blocks.dtype = uniform(0, 1) == 1 ? DType::kBFloat16 : DType::kFloat16;
    s.group = group;
    s.max_queries = uniform(0, 1) == 0 ? 1 : uniform(2, 8);
    const int32_t more = std::min(2, s.max_queries);
    s.blocks.tokens = {uniform(70, 140), 0, more, uniform(more, 64), uniform(1, 20)};
    s.queries = {1, 0, more, more, 1};
    if (uniform(0, 1) == 1) s.sequences = {4, -1, 0, 3, 9};
    s.lse_by_heads = uniform(0, 1) == 1;
    return s;
  }
};

TEST_F(EmulatedEngine, RowsAreTheBlockTables) {
  for (int32_t round = 0; round < 20; ++round) {
    EngineShape shape = random_shape(64, 1);
    EngineWorld e(shape, rng_);
    e.w.table[0] = uniform(0, 1) == 0 ? -1 : static_cast<int32_t>(e.w.cache.num_blocks);
    if (uniform(0, 1) == 1) e.lens[4] = uniform(0, 1) == 1 ? -5 : 1 << 30;
    BlockRows rows = *block_rows(e.config, e.batch());
    const int32_t heads = shape.blocks.num_kv_heads, count = e.batch().count * heads;
    std::vector<SideCounts> tokens(count);
    std::vector<int32_t> slots(count * rows.row_stride, -99);
    rows.tokens = tokens.data();
    rows.slots = slots.data();
    run(e.batch().count, heads, [&] { block_rows_kernel(rows); });
    for (int32_t row = 0; row < count; ++row) {
      const int32_t entry = row / heads;
      const int32_t s = shape.sequences.empty() ? entry : shape.sequences[entry];
      const int32_t length = s < 0 || s >= 5 ? 0 : e.lens[s];
      EXPECT_EQ(tokens[row].of[0], length);
      EXPECT_EQ(tokens[row].of[1] + tokens[row].of[2] + tokens[row].of[3], 0);
      for (int32_t i = 0; i < rows.row_stride; ++i) {
        int32_t expected = -99;
        if (int64_t{i} * 64 < length && i < e.w.columns) {
          const int32_t block = e.w.table[s * e.w.columns + i];
          const bool is_there = block >= 0 && block < e.w.cache.num_blocks;
          expected = is_there ? block * shape.blocks.layers_apart * heads + row % heads : kNoPage;
        }
        ASSERT_EQ(slots[row * rows.row_stride + i], expected) << "row " << row << " page " << i;
      }
    }
  }
}

TEST_F(EmulatedEngine, ABatchIsAttendedAsOnTheHost) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 2, 5, 16}) {
      EngineShape shape = random_shape(head_dim, group);
      SCOPED_TRACE(testing::Message() << shape.blocks.format << " dim " << head_dim << " group "
                                      << group << " queries " << shape.max_queries);
      EngineWorld e(shape, rng_);
      e.w.encode_all();
      ASSERT_TRUE(engine_attend_host(e.config, e.call()));
      const std::vector<uint16_t> expected = e.out;
      const std::vector<float> expected_lse = e.lse;
      e.out.assign(e.out.size(), 0x7fff);
      e.lse.assign(e.lse.size(), -77);

      EngineQueries q = *engine_queries(e.config, e.call());
      BlockRows rows = q.rows;
      test::World world;
      std::vector<uint16_t> packed(q.vectors() * head_dim, 0x7fff);
      world.config = attention_config(e.config, shape.max_queries);
      world.table_shape = table_shape(e.config, e.batch());
      world.slots.assign(e.batch().count * shape.blocks.num_kv_heads * rows.row_stride, -99);
      world.tokens.resize(e.batch().count * shape.blocks.num_kv_heads);
      world.pool_bytes = e.w.bytes;
      world.num_pages = page_view(e.config, e.layer()).num_pages;
      rows.slots = world.slots.data();
      rows.tokens = world.tokens.data();
      run(e.batch().count, shape.blocks.num_kv_heads, [&] { block_rows_kernel(rows); });
      q.packed_q = packed.data();
      pack(q);
      world.q = packed;
      std::mt19937_64 rng(rng_());
      // The pool of a World begins at its first multiple of 128 bytes.
      const auto offset = [](const std::vector<uint8_t>& x) {
        return (128 - reinterpret_cast<uintptr_t>(x.data()) % 128) % 128;
      };
      std::copy_n(e.w.cache.base, e.w.cache.num_blocks * e.w.cache.block_stride,
                  world.pool_bytes.data() + offset(world.pool_bytes));
      (void)test::emulate_decode(world, uniform(1, 6), rng, [&](const SharedRowsParams& shared) {
        q.packed_out = shared.out;
        q.packed_lse = shared.lse;
        q.shared = shared;
        unpack(q);
      });

      const bool is_bfloat16 = shape.blocks.dtype == DType::kBFloat16;
      double error = 0, norm = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        if (expected[i] == 0x7fff || e.out[i] == 0x7fff) {
          ASSERT_EQ(e.out[i], expected[i]) << i;
          continue;
        }
        const double a = e.value(e.out, i), b = e.value(expected, i);
        error += (a - b) * (a - b);
        norm += b * b;
      }
      // docs/internals/attention.md, "Error", and once more the rounding of an output.
      EXPECT_LT(std::sqrt(error / norm), is_bfloat16 ? 8e-3 : 3e-3);
      for (size_t i = 0; i < expected_lse.size(); ++i) {
        ASSERT_NEAR(e.lse[i], expected_lse[i], 2e-3) << i;
      }
      EXPECT_EQ(e.w.errors, std::vector<int32_t>(kEngineErrors, 0));
    }
  }
}

// A vector's output, its body's share and that of what was there, against sums in double.
TEST_F(EmulatedEngine, OutputsAreJoinedWithWhatIsThere) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    EngineShape shape = random_shape(head_dim, 2);
    SCOPED_TRACE(testing::Message() << shape.blocks.format << " dim " << head_dim);
    EngineWorld e(shape, rng_);
    EngineQueries q = *engine_queries(e.config, e.call());
    const auto random_lse = [&] {
      return uniform(0, 3) == 0 ? -INFINITY : static_cast<float>(uniform(-300, 300)) / 100;
    };
    std::vector<uint16_t> packed;
    std::vector<float> lse, prior_lse, sinks;
    float* no_lse = nullptr;
    for (int64_t i = 0; i < q.vectors(); ++i) {
      lse.push_back(random_lse()), prior_lse.push_back(random_lse());
      for (int32_t d = 0; d < head_dim; ++d) {
        packed.push_back(float_to_half(static_cast<float>(uniform(-100, 100)) / 50));
      }
    }
    for (int32_t h = 0; h < q.num_q_heads; ++h) sinks.push_back(random_lse());
    q.packed_dtype = DType::kFloat16;
    q.packed_out = packed.data();
    q.packed_lse = lse.data();
    unpack(q);
    const std::vector<uint16_t> body = e.out;
    const std::vector<float> body_lse = e.lse;

    std::vector<uint16_t> there;
    const DType dtype = shape.blocks.dtype;
    for (size_t i = 0; i < e.out.size(); ++i) {
      there.push_back(float_to_raw(dtype, static_cast<float>(uniform(-100, 100)) / 50));
    }
    e.out = there;
    q.prior.lse = prior_lse.data();
    if (uniform(0, 1) == 1) q.prior.sinks = sinks.data();
    const auto for_each_vector = [&](const auto& each) {
      for (int64_t i = 0; i < q.vectors(); ++i) {
        const int64_t line = i / q.num_q_heads;
        const auto head = static_cast<int32_t>(i % q.num_q_heads);
        const int64_t token = q.token_of(static_cast<int32_t>(line / q.queries()),
                                         static_cast<int32_t>(line % q.queries()));
        if (token < 0) continue;
        each(i, head, token * q.out_strides.token + head * q.out_strides.head,
             token * q.lse_strides.token + head * q.lse_strides.head);
      }
    };
    // What has no tokens may hold anything.
    for_each_vector([&](int64_t i, int32_t, int64_t out, int64_t) {
      if (prior_lse[i] == -INFINITY) std::fill_n(e.out.begin() + out, head_dim, uint16_t{0x7fff});
      if (lse[i] == -INFINITY)
        std::fill_n(packed.begin() + i * head_dim, head_dim, uint16_t{0x7fff});
    });
    const std::vector<uint16_t> before = e.out;
    unpack(q);
    // The same outputs where nobody wants log-sum-exps.
    const std::vector<uint16_t> joined = e.out;
    e.out = before;
    std::swap(q.lse, no_lse);
    unpack(q);
    EXPECT_EQ(e.out, joined);
    const double rounding = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;  // of either result
    for_each_vector([&](int64_t i, int32_t head, int64_t out, int64_t at) {
      const double a = std::exp(double{body_lse[at]}), b = std::exp(double{prior_lse[i]});
      const double all = a + b + std::exp(double{q.prior.sink(head)});
      if (all == 0) {
        EXPECT_EQ(e.lse[at], -INFINITY);
        for (int32_t d = 0; d < head_dim; ++d) ASSERT_EQ(e.value(e.out, out + d), 0) << d;
        return;
      }
      ASSERT_NEAR(e.lse[at], std::log(all), 1e-5);
      for (int32_t d = 0; d < head_dim; ++d) {
        const double of_body = e.value(body, out + d),
                     of_prior = raw_to_float(dtype, there[out + d]);
        const double bound =
            (std::abs(of_body) + std::abs(of_prior)) * (2 * rounding + 1e-5) + 1e-7;
        ASSERT_NEAR(e.value(e.out, out + d), (a * of_body + b * of_prior) / all, bound) << d;
      }
    });
  }
}

TEST_F(EmulatedEngine, StrayRowsAreCounted) {
  EngineShape shape = random_shape(64, 2);
  shape.sequences.clear();
  EngineWorld e(shape, rng_);
  EngineQueries q = *engine_queries(e.config, e.call());
  std::vector<uint16_t> packed(q.vectors() * 64, 0);
  std::vector<float> lse(q.vectors(), 0);
  std::vector<int32_t> status(5 * shape.blocks.num_kv_heads, 0);
  status[1 % status.size()] = status.back() = static_cast<int32_t>(StatusCode::kCorrupt);
  q.packed_out = packed.data();
  q.packed_lse = lse.data();
  q.row_status = status.data();
  unpack(q);
  EXPECT_EQ(e.w.errors, (std::vector<int32_t>{0, 0, 0, 2}));
}

}  // namespace
}  // namespace tierkv

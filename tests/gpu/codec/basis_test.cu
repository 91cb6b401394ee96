// Bases on the device against codec/host/basis.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "codec/format/element.h"
#include "codec/gpu/basis_batch.h"
#include "tests/gpu/codec/basis_world.cuh"
#include "tests/support/basis_source.h"
#include "tests/support/fresh_random.h"

namespace tierkv::testing {
namespace {

using test::DeviceArray;

struct Shape {
  int32_t head_dim, kv_heads, group;
  int64_t tokens;
  DType dtype;
};

constexpr int32_t kLayers = 2;  // the second one is mapped
constexpr float kPoison = -7777.0f;

class BasisOnDevice : public RandomTest {
 protected:
  std::vector<Basis> bases(BasisKind kind, const Shape& s) {
    std::vector<Basis> rows;
    for (int32_t r = 0; r < kLayers * s.kv_heads; ++r) {
      rows.push_back(random_basis(&rng_, kind, s.head_dim));
    }
    return rows;
  }
  // Vectors of the shape as bytes of their type; one channel is far off.
  std::vector<uint8_t> input(const Shape& s) {
    const int64_t values = s.tokens * s.kv_heads * s.group * s.head_dim;
    const std::vector<float> x = random_values(&rng_, values, 0.5f, 2);
    std::vector<uint8_t> bytes(values * dtype_bytes(s.dtype));
    for (int64_t i = 0; i < values; ++i) {
      store_element(bytes.data(), s.dtype, i, i % s.head_dim == 5 ? 40 * x[i] : x[i]);
    }
    return bytes;
  }
  BasisVectors vectors(const Shape& s, const UploadedBasis& basis) const {
    BasisVectors v;
    v.operand = basis.operand;
    v.first_row = (kLayers - 1) * s.kv_heads;
    v.kv_heads = s.kv_heads;
    v.heads = s.kv_heads * s.group;
    v.tokens = s.tokens;
    v.dtype = s.dtype;
    v.sm_scale = 0.0883f;
    return v;
  }
  // sum_i |x_i m_i| + |mean| of every column, the size that rounding is relative to.
  std::vector<double> magnitudes(const std::vector<float>& x, const Basis& b, BasisUse use) const {
    const int32_t n = b.head_dim;
    std::vector<double> size(n, 0.0);
    for (int32_t i = 0; i < n; ++i) {
      for (int32_t j = 0; j < n; ++j) {
        const float m = use == BasisUse::kApply   ? b.forward[i * n + j]
                        : use == BasisUse::kQuery ? b.inverse[j * n + i]
                                                  : b.inverse[i * n + j];
        const float centred = use == BasisUse::kApply ? std::fabs(b.mean[i] * m) : 0.0f;
        size[j] += std::fabs(x[i] * m) + centred;
      }
    }
    if (use == BasisUse::kUndo) {
      for (int32_t j = 0; j < n; ++j) size[j] += std::fabs(b.mean[j]);
    }
    return size;
  }

  void check_apply(BasisKind kind, const Shape& s);
  void check_queries_and_outputs(BasisKind kind, const Shape& s);
};

std::vector<float> floats_of(const std::vector<uint8_t>& bytes, DType dtype, int64_t first,
                             int32_t n) {
  std::vector<float> x(n);
  for (int32_t i = 0; i < n; ++i) x[i] = load_element(bytes.data(), dtype, first + i);
  return x;
}

void BasisOnDevice::check_apply(BasisKind kind, const Shape& s) {
  const std::vector<Basis> rows[2] = {bases(kind, s), bases(kind, s)};
  const std::vector<uint8_t> x[2] = {input(s), input(s)};
  const UploadedBasis basis[2] = {UploadedBasis(pack_basis(rows[0], BasisUse::kApply, s.dtype)),
                                  UploadedBasis(pack_basis(rows[1], BasisUse::kApply, s.dtype))};
  const DeviceArray<uint8_t> from[2] = {DeviceArray<uint8_t>(x[0]), DeviceArray<uint8_t>(x[1])};
  const int64_t values = s.tokens * s.kv_heads * s.head_dim;
  const DeviceArray<float> to[2] = {DeviceArray<float>(std::vector<float>(values + 4, kPoison)),
                                    DeviceArray<float>(std::vector<float>(values + 4, kPoison))};
  BasisBatch batch;
  batch.count = 2;
  for (int32_t c = 0; c < 2; ++c) {
    batch.part[c] = vectors(s, basis[c]);
    batch.part[c].x = from[c].get();
    batch.part[c].y = to[c].get();
  }
  const Status status = map_basis(batch, nullptr);
  ASSERT_TRUE(status) << status.message();
  for (int32_t c = 0; c < 2; ++c) {
    const std::vector<float> y = to[c].read();
    for (int64_t vector = 0; vector < s.tokens * s.kv_heads; ++vector) {
      const Basis& b = rows[c][(kLayers - 1) * s.kv_heads + vector % s.kv_heads];
      const std::vector<float> raw = floats_of(x[c], s.dtype, vector * s.head_dim, s.head_dim);
      std::vector<float> expected = raw;
      b.apply(expected.data(), 1);
      std::vector<double> size;
      if (kind == BasisKind::kMatrix) size = magnitudes(raw, b, BasisUse::kApply);
      for (int32_t d = 0; d < s.head_dim; ++d) {
        const float found = y[vector * s.head_dim + d];
        if (kind == BasisKind::kMatrix) {
          ASSERT_NEAR(found, expected[d], basis_product_bound(size[d]) + 0x1p-24 * size[d])
              << "vector " << vector << " channel " << d << " seed " << seed_;
        } else {
          ASSERT_EQ(float_bits(found), float_bits(expected[d]))
              << "vector " << vector << " channel " << d << " seed " << seed_;
        }
      }
    }
    for (int64_t i = values; i < values + 4; ++i) ASSERT_EQ(y[i], kPoison);
  }
}

// The type of the shape is that of queries and outputs; coordinates are fp16.
void BasisOnDevice::check_queries_and_outputs(BasisKind kind, const Shape& s) {
  Shape of_coordinates = s;
  of_coordinates.dtype = DType::kFloat16;
  const std::vector<Basis> keys = bases(kind, s), values = bases(kind, s);
  const std::vector<uint8_t> q = input(s), coordinates = input(of_coordinates);
  const UploadedBasis query(pack_basis(keys, BasisUse::kQuery, s.dtype));
  const UploadedBasis undo(pack_basis(values, BasisUse::kUndo, DType::kFloat16));
  const int64_t count = s.tokens * s.kv_heads * s.group, elements = count * s.head_dim;
  const DeviceArray<uint8_t> q_from(q), o_from(coordinates);
  const std::vector<uint16_t> poison(elements + 8, 0x7e01);
  const DeviceArray<uint16_t> q_to(poison), o_to(poison);
  std::vector<float> lse = random_values(&rng_, count, 3, 1);
  for (int64_t i = 0; i < count; i += 3) lse[i] = -INFINITY;
  const DeviceArray<float> lse_in(lse), lse_out(std::vector<float>(count, NAN)),
      shift(std::vector<float>(count, NAN));
  BasisVectors v = vectors(s, query);
  v.x = q_from.get();
  v.y = q_to.get();
  v.lse_shift = shift.get();
  ASSERT_TRUE(map_basis({{v, {}}, 1}, nullptr));
  v = vectors(of_coordinates, undo);
  v.out_dtype = s.dtype;
  v.x = o_from.get();
  v.y = o_to.get();
  v.lse_in = lse_in.get();
  v.lse_out = lse_out.get();
  v.lse_shift = query.operand.mean != nullptr ? shift.get() : nullptr;
  const Status status = map_basis({{v, {}}, 1}, nullptr);
  ASSERT_TRUE(status) << status.message();

  const std::vector<uint16_t> mapped = q_to.read(), out = o_to.read();
  const std::vector<float> sums = lse_out.read();
  for (int64_t vector = 0; vector < count; ++vector) {
    const int64_t row = (kLayers - 1) * s.kv_heads + vector % (s.kv_heads * s.group) / s.group;
    for (const BasisUse use : {BasisUse::kQuery, BasisUse::kUndo}) {
      const bool is_query = use == BasisUse::kQuery;
      const Basis& b = is_query ? keys[row] : values[row];
      const std::vector<float> raw =
          floats_of(is_query ? q : coordinates, is_query ? s.dtype : DType::kFloat16,
                    vector * s.head_dim, s.head_dim);
      const DType to = is_query ? DType::kFloat16 : s.dtype;
      std::vector<float> expected = raw;
      is_query ? b.apply_to_queries(expected.data(), 1) : b.undo(expected.data(), 1);
      std::vector<double> size;
      if (kind == BasisKind::kMatrix) size = magnitudes(raw, b, use);
      if (is_query) {
        double magnitude = 0;
        for (size_t d = 0; d < b.mean.size(); ++d) magnitude += std::fabs(raw[d] * b.mean[d]);
        const double moved = lse[vector] + v.sm_scale * b.mean_product(raw.data());
        // A sum of head_dim products in fp32, then one addition.
        if (lse[vector] != -INFINITY) {
          ASSERT_NEAR(sums[vector], moved, magnitude * 0x1p-17 + std::fabs(moved) * 0x1p-22);
        } else {
          ASSERT_EQ(sums[vector], -INFINITY);
        }
      }
      const bool is_empty = !is_query && lse[vector] == -INFINITY;
      for (int32_t d = 0; d < s.head_dim; ++d) {
        const uint16_t bits = (is_query ? mapped : out)[vector * s.head_dim + d];
        if (is_empty) {
          ASSERT_EQ(bits, 0);
        } else if (kind == BasisKind::kMatrix) {
          // Then rounded to fp16 or bfloat16.
          const double unit = to == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
          ASSERT_NEAR(raw_to_float(to, bits), expected[d],
                      2 * basis_product_bound(size[d]) + std::fabs(expected[d]) * unit + 0x1p-25)
              << "vector " << vector << " channel " << d << " seed " << seed_;
        } else {
          ASSERT_EQ(bits, float_to_raw(to, expected[d]))
              << "vector " << vector << " channel " << d << " seed " << seed_;
        }
      }
    }
  }
  for (int32_t i = 0; i < 8; ++i) {
    ASSERT_EQ(q_to.read()[elements + i], 0x7e01);
    ASSERT_EQ(o_to.read()[elements + i], 0x7e01);
  }
}

constexpr BasisKind kKinds[] = {BasisKind::kNone, BasisKind::kMean, BasisKind::kHadamard,
                                BasisKind::kMatrix};

TEST_F(BasisOnDevice, CoordinatesOfKeysAndValues) {
  for (const BasisKind kind : kKinds) {
    for (const int32_t dim : {64, 96, 128, 256}) {
      for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
        for (const int64_t tokens : {1, 17, 64, 700}) {
          SCOPED_TRACE(std::to_string(static_cast<int32_t>(kind)) + " head_dim " +
                       std::to_string(dim) + " " + dtype_name(dtype) + " tokens " +
                       std::to_string(tokens));
          check_apply(kind, {dim, tokens == 17 ? 3 : 2, 1, tokens, dtype});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(BasisOnDevice, QueriesAndOutputs) {
  for (const BasisKind kind : kKinds) {
    for (const int32_t dim : {64, 96, 128, 256}) {
      for (const int32_t group : {1, 4, 5}) {
        for (const int64_t tokens : {1, 9, 160}) {
          SCOPED_TRACE(std::to_string(static_cast<int32_t>(kind)) + " head_dim " +
                       std::to_string(dim) + " group " + std::to_string(group) + " tokens " +
                       std::to_string(tokens));
          const DType dtype = tokens == 9 ? DType::kBFloat16 : DType::kFloat16;
          check_queries_and_outputs(kind, {dim, 2, group, tokens, dtype});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(BasisOnDevice, ComponentsOfTwoKinds) {
  const Shape s = {128, 2, 1, 33, DType::kFloat16};
  const std::vector<Basis> keys = bases(BasisKind::kMatrix, s), values = bases(BasisKind::kNone, s);
  const UploadedBasis k(pack_basis(keys, BasisUse::kApply, s.dtype));
  const UploadedBasis v(pack_basis(values, BasisUse::kApply, s.dtype));
  const std::vector<uint8_t> x = input(s);
  const DeviceArray<uint8_t> from(x);
  const DeviceArray<float> to[2] = {DeviceArray<float>(std::vector<float>(33 * 256, kPoison)),
                                    DeviceArray<float>(std::vector<float>(33 * 256, kPoison))};
  BasisBatch batch = {{vectors(s, k), vectors(s, v)}, 2};
  for (int32_t c = 0; c < 2; ++c) {
    batch.part[c].x = from.get();
    batch.part[c].y = to[c].get();
  }
  ASSERT_TRUE(map_basis(batch, nullptr));
  EXPECT_EQ(to[1].read(), floats_of(x, s.dtype, 0, 33 * 256));
  for (const float y : to[0].read()) ASSERT_NE(y, kPoison);
}

TEST_F(BasisOnDevice, WhatIsNotFiniteStaysSo) {
  for (const BasisKind kind : kKinds) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      const Shape s = {96, 1, 1, 20, DType::kFloat16};
      const UploadedBasis basis(pack_basis(bases(kind, s), BasisUse::kApply, s.dtype));
      std::vector<uint8_t> x = input(s);
      store_element(x.data(), s.dtype, 7 * 96 + 70, bad);
      const uint16_t bits = float_to_half(bad);
      std::memcpy(&x[2 * (7 * 96 + 70)], &bits, 2);
      const DeviceArray<uint8_t> from(x);
      const DeviceArray<float> to(std::vector<float>(20 * 96, kPoison));
      BasisVectors v = vectors(s, basis);
      v.x = from.get();
      v.y = to.get();
      ASSERT_TRUE(map_basis({{v, {}}, 1}, nullptr));
      const std::vector<float> y = to.read();
      bool finite[2] = {true, true};
      for (int32_t i = 0; i < 20 * 96; ++i) finite[i / 96 == 7] &= is_finite(y[i]);
      EXPECT_TRUE(finite[0]) << seed_;
      EXPECT_FALSE(finite[1]) << static_cast<int32_t>(kind) << " seed " << seed_;
    }
  }
}

TEST_F(BasisOnDevice, RefusesByName) {
  const Shape s = {128, 2, 1, 4, DType::kFloat16};
  const UploadedBasis basis(pack_basis(bases(BasisKind::kMatrix, s), BasisUse::kApply, s.dtype));
  const DeviceArray<float> memory(std::vector<float>(2048, kPoison));
  BasisVectors good = vectors(s, basis);
  good.x = good.y = memory.get();
  const auto code = [&](void (*change)(BasisVectors*)) {
    BasisVectors v = good;
    change(&v);
    return map_basis({{v, {}}, 1}, nullptr).code();
  };
  const StatusCode invalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](BasisVectors* v) { v->x = nullptr; }), invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->y = static_cast<float*>(v->y) + 1; }), invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->heads = 3; }), invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->tokens = -1; }), invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->first_row = -1; }), invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->operand.parts = nullptr; }), invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->operand.use = BasisUse::kUndo; }), invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->operand.use = BasisUse::kQuery; }), invalid);
  EXPECT_EQ(code([](BasisVectors* v) {
              v->operand.use = BasisUse::kUndo;
              v->lse_in = static_cast<const float*>(v->x);
              v->out_dtype = DType::kFloat32;
            }),
            invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->dtype = DType::kFloat32; }), invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->operand.head_dim = 80; }), StatusCode::kUnsupported);
  EXPECT_EQ(map_basis({{good, {}}, 0}, nullptr).code(), invalid);
  EXPECT_EQ(code([](BasisVectors* v) { v->tokens = 0; }), StatusCode::kOk);
  for (const float x : memory.read()) ASSERT_EQ(x, kPoison);
}

}  // namespace
}  // namespace tierkv::testing

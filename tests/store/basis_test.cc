// Stores in a basis: attention is that of the decoded cache mapped back, sequences stay in their
// basis, and what is no basis is refused by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "attention/reference.h"
#include "codec/element.h"
#include "store/host_basis.h"
#include "tests/codec/basis_source.h"
#include "tests/store/small_store.h"

namespace tierkv::testing {
namespace {

KvStoreConfig basis_config(std::mt19937* rng, BasisKind keys, BasisKind values) {
  KvStoreConfig c = small_config();
  c.layout.dtype = DType::kBFloat16;
  c.basis = std::make_shared<const CacheBasis>(random_cache_basis(rng, c.layout, keys, values));
  return c;
}

std::unique_ptr<HostBasisStore> make_basis_store(const KvStoreConfig& config) {
  auto store = HostBasisStore::make(config);
  EXPECT_TRUE(store.is_ok()) << store.status().message();
  return store ? std::move(*store) : nullptr;
}

// A prompt of `tokens` tokens and some steps of one, every layer.
void fill(KvStore* store, RandomInput* input, SequenceId id, int32_t tokens, int32_t steps) {
  const CacheLayout& layout = store->config().layout;
  const SequenceList list = {&id, 1};
  const auto append = [&](int32_t count) {
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      const CallValues values(input, layout, 1, count);
      ASSERT_TRUE(store->append({list, layer, count, values.k(), values.v()}));
    }
  };
  ASSERT_TRUE(store->begin_prompt(list, tokens));
  append(tokens);
  for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
    const std::vector<float> scores = input->scores(int64_t{layout.num_kv_heads} * tokens, tokens);
    ASSERT_TRUE(store->score_prompt({list, layer, scores.data(), tokens}));
  }
  ASSERT_TRUE(store->end_prompt(list));
  for (int32_t i = 0; i < steps; ++i) {
    ASSERT_TRUE(store->begin_step(list, 1));
    append(1);
  }
}

// What a row holds, in coordinates and mapped back.
struct DecodedRow {
  std::vector<std::vector<float>> coordinates, k, v;
  std::vector<int32_t> positions;
};
DecodedRow decode(const StoreView& s, int32_t row, const Basis& keys, const Basis& values) {
  DecodedRow d;
  const int32_t dim = s.layouts[0].head_dim();
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (int32_t i = 0; i < s.allocator.tokens[row].of[side]; ++i) {
      const HostSlot at = row_slot(s, row, side, i);
      std::vector<float> k(dim), v(dim);
      for (int32_t c = 0; c < dim; ++c) {
        k[c] = static_cast<float>(
            page_value(at.page.layout, at.page.bytes, Component::kKey, at.slot, c));
        v[c] = static_cast<float>(
            page_value(at.page.layout, at.page.bytes, Component::kValue, at.slot, c));
      }
      d.coordinates.push_back(k);
      keys.undo(k.data(), 1);
      values.undo(v.data(), 1);
      d.k.push_back(std::move(k));
      d.v.push_back(std::move(v));
      d.positions.push_back(page_position(at.page, at.slot));
    }
  }
  return d;
}

struct Attended {
  std::vector<uint16_t> out;
  std::vector<float> lse, probabilities;
};
constexpr int32_t kStride = 160;

Attended attend(KvStore* store, SequenceId id, int32_t layer, const std::vector<uint8_t>& q) {
  const CacheLayout& layout = store->config().layout;
  Attended a;
  a.out.assign(layout.num_q_heads * layout.head_dim, 0x7e00);
  a.lse.assign(layout.num_q_heads, NAN);
  a.probabilities.assign(layout.num_kv_heads * kStride, NAN);
  AttendRequest request;
  request.sequences = {&id, 1};
  request.layer = layer;
  request.q = q.data();
  request.out = a.out.data();
  request.lse = a.lse.data();
  request.probabilities = a.probabilities.data();
  request.stride = kStride;
  const Status status = store->attend(request);
  EXPECT_TRUE(status) << status.message();
  return a;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}
double absolute_dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::fabs(static_cast<double>(a[i]) * b[i]);
  return sum;
}

// One query head against the softmax over a row in double.
void expect_attention(const CacheLayout& layout, const DecodedRow& row, const Basis& keys,
                      const Basis& values, const std::vector<float>& q, const uint16_t* out,
                      float lse) {
  const int32_t dim = layout.head_dim;
  std::vector<float> mapped = q;
  keys.apply_to_queries(mapped.data(), 1);
  std::vector<double> logits;
  double most = -INFINITY, error = 0;
  for (size_t i = 0; i < row.k.size(); ++i) {
    logits.push_back(layout.sm_scale * dot(q, row.k[i]));
    most = std::max(most, logits.back());
    // q is rounded to fp16 in the basis: 2^-11 of each product. What is mapped back is rounded to
    // fp32, which 2^-20 of both sums covers for a condition of 16.
    error = std::max(error, layout.sm_scale * (absolute_dot(mapped, row.coordinates[i]) * 0x1p-11 +
                                               absolute_dot(q, row.k[i]) * 0x1p-20));
  }
  double sum = 0;
  for (const double x : logits) sum += std::exp(x - most);
  EXPECT_NEAR(lse, most + std::log(sum), error + 1e-6 * (1 + std::fabs(most)));
  std::vector<double> expected(dim, 0.0), spread(dim, 0.0);
  for (size_t i = 0; i < row.v.size(); ++i) {
    const double p = std::exp(logits[i] - most) / sum;
    for (int32_t d = 0; d < dim; ++d) {
      expected[d] += p * row.v[i][d];
      spread[d] += p * std::fabs(row.v[i][d]);
    }
  }
  // Probabilities are off by exp(2 error) at most. The output is rounded to fp16 as coordinates,
  // 2^-11 of each that it is made of, and once more.
  std::vector<float> coordinates(expected.begin(), expected.end());
  values.apply(coordinates.data(), 1);
  for (int32_t d = 0; d < dim; ++d) {
    double rounded = std::fabs(expected[d]);
    for (int32_t i = 0; i < dim; ++i) {
      if (values.kind != BasisKind::kMatrix) break;
      rounded += std::fabs(coordinates[i] * values.inverse[i * dim + d]);
    }
    if (values.kind == BasisKind::kHadamard) {
      for (const float y : coordinates) rounded += std::fabs(y) / std::sqrt(dim);
    }
    if (values.kind == BasisKind::kMean) rounded += std::fabs(coordinates[d]);
    EXPECT_NEAR(half_to_float(out[d]), expected[d],
                spread[d] * std::expm1(2 * error) * 2 + rounded * 0x1p-10 + 1e-6)
        << "channel " << d;
  }
}

constexpr BasisKind kKinds[] = {BasisKind::kNone, BasisKind::kMean, BasisKind::kHadamard,
                                BasisKind::kMatrix};

class StoreBasis : public ::testing::Test {
 protected:
  StoreBasis() : seed_(std::random_device{}()), rng_(seed_) {}
  std::vector<float> query(const std::vector<uint8_t>& q, int32_t head, int32_t dim) const {
    std::vector<float> x(dim);
    for (int32_t d = 0; d < dim; ++d)
      x[d] = load_element(q.data(), DType::kFloat16, head * dim + d);
    return x;
  }
  RandomInput input_;
  uint32_t seed_;
  std::mt19937 rng_;
};

TEST_F(StoreBasis, AttendsToTheDecodedCacheMappedBack) {
  for (const BasisKind keys : kKinds) {
    for (const BasisKind values : kKinds) {
      SCOPED_TRACE(std::to_string(static_cast<int32_t>(keys)) + " " +
                   std::to_string(static_cast<int32_t>(values)) + " seed " + std::to_string(seed_));
      const KvStoreConfig config = basis_config(&rng_, keys, values);
      const CacheLayout& layout = config.layout;
      const auto store = make_basis_store(config);
      const SequenceId id = *store->add_sequence();
      fill(store.get(), &input_, id, 70, 9);
      if (HasFatalFailure()) return;
      const std::vector<uint8_t> q =
          input_.values(DType::kFloat16, layout.num_q_heads, layout.head_dim);
      const Attended a = attend(store.get(), id, 1, q);
      const StoreView& view = store->inner().view();
      for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
        const int32_t within = layout.num_kv_heads + h;
        const Basis &k = config.basis->keys[within], &v = config.basis->values[within];
        const DecodedRow row = decode(view, view.row_of(id.slot, 1, h), k, v);
        ASSERT_GT(row.k.size(), 8u);
        std::vector<double> largest(kStride, 0.0);
        double tolerance = 0;
        for (int32_t g = 2 * h; g < 2 * h + 2; ++g) {
          const std::vector<float> x = query(q, g, layout.head_dim);
          expect_attention(layout, row, k, v, x, &a.out[g * layout.head_dim], a.lse[g]);
          std::vector<float> mapped = x;
          k.apply_to_queries(mapped.data(), 1);
          for (size_t i = 0; i < row.k.size(); ++i) {
            const double p = std::exp(layout.sm_scale * dot(x, row.k[i]) - a.lse[g]);
            largest[row.positions[i]] = std::max(largest[row.positions[i]], p);
            tolerance = std::max(tolerance, 1e-5 + layout.sm_scale * 0x1p-10 *
                                                       absolute_dot(mapped, row.coordinates[i]));
          }
        }
        for (int32_t p = 0; p < 79; ++p) {
          EXPECT_NEAR(a.probabilities[h * kStride + p], std::min(largest[p], 1.0),
                      std::expm1(2 * tolerance) * (largest[p] + 1e-6) + 1e-6)
              << p;
        }
      }
    }
  }
}

// The same queries in bfloat16: as exact in fp16, so the LSE is the same and the output is rounded
// once more.
TEST_F(StoreBasis, TakesQueriesOfTheLayoutsType) {
  const KvStoreConfig config = basis_config(&rng_, BasisKind::kMatrix, BasisKind::kMatrix);
  const auto store = make_basis_store(config);
  const SequenceId id = *store->add_sequence();
  fill(store.get(), &input_, id, 30, 2);
  std::vector<uint16_t> halves(4 * 64), bfloats(4 * 64);
  for (size_t i = 0; i < halves.size(); ++i) {
    bfloats[i] = float_to_bfloat16(input_.real(0.5f, 2) * (input_.chance(0.5) ? 1 : -1));
    halves[i] = float_to_half(bfloat16_to_float(bfloats[i]));
  }
  std::vector<uint16_t> out[2] = {std::vector<uint16_t>(4 * 64), std::vector<uint16_t>(4 * 64)};
  std::vector<float> lse[2] = {std::vector<float>(4), std::vector<float>(4)};
  for (const int32_t b : {0, 1}) {
    AttendRequest request;
    request.sequences = {&id, 1};
    request.dtype = b == 0 ? DType::kFloat16 : DType::kBFloat16;
    request.q = b == 0 ? halves.data() : bfloats.data();
    request.out = out[b].data();
    request.lse = lse[b].data();
    ASSERT_TRUE(store->attend(request));
    request.dtype = DType::kFloat32;
    EXPECT_EQ(store->attend(request).code(), StatusCode::kUnsupported);
  }
  EXPECT_EQ(lse[0], lse[1]);
  for (size_t i = 0; i < halves.size(); ++i) {
    const float expected = half_to_float(out[0][i]);
    ASSERT_NEAR(bfloat16_to_float(out[1][i]), expected, 0x1.2p-8f * std::fabs(expected) + 1e-6f);
  }
  KvStoreConfig other = config;
  other.layout.dtype = DType::kFloat16;
  const auto fp16_store = make_basis_store(other);
  const SequenceId there = *fp16_store->add_sequence();
  fill(fp16_store.get(), &input_, there, 30, 2);
  AttendRequest request;
  request.sequences = {&there, 1};
  request.dtype = DType::kBFloat16;
  request.q = bfloats.data();
  request.out = out[0].data();
  EXPECT_EQ(fp16_store->attend(request).code(), StatusCode::kUnsupported);
}

// A basis keeps a window of 16 bits as exact as fp16 is.
TEST_F(StoreBasis, TakesOutWhatWasPutIn) {
  for (const BasisKind kind : kKinds) {
    KvStoreConfig config = basis_config(&rng_, kind, kind);
    config.layout.dtype = DType::kFloat16;
    config.window_format = raw_tier();
    config.page_bytes = 8448;
    const auto store = make_basis_store(config);
    const SequenceId id = *store->add_sequence();
    const CallValues values(&input_, config.layout, 1, 5);
    ASSERT_TRUE(store->begin_prompt({&id, 1}, 5));
    ASSERT_TRUE(store->append({{&id, 1}, 1, 5, values.k(), values.v()}));
    const StoreView& view = store->inner().view();
    for (int32_t h = 0; h < 2; ++h) {
      const Basis &k = config.basis->keys[2 + h], &v = config.basis->values[2 + h];
      const DecodedRow row = decode(view, view.row_of(id.slot, 1, h), k, v);
      for (int32_t t = 0; t < 5; ++t) {
        const TokenValues expected = values.token(0, t, h);
        double k_error = 0, v_error = 0, k_size = 0, v_size = 0;
        for (int32_t d = 0; d < 64; ++d) {
          k_error += std::pow(row.k[t][d] - expected.k[d], 2);
          v_error += std::pow(row.v[t][d] - expected.v[d], 2);
          k_size += std::pow(expected.k[d], 2) + (k.mean.empty() ? 0 : std::pow(k.mean[d], 2));
          v_size += std::pow(expected.v[d], 2) + (v.mean.empty() ? 0 : std::pow(v.mean[d], 2));
        }
        // fp16 loses 2^-11 of a coordinate; a matrix of condition 16 makes 16 times that of it.
        EXPECT_LE(std::sqrt(k_error), 0x1p-11 * 16 * std::sqrt(k_size)) << seed_;
        EXPECT_LE(std::sqrt(v_error), 0x1p-11 * 16 * std::sqrt(v_size)) << seed_;
      }
    }
  }
}

TEST_F(StoreBasis, SequencesStayInTheirBasis) {
  const KvStoreConfig config = basis_config(&rng_, BasisKind::kMatrix, BasisKind::kHadamard);
  const auto store = make_basis_store(config);
  const SequenceId id = *store->add_sequence();
  fill(store.get(), &input_, id, 40, 3);
  const std::vector<uint8_t> bytes = *store->export_sequence(id);
  const auto again = make_basis_store(config);
  const Result<SequenceId> copy = again->import_sequence(bytes.data(), bytes.size());
  ASSERT_TRUE(copy.is_ok()) << copy.status().message();
  const std::vector<uint8_t> q = input_.values(DType::kFloat16, 4, 64);
  EXPECT_EQ(attend(store.get(), id, 0, q).out, attend(again.get(), *copy, 0, q).out);
  EXPECT_EQ(*again->export_sequence(*copy), bytes);

  KvStoreConfig other = config;
  CacheBasis changed = *config.basis;
  changed.values[3].signs[17] *= -1;
  other.basis = std::make_shared<const CacheBasis>(changed);
  KvStoreConfig plain = config;
  plain.basis = nullptr;
  plain.layout.dtype = DType::kFloat32;
  for (const KvStoreConfig& c : {other, plain}) {
    const Result<std::unique_ptr<KvStore>> made = KvStore::create(c);
    ASSERT_TRUE(made.is_ok());
    const auto& elsewhere = *made;
    const Status status = elsewhere->import_sequence(bytes.data(), bytes.size()).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("another basis"), std::string::npos) << status.message();
    EXPECT_FALSE(c == config);
    EXPECT_NE(to_json(c), to_json(config));
  }
}

TEST_F(StoreBasis, RefusesWhatIsNoBasis) {
  const KvStoreConfig good = basis_config(&rng_, BasisKind::kMatrix, BasisKind::kMean);
  const auto refused = [&](StatusCode code, const char* text,
                           const std::function<void(CacheBasis*)>& change) {
    CacheBasis basis = *good.basis;
    change(&basis);
    KvStoreConfig c = good;
    c.basis = std::make_shared<const CacheBasis>(basis);
    const Status status = KvStore::create(c).status();
    EXPECT_EQ(status.code(), code) << text;
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
    EXPECT_FALSE(to_json(c).empty());
  };
  const StatusCode invalid = StatusCode::kInvalidArgument;
  refused(invalid, "basis: keys: 0 bases", [](CacheBasis* b) { b->keys.clear(); });
  refused(invalid, "kv_head 1: forward is not finite",
          [](CacheBasis* b) { b->keys[1].forward[7] = NAN; });
  refused(invalid, "not the identity",
          [](CacheBasis* b) { b->keys[0].forward.assign(4096, 1.0f); });
  refused(invalid, "values: layer 1, kv_head 0: mean has 63",
          [](CacheBasis* b) { b->values[2].mean.pop_back(); });
  refused(invalid, "bases of 2 layers and 1 kv heads", [](CacheBasis* b) { b->num_kv_heads = 1; });
  KvStoreConfig c = good;
  c.layout.head_dim = 128;
  EXPECT_EQ(KvStore::create(c).status().code(), invalid);
  c = good;
  c.low_format.k.basis = BasisKind::kHadamard;
  EXPECT_EQ(KvStore::create(c).status().code(), StatusCode::kUnsupported);
}

TEST_F(StoreBasis, RefusedValuesChangeNothing) {
  KvStoreConfig config = basis_config(&rng_, BasisKind::kHadamard, BasisKind::kHadamard);
  config.layout.dtype = DType::kFloat16;
  const auto store = make_basis_store(config);
  const SequenceId id = *store->add_sequence();
  fill(store.get(), &input_, id, 20, 1);
  ASSERT_TRUE(store->begin_step({&id, 1}, 1));
  const std::vector<uint8_t> before = state_of(store->inner().view());
  const std::vector<uint16_t> fine(2 * 64, 0x3c00);
  std::vector<uint16_t> bad = fine;
  const auto append = [&](const void* k, const void* v) {
    return store->append({{&id, 1}, 0, 1, k, v}).code();
  };
  bad[70] = 0x7c00;
  EXPECT_EQ(append(bad.data(), fine.data()), StatusCode::kNonFinite);
  EXPECT_EQ(append(fine.data(), bad.data()), StatusCode::kNonFinite);
  // The coordinate that adds everything up: 64 * 60000 / 8.
  for (int32_t d = 0; d < 64; ++d) {
    bad[64 + d] = float_to_half(60000 * config.basis->values[1].signs[d]);
  }
  EXPECT_EQ(append(fine.data(), bad.data()), StatusCode::kOutOfRange);
  EXPECT_EQ(append(nullptr, fine.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(append(fine.data(), nullptr), StatusCode::kInvalidArgument);
  EXPECT_EQ(store->append({{nullptr, 1}, 0, 1, fine.data(), fine.data()}).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(store->append({{&id, 1}, 9, 1, fine.data(), fine.data()}).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(state_of(store->inner().view()), before);
  for (const int32_t layer : {0, 1}) {
    ASSERT_TRUE(store->append({{&id, 1}, layer, 1, fine.data(), fine.data()}));
  }
  std::vector<uint16_t> q(4 * 64, 0x3c00), out(4 * 64, 0x7e00);
  AttendRequest request;
  request.sequences = {&id, 1};
  request.out = out.data();
  EXPECT_EQ(store->attend(request).code(), StatusCode::kInvalidArgument);
  request.q = q.data();
  q[5] = 0x7e00;
  EXPECT_EQ(store->attend(request).code(), StatusCode::kNonFinite);
  for (int32_t d = 0; d < 64; ++d) {
    q[d] = float_to_half(60000 * config.basis->keys[0].signs[d]);
  }
  EXPECT_EQ(store->attend(request).code(), StatusCode::kOutOfRange);
  for (const uint16_t x : out) ASSERT_EQ(x, 0x7e00);
  q.assign(q.size(), 0x3c00);
  EXPECT_TRUE(store->attend(request));  // lse may be null
}

}  // namespace
}  // namespace tierkv::testing

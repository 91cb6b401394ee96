// Stores in a basis: sequences stay in their basis, and what is no basis is refused by name.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "tests/store/support/basis_store.h"

namespace tierkv::testing {
namespace {

class StoreBasis : public ::testing::Test {
 protected:
  StoreBasis() : seed_(std::random_device{}()), rng_(seed_) {}
  RandomInput input_;
  uint32_t seed_;
  std::mt19937 rng_;
};

// A basis keeps a window of 16 bits as exact as fp16 is.
TEST_F(StoreBasis, TakesOutWhatWasPutIn) {
  for (const BasisKind kind : kBasisKinds) {
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

#include "tests/store/support/basis_store.h"

#include <gtest/gtest.h>

#include <cmath>

#include "attention/core/reference.h"
#include "tests/support/basis_source.h"

namespace tierkv::testing {

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

Attended attend(KvStore* store, SequenceId id, int32_t layer, const std::vector<uint8_t>& q) {
  const CacheLayout& layout = store->config().layout;
  Attended a;
  a.out.assign(layout.num_q_heads * layout.head_dim, 0x7e00);
  a.lse.assign(layout.num_q_heads, NAN);
  a.probabilities.assign(layout.num_kv_heads * kProbabilityStride, NAN);
  AttendRequest request;
  request.sequences = {&id, 1};
  request.layer = layer;
  request.q = q.data();
  request.out = a.out.data();
  request.lse = a.lse.data();
  request.probabilities = a.probabilities.data();
  request.stride = kProbabilityStride;
  const Status status = store->attend(request);
  EXPECT_TRUE(status) << status.message();
  return a;
}

}  // namespace tierkv::testing

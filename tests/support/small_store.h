// Small stores, what of them is state, and inputs for whole calls.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "store/tiers/host_store.h"
#include "tests/support/random_input.h"

namespace tierkv::testing {

struct TokenValues {
  std::vector<float> k, v;
};

// Pages of 16 to 64 tokens, a window of 8, two layers of two kv heads.
inline KvStoreConfig small_config() {
  KvStoreConfig c;
  c.layout.num_layers = 2;
  c.layout.num_q_heads = 4;
  c.layout.num_kv_heads = 2;
  c.layout.head_dim = 64;
  c.layout.sm_scale = 0.125;
  c.policy.alpha_high = 1.0;
  c.policy.alpha_low = 0.3;
  c.policy.window_tokens = 8;
  c.page_bytes = 1920;
  c.num_pages = 80;
  c.max_sequences = 5;
  c.max_tokens = 150;
  return c;
}

inline std::unique_ptr<HostStore> make_store(const KvStoreConfig& config) {
  auto store = HostStore::make(config);
  EXPECT_TRUE(store.is_ok()) << store.status().message();
  return store ? std::move(*store) : nullptr;
}

// Everything a call could change, as bytes. What the allocator names its operations by is not
// state, the free positions of its ring are not content.
inline void read_state(const StoreView& s, std::vector<uint8_t>* state) {
  std::vector<uint8_t>& out = *state;
  out.clear();
  const auto put = [&out](const void* p, size_t bytes) {
    const auto* from = static_cast<const uint8_t*>(p);
    out.insert(out.end(), from, from + bytes);
  };
  const PageAllocator& a = s.allocator;
  const PageTableShape& t = a.shape.table;
  put(a.slots, sizeof(int32_t) * t.num_rows() * t.row_stride());
  put(a.tokens, sizeof(SideCounts) * t.num_rows());
  put(a.pages, sizeof(SideCounts) * t.num_rows());
  put(a.records, sizeof(PageRecord) * a.shape.num_pages);
  put(a.ring.cursors, sizeof(RingCursors));
  for (int64_t p = a.ring.cursors->start; p < a.ring.cursors->end; ++p) {
    put(&a.ring.ids[p % a.shape.num_pages], sizeof(int32_t));
  }
  for (int32_t q = 0; q < t.num_sequences; ++q) {
    put(&a.sequences[q].state, sizeof(SequenceState));
    put(&a.sequences[q].reserved, sizeof(SideCounts));
    if (a.sequences[q].state != SequenceState::kFree) put(&s.infos[q], sizeof(SequenceInfo));
  }
  put(s.pages.base, static_cast<size_t>(s.pages.page_bytes) * s.pages.num_pages);
}
inline std::vector<uint8_t> state_of(const StoreView& s) {
  std::vector<uint8_t> out;
  read_state(s, &out);
  return out;
}

// Keys and values of a whole call, and what the model takes of them.
class CallValues {
 public:
  CallValues(RandomInput* input, const CacheLayout& layout, int32_t count, int32_t tokens)
      : layout_(layout), tokens_(tokens) {
    const int64_t heads = int64_t{count} * tokens * layout.num_kv_heads;
    k_ = input->values(layout.dtype, heads, layout.head_dim);
    v_ = input->values(layout.dtype, heads, layout.head_dim);
  }
  const void* k() const { return k_.data(); }
  const void* v() const { return v_.data(); }
  const std::vector<uint8_t>& k_bytes() const { return k_; }
  const std::vector<uint8_t>& v_bytes() const { return v_; }

  TokenValues token(int32_t entry, int32_t token, int32_t head) const {
    const int64_t at =
        ((int64_t{entry} * tokens_ + token) * layout_.num_kv_heads + head) * layout_.head_dim;
    return {floats(k_, at), floats(v_, at)};
  }

 private:
  std::vector<float> floats(const std::vector<uint8_t>& bytes, int64_t at) const {
    std::vector<float> x(layout_.head_dim);
    for (int32_t d = 0; d < layout_.head_dim; ++d) {
      uint16_t bits;
      if (layout_.dtype == DType::kFloat32) {
        std::memcpy(&x[d], &bytes[(at + d) * 4], 4);
        continue;
      }
      std::memcpy(&bits, &bytes[(at + d) * 2], 2);
      x[d] = layout_.dtype == DType::kFloat16 ? half_to_float(bits) : bfloat16_to_float(bits);
    }
    return x;
  }

  CacheLayout layout_;
  int32_t tokens_;
  std::vector<uint8_t> k_, v_;
};

}  // namespace tierkv::testing

// Sequences to save and load: how they are made, and what of them is state.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/small_store.h"
#include "tierkv/cold.h"

namespace tierkv::testing {

using Bytes = std::vector<uint8_t>;

// The state of a sequence, as its export has it.
inline Bytes state_bytes(KvStore& store, SequenceId id) {
  const Result<Bytes> bytes = store.export_sequence(id);
  EXPECT_TRUE(bytes.is_ok()) << bytes.status().message();
  return bytes ? *bytes : Bytes();
}
inline Status load(KvStore& store, const Bytes& bytes) {
  return load_sequence(store, bytes.data(), bytes.size()).status();
}

// Keys and values that a seed makes again.
inline Status append_all(KvStore& store, SequenceId id, int32_t tokens, RandomInput* input,
                         std::vector<Bytes>* values) {
  const CacheLayout& layout = store.config().layout;
  const bool made = !values->empty();
  for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
    if (!made) {
      for (int i = 0; i < 2; ++i) {
        values->push_back(
            input->values(layout.dtype, int64_t{tokens} * layout.num_kv_heads, layout.head_dim));
      }
    }
    const Status s = store.append({{&id, 1},
                                   layer,
                                   tokens,
                                   (*values)[size_t{2} * layer].data(),
                                   (*values)[size_t{2} * layer + 1].data()});
    if (!s) return s;
  }
  return Status::ok();
}
inline Status step(KvStore& store, SequenceId id, RandomInput* input, std::vector<Bytes>* values) {
  if (Status s = store.begin_step({&id, 1}, 1); !s) return s;
  return append_all(store, id, 1, input, values);
}
// values: keys and values of each layer in turn; none: random ones.
inline Result<SequenceId> prompted(KvStore& store, int32_t tokens, RandomInput* input,
                                   std::vector<Bytes> values = {}) {
  const SequenceId id = *store.add_sequence();
  if (tokens > 0) {
    if (Status s = store.begin_prompt({&id, 1}, tokens); !s) return s;
    if (Status s = append_all(store, id, tokens, input, &values); !s) return s;
  }
  if (Status s = store.end_prompt({&id, 1}); !s) return s;
  return id;
}

inline KvStoreConfig format_config(int32_t head_dim, const TierFormat& high,
                                   const TierFormat& low) {
  KvStoreConfig c = small_config();
  c.layout.head_dim = head_dim;
  c.window_format = c.high_format = high;
  c.low_format = low;
  c.page_bytes = 0;
  c.policy.alpha_low = 0;  // unscored tokens are low ones
  return c;
}

}  // namespace tierkv::testing

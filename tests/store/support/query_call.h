// A call of attend() with several queries a sequence, and where its results go.
#pragma once

#include <cmath>
#include <utility>
#include <vector>

#include "tierkv/store.h"

namespace tierkv::testing {

// On layer 1; the results are poisoned.
struct QueryCall {
  QueryCall(const KvStoreConfig& config, std::vector<SequenceId> sequences, int32_t queries)
      : ids(std::move(sequences)), q_len(queries), stride(config.max_tokens) {
    const CacheLayout& l = config.layout;
    const auto lines = ids.size() * q_len;
    out.assign(lines * l.num_q_heads * l.head_dim, 0x7e00);
    lse.assign(lines * l.num_q_heads, NAN);
    probabilities.assign(lines * l.num_kv_heads * stride, NAN);
  }
  AttendRequest request() {
    AttendRequest r;
    r.sequences = {ids.data(), static_cast<int32_t>(ids.size())};
    r.layer = 1;
    r.q = q.data();
    r.out = out.data();
    r.lse = lse.data();
    r.probabilities = probabilities.data();
    r.stride = stride;
    r.q_len = q_len;
    r.sinks = sinks.empty() ? nullptr : sinks.data();
    return r;
  }

  std::vector<SequenceId> ids;
  int32_t q_len, stride;
  std::vector<uint8_t> q;
  std::vector<float> sinks;  // [num_q_heads] or empty
  std::vector<uint16_t> out;
  std::vector<float> lse, probabilities;
};

}  // namespace tierkv::testing

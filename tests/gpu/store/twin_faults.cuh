// SPDX-License-Identifier: Apache-2.0
// What a store in host memory refuses and one on a device tells late.
#pragma once

#include <gtest/gtest.h>

#include "tests/gpu/store/kv_store_twins.cuh"

namespace tierkv::testing {

// A value of a first chunk that fp16 does not hold, on its way to pages, ring or sinks: the kernels
// tell for it what the host does.
inline void expect_values_are_told(KvTwins* t, int32_t tokens, int32_t tries) {
  const CacheLayout& l = t->device().config().layout;
  for (int32_t tried = 0; tried < tries; ++tried) {
    t->add();
    const KvTwins::Live live = t->live().back();
    const SequenceList host = {&live.host, 1}, device = {&live.device, 1};
    TwinTokens x = t->draw(1, tokens);
    const size_t layer_values = x.k.size() / l.num_layers;
    const int32_t layer = t->pick(0, l.num_layers - 1);
    const bool is_beyond = l.dtype == DType::kBFloat16 && t->chance(0.7);
    const auto at = static_cast<size_t>(t->pick(0, static_cast<int32_t>(layer_values) - 1));
    (t->chance(0.5) ? x.k : x.v)[layer * layer_values + at] =
        is_beyond ? 0xff00 : 0x7fff;  // or NaN
    KvTwins::expect_ok(t->host().begin(host, tokens));
    KvTwins::expect_ok(t->device().begin(device, tokens));
    for (int32_t of = 0; of <= layer; ++of) {
      const Status refused = t->host().append(t->call(host, of, tokens, x, nullptr));
      KvTwins::expect_ok(t->device().append(t->call(device, of, tokens, x, t)));
      const Status told = t->device().take_status();
      EXPECT_EQ(told.code(), refused.code()) << refused.message();
      if (of < layer) continue;
      const StatusCode expected = is_beyond ? StatusCode::kOutOfRange : StatusCode::kNonFinite;
      EXPECT_EQ(refused.code(), expected);
      const std::string where = "layer " + std::to_string(layer) + ", kv_head " +
                                std::to_string(at / l.head_dim % l.num_kv_heads);
      EXPECT_NE(told.message().find(where), std::string::npos) << told.message();
    }
    t->release(t->live().size() - 1);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace tierkv::testing

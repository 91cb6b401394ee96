// SPDX-License-Identifier: Apache-2.0
// Calls that a store on a device and one in host memory get together.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/store/kv_store_twins.cuh"
#include "tests/gpu/store/twin_imports.cuh"

namespace tierkv::testing {

// Random calls of both stores; sequences get `longest` tokens at most.
inline void random_call(KvTwins* t, int32_t longest, DType dtype) {
  const StoreConfig& config = t->device().config();
  const auto& live = t->live();
  const int32_t layer = t->pick(0, config.layout.num_layers - 1), kind = t->pick(0, 19);
  const bool is_full = static_cast<int32_t>(live.size()) == config.max_sequences;
  if (live.empty() || (kind == 0 && !is_full)) return t->add();
  const auto one = static_cast<size_t>(t->pick(0, static_cast<int32_t>(live.size()) - 1));
  if (kind == 1) return t->release(one);
  if (kind == 2 && !is_full) return t->fork(one);
  if (kind == 3) return t->truncate(one, t->pick(0, live[one].tokens));
  if (kind == 4) return t->truncate(one, std::max(0, live[one].tokens - t->pick(0, 12)));
  if (kind == 5 && !is_full) return exchange(t, one);
  if (kind == 6) return t->expect_decoded(one, layer, dtype);
  std::vector<size_t> who = t->some();
  int32_t most = 0;
  for (const size_t i : who) most = std::max(most, live[i].tokens);
  const int32_t tokens = t->chance(0.7) ? t->pick(1, 8) : t->pick(9, longest / 2);
  if (kind < 14 && most + tokens <= longest) return t->extend(who, tokens);
  const int32_t q_len = t->chance(0.7) ? t->pick(1, 8) : t->pick(9, 40);
  std::erase_if(who, [&](size_t i) { return live[i].tokens < q_len; });
  if (!who.empty()) t->attend(who, layer, q_len, dtype);
}

// Significances that are faults are as good as none, in a first chunk and in later ones.
inline void expect_faults_are_unknown(KvTwins* t, int32_t tokens) {
  t->leave_out_significances();
  t->add();
  const CacheLayout& l = t->device().config().layout;
  const KvTwins::Live& live = t->live().back();
  const SequenceList host = {&live.host, 1}, device = {&live.device, 1};
  for (int32_t chunk = 0; chunk < 3; ++chunk) {
    const TwinTokens x = t->draw(1, tokens);
    TwinTokens faulty = x;
    faulty.significance.resize(static_cast<size_t>(l.num_layers) * l.num_kv_heads * tokens);
    for (float& s : faulty.significance) {
      s = std::vector<float>{NAN, -1.0f, INFINITY, -INFINITY}[static_cast<size_t>(t->pick(0, 3))];
    }
    KvTwins::expect_ok(t->host().begin(host, tokens));
    KvTwins::expect_ok(t->device().begin(device, tokens));
    for (int32_t layer = 0; layer < l.num_layers; ++layer) {
      KvTwins::expect_ok(t->host().append(t->call(host, layer, tokens, x, nullptr)));
      KvTwins::expect_ok(t->device().append(t->call(device, layer, tokens, faulty, t)));
    }
    EXPECT_FALSE(t->device().take_status());
  }
  EXPECT_EQ(*t->host().export_sequence(live.host), *t->device().export_sequence(live.device));
}

// bfloats: attention and decoded tokens are bfloat16 half of the time.
inline void live_together(KvTwins* t, int32_t calls, int32_t longest, bool bfloats) {
  for (int32_t i = 0; i < calls; ++i) {
    SCOPED_TRACE("call " + std::to_string(i));
    random_call(t, longest, bfloats && t->chance(0.5) ? DType::kBFloat16 : DType::kFloat16);
    if (i % 5 == 4) t->expect_equal();
    if (::testing::Test::HasFatalFailure()) return;
  }
  t->expect_equal();
}

// What calls of others leave on the device between the layers of a step or chunk.
inline void expect_calls_come_between(TwinChoice choice, std::mt19937* rng) {
  choice.window = 160;
  choice.num_layers = 4;
  choice.max_tokens = 400;
  KvTwins t(twin_config(choice), rng);
  for (int32_t i = 0; i < 3; ++i) t.add();
  t.extend({0, 1, 2}, 12);
  for (int32_t i = 0; i < 12; ++i) {
    SCOPED_TRACE("round " + std::to_string(i));
    const int32_t tokens = t.chance(0.7) ? t.pick(1, 2) : t.pick(9, 20);
    const std::vector<size_t> who =
        t.chance(0.5) ? std::vector<size_t>{0, 1} : std::vector<size_t>{1, 0};
    t.extend(who, tokens, [&] {
      const int32_t kind = t.pick(0, 5);
      if (kind == 0) t.attend({2}, 1, 2, DType::kFloat16);
      if (kind == 1) t.extend({2}, t.pick(1, 2));
      if (kind == 2) t.attend(who, 0, 1, DType::kFloat16);
    });
    t.attend({1, 0}, 1, 1, DType::kFloat16);
    t.attend(who, 0, 2, DType::kFloat16);
    if (::testing::Test::HasFatalFailure()) return;
  }
  t.expect_equal();
}

}  // namespace tierkv::testing

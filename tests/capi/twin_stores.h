// A C and a C++ host store that get the same calls; each call compares status, message and results.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/c_structs.h"
#include "tests/support/random_input.h"
#include "tierkv/cold.h"
#include "tierkv/store.h"

namespace tierkv::test {

using testing::RandomInput;

inline constexpr int32_t kLayers = 2, kKvHeads = 2, kQHeads = 4, kHeadDim = 64, kMaxTokens = 150;

inline tkv_tier_policy small_policy() {
  tkv_tier_policy p = make<tkv_tier_policy>();
  p.alpha_high = 1;
  p.alpha_low = 0.3;
  p.window_tokens = 8;
  p.sink_tokens = 2;
  return p;
}

inline tkv_store_config small_config(const tkv_tier_policy* policy) {
  tkv_store_config c = make<tkv_store_config>();
  c.num_layers = kLayers;
  c.num_q_heads = kQHeads;
  c.num_kv_heads = kKvHeads;
  c.head_dim = kHeadDim;
  c.policy = policy;
  c.page_bytes = 1920;
  c.num_pages = 90;
  c.max_sequences = 4;
  c.max_tokens = kMaxTokens;
  return c;
}

inline KvStoreConfig same_in_cpp() {
  KvStoreConfig c;
  c.layout.num_layers = kLayers;
  c.layout.num_q_heads = kQHeads;
  c.layout.num_kv_heads = kKvHeads;
  c.layout.head_dim = kHeadDim;
  c.layout.sm_scale = 0.125;
  c.policy = {1.0, 0.3, 8, 2};
  c.page_bytes = 1920;
  c.num_pages = 90;
  c.max_sequences = 4;
  c.max_tokens = kMaxTokens;
  return c;
}

// The same calls to a C and a C++ store; each compares status, message and results.
class Twins {
 public:
  Twins() : cpp_(std::move(*KvStore::create(same_in_cpp()))) {
    const tkv_tier_policy policy = small_policy();
    const tkv_store_config config = small_config(&policy);
    EXPECT_EQ(tkv_store_create(&config, &c_, &error_), TKV_OK) << error_.message;
  }
  Twins(const tkv_store_config& c, const KvStoreConfig& cpp)
      : cpp_(std::move(*KvStore::create(cpp))) {
    EXPECT_EQ(tkv_store_create(&c, &c_, &error_), TKV_OK) << error_.message;
  }
  ~Twins() { tkv_store_destroy(c_); }
  Twins(const Twins&) = delete;
  Twins& operator=(const Twins&) = delete;

  struct Pair {
    tkv_sequence_id c = 0;
    SequenceId cpp;
  };

  StatusCode add(Pair* id) {
    return made(tkv_store_add_sequence(c_, &id->c, &error_), *id, cpp_->add_sequence());
  }
  StatusCode fork(Pair from, Pair* id) {
    return made(tkv_store_fork(c_, from.c, &id->c, &error_), *id, cpp_->fork(from.cpp));
  }
  StatusCode begin_prompt(Pair id, int32_t n) {
    return same(tkv_store_begin_prompt(c_, &id.c, 1, n, &error_),
                cpp_->begin_prompt({&id.cpp, 1}, n));
  }
  StatusCode end_prompt(Pair id) {
    return same(tkv_store_end_prompt(c_, &id.c, 1, &error_), cpp_->end_prompt({&id.cpp, 1}));
  }
  StatusCode begin_step(Pair id, int32_t n) {
    return same(tkv_store_begin_step(c_, &id.c, 1, n, &error_), cpp_->begin_step({&id.cpp, 1}, n));
  }
  StatusCode truncate(Pair id, int32_t n) {
    return same(tkv_store_truncate(c_, id.c, n, &error_), cpp_->truncate(id.cpp, n));
  }
  StatusCode release(Pair id) {
    return same(tkv_store_release(c_, id.c, &error_), cpp_->release(id.cpp));
  }
  StatusCode append(Pair id, int32_t layer, int32_t n, const void* k, const void* v) {
    tkv_append_call call = make<tkv_append_call>();
    call.sequences = &id.c;
    call.num_sequences = 1;
    call.layer = layer;
    call.tokens = n;
    call.k = k;
    call.v = v;
    return same(tkv_store_append(c_, &call, &error_), cpp_->append({{&id.cpp, 1}, layer, n, k, v}));
  }
  StatusCode score_prompt(Pair id, int32_t layer, const float* x) {
    tkv_prompt_scores scores = make<tkv_prompt_scores>();
    scores.sequences = &id.c;
    scores.num_sequences = 1;
    scores.layer = layer;
    scores.significance = x;
    scores.stride = kMaxTokens;
    return same(tkv_store_score_prompt(c_, &scores, &error_),
                cpp_->score_prompt({{&id.cpp, 1}, layer, x, kMaxTokens}));
  }
  StatusCode update_scores(Pair id, int32_t layer, int32_t back, const float* x) {
    tkv_score_update update = make<tkv_score_update>();
    update.sequences = &id.c;
    update.num_sequences = 1;
    update.layer = layer;
    update.back = back;
    update.probabilities = x;
    update.stride = kMaxTokens;
    return same(tkv_store_update_scores(c_, &update, &error_),
                cpp_->update_scores({{&id.cpp, 1}, layer, back, x, kMaxTokens}));
  }
  // Returns what the queries saw: [q_len, kKvHeads, kMaxTokens].
  std::vector<float> attend(Pair id, int32_t layer, const void* q, bool count_query = false,
                            int32_t q_len = 1, const float* sinks = nullptr) {
    struct Results {
      explicit Results(int32_t queries)
          : out(queries * kQHeads * kHeadDim, 0x5a5a),
            lse(queries * kQHeads, -77),
            p(queries * kKvHeads * kMaxTokens, -77) {}
      std::vector<uint16_t> out;
      std::vector<float> lse, p;
    } c(q_len), cpp(q_len);
    tkv_attend_request r = make<tkv_attend_request>();
    r.sequences = &id.c;
    r.num_sequences = 1;
    r.layer = layer;
    r.q = q;
    r.out = c.out.data();
    r.lse = c.lse.data();
    r.probabilities = c.p.data();
    r.stride = kMaxTokens;
    r.count_query = count_query ? 1 : 0;
    r.q_len = q_len == 1 ? 0 : q_len;  // the default
    r.sinks = sinks;
    AttendRequest other;
    other.sequences = {&id.cpp, 1};
    other.layer = layer;
    other.q = q;
    other.out = cpp.out.data();
    other.lse = cpp.lse.data();
    other.probabilities = cpp.p.data();
    other.stride = kMaxTokens;
    other.count_query = count_query;
    other.q_len = q_len;
    other.sinks = sinks;
    same(tkv_store_attend(c_, &r, &error_), cpp_->attend(other));
    EXPECT_EQ(c.out, cpp.out);
    EXPECT_EQ(c.lse, cpp.lse);
    EXPECT_EQ(c.p, cpp.p);
    return c.p;
  }
  // Equal states give equal bytes.
  std::vector<uint8_t> exported(Pair id) {
    tkv_buffer buffer = make<tkv_buffer>();
    const Result<std::vector<uint8_t>> bytes = cpp_->export_sequence(id.cpp);
    const tkv_status status = tkv_store_export_sequence(c_, id.c, &buffer, &error_);
    if (!bytes) {
      same(status, bytes.status());
      return {};
    }
    EXPECT_EQ(status, TKV_BUFFER_TOO_SMALL);
    EXPECT_EQ(buffer.size, bytes->size());
    std::vector<uint8_t> c(buffer.size, 0x5a);
    buffer.data = c.data();
    buffer.capacity = c.size();
    EXPECT_EQ(tkv_store_export_sequence(c_, id.c, &buffer, &error_), TKV_OK) << error_.message;
    EXPECT_TRUE(c == *bytes);
    return c;
  }
  StatusCode import(const std::vector<uint8_t>& bytes, Pair* id) {
    return made(tkv_store_import_sequence(c_, bytes.data(), bytes.size(), &id->c, &error_), *id,
                cpp_->import_sequence(bytes.data(), bytes.size()));
  }
  // A way through the cold tier: the same containers, the same state.
  StatusCode through_the_cold(Pair id, Pair* back) {
    std::vector<uint8_t> c(1 << 20);
    tkv_buffer buffer = make<tkv_buffer>();
    buffer.data = c.data();
    buffer.capacity = c.size();
    const Result<std::vector<uint8_t>> cpp = save_sequence(*cpp_, id.cpp, {true, 1});
    const tkv_status status = tkv_store_save_sequence(c_, id.c, 1, 0, &buffer, &error_);
    same(status, cpp.status());
    if (!cpp) return cpp.status().code();
    c.resize(buffer.size);
    EXPECT_TRUE(c == *cpp);
    return made(tkv_store_load_sequence(c_, c.data(), c.size(), 2, &back->c, &error_), *back,
                load_sequence(*cpp_, cpp->data(), cpp->size()));
  }
  void compare_stats() {
    tkv_store_stats c = make<tkv_store_stats>();
    EXPECT_EQ(tkv_store_get_stats(c_, &c, &error_), TKV_OK);
    const StoreStats cpp = *cpp_->stats();
    const int64_t tokens[] = {c.window_tokens, c.high_tokens, c.low_tokens, c.pruned_tokens};
    for (int32_t t = 0; t < kNumTiers; ++t) EXPECT_EQ(tokens[t], cpp.tokens[t]) << t;
    EXPECT_EQ(c.sequences, cpp.sequences);
    EXPECT_EQ(c.pages, cpp.pages);
    EXPECT_EQ(c.pages_free, cpp.pages_free);
    EXPECT_EQ(c.pages_shared, cpp.pages_shared);
    EXPECT_EQ(c.page_bytes, cpp.page_bytes);
    EXPECT_EQ(c.raw_bytes, cpp.raw_bytes);
    EXPECT_EQ(c.nominal_bytes, cpp.nominal_bytes);
  }
  tkv_store* c() { return c_; }
  KvStore& cpp() { return *cpp_; }

 private:
  StatusCode same(tkv_status c, const Status& cpp) {
    EXPECT_EQ(c, static_cast<tkv_status>(cpp.code())) << error_.message << " / " << cpp.message();
    EXPECT_EQ(std::string(error_.message), cpp.message());
    return cpp.code();
  }
  StatusCode made(tkv_status c, Pair& id, const Result<SequenceId>& cpp) {
    if (cpp) id.cpp = *cpp;
    return same(c, cpp.status());
  }

  tkv_error error_ = make<tkv_error>();
  tkv_store* c_ = nullptr;
  std::unique_ptr<KvStore> cpp_;
};

inline void fill_prompt(Twins& twins, RandomInput& input, Twins::Pair id, int32_t n) {
  if (twins.begin_prompt(id, n) != StatusCode::kOk) return;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const auto k = input.values(DType::kFloat16, n * kKvHeads, kHeadDim);
    const auto v = input.values(DType::kFloat16, n * kKvHeads, kHeadDim);
    EXPECT_EQ(twins.append(id, layer, n, k.data(), v.data()), StatusCode::kOk);
    const auto scores = input.scores(kKvHeads * kMaxTokens, n);
    EXPECT_EQ(twins.score_prompt(id, layer, scores.data()), StatusCode::kOk);
  }
}

// with_sinks: some of the calls have learned sinks, which a basis with means refuses.
inline void step(Twins& twins, RandomInput& input, Twins::Pair id, int32_t n,
                 bool with_sinks = true) {
  if (twins.begin_step(id, n) != StatusCode::kOk) return;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const auto k = input.values(DType::kFloat16, n * kKvHeads, kHeadDim);
    const auto v = input.values(DType::kFloat16, n * kKvHeads, kHeadDim);
    const int32_t q_len = input.uniform(1, n);
    const auto q = input.values(DType::kFloat16, q_len * kQHeads, kHeadDim);
    EXPECT_EQ(twins.append(id, layer, n, k.data(), v.data()), StatusCode::kOk);
    const bool count_query = input.chance(0.5);
    const float sinks[kQHeads] = {input.real(-30, 30), 1e4f, -1e4f, -INFINITY};
    const std::vector<float> seen = twins.attend(id, layer, q.data(), count_query, q_len,
                                                 with_sinks && input.chance(0.3) ? sinks : nullptr);
    for (int32_t j = 0; j < q_len && !count_query; ++j) {
      const float* of_query = seen.data() + j * kKvHeads * kMaxTokens;
      EXPECT_EQ(twins.update_scores(id, layer, q_len - 1 - j, of_query), StatusCode::kOk);
    }
  }
}

}  // namespace tierkv::test

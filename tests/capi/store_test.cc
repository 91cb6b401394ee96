// The store through the C ABI: the same results, states and refusals as the C++ host store, call by
// call.
#include "tierkv/store.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <numeric>

#include "tests/capi/structs.h"
#include "tests/store/random_input.h"

namespace tierkv::test {
namespace {

using testing::RandomInput;

constexpr int32_t kLayers = 2, kKvHeads = 2, kQHeads = 4, kHeadDim = 64, kMaxTokens = 150;

tkv_tier_policy small_policy() {
  tkv_tier_policy p = make<tkv_tier_policy>();
  p.alpha_high = 1;
  p.alpha_low = 0.3;
  p.window_tokens = 8;
  p.sink_tokens = 2;
  return p;
}

tkv_store_config small_config(const tkv_tier_policy* policy) {
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

KvStoreConfig same_in_cpp() {
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
  // Returns what the queries saw.
  std::vector<float> attend(Pair id, int32_t layer, const void* q) {
    struct Results {
      std::vector<uint16_t> out = std::vector<uint16_t>(kQHeads * kHeadDim, 0x5a5a);
      std::vector<float> lse = std::vector<float>(kQHeads, -77),
                         p = std::vector<float>(kKvHeads * kMaxTokens, -77);
    } c, cpp;
    tkv_attend_request r = make<tkv_attend_request>();
    r.sequences = &id.c;
    r.num_sequences = 1;
    r.layer = layer;
    r.q = q;
    r.out = c.out.data();
    r.lse = c.lse.data();
    r.probabilities = c.p.data();
    r.stride = kMaxTokens;
    AttendRequest other;
    other.sequences = {&id.cpp, 1};
    other.layer = layer;
    other.q = q;
    other.out = cpp.out.data();
    other.lse = cpp.lse.data();
    other.probabilities = cpp.p.data();
    other.stride = kMaxTokens;
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

void fill_prompt(Twins& twins, RandomInput& input, Twins::Pair id, int32_t n) {
  if (twins.begin_prompt(id, n) != StatusCode::kOk) return;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const auto k = input.values(DType::kFloat16, n * kKvHeads, kHeadDim);
    const auto v = input.values(DType::kFloat16, n * kKvHeads, kHeadDim);
    EXPECT_EQ(twins.append(id, layer, n, k.data(), v.data()), StatusCode::kOk);
    const auto scores = input.scores(kKvHeads * kMaxTokens, n);
    EXPECT_EQ(twins.score_prompt(id, layer, scores.data()), StatusCode::kOk);
  }
}

void step(Twins& twins, RandomInput& input, Twins::Pair id, int32_t n) {
  if (twins.begin_step(id, n) != StatusCode::kOk) return;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const auto k = input.values(DType::kFloat16, n * kKvHeads, kHeadDim);
    const auto v = input.values(DType::kFloat16, n * kKvHeads, kHeadDim);
    const auto q = input.values(DType::kFloat16, kQHeads, kHeadDim);
    EXPECT_EQ(twins.append(id, layer, n, k.data(), v.data()), StatusCode::kOk);
    const std::vector<float> seen = twins.attend(id, layer, q.data());
    EXPECT_EQ(twins.update_scores(id, layer, input.uniform(0, n - 1), seen.data()),
              StatusCode::kOk);
  }
}

TEST(CapiStore, ATraceHasTheResultsOfTheCppStore) {
  RandomInput input;
  Twins twins;
  std::vector<Twins::Pair> live, stale = {{}};
  std::map<StatusCode, int> seen;
  for (int32_t i = 0; i < 120; ++i) {
    const int32_t what = input.uniform(0, 9);
    Twins::Pair id = !live.empty() && input.chance(0.9)
                         ? live[input.uniform(0, static_cast<int32_t>(live.size()) - 1)]
                         : stale[input.uniform(0, static_cast<int32_t>(stale.size()) - 1)];
    Twins::Pair other;
    if (what == 0) {
      if (seen[twins.add(&other)]++, other.c != 0) {
        live.push_back(other);
        fill_prompt(twins, input, other, input.uniform(1, 60));
        seen[twins.end_prompt(other)]++;
      }
    } else if (what == 1) {
      if (seen[twins.fork(id, &other)]++, other.c != 0) live.push_back(other);
    } else if (what == 2) {
      seen[twins.truncate(id, input.uniform(0, 40))]++;
    } else if (what == 3 && input.chance(0.5)) {
      seen[twins.release(id)]++;
      stale.push_back(id);
      live.erase(std::remove_if(live.begin(), live.end(),
                                [&](const Twins::Pair& p) { return p.c == id.c; }),
                 live.end());
    } else if (what == 4) {
      const std::vector<uint8_t> bytes = twins.exported(id);
      if (!bytes.empty() && (seen[twins.import(bytes, &other)]++, other.c != 0)) {
        live.push_back(other);
      }
    } else {
      step(twins, input, id, input.uniform(1, 8));
    }
    twins.compare_stats();
    for (const Twins::Pair& p : live) twins.exported(p);
  }
  EXPECT_GT(seen[StatusCode::kOk], 0);
}

TEST(CapiStore, IdsGoStaleAndAreNeverZero) {
  Twins twins;
  Twins::Pair id, again;
  ASSERT_EQ(twins.add(&id), StatusCode::kOk);
  EXPECT_NE(id.c, 0u);
  EXPECT_EQ(twins.release(id), StatusCode::kOk);
  EXPECT_EQ(twins.release(id), StatusCode::kStaleSequence);
  ASSERT_EQ(twins.add(&again), StatusCode::kOk);
  EXPECT_NE(again.c, id.c);
  EXPECT_EQ(twins.begin_prompt(id, 3), StatusCode::kStaleSequence);
  EXPECT_EQ(twins.truncate(id, 0), StatusCode::kStaleSequence);
  int32_t tokens = -5;
  for (const tkv_sequence_id bad :
       {uint64_t{0}, UINT64_MAX, uint64_t{1} << 31, uint64_t{5}, again.c + (uint64_t{1} << 32)}) {
    EXPECT_EQ(tkv_store_release(twins.c(), bad, nullptr), TKV_STALE_SEQUENCE) << bad;
    EXPECT_EQ(tkv_store_num_tokens(twins.c(), bad, &tokens, nullptr), TKV_STALE_SEQUENCE);
  }
  EXPECT_EQ(tokens, -5);
  EXPECT_EQ(tkv_store_num_tokens(twins.c(), again.c, &tokens, nullptr), TKV_OK);
  EXPECT_EQ(tokens, 0);
}

TEST(CapiStore, RefusesBadListsAndValuesAsTheCppStoreDoes) {
  RandomInput input;
  Twins twins;
  Twins::Pair id;
  ASSERT_EQ(twins.add(&id), StatusCode::kOk);
  fill_prompt(twins, input, id, 20);
  const tkv_sequence_id twice[] = {id.c, id.c};
  tkv_error error = make<tkv_error>();
  EXPECT_EQ(tkv_store_end_prompt(twins.c(), twice, 2, &error), TKV_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(error.message, "twice"), nullptr) << error.message;
  for (const int32_t count : {0, -1, 5, INT32_MAX}) {
    EXPECT_EQ(tkv_store_end_prompt(twins.c(), twice, count, &error), TKV_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(error.message, "count"), nullptr) << error.message;
  }
  EXPECT_EQ(tkv_store_end_prompt(twins.c(), nullptr, 1, &error), TKV_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(error.message, "null"), nullptr) << error.message;
  EXPECT_EQ(twins.begin_step(id, 1), StatusCode::kInvalidArgument);  // still in its prompt
  EXPECT_EQ(twins.begin_prompt(id, kMaxTokens), StatusCode::kOutOfRange);
  ASSERT_EQ(twins.end_prompt(id), StatusCode::kOk);
  ASSERT_EQ(twins.begin_step(id, 1), StatusCode::kOk);
  std::vector<uint16_t> values(kKvHeads * kHeadDim, 0x3c00);
  values[77] = 0x7c00;
  EXPECT_EQ(twins.append(id, 0, 1, values.data(), values.data()), StatusCode::kNonFinite);
  EXPECT_EQ(twins.append(id, kLayers, 1, values.data(), values.data()),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(twins.append(id, 0, 1, nullptr, values.data()), StatusCode::kInvalidArgument);
  values[77] = 0;
  EXPECT_EQ(twins.append(id, 0, 1, values.data(), values.data()), StatusCode::kOk);
  const std::vector<float> negative(kKvHeads * kMaxTokens, -1);
  EXPECT_EQ(twins.update_scores(id, 0, 0, negative.data()), StatusCode::kInvalidArgument);
  EXPECT_EQ(tkv_store_note_replay(twins.c(), &id.c, 1, 1, &error), TKV_UNSUPPORTED);
  EXPECT_EQ(tkv_store_take_status(twins.c(), &error), TKV_OK);
  Twins::Pair copy;
  EXPECT_EQ(twins.import({1, 2, 3}, &copy), StatusCode::kCorrupt);
  EXPECT_EQ(copy.c, 0u);
}

TEST(CapiStore, TellsWhenPagesRunOut) {
  Twins twins;
  RandomInput input;
  StatusCode last = StatusCode::kOk;
  for (int32_t i = 0; i < 4 && last == StatusCode::kOk; ++i) {
    Twins::Pair id;
    ASSERT_EQ(twins.add(&id), StatusCode::kOk);
    last = twins.begin_prompt(id, kMaxTokens);
  }
  EXPECT_EQ(last, StatusCode::kOutOfPages);
}

TEST(CapiStore, AZeroedConfigHasTheDefaultsOfTheCppOne) {
  KvStoreConfig cpp = same_in_cpp();
  cpp.policy = {};
  cpp.page_bytes = 0;
  tkv_store_config c = small_config(nullptr);
  c.page_bytes = 0;
  tkv_store* store = nullptr;
  tkv_error error = make<tkv_error>();
  ASSERT_EQ(tkv_store_create(&c, &store, &error), TKV_OK) << error.message;
  tkv_store_info info = make<tkv_store_info>();
  EXPECT_EQ(tkv_store_get_info(store, &info, &error), TKV_OK);
  const auto other = std::move(*KvStore::create(cpp));
  EXPECT_EQ(info.page_bytes, other->page_bytes());
  EXPECT_EQ(info.on_device, 0);
  // Bytes of the one are taken by the other only where layout, formats, window and sinks are equal.
  const SequenceId id = *other->add_sequence();
  ASSERT_TRUE(other->begin_prompt({&id, 1}, 1));
  const std::vector<uint16_t> x(kKvHeads * kHeadDim, 0x3c00);
  for (int32_t l = 0; l < kLayers; ++l) {
    ASSERT_TRUE(other->append({{&id, 1}, l, 1, x.data(), x.data()}));
  }
  ASSERT_TRUE(other->end_prompt({&id, 1}));
  const std::vector<uint8_t> bytes = *other->export_sequence(id);
  tkv_sequence_id copy = 0;
  EXPECT_EQ(tkv_store_import_sequence(store, bytes.data(), bytes.size(), &copy, &error), TKV_OK)
      << error.message;
  tkv_store_destroy(store);
}

// I - 2 u u^T: its own inverse.
std::vector<float> reflection(RandomInput* input) {
  std::vector<float> u(kHeadDim), m(kHeadDim * kHeadDim);
  float norm = 0;
  for (float& x : u) {
    x = input->real(-1, 1);
    norm += x * x;
  }
  for (int32_t i = 0; i < kHeadDim; ++i) {
    for (int32_t j = 0; j < kHeadDim; ++j) {
      m[i * kHeadDim + j] = (i == j ? 1.0f : 0.0f) - 2 * u[i] * u[j] / norm;
    }
  }
  return m;
}

// Keys rotated without their means, values reflected, as C and C++ say it.
class BasisConfigs {
 public:
  explicit BasisConfigs(RandomInput* input) : policy_(small_policy()) {
    for (int32_t row = 0; row < kLayers * kKvHeads; ++row) {
      std::vector<float> mean(kHeadDim), matrix = reflection(input);
      for (float& x : mean) x = input->real(-2, 2);
      means_.insert(means_.end(), mean.begin(), mean.end());
      matrices_.insert(matrices_.end(), matrix.begin(), matrix.end());
      Basis key = Basis::hadamard(kHeadDim);
      key.mean = Basis::mean_removed(mean).mean;
      cpp_basis_.keys.push_back(key);
      Basis value = Basis::matrix({}, matrix, matrix);
      value.head_dim = kHeadDim;
      cpp_basis_.values.push_back(value);
    }
    cpp_basis_.num_layers = kLayers;
    cpp_basis_.num_kv_heads = kKvHeads;
    key_ = make<tkv_basis>();
    key_.kind = TKV_BASIS_HADAMARD;
    key_.means = means_.data();
    value_ = make<tkv_basis>();
    value_.kind = TKV_BASIS_MATRIX;
    value_.forward = value_.inverse = matrices_.data();
  }
  tkv_store_config c() const {
    tkv_store_config config = small_config(&policy_);
    config.key_basis = &key_;
    config.value_basis = &value_;
    return config;
  }
  KvStoreConfig cpp() const {
    KvStoreConfig config = same_in_cpp();
    config.basis = std::make_shared<const CacheBasis>(cpp_basis_);
    return config;
  }
  tkv_basis& key() { return key_; }
  tkv_basis& value() { return value_; }

 private:
  tkv_tier_policy policy_;
  std::vector<float> means_, matrices_;
  CacheBasis cpp_basis_;
  tkv_basis key_, value_;
};

TEST(CapiStore, BasesAreThoseOfTheCppStore) {
  RandomInput input;
  const BasisConfigs configs(&input);
  Twins twins(configs.c(), configs.cpp());
  Twins::Pair id;
  ASSERT_EQ(twins.add(&id), StatusCode::kOk);
  fill_prompt(twins, input, id, 40);
  ASSERT_EQ(twins.end_prompt(id), StatusCode::kOk);
  for (int32_t i = 0; i < 5; ++i) step(twins, input, id, 1);
  const std::vector<uint8_t> bytes = twins.exported(id);
  EXPECT_FALSE(bytes.empty());
  Twins without;
  Twins::Pair copy;
  EXPECT_EQ(without.import(bytes, &copy), StatusCode::kInvalidArgument);
}

TEST(CapiStore, BasesAreRefusedByName) {
  RandomInput input;
  BasisConfigs configs(&input);
  BasisConfigs good = configs;
  tkv_error error = make<tkv_error>();
  tkv_store* store = nullptr;
  const auto refused = [&](const char* words) {
    const tkv_store_config c = configs.c();
    EXPECT_EQ(tkv_store_create(&c, &store, &error), TKV_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(error.message, words), nullptr) << error.message;
    EXPECT_EQ(store, nullptr);
    configs.key() = good.key();
    configs.value() = good.value();
  };
  configs.key().kind = 4;
  refused("key_basis: kind");
  configs.key().kind = TKV_BASIS_NONE;
  refused("key_basis: means without a basis");
  configs.key().kind = TKV_BASIS_MEAN;
  configs.key().means = nullptr;
  refused("key_basis: means is null");
  configs.value().inverse = nullptr;
  refused("value_basis: forward or inverse");
  configs.value().struct_size = 0;
  refused("value_basis: basis: struct_size");
  const std::vector<float> ones(kLayers * kKvHeads * kHeadDim * kHeadDim, 1.0f);
  configs.value().inverse = ones.data();
  refused("not the identity");
}

TEST(CapiStore, ConfigsAreRefusedByName) {
  tkv_tier_policy policy = small_policy();
  tkv_store_config c = small_config(&policy);
  tkv_error error = make<tkv_error>();
  tkv_store* store = nullptr;
  const auto refused = [&](tkv_status status, const char* word) {
    EXPECT_EQ(tkv_store_create(&c, &store, &error), status) << error.message;
    EXPECT_NE(std::strstr(error.message, word), nullptr) << error.message;
    EXPECT_EQ(store, nullptr);
    c = small_config(&policy);
  };
  c.num_pages = 0;
  refused(TKV_INVALID_ARGUMENT, "num_pages");
  c.dtype = 9;
  refused(TKV_INVALID_ARGUMENT, "dtype");
  c.head_dim = 80;
  refused(TKV_UNSUPPORTED, "head_dim");
  c.head_dim = -4;
  refused(TKV_INVALID_ARGUMENT, "head_dim");
  tkv_tier_format format = make<tkv_tier_format>();
  format.k_bits = 3;
  format.v_bits = 4;
  c.low_format = &format;
  refused(TKV_INVALID_ARGUMENT, "low_format");
  format.struct_size = 0;
  c.window_format = &format;
  refused(TKV_INVALID_ARGUMENT, "window_format: struct_size");
  policy.window_tokens = 7;
  refused(TKV_INVALID_ARGUMENT, "window_tokens");
}

TEST(CapiStore, ARequestOfAnEarlierVersionAsksForLess) {
  Twins twins;
  RandomInput input;
  Twins::Pair id;
  ASSERT_EQ(twins.add(&id), StatusCode::kOk);
  fill_prompt(twins, input, id, 5);
  const auto q = input.values(DType::kFloat16, kQHeads, kHeadDim);
  std::vector<uint16_t> out(kQHeads * kHeadDim, 0x5a5a);
  float probability = -5;
  tkv_attend_request r = make<tkv_attend_request>();
  r.struct_size = offsetof(tkv_attend_request, probabilities);
  r.sequences = &id.c;
  r.num_sequences = 1;
  r.q = q.data();
  r.out = out.data();
  r.probabilities = &probability;  // behind the struct as far as the library may know
  r.stride = 1;
  EXPECT_EQ(tkv_store_attend(twins.c(), &r, nullptr), TKV_OK);
  EXPECT_EQ(probability, -5);
  EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](uint16_t x) { return x != 0x5a5a; }));
}

TEST(CapiStore, ABuildWithoutCudaRefusesADeviceStoreByName) {
  const tkv_tier_policy policy = small_policy();
  tkv_store_config c = small_config(&policy);
  tkv_error error = make<tkv_error>();
  tkv_store* store = nullptr;
  const tkv_status status = tkv_store_create_device(&c, nullptr, &store, &error);
  if (TIERKV_HAVE_CUDA) {
    // kCuda where there is no device.
    EXPECT_TRUE(status == TKV_OK || status == TKV_CUDA) << tkv_status_string(status);
  } else {
    EXPECT_EQ(status, TKV_UNSUPPORTED);
    EXPECT_NE(std::strstr(error.message, "without CUDA"), nullptr) << error.message;
  }
  EXPECT_EQ(store != nullptr, status == TKV_OK);
  tkv_store_destroy(store);
  c.num_pages = 0;  // before any device is asked
  EXPECT_EQ(tkv_store_create_device(&c, nullptr, &store, &error), TKV_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace tierkv::test

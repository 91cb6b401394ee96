// What a store's configuration says in C is what it says in C++: defaults, bases, coded pages,
// refusals.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/capi/twin_stores.h"

namespace tierkv::test {
namespace {

TEST(CapiStoreConfig, AZeroedConfigHasTheDefaultsOfTheCppOne) {
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

TEST(CapiStoreConfig, BasesAreThoseOfTheCppStore) {
  RandomInput input;
  const BasisConfigs configs(&input);
  Twins twins(configs.c(), configs.cpp());
  Twins::Pair id;
  ASSERT_EQ(twins.add(&id), StatusCode::kOk);
  fill_prompt(twins, input, id, 40);
  ASSERT_EQ(twins.end_prompt(id), StatusCode::kOk);
  for (int32_t i = 0; i < 5; ++i) step(twins, input, id, 1, false);
  const std::vector<uint8_t> bytes = twins.exported(id);
  EXPECT_FALSE(bytes.empty());
  Twins without;
  Twins::Pair copy;
  EXPECT_EQ(without.import(bytes, &copy), StatusCode::kInvalidArgument);
}

TEST(CapiStoreConfig, BasesAreRefusedByName) {
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

// A coded store with means and codebooks of every source, as C and C++ say it.
class CodedConfigs {
 public:
  explicit CodedConfigs(RandomInput* input) {
    const int32_t rows = kLayers * kKvHeads;
    for (int32_t i = 0; i < rows; ++i) {
      key_steps_.push_back(input->real(0.3f, 1));
      value_steps_.push_back(input->real(0.3f, 1));
    }
    for (int32_t i = 0; i < rows * kHeadDim; ++i) means_.push_back(input->real(-1, 1));
    for (const tkv_component component : {TKV_KEY, TKV_VALUE}) {
      tkv_codebook_spec spec = make<tkv_codebook_spec>();
      spec.component = component;
      spec.head_dim = kHeadDim;
      spec.max_length = 11;
      spec.streams_per_lane = 2;
      std::vector<int16_t> codes(64 * kHeadDim);
      for (int16_t& c : codes) c = static_cast<int16_t>(input->uniform(-6, 6));
      tkv_codebook* book = nullptr;
      EXPECT_EQ(tkv_codebook_build(&spec, codes.data(), 64, &book, nullptr), TKV_OK);
      books_.push_back(book);
    }
    coded_ = make<tkv_coded_config>();
    coded_.key_steps = key_steps_.data();
    coded_.value_steps = value_steps_.data();
  }
  ~CodedConfigs() {
    for (tkv_codebook* book : books_) tkv_codebook_destroy(book);
  }
  CodedConfigs(const CodedConfigs&) = delete;
  CodedConfigs& operator=(const CodedConfigs&) = delete;

  tkv_coded_config& coded() { return coded_; }
  void give_means() {
    coded_.means = TKV_MEANS_GIVEN;
    coded_.key_means = coded_.value_means = means_.data();
  }
  void give_codebooks() {
    coded_.codebooks = TKV_CODEBOOKS_GIVEN;
    coded_.given = books_.data();
    coded_.num_given = static_cast<int32_t>(books_.size());
  }
  void measure_steps() {
    coded_.steps = TKV_STEPS_OF_PROMPT;
    coded_.key_steps = coded_.value_steps = nullptr;
    coded_.key_relative = 0.03f;
    coded_.value_relative = 0.06f;
  }
  void fix_blocks() {
    fixed_ = make<tkv_tier_format>();
    fixed_.k_bits = 8;
    fixed_.v_bits = 8;
    coded_.fixed_format = &fixed_;
    policy_ = make<tkv_tier_policy>();
    policy_.alpha_high = 2.5;
    policy_.window_tokens = 64;
    policy_.sink_tokens = 3;
  }
  tkv_store_config c() {
    tkv_store_config config = small_config(nullptr);
    config.page_bytes = 0;
    config.coded = &coded_;
    if (coded_.fixed_format != nullptr) config.policy = &policy_;
    return config;
  }
  KvStoreConfig cpp() const {
    KvStoreConfig config = same_in_cpp();
    config.policy = {};
    config.page_bytes = 0;
    config.coded.enabled = true;
    if (coded_.steps == TKV_STEPS_GIVEN) {
      config.coded.key_steps = key_steps_;
      config.coded.value_steps = value_steps_;
    } else {
      config.coded.steps = StepSource::kPrompt;
      config.coded.key_relative = coded_.key_relative;
      config.coded.value_relative = coded_.value_relative;
    }
    if (coded_.fixed_format != nullptr) {
      config.coded.fixed_blocks = true;
      config.coded.fixed_format = token_wise_tier(fixed_.k_bits, fixed_.v_bits);
      config.policy.alpha_high = policy_.alpha_high;
      config.policy.sink_tokens = policy_.sink_tokens;
    }
    if (coded_.means == TKV_MEANS_GIVEN) {
      config.coded.means = MeanSource::kGiven;
      config.coded.key_means = config.coded.value_means = means_;
    }
    if (coded_.means == TKV_MEANS_NONE) config.coded.means = MeanSource::kNone;
    if (coded_.codebooks == TKV_CODEBOOKS_GIVEN) {
      config.coded.codebooks = CodebookSource::kGiven;
      for (const tkv_codebook* book : books_) config.coded.given.push_back(serialised(book));
    }
    return config;
  }

 private:
  static std::vector<uint8_t> serialised(const tkv_codebook* book) {
    std::vector<uint8_t> bytes(1 << 16);
    tkv_buffer buffer = make<tkv_buffer>();
    buffer.data = bytes.data();
    buffer.capacity = bytes.size();
    EXPECT_EQ(tkv_codebook_serialize(book, &buffer, nullptr), TKV_OK);
    bytes.resize(buffer.size);
    return bytes;
  }

  std::vector<float> key_steps_, value_steps_, means_;
  std::vector<tkv_codebook*> books_;
  tkv_tier_format fixed_;
  tkv_tier_policy policy_;
  tkv_coded_config coded_;
};

TEST(CapiStoreConfig, CodedStoresAreThoseOfTheCppApi) {
  RandomInput input;
  for (int32_t variant = 0; variant < 5; ++variant) {
    CodedConfigs configs(&input);
    if (variant == 4) configs.fix_blocks();
    if (variant == 3) configs.measure_steps();
    if (variant == 1) configs.coded().means = TKV_MEANS_NONE;
    if (variant == 2) {
      configs.give_means();
      configs.give_codebooks();
    }
    Twins twins(configs.c(), configs.cpp());
    Twins::Pair id, copy;
    ASSERT_EQ(twins.add(&id), StatusCode::kOk);
    ASSERT_EQ(twins.begin_prompt(id, 140), StatusCode::kOk);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      const auto k = input.values(DType::kFloat16, 140 * kKvHeads, kHeadDim);
      EXPECT_EQ(twins.append(id, layer, 140, k.data(), k.data()), StatusCode::kOk);
    }
    ASSERT_EQ(twins.end_prompt(id), StatusCode::kOk) << variant;
    const auto q = input.values(DType::kFloat16, kQHeads, kHeadDim);
    const std::vector<float> seen = twins.attend(id, 1, q.data());
    EXPECT_EQ(twins.update_scores(id, 1, 0, seen.data()), StatusCode::kUnsupported);
    EXPECT_EQ(twins.fork(id, &copy), StatusCode::kOk);
    EXPECT_FALSE(twins.exported(copy).empty());
    twins.compare_stats();
  }
}

TEST(CapiStoreConfig, CodedConfigsAreRefusedByName) {
  RandomInput input;
  CodedConfigs configs(&input);
  const tkv_coded_config good = configs.coded();
  tkv_error error = make<tkv_error>();
  tkv_store* store = nullptr;
  const auto refused = [&](tkv_status status, const char* words) {
    const tkv_store_config c = configs.c();
    EXPECT_EQ(tkv_store_create(&c, &store, &error), status) << error.message;
    EXPECT_NE(std::strstr(error.message, words), nullptr) << error.message;
    EXPECT_EQ(store, nullptr);
    configs.coded() = good;
  };
  configs.coded().key_steps = nullptr;
  refused(TKV_INVALID_ARGUMENT, "coded: key_steps");
  configs.fix_blocks();
  tkv_tier_format odd = make<tkv_tier_format>();
  odd.k_bits = 8;
  odd.v_bits = 2;
  configs.coded().fixed_format = &odd;
  refused(TKV_UNSUPPORTED, "coded.fixed_format");
  configs.coded().steps = 2;
  refused(TKV_INVALID_ARGUMENT, "coded: steps");
  configs.measure_steps();
  configs.coded().key_relative = 0;
  refused(TKV_INVALID_ARGUMENT, "key_relative");
  configs.coded().means = 3;
  refused(TKV_INVALID_ARGUMENT, "coded: means");
  configs.coded().means = TKV_MEANS_GIVEN;
  refused(TKV_INVALID_ARGUMENT, "key_means");
  configs.coded().codebooks = -1;
  refused(TKV_INVALID_ARGUMENT, "coded: codebooks");
  configs.coded().num_given = 1;
  refused(TKV_INVALID_ARGUMENT, "coded: given is null");
  const tkv_codebook* none = nullptr;
  configs.coded().given = &none;
  configs.coded().num_given = 1;
  refused(TKV_INVALID_ARGUMENT, "coded: codebook 0");
  configs.coded().max_length = 15;
  refused(TKV_INVALID_ARGUMENT, "max_length");
}

TEST(CapiStoreConfig, ChannelWiseStoresAreThoseOfTheCppApi) {
  RandomInput input;
  tkv_tier_policy policy = make<tkv_tier_policy>();
  policy.alpha_high = 1;
  policy.window_tokens = 16;
  tkv_channel_config channel = make<tkv_channel_config>();
  channel.v_bits = 2;  // the others by default
  tkv_store_config c = small_config(&policy);
  c.channel = &channel;
  c.page_bytes = 0;
  c.score_interval = 0;
  c.window_format = c.high_format = c.low_format = nullptr;
  KvStoreConfig cpp;
  cpp.layout.num_layers = kLayers;
  cpp.layout.num_q_heads = kQHeads;
  cpp.layout.num_kv_heads = kKvHeads;
  cpp.layout.head_dim = kHeadDim;
  cpp.layout.sm_scale = 1 / std::sqrt(static_cast<double>(kHeadDim));
  cpp.policy.window_tokens = 16;
  cpp.num_pages = c.num_pages;
  cpp.max_sequences = c.max_sequences;
  cpp.max_tokens = c.max_tokens;
  cpp.channel.enabled = true;
  cpp.channel.v_bits = 2;
  Twins twins(c, cpp);
  Twins::Pair id, copy;
  ASSERT_EQ(twins.add(&id), StatusCode::kOk);
  ASSERT_EQ(twins.begin_prompt(id, 140), StatusCode::kOk);
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const auto k = input.values(DType::kFloat16, 140 * kKvHeads, kHeadDim);
    EXPECT_EQ(twins.append(id, layer, 140, k.data(), k.data()), StatusCode::kOk);
  }
  ASSERT_EQ(twins.end_prompt(id), StatusCode::kOk);
  const auto q = input.values(DType::kFloat16, kQHeads, kHeadDim);
  const std::vector<float> seen = twins.attend(id, 1, q.data());
  EXPECT_EQ(twins.update_scores(id, 1, 0, seen.data()), StatusCode::kUnsupported);
  EXPECT_EQ(twins.fork(id, &copy), StatusCode::kOk);
  EXPECT_FALSE(twins.exported(copy).empty());
  twins.compare_stats();
}

TEST(CapiStoreConfig, ConfigsAreRefusedByName) {
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

}  // namespace
}  // namespace tierkv::test

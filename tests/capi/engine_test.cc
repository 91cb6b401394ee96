// SPDX-License-Identifier: Apache-2.0
// An engine's cache through the C ABI, as far as it needs no device.
#include "tierkv/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/c_structs.h"
#include "tests/support/fresh_random.h"
#include "tierkv/half.h"

namespace tierkv::test {
namespace {

// Three sequences in blocks of 64 tokens, 2 kv_heads of 96 channels.
class CapiEngine : public RandomTest {
 protected:
  static constexpr int32_t kDim = 96, kHeads = 2, kQHeads = 6, kColumns = 2, kBlocks = 6;

  CapiEngine() {
    config_ = make<tkv_engine_config>();
    config_.num_q_heads = kQHeads;
    config_.num_kv_heads = kHeads;
    config_.head_dim = kDim;
    config_.k_bits = 4;
    config_.v_bits = 2;
    config_.dtype = TKV_BFLOAT16;
    config_.max_sequences = 3;
    config_.max_queries = 2;
    config_.max_blocks = kColumns;
    same_config_.num_q_heads = kQHeads;
    same_config_.num_kv_heads = kHeads;
    same_config_.head_dim = kDim;
    same_config_.format = {token_wise(4), norm_clipped()};
    same_config_.dtype = DType::kBFloat16;
    same_config_.sm_scale = 1 / std::sqrt(static_cast<double>(kDim));
    same_config_.max_sequences = 3;
    same_config_.max_queries = 2;
    same_config_.max_blocks = kColumns;

    blocks_.resize(kBlocks * same_config_.block_bytes() + kPageAlignment, 0xff);
    means_.resize(kHeads * kDim);
    reflections_.resize(kHeads * kDim);
    for (float& m : means_) m = normal_(rng_);
    EXPECT_TRUE(engine_key_reflections(same_config_, means_.data(), reflections_.data()));
    layer_ = make<tkv_engine_layer>();
    layer_.blocks = aligned(&blocks_);
    layer_.num_blocks = kBlocks;
    layer_.key_reflection = reflections_.data();
    for (size_t s = 0; s < lens_.size(); ++s) {
      for (int32_t t = 0; t < lens_[s]; ++t) {
        slots_.push_back(int64_t{table_[s * kColumns + t / 64]} * 64 + t % 64);
      }
    }
    k_ = random_bits(slots_.size() * kHeads * kDim);
    v_ = random_bits(slots_.size() * kHeads * kDim);
    q_ = random_bits(starts_.back() * kQHeads * kDim);
    out_.resize(q_.size());
    lse_.resize(starts_.back() * kQHeads);
    tokens_ = make<tkv_engine_tokens>();
    tokens_.k = k_.data();
    tokens_.v = v_.data();
    tokens_.slots = slots_.data();
    tokens_.count = static_cast<int64_t>(slots_.size());
    tokens_.errors = errors_;
    batch_ = make<tkv_engine_batch>();
    batch_.block_table = table_.data();
    batch_.table_columns = kColumns;
    batch_.num_sequences = batch_.count = 3;
    batch_.seq_lens = lens_.data();
    batch_.query_start_loc = starts_.data();
    batch_.queries = 2;
    batch_.num_blocks = kBlocks;
    queries_ = make<tkv_engine_queries>();
    queries_.q = q_.data();
    queries_.out = out_.data();
    queries_.lse = lse_.data();
    queries_.num_tokens = starts_.back();
    EXPECT_EQ(tkv_engine_create_host(&config_, &engine_, nullptr), TKV_OK);
  }
  ~CapiEngine() override { tkv_engine_destroy(engine_); }

  static uint8_t* aligned(std::vector<uint8_t>* x) {
    const auto at = reinterpret_cast<uintptr_t>(x->data());
    return x->data() + (kPageAlignment - at % kPageAlignment) % kPageAlignment;
  }
  std::vector<uint16_t> random_bits(size_t n) {
    std::vector<uint16_t> x(n);
    for (uint16_t& bits : x) bits = float_to_bfloat16(normal_(rng_));
    return x;
  }
  void refused(const tkv_engine_config& config, tkv_status status, const char* word) {
    tkv_error error = make<tkv_error>();
    tkv_engine* engine = nullptr;
    EXPECT_EQ(tkv_engine_validate(&config, &error), status) << error.message;
    EXPECT_NE(std::strstr(error.message, word), nullptr) << error.message;
    EXPECT_EQ(tkv_engine_create_host(&config, &engine, &error), status);
    EXPECT_EQ(tkv_engine_create(&config, &engine, &error), status);
    EXPECT_EQ(engine, nullptr);
  }

  std::normal_distribution<float> normal_;
  const std::vector<int32_t> lens_ = {100, 2, 65}, starts_ = {0, 1, 3, 3};
  std::vector<int32_t> table_ = {4, 1, 0, -1, 5, 2};
  int32_t errors_[kEngineErrors] = {};
  std::vector<uint8_t> blocks_;
  std::vector<float> means_, reflections_, lse_;
  std::vector<int64_t> slots_;
  std::vector<uint16_t> k_, v_, q_, out_;
  EngineConfig same_config_;
  tkv_engine_config config_;
  tkv_engine_layer layer_;
  tkv_engine_tokens tokens_;
  tkv_engine_batch batch_;
  tkv_engine_queries queries_;
  tkv_engine* engine_ = nullptr;
};

TEST_F(CapiEngine, CallsAreThoseOfTheLibrary) {
  std::vector<uint8_t> other = blocks_;
  EngineLayer layer;
  layer.blocks = aligned(&other);
  layer.num_blocks = kBlocks;
  layer.key_reflection = reflections_.data();
  EngineTokens tokens;
  tokens.k = k_.data();
  tokens.v = v_.data();
  tokens.slots = slots_.data();
  tokens.count = tokens_.count;
  std::vector<float> reflections(means_.size());
  ASSERT_EQ(tkv_engine_key_reflections(engine_, means_.data(), reflections.data(), nullptr),
            TKV_OK);
  EXPECT_EQ(reflections, reflections_);
  ASSERT_TRUE(engine_encode_host(same_config_, layer, tokens));
  ASSERT_EQ(tkv_engine_encode_host(engine_, &layer_, &tokens_, nullptr), TKV_OK);
  EXPECT_EQ(std::memcmp(layer.blocks, layer_.blocks, kBlocks * same_config_.block_bytes()), 0);

  EngineAttend call;
  call.batch.block_table = table_.data();
  call.batch.table_columns = kColumns;
  call.batch.num_sequences = call.batch.count = 3;
  call.batch.seq_lens = lens_.data();
  call.batch.query_start_loc = starts_.data();
  call.batch.queries = 2;
  call.batch.num_blocks = kBlocks;
  call.layer = layer;
  call.q = q_.data();
  std::vector<uint16_t> out(out_.size());
  std::vector<float> lse(lse_.size());
  call.out = out.data();
  call.lse = lse.data();
  call.num_tokens = 3;
  ASSERT_TRUE(engine_attend_host(same_config_, call));
  ASSERT_EQ(tkv_engine_attend_host(engine_, &batch_, &layer_, &queries_, nullptr), TKV_OK);
  EXPECT_EQ(out_, out);
  EXPECT_EQ(lse_, lse);
  EXPECT_NE(out[0], 0);

  const std::vector<int32_t> starts = {0, 100, 102, 167};
  struct alignas(16) Piece {
    uint16_t x[8];
  };
  std::vector<Piece> k(167 * kHeads * kDim / 8), v = k, k2 = k;
  EngineRanges ranges;
  ranges.block_table = table_.data();
  ranges.table_stride = kColumns;
  ranges.num_sequences = ranges.count = 3;
  ranges.starts = starts.data();
  ranges.max_tokens = 100;
  ranges.num_rows = 167;
  ranges.k = k.data();
  ASSERT_TRUE(engine_decode_host(same_config_, layer, ranges));
  tkv_engine_ranges c = make<tkv_engine_ranges>();
  c.block_table = ranges.block_table;
  c.table_stride = kColumns;
  c.num_sequences = c.count = 3;
  c.starts = starts.data();
  c.max_tokens = 100;
  c.num_rows = 167;
  c.k = k2.data();
  c.v = v.data();
  ASSERT_EQ(tkv_engine_decode_host(engine_, &layer_, &c, nullptr), TKV_OK);
  EXPECT_EQ(std::memcmp(k.data(), k2.data(), k.size() * sizeof(Piece)), 0);
  EXPECT_NE(std::memcmp(k.data(), v.data(), k.size() * sizeof(Piece)), 0);
}

TEST_F(CapiEngine, BytesOfAPage) {
  tkv_engine_config c = make<tkv_engine_config>();
  c.head_dim = 128;
  const struct {
    int32_t k, v;
    int64_t bytes;
  } kPages[] = {{16, 16, 512 * 64}, {8, 4, 200 * 64}, {4, 4, 136 * 64}, {4, 2, 104 * 64}};
  for (const auto& page : kPages) {
    c.dtype = page.k % 3;  // is not read
    c.k_bits = page.k;
    c.v_bits = page.v;
    int64_t bytes = 0;
    EXPECT_EQ(tkv_engine_page_bytes(&c, &bytes, nullptr), TKV_OK);
    EXPECT_EQ(bytes, page.bytes);
  }
  int64_t bytes = -1;
  c.head_dim = 80;
  EXPECT_EQ(tkv_engine_page_bytes(&c, &bytes, nullptr), TKV_UNSUPPORTED);
  c.head_dim = 128;
  c.k_bits = 3;
  EXPECT_NE(tkv_engine_page_bytes(&c, &bytes, nullptr), TKV_OK);
  EXPECT_EQ(bytes, -1);
}

TEST_F(CapiEngine, ConfigsAreRefusedByName) {
  EXPECT_EQ(tkv_engine_validate(&config_, nullptr), TKV_OK);
  tkv_engine_config c = config_;
  c.head_dim = 80;
  refused(c, TKV_UNSUPPORTED, "head_dim");
  c = config_;
  c.sliding_window_tokens = 5;
  refused(c, TKV_UNSUPPORTED, "sliding_window_tokens");
  c = config_;
  c.max_queries = 9;
  refused(c, TKV_UNSUPPORTED, "max_queries");
  c = config_;
  c.block_tokens = 20;
  refused(c, TKV_UNSUPPORTED, "block_tokens");
  c = config_;
  c.no_rotation = 2;
  refused(c, TKV_INVALID_ARGUMENT, "no_rotation");
  c = config_;
  c.dtype = TKV_FLOAT32;
  refused(c, TKV_UNSUPPORTED, "float32");
}

TEST_F(CapiEngine, CallsAreRefusedByName) {
  tkv_error error = make<tkv_error>();
  const auto says = [&](const char* word) { return std::strstr(error.message, word) != nullptr; };
  EXPECT_EQ(tkv_engine_attend_host(nullptr, &batch_, &layer_, &queries_, &error),
            TKV_INVALID_ARGUMENT);
  EXPECT_TRUE(says("engine is null")) << error.message;
  EXPECT_EQ(tkv_engine_encode_host(engine_, nullptr, &tokens_, &error), TKV_INVALID_ARGUMENT);
  EXPECT_TRUE(says("layer is null")) << error.message;
  EXPECT_EQ(tkv_engine_attend(engine_, &batch_, &layer_, &queries_, nullptr, &error),
            TKV_INVALID_ARGUMENT);
  EXPECT_TRUE(says("tkv_engine_create_host")) << error.message;
  EXPECT_EQ(tkv_engine_plan(engine_, &batch_, nullptr, &error), TKV_INVALID_ARGUMENT);
  size_t bytes = 0;
  EXPECT_EQ(tkv_engine_workspace_bytes(engine_, &bytes, &error), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_engine_key_reflections(engine_, means_.data(), nullptr, &error),
            TKV_INVALID_ARGUMENT);
  EXPECT_TRUE(says("out is null")) << error.message;
  means_[kDim] = NAN;
  EXPECT_EQ(tkv_engine_key_reflections(engine_, means_.data(), reflections_.data(), &error),
            TKV_NON_FINITE);
  EXPECT_TRUE(says("kv_head 1")) << error.message;
  tkv_engine_layer layer = layer_;
  layer.num_blocks = 1;
  EXPECT_EQ(tkv_engine_attend_host(engine_, &batch_, &layer, &queries_, &error),
            TKV_INVALID_ARGUMENT);
  EXPECT_TRUE(says("blocks")) << error.message;
  tkv_engine_tokens tokens = tokens_;
  tokens.slots = nullptr;
  EXPECT_EQ(tkv_engine_encode_host(engine_, &layer_, &tokens, &error), TKV_INVALID_ARGUMENT);
  EXPECT_TRUE(says("slots")) << error.message;
}

}  // namespace
}  // namespace tierkv::test

// SPDX-License-Identifier: Apache-2.0
// The device calls of the C ABI on a GPU: attention over pages that the caller owns beside the
// double reference. Small enough for compute-sanitizer.
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "tests/gpu/device_array.cuh"
#include "tests/support/c_structs.h"
#include "tests/support/page_world.h"
#include "tests/support/random_input.h"
#include "tierkv/half.h"

namespace tierkv::test {
namespace {

using testing::RandomInput;

constexpr double kTolerance = 2e-3;  // docs/internals/attention.md, "Error"
constexpr int32_t kKvHeads = 2, kQHeads = 8, kHeadDim = 128;

std::vector<double> halves(const std::vector<uint16_t>& x) {
  std::vector<double> out;
  for (const uint16_t bits : x) out.push_back(half_to_float(bits));
  return out;
}
std::vector<uint16_t> bits_of(const std::vector<uint8_t>& bytes) {
  std::vector<uint16_t> out(bytes.size() / 2);
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

// With 1 and with several queries a sequence.
class CapiAttend : public ::testing::TestWithParam<int32_t> {
 protected:
  CapiAttend()
      : seed_(std::random_device{}()),
        rng_(seed_),
        world_(make_world(shape())),
        slots_(world_.slots),
        pool_(std::vector<uint8_t>(
            world_.pages().base,
            world_.pages().base + int64_t{world_.num_pages} * world_.config.page_bytes)),
        tokens_(world_.tokens),
        q_(world_.q),
        out_(std::vector<uint16_t>(world_.q.size(), 0x7e00)),
        lse_(std::vector<float>(world_.q.size() / kHeadDim, -77)) {
    for (int32_t t = 0; t < 2; ++t) {
      formats_[t] = make<tkv_tier_format>();
      formats_[t].k_bits = world_.config.tiers[t].format.k.type.bits();
      formats_[t].v_bits = world_.config.tiers[t].format.v.type.bits();
      tiers_[t] = make<tkv_attention_tier>();
      tiers_[t].side = world_.config.tiers[t].side;
      tiers_[t].format = &formats_[t];
    }
    tkv_attention_config config = make<tkv_attention_config>();
    config.num_q_heads = world_.config.num_q_heads;
    config.num_kv_heads = world_.config.num_kv_heads;
    config.head_dim = world_.config.head_dim;
    config.q_len = world_.config.q_len;
    config.sm_scale = world_.config.sm_scale;
    config.page_bytes = world_.config.page_bytes;
    config.tiers = tiers_;
    config.num_tiers = 2;
    EXPECT_EQ(tkv_attention_create(&config, &attention_, &error_), TKV_OK) << error_.message;
    size_t bytes = 0;
    EXPECT_EQ(tkv_attention_workspace_bytes(attention_, world_.sequences(), &bytes, &error_),
              TKV_OK);
    EXPECT_EQ(cudaMalloc(&workspace_, bytes), cudaSuccess);
    EXPECT_EQ(cudaMemset(workspace_, 0, bytes), cudaSuccess);
    fill_call(bytes);
  }
  ~CapiAttend() override {
    tkv_attention_destroy(attention_);
    cudaFree(workspace_);
  }
  WorldShape shape() const {
    WorldShape s;
    s.tiers = {{0, token_wise_tier(8, 4)}, {1, token_wise_tier(4, 2)}};
    s.tokens = {{70, 130}, {5, 12}, {0, 200}, {33, 7}};
    s.q_len = GetParam();
    return s;
  }
  World make_world(const WorldShape& s) { return test::make_world(s, rng_); }
  void fill_call(size_t workspace_bytes) {
    table_ = make<tkv_page_table>();
    table_.num_sequences = world_.table_shape.num_sequences;
    table_.rows_per_sequence = world_.table_shape.rows_per_sequence;
    table_.num_sides = world_.table_shape.num_sides;
    std::copy_n(world_.table_shape.table_slots, 2, table_.table_slots);
    std::copy_n(world_.table_shape.tokens_per_page, 4, table_.tokens_per_page);
    table_.slots = slots_.get();
    table_.tokens = tokens_.get()->of;
    pages_ = make<tkv_page_pool>();
    pages_.pages = pool_.get();
    pages_.page_bytes = world_.config.page_bytes;
    pages_.num_pages = world_.num_pages;
    tail_ = make<tkv_attention_tail>();
    tail_.tier = 1;
    call_ = make<tkv_attend_call>();
    call_.tail = &tail_;
    call_.table = &table_;
    call_.pool = &pages_;
    call_.num_sequences = world_.sequences();
    call_.q = q_.get();
    call_.out = out_.get();
    call_.lse = lse_.get();
    call_.workspace = workspace_;
    call_.workspace_bytes = workspace_bytes;
  }

  uint32_t seed_;
  std::mt19937_64 rng_;
  World world_;
  DeviceArray<int32_t> slots_;
  DeviceArray<uint8_t> pool_;
  DeviceArray<SideCounts> tokens_;
  DeviceArray<uint16_t> q_, out_;
  DeviceArray<float> lse_;
  void* workspace_ = nullptr;
  tkv_tier_format formats_[2];
  tkv_attention_tier tiers_[2];
  tkv_attention* attention_ = nullptr;
  tkv_page_table table_;
  tkv_page_pool pages_;
  tkv_attention_tail tail_;
  tkv_attend_call call_;
  tkv_error error_ = make<tkv_error>();
};

TEST_P(CapiAttend, SmallIsTheReference) {
  SCOPED_TRACE(seed_);
  ASSERT_EQ(tkv_plan_attention(attention_, &call_, nullptr, &error_), TKV_OK) << error_.message;
  ASSERT_EQ(tkv_attend(attention_, &call_, nullptr, &error_), TKV_OK) << error_.message;
  const Result<ReferenceOutput> expected = attend_reference(world_.config, world_.call());
  ASSERT_TRUE(expected.is_ok());
  EXPECT_LT(relative_error(halves(out_.read()), expected->out), kTolerance);
  const std::vector<float> lse = lse_.read();
  for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], expected->lse[i], 1e-3) << i;
  const int32_t* status = nullptr;
  ASSERT_EQ(tkv_attention_row_status(attention_, &call_, &status, &error_), TKV_OK);
  std::vector<int32_t> rows(world_.sequences() * world_.config.num_kv_heads, -1);
  ASSERT_EQ(cudaMemcpy(rows.data(), status, rows.size() * 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(rows, std::vector<int32_t>(rows.size(), TKV_OK));
}

// The second call's plan and pages are older than the first call. A caller of an earlier version
// names nothing that is settled.
TEST_P(CapiAttend, SmallSettledTiersChangeNothing) {
  SCOPED_TRACE(seed_);
  ASSERT_EQ(tkv_plan_attention(attention_, &call_, nullptr, &error_), TKV_OK) << error_.message;
  ASSERT_EQ(tkv_attend(attention_, &call_, nullptr, &error_), TKV_OK) << error_.message;
  const std::vector<uint16_t> out = out_.read();
  const auto same_again = [&] {
    out_.fill(0x7e);
    ASSERT_EQ(tkv_attend(attention_, &call_, nullptr, &error_), TKV_OK) << error_.message;
    ASSERT_EQ(tkv_attend(attention_, &call_, nullptr, &error_), TKV_OK) << error_.message;
    EXPECT_EQ(out_.read(), out);
  };
  call_.plan_is_settled = 1;
  for (const tkv_settled tail :
       {TKV_SETTLED_NOTHING, TKV_SETTLED_ALL_BUT_LAST_PAGE, TKV_SETTLED_ALL}) {
    call_.settled[0] = TKV_SETTLED_ALL;
    call_.settled[1] = tail;
    same_again();
  }
  call_.settled[2] = 77;
  call_.struct_size = offsetof(tkv_attend_call, settled);
  same_again();
}

TEST_P(CapiAttend, SmallRefusesBadCallsByName) {
  const auto refused = [&](tkv_status status, const char* word) {
    EXPECT_EQ(tkv_attend(attention_, &call_, nullptr, &error_), status) << error_.message;
    EXPECT_NE(std::strstr(error_.message, word), nullptr) << error_.message;
    fill_call(call_.workspace_bytes);
  };
  const size_t bytes = call_.workspace_bytes;
  call_.layer = 1;
  refused(TKV_INVALID_ARGUMENT, "layer");
  call_.q = nullptr;
  refused(TKV_INVALID_ARGUMENT, "q is null");
  call_.table = nullptr;
  refused(TKV_INVALID_ARGUMENT, "table is null");
  call_.pool = nullptr;
  refused(TKV_INVALID_ARGUMENT, "pool is null");
  table_.tokens += 1;
  refused(TKV_INVALID_ARGUMENT, "16 bytes");
  pages_.page_bytes += 1;
  refused(TKV_INVALID_ARGUMENT, "page_bytes");
  if (GetParam() > 1) {
    tail_.tier = 2;
    refused(TKV_INVALID_ARGUMENT, "tail");
    tail_.struct_size = 3;
    refused(TKV_INVALID_ARGUMENT, "tail: struct_size");
  }
  call_.num_sequences = 0;
  refused(TKV_INVALID_ARGUMENT, "num_sequences");
  for (const tkv_settled none : {-1, 3}) {
    call_.settled[2] = none;
    refused(TKV_INVALID_ARGUMENT, "settled");
  }
  call_.workspace_bytes = bytes - 1;
  refused(TKV_BUFFER_TOO_SMALL, "workspace");
  call_.workspace_bytes = bytes - 1;
  const int32_t* status = nullptr;
  EXPECT_EQ(tkv_attention_row_status(attention_, &call_, &status, &error_), TKV_BUFFER_TOO_SMALL);
  EXPECT_EQ(status, nullptr);
}

INSTANTIATE_TEST_SUITE_P(Queries, CapiAttend, ::testing::Values(1, 4));

TEST(SmallCapi, MergeOnTheDeviceIsThatOnTheHost) {
  RandomInput input;
  constexpr int32_t kRows = 11;
  const auto a = bits_of(input.values(DType::kFloat16, kRows, kHeadDim));
  const auto b = bits_of(input.values(DType::kFloat16, kRows, kHeadDim));
  std::vector<float> a_lse(kRows), b_lse(kRows), lse(kRows, -77);
  for (int32_t r = 0; r < kRows; ++r) {
    a_lse[r] = input.real(-3, 3);
    b_lse[r] = input.real(-3, 3);
  }
  std::vector<uint16_t> out(a.size(), 0x7e00);
  tkv_merge_call call = make<tkv_merge_call>();
  call.a_out = a.data();
  call.a_lse = a_lse.data();
  call.b_out = b.data();
  call.b_lse = b_lse.data();
  call.out = out.data();
  call.lse = lse.data();
  call.rows = kRows;
  call.head_dim = kHeadDim;
  ASSERT_EQ(tkv_merge_attention_host(&call, nullptr), TKV_OK);
  const DeviceArray<uint16_t> da(a), db(b), dout(std::vector<uint16_t>(a.size(), 0x7e00));
  const DeviceArray<float> da_lse(a_lse), db_lse(b_lse), dlse(std::vector<float>(kRows, -77));
  call.a_out = da.get();
  call.a_lse = da_lse.get();
  call.b_out = db.get();
  call.b_lse = db_lse.get();
  call.out = dout.get();
  call.lse = dlse.get();
  tkv_error error = make<tkv_error>();
  ASSERT_EQ(tkv_merge_attention(&call, nullptr, &error), TKV_OK) << error.message;
  // exp and log of the device may differ in the last bit.
  EXPECT_LT(relative_error(halves(dout.read()), halves(out)), 1e-3);
  const std::vector<float> read = dlse.read();
  for (int32_t r = 0; r < kRows; ++r) EXPECT_NEAR(read[r], lse[r], 1e-5);
}

// The tolerance is derived in codec/codec_scores_test.cu.
TEST(SmallCapi, SignificanceOnTheDeviceIsThatOnTheHost) {
  RandomInput input;
  constexpr int32_t kTokens = 90;
  const std::vector<int32_t> starts = {0, 33, kTokens};
  std::vector<uint16_t> q(kTokens * kQHeads * kHeadDim), k(kTokens * kKvHeads * kHeadDim);
  for (std::vector<uint16_t>* x : {&q, &k}) {
    for (uint16_t& bits : *x) bits = float_to_half(input.real(-1, 1));
  }
  std::vector<float> lse(kTokens * kQHeads, -77), significance(kTokens * kKvHeads, -77);
  const DeviceArray<uint16_t> dq(q), dk(k);
  const DeviceArray<int32_t> dstarts(starts);
  const DeviceArray<float> dlse(lse), dsignificance(significance);
  tkv_significance_call call = make<tkv_significance_call>();
  call.q = q.data(), call.k = k.data(), call.starts = starts.data();
  call.num_sequences = 2, call.max_tokens = 57, call.total_tokens = kTokens;
  call.num_q_heads = kQHeads, call.num_kv_heads = kKvHeads, call.head_dim = kHeadDim;
  call.query_stride = 2;
  call.lse = lse.data(), call.significance = significance.data();
  tkv_error error = make<tkv_error>();
  ASSERT_EQ(tkv_prompt_lse_host(&call, &error), TKV_OK) << error.message;
  ASSERT_EQ(tkv_prompt_significance_host(&call, &error), TKV_OK) << error.message;
  call.q = dq.get(), call.k = dk.get(), call.starts = dstarts.get();
  call.lse = dlse.get(), call.significance = dsignificance.get();
  ASSERT_EQ(tkv_prompt_lse(&call, nullptr, &error), TKV_OK) << error.message;
  ASSERT_EQ(tkv_prompt_significance(&call, nullptr, &error), TKV_OK) << error.message;
  const std::vector<float> got_lse = dlse.read(), got = dsignificance.read();
  for (size_t i = 0; i < got_lse.size(); ++i) ASSERT_NEAR(got_lse[i], lse[i], 5e-4) << i;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], significance[i], 5e-4 * significance[i]) << i;
  }
}

}  // namespace
}  // namespace tierkv::test

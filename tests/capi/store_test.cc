// The store through the C ABI: the same results, states and refusals as the C++ host store, call by
// call.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "tests/capi/twin_stores.h"

namespace tierkv::test {
namespace {

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
    tkv_error error = make<tkv_error>();
    EXPECT_EQ(tkv_store_release(twins.c(), bad, &error), TKV_STALE_SEQUENCE) << bad;
    EXPECT_EQ(std::string(error.message).rfind("sequence " + std::to_string(bad) + " (", 0), 0u)
        << error.message;
    EXPECT_EQ(tkv_store_num_tokens(twins.c(), bad, &tokens, nullptr), TKV_STALE_SEQUENCE);
  }
  EXPECT_EQ(tokens, -5);
  EXPECT_EQ(tkv_store_num_tokens(twins.c(), again.c, &tokens, nullptr), TKV_OK);
  EXPECT_EQ(tokens, 0);
}

TEST(CapiStore, BooleansAreZeroOrOne) {
  const tkv_tier_policy policy = small_policy();
  for (const int32_t flag : {-1, 2, 256}) {
    tkv_error error = make<tkv_error>();
    tkv_store_config config = small_config(&policy);
    config.before_rope = flag;
    tkv_store* store = nullptr;
    EXPECT_EQ(tkv_store_create(&config, &store, &error), TKV_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(error.message, "before_rope must be 0 or 1"), nullptr) << error.message;
    RandomInput input;
    Twins twins;
    Twins::Pair id;
    ASSERT_EQ(twins.add(&id), StatusCode::kOk);
    fill_prompt(twins, input, id, 20);
    ASSERT_EQ(twins.end_prompt(id), StatusCode::kOk);
    std::vector<uint16_t> q(kQHeads * kHeadDim), out(q.size());
    tkv_attend_request request = make<tkv_attend_request>();
    request.sequences = &id.c;
    request.num_sequences = 1;
    request.q = q.data();
    request.out = out.data();
    request.count_query = flag;
    EXPECT_EQ(tkv_store_attend(twins.c(), &request, &error), TKV_INVALID_ARGUMENT);
    EXPECT_NE(std::strstr(error.message, "count_query must be 0 or 1"), nullptr) << error.message;
    tkv_buffer buffer = make<tkv_buffer>();
    EXPECT_EQ(tkv_store_save_sequence(twins.c(), id.c, flag, 1, &buffer, &error),
              TKV_INVALID_ARGUMENT);
  }
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

TEST(CapiStore, GoesThroughTheColdTierAsTheCppStoreDoes) {
  RandomInput input;
  Twins twins;
  Twins::Pair id, back, never;
  ASSERT_EQ(twins.add(&id), StatusCode::kOk);
  EXPECT_EQ(twins.through_the_cold(id, &back), StatusCode::kInvalidArgument) << "in its prompt";
  fill_prompt(twins, input, id, input.uniform(1, 60));
  ASSERT_EQ(twins.end_prompt(id), StatusCode::kOk);
  ASSERT_EQ(twins.through_the_cold(id, &back), StatusCode::kOk);
  EXPECT_TRUE(twins.exported(back) == twins.exported(id));
  twins.compare_stats();
  EXPECT_EQ(twins.through_the_cold(never, &back), StatusCode::kStaleSequence);
}

TEST(CapiStore, QueriesHaveADtype) {
  RandomInput input;
  Twins twins;
  Twins::Pair id;
  ASSERT_EQ(twins.add(&id), StatusCode::kOk);
  fill_prompt(twins, input, id, 20);
  const auto q = input.values(DType::kBFloat16, kQHeads, kHeadDim);
  std::vector<uint16_t> out(kQHeads * kHeadDim, 0x5a5a), other = out;
  tkv_attend_request r = make<tkv_attend_request>();
  r.sequences = &id.c;
  r.num_sequences = 1;
  r.q = q.data();
  r.out = out.data();
  r.dtype = TKV_BFLOAT16;
  tkv_error error = make<tkv_error>();
  EXPECT_EQ(tkv_store_attend(twins.c(), &r, &error), TKV_OK) << error.message;
  AttendRequest cpp;
  cpp.sequences = {&id.cpp, 1};
  cpp.q = q.data();
  cpp.out = other.data();
  cpp.dtype = DType::kBFloat16;
  EXPECT_TRUE(twins.cpp().attend(cpp));
  EXPECT_EQ(out, other);
  r.dtype = TKV_FLOAT32;
  EXPECT_EQ(tkv_store_attend(twins.c(), &r, &error), TKV_UNSUPPORTED);
  r.dtype = 3;
  EXPECT_EQ(tkv_store_attend(twins.c(), &r, &error), TKV_INVALID_ARGUMENT);
  size_t bytes = 77;
  EXPECT_EQ(tkv_store_count_scratch_bytes(twins.c(), 1, kMaxTokens, 8, &bytes, &error), TKV_OK);
  EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(tkv_store_count_scratch_bytes(twins.c(), 5, 1, 1, &bytes, &error),
            TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_store_count_scratch_bytes(twins.c(), 1, kMaxTokens + 1, 1, &bytes, &error),
            TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_store_count_scratch_bytes(twins.c(), 1, 1, 9, &bytes, &error),
            TKV_INVALID_ARGUMENT);
}

TEST(CapiStore, SeveralQueriesNeedTheirTokens) {
  RandomInput input;
  Twins twins;
  Twins::Pair id;
  ASSERT_EQ(twins.add(&id), StatusCode::kOk);
  fill_prompt(twins, input, id, 3);
  const auto q = input.values(DType::kFloat16, 9 * kQHeads, kHeadDim);
  std::vector<uint16_t> out(9 * kQHeads * kHeadDim, 0x5a5a);
  tkv_attend_request r = make<tkv_attend_request>();
  r.sequences = &id.c;
  r.num_sequences = 1;
  r.q = q.data();
  r.out = out.data();
  tkv_error error = make<tkv_error>();
  for (const auto& [q_len, status] : std::map<int32_t, tkv_status>{
           {-1, TKV_INVALID_ARGUMENT}, {4, TKV_INVALID_ARGUMENT}, {9, TKV_UNSUPPORTED}}) {
    r.q_len = q_len;
    EXPECT_EQ(tkv_store_attend(twins.c(), &r, &error), status) << q_len;
    EXPECT_NE(std::strstr(error.message, "q_len"), nullptr) << error.message;
  }
  EXPECT_EQ(std::count(out.begin(), out.end(), 0x5a5a), static_cast<int64_t>(out.size()));
  r.q_len = 3;
  EXPECT_EQ(tkv_store_attend(twins.c(), &r, &error), TKV_OK) << error.message;
  EXPECT_NE(out[3 * kQHeads * kHeadDim - 1], 0x5a5a);
  EXPECT_EQ(out[3 * kQHeads * kHeadDim], 0x5a5a);
}

// Scores of a prompt decide its tiers: the same tokens with and without them.
TEST(CapiStore, ScoresOfAPromptDecideItsTiers) {
  RandomInput input;
  for (const float significance : {0.0f, 1.0f}) {
    Twins twins;
    Twins::Pair id;
    ASSERT_EQ(twins.add(&id), StatusCode::kOk);
    fill_prompt(twins, input, id, 60);
    const std::vector<float> scores(kKvHeads * kMaxTokens, significance);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_EQ(twins.score_prompt(id, layer, scores.data()), StatusCode::kOk);
    }
    EXPECT_EQ(twins.score_prompt(id, kLayers, scores.data()), StatusCode::kInvalidArgument);
    EXPECT_EQ(twins.score_prompt(id, 0, nullptr), StatusCode::kInvalidArgument);
    const std::vector<float> negative(kKvHeads * kMaxTokens, -1), nan(kKvHeads * kMaxTokens, NAN);
    EXPECT_EQ(twins.score_prompt(id, 0, negative.data()), StatusCode::kInvalidArgument);
    EXPECT_EQ(twins.score_prompt(id, 0, nan.data()), StatusCode::kNonFinite);
    ASSERT_EQ(twins.end_prompt(id), StatusCode::kOk);
    EXPECT_EQ(twins.score_prompt(id, 0, scores.data()), StatusCode::kInvalidArgument) << "too late";
    tkv_store_stats stats = make<tkv_store_stats>();
    ASSERT_EQ(tkv_store_get_stats(twins.c(), &stats, nullptr), TKV_OK);
    const int64_t rows = kLayers * kKvHeads, outside = 60 - 8 - 2;  // window and sinks
    EXPECT_EQ(stats.high_tokens, significance == 0 ? 0 : rows * outside);
    EXPECT_EQ(stats.pruned_tokens, significance == 0 ? rows * outside : 0);
  }
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

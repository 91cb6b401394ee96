// Several queries of a sequence in one call: each is the softmax over what the pages hold up to its
// own token, in every kind of store.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "store/tiers/basis_store.h"
#include "tests/store/support/coded_world.h"
#include "tests/store/support/decoded_row.h"
#include "tests/store/support/modelled_store.h"
#include "tests/store/support/query_call.h"
#include "tests/support/basis_source.h"

namespace tierkv::testing {
namespace {

float half_at(const std::vector<uint8_t>& q, int64_t i) {
  uint16_t bits;
  std::memcpy(&bits, &q[2 * i], 2);
  return half_to_float(bits);
}

// The largest probabilities of a group, by position, and how far they may be off.
struct GroupWeights {
  std::vector<double> most;
  double tolerance = 0;
};

// One head of one query of one sequence against what the row holds up to `position`; the group's
// weights are raised to its own.
void check_head(const QueryCall& call, const CacheLayout& layout, const Decoded& row, int64_t place,
                int32_t position, GroupWeights* group) {
  const int32_t dim = layout.head_dim;
  std::vector<double> p(row.positions.size(), 0.0), x(dim, 0.0), size(dim, 0.0);
  double sum = call.sinks.empty()
                   ? 0.0
                   : std::exp(call.sinks[place % layout.num_q_heads] - double{call.lse[place]});
  double largest = 0;  // of the sums of what a logit is made of
  for (size_t i = 0; i < p.size(); ++i) {
    if (row.positions[i] > position) continue;
    double dot = 0, parts = 0;
    for (int32_t d = 0; d < dim; ++d) {
      const double product =
          static_cast<double>(half_at(call.q, place * dim + d)) * row.k[i * dim + d];
      dot += product;
      parts += std::fabs(product);
    }
    largest = std::max(largest, parts * layout.sm_scale);
    p[i] = std::exp(dot * layout.sm_scale - call.lse[place]);
    sum += p[i];
    double& most = group->most[row.positions[i]];
    most = std::max(most, p[i]);
    for (int32_t d = 0; d < dim; ++d) {
      x[d] += p[i] * row.v[i * dim + d];
      size[d] += p[i] * std::fabs(row.v[i * dim + d]);
    }
  }
  // lse and the decoded keys are rounded to fp32, by 6e-8 of their size each, which moves logits
  // and with them probabilities by as much.
  const double tolerance = 1e-6 + 2.5e-7 * largest;
  group->tolerance = std::max(group->tolerance, tolerance);
  ASSERT_NEAR(sum, 1.0, tolerance);
  for (int32_t d = 0; d < dim; ++d) {
    // Rounded to fp16 once.
    ASSERT_NEAR(half_to_float(call.out[place * dim + d]), x[d] / sum,
                size[d] * (5e-4 + 2 * tolerance) + 1e-7);
  }
}

void check_call(const ModelledStore& world, const std::vector<int32_t>& tokens,
                const QueryCall& call) {
  const CacheLayout& layout = world.config().layout;
  const auto count = static_cast<int32_t>(call.ids.size());
  const int32_t heads = layout.num_kv_heads, group = layout.group_size();
  for (int32_t r = 0; r < count * heads; ++r) {
    const int32_t entry = r / heads;
    const Decoded row =
        decode_row(world.view(), world.view().row_of(call.ids[entry].slot, 1, r % heads));
    for (int32_t query = 0; query < call.q_len; ++query) {
      SCOPED_TRACE(::testing::Message() << "row " << r << " query " << query);
      const int32_t position = tokens[entry] - call.q_len + query;
      GroupWeights weights;
      weights.most.assign(call.stride, 0.0);
      for (int32_t g = 0; g < group; ++g) {
        const int64_t line = int64_t{entry} * call.q_len + query;
        const int64_t place = (line * heads + r % heads) * group + g;
        check_head(call, layout, row, place, position, &weights);
        if (::testing::Test::HasFatalFailure()) return;
      }
      const float* seen = &call.probabilities[(int64_t{query} * count * heads + r) * call.stride];
      for (int32_t p = 0; p < tokens[entry]; ++p) {
        ASSERT_NEAR(seen[p], weights.most[p], weights.tolerance) << p;
      }
      for (int32_t p = position + 1; p < tokens[entry]; ++p) ASSERT_EQ(seen[p], 0) << p;
      ASSERT_TRUE(std::isnan(seen[tokens[entry]])) << "beyond the tokens";
    }
  }
}

// Sequences of all kinds in one call: in the prompt and past it, with a ring that is not full, just
// full and worn, fewer tokens than sinks, truncated and appended to.
void check_sequences(const KvStoreConfig& config, int32_t q_len, bool has_sinks) {
  SCOPED_TRACE(::testing::Message() << "q_len " << q_len << " " << to_json(config));
  RandomInput input;
  ModelledStore world(config, &input);
  std::vector<ModelSequence> sequences(5);
  for (ModelSequence& s : sequences) ASSERT_TRUE(world.add(&s));
  ASSERT_TRUE(world.prompt({&sequences[0]}, 60, true));
  ASSERT_TRUE(world.prompt({&sequences[1]}, q_len, true));
  ASSERT_TRUE(world.prompt({&sequences[2], &sequences[3]}, 40, true));
  ASSERT_TRUE(world.prompt({&sequences[4]}, 11, true));
  for (int32_t i = 1; i < 5; ++i) ASSERT_TRUE(world.end_prompt({&sequences[i]}));
  const int32_t steps = input.uniform(1, 12);
  for (int32_t i = 0; i < steps; ++i) {
    ASSERT_TRUE(world.step({&sequences[2]}, input.uniform(1, 8), true));
  }
  const int32_t left = input.uniform(1, 39), appended = input.uniform(q_len, 8);
  ASSERT_TRUE(world.truncate(&sequences[3], left));
  ASSERT_TRUE(world.step({&sequences[3]}, appended, true));
  std::vector<SequenceId> ids;
  std::vector<int32_t> tokens;
  for (const ModelSequence& s : sequences) {
    ids.push_back(s.id);
    tokens.push_back(*world.store().num_tokens(s.id));
  }
  QueryCall call(config, ids, q_len);
  const CacheLayout& layout = config.layout;
  call.q =
      input.values(DType::kFloat16, static_cast<int64_t>(ids.size()) * q_len * layout.num_q_heads,
                   layout.head_dim);
  // Sinks of about the size of logits.
  for (int32_t h = 0; has_sinks && h < layout.num_q_heads; ++h) {
    call.sinks.push_back(h % 4 == 3 ? -INFINITY : input.real(-20, 60));
  }
  const Status s = world.store().attend(call.request());
  ASSERT_TRUE(s) << s.message();
  check_call(world, tokens, call);
}

TEST(StoreQueries, EachSeesTheTokensUpToItsOwn) {
  for (const int32_t group : {1, 3, 8, 16}) {
    for (const int32_t sinks : {0, 5}) {
      KvStoreConfig c = small_config();
      c.layout.num_q_heads = group * c.layout.num_kv_heads;
      c.policy.sink_tokens = sinks;
      c.policy.window_tokens = sinks == 0 ? 8 : 11;
      if (group == 3) c.window_format = raw_tier();
      c.page_bytes = group == 3 ? 4352 : 1920;
      for (const int32_t q_len : {1, 2, 5, 8}) {
        check_sequences(c, q_len, sinks != 0);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(StoreQueries, EveryHeadDim) {
  for (const int32_t head_dim : {96, 128, 256}) {
    KvStoreConfig c = small_config();
    c.layout.head_dim = head_dim;
    c.page_bytes = 0;
    check_sequences(c, 4, head_dim == 128);
    if (HasFatalFailure()) return;
  }
}

// Tokens of a prompt one by one, then their queries in one call: the same bits as one by one.
void check_against_single_queries(KvStore* store, RandomInput* input, DType dtype) {
  constexpr int32_t kQueries = 5;
  const CacheLayout& layout = store->config().layout;
  const Result<SequenceId> id = store->add_sequence();
  ASSERT_TRUE(id);
  const SequenceList list = {&*id, 1};
  QueryCall all(store->config(), {*id}, kQueries);
  all.q = input->values(dtype, kQueries * layout.num_q_heads, layout.head_dim);
  const int64_t values = int64_t{layout.num_q_heads} * layout.head_dim;
  std::vector<QueryCall> single;
  for (int32_t i = 0; i < 1 + kQueries; ++i) {
    const int32_t tokens = i == 0 ? input->uniform(1, 90) : 1;
    ASSERT_TRUE(store->begin_prompt(list, tokens));
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      const CallValues x(input, layout, 1, tokens);
      ASSERT_TRUE(store->append({list, layer, tokens, x.k(), x.v()}));
    }
    if (i == 0) continue;
    single.emplace_back(store->config(), std::vector<SequenceId>{*id}, 1);
    const auto first = all.q.begin() + (i - 1) * values * 2;
    single.back().q.assign(first, first + values * 2);
    AttendRequest r = single.back().request();
    r.dtype = dtype;
    ASSERT_TRUE(store->attend(r));
  }
  AttendRequest r = all.request();
  r.dtype = dtype;
  const Status s = store->attend(r);
  ASSERT_TRUE(s) << s.message();
  const int32_t tokens = *store->num_tokens(*id), heads = layout.num_kv_heads;
  for (int32_t j = 0; j < kQueries; ++j) {
    const QueryCall& one = single[j];
    EXPECT_TRUE(std::equal(one.out.begin(), one.out.end(), all.out.begin() + j * values)) << j;
    EXPECT_TRUE(
        std::equal(one.lse.begin(), one.lse.end(), all.lse.begin() + j * layout.num_q_heads))
        << j;
    for (int32_t h = 0; h < heads; ++h) {
      const float* want = &one.probabilities[int64_t{h} * all.stride];
      const float* got = &all.probabilities[(int64_t{j} * heads + h) * all.stride];
      const int32_t seen = tokens - kQueries + 1 + j;
      EXPECT_TRUE(std::equal(want, want + seen, got)) << j;
      EXPECT_EQ(std::count(got + seen, got + tokens, 0.0f), tokens - seen) << j;
    }
  }
}

TEST(StoreQueries, EveryKindOfStoreTakesThem) {
  RandomInput input;
  std::mt19937 rng(std::random_device{}());
  for (const bool bfloat16 : {false, true}) {
    KvStoreConfig c = small_config();
    if (bfloat16) c.layout.dtype = DType::kBFloat16;
    check_against_single_queries(KvStore::create(c)->get(), &input, c.layout.dtype);
    c.basis = std::make_shared<const CacheBasis>(
        random_cache_basis(&rng, c.layout, BasisKind::kMatrix, BasisKind::kMean));
    check_against_single_queries(KvStore::create(c)->get(), &input, c.layout.dtype);
  }
  const KvStoreConfig coded = small_coded_config(&input);
  check_against_single_queries(KvStore::create(coded)->get(), &input, DType::kFloat16);
}

// Blocks before them, and means: the same bits as those of a copy that ends with the query's token.
TEST(StoreQueries, CodedTokensCount) {
  RandomInput input;
  CodedWorld world(small_coded_config(&input), &input);
  CodedModel m, copy;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 200));
  ASSERT_TRUE(world.end_prompt({&m}));
  ASSERT_TRUE(world.step({&m}, 4));
  const CacheLayout& layout = world.config().layout;
  const int64_t values = int64_t{layout.num_q_heads} * layout.head_dim;
  QueryCall all(world.config(), {m.id}, 4);
  all.q = input.values(DType::kFloat16, 4 * layout.num_q_heads, layout.head_dim);
  ASSERT_TRUE(world.store().attend(all.request()));
  ASSERT_TRUE(world.fork(m, &copy));
  for (int32_t j = 3; j >= 0; --j) {
    ASSERT_TRUE(world.truncate(&copy, 201 + j));
    QueryCall one(world.config(), {copy.id}, 1);
    one.q.assign(all.q.begin() + j * values * 2, all.q.begin() + (j + 1) * values * 2);
    ASSERT_TRUE(world.store().attend(one.request()));
    EXPECT_TRUE(std::equal(one.out.begin(), one.out.end(), all.out.begin() + j * values)) << j;
    EXPECT_TRUE(
        std::equal(one.lse.begin(), one.lse.end(), all.lse.begin() + j * layout.num_q_heads))
        << j;
  }
}

// The same as update_scores() of the same probabilities, oldest query first.
TEST(StoreQueries, AreCountedInOrder) {
  for (const int32_t interval : {1, 3}) {
    RandomInput input;
    KvStoreConfig config = small_config();
    config.score_interval = interval;
    ModelledStore world(config, &input);
    ModelSequence s;
    ASSERT_TRUE(world.add(&s));
    ASSERT_TRUE(world.prompt({&s}, 60, true));
    ASSERT_TRUE(world.end_prompt({&s}));
    for (int32_t i = 0; i < 3; ++i) ASSERT_TRUE(world.step({&s}, 4, false));
    const Result<std::vector<uint8_t>> bytes = world.store().export_sequence(s.id);
    ASSERT_TRUE(bytes);
    const std::vector<uint8_t> q = input.values(DType::kFloat16, 16, 64);
    std::vector<uint8_t> after[2];
    for (const bool counts : {false, true}) {
      const auto store = make_store(config);
      const Result<SequenceId> id = store->import_sequence(bytes->data(), bytes->size());
      ASSERT_TRUE(id);
      QueryCall call(config, {*id}, 4);
      call.q = q;
      AttendRequest request = call.request();
      request.count_query = counts;
      if (counts) request.probabilities = nullptr;
      ASSERT_TRUE(store->attend(request));
      for (int32_t j = 0; j < 4 && !counts; ++j) {
        const float* seen = &call.probabilities[int64_t{j} * 2 * call.stride];
        ASSERT_TRUE(store->update_scores({{&*id, 1}, 1, 3 - j, seen, call.stride}));
      }
      const Result<std::vector<uint8_t>> state = store->export_sequence(*id);
      ASSERT_TRUE(state);
      after[counts] = *state;
    }
    EXPECT_EQ(after[0], after[1]);
    EXPECT_NE(after[1], *bytes);
  }
}

TEST(StoreQueries, RefusedByName) {
  RandomInput input;
  const KvStoreConfig config = small_config();
  ModelledStore world(config, &input);
  ModelSequence s, few;
  ASSERT_TRUE(world.add(&s));
  ASSERT_TRUE(world.add(&few));
  ASSERT_TRUE(world.prompt({&s}, 60, true));
  ASSERT_TRUE(world.prompt({&few}, 3, true));
  ASSERT_TRUE(world.end_prompt({&s, &few}));
  const auto refuses = [&](std::vector<SequenceId> ids, int32_t q_len, StatusCode code,
                           const char* words) {
    QueryCall call(config, std::move(ids), std::max(q_len, 1));
    call.q = input.values(DType::kFloat16, int64_t{16} * std::max(q_len, 1), 64);
    AttendRequest request = call.request();
    request.q_len = q_len;
    const Status status = world.store().attend(request);
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
    EXPECT_EQ(std::count(call.out.begin(), call.out.end(), 0x7e00),
              code == StatusCode::kOk ? 0 : static_cast<int64_t>(call.out.size()));
  };
  refuses({s.id}, 0, StatusCode::kInvalidArgument, "q_len");
  refuses({s.id}, -1, StatusCode::kInvalidArgument, "q_len");
  refuses({s.id}, 9, StatusCode::kUnsupported, "q_len 9");
  refuses({s.id, few.id}, 4, StatusCode::kInvalidArgument, "exceeds the tokens of sequence 1");
  refuses({s.id, few.id}, 3, StatusCode::kOk, "");
  // The window is empty: all that is left lies in the tiers.
  ASSERT_TRUE(world.truncate(&s, 40));
  refuses({s.id}, 1, StatusCode::kOk, "");
  refuses({s.id}, 2, StatusCode::kInvalidArgument, "left the window");
  ASSERT_TRUE(world.step({&s}, 2, false));
  refuses({s.id}, 3, StatusCode::kOk, "");
  refuses({s.id}, 4, StatusCode::kInvalidArgument, "left the window");
}

}  // namespace
}  // namespace tierkv::testing

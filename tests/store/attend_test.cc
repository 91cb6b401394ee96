// Attention of the host back end against a softmax over what the pages decode to.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "codec/element.h"
#include "tests/store/channel_store_world.h"
#include "tests/store/decoded_row.h"
#include "tests/store/modelled_store.h"

namespace tierkv::testing {
namespace {

KvStoreConfig attention_config_128() {
  KvStoreConfig c = small_config();
  c.layout.head_dim = 128;
  c.page_bytes = 0;
  return c;
}

TEST(StoreAttend, IsTheSoftmaxOverWhatThePagesHold) {
  RandomInput input;
  ModelledStore world(attention_config_128(), &input);
  ModelSequence s;
  ASSERT_TRUE(world.add(&s));
  ASSERT_TRUE(world.prompt({&s}, 60, true));
  ASSERT_TRUE(world.end_prompt({&s}));
  for (int32_t i = 0; i < 10; ++i) ASSERT_TRUE(world.step({&s}, 1, true));
  const std::vector<uint8_t> q = input.values(DType::kFloat16, 4, 128);
  std::vector<uint16_t> out(4 * 128, 0x7e00);
  std::vector<float> lse(4, NAN), probabilities(2 * 80, NAN);
  AttendRequest request;
  request.sequences = {&s.id, 1};
  request.layer = 1;
  request.q = q.data();
  request.out = out.data();
  request.lse = lse.data();
  request.probabilities = probabilities.data();
  request.stride = 80;
  ASSERT_TRUE(world.store().attend(request));

  for (int32_t h = 0; h < 2; ++h) {
    const Decoded row = decode_row(world.view(), world.view().row_of(s.id.slot, 1, h));
    std::vector<double> most(80, 0.0);
    double tolerance = 0;
    for (int32_t g = 2 * h; g < 2 * h + 2; ++g) {
      std::vector<double> p;
      double sum = 0;
      for (size_t i = 0; i < row.positions.size(); ++i) {
        double dot = 0;
        for (int32_t d = 0; d < 128; ++d) {
          uint16_t bits;
          std::memcpy(&bits, &q[2 * (g * 128 + d)], 2);
          dot += static_cast<double>(half_to_float(bits)) * row.k[i * 128 + d];
        }
        p.push_back(std::exp(dot * 0.125 - lse[g]));
        sum += p.back();
      }
      // lse is rounded to fp32, by 6e-8 of its size, which moves the sum by as much.
      tolerance = std::max(tolerance, 1e-6 + 1.2e-7 * std::fabs(lse[g]));
      EXPECT_NEAR(sum, 1.0, tolerance);
      for (size_t i = 0; i < p.size(); ++i) {
        most[row.positions[i]] = std::max(most[row.positions[i]], p[i]);
      }
      for (int32_t d = 0; d < 128; ++d) {
        double x = 0, size = 0;
        for (size_t i = 0; i < p.size(); ++i) {
          x += p[i] / sum * row.v[i * 128 + d];
          size += p[i] / sum * std::fabs(row.v[i * 128 + d]);
        }
        // Rounded to fp16 once.
        EXPECT_NEAR(half_to_float(out[g * 128 + d]), x, size * 1e-3 + 1e-7);
      }
    }
    for (int32_t p = 0; p < 70; ++p) {
      EXPECT_NEAR(probabilities[h * 80 + p], most[p], tolerance) << p;
    }
    EXPECT_TRUE(std::isnan(probabilities[h * 80 + 70])) << "beyond the tokens";
  }
  EXPECT_TRUE(world.store().update_scores({{&s.id, 1}, 1, 0, probabilities.data(), 80}));
}

// Attention of a store over `tokens` tokens whose value at channel d is value(d).
template <class Value>
std::vector<float> output_of(const KvStoreConfig& config, int32_t tokens, DType dtype,
                             const Value& value) {
  const CacheLayout& l = config.layout;
  const auto made = KvStore::create(config);
  EXPECT_TRUE(made) << made.status().message();
  if (!made) return {};
  KvStore* store = made->get();
  std::vector<uint16_t> k(static_cast<size_t>(tokens) * l.num_kv_heads * l.head_dim, 0x3000), v(k);
  for (size_t i = 0; i < v.size(); ++i) v[i] = float_to_half(value(i % l.head_dim));
  const SequenceId id = *store->add_sequence();
  EXPECT_TRUE(store->begin_prompt({&id, 1}, tokens));
  for (int32_t layer = 0; layer < l.num_layers; ++layer) {
    EXPECT_TRUE(store->append({{&id, 1}, layer, tokens, k.data(), v.data()}));
  }
  EXPECT_TRUE(store->end_prompt({&id, 1}));
  const std::vector<uint16_t> q(static_cast<size_t>(l.num_q_heads) * l.head_dim, 0);
  std::vector<uint16_t> out(q.size());
  std::vector<float> lse(l.num_q_heads), read;
  AttendRequest request;
  request.sequences = {&id, 1};
  request.q = q.data();
  request.out = out.data();
  request.lse = lse.data();
  request.dtype = dtype;
  EXPECT_TRUE(store->attend(request));
  for (const uint16_t x : out) read.push_back(raw_to_float(dtype, x));
  return read;
}

// 2 * 65504 / (2^bits - 1) is rounded up to fp16: the largest code is 65536 or more.
TEST(StoreAttend, OutputsSaturate) {
  const auto ends = [](size_t d) { return d % 2 == 0 ? kMaxHalf : -kMaxHalf; };
  for (const int32_t bits : {2, 4, 8}) {
    KvStoreConfig tiered = small_config(), channel = small_channel_config();
    tiered.page_bytes = 0;
    tiered.window_format = tiered.high_format = tiered.low_format = token_wise_tier(8, bits);
    channel.channel.v_bits = std::min(bits, 4);
    for (const KvStoreConfig& c : {tiered, channel}) {
      const std::vector<float> out = output_of(c, 100, DType::kFloat16, ends);
      for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], ends(i)) << bits << ", " << i;
      // To 8 bits of mantissa it is rounded up, which bfloat16 can hold.
      EXPECT_EQ(output_of(c, 100, DType::kBFloat16, ends)[0], 65536.0f);
    }
  }
}

// Coordinates of one large channel, each with an error of the same sign in that channel.
TEST(StoreAttend, OutputsInABasisSaturate) {
  KvStoreConfig c = small_config();
  c.page_bytes = 0;
  c.window_format = c.high_format = c.low_format = token_wise_tier(8, 2);
  CacheBasis basis;
  basis.num_layers = c.layout.num_layers;
  basis.num_kv_heads = c.layout.num_kv_heads;
  basis.keys.assign(4, Basis::none(64));
  basis.values.assign(4, Basis::hadamard(64));
  c.basis = std::make_shared<const CacheBasis>(basis);
  const auto one = [](size_t d) { return d == 5 ? kMaxHalf : 0.0f; };
  const std::vector<float> out = output_of(c, 20, DType::kFloat16, one);
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_TRUE(std::isfinite(out[i])) << i;
    EXPECT_TRUE(i % 64 != 5 || out[i] == kMaxHalf) << i << ": " << out[i];
  }
}

// Logits of |q|, |k| = 65504 with the largest sm_scale are finite in fp32.
TEST(StoreAttend, TheLargestScaleHasAFiniteLse) {
  KvStoreConfig c = small_config();
  c.layout.sm_scale = kMaxSmScale;
  const auto store = std::move(*KvStore::create(c));
  const std::vector<uint16_t> most(8 * 64, 0x7bff);
  const SequenceId id = *store->add_sequence();
  ASSERT_TRUE(store->begin_prompt({&id, 1}, 1));
  ASSERT_TRUE(store->append({{&id, 1}, 0, 1, most.data(), most.data()}));
  std::vector<uint16_t> out(4 * 64);
  std::vector<float> lse(4);
  AttendRequest request;
  request.sequences = {&id, 1};
  request.q = most.data();
  request.out = out.data();
  request.lse = lse.data();
  ASSERT_TRUE(store->attend(request));
  for (const float x : lse) EXPECT_TRUE(std::isfinite(x)) << x;
}

// The same as update_scores() of the same probabilities.
TEST(StoreAttend, CountsItsQuery) {
  RandomInput input;
  ModelledStore world(attention_config_128(), &input);
  ModelSequence s;
  ASSERT_TRUE(world.add(&s));
  ASSERT_TRUE(world.prompt({&s}, 60, true));
  ASSERT_TRUE(world.end_prompt({&s}));
  for (int32_t i = 0; i < 10; ++i) ASSERT_TRUE(world.step({&s}, 1, true));
  const Result<std::vector<uint8_t>> bytes = world.store().export_sequence(s.id);
  ASSERT_TRUE(bytes);
  const std::vector<uint8_t> q = input.values(DType::kFloat16, 4, 128);
  std::vector<uint16_t> out(4 * 128);
  std::vector<float> probabilities(2 * 80);
  std::vector<uint8_t> after[2];
  for (const bool counts : {false, true}) {
    const auto store = make_store(attention_config_128());
    const Result<SequenceId> id = store->import_sequence(bytes->data(), bytes->size());
    ASSERT_TRUE(id);
    AttendRequest request;
    request.sequences = {&*id, 1};
    request.layer = 1;
    request.q = q.data();
    request.out = out.data();
    request.count_query = counts;
    if (!counts) {
      request.probabilities = probabilities.data();
      request.stride = 80;
    }
    ASSERT_TRUE(store->attend(request));
    if (!counts) {
      ASSERT_TRUE(store->update_scores({{&*id, 1}, 1, 0, probabilities.data(), 80}));
    }
    const Result<std::vector<uint8_t>> state = store->export_sequence(*id);
    ASSERT_TRUE(state);
    after[counts] = *state;
  }
  EXPECT_EQ(after[0], after[1]);
  EXPECT_NE(after[1], *bytes);
}

TEST(StoreAttend, RefusesByName) {
  RandomInput input;
  KvStoreConfig c = small_config();
  c.window_format = raw_tier();
  c.page_bytes = 0;
  c.layout.dtype = DType::kBFloat16;
  ModelledStore world(c, &input);
  ModelSequence s;
  ASSERT_TRUE(world.add(&s));
  ASSERT_TRUE(world.prompt({&s}, 5, true));
  std::vector<uint16_t> q(4 * 64, 0), out(4 * 64, 0x7e00);
  AttendRequest request;
  request.sequences = {&s.id, 1};
  request.q = q.data();
  EXPECT_EQ(world.store().attend(request).code(), StatusCode::kInvalidArgument);
  request.out = out.data();
  EXPECT_EQ(world.store().attend(request).code(), StatusCode::kUnsupported)
      << "raw pages of bfloat16";
  q[7] = 0x7c00;
  EXPECT_EQ(world.store().attend(request).code(), StatusCode::kNonFinite);
  EXPECT_EQ(out[0], 0x7e00);
}

}  // namespace
}  // namespace tierkv::testing

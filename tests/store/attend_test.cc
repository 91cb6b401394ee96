// Attention of the host back end against a softmax over what the pages decode to.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/store/support/decoded_row.h"
#include "tests/store/support/modelled_store.h"

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

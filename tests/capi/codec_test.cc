// SPDX-License-Identifier: Apache-2.0
// Pages, quantised rows and coded blocks through the C ABI.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/support/c_structs.h"
#include "tierkv/half.h"

namespace tierkv::test {
namespace {

class CapiCodec : public ::testing::Test {
 protected:
  CapiCodec() { RecordProperty("seed", std::to_string(seed_)); }
  std::vector<float> normal(size_t n) {
    std::normal_distribution<float> d(0.25f, 2.0f);
    std::vector<float> x(n);
    for (float& value : x) value = d(rng_);
    return x;
  }
  uint32_t seed_ = std::random_device{}();
  std::mt19937 rng_{seed_};
  tkv_error error_ = make<tkv_error>();
};

// |x - x'| of a min-max code: half a step, plus the rounding to fp16 of the scale (2^-11 of it,
// times up to 2^bits codes) and of the zero point (2^-11 of it).
float bound(const float* x, int32_t n, int32_t bits) {
  float low = x[0], high = x[0];
  for (int32_t i = 1; i < n; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  return 0.5f * (high - low) / static_cast<float>((1 << bits) - 1) +
         (std::fabs(low) + 2 * (high - low)) / 2048 + 1e-6f;
}

TEST_F(CapiCodec, PagesReturnWhatTheirFormatHolds) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t k_bits : {16, 8, 4, 2}) {
      SCOPED_TRACE("seed " + std::to_string(seed_) + " head_dim " + std::to_string(head_dim) +
                   " bits " + std::to_string(k_bits));
      tkv_page_format format = make<tkv_page_format>();
      format.head_dim = head_dim;
      format.k_bits = k_bits;
      format.v_bits = 4;
      tkv_page_choice choice = make<tkv_page_choice>();
      ASSERT_EQ(tkv_page_choose_size(&format, 1, &choice, &error_), TKV_OK) << error_.message;
      format.page_bytes = choice.page_bytes;
      int32_t room = 0;
      ASSERT_EQ(tkv_page_tokens(&format, &room, &error_), TKV_OK);
      const int32_t first = 1 + static_cast<int32_t>(rng_() % (room - 1)), count = room - first;
      const std::vector<float> k = normal(static_cast<size_t>(room) * head_dim);
      const std::vector<float> v = normal(k.size());
      std::vector<uint8_t> page(format.page_bytes, 0xee);

      tkv_tokens in = make<tkv_tokens>();
      in.dtype = TKV_FLOAT32;
      in.count = first;
      in.k = const_cast<float*>(k.data());
      in.v = const_cast<float*>(v.data());
      ASSERT_EQ(tkv_page_encode(&format, page.data(), 0, &in, &error_), TKV_OK) << error_.message;
      std::vector<float> scores(count, 0.5f);
      std::vector<int32_t> positions(count, 7000);
      in.count = count;
      in.k = const_cast<float*>(k.data()) + static_cast<size_t>(first) * head_dim;
      in.v = const_cast<float*>(v.data()) + static_cast<size_t>(first) * head_dim;
      in.scores = scores.data();
      in.positions = positions.data();
      ASSERT_EQ(tkv_page_encode(&format, page.data(), first, &in, &error_), TKV_OK)
          << error_.message;
      EXPECT_EQ(tkv_page_encode(&format, page.data(), first + 1, &in, &error_),
                TKV_INVALID_ARGUMENT);

      std::vector<float> k_back(k.size(), NAN), v_back(k.size(), NAN), scores_back(room, NAN);
      std::vector<int32_t> positions_back(room, -3);
      tkv_tokens out = make<tkv_tokens>();
      out.dtype = TKV_FLOAT32;
      out.count = room;
      out.k = k_back.data();
      out.v = v_back.data();
      out.scores = scores_back.data();
      out.positions = positions_back.data();
      ASSERT_EQ(tkv_page_decode(&format, page.data(), 0, &out, &error_), TKV_OK) << error_.message;
      for (int32_t t = 0; t < room; ++t) {
        const size_t at = static_cast<size_t>(t) * head_dim;
        const float k_bound = k_bits == 16 ? 0.01f : bound(&k[at], head_dim, k_bits);
        const float v_bound = bound(&v[at], head_dim, 4);
        for (int32_t d = 0; d < head_dim; ++d) {
          ASSERT_LE(std::fabs(k[at + d] - k_back[at + d]), k_bound);
          ASSERT_LE(std::fabs(v[at + d] - v_back[at + d]), v_bound);
        }
        ASSERT_EQ(scores_back[t], t < first ? 0.0f : 0.5f);
        ASSERT_EQ(positions_back[t], t < first ? t : 7000);
      }
    }
  }
}

TEST_F(CapiCodec, BadTokensAreRefusedAndThePageKept) {
  tkv_page_format format = make<tkv_page_format>();
  format.head_dim = 64;
  format.k_bits = 4;
  format.v_bits = 4;
  format.page_bytes = 8192;
  std::vector<float> k = normal(3 * 64), v = normal(3 * 64);
  tkv_tokens in = make<tkv_tokens>();
  in.dtype = TKV_FLOAT32;
  in.count = 3;
  in.k = k.data();
  in.v = v.data();
  std::vector<uint8_t> page(8192, 0xee);
  constexpr int32_t kUsed = 14;  // of the first tile, so that three more reach into the second
  for (int32_t used = 0; used < kUsed; used += 2) {
    in.count = 2;
    ASSERT_EQ(tkv_page_encode(&format, page.data(), used, &in, &error_), TKV_OK) << error_.message;
  }
  const auto tokens_of_page = [&] {
    std::vector<float> both(2 * kUsed * 64, NAN);
    tkv_tokens out = make<tkv_tokens>();
    out.dtype = TKV_FLOAT32;
    out.count = kUsed;
    out.k = both.data();
    out.v = both.data() + kUsed * 64;
    EXPECT_EQ(tkv_page_decode(&format, page.data(), 0, &out, &error_), TKV_OK) << error_.message;
    return both;
  };
  const std::vector<float> held = tokens_of_page();
  in.count = 3;
  k[3 * 64 - 1] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(tkv_page_encode(&format, page.data(), kUsed, &in, &error_), TKV_NON_FINITE);
  k[3 * 64 - 1] = 1e30f;
  EXPECT_EQ(tkv_page_encode(&format, page.data(), kUsed, &in, &error_), TKV_OUT_OF_RANGE);
  k[3 * 64 - 1] = 0;
  in.dtype = 3;
  EXPECT_EQ(tkv_page_encode(&format, page.data(), 0, &in, &error_), TKV_INVALID_ARGUMENT);
  in.dtype = TKV_FLOAT32;
  in.v = nullptr;
  EXPECT_EQ(tkv_page_encode(&format, page.data(), 0, &in, &error_), TKV_INVALID_ARGUMENT);
  in.v = v.data();
  EXPECT_EQ(tkv_page_encode(&format, page.data(), -1, &in, &error_), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_page_encode(&format, page.data(), INT32_MAX, &in, &error_), TKV_INVALID_ARGUMENT);
  format.k_bits = 1;
  EXPECT_EQ(tkv_page_encode(&format, page.data(), 0, &in, &error_), TKV_UNSUPPORTED);
  format.k_bits = 3;
  EXPECT_EQ(tkv_page_encode(&format, page.data(), 0, &in, &error_), TKV_INVALID_ARGUMENT);
  format.k_bits = 4;
  EXPECT_EQ(tokens_of_page(), held);
  EXPECT_EQ(tkv_page_decode(&format, page.data(), 1 << 30, &in, &error_), TKV_INVALID_ARGUMENT);
}

TEST_F(CapiCodec, RowsQuantiseWithinHalfAStep) {
  for (const auto& [head_dim, group] : {std::pair<int32_t, int32_t>{128, 0}, {96, 32}, {5, 1}}) {
    for (int32_t bits = 1; bits <= 8; ++bits) {
      SCOPED_TRACE("seed " + std::to_string(seed_));
      const int64_t tokens = 17;
      const int32_t width = group == 0 ? head_dim : group;
      const std::vector<float> x = normal(tokens * head_dim);
      std::vector<uint8_t> codes(x.size(), 0xee);
      std::vector<uint16_t> scale(x.size() / width, 0xffff), zero_point(scale);
      tkv_codes c = make<tkv_codes>();
      c.tokens = tokens;
      c.head_dim = head_dim;
      c.bits = bits;
      c.group = group;
      c.codes = codes.data();
      c.scale = scale.data();
      c.zero_point = zero_point.data();
      ASSERT_EQ(tkv_quantize(x.data(), &c, &error_), TKV_OK) << error_.message;
      std::vector<float> back(x.size(), NAN);
      ASSERT_EQ(tkv_dequantize(&c, back.data(), &error_), TKV_OK);
      for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_LT(codes[i], 1 << bits);
        const size_t g = i / width;
        ASSERT_LE(std::fabs(x[i] - back[i]), bound(&x[g * width], width, bits));
        ASSERT_EQ(back[i], codes[i] * half_to_float(scale[g]) + half_to_float(zero_point[g]));
      }
    }
  }
}

TEST_F(CapiCodec, CodedBlocksAreLosslessAndTheirCodebookTravels) {
  std::normal_distribution<float> d(0.0f, 3.0f);
  for (const int32_t head_dim : {64, 96, 128, 256, 7}) {
    for (const int32_t tokens : {1, 63, 64}) {
      SCOPED_TRACE("seed " + std::to_string(seed_) + " head_dim " + std::to_string(head_dim));
      std::vector<int16_t> codes(static_cast<size_t>(tokens) * head_dim);
      for (int16_t& c : codes) c = static_cast<int16_t>(std::lround(d(rng_)));
      codes[rng_() % codes.size()] = INT16_MIN;  // no codebook has it: an exception
      tkv_codebook_spec spec = make<tkv_codebook_spec>();
      spec.component = TKV_VALUE;
      spec.head_dim = head_dim;
      tkv_codebook *built = nullptr, *book = nullptr;
      ASSERT_EQ(tkv_codebook_build(&spec, codes.data(), tokens, &built, &error_), TKV_OK)
          << error_.message;
      tkv_buffer bytes = make<tkv_buffer>();
      ASSERT_EQ(tkv_codebook_serialize(built, &bytes, &error_), TKV_BUFFER_TOO_SMALL);
      std::vector<uint8_t> serialized(bytes.size, 0xee);
      bytes.data = serialized.data();
      bytes.capacity = serialized.size();
      ASSERT_EQ(tkv_codebook_serialize(built, &bytes, &error_), TKV_OK) << error_.message;
      ASSERT_EQ(tkv_codebook_parse(serialized.data(), serialized.size(), &book, &error_), TKV_OK);
      tkv_codebook_destroy(built);

      tkv_block_shape shape = make<tkv_block_shape>();
      shape.tokens = tokens;
      shape.head_dim = head_dim;
      std::vector<uint8_t> block(tkv_block_max_bytes(head_dim));
      tkv_buffer out = make<tkv_buffer>();
      out.data = block.data();
      out.capacity = block.size();
      ASSERT_EQ(tkv_block_encode(book, &shape, codes.data(), &out, &error_), TKV_OK)
          << error_.message;
      std::vector<int16_t> back(codes.size(), 0x5a5a);
      ASSERT_EQ(tkv_block_decode(book, &shape, &out, back.data(), &error_), TKV_OK)
          << error_.message;
      EXPECT_EQ(back, codes);
      for (size_t cut = 0; cut < out.size; cut += 1 + out.size / 9) {
        tkv_buffer part = out;
        part.size = cut;
        EXPECT_EQ(tkv_block_decode(book, &shape, &part, back.data(), &error_), TKV_CORRUPT);
        EXPECT_EQ(back, std::vector<int16_t>(codes.size(), 0));
      }
      tkv_codebook_destroy(book);
    }
  }
}

TEST_F(CapiCodec, HostileCodebooksAreRefused) {
  std::vector<uint8_t> bytes(4096);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng_());
  for (size_t n = 1; n < bytes.size(); n += 97) {
    tkv_codebook* book = nullptr;
    if (tkv_codebook_parse(bytes.data(), n, &book, &error_) != TKV_OK) {
      EXPECT_EQ(book, nullptr);
      EXPECT_STRNE(error_.message, "");
    }
    tkv_codebook_destroy(book);
  }
}

}  // namespace
}  // namespace tierkv::test

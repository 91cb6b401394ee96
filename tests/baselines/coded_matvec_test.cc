// SPDX-License-Identifier: Apache-2.0
// The reference of the coded products against products over the codes that were encoded.
#include "tests/support/matvec_world.h"

#include <random>

#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

class CodedMatvecTest : public RandomTest {
 protected:
  CodedMatvecTest() : source_(seed_) {}
  CodeSource source_;
};

double value_of(const MatvecWorld& w, size_t r, int32_t t, int32_t d) {
  const int32_t count = block_unit_count(w.shape.component, w.shape.head_dim);
  const int32_t block = w.rows[r].first_block + t / kBlockTokens;
  const uint16_t* units = w.units.data() + static_cast<size_t>(block) * static_cast<size_t>(count);
  const int32_t i = w.is_key() ? d : t % kBlockTokens;
  const int16_t code = w.codes[r][static_cast<size_t>(t * w.shape.head_dim + d)];
  return half_to_float(units[count / 2 + i]) + double{half_to_float(units[i])} * code;
}

TEST_F(CodedMatvecTest, IsTheProductOfTheValues) {
  for (Component component : {Component::kKey, Component::kValue}) {
    MatvecShape shape;
    shape.component = component;
    shape.head_dim = 64;
    shape.columns = 3;
    const MatvecWorld w = make_matvec_world(&source_, shape, {0, 64, 1, 200, 0});
    const Multiplied got = multiply_on_host(w);
    for (StatusCode s : got.status) ASSERT_EQ(s, StatusCode::kOk);
    for (size_t r = 0; r < w.rows.size(); ++r) {
      const int32_t tokens = w.rows[r].tokens;
      for (int32_t c = 0; c < shape.columns; ++c) {
        const size_t column = r * static_cast<size_t>(shape.columns) + static_cast<size_t>(c);
        const int64_t n = w.is_key() ? 64 : w.token_stride;
        const uint16_t* x = w.x.data() + column * static_cast<size_t>(n);
        const int32_t outputs = w.is_key() ? tokens : 64, inputs = w.is_key() ? 64 : tokens;
        for (int32_t i = 0; i < outputs; ++i) {
          double sum = 0, terms = 0;
          for (int32_t j = 0; j < inputs; ++j) {
            const double term =
                half_to_float(x[j]) * value_of(w, r, w.is_key() ? i : j, w.is_key() ? j : i);
            sum += term;
            terms += std::abs(term);
          }
          const int64_t stride = w.is_key() ? w.token_stride : 64;
          // fp32 rounds the result; the sums are in double.
          ASSERT_NEAR(got.y[column * static_cast<size_t>(stride) + static_cast<size_t>(i)],
                      0.25 * sum, 0x1p-22 * terms)
              << "row " << r << " column " << c << " output " << i;
        }
      }
    }
  }
}

TEST_F(CodedMatvecTest, ARefusedBlockLeavesZeros) {
  for (Component component : {Component::kKey, Component::kValue}) {
    MatvecShape shape;
    shape.component = component;
    shape.columns = 2;
    MatvecWorld w = make_matvec_world(&source_, shape, {100, 200, 64});
    const Multiplied before = multiply_on_host(w);
    const CodedBlockRef& ref = w.refs[static_cast<size_t>(w.rows[1].first_block + 1)];
    w.bytes[ref.offset * size_t{16} + 4] ^= 0x40;  // its tokens
    const Multiplied after = multiply_on_host(w);
    for (size_t i = 0; i < after.status.size(); ++i) {
      const size_t victim = w.is_key() ? static_cast<size_t>(w.rows[1].first_item + 1) : 1;
      EXPECT_EQ(after.status[i], i == victim ? StatusCode::kCorrupt : StatusCode::kOk) << i;
    }
    const size_t stride = static_cast<size_t>(w.is_key() ? w.token_stride : shape.head_dim);
    for (size_t i = 0; i < after.y.size(); ++i) {
      const size_t row = i / stride / 2, at = i % stride;
      const bool zero = row == 1 && (!w.is_key() || at / kBlockTokens == 1);
      EXPECT_EQ(after.y[i], zero ? 0.0f : before.y[i]) << i;
    }
  }
}

TEST_F(CodedMatvecTest, RefusesWhatItCannotDo) {
  const MatvecWorld w = make_matvec_world(&source_, {}, {70});
  const auto code = [&](auto change) {
    CodedMatvec call = w.call();
    change(&call);
    return call.validate().code();
  };
  EXPECT_EQ(code([](CodedMatvec*) {}), StatusCode::kOk);
  EXPECT_EQ(code([](CodedMatvec* c) { c->head_dim = 256; }), StatusCode::kUnsupported);
  EXPECT_EQ(code([](CodedMatvec* c) { c->columns = 0; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CodedMatvec* c) { c->num_items = -1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CodedMatvec* c) { c->token_stride = 71; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CodedMatvec* c) { c->max_block_bytes = 8; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CodedMatvec* c) { c->size = -1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CodedMatvec* c) { c->tree.entries = 10; }), StatusCode::kUnsupported);
  EXPECT_EQ(code([](CodedMatvec* c) { c->codebook.levels = 33; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CodedMatvec* c) { c->codebook.mode = BlockMode::kQuad; }),
            StatusCode::kUnsupported);
  EXPECT_EQ(code([](CodedMatvec* c) { c->codebook.streams_per_lane = 3; }),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code([](CodedMatvec* c) {
              c->codebook.mode = BlockMode::kSingle;
              c->codebook.max_length = 12;
            }),
            StatusCode::kUnsupported);
  CodedMatvec call = w.call();
  EXPECT_EQ(call.validate_arrays().code(), StatusCode::kInvalidArgument);  // no y, no status
}

}  // namespace
}  // namespace tierkv

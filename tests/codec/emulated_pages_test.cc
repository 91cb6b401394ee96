// The page encoder's source on the host, against append_tokens(): the same bytes of codes and
// metadata. What it cannot see is timing and memory order; tests/gpu/codec covers those.
#include "codec/gpu/pages/tile_encode.cuh"

#include "tests/support/page_fixture.h"

namespace tierkv {
namespace {

class EmulatedPages : public PageFixture {
 protected:
  // A tile of `count` tokens, the first of which are in the page already.
  struct Case {
    TierFormat format;
    int32_t head_dim, first, count;
    DType dtype;
  };

  template <DType kDtype, Component kComponent>
  StatusCode encode(const Case& c, const RandomTokens& tokens, const HostPage& page) {
    const PageLayout& layout = page.layout;
    const int32_t row_bytes = c.head_dim * dtype_bytes(kDtype);
    const int32_t pitch = row_bytes + (kDtype == DType::kFloat32 ? 32 : 16);
    std::vector<uint4> stage(kTileTokens * pitch / 16, uint4{});
    std::vector<CodeMaker> makers(layout.groups(kComponent) * kTileTokens,
                                  CodeMaker{NAN, NAN, NAN, NAN});
    const TokenBatch batch = tokens.batch(0, c.count);
    const auto* from =
        static_cast<const uint8_t*>(kComponent == Component::kKey ? batch.k : batch.v);
    for (int32_t i = c.first; i < c.count; ++i) {
      memcpy(reinterpret_cast<uint8_t*>(stage.data()) + i * pitch, from + i * row_bytes, row_bytes);
    }
    const TileTask task = {reinterpret_cast<const uint8_t*>(stage.data()),
                           pitch,
                           makers.data(),
                           page.bytes + layout.tile_codes_byte(kComponent, 0),
                           page.bytes + layout.tile_metadata_byte(kComponent, 0),
                           layout.tile(kComponent),
                           layout.groups(kComponent),
                           page.raw_dtype,
                           c.first};
    StatusCode worst = StatusCode::kOk;
    emulator::cta().run(0, kWarpLanes, [&] {
      const StatusCode of_lane = page.rule_of(kComponent) == StepRule::kNorm
                                     ? prepare_tile<kDtype, kComponent, StepRule::kNorm>(&task)
                                     : prepare_tile<kDtype, kComponent>(&task);
      const StatusCode code = worst_of_warp(of_lane);
      if (lane_index() == 0) worst = code;
      if (code == StatusCode::kOk) write_tile<kDtype, kComponent>(&task);
    });
    return worst;
  }
  template <DType kDtype>
  StatusCode encode(const Case& c, const RandomTokens& tokens, const HostPage& page) {
    return greater(encode<kDtype, Component::kKey>(c, tokens, page),
                   encode<kDtype, Component::kValue>(c, tokens, page));
  }
  StatusCode encode(const Case& c, const RandomTokens& tokens, const HostPage& page) {
    return c.dtype == DType::kFloat16    ? encode<DType::kFloat16>(c, tokens, page)
           : c.dtype == DType::kBFloat16 ? encode<DType::kBFloat16>(c, tokens, page)
                                         : encode<DType::kFloat32>(c, tokens, page);
  }

  void expect_host_bytes(const Case& c) {
    SCOPED_TRACE(::testing::Message()
                 << to_string(c.format) << " d " << c.head_dim << " slots " << c.first << " to "
                 << c.count << " dtype " << static_cast<int>(c.dtype));
    const RandomTokens tokens = random_tokens(c.count, c.head_dim, c.dtype);
    const PageLayout layout = layout_of(c.format, c.head_dim, kTileTokens);
    const PoisonedPage expected(layout, DType::kFloat16, c.format);
    const PoisonedPage got(layout, DType::kFloat16, c.format);
    ASSERT_TRUE(reference::append_tokens(expected.page(), 0, tokens.batch(0, c.count)));
    ASSERT_TRUE(append_tokens(got.page(), 0, tokens.batch(0, c.first)));
    ASSERT_EQ(encode(c, tokens, got.page()), StatusCode::kOk);
    const auto bytes = [&](const PoisonedPage& page) {
      return std::vector<uint8_t>(page.page().bytes, page.page().bytes + layout.scores);
    };
    EXPECT_EQ(bytes(got), bytes(expected));
  }
};

template <Component kComponent>
void expect_host_squares(const RandomTokens& tokens) {
  const int32_t dims = tokens.head_dim, pitch = 4 * dims + 32;
  const std::vector<float>& x = kComponent == Component::kKey ? tokens.k : tokens.v;
  std::vector<uint4> stage(kTileTokens * pitch / 16, uint4{});
  for (int32_t i = 0; i < kTileTokens; ++i) {
    memcpy(reinterpret_cast<uint8_t*>(stage.data()) + i * pitch, x.data() + i * dims, 4 * dims);
  }
  TileTask task = {};
  task.stage = reinterpret_cast<const uint8_t*>(stage.data());
  task.pitch = pitch;
  for (int32_t blocks = 1; blocks <= dims / kDimBlock; ++blocks) {
    const int32_t first = dims / kDimBlock - blocks;
    emulator::cta().run(0, kWarpLanes, [&] {
      const auto got = token_squares<DType::kFloat32, kComponent>(task, first, first + blocks);
      for (int32_t i = 0; i < 2 * fragment_pars(kComponent); ++i) {
        const int32_t th = i % 2, par = i / 2;
        const int32_t token = fragment_token(kComponent, lane_index(), th, par);
        const float* of_token = x.data() + token * dims + first * kDimBlock;
        ASSERT_EQ(got.sum[th][par], sum_of_squares(of_token, blocks * kDimBlock))
            << "token " << token << " from block " << first;
      }
    });
  }
}

// Bit by bit: most orders that differ give the same scale.
TEST_F(EmulatedPages, SquaresAreSummedInTheHostsOrder) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    const RandomTokens tokens = random_tokens(kTileTokens, head_dim, DType::kFloat32);
    expect_host_squares<Component::kKey>(tokens);
    expect_host_squares<Component::kValue>(tokens);
  }
}

ComponentFormat component(int32_t bits, bool norm, int32_t group) {
  return norm ? norm_clipped(group) : token_wise(bits, group);
}

TEST_F(EmulatedPages, BytesAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t bits : {8, 4, 2}) {
      for (const bool norm : {false, true}) {
        if (norm && bits != 2) continue;
        for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
          const int32_t groups[] = {0, 16, 32, head_dim / 2};
          const TierFormat format = {component(bits, norm, groups[uniform(0, 3)]),
                                     component(bits, norm, groups[uniform(0, 3)])};
          expect_host_bytes({format, head_dim, 0, uniform(0, 1) == 0 ? 16 : uniform(1, 15), dtype});
          expect_host_bytes({format, head_dim, uniform(1, 15), 16, dtype});
        }
      }
    }
  }
}

// A sum of squares that overflows is out of range, what is no number is not finite; whichever of
// the two the host says.
TEST_F(EmulatedPages, BadTokensOfCodesClippedAtTheNorm) {
  const TierFormat format = {norm_clipped(), norm_clipped()};
  for (const float bad : {NAN, INFINITY, -INFINITY, 1e30f, 2e5f, 7e4f, 3e4f}) {
    const Case c = {format, 128, 0, 16, DType::kFloat32};
    RandomTokens tokens = random_tokens(c.count, c.head_dim, c.dtype);
    std::vector<float>& x = uniform(0, 1) == 0 ? tokens.k : tokens.v;
    const int32_t token = uniform(0, 15);
    for (int32_t d = 0; d < 128; ++d) x[token * 128 + d] = d % 2 == 0 ? bad : -bad;
    const PageLayout layout = layout_of(format, c.head_dim, kTileTokens);
    const PoisonedPage host(layout, DType::kFloat16, format), page(layout, DType::kFloat16, format);
    const Status expected = append_tokens(host.page(), 0, tokens.batch(0, 16));
    EXPECT_EQ(encode(c, tokens, page.page()), expected.code()) << bad;
  }
}

}  // namespace
}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// The kernels of an engine's cache on the host, against the host's reference: the same bytes and
// values. What it cannot see is warps that write a tile at one time; tests/gpu/codec/slots_test.cu
// covers that.
#include "codec/gpu/pages/block_decode.cuh"
#include "codec/gpu/pages/block_tiles.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "tests/support/block_world.h"
#include "tests/support/fresh_random.h"
#include "tierkv/basis.h"

namespace tierkv {

__align__(16) uint8_t
    shared_bytes[std::max(kTilesSharedBytes<256>, kBlockDecodeWarps* kBlockDecodeWarpBytes<256>)];

namespace {

using test::BlockShape;
using test::BlockWorld;

class EmulatedSlots : public RandomTest {
 protected:
  int32_t uniform(int32_t lo, int32_t hi) {
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }
  // CTAs in random order.
  template <class Kernel>
  void run(int32_t ctas, int32_t rows, const Kernel& kernel) {
    std::vector<int32_t> order(ctas * rows);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng_);
    for (const int32_t i : order) {
      std::fill(std::begin(shared_bytes), std::end(shared_bytes), uint8_t{0xff});
      emulator::cta().run({i % ctas, i / ctas}, kBlockThreads, kernel, {ctas, rows});
    }
  }
  void encode(const SlotEncode& e, bool by_tiles) {
    const auto windows = static_cast<int32_t>((e.count + kWindowTokens - 1) / kWindowTokens);
    const auto pairs = static_cast<int32_t>(e.count * e.cache.num_kv_heads);
    with_head_dim(e.cache.layout.head_dim(), [&]<int32_t kDim>() {
      if (by_tiles) {
        ASSERT_TRUE(has_aligned_rows(e));
        run(windows * e.cache.num_kv_heads, 1, [&] { encode_tiles_kernel<kDim>(e); });
      } else {
        constexpr int32_t kTokens = kBlockWarps * kWarpTokens<kDim>;
        run((pairs + kTokens - 1) / kTokens, 1, [&] { encode_slots_kernel<kDim>(e); });
      }
    });
  }
  void decode(const BlockDecode& d) {
    const auto ctas =
        static_cast<int32_t>((decode_warps(d) + kBlockDecodeWarps - 1) / kBlockDecodeWarps);
    with_head_dim(d.cache.layout.head_dim(), [&]<int32_t kDim>() {
      run(ctas, d.count, [&] { decode_blocks_kernel<kDim>(d); });
    });
  }
  template <class Call>
  static void with_head_dim(int32_t head_dim, const Call& call) {
    if (head_dim == 64) return call.template operator()<64>();
    if (head_dim == 96) return call.template operator()<96>();
    if (head_dim == 128) return call.template operator()<128>();
    call.template operator()<256>();
  }
  template <int32_t kDim>
  static void put(const LaneValues& x, std::vector<float>& rows) {
    if (!has_dims<kDim>()) return;
    std::copy_n(x, kLaneDims, &rows[token_of_lane<kDim>() * kDim + lane_dim<kDim>()]);
  }
  BlockShape shape_of(int32_t head_dim, const char* format) {
    BlockShape s;
    s.format = format;
    s.head_dim = head_dim;
    s.num_kv_heads = uniform(1, 2);
    s.block_tokens = uniform(0, 3) == 0 ? 16 : 64;
    s.rotate = uniform(0, 3) > 0;
    s.has_reflections = uniform(0, 3) > 0;
    s.layers_apart = uniform(1, 2);
    s.dtype = uniform(0, 1) == 1 ? DType::kBFloat16 : DType::kFloat16;
    return s;
  }
};

constexpr int32_t kHeadDims[] = {64, 96, 128, 256};
const char* const kFormats[] = {"k16v16", "k8v4", "k4v4", "k4v2", "k4v2n", "k2nv8"};

// Chunks of several sequences, single tokens, drafts that are written over, padding, tokens in any
// order and ones that no format holds.
TEST_F(EmulatedSlots, WriteTheBytesOfTheHost) {
  for (const int32_t head_dim : kHeadDims) {
    for (const char* format : kFormats) {
      SCOPED_TRACE(std::string(format) + " dim " + std::to_string(head_dim));
      BlockShape shape = shape_of(head_dim, format);
      shape.tokens = {uniform(20, 70), uniform(1, 20)};
      BlockWorld w(shape, rng_);
      w.k[rng_() % w.k.size()] = shape.dtype == DType::kFloat16 ? 0x7e00 : 0x7fc0;
      w.v[rng_() % w.v.size()] = shape.dtype == DType::kFloat16 ? 0xfc00 : 0xff80;
      std::vector<uint8_t> other = w.other_bytes();
      const BlockCache on_device = w.other_cache(&other);
      std::vector<int32_t> device_errors(kEngineErrors, 0);
      std::vector<int32_t> next = {0, 0};
      for (int32_t call = 0; call < 6; ++call) {
        BlockWorld::Tokens tokens;
        for (int32_t s = 0; s < 2; ++s) {
          const int32_t back = std::min(next[s], uniform(0, 3));  // refused drafts
          const int32_t from = next[s] - back, most = shape.tokens[s] - from;
          const int32_t count = std::min(most, uniform(0, 2) == 0 ? uniform(0, 40) : uniform(0, 2));
          for (int32_t t = from; t < from + count; ++t) w.add(&tokens, s, t);
          next[s] = from + count;
        }
        w.add(&tokens, 0, 0);
        tokens.slots.back() = -uniform(1, 2);
        if (uniform(0, 2) == 0) {  // which token goes where does not matter here
          std::shuffle(tokens.slots.begin(), tokens.slots.end(), rng_);
        }
        SlotEncode e = w.encode(tokens);
        ASSERT_TRUE(encode_slots_host(e));
        e.cache = on_device;
        e.errors = device_errors.data();
        encode(e, uniform(0, 1) == 1);
        for (int64_t i = 0; i < w.cache.num_blocks * w.cache.block_stride; ++i) {
          ASSERT_EQ(int{on_device.base[i]}, int{w.cache.base[i]})
              << "call " << call << ", byte " << i << " of " << w.cache.block_stride << " a block";
        }
        ASSERT_EQ(device_errors, w.errors);
      }
    }
  }
}

// To the last bit, which fp16 scales seldom show. A warp holds kWarpTokens rows of [head_dim].
TEST_F(EmulatedSlots, NormsAndRotationsHaveTheBitsOfTheHost) {
  std::normal_distribution<float> normal;
  for (const int32_t head_dim : kHeadDims) {
    for (int32_t round = 0; round < 20; ++round) {
      with_head_dim(head_dim, [&]<int32_t kDim>() {
        constexpr int32_t kTokens = kWarpTokens<kDim>;
        std::vector<float> given(kTokens * kDim), turned(given), back(given), norms(32);
        for (float& x : given) x = normal(rng_) * std::exp2(normal(rng_) * 4);
        const Rotation rotation = hadamard_rotation(kDim);
        emulator::cta().run(0, 32, [&] {
          LaneValues x;
          load_lane_floats<kDim>(&given[token_of_lane<kDim>() * kDim], x);
          norms[lane_index()] = squared_norm<kDim>(x);
          rotate<kDim>(rotation, x);
          put<kDim>(x, turned);
          rotate_back<kDim>(rotation, x);
          put<kDim>(x, back);
        });
        const Basis basis = Basis::hadamard(kDim);
        for (int32_t t = 0; t < kTokens; ++t) {
          std::vector<float> row(&given[t * kDim], &given[t * kDim] + kDim);
          for (int32_t i = 0; i < kTokenLanes<kDim>; ++i) {
            ASSERT_EQ(norms[t * kTokenLanes<kDim> + i], sum_of_squares(row.data(), kDim));
          }
          basis.apply(row.data(), 1);
          ASSERT_TRUE(std::equal(row.begin(), row.end(), &turned[t * kDim]));
          basis.undo(row.data(), 1);
          ASSERT_TRUE(std::equal(row.begin(), row.end(), &back[t * kDim]));
        }
      });
    }
  }
}

// Both ways that a warp holds tokens; each of its tokens has a normal of its own.
TEST_F(EmulatedSlots, ReflectionsHaveTheBitsOfTheHost) {
  std::normal_distribution<float> normal;
  const auto random_normals = [&](int32_t count, int32_t head_dim) {
    std::vector<float> mean(count * head_dim), w(mean);
    for (float& x : mean) x = normal(rng_) * std::exp2(normal(rng_) * 2);
    EXPECT_TRUE(key_reflections(Rotation{}, mean.data(), count, head_dim, w.data()));
    return w;
  };
  for (const int32_t head_dim : kHeadDims) {
    for (int32_t round = 0; round < 20; ++round) {
      with_head_dim(head_dim, [&]<int32_t kDim>() {
        std::vector<float> given(kHalfTokens * kDim);
        for (float& x : given) x = normal(rng_) * std::exp2(normal(rng_) * 4);
        constexpr int32_t kTokens = kWarpTokens<kDim>;
        const std::vector<float> w = random_normals(kTokens, kDim);
        std::vector<float> few(given.begin(), given.begin() + kTokens * kDim), half(given);
        std::vector<float> few_expected = few, expected = given;
        for (int32_t t = 0; t < kTokens; ++t) {
          reflect(&w[t * kDim], kDim, &few_expected[t * kDim]);
        }
        emulator::cta().run(0, 32, [&] {
          LaneValues x, w_lane;
          load_lane_floats<kDim>(&given[token_of_lane<kDim>() * kDim], x);
          load_lane_floats<kDim>(&w[token_of_lane<kDim>() * kDim], w_lane);
          reflect<kDim>(w_lane, x);
          put<kDim>(x, few);
        });
        ASSERT_EQ(few, few_expected) << kDim;
        for (int32_t t = 0; t < kHalfTokens; ++t) reflect(w.data(), kDim, &expected[t * kDim]);
        emulator::cta().run(0, 32, [&] {
          auto* table = reinterpret_cast<ChannelPair*>(shared_bytes);
          fill_channel_table<kDim>(Rotation{}, false, w.data(), 1.0f, table);
          __syncwarp();
          HalfRows<kDim> x;
          const auto place = [](int32_t i) {
            const int32_t lane = lane_index();
            return lane / 4 * kDim + i / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2 + i % 2;
          };
          for (int32_t i = 0; i < kDim / 4; ++i) x[i] = given[place(i)];
          reflect_half<kDim>(table, x);
          for (int32_t i = 0; i < kDim / 4; ++i) half[place(i)] = x[i];
        });
        ASSERT_EQ(half, expected) << kDim;
      });
    }
  }
}

// Rows that begin at any element, and what lies beside them.
TEST_F(EmulatedSlots, RowsLieAtAnyAddress) {
  constexpr int32_t kBeside = 8;
  for (const int32_t head_dim : kHeadDims) {
    for (int32_t shift = 0; shift < kBeside; ++shift) {
      with_head_dim(head_dim, [&]<int32_t kDim>() {
        constexpr int32_t kRow = kDim + 1;  // elements from a row to the next
        std::vector<uint16_t> given(kWarpTokens<kDim> * kRow + 2 * kBeside), copied(given.size());
        std::vector<float> floats(given.size()), seen(kWarpTokens<kDim> * kDim);
        for (size_t i = 0; i < given.size(); ++i) {
          given[i] = static_cast<uint16_t>(rng_() & 0xbfff);  // finite fp16
          copied[i] = 0x7fff;
          floats[i] = half_to_float(given[i]);
        }
        std::vector<uint16_t> expected = copied;
        emulator::cta().run(0, 32, [&] {
          const int32_t first = shift + token_of_lane<kDim>() * kRow;
          LaneValues x, y;
          load_lane_values<kDim>(&given[first], DType::kFloat16, true, x);
          load_lane_floats<kDim>(&floats[first], y);
          for (int32_t i = 0; i < kLaneDims; ++i) x[i] = x[i] == y[i] ? x[i] : NAN;
          put<kDim>(x, seen);
          if (!has_dims<kDim>()) return;
          const uint4 words = load_eight(&given[first + lane_dim<kDim>()]);
          store_eight(&copied[first + lane_dim<kDim>()], {words.x, words.y, words.z, words.w});
        });
        for (int32_t t = 0; t < kWarpTokens<kDim>; ++t) {
          for (int32_t d = 0; d < kDim; ++d) {
            const int32_t at = shift + t * kRow + d;
            expected[at] = given[at];
            ASSERT_EQ(seen[t * kDim + d], floats[at]) << kDim;
          }
        }
        ASSERT_EQ(copied, expected) << kDim;
      });
    }
  }
}

// Tokens of a warp go into pages of formats of their own, each into its own codes alone, and come
// back from there. A value that a type does not hold leaves other tokens of the warp alone.
TEST_F(EmulatedSlots, TokensOfAWarpHaveFormatsOfTheirOwn) {
  constexpr CodeType kTypes[] = {kRawCodes, kCodes8, kCodes4, kCodes2};
  std::normal_distribution<float> normal;
  for (const int32_t head_dim : kHeadDims) {
    for (int32_t round = 0; round < 60; ++round) {
      with_head_dim(head_dim, [&]<int32_t kDim>() {
        constexpr int32_t kTokens = kWarpTokens<kDim>;
        const auto c = uniform(0, 1) == 0 ? Component::kKey : Component::kValue;
        PageLayout layouts[kTokens];
        LaneFormat formats[kTokens];
        std::vector<uint8_t> pages[kTokens];
        int32_t slots[kTokens];
        std::vector<float> given(kTokens * kDim), read(given);
        for (float& x : given) x = normal(rng_);
        StatusCode expected[kTokens], found[32];
        for (int32_t t = 0; t < kTokens; ++t) {
          const CodeType type = kTypes[uniform(0, 3)];
          const bool is_norm = type == kCodes2 && uniform(0, 1) == 0;
          formats[t] = {type, is_norm ? StepRule::kNorm : StepRule::kMinMax, DType::kFloat16};
          const int32_t groups = type.is_raw() ? 0 : 1;
          layouts[t] = page_layout({kDim, type, type, groups, groups, 32, false});
          pages[t].resize(layouts[t].used_bytes);
          for (uint8_t& byte : pages[t]) byte = static_cast<uint8_t>(rng_());
          slots[t] = uniform(0, 31);
          expected[t] = StatusCode::kOk;
          if (uniform(0, 3) != 0) continue;
          const bool is_large = uniform(0, 1) == 0;
          given[t * kDim + uniform(0, kDim - 1)] = is_large ? 3e38f : NAN;
          expected[t] = is_large ? StatusCode::kOutOfRange : StatusCode::kNonFinite;
        }
        std::vector<uint8_t> before[kTokens];
        std::copy(std::begin(pages), std::end(pages), before);
        emulator::cta().run(0, 32, [&] {
          const int32_t t = token_of_lane<kDim>();
          const PageRef page = {pages[t].data(), &layouts[t], DType::kFloat16};
          LaneValues x;
          load_lane_floats<kDim>(&given[t * kDim], x);
          LaneCodes codes;
          const StatusCode status = encode_lane<kDim>(formats[t], x, &codes);
          found[lane_index()] = status;
          if (status == StatusCode::kOk) store_lane_codes<kDim>(page, slots[t], c, codes);
          __syncwarp();
          decode_lane<kDim>(page, slots[t], c, status == StatusCode::kOk, x);
          put<kDim>(x, read);
        });
        for (int32_t t = 0; t < kTokens; ++t) {
          SCOPED_TRACE(testing::Message() << "dim " << kDim << ", bits " << formats[t].type.bits());
          for (int32_t i = 0; i < kTokenLanes<kDim>; ++i) {
            ASSERT_EQ(found[t * kTokenLanes<kDim> + i], expected[t]);
          }
          const float* x = &given[t * kDim];
          const PageLayout& layout = layouts[t];
          const int32_t tile = slots[t] / kTileTokens, in_tile = slots[t] % kTileTokens;
          std::vector<float> decoded(kDim, 0.0f);
          if (expected[t] == StatusCode::kOk) {
            uint8_t* codes = before[t].data() + layout.tile_codes_byte(c, tile);
            const int32_t bits = formats[t].type.bits();
            const bool is_norm = formats[t].rule == StepRule::kNorm;
            const auto [lo, hi] = std::minmax_element(x, x + kDim);
            const QuantParams p = is_norm ? norm_params(sum_of_squares(x, kDim), kDim)
                                          : minmax_params(*lo, *hi, 1 << bits);
            const float scale = half_to_float(p.scale), zero = half_to_float(p.zero_point);
            for (int32_t d = 0; d < kDim; ++d) {
              const uint32_t code =
                  bits == 16 ? float_to_half(x[d])
                             : static_cast<uint32_t>(minmax_code(x[d], scale, zero, 1 << bits));
              store_code(codes, code_position({formats[t].type, kDim}, c, in_tile, d), bits, code);
              decoded[d] = bits == 16 ? half_to_float(static_cast<uint16_t>(code))
                                      : dequantize(static_cast<int32_t>(code), scale, zero);
            }
            if (bits != 16) {
              std::memcpy(before[t].data() + layout.tile_metadata_byte(c, tile) +
                              token_metadata_byte(0, in_tile),
                          &p, sizeof(p));
            }
          }
          ASSERT_EQ(pages[t], before[t]);
          ASSERT_TRUE(std::equal(decoded.begin(), decoded.end(), &read[t * kDim]));
        }
      });
    }
  }
}

TEST_F(EmulatedSlots, ReadTheValuesOfTheHost) {
  for (const int32_t head_dim : kHeadDims) {
    for (const char* format : kFormats) {
      SCOPED_TRACE(std::string(format) + " dim " + std::to_string(head_dim));
      BlockShape shape = shape_of(head_dim, format);
      shape.tokens = {40, 21};
      BlockWorld w(shape, rng_);
      w.encode_all();
      if (uniform(0, 1) == 1) w.table[w.columns] = uniform(0, 1) == 1 ? -1 : 1 << 30;
      const std::vector<int32_t> sequences = {1, 0, 5}, first = {uniform(0, 4), uniform(0, 20), 0};
      const std::vector<int32_t> starts = {0, 15, 15 + 20, 15 + 20 + 2};
      const size_t elements = starts.back() * w.head_elements();
      std::vector<uint16_t> k(elements + 16, 0x7f7f), v = k, k2 = k, v2 = k;
      const auto aligned = [](std::vector<uint16_t>& x) {
        return x.data() + (16 - reinterpret_cast<uintptr_t>(x.data()) % 16) % 16 / 2;
      };
      BlockDecode d;
      d.cache = w.cache;
      d.block_table = w.table.data();
      d.table_stride = w.columns;
      d.num_sequences = 2;
      d.sequences = sequences.data();
      d.first = first.data();
      d.starts = starts.data();
      d.count = 3;
      d.max_tokens = 20;
      d.num_rows = starts.back() - uniform(0, 1);
      d.k = aligned(k);
      d.v = aligned(v);
      d.dtype = uniform(0, 1) == 1 ? DType::kBFloat16 : DType::kFloat16;
      d.errors = w.errors.data();
      ASSERT_TRUE(decode_blocks_host(d));
      std::vector<int32_t> errors(kEngineErrors, 0);
      d.k = aligned(k2);
      d.v = aligned(v2);
      d.errors = errors.data();
      decode(d);
      for (size_t i = 0; i < elements; ++i) {
        ASSERT_EQ(aligned(k2)[i], aligned(k)[i]) << "key element " << i;
        ASSERT_EQ(aligned(v2)[i], aligned(v)[i]) << "value element " << i;
      }
      EXPECT_EQ(errors, w.errors);
    }
  }
}

}  // namespace
}  // namespace tierkv

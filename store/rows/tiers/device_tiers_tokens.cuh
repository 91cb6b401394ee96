// SPDX-License-Identifier: Apache-2.0
// Tokens that are written one by one: four lanes take a component of a token, so a warp takes it of
// eight tokens, which may belong to eight rows. Lane l holds the channels of half_rows.cuh, which
// are those of its words in the ring's tiles.
//
// Bound: sectors. A token's keys lie in twice and its values in eight times as many bytes of the
// ring's tiles as they have.
#pragma once

#include "codec/gpu/pages/tile_codes.cuh"
#include "gpu/lanes.cuh"
#include "store/rows/tiers/device_tiers_kernels.cuh"

namespace tierkv::store {

inline constexpr int32_t kTokenLanes = 4, kWarpTokens = 32 / kTokenLanes;
__device__ __forceinline__ int32_t token_lane() {
  return static_cast<int32_t>(threadIdx.x % static_cast<uint32_t>(kTokenLanes));
}

// In the four lanes of a token. By all lanes of a warp.
__device__ __forceinline__ bool any_of_token(bool x) {
  return (__ballot_sync(kFullWarp, x) >> (lane_index() & ~(kTokenLanes - 1)) & 15u) != 0;
}

// A component of a token of this lane: where it comes from, and where it goes.
struct TokenPart {
  bool is_there = false;
  int32_t kind = 0;               // how its codes are made: kind_of()
  const uint8_t* from = nullptr;  // the lane's first channel
  bool is_held = false;           // `from` is in the ring's tiles, else in the chunk
  bool is_odd = false;            // of two neighbours in the ring
  const float* mean = nullptr;    // taken off; null: nothing is
  uint8_t* codes = nullptr;       // of its tile
  uint32_t* params = nullptr;
  int32_t in_tile = 0;
};

// ---- clear ----

__device__ __forceinline__ void clear_slot(const PageRef& page, int32_t slot, Component part) {
  const PageLayout& layout = *page.layout;
  const TileLayout tile = layout.tile(part);
  const int32_t at = slot / kTileTokens, in_tile = slot % kTileTokens;
  uint8_t* const codes = page.bytes + layout.tile_codes_byte(part, at);
  const uint32_t nothing[4] = {};
#pragma unroll 1
  for (int32_t n = 0; n < tile.head_dim / 16; ++n) {
    store_token_codes(tile, part, in_tile, n / 2 * 32 + 2 * token_lane() + n % 2, nothing, codes);
  }
  if (layout.groups(part) != 0 && token_lane() == 0) *params_at(page, part, at, in_tile) = 0;
}

// What lies behind a token in its tile and page, where a call opens them. `written`: tokens of its
// side that the call writes; the token is the last of them. One that is alone clears the tile that
// it opens, before it is written.
__device__ __forceinline__ void clear_behind(const PageRef& page, int32_t slot, int32_t written,
                                             Component part) {
  const int32_t in_tile = slot % kTileTokens, tile = slot / kTileTokens;
  if (in_tile == 0 && written == 1) {
    clear_tile_side(page, tile, part, token_lane(), kTokenLanes);
  } else if (in_tile < written) {
#pragma unroll 1
    for (int32_t s = slot + 1; s < (tile + 1) * kTileTokens; ++s) clear_slot(page, s, part);
  }
  if (slot >= written) return;
#pragma unroll 1
  for (int32_t t = tile + 1; t < page.layout->tiles(); ++t) {
    clear_tile_side(page, t, part, token_lane(), kTokenLanes);
  }
}

// ---- values ----

// Pairs of neighbouring channels, fp16: word 2 b + dh.
template <int32_t kDim>
__device__ __forceinline__ void load_pairs(const TokenPart& t, Component part, DType chunk_dtype,
                                           uint32_t (&words)[kDim / 8]) {
  constexpr int32_t kBlocks = kDim / kDimBlock;
  if (!t.is_held) {
#pragma unroll
    for (int32_t i = 0; i < 2 * kBlocks; ++i) {
      words[i] = *reinterpret_cast<const uint32_t*>(t.from + 16 * i);
    }
    if (chunk_dtype == DType::kFloat16) return;
#pragma unroll
    for (uint32_t& word : words) word = bfloats_to_halves(word);
  } else if (part == Component::kKey) {
#pragma unroll
    for (int32_t i = 0; i < 2 * kBlocks; ++i) {
      words[i] = *reinterpret_cast<const uint32_t*>(t.from +
                                                    raw_tile_byte(kDim, Component::kKey, 0, 8 * i));
    }
  } else {  // both dim halves of a channel are neighbours, and both tokens of a word
    const uint32_t selector = t.is_odd ? 0x7632u : 0x5410u;
    uint2 pairs[kBlocks][2];
#pragma unroll
    for (int32_t i = 0; i < 2 * kBlocks; ++i) {
      const int32_t dim = i / 2 * kDimBlock + i % 2;
      pairs[i / 2][i % 2] =
          *reinterpret_cast<const uint2*>(t.from + raw_tile_byte(kDim, Component::kValue, 0, dim));
    }
#pragma unroll
    for (int32_t b = 0; b < kBlocks; ++b) {
      words[2 * b] = __byte_perm(pairs[b][0].x, pairs[b][1].x, selector);
      words[2 * b + 1] = __byte_perm(pairs[b][0].y, pairs[b][1].y, selector);
    }
  }
}

template <int32_t kDim>
__device__ __forceinline__ void to_coordinates(const uint32_t (&words)[kDim / 8], const float* mean,
                                               const Rotation& r, HalfRows<kDim>& x) {
  const int32_t dim = 2 * token_lane();
#pragma unroll
  for (int32_t i = 0; i < kDim / 8; ++i) {
    const float2 y = unpack_halves(words[i]);
    x[2 * i] = y.x, x[2 * i + 1] = y.y;
  }
  if (mean != nullptr) {
#pragma unroll
    for (int32_t i = 0; i < kDim / 8; ++i) {
      const float2 m = *reinterpret_cast<const float2*>(mean + 8 * i + dim);
      x[2 * i] = add_rn(x[2 * i], -m.x), x[2 * i + 1] = add_rn(x[2 * i + 1], -m.y);
    }
  }
  if (!r.is_on) return;
#pragma unroll
  for (int32_t i = 0; i < kDim / 4; ++i) {
    const uint32_t negative = r.negative[i / 8] >> dim;
    const int32_t bit = i / 2 % 4 * 8 + i % 2;
    x[i] = bits_float(float_bits(x[i]) ^ (negative << (31 - bit) & 0x80000000u));
  }
  hadamard_half<kDim>(x);
}

// ---- codes ----

// What is wrong with values that have no codes, the greatest where elements are raw; in the four
// lanes of a token.
template <int32_t kDim>
__device__ __forceinline__ StatusCode code_of_unsound(const HalfRows<kDim>& x, bool is_raw) {
  bool is_infinite = false, is_beyond = false;
#pragma unroll
  for (const float y : x) {
    is_infinite |= !is_finite(y);
    is_beyond |= is_finite(y) && !is_finite(half_to_float(float_to_half(y)));
  }
  is_infinite = any_of_token(is_infinite);
  is_beyond = any_of_token(is_beyond) && is_raw;
  return is_infinite && !is_beyond ? StatusCode::kNonFinite : StatusCode::kOutOfRange;
}

// Codes below 16 bits become 0 where the maker is that of parameters which are 0.
template <CodeType kType, int32_t kDim>
__device__ __forceinline__ void store_codes(const HalfRows<kDim>& x, const CodeMaker& maker,
                                            bool has_codes, Component part, int32_t in_tile,
                                            uint8_t* codes) {
  constexpr float kTop = static_cast<float>((1 << kType.bits()) - 1);
#pragma unroll
  for (int32_t n = 0; n < kDim / 16; ++n) {
    const int32_t first = n / 2 * 32 + 2 * token_lane(), par = n % 2;
    uint32_t four[4];
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      const float y = x[4 * (n & ~1) + 2 * j + par];
      four[j] = !kType.is_raw() ? biased_code(y, maker, kTop) & 255u
                : has_codes     ? float_to_half(y)
                                : 0u;
    }
    if (part == Component::kKey) {
      store_codes_of<kType>(kDim, Component::kKey, in_tile, first + par, four, codes);
    } else {
      store_codes_of<kType>(kDim, Component::kValue, in_tile, first + par, four, codes);
    }
  }
}

// The failure of the token, in its four lanes. A token without codes gets zeros.
template <CodeType kType, int32_t kDim>
__device__ __forceinline__ StatusCode write_codes(const HalfRows<kDim>& x, StepRule rule,
                                                  bool is_mine, const TokenPart& t,
                                                  Component part) {
  QuantParams p = {};
  bool is_sound = true;
  if constexpr (kType.is_raw()) {
#pragma unroll
    for (const float y : x) is_sound &= is_finite(half_to_float(float_to_half(y)));
  } else {
    p = half_params<kType, kDim>(x, rule, &is_sound);
  }
  StatusCode code = StatusCode::kOk;
  if (!__all_sync(kFullWarp, is_sound || !is_mine)) {
    const StatusCode found = code_of_unsound<kDim>(x, kType.is_raw());
    if (any_of_token(!is_sound)) code = found, p = {};
  }
  if (!is_mine) return StatusCode::kOk;
  // Where codes go is worked out here, not for all types before the loop over them.
  const auto in_tile = static_cast<uint32_t>(kept(t.in_tile)) % uint32_t{kTileTokens};
  store_codes<kType, kDim>(x, make_code_maker(p), code == StatusCode::kOk, part,
                           static_cast<int32_t>(in_tile), t.codes);
  if (!kType.is_raw() && token_lane() == 0) {
    *t.params = p.scale | static_cast<uint32_t>(p.zero_point) << 16;
  }
  return code;
}

// ---- a token ----

// Codes of one kind are made together: twice the bits and one for the rule, then one for whether
// the row is rotated.
__device__ __forceinline__ int32_t kind_of(const TiersPlace& at, int32_t side, Component part) {
  const RowClass& row_class = at.of_class();
  const bool is_norm = row_class.rule[side][static_cast<int32_t>(part)] == StepRule::kNorm;
  const int32_t bits = row_class.layout[side].tile(part).type.bits();
  return 4 * bits + (is_norm ? 2 : 0) + (at.has_basis() ? 1 : 0);
}

// The token at a position that leaves, into a slot of its side's page.
template <int32_t kDim>
__device__ __forceinline__ TokenPart part_of_token(const TiersCall& c, const TiersPlace& at,
                                                   int32_t entry, int32_t position, int32_t side,
                                                   const PageRef& page, int32_t slot,
                                                   Component part) {
  const DeviceTokens tokens = device_tokens(c.view, c.works, entry, at.kv_head);
  const bool is_key = part == Component::kKey;
  TokenPart t;
  t.is_there = true;
  t.kind = kind_of(at, side, part);
  t.is_held = position < tokens.held;
  const int32_t dim = 2 * token_lane();
  if (t.is_held) {
    const int32_t in_ring = position % tokens.layout.ring_tokens;
    const int32_t even = is_key ? in_ring : in_ring & ~1;
    t.from =
        tokens.raw + (is_key ? 0 : tokens.layout.value_ring) + raw_tile_byte(kDim, part, even, dim);
    t.is_odd = in_ring % 2 != 0;
  } else {
    const int64_t first = (position - tokens.held) * tokens.token_stride + dim;
    t.from = reinterpret_cast<const uint8_t*>((is_key ? tokens.k : tokens.v) + first);
  }
  t.mean = is_key ? at.key_mean() : nullptr;
  t.in_tile = slot % kTileTokens;
  t.codes = page.bytes + page.layout->tile_codes_byte(part, slot / kTileTokens);
  t.params = params_at(page, part, slot / kTileTokens, t.in_tile);
  return t;
}

// By a warp: one component of eight tokens. What a format cannot hold becomes 0 and a fault.
template <int32_t kDim>
__device__ __forceinline__ void write_tokens(const TiersCall& c, const TiersPlace& at,
                                             const TokenPart& t, Component part) {
  uint32_t left = __ballot_sync(kFullWarp, t.is_there);
#pragma unroll 1
  while (left != 0) {
    const int32_t kind = __shfl_sync(kFullWarp, t.kind, lowest_bit(left)), bits = kind / 4;
    const bool is_mine = t.is_there && t.kind == kind;
    left &= ~__ballot_sync(kFullWarp, is_mine);
    const StepRule rule = (kind & 2) != 0 ? StepRule::kNorm : StepRule::kMinMax;
    uint32_t words[kDim / 8] = {};
    if (is_mine) load_pairs<kDim>(t, part, c.works.chunk.dtype, words);
    HalfRows<kDim> x;
    const int32_t rotation = (kind & 1) != 0 ? static_cast<int32_t>(part) : 2;
    to_coordinates<kDim>(words, t.mean, c.codes.rotation[rotation], x);
    const StatusCode code = bits == 16  ? write_codes<kRawCodes, kDim>(x, rule, is_mine, t, part)
                            : bits == 8 ? write_codes<kCodes8, kDim>(x, rule, is_mine, t, part)
                            : bits == 4 ? write_codes<kCodes4, kDim>(x, rule, is_mine, t, part)
                                        : write_codes<kCodes2, kDim>(x, rule, is_mine, t, part);
    if (code != StatusCode::kOk && token_lane() == 0) {
      report_fault(c.fault, {code, at.slot, at.layer, at.kv_head});
    }
  }
}

// Grid of warps: both components of most_leaving tokens of every row, by eight tokens.
template <int32_t kDim>
__global__ void __launch_bounds__(kTiersThreads, kDim <= 128 ? 4 : 2)
    write_tiers_kernel(const __grid_constant__ TiersCall c) {
  wait_for_previous_kernel();
  commit(c.works);
  if (!c.works.has_pages()) return;
  const auto part = static_cast<Component>(warp_of_grid() % 2);
  const int32_t task = warp_of_grid() / 2 * kWarpTokens + lane_index() / kTokenLanes;
  const int32_t row = least(task / c.works.most_leaving, c.num_rows - 1);
  const TiersPlace at = place_of(c, row);
  const TiersDraft draft = load_whole(c.scratch.drafts + row);
  const int32_t i = task - row * c.works.most_leaving;
  const int32_t position = draft.first + i;
  TokenPart t;
  if (i < c.works.most_leaving && position < draft.end) {
    if (i == 0 && part == Component::kKey && token_lane() == 0) *at.state() = draft.after;
    const auto tier = static_cast<BodyTier>(draft.tiers >> 2 * i & 3u);
    const bool is_low = tier == BodyTier::kLow;
    const int32_t before = is_low ? draft.before.tokens[1] : draft.before.tokens[0];
    const int32_t after = is_low ? draft.after.tokens[1] : draft.after.tokens[0];
    const int32_t index = before + __popc(positions_of(draft.tiers, tier) & word_mask(0, i));
    if (is_kept(tier)) {
      const PageRef page = at.page(side_of(tier), index);
      const int32_t slot = index % page.layout->tokens;
      if (index + 1 == after) clear_behind(page, slot, after - before, part);
      t = part_of_token<kDim>(c, at, row / c.view.num_kv_heads, position, side_of(tier), page, slot,
                              part);
    }
  }
  __syncwarp();
  write_tokens<kDim>(c, at, t, part);
}

}  // namespace tierkv::store

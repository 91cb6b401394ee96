// One component of a staged tile into the codes and metadata of its page, by one warp.
//
// Two passes over the fragments in shared memory: extrema, from which one lane per token makes the
// metadata; then codes, which every lane packs into the words it stores. No value is kept in
// between, so head_dim and sub-groups are plain loop bounds.
#pragma once

#include <cstdint>

#include "codec/format/element.h"
#include "codec/gpu/pages/tile_stage.cuh"
#include "gpu/math.cuh"

namespace tierkv {

// ---- raw elements ----

__device__ __forceinline__ StatusCode raw_code_status(float x, DType raw) {
  if (!is_finite(x)) return StatusCode::kNonFinite;
  return is_finite(raw_to_float(raw, float_to_raw(raw, x))) ? StatusCode::kOk
                                                            : StatusCode::kOutOfRange;
}

template <DType kDtype, Component kComponent>
__device__ __forceinline__ StatusCode check_raw(const TileTask* shared_task) {
  const TileTask t = *shared_task;
  StatusCode code = StatusCode::kOk;
  for (int32_t block = 0; block < t.layout.dim_blocks(); ++block) {
    Pair<kDtype> x[2][2];
    load_fragment<kDtype, kComponent>(t.stage, t.pitch, block, x);
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const float2 y = pair_floats(x[i / 2][i % 2]);
      code = greater(code,
                     greater(raw_code_status(y.x, t.raw_dtype), raw_code_status(y.y, t.raw_dtype)));
    }
  }
  return code;
}

template <DType kDtype>
__device__ __forceinline__ uint32_t raw_word(Pair<kDtype> x, DType raw) {
  if constexpr (kDtype != DType::kFloat32) {
    if (raw == kDtype) return x.bits;
  }
  const float2 y = pair_floats(x);
  return float_to_raw(raw, y.x) | static_cast<uint32_t>(float_to_raw(raw, y.y)) << 16;
}

// ---- parameters ----

// Extrema of the lane's tokens over one sub-group, over all lanes that hold values of them.
template <Component kComponent>
struct TokenExtrema {
  float lo[2][fragment_pars(kComponent)], hi[2][fragment_pars(kComponent)];
};

template <DType kDtype, Component kComponent>
__device__ __forceinline__ TokenExtrema<kComponent> token_extrema(const TileTask& t, int32_t block,
                                                                  int32_t end_block) {
  Pair<kDtype> lo[2], hi[2], x[2][2];
  load_fragment<kDtype, kComponent>(t.stage, t.pitch, block, x);
#pragma unroll
  for (int32_t th = 0; th < 2; ++th) {
    lo[th] = pair_min(x[th][0], x[th][1]);
    hi[th] = pair_max(x[th][0], x[th][1]);
  }
  for (++block; block < end_block; ++block) {
    load_fragment<kDtype, kComponent>(t.stage, t.pitch, block, x);
#pragma unroll
    for (int32_t th = 0; th < 2; ++th) {
      lo[th] = pair_min(lo[th], pair_min(x[th][0], x[th][1]));
      hi[th] = pair_max(hi[th], pair_max(x[th][0], x[th][1]));
    }
  }
  // Lanes of one token differ in lane % 4 (keys) or lane / 4 (values).
  constexpr int32_t kFirst = kComponent == Component::kKey ? 1 : 4;
  constexpr int32_t kLast = kComponent == Component::kKey ? 2 : 16;
  TokenExtrema<kComponent> e;
#pragma unroll
  for (int32_t th = 0; th < 2; ++th) {
#pragma unroll
    for (int32_t lanes = kFirst; lanes <= kLast; lanes *= 2) {
      lo[th] = pair_min(lo[th], pair_shuffle_xor(lo[th], lanes));
      hi[th] = pair_max(hi[th], pair_shuffle_xor(hi[th], lanes));
    }
    const float2 l = pair_floats(lo[th]), h = pair_floats(hi[th]);
    if constexpr (kComponent == Component::kKey) {
      e.lo[th][0] = nan_min(l.x, l.y), e.hi[th][0] = nan_max(h.x, h.y);
    } else {
      e.lo[th][0] = l.x, e.lo[th][1] = l.y;
      e.hi[th][0] = h.x, e.hi[th][1] = h.y;
    }
  }
  return e;
}

// Sums of squares of the lane's tokens over one sub-group, in the order of add_partials(): lane 16
// a
// + 8 dh + d % 8 of it is the block's parity a, the dim half dh and the place d % 8 there.
template <Component kComponent>
struct TokenSquares {
  float sum[2][fragment_pars(kComponent)];
};

template <DType kDtype, Component kComponent>
__device__ __forceinline__ TokenSquares<kComponent> token_squares(const TileTask& t, int32_t block,
                                                                  int32_t end_block) {
  float partial[2][2][2][2] = {};  // [block's parity][th][dh][par of the fragment]
  for (; block < end_block; block += 2) {
#pragma unroll
    for (int32_t odd = 0; odd < 2; ++odd) {
      if (block + odd >= end_block) continue;
      Pair<kDtype> x[2][2];
      load_fragment<kDtype, kComponent>(t.stage, t.pitch, block + odd, x);
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const float2 y = pair_floats(x[i / 2][i % 2]);
        float(&sums)[2] = partial[odd][i / 2][i % 2];
        sums[0] = add_rn(sums[0], mul_rn(y.x, y.x));
        sums[1] = add_rn(sums[1], mul_rn(y.y, y.y));
      }
    }
  }
  // Lanes of one token, as in token_extrema(), the highest bit of d % 8 first.
  constexpr int32_t kFirst = kComponent == Component::kKey ? 2 : 16;
  constexpr int32_t kLast = kComponent == Component::kKey ? 1 : 4;
  TokenSquares<kComponent> s;
#pragma unroll
  for (int32_t th = 0; th < 2; ++th) {
    float sums[2];
#pragma unroll
    for (int32_t par = 0; par < 2; ++par) {
      const float low = add_rn(partial[0][th][0][par], partial[1][th][0][par]);
      const float high = add_rn(partial[0][th][1][par], partial[1][th][1][par]);
      sums[par] = add_rn(low, high);
#pragma unroll
      for (int32_t lanes = kFirst; lanes >= kLast; lanes /= 2) {
        sums[par] = add_rn(sums[par], __shfl_xor_sync(kFullWarp, sums[par], lanes));
      }
    }
    if constexpr (kComponent == Component::kKey) {
      s.sum[th][0] = add_rn(sums[0], sums[1]);
    } else {
      s.sum[th][0] = sums[0], s.sum[th][1] = sums[1];
    }
  }
  return s;
}

// Several lanes know a token's extrema; one of them makes its parameters.
template <DType kDtype, Component kComponent, StepRule kRule>
__device__ __forceinline__ StatusCode make_params(const TileTask* shared_task) {
  const TileTask t = *shared_task;
  constexpr int32_t kPars = fragment_pars(kComponent);
  const int32_t lane = packing_lane(), levels = t.layout.type.levels();
  const int32_t rank = kComponent == Component::kKey ? lane % 4 : lane / 4;
  const int32_t th = rank % 2, par = kPars == 1 ? 0 : rank / 2 % 2;
  const bool is_author = rank < 2 * kPars;
  const int32_t token = fragment_token(kComponent, lane, th, par);
  const int32_t blocks_per_group = t.layout.dim_blocks() / t.groups;
  StatusCode code = StatusCode::kOk;
  for (int32_t group = 0; group < t.groups; ++group) {
    const TokenExtrema<kComponent> e = token_extrema<kDtype, kComponent>(
        t, group * blocks_per_group, (group + 1) * blocks_per_group);
    float lo = th == 0 ? e.lo[0][0] : e.lo[1][0], hi = th == 0 ? e.hi[0][0] : e.hi[1][0];
    if constexpr (kPars == 2) {
      if (par == 1) lo = th == 0 ? e.lo[0][1] : e.lo[1][1];
      if (par == 1) hi = th == 0 ? e.hi[0][1] : e.hi[1][1];
    }
    QuantParams p;
    if constexpr (kRule == StepRule::kNorm) {
      const TokenSquares<kComponent> s = token_squares<kDtype, kComponent>(
          t, group * blocks_per_group, (group + 1) * blocks_per_group);
      float squares = th == 0 ? s.sum[0][0] : s.sum[1][0];
      if constexpr (kPars == 2) {
        if (par == 1) squares = th == 0 ? s.sum[0][1] : s.sum[1][1];
      }
      p = norm_params(squares, blocks_per_group * kDimBlock);
    } else {
      p = minmax_params(lo, hi, levels);
    }
    if (!is_finite(lo) || !is_finite(hi)) {
      code = greater(code, StatusCode::kNonFinite);
    } else if (!params_in_range(p)) {
      code = greater(code, StatusCode::kOutOfRange);
    }
    if (!is_author) continue;
    t.makers[group * kTileTokens + token] = make_code_maker(p);
    if (token < t.first_token) continue;
    *reinterpret_cast<uint32_t*>(t.metadata + token_metadata_byte(group, token)) =
        p.scale | static_cast<uint32_t>(p.zero_point) << 16;
  }
  return code;
}

// Extrema and parameters, or the check of raw values; the warp's lanes have seen all params when
// it returns. The task lies in shared memory: registers hold that of one component at a time.
template <DType kDtype, Component kComponent, StepRule kRule = StepRule::kMinMax>
__device__ __forceinline__ StatusCode prepare_tile(const TileTask* task) {
  const StatusCode code = task->layout.type.is_raw() ? check_raw<kDtype, kComponent>(task)
                                                     : make_params<kDtype, kComponent, kRule>(task);
  __syncwarp();
  return code;
}

// ---- codes ----

// The makers of the lane's tokens, renewed at every sub-group.
template <Component kComponent>
struct LaneMakers {
  CodeMaker of[2][fragment_pars(kComponent)];
  const CodeMaker* next;  // of the next sub-group
  int32_t blocks_left;    // of this one

  __device__ __forceinline__ void enter_block(int32_t blocks_per_group) {
    if (blocks_left-- > 0) return;
#pragma unroll
    for (int32_t i = 0; i < 2 * fragment_pars(kComponent); ++i) {
      const int32_t th = i % 2, par = i / 2;
      of[th][par] = next[fragment_token(kComponent, packing_lane(), th, par)];
    }
    next += kTileTokens;
    blocks_left = blocks_per_group - 1;
  }
};

template <DType kDtype, Component kComponent>
__device__ __forceinline__ void make_codes(const Pair<kDtype> (&x)[2][2],
                                           const LaneMakers<kComponent>& makers, float top,
                                           BlockCodes* codes) {
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t th = i / 2, dh = i % 2;
    const float2 y = pair_floats(x[th][dh]);
    codes->at[th][dh][0] = biased_code(y.x, makers.of[th][0], top);
    codes->at[th][dh][1] = biased_code(y.y, makers.of[th][fragment_pars(kComponent) - 1], top);
  }
}

template <int32_t kWords>
__device__ __forceinline__ void store_words(const TileTask& t, int32_t first_word,
                                            const uint32_t (&words)[kWords]) {
  const int32_t lane = packing_lane();
  uint8_t* to = t.codes + lane_word_byte(t.layout.words_per_lane(), first_word, lane);
  if constexpr (kWords == 4) {
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
  } else {
    *reinterpret_cast<uint32_t*>(to) = words[0];
  }
}

// What one access of a lane holds: kWords words, the codes of kWords * 4 / kBits dim blocks.
template <DType kDtype, Component kComponent, CodeType kType, int32_t kWords>
struct LaneAccess {
  static constexpr int32_t kBits = kType.bits();
  static constexpr int32_t kBlocks = kWords * 4 / kBits;
  uint32_t words[kWords];

  __device__ __forceinline__ void make(const TileTask& t, int32_t first_word,
                                       LaneMakers<kComponent>* makers) {
    constexpr float kTop = static_cast<float>((1 << kBits) - 1);
    const int32_t first_block = first_word * 4 / kBits;
    const int32_t blocks_per_group = kType.is_raw() ? 1 : t.layout.dim_blocks() / t.groups;
    BlockCodes even, codes;
#pragma unroll
    for (int32_t i = 0; i < kBlocks; ++i) {
      Pair<kDtype> x[2][2];
      load_fragment<kDtype, kComponent>(t.stage, t.pitch, first_block + i, x);
      if constexpr (kType.is_raw()) {
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) {
          words[fragment_register(kComponent, j / 2, j % 2)] =
              raw_word(x[j / 2][j % 2], t.raw_dtype);
        }
        continue;
      } else {
        makers->enter_block(blocks_per_group);
        make_codes<kDtype, kComponent>(x, *makers, kTop, &codes);
        if constexpr (kBits == 8) {
          words[2 * i] = pack_word_8(codes, 0);
          words[2 * i + 1] = pack_word_8(codes, 1);
          finish_first(words[2 * i + 1]);
        } else if constexpr (kBits == 4) {
          words[i] = pack_word_4(codes);
          finish_first(words[i]);
        } else if (i % 2 == 0) {
          even = codes;
        } else {
          words[i / 2] = pack_word_2(even, codes);
          finish_first(words[i / 2]);
        }
      }
    }
    store_words<kWords>(t, first_word, words);
  }
};

template <DType kDtype, Component kComponent, CodeType kType>
__device__ __forceinline__ void write_codes(const TileTask* shared_task) {
  const TileTask t = *shared_task;
  LaneMakers<kComponent> makers;
  makers.next = t.makers;
  makers.blocks_left = 0;
  const int32_t words = t.layout.words_per_lane();
  int32_t word = 0;
  for (; word + 4 <= words; word += 4) {
    LaneAccess<kDtype, kComponent, kType, 4>().make(t, word, &makers);
  }
  if constexpr (kType.bits() <= 4) {  // 96 dims, and 64 of 2 bits, are no whole number of 16 bytes
    if (word + 2 <= words) {
      LaneAccess<kDtype, kComponent, kType, 2>().make(t, word, &makers);
      word += 2;
    }
  }
  if constexpr (kType.bits() == 2) {
    if (word < words) LaneAccess<kDtype, kComponent, kType, 1>().make(t, word, &makers);
  }
}

// The first tile of a page that is continued: token by token, so that the codes of the others stay.
template <DType kDtype, Component kComponent>
__device__ __forceinline__ void write_kept_codes(const TileTask* shared_task) {
  const TileTask t = *shared_task;
  const int32_t head_dim = t.layout.head_dim, levels = t.layout.type.levels();
  const int32_t width = head_dim / max(t.groups, 1);
  for (int32_t token = t.first_token; token < kTileTokens; ++token) {
    for (int32_t dim = packing_lane() / 8 * 32 + packing_lane() % 8; dim < head_dim; dim += 128) {
      uint32_t codes[4];
      for (int32_t j = 0; j < 4; ++j) {
        const float x = load_element(t.stage + token * t.pitch, kDtype, dim + 8 * j);
        if (t.layout.type.is_raw()) {
          codes[j] = float_to_raw(t.raw_dtype, x);
          continue;
        }
        const CodeMaker m = t.makers[(dim + 8 * j) / width * kTileTokens + token];
        codes[j] = minmax_code(x, m.scale, m.zero_point, levels);
      }
      store_token_codes(t.layout, kComponent, token, dim, codes, t.codes);
    }
  }
}

template <DType kDtype, Component kComponent>
__device__ __forceinline__ void write_codes_of(const TileTask* task) {
  const CodeType type = task->layout.type;
  if (type == kRawCodes) return write_codes<kDtype, kComponent, kRawCodes>(task);
  if (type == kCodes8) return write_codes<kDtype, kComponent, kCodes8>(task);
  if (type == kCodes4) return write_codes<kDtype, kComponent, kCodes4>(task);
  return write_codes<kDtype, kComponent, kCodes2>(task);
}

// The codes of a tile that prepare_tile() accepted.
template <DType kDtype, Component kComponent>
__device__ __forceinline__ void write_tile(const TileTask* task) {
  if (task->first_token > 0) {
    write_kept_codes<kDtype, kComponent>(task);
  } else {
    write_codes_of<kDtype, kComponent>(task);
  }
}

}  // namespace tierkv

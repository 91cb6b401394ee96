// The codes of one component of a tile back to values, by one warp: every lane loads the words it
// would have stored (codec/gpu/pages/tile_encode.cuh), and rows leave through shared memory, so
// that global memory sees whole rows.
#pragma once

#include <cstdint>

#include "codec/format/element.h"
#include "codec/gpu/pages/tile_stage.cuh"

namespace tierkv {

// One component of the tile that a warp works on.
struct DecodeTask {
  const uint8_t* codes;     // the tile's in the page
  const uint8_t* metadata;  // likewise
  uint8_t* stage;           // 16 rows in shared memory
  int32_t pitch;            // from row to row
  TileLayout layout;
  int32_t groups;  // 0 of raw elements
  DType raw_dtype;
};

// The parameters of the lane's tokens, renewed at every sub-group.
template <Component kComponent>
struct LaneParams {
  static constexpr int32_t kPars = fragment_pars(kComponent);
  float scale[2][kPars], zero_point[2][kPars];
  const uint8_t* next;  // of the next sub-group
  int32_t blocks_left;  // of this one

  __device__ __forceinline__ void enter_block(int32_t blocks_per_group) {
    if (blocks_left-- > 0) return;
#pragma unroll
    for (int32_t i = 0; i < 2 * kPars; ++i) {
      const int32_t th = i % 2, par = i / 2;
      const int32_t token = fragment_token(kComponent, lane_index(), th, par);
      const auto word = *reinterpret_cast<const uint32_t*>(next + token_metadata_byte(0, token));
      scale[th][par] = half_to_float(static_cast<uint16_t>(word));
      zero_point[th][par] = half_to_float(static_cast<uint16_t>(word >> 16));
    }
    next += kMetadataBlockBytes;
    blocks_left = blocks_per_group - 1;
  }
};

// Two values of a lane to the rows of the stage: neighbouring dims of a token (keys), or a dim of
// neighbouring tokens (values).
template <DType kDtype, Component kComponent>
__device__ __forceinline__ void stage_pair(const DecodeTask& t, int32_t block, int32_t th,
                                           int32_t dh, float2 x) {
  const int32_t lane = lane_index();
  const int32_t dim = block * kDimBlock + fragment_dim(kComponent, lane, dh, 0);
  uint8_t* row = t.stage + fragment_token(kComponent, lane, th, 0) * t.pitch;
  if constexpr (kComponent == Component::kKey) {
    store_element(row, kDtype, dim, x.x);
    store_element(row, kDtype, dim + 1, x.y);
  } else {
    store_element(row, kDtype, dim, x.x);
    store_element(row + t.pitch, kDtype, dim, x.y);
  }
}

template <int32_t kWords>
__device__ __forceinline__ void load_words(const uint8_t* from, uint32_t (&words)[kWords]) {
  if constexpr (kWords == 4) {
    const auto x = *reinterpret_cast<const uint4*>(from);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else if constexpr (kWords == 2) {
    const auto x = *reinterpret_cast<const uint2*>(from);
    words[0] = x.x, words[1] = x.y;
  } else {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

// One access of a lane: kWords words, the codes of kWords * 4 / kBits dim blocks.
template <DType kDtype, Component kComponent, CodeType kType, int32_t kWords>
struct DecodeAccess {
  static constexpr int32_t kBits = kType.bits();
  static constexpr int32_t kPars = fragment_pars(kComponent);

  __device__ __forceinline__ static float2 raw_pair(const DecodeTask& t, uint32_t word) {
    return {raw_to_float(t.raw_dtype, static_cast<uint16_t>(word)),
            raw_to_float(t.raw_dtype, static_cast<uint16_t>(word >> 16))};
  }
  __device__ __forceinline__ static float value(uint32_t word, int32_t bit, float scale,
                                                float zero_point) {
    const uint32_t code = word >> bit & ((1u << kBits) - 1);
    return dequantize(static_cast<int32_t>(code), scale, zero_point);
  }

  __device__ __forceinline__ static void run(const DecodeTask& t, int32_t first_word,
                                             LaneParams<kComponent>* params) {
    const int32_t first_block = first_word * 4 / kBits;
    const int32_t blocks_per_group = kType.is_raw() ? 1 : t.layout.dim_blocks() / t.groups;
    uint32_t words[kWords];
    load_words(t.codes + lane_word_byte(t.layout.words_per_lane(), first_word, lane_index()),
               words);
#pragma unroll
    for (int32_t i = 0; i < kWords * 4 / kBits; ++i) {
      if constexpr (!kType.is_raw()) params->enter_block(blocks_per_group);
#pragma unroll
      for (int32_t n = 0; n < 4; ++n) {
        const int32_t th = n / 2, dh = n % 2;
        float2 x;
        if constexpr (kType.is_raw()) {
          x = raw_pair(t, words[fragment_register(kComponent, th, dh)]);
        } else {
          const uint32_t word = words[fragment_code_word(kBits, i, th)];
          x.x = value(word, fragment_code_bit(kBits, i, th, dh, 0), params->scale[th][0],
                      params->zero_point[th][0]);
          x.y = value(word, fragment_code_bit(kBits, i, th, dh, 1), params->scale[th][kPars - 1],
                      params->zero_point[th][kPars - 1]);
        }
        stage_pair<kDtype, kComponent>(t, first_block + i, th, dh, x);
      }
    }
  }
};

template <DType kDtype, Component kComponent, CodeType kType>
__device__ __forceinline__ void decode_codes(const DecodeTask& t) {
  LaneParams<kComponent> params;
  params.next = t.metadata;
  params.blocks_left = 0;
  const int32_t words = t.layout.words_per_lane();
  int32_t word = 0;
#pragma unroll 2
  for (; word + 4 <= words; word += 4) {
    DecodeAccess<kDtype, kComponent, kType, 4>::run(t, word, &params);
  }
  if constexpr (kType.bits() <= 4) {
    if (word + 2 <= words) {
      DecodeAccess<kDtype, kComponent, kType, 2>::run(t, word, &params);
      word += 2;
    }
  }
  if constexpr (kType.bits() == 2) {
    if (word < words) DecodeAccess<kDtype, kComponent, kType, 1>::run(t, word, &params);
  }
}

template <DType kDtype, Component kComponent>
__device__ __forceinline__ void decode_to_stage(const DecodeTask& t) {
  const CodeType type = t.layout.type;
  if (type == kRawCodes) return decode_codes<kDtype, kComponent, kRawCodes>(t);
  if (type == kCodes8) return decode_codes<kDtype, kComponent, kCodes8>(t);
  if (type == kCodes4) return decode_codes<kDtype, kComponent, kCodes4>(t);
  return decode_codes<kDtype, kComponent, kCodes2>(t);
}

// Rows of the stage to where the job's tokens lie in `to`.
__device__ __forceinline__ void unstage_rows(const PageBatch& b, const PageJob& job,
                                             const TileTokens& t, const StageShape& shape,
                                             const uint8_t* stage, void* to) {
  const int64_t offset = t.token < 0 ? -1 : token_element(b, job, t.token) * dtype_bytes(b.dtype);
#pragma unroll
  for (int32_t i = 0; i < kTileTokens; i += 2) {
    const int32_t row = i + lane_index() / 16;
    const int64_t at = __shfl_sync(kFullWarp, offset, row);
    if (at < 0) continue;
    for (int32_t byte = lane_index() % 16 * kVectorBytes; byte < shape.row_bytes;
         byte += 16 * kVectorBytes) {
      *reinterpret_cast<uint4*>(static_cast<uint8_t*>(to) + at + byte) =
          *reinterpret_cast<const uint4*>(stage + row * shape.pitch + byte);
    }
  }
}

}  // namespace tierkv

// One tile of rows in shared memory, on its way from rows in global memory to fragments in
// registers. A warp owns a stage.
//
// Rows are padded so that a warp's fragment accesses touch every bank once: a pitch of an odd
// number of 16-byte pieces for the eight rows of a matrix of 16-bit elements, of 8 words modulo 32
// for floats.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/format/fragment_codes.h"
#include "codec/gpu/pages/page_batch.h"
#include "gpu/copies.cuh"
#include "gpu/mma.cuh"
#include "gpu/warp.cuh"

namespace tierkv {

// One component of the tile that a warp works on. Rows of slots without a token are zeros: codes 0
// and metadata 0, as unused slots must be.
struct alignas(16) TileTask {
  const uint8_t* stage;  // 16 rows in shared memory
  int32_t pitch;         // from row to row
  CodeMaker* makers;     // shared memory, [groups][16]
  uint8_t* codes;        // the tile's in the page
  uint8_t* metadata;     // likewise
  TileLayout layout;
  int32_t groups;  // 0 of raw elements
  DType raw_dtype;
  int32_t first_token;  // tokens before it keep their codes
};

// Shared memory of one warp: rows, makers, tasks.
struct StageShape {
  int32_t row_bytes;        // head_dim elements
  int32_t pitch;            // bytes from row to row
  int32_t component_bytes;  // 16 rows; keys first, then values
  int32_t maker_bytes;      // per component: a CodeMaker for each token and sub-group
  int32_t warp_bytes;
};

inline StageShape stage_shape(const PageFormats& formats, DType dtype) {
  StageShape s{};
  s.row_bytes = formats.layout[0].head_dim() * dtype_bytes(dtype);
  s.pitch = s.row_bytes + (dtype == DType::kFloat32 ? 32 : 16);
  s.component_bytes = kTileTokens * s.pitch;
  int32_t groups = 0;
  for (int32_t i = 0; i < formats.count; ++i) {
    groups = std::max({groups, formats.layout[i].k_groups, formats.layout[i].v_groups});
  }
  s.maker_bytes = groups * kTileTokens * static_cast<int32_t>(sizeof(CodeMaker));
  s.warp_bytes = 2 * (s.component_bytes + s.maker_bytes + static_cast<int32_t>(sizeof(TileTask)));
  return s;
}

// lane_index(), but as far as the compiler can tell perhaps negative. It then orders the loops of
// the packing so that all formats of fp16 take 4 to 5 % less time, those of bfloat16 2 % more
// (measured); those of the decoding would take up to 7 % more.
__device__ __forceinline__ int32_t packing_lane() {
  return static_cast<int32_t>(threadIdx.x) % 32;
}

// The tokens of a job that lie in one tile.
struct TileTokens {
  int32_t begin, end;  // slots of the tile, 0 to 16; begin >= end: none
  int64_t token;       // lane i: the token of slot i; -1 where the slot is not of the job
  StatusCode code;     // lane i: of the token's number
};

__device__ __forceinline__ TileTokens tile_tokens(const PageBatch& b, const PageJob& job,
                                                  int32_t tile) {
  const int32_t first = tile * kTileTokens, slot = lane_index();
  TileTokens t;
  t.begin = max(job.first_slot - first, 0);
  t.end = min(job.first_slot + job.count - first, kTileTokens);
  t.token = -1;
  t.code = StatusCode::kOk;
  if (slot >= t.begin && slot < t.end) {
    const int64_t i = job.first + (first + slot - job.first_slot);
    t.token = b.order == nullptr ? i : b.order[i];
    if (t.token < 0 || t.token > INT32_MAX) {
      t.token = -1;
      t.code = StatusCode::kInvalidArgument;
    }
  }
  return t;
}

// Element of a token's row from the start of k and v.
__device__ __forceinline__ int64_t token_element(const PageBatch& b, const PageJob& job,
                                                 int64_t token) {
  return job.input + token * b.token_stride;
}

// Starts copying the tile's rows into the stage, zeros for slots that are not of the job. Half a
// warp takes a row.
__device__ __forceinline__ void stage_rows(const PageEncode& e, const PageJob& job,
                                           const TileTokens& t, const StageShape& shape,
                                           uint8_t* stage) {
  const int32_t element_bytes = dtype_bytes(e.batch.dtype);
  const int64_t offset = t.token < 0 ? -1 : token_element(e.batch, job, t.token) * element_bytes;
  const auto* k = static_cast<const uint8_t*>(e.k);
  const auto* v = static_cast<const uint8_t*>(e.v);
#pragma unroll
  for (int32_t i = 0; i < kTileTokens; i += 2) {
    const int32_t row = i + packing_lane() / 16;
    const int64_t row_offset = __shfl_sync(kFullWarp, offset, row);
    const bool present = row_offset >= 0;
    const int64_t from = present ? row_offset : 0;
    uint8_t* to = stage + row * shape.pitch;
    for (int32_t byte = packing_lane() % 16 * kVectorBytes; byte < shape.row_bytes;
         byte += 16 * kVectorBytes) {
      copy_async_16(to + byte, k + from + byte, present);
      copy_async_16(to + shape.component_bytes + byte, v + from + byte, present);
    }
  }
}

// The lane's values of dim block `block`: pair of [th][dh].
template <DType kDtype, Component kComponent>
__device__ __forceinline__ void load_fragment(const uint8_t* stage, int32_t pitch, int32_t block,
                                              Pair<kDtype> (&x)[2][2]) {
  const int32_t lane = packing_lane();
  if constexpr (kDtype == DType::kFloat32) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t th = i / 2, dh = i % 2;
      const int32_t dim = block * kDimBlock + fragment_dim(kComponent, lane, dh, 0);
      const uint8_t* at = stage + fragment_token(kComponent, lane, th, 0) * pitch + 4 * dim;
      if constexpr (kComponent == Component::kKey) {
        x[th][dh].bits = *reinterpret_cast<const float2*>(at);
      } else {
        x[th][dh].bits = {*reinterpret_cast<const float*>(at),
                          *reinterpret_cast<const float*>(at + pitch)};
      }
    }
  } else {
    // Register r comes from the matrix whose rows the lanes 8 r .. 8 r + 7 name.
    const int32_t r = lane / 8;
    const int32_t th = kComponent == Component::kKey ? r % 2 : r / 2, dh = r % 2 + r / 2 - th;
    const uint8_t* row = stage + (lane % 8 + 8 * th) * pitch + 32 * block + 16 * dh;
    uint32_t reg[4];
    if constexpr (kComponent == Component::kKey) {
      load_matrices(reg, row);
    } else {
      load_matrices_transposed(reg, row);
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      x[i / 2][i % 2].bits = reg[fragment_register(kComponent, i / 2, i % 2)];
    }
  }
}

}  // namespace tierkv

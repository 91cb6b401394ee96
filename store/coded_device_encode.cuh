// What the kernels of a coded store share: a warp codes a raw block of a row and puts it on a page.
#pragma once

#include <cuda_runtime.h>

#include "codec/coded_encode_warp.cuh"
#include "codec/cuda_device.cuh"
#include "store/coded_device_state.h"
#include "store/coded_values.h"
#include "store/device_rows.cuh"

namespace tierkv {

inline constexpr int32_t kEncodeWarps = 6;

struct CodedRowOf {
  int32_t entry;     // of the batch
  int32_t sequence;  // kPaddingSequence: nothing is done
  int32_t within;    // its sequence
  int32_t row;
};
__device__ inline CodedRowOf coded_row_of(const CodedDeviceState& d, int32_t i) {
  const int32_t rows = d.s.rows_per_sequence(), sequence = d.common.batch[i / rows];
  return {i / rows, sequence, i % rows, sequence * rows + i % rows};
}

// One component of 64 raw tokens of a row.
struct RawBlock {
  const uint8_t* page;
  const float* mean;  // still to be taken off; null: none
  int32_t within;     // the row, of its sequence
  Component component;
};

__device__ inline float step_of(const CodedDeviceState& d, Component c, int32_t within) {
  return (c == Component::kKey ? d.key_steps : d.value_steps)[within];
}

// y of a token of the block.
__device__ __forceinline__ uint16_t raw_value(const CodedDeviceState& d, const RawBlock& b,
                                              int32_t slot, int32_t dim) {
  const int32_t at = raw_value_byte(d.s.head_dim, b.component, slot, dim);
  const uint16_t x = *reinterpret_cast<const uint16_t*>(b.page + at);
  return b.mean == nullptr ? x : centred(x, b.mean[dim]);
}

__device__ inline BlockMemory warp_encode_memory(uint8_t* shared) {
  uint8_t* mine = shared + static_cast<int32_t>(threadIdx.x / 32) * kEncodeWarpBytes;
  return {reinterpret_cast<int16_t*>(mine), reinterpret_cast<uint32_t*>(mine + kEncodeCodesBytes),
          reinterpret_cast<uint32_t*>(mine + kEncodeCodesBytes + kMaxCodedBlockBytes)};
}

// Codes of the block into memory.codes. Raw tiles and coded blocks have one order: the four words
// of a lane in a dim block are its four pairs.
template <Component kComponent>
__device__ __forceinline__ StatusCode load_raw_codes(const CodedDeviceState& d, const RawBlock& b,
                                                     const BlockMemory& memory) {
  constexpr bool kKey = kComponent == Component::kKey;
  const float step = step_of(d, kComponent, b.within);
  const int32_t dim_blocks = d.s.head_dim / kDimBlock;
  const auto* words =
      reinterpret_cast<const uint4*>(b.page + raw_tile_byte(d.s.head_dim, kComponent, 0));
  auto status = StatusCode::kOk;
#pragma unroll 4
  for (int32_t i = 0; i < kBlockTokens / kTileTokens * dim_blocks; ++i) {
    const uint4 x = words[i * kWarpLanes + lane_index()];
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const PairPosition p =
          pair_position(kComponent, i / dim_blocks, i % dim_blocks, r, lane_index());
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t token = p.token + (kKey ? 0 : half), dim = p.dim + (kKey ? half : 0);
        auto y = static_cast<uint16_t>(pairs[r] >> (16 * half));
        if (b.mean != nullptr) y = centred(y, b.mean[dim]);
        status = greater(status, check_centred(y, step));
        memory.codes[token * kSliceDims + dim] = step_code(y, step);
      }
    }
  }
  return status;
}

// Codes the block into memory.block; its units. By the whole warp. *status gets worse where a code
// does not fit.
__device__ inline int32_t encode_raw_block(const CodedDeviceState& d, const RawBlock& b,
                                           const BlockMemory& memory, int32_t* counter,
                                           StatusCode* status) {
  const bool key = b.component == Component::kKey;
  *status = greater(*status, key ? load_raw_codes<Component::kKey>(d, b, memory)
                                 : load_raw_codes<Component::kValue>(d, b, memory));
  __syncwarp();
  // A copy: what is read through a reference is read again after every store.
  const DeviceCodebook book = d.books[2 * (b.within / d.s.num_kv_heads) + (key ? 0 : 1)];
  const EncodeSlice slice{book, memory, kBlockTokens, d.s.head_dim,
                          most_coded_block_bytes(d.s.head_dim)};
  return encode_slice(slice, counter) / kBlockAlignment;
}

// From memory.block to unit `begin` of the row, whose pages are there; its reference.
__device__ inline CodedBlockRef write_encoded(const CodedDeviceState& d, int32_t row, int32_t begin,
                                              int32_t units, const BlockMemory& memory) {
  const int32_t page = d.s.page_id(row, kCodedSide, begin / d.s.page_units());
  const int32_t in_page = begin % d.s.page_units();
  auto* to = reinterpret_cast<uint4*>(d.s.page_bytes(page)) + in_page;
  for (int32_t i = lane_index(); i < units; i += kWarpLanes) {
    to[i] = reinterpret_cast<const uint4*>(memory.block)[i];
  }
  __syncwarp();
  return {static_cast<uint32_t>(int64_t{page} * d.s.page_units() + in_page),
          static_cast<uint32_t>(units)};
}

// The item of this warp in a grid of kEncodeWarps a CTA; -1: none.
__device__ inline int64_t encode_item(int64_t items) {
  const int64_t i = int64_t{blockIdx.x} * kEncodeWarps + threadIdx.x / 32;
  return i < items ? i : -1;
}

// A warp for each item.
template <class... Parameters, class... Arguments>
Status launch_encoder(void (*kernel)(Parameters...), int64_t items, GpuStream stream,
                      const Arguments&... arguments) {
  constexpr int32_t kBytes = kEncodeWarps * kEncodeWarpBytes;
  if (Status s = cuda_status(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
          "shared memory");
      !s) {
    return s;
  }
  kernel<<<ctas_for(items, kEncodeWarps), kEncodeWarps * 32, kBytes, stream>>>(arguments...);
  return launch_status("coded blocks");
}

}  // namespace tierkv

// What the kernels of a coded store share: a warp codes a raw block of a row and puts it on a page.
//
// A CTA works on rows of one layer, so that its two codebooks' words lie in shared memory once.
#pragma once

#include <cuda_runtime.h>

#include "codec/coded_encode_slice.cuh"
#include "codec/cuda_device.cuh"
#include "store/coded_device_state.h"
#include "store/coded_values.h"
#include "store/device_rows.cuh"

namespace tierkv {

inline constexpr int32_t kEncodeWarps = 6;
inline constexpr int32_t kEncodeThreads = kEncodeWarps * kWarpLanes;
// Code words of two codebooks and a counter a warp, before the warps' slices.
inline constexpr int32_t kEncoderHeadBytes = 2 * kMaxSymbols * 4 + 32;
inline constexpr int32_t kEncoderBytes = kEncoderHeadBytes + kEncodeWarps * kSliceBytes;

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

// What a warp codes with.
struct Encoder {
  const DeviceCodebook* books;  // of the layer, keys and values; global memory
  const uint32_t* words;        // of both, in shared memory: [2][kMaxSymbols]
  SliceMemory memory;
  int32_t* counter;
};

// By the whole CTA, before its warps go apart; `shared` is the CTA's dynamic memory.
__device__ inline Encoder make_encoder(const CodedDeviceState& d, int32_t layer, uint8_t* shared) {
  auto* words = reinterpret_cast<uint32_t*>(shared);
  auto* counters = reinterpret_cast<int32_t*>(words + 2 * kMaxSymbols);
  const DeviceCodebook* books = d.books + 2 * layer;
  for (int32_t c = 0; c < 2; ++c) {
    const uint32_t* from = books[c].words;
    const int32_t symbols = symbol_count(books[c]);
    for (auto i = static_cast<int32_t>(threadIdx.x); i < symbols; i += kEncodeThreads) {
      words[c * kMaxSymbols + i] = from[i];
    }
  }
  __syncthreads();
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  return {books, words, slice_memory(shared + kEncoderHeadBytes, warp), counters + warp};
}

// Codes of the block into memory.codes. Raw tiles and coded blocks have one order: the four words
// of a lane in a dim block are its four pairs.
template <Component kComponent>
__device__ __forceinline__ CodeRange load_raw_codes(const CodedDeviceState& d, const RawBlock& b,
                                                    int16_t* codes, StatusCode* status) {
  constexpr bool kKey = kComponent == Component::kKey;
  const float step = step_of(d, kComponent, b.within);
  const int32_t dim_blocks = d.s.head_dim / kDimBlock;
  const auto* words =
      reinterpret_cast<const uint4*>(b.page + raw_tile_byte(d.s.head_dim, kComponent, 0));
  CodeRange range;
#pragma unroll 4
  for (int32_t i = 0; i < kBlockTokens / kTileTokens * dim_blocks; ++i) {
    const uint4 x = words[i * kWarpLanes + lane_index()];
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const PairPosition p =
          pair_position(kComponent, i / dim_blocks, i % dim_blocks, r, lane_index());
      int16_t* const to = codes + p.token * kCodeStride + p.dim;
      uint16_t code[2];
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        auto y = static_cast<uint16_t>(pairs[r] >> (16 * half));
        if (b.mean != nullptr) y = centred(y, b.mean[p.dim + (kKey ? half : 0)]);
        *status = greater(*status, check_centred(y, step));
        code[half] = static_cast<uint16_t>(step_code(y, step));
      }
      const uint32_t both = code[0] | static_cast<uint32_t>(code[1]) << 16;
      range.add(both);
      if constexpr (kKey) {
        *reinterpret_cast<uint32_t*>(to) = both;  // channels of a pair are even and odd
      } else {
        to[0] = static_cast<int16_t>(code[0]);
        to[kCodeStride] = static_cast<int16_t>(code[1]);
      }
    }
  }
  return range;
}

// Codes the block into memory.block; its units. By the whole warp. *status gets worse where a code
// does not fit.
__device__ inline int32_t encode_raw_block(const CodedDeviceState& d, const RawBlock& b,
                                           const Encoder& encoder, StatusCode* status) {
  const bool key = b.component == Component::kKey;
  // A copy: what is read through a reference is read again after every store.
  const DeviceCodebook book = encoder.books[key ? 0 : 1];
  const Slice slice{book,           encoder.words + (key ? 0 : kMaxSymbols),
                    encoder.memory, kBlockTokens,
                    d.s.head_dim,   most_coded_block_bytes(d.s.head_dim)};
  const auto load = [&] {
    return key ? load_raw_codes<Component::kKey>(d, b, slice.memory.codes, status)
               : load_raw_codes<Component::kValue>(d, b, slice.memory.codes, status);
  };
  return encode_slice(slice, load, encoder.counter) / kBlockAlignment;
}

// From memory.block to unit `begin` of the row, whose pages are there; its reference.
__device__ inline CodedBlockRef write_encoded(const CodedDeviceState& d, int32_t row, int32_t begin,
                                              int32_t units, const SliceMemory& memory) {
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

// What the warps of a launch work on: `of_row` items of every row of the batch, a layer's together.
struct EncodeItems {
  int32_t rows_of_layer = 0;  // entries x kv heads
  int32_t of_row = 1;
};
struct EncodeItem {
  int32_t row = -1;  // of the batch, as coded_row_of() takes it; -1: none
  int32_t part = 0;  // of the row
};
__device__ inline EncodeItem encode_item(const CodedDeviceState& d, const EncodeItems& items) {
  const int64_t i = int64_t{blockIdx.x} * kEncodeWarps + threadIdx.x / 32;
  const int64_t row = i / items.of_row;
  if (row >= items.rows_of_layer) return {};
  const int32_t heads = d.s.num_kv_heads;
  const auto entry = static_cast<int32_t>(row) / heads, head = static_cast<int32_t>(row) % heads;
  return {entry * d.s.rows_per_sequence() + static_cast<int32_t>(blockIdx.y) * heads + head,
          static_cast<int32_t>(i % items.of_row)};
}

// A warp for each item, kernel(d, items, arguments).
template <class... Parameters, class... Arguments>
Status launch_encoder(void (*kernel)(Parameters...), const CodedDeviceState& d,
                      const EncodeItems& items, GpuStream stream, const Arguments&... arguments) {
  if (Status s = cuda_status(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kEncoderBytes),
          "shared memory");
      !s) {
    return s;
  }
  const dim3 ctas(ctas_for(int64_t{items.rows_of_layer} * items.of_row, kEncodeWarps),
                  static_cast<uint32_t>(d.s.rows_per_sequence() / d.s.num_kv_heads));
  kernel<<<ctas, kEncodeThreads, kEncoderBytes, stream>>>(d, items, arguments...);
  return launch_status("coded blocks");
}

}  // namespace tierkv

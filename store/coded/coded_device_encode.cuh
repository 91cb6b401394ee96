// What the kernels of a coded store share: a warp codes a raw block of a row.
//
// A CTA works on rows of one layer, so that its two codebooks' words lie in shared memory once.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "codec/gpu/coded/coded_encode_lanes.cuh"
#include "codec/gpu/coded/fixed_encode.cuh"
#include "gpu/cuda_device.cuh"
#include "store/coded/coded_device_state.h"
#include "store/coded/coded_values.h"
#include "store/tiers/device_rows.cuh"

namespace tierkv {

inline constexpr int32_t kEncodeWarps = 8;
inline constexpr int32_t kEncodeThreads = kEncodeWarps * kWarpLanes;
// Shared memory of a CTA: of each warp its slice's means, then the code words of the layer's
// codebooks, then of each warp, where it writes, the slice.
inline constexpr int32_t kEncodeMeansBytes = kSliceDims * 4;
inline constexpr int32_t kEncodeWords = kEncodeWarps * kEncodeMeansBytes;
TKV_HD int32_t encode_blocks(const CodedDeviceState& d) {
  return kEncodeWords + d.num_books() * kMaxSymbols * 4;
}

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

// Channels of a slice.
__device__ __forceinline__ int32_t slice_dims(const CodedDeviceState& d) {
  return min(d.s.head_dim, kSliceDims);
}

// One component of 64 raw tokens of a row; channels from 128 slice on.
struct RawBlock {
  const uint8_t* page;
  const float* mean;  // still to be taken off; null: none
  int32_t row;
  Component component;
  int32_t slice = 0;
};

// y of a token of the block.
__device__ __forceinline__ uint16_t raw_value(const CodedDeviceState& d, const RawBlock& b,
                                              int32_t slot, int32_t dim) {
  const int32_t at = raw_value_byte(d.s.head_dim, b.component, slot, dim);
  const uint16_t x = *reinterpret_cast<const uint16_t*>(b.page + at);
  return b.mean == nullptr ? x : centred(x, b.mean[dim]);
}

// Codes of two values, and the worse of their states.
struct CheckedPair {
  int32_t code[2];
  StatusCode status;
};
__device__ __noinline__ inline CheckedPair checked_codes(uint32_t y, float step) {
  CheckedPair p{{0, 0}, StatusCode::kOk};
  for (int32_t h = 0; h < 2; ++h) {
    const auto one = static_cast<uint16_t>(y >> (16 * h));
    p.status = greater(p.status, check_centred(one, step));
    p.code[h] = step_code(one, step);
  }
  return p;
}

// A slice of a raw block as codec/gpu/coded/coded_encode_lanes.cuh takes it: raw tiles and coded
// blocks have one order, the four words of a lane in a dim block are its four pairs. kSliced: of
// several.
template <bool kSliced>
struct RawTileSource {
  const uint4* words;     // the lane's first ones
  int32_t gap;            // dim blocks of other slices from one tile to the next
  const uint32_t* means;  // shared memory: of the lane's first pair, what comes off both values
  // From the means of a pair to those in the next dim block, and of the pair r with the next
  // r % 2 and r / 2.
  int32_t next_block, next_row, next_column;
  float step, inverse;
  StatusCode status = StatusCode::kOk;

  __device__ __forceinline__ uint4 fetch(int32_t i) const {
    constexpr int32_t kSliceBlocks = kSliceDims / kDimBlock;  // where there is a gap
    return words[(kSliced ? i + i / kSliceBlocks * gap : i) * kWarpLanes];
  }
  __device__ __forceinline__ uint32_t value(uint32_t pair, int32_t f, int32_t r) const {
    // One rounding, as centred() has: sums of two fp16 numbers survive the one to fp32.
    const uint32_t mean = means[f * next_block + r % 2 * next_row + r / 2 * next_column];
    const __half2 difference =
        __hsub2(*reinterpret_cast<const __half2*>(&pair), *reinterpret_cast<const __half2*>(&mean));
    return *reinterpret_cast<const uint32_t*>(&difference);
  }
  __device__ __forceinline__ void values(const uint4& x, int32_t f, FragmentValues& y) const {
    const uint32_t pairs[kPairsPerFragment] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) y[r] = value(pairs[r], f, r);
  }
  __device__ __forceinline__ void codes(const uint4& x, int32_t f, FragmentCodes& codes) {
    const uint32_t pairs[kPairsPerFragment] = {x.x, x.y, x.z, x.w};
    uint32_t y[kPairsPerFragment], doubts = 0;
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      y[r] = value(pairs[r], f, r);
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        float doubt = 0;
        codes[r][h] = fast_step_code(static_cast<uint16_t>(y[r] >> (16 * h)), inverse, &doubt);
        doubts = max(doubts, float_bits(doubt));
      }
    }
    if (doubts < float_bits(0.5f)) return;
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const CheckedPair p = checked_codes(y[r], step);
      codes[r][0] = p.code[0], codes[r][1] = p.code[1];
      status = greater(status, p.status);
    }
  }
};

// What the warps of a CTA code with.
struct Encoder {
  const DeviceCodebook* books;  // of the layer, keys then values; global memory
  uint8_t* shared;

  // i: of the component.
  __device__ __forceinline__ int32_t index(const CodedDeviceState& d, Component c,
                                           int32_t i) const {
    return c == Component::kKey ? i : d.num_key_books + i;
  }
  __device__ __forceinline__ LaneEncoder of(const CodedDeviceState& d, int32_t book) const {
    const auto* words = reinterpret_cast<const uint32_t*>(shared + kEncodeWords);
    return lane_encoder(books[book], words + book * kMaxSymbols, slice_dims(d),
                        most_coded_block_bytes(d.s.head_dim));
  }
  __device__ __forceinline__ uint32_t* means() const {
    return reinterpret_cast<uint32_t*>(shared +
                                       static_cast<int32_t>(threadIdx.x / 32) * kEncodeMeansBytes);
  }
  // Of the warp.
  __device__ __forceinline__ uint32_t* block(const CodedDeviceState& d) const {
    return reinterpret_cast<uint32_t*>(shared + encode_blocks(d) +
                                       static_cast<int32_t>(threadIdx.x / 32) *
                                           most_coded_block_bytes(d.s.head_dim));
  }
};

// By the whole CTA, before its warps go apart; `shared` is the CTA's dynamic memory.
__device__ inline Encoder make_encoder(const CodedDeviceState& d, int32_t layer, uint8_t* shared) {
  auto* words = reinterpret_cast<uint32_t*>(shared + kEncodeWords);
  const DeviceCodebook* books = d.books + d.num_books() * layer;
  for (int32_t b = 0; b < d.num_books(); ++b) {
    const uint32_t* from = books[b].words;
    const int32_t symbols = symbol_count(books[b]);
    for (auto i = static_cast<int32_t>(threadIdx.x); i < symbols; i += kEncodeThreads) {
      words[b * kMaxSymbols + i] = from[i];
    }
  }
  __syncthreads();
  return {books, shared};
}

// By the whole warp; `means`: its shared memory, kEncodeMeansBytes.
template <bool kSliced>
__device__ inline RawTileSource<kSliced> raw_tile_source(const CodedDeviceState& d,
                                                         const RawBlock& b, uint32_t* means) {
  const bool key = b.component == Component::kKey;
  const int32_t dims = kSliced ? slice_dims(d) : d.s.head_dim;
  const int32_t first_dim = kSliced ? b.slice * kSliceDims : 0;
  __syncwarp();  // the slice before is done
  for (int32_t i = lane_index(); i < (key ? dims / 2 : dims); i += kWarpLanes) {
    // Keys: two channels; values: two tokens of a channel.
    const int32_t first = first_dim + (key ? 2 * i : i), second = key ? first + 1 : first;
    means[i] = b.mean == nullptr ? 0u
                                 : float_to_half(b.mean[first]) |
                                       static_cast<uint32_t>(float_to_half(b.mean[second])) << 16;
  }
  __syncwarp();
  const int32_t gap = (d.s.head_dim - dims) / kDimBlock;
  const auto* words =
      reinterpret_cast<const uint4*>(b.page + raw_tile_byte(d.s.head_dim, b.component, 0)) +
      first_dim / kDimBlock * kWarpLanes;
  const float step = d.s.step(b.component, b.row);
  const int32_t lane = lane_index();
  if (key) return {words + lane, gap, means + lane % 4, kDimBlock / 2, 0, 4, step, 1.0f / step};
  return {words + lane, gap, means + lane / 4, kDimBlock, 8, 0, step, 1.0f / step};
}

// A block as it will be coded.
template <bool kChoices>
struct PlannedBlock {
  int32_t book = 0;   // of its layer's
  int32_t units = 0;  // of all slices
  // Of the last slice, with the last of the component's codebooks: where there are no choices, all
  // that write_block() needs.
  RawTileSource<kChoices> source;
  LanePlan plan;
};
// With the codebook that takes the fewest units, of several that do the first. kChoices: as
// CodedDeviceState::has_choices(); code for one slice and codebook stays as short as it can be.
template <bool kChoices>
__device__ __forceinline__ PlannedBlock<kChoices> plan_slices(const CodedDeviceState& d,
                                                              const Encoder& encoder, RawBlock b) {
  PlannedBlock<kChoices> planned{};
  const int32_t books = kChoices ? d.books_of(b.component) : 1;
  const int32_t slices = kChoices ? slice_count(d.s.head_dim) : 1;
  auto status = StatusCode::kOk;
#pragma unroll 1
  for (int32_t i = 0; i < books; ++i) {
    const int32_t book = encoder.index(d, b.component, i);
    int32_t units = 0;
#pragma unroll 1
    for (b.slice = 0; b.slice < slices; ++b.slice) {
      planned.source = raw_tile_source<kChoices>(d, b, encoder.means());
      planned.plan = plan_block(encoder.of(d, book), planned.source);
      status = greater(status, planned.source.status);
      units += static_cast<int32_t>(planned.plan.form.header.units);
    }
    if (i == 0 || units < planned.units) planned.units = units, planned.book = book;
  }
  planned.source.status = status;
  return planned;
}

// The block to `to`, 16-byte aligned, coded with `book` of its layer's.
template <bool kChoices>
__device__ __forceinline__ void write_slices(const CodedDeviceState& d, const Encoder& encoder,
                                             RawBlock b, int32_t book, uint8_t* to) {
  const LaneEncoder lanes = encoder.of(d, book);
  const int32_t slices = kChoices ? slice_count(d.s.head_dim) : 1;
#pragma unroll 1
  for (b.slice = 0; b.slice < slices; ++b.slice) {
    RawTileSource<kChoices> source = raw_tile_source<kChoices>(d, b, encoder.means());
    const LanePlan plan = plan_block(lanes, source);
    write_block(lanes, source, plan, encoder.block(d), to);
    to += static_cast<int32_t>(plan.form.header.units) * kBlockAlignment;
  }
}

// The block to `to` at a fixed rate.
template <bool kChoices>
__device__ __forceinline__ void write_fixed(const CodedDeviceState& d, const Encoder& encoder,
                                            RawBlock b, uint8_t* to) {
  const int32_t bits = d.s.fixed.format.bits(b.component), dims = slice_dims(d);
  const int32_t slices = kChoices ? slice_count(d.s.head_dim) : 1;
#pragma unroll 1
  for (b.slice = 0; b.slice < slices; ++b.slice) {
    const RawTileSource<kChoices> source = raw_tile_source<kChoices>(d, b, encoder.means());
    write_fixed_block(source, b.component, bits, dims, to);
    to += fixed_block_layout(bits, dims).bytes;
  }
}
__device__ __forceinline__ int32_t fixed_units(const CodedDeviceState& d, Component c) {
  return fixed_block_units(d.s.fixed.format.bits(c), d.s.head_dim);
}

// Unit `begin` of a row, whose pages are there.
struct BlockPlace {
  uint8_t* bytes;
  uint32_t offset;  // as in CodedBlockRef
};
__device__ inline BlockPlace block_place(const CodedDeviceState& d, int32_t row, int32_t begin) {
  const int32_t page = d.s.page_id(row, kCodedSide, begin / d.s.page_units());
  const int32_t in_page = begin % d.s.page_units();
  return {d.s.page_bytes(page) + in_page * kBlockAlignment,
          static_cast<uint32_t>(int64_t{page} * d.s.page_units() + in_page)};
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
// Item i of the layer blockIdx.y.
__device__ inline EncodeItem encode_item(const CodedDeviceState& d, const EncodeItems& items,
                                         int64_t i) {
  const int64_t row = i / items.of_row;
  if (row >= items.rows_of_layer) return {};
  const int32_t heads = d.s.num_kv_heads;
  const auto entry = static_cast<int32_t>(row) / heads, head = static_cast<int32_t>(row) % heads;
  return {entry * d.s.rows_per_sequence() + static_cast<int32_t>(blockIdx.y) * heads + head,
          static_cast<int32_t>(i % items.of_row)};
}
// The first item of this warp; the next ones are items_of_grid() on.
__device__ inline int64_t first_item() {
  return int64_t{blockIdx.x} * kEncodeWarps + threadIdx.x / 32;
}
__device__ inline int64_t items_of_grid() {
  return int64_t{gridDim.x} * kEncodeWarps;
}

// kernel(d, items, arguments), with a warp for each item, or with most_ctas a layer at most;
// whether its warps need room for blocks.
struct EncodeLaunch {
  uint32_t most_ctas = 0xffffffffu;
  bool writes = false;
};
template <class... Parameters, class... Arguments>
Status launch_encoder(void (*kernel)(Parameters...), const EncodeLaunch& launch,
                      const CodedDeviceState& d, const EncodeItems& items, GpuStream stream,
                      const Arguments&... arguments) {
  const int32_t bytes =
      encode_blocks(d) + (launch.writes ? kEncodeWarps * most_coded_block_bytes(d.s.head_dim) : 0);
  if (Status s = cuda_status(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "shared memory");
      !s) {
    return s;
  }
  const uint32_t wanted = ctas_for(int64_t{items.rows_of_layer} * items.of_row, kEncodeWarps);
  const dim3 ctas(std::min(wanted, launch.most_ctas),
                  static_cast<uint32_t>(d.s.rows_per_sequence() / d.s.num_kv_heads));
  kernel<<<ctas, kEncodeThreads, static_cast<size_t>(bytes), stream>>>(d, items, arguments...);
  return launch_status("coded blocks");
}

}  // namespace tierkv

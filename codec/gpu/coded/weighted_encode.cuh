// SPDX-License-Identifier: Apache-2.0
// The warps that encode coded blocks. A warp codes a block once; only a raw block, and the first
// slice of two, is coded again. Bound: instructions, about 20 a code.
#pragma once

#include "codec/gpu/coded/weighted_streams.cuh"

namespace tierkv {

inline constexpr int32_t kWeightedWarps = 8;

inline constexpr int32_t kBooksBytes = 2 * sizeof(SharedBook);
// Bytes of the CTA before those of its warps.
inline constexpr int32_t kEncodeCtaBytes = kBooksBytes + 2 * kMaxSymbols * 4;

// Work of a warp: a block of a range and a component.
struct WeightedItem {
  int32_t range, index;  // of the block in the range
  Component component;
};

// The job of an item whose range is valid; tokens is 0 where the range has no such block.
__device__ inline void open_job(const WeightedEncode& call, const WeightedRange& r,
                                const WeightedItem& item, WeightedBlockJob* job) {
  const int32_t block = r.first / kBlockTokens + item.index;
  const int32_t first = max(r.first, block * kBlockTokens);
  const int32_t last = min(r.last, block * kBlockTokens + kBlockTokens), dims = call.rows.head_dim;
  const bool key = item.component == Component::kKey;
  const int64_t ahead = first - r.first;
  job->x = (key ? call.keys : call.values) + r.at + ahead * call.token_stride;
  job->decided = call.decided + r.decided + ahead;
  job->coded = min(max(0, r.body_first - first), max(0, last - first));
  job->means = !key || call.rows.key_means == nullptr ? nullptr
                                                      : call.rows.key_means + int64_t{r.row} * dims;
  job->scales = key ? call.rows.key_scales + int64_t{r.row} * dims : call.rows.value_steps + r.row;
  const DeviceRope& rope = call.rows.rope;
  job->pairing = rope.pairing;
  job->pairs = key ? rope.pairs : 0;
  job->place = rope.place;
  job->block = rope.block == nullptr ? nullptr : rope.block + int64_t{block} * rope.pairs;
  job->token_stride = call.token_stride;
  job->dtype = call.dtype;
  job->component = item.component;
  job->head_dim = dims;
  job->tokens = max(0, last - first);
  job->position = first;
  job->place_of_first = first % kBlockTokens;
}

// The most bits of a code word of the call's codebooks.
TKV_HD int32_t longest_word(const WeightedEncode& call) {
  return call.books[0].max_length > call.books[1].max_length ? call.books[0].max_length
                                                             : call.books[1].max_length;
}

// A codebook and its words into the CTA's memory, by thread `thread` of `threads`.
__device__ __forceinline__ void load_encoder_book(const WeightedEncode& call, int32_t c,
                                                  int32_t thread, int32_t threads,
                                                  uint8_t* shared) {
  auto* const words = reinterpret_cast<uint32_t*>(shared + kBooksBytes) + c * kMaxSymbols;
  const DeviceCodebook book = *call.books[c].codebook;
  const bool usable = (book.streams_per_lane == 1 || book.streams_per_lane == 2) &&
                      book.mode == BlockMode::kPair &&
                      book.component == static_cast<Component>(c) && book.levels >= 2 &&
                      book.levels <= 32 && book.max_length <= call.books[c].max_length;
  const int32_t symbols = usable ? min(book.levels * book.levels, kMaxSymbols) : 0;
  // Loads that stores do not hold back.
#pragma unroll 4
  for (int32_t i = thread; i < symbols; i += threads) words[i] = __ldg(book.words + i);
  if (thread != 0) return;
  const bool is_narrow = book.base >= -kMostSureCode && book.base <= kMostSureCode &&
                         book.base + book.levels - 1 <= kMostSureCode;
  const int32_t second_row = stream_rows(call.rows.head_dim, longest_word(call)) / 2;
  reinterpret_cast<SharedBook*>(shared)[c] = {c * kMaxSymbols, book.base,
                                              book.levels,     is_narrow ? book.levels : 0,
                                              book.cheapest,   book.streams_per_lane,
                                              second_row,      book.table_id,
                                              usable};
}
// Both codebooks by a CTA: where it has several warps, half of them a book.
__device__ inline void load_books(const WeightedEncode& call, uint8_t* shared) {
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  const int32_t apart = warps > 1 ? 2 : 1;
  for (int32_t c = warp % apart; c < 2; c += apart) {
    load_encoder_book(call, c, warp / apart * kWarpLanes + lane_index(),
                      (warps - warp % apart + apart - 1) / apart * kWarpLanes, shared);
  }
  __syncthreads();
}

// Where a block of `units` goes; null where it goes nowhere. False where there is no room.
__device__ inline bool choose_place(const WeightedEncode& call, const WeightedPlace& given,
                                    int32_t units, uint8_t** to) {
  *to = nullptr;
  if (call.bytes == nullptr) return true;
  *to = call.bytes + int64_t{given.unit} * kBlockAlignment;
  return static_cast<uint32_t>(units) <= given.units &&
         (int64_t{given.unit} + units) * kBlockAlignment <= call.size;
}

// A slice whose streams are in memory, in `stage` where there is room for it. The same code for
// keys and values, because it runs once a block and what it takes of the instruction cache counts.
// Arguments are values: what has an address cannot stay in registers.
__device__ __noinline__ inline void write_coded(EncodedSlice of, BlockForm form, SlicePlan plan,
                                                ExceptionList* exceptions, uint8_t* stage,
                                                uint8_t* to) {
  const uint32_t* const rows = WeightedMemory::rows_behind(exceptions);
  uint8_t* const bytes = stage == nullptr ? to : stage;
  auto* const block = reinterpret_cast<uint32_t*>(bytes);
  clear_block(block, form.at.bytes);
  of.write_bounds(form, plan, block);
  uint32_t* const payload = block + form.at.payload / 4;
#pragma unroll 1
  for (int32_t s = 0; s < of.streams; ++s) {
    place_stream(rows + s * of.second_row * kWarpLanes, s == 0 ? plan.bits[0] : plan.bits[1],
                 s == 0 ? plan.start[0] : plan.start[1], payload);
  }
  place_exceptions(*exceptions, block + form.at.exceptions / 4);
  finish_block(form, bytes);
  if (stage == nullptr) return;
#pragma unroll 4
  for (int32_t i = lane_index(); i < form.at.bytes / 16; i += kWarpLanes) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(stage)[i];
  }
  __syncwarp();
}

// Tiles of a raw block. Each of their words has codes of one lane.
template <int32_t kDims, bool kKey>
__device__ __forceinline__ void write_raw(const EncodedSlice& of, const BlockForm& form,
                                          const WeightedMemory& memory, int32_t slice,
                                          uint8_t* to) {
  clear_block(to, form.at.bytes);
  of.write_bounds(form, {}, reinterpret_cast<uint32_t*>(to));
  constexpr auto kComponent = kKey ? Component::kKey : Component::kValue;
  const int32_t bits = raw_bits(form.header.mode);
  const int32_t base = static_cast<int16_t>(form.header.base_or_books);
  const TileLayout layout = raw_tile(bits, SlicesOf<kDims>::kBlocks);
  const uint32_t mask = (1u << bits) - 1u;
  WeightedFaults faults;
  take_slice<kDims, kKey>(
      memory.tile, slice, false, faults, [&](int32_t tile, int32_t f, const QuickFragment& codes) {
#pragma unroll
        for (int32_t r = 0; r < kPairsPerFragment; ++r) {
          int32_t code[2];
          settled_codes(memory.tile.warp, slice, tile, f, r, codes[r], faults, code);
          const PairPosition p = pair_position(kComponent, 0, f, r, lane_index());
          const CodePosition at = code_position(layout, kComponent, p.token, p.dim);
          uint32_t field[2];
          for (int32_t h = 0; h < 2; ++h) {
            field[h] = code[h] >= kPaddingCodes ? 0u : static_cast<uint32_t>(code[h] - base) & mask;
          }
          auto* word =
              reinterpret_cast<uint32_t*>(to + form.at.payload + tile * layout.bytes() + at.byte);
          *word |= (field[0] | field[1] << 16) << at.bit;
        }
      });
  finish_block(form, to);
}

template <int32_t kDims, bool kKey>
struct BlockEncoder {
  using Slices = SlicesOf<kDims>;
  const WeightedEncode& call;
  const SharedBook& book;
  const WeightedMemory& memory;

  __device__ __forceinline__ EncodedSlice slice_of(int32_t slice) const {
    const WeightedBlockJob& job = memory.tile.warp->job;
    return {slice == 0 ? memory.tile.warp->exponents : nullptr,
            book.streams,
            book.second_row,
            book.table_id,
            job.component,
            Slices::kSlice,
            job.tokens};
  }
  __device__ __forceinline__ SlicePlan code_slice(int32_t slice, bool opens, WeightedFaults& faults,
                                                  BlockForm* form) const {
    StreamSink<kDims> sink(memory, book, slice, faults);
    take_slice<kDims, kKey>(
        memory.tile, slice, opens, faults,
        [&](int32_t tile, int32_t f, const QuickFragment& codes) { sink.take(tile, f, codes); });
    const SlicePlan plan = sink.finish();
    *form = choose_form(slice_of(slice), sink.range, plan);
    return plan;
  }
  __device__ __forceinline__ void write_slice(int32_t slice, const SlicePlan& plan,
                                              const BlockForm& form, uint8_t* to) const {
    const EncodedSlice of = slice_of(slice);
    if (!form.coded) return write_raw<kDims, kKey>(of, form, memory, slice, to);
    uint8_t* const stage = form.at.bytes > stage_bytes(kDims) ? nullptr : memory.tile.stage;
    write_coded(of, form, plan, memory.exceptions, stage, to);
  }

  // kept: of the item, or null.
  __device__ __forceinline__ StatusCode encode(WeightedFaults& faults, WeightedPlace* place,
                                               uint8_t* kept) {
    if (!book.usable) return StatusCode::kUnsupported;
    SlicePlan plan;
    BlockForm form;
    int32_t units = 0, before = 0;  // before: bytes of the slices before the last one
#pragma unroll 1
    for (int32_t slice = 0; slice < Slices::kCount; ++slice) {
      before = units * kBlockAlignment;
      plan = code_slice(slice, slice == 0, faults, &form);
      units += form.header.units;
    }
    const StatusCode worst = faults.worst();
    if (worst == StatusCode::kNonFinite) return worst;
    uint8_t* to;
    if (!choose_place(call, *place, units, &to)) return StatusCode::kBufferTooSmall;
    if (Slices::kCount == 1 && to == nullptr && kept != nullptr && form.coded &&
        form.at.bytes <= 2 * kBlockTokens * kDims) {
      to = reinterpret_cast<uint8_t*>(const_cast<uint16_t*>(memory.tile.warp->job.x));
      if (lane_index() == 0) *kept = 1;
    }
    if (to != nullptr) {
      write_slice(Slices::kCount - 1, plan, form, to + before);
      if constexpr (Slices::kCount > 1) {
        plan = code_slice(0, false, faults, &form);
        write_slice(0, plan, form, to);
      }
    }
    if (lane_index() == 0) place->units = static_cast<uint32_t>(units);
    return worst;
  }
};

// Opens an item's job and finds the importance of its tokens; into *code what is wrong. False where
// there is nothing to be done.
__device__ __forceinline__ bool begin_block(const WeightedEncode& call, const WeightedRange& range,
                                            const WeightedItem& item, EncodeWarp* warp,
                                            StatusCode* code) {
  *code = StatusCode::kInvalidArgument;
  if (!is_valid_range(range, call.rows.num_rows, call.most_blocks)) return false;
  __syncwarp();  // the block before is done
  if (lane_index() == 0) open_job(call, range, item, &warp->job);
  __syncwarp();
  *code = StatusCode::kOk;
  const WeightedBlockJob& job = warp->job;
  if (job.tokens == 0) return false;
  *code = StatusCode::kOutOfRange;
  if (job.pairs > 0 && job.position / kBlockTokens >= call.rows.rope.blocks) return false;
  load_importance(job, warp->exponents);
  *code = StatusCode::kOk;
  return true;
}

template <int32_t kDims>
__device__ __forceinline__ StatusCode encode_item(const WeightedEncode& call,
                                                  const WeightedItem& item, const SharedBook& book,
                                                  const WeightedMemory& memory, uint8_t* kept) {
  const WeightedRange range = call.ranges[item.range];
  const auto component = static_cast<int32_t>(item.component);
  WeightedPlace* const place =
      call.places[component] + (range.first_block + range.first / kBlockTokens + item.index);
  WeightedFaults faults;
  StatusCode code;
  if (begin_block(call, range, item, memory.tile.warp, &code)) {
    if (item.component == Component::kKey) {
      code = BlockEncoder<kDims, true>{call, book, memory}.encode(faults, place, kept);
    } else {
      code = BlockEncoder<kDims, false>{call, book, memory}.encode(faults, place, kept);
    }
    if (code == StatusCode::kOutOfRange) return code;  // and is written
  }
  const bool known = code != StatusCode::kInvalidArgument ||
                     is_valid_range(range, call.rows.num_rows, call.most_blocks);
  if (code != StatusCode::kOk && known && lane_index() == 0) place->units = 0;
  return code;
}

// By CTA `block` of `blocks`, of whole warps: the bytes of encode_block(). A code beyond
// 16 bits becomes the nearest one: the status is kOutOfRange, the block is written. Other statuses
// are kOk, kNonFinite, kOutOfRange (a position beyond the RoPE table), kInvalidArgument (the
// range), kBufferTooSmall or kUnsupported (the codebook), and units are 0 unless it is kOk. shared:
// kEncodeCtaBytes and encode_warp_bytes() of each warp.
template <int32_t kPer>
__device__ __forceinline__ void encode_weighted_items(const WeightedEncode& call, uint8_t* shared,
                                                      uint32_t block = blockIdx.x,
                                                      uint32_t blocks = gridDim.x) {
  load_books(call, shared);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  constexpr int32_t kDims = kPer * kWarpLanes;
  const int32_t bytes = encode_warp_bytes(kDims, longest_word(call));
  const WeightedMemory memory(reinterpret_cast<const uint32_t*>(shared + kBooksBytes),
                              shared + kEncodeCtaBytes + warp * bytes, kDims);
  const int64_t items = int64_t{2} * call.num_ranges * call.most_blocks;
  const int64_t stride = int64_t{blocks} * warps;
  // All keys before the values: the code for both would not fit into the instruction cache. But
  // where each item has a warp of its own, half of a CTA takes values, so that all SMs have as much
  // to do.
  int64_t n = int64_t{block} * warps + warp;
  if (items <= stride && warps % 2 == 0) {
    const int32_t half = warps / 2;
    const int64_t own = int64_t{block} * half + warp % half;
    n = own >= items / 2 ? items : own + (warp < half ? 0 : items / 2);
  }
  for (; n < items; n += stride) {
    const int64_t i = n < items / 2 ? 2 * n : 2 * (n - items / 2) + 1;
    const int64_t group = i / 2;
    const WeightedItem item = {static_cast<int32_t>(group / call.most_blocks),
                               static_cast<int32_t>(group % call.most_blocks),
                               static_cast<Component>(i % 2)};
    const auto* books = reinterpret_cast<const SharedBook*>(shared);
    uint8_t* kept = nullptr;
    if (call.kept != nullptr) {
      if (call.bytes != nullptr && call.kept[i] != 0) continue;
      kept = call.kept + i;
      if (lane_index() == 0) *kept = 0;
    }
    const StatusCode code =
        encode_item<kDims>(call, item, books[static_cast<int32_t>(item.component)], memory, kept);
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

}  // namespace tierkv

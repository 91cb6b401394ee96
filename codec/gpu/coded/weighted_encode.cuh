// SPDX-License-Identifier: Apache-2.0
// The warps that encode weighted blocks. A warp codes a block once; only a raw block, and the first
// slice of two, is coded again. Bound: instructions, about 20 a code.
#pragma once

#include "codec/gpu/coded/weighted_streams.cuh"

namespace tierkv {

inline constexpr int32_t kWeightedWarps = 8;

inline constexpr int32_t kFamiliesBytes = (2 * sizeof(SharedFamily) + 15) / 16 * 16;
// Bytes of the CTA before those of its warps.
TKV_HD int32_t encode_cta_bytes(const WeightedEncode& call) {
  return kFamiliesBytes + (call.families[0].count + call.families[1].count) * kMaxSymbols * 4;
}

// Work of a warp: a block of a range and a component.
struct WeightedItem {
  int32_t range, index;  // of the block in the range
  Component component;
};
__device__ __forceinline__ WeightedItem weighted_item(const WeightedEncode& call, int64_t i) {
  const int64_t group = i / 2;
  return {static_cast<int32_t>(group / call.most_blocks),
          static_cast<int32_t>(group % call.most_blocks), static_cast<Component>(i % 2)};
}

// The job of an item whose range is valid; tokens is 0 where the range has no such block.
__device__ inline void open_job(const WeightedEncode& call, const WeightedRange& r,
                                const WeightedItem& item, WeightedBlockJob* job) {
  const int32_t block = r.first / kBlockTokens + item.index;
  const int32_t first = max(r.first, block * kBlockTokens);
  const int32_t last = min(r.last, block * kBlockTokens + kBlockTokens), dims = call.rows.head_dim;
  const bool key = item.component == Component::kKey;
  const int64_t ahead = first - r.first;
  job->x = (key ? call.keys : call.values) + r.at + ahead * call.token_stride;
  job->significance =
      call.significance == nullptr ? nullptr : call.significance + r.significance + ahead;
  job->decided = call.decided == nullptr ? nullptr : call.decided + r.significance + ahead;
  job->coded =
      call.decided == nullptr ? 0 : min(max(0, r.body_first - first), max(0, last - first));
  job->saturates = call.saturates;
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

// The header's book field of a slice whose family is usable; -1 where a book is not there. In all
// lanes.
__device__ __forceinline__ int32_t book_field_of(const DeviceFamily& family, int32_t row,
                                                 int32_t head_dim, int32_t slice, int32_t blocks) {
  if (family.book_of == nullptr) return 0;
  const int32_t f = lane_index() % (kSliceDims / kDimBlock);
  const int64_t first = int64_t{row} * (head_dim / kDimBlock) + slice * (kSliceDims / kDimBlock);
  const int32_t book = f < blocks ? family.book_of[first + f] : 0;
  int32_t field = book << (2 * f);
#pragma unroll
  for (int32_t lanes = 1; lanes < kSliceDims / kDimBlock; lanes *= 2) {
    field |= __shfl_xor_sync(kFullWarp, field, lanes);
  }
  return __any_sync(kFullWarp, book >= family.count) ? -1 : field;
}

// Both families and their words into the CTA's memory, by all of its threads.
__device__ inline void load_families(const WeightedEncode& call, uint8_t* shared) {
  auto* const families = reinterpret_cast<SharedFamily*>(shared);
  auto* const words = reinterpret_cast<uint32_t*>(shared + kFamiliesBytes);
  const auto thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  int32_t at = 0;
  for (int32_t c = 0; c < 2; ++c) {
    const DeviceFamily& from = call.families[c];
    const DeviceCodebook& first = from.books[0];
    bool usable = first.streams_per_lane == 1 || first.streams_per_lane == 2;
    for (int32_t b = 0; b < from.count; ++b, at += kMaxSymbols) {
      const DeviceCodebook& book = from.books[b];
      usable &= book.mode == BlockMode::kPair && book.component == static_cast<Component>(c) &&
                book.streams_per_lane == first.streams_per_lane &&
                book.table_id == first.table_id + b && book.levels >= 2 && book.levels <= 32;
      if (!usable) continue;
      const int32_t symbols = symbol_count(book);
      for (int32_t i = thread; i < symbols; i += threads) words[at + i] = book.words[i];
      if (thread != 0) continue;
      const bool is_narrow = book.base >= -kMostSureCode && book.base <= kMostSureCode &&
                             book.base + book.levels - 1 <= kMostSureCode;
      families[c].books[b] = {at, book.base, book.levels, is_narrow ? book.levels : 0};
      families[c].cheapest[b] = book.cheapest;
    }
    if (thread != 0) continue;
    families[c].streams = first.streams_per_lane;
    families[c].table_id = first.table_id;
    families[c].usable = usable;
  }
  __syncthreads();
}

// Where a block of `units` goes; null where there is no room or it goes nowhere. In all lanes.
struct ChosenPlace {
  uint8_t* to;
  uint32_t unit;
  bool fits;
};
__device__ inline ChosenPlace choose_place(const WeightedEncode& call, const WeightedPlace& given,
                                           int32_t units) {
  if (call.bytes == nullptr) return {nullptr, given.unit, true};
  unsigned long long unit = given.unit;
  bool fits = static_cast<uint32_t>(units) <= given.units;
  if (call.cursor != nullptr) {
    if (lane_index() == 0) unit = atomicAdd(call.cursor, static_cast<unsigned long long>(units));
    unit = __shfl_sync(kFullWarp, unit, 0);
    fits = true;
  }
  fits &= (unit + static_cast<uint32_t>(units)) * kBlockAlignment <=
              static_cast<unsigned long long>(call.size) &&
          unit <= 0xffffffffull;
  return {call.bytes + unit * kBlockAlignment, static_cast<uint32_t>(unit), fits};
}

__device__ __forceinline__ void build_block(const EncodedSlice& of, const EncodedSlice::Form& form,
                                            const SlicePlan& plan, const WeightedMemory& memory,
                                            int32_t second_row, uint32_t* block) {
  clear_block(block, form.at.bytes);
  of.write_bounds(form, plan, block);
  uint32_t* const payload = block + form.at.payload / 4;
  place_stream(memory.rows, plan.bits[0], plan.start[0], payload);
  if (of.streams == 2) {
    place_stream(memory.rows + second_row * kWarpLanes, plan.bits[1], plan.start[1], payload);
  }
  place_exceptions(*memory.exceptions, block + form.at.exceptions / 4);
  finish_block(form, reinterpret_cast<uint8_t*>(block));
}

// Tiles of a raw block. Each of their words has codes of one lane.
template <int32_t kDims, bool kKey>
__device__ __forceinline__ void write_raw(const EncodedSlice& of, const EncodedSlice::Form& form,
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
  const SharedFamily& family;
  const WeightedMemory& memory;
  uint32_t fields[Slices::kCount];  // of the books

  __device__ __forceinline__ EncodedSlice slice_of(int32_t slice) const {
    const WeightedBlockJob& job = memory.tile.warp->job;
    return {slice == 0 ? memory.tile.warp->exponents : nullptr,
            fields[slice],
            family.streams,
            family.table_id,
            job.component,
            Slices::kSlice,
            job.tokens};
  }
  __device__ __forceinline__ SlicePlan code_slice(int32_t slice, bool opens, WeightedFaults& faults,
                                                  EncodedSlice::Form* form) const {
    StreamSink<kDims> sink(memory, family, fields[slice], slice, faults);
    take_slice<kDims, kKey>(
        memory.tile, slice, opens, faults,
        [&](int32_t tile, int32_t f, const QuickFragment& codes) { sink.take(tile, f, codes); });
    const SlicePlan plan = sink.finish();
    *form = slice_of(slice).choose(sink.range, plan);
    return plan;
  }
  // A slice whose streams are in memory.
  __device__ __forceinline__ void write_slice(int32_t slice, const SlicePlan& plan,
                                              const EncodedSlice::Form& form, uint8_t* to) const {
    constexpr int32_t kSecondRow = stream_rows(kDims) / 2;
    const EncodedSlice of = slice_of(slice);
    if (!form.coded) return write_raw<kDims, kKey>(of, form, memory, slice, to);
    if (form.at.bytes > stage_bytes(kDims)) {
      return build_block(of, form, plan, memory, kSecondRow, reinterpret_cast<uint32_t*>(to));
    }
    uint8_t* const stage = memory.tile.stage;
    build_block(of, form, plan, memory, kSecondRow, reinterpret_cast<uint32_t*>(stage));
    for (int32_t i = lane_index(); i < form.at.bytes / 16; i += kWarpLanes) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(stage)[i];
    }
    __syncwarp();
  }

  // kept: of the item, or null.
  __device__ __forceinline__ StatusCode encode(int32_t row, WeightedFaults& faults,
                                               WeightedPlace* place, uint8_t* kept) {
    const DeviceFamily& from = call.families[kKey ? 0 : 1];
    if (!family.usable) return StatusCode::kUnsupported;
    for (int32_t slice = 0; slice < Slices::kCount; ++slice) {
      const int32_t field = book_field_of(from, row, kDims, slice, Slices::kBlocks);
      if (field < 0) return StatusCode::kInvalidArgument;
      fields[slice] = static_cast<uint32_t>(field);
    }
    SlicePlan plan;
    EncodedSlice::Form form;
    int32_t units = 0, before = 0;  // before: bytes of the slices before the last one
#pragma unroll 1
    for (int32_t slice = 0; slice < Slices::kCount; ++slice) {
      before = units * kBlockAlignment;
      plan = code_slice(slice, slice == 0, faults, &form);
      units += form.header.units;
    }
    const StatusCode worst = faults.worst();
    const bool saturated = call.saturates && worst == StatusCode::kOutOfRange;
    if (worst != StatusCode::kOk && !saturated) return worst;
    const ChosenPlace chosen = choose_place(call, *place, units);
    if (!chosen.fits) return StatusCode::kBufferTooSmall;
    uint8_t* to = chosen.to;
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
    if (lane_index() == 0) {
      place->unit = chosen.unit;
      place->units = static_cast<uint32_t>(units);
    }
    return worst;
  }
};

// Opens an item's job and finds the importance of its tokens; into *code what is wrong. False where
// there is nothing to be done.
__device__ __forceinline__ bool begin_block(const WeightedEncode& call, const WeightedRange& range,
                                            const WeightedItem& item, EncodeWarp* warp,
                                            WeightedFaults* faults, StatusCode* code) {
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
  *faults = find_importance(job, call.scale, warp->exponents);
  *code = StatusCode::kOk;
  return true;
}

template <int32_t kDims>
__device__ __forceinline__ StatusCode encode_item(const WeightedEncode& call,
                                                  const WeightedItem& item,
                                                  const SharedFamily& family,
                                                  const WeightedMemory& memory, uint8_t* kept) {
  const WeightedRange range = call.ranges[item.range];
  const auto component = static_cast<int32_t>(item.component);
  WeightedPlace* const place =
      call.places[component] + (range.first_block + range.first / kBlockTokens + item.index);
  WeightedFaults faults;
  StatusCode code;
  if (begin_block(call, range, item, memory.tile.warp, &faults, &code)) {
    if (item.component == Component::kKey) {
      BlockEncoder<kDims, true> encoder{call, family, memory, {}};
      code = encoder.encode(range.row, faults, place, kept);
    } else {
      BlockEncoder<kDims, false> encoder{call, family, memory, {}};
      code = encoder.encode(range.row, faults, place, kept);
    }
    if (call.saturates && code == StatusCode::kOutOfRange) return code;  // and is written
  }
  const bool known = code != StatusCode::kInvalidArgument ||
                     is_valid_range(range, call.rows.num_rows, call.most_blocks);
  if (code != StatusCode::kOk && known && lane_index() == 0) place->units = 0;
  return code;
}

// Whether the call has a block that is not kept. In all threads of a CTA.
__device__ __forceinline__ bool has_blocks_left(const WeightedEncode& call) {
  if (call.kept == nullptr || call.bytes == nullptr) return true;
  const int64_t items = int64_t{2} * call.num_ranges * call.most_blocks;
  bool all_kept = true;
  for (int64_t i = threadIdx.x; i < items; i += blockDim.x) all_kept &= call.kept[i] != 0;
  return __syncthreads_and(all_kept) == 0;
}

// By a CTA of whole warps. shared: encode_cta_bytes() and encode_warp_bytes() of each warp.
template <int32_t kPer>
__device__ __forceinline__ void encode_weighted_items(const WeightedEncode& call, uint8_t* shared) {
  load_families(call, shared);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  constexpr int32_t kDims = kPer * kWarpLanes;
  const WeightedMemory memory(reinterpret_cast<const uint32_t*>(shared + kFamiliesBytes),
                              shared + encode_cta_bytes(call) + warp * encode_warp_bytes(kDims),
                              kDims);
  const int64_t items = int64_t{2} * call.num_ranges * call.most_blocks;
  const int64_t stride = int64_t{gridDim.x} * warps;
  // All keys before the values: the code for both would not fit into the instruction cache.
  for (int64_t n = int64_t{blockIdx.x} * warps + warp; n < items; n += stride) {
    const int64_t i = n < items / 2 ? 2 * n : 2 * (n - items / 2) + 1;
    const WeightedItem item = weighted_item(call, i);
    const auto* families = reinterpret_cast<const SharedFamily*>(shared);
    uint8_t* kept = nullptr;
    if (call.kept != nullptr) {
      if (call.bytes != nullptr && call.kept[i] != 0) continue;
      kept = call.kept + i;
      if (lane_index() == 0) *kept = 0;
    }
    const StatusCode code = encode_item<kDims>(
        call, item, families[static_cast<int32_t>(item.component)], memory, kept);
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

}  // namespace tierkv

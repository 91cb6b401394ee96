// The warps that encode weighted blocks and that count their codes.
//
// A warp reads a block's tokens once and keeps the codes in shared memory, a byte each, in the
// order of its lanes' streams; codes beyond a byte are made again where they are asked for. Bound:
// instructions, and how many warps the codes leave room for.
#pragma once

#include "codec/gpu/coded/code_counter.cuh"
#include "codec/gpu/coded/weighted_stage.cuh"

namespace tierkv {

inline constexpr int32_t kWeightedWarps = 8;
// Where a block is put together: about 4 bits a code. What is larger goes to memory at once.
TKV_HD constexpr int32_t weighted_room(int32_t head_dim) {
  return 36 * (head_dim < kSliceDims ? head_dim : kSliceDims);
}
TKV_HD constexpr int32_t encode_warp_bytes(int32_t head_dim) {
  return kEncodeWarpBytes + kBlockTokens * head_dim + weighted_room(head_dim);
}
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

// The header's book field of a slice whose family is usable; -1 where a book is not there.
__device__ inline int32_t book_field_of(const DeviceFamily& family, int32_t row, int32_t head_dim,
                                        int32_t slice, int32_t blocks) {
  if (family.book_of == nullptr) return 0;
  const uint8_t* of =
      family.book_of + int64_t{row} * (head_dim / kDimBlock) + slice * (kSliceDims / kDimBlock);
  int32_t field = 0;
  for (int32_t f = 0; f < blocks; ++f) {
    if (of[f] >= family.count) return -1;
    field |= of[f] << (2 * f);
  }
  return field;
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
      families[c].books[b] = {at, book.base, book.levels};
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

// What a warp works with in shared memory.
struct WeightedMemory {
  const uint32_t* words;  // of the CTA
  EncodeWarp* warp;
  uint8_t* codes;
  uint32_t* block;
};

template <int32_t kPer>
struct SlicesOf {
  static constexpr int32_t kDims = kPer * kWarpLanes;
  static constexpr int32_t kCount = (kDims + kSliceDims - 1) / kSliceDims;
  static constexpr int32_t kSlice = kCount == 1 ? kDims : kSliceDims;
  static constexpr int32_t kBlocks = kSlice / kDimBlock;
};

// The codes into shared memory; whether any is wide.
template <int32_t kPer, bool kKey>
__device__ __forceinline__ bool stage_codes(const WeightedMemory& memory, WeightedFaults& faults) {
  StageSink<kPer, kKey> sink(memory.codes);
  find_codes<kPer, kKey>(memory.warp->job, memory.warp->exponents, sink, faults);
  __syncwarp();
  return __any_sync(kFullWarp, sink.wide);
}

// Plans and writes the staged block.
template <int32_t kPer>
__device__ __forceinline__ StatusCode write_staged(const WeightedEncode& call,
                                                   const SharedFamily& family, int32_t row,
                                                   bool wide, const WeightedMemory& memory,
                                                   WeightedPlace* place) {
  using Slices = SlicesOf<kPer>;
  const WeightedBlockJob& job = memory.warp->job;
  const DeviceFamily& from = call.families[static_cast<int32_t>(job.component)];
  const auto encoder_of = [&](int32_t slice) {
    const int32_t field = book_field_of(from, row, Slices::kDims, slice, Slices::kBlocks);
    return WeightedEncoder{&family,
                           memory.words,
                           static_cast<uint32_t>(field),
                           slice == 0 ? memory.warp->exponents : nullptr,
                           family.streams,
                           job.component,
                           Slices::kSlice,
                           job.tokens,
                           weighted_room(Slices::kDims)};
  };
  for (int32_t slice = 0; slice < Slices::kCount; ++slice) {
    if (book_field_of(from, row, Slices::kDims, slice, Slices::kBlocks) < 0) {
      return StatusCode::kInvalidArgument;
    }
  }
  PlanOf<WeightedEncoder::Form> plan;
  int32_t units = 0;
#pragma unroll 1
  for (int32_t slice = 0; slice < Slices::kCount; ++slice) {
    StagedCodes source(memory.codes, memory.warp, slice, Slices::kBlocks, wide);
    plan = plan_block(encoder_of(slice), source);
    units += plan.form.header.units;
  }
  const ChosenPlace chosen = choose_place(call, *place, units);
  if (!chosen.fits) return StatusCode::kBufferTooSmall;
  uint8_t* to = chosen.to;
#pragma unroll 1
  for (int32_t slice = 0; to != nullptr && slice < Slices::kCount; ++slice) {
    StagedCodes source(memory.codes, memory.warp, slice, Slices::kBlocks, wide);
    if constexpr (Slices::kCount > 1) plan = plan_block(encoder_of(slice), source);
    write_block(encoder_of(slice), source, plan, memory.block, to);
    to += plan.form.at.bytes;
  }
  if (lane_index() == 0) {
    place->unit = chosen.unit;
    place->units = static_cast<uint32_t>(units);
  }
  return StatusCode::kOk;
}

// Opens an item's job and finds its exponents; into *code what is wrong. False where there is
// nothing to be done.
template <int32_t kPer>
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
  *faults = find_exponents<kPer>(job, call.scale, warp->exponents);
  *code = StatusCode::kOk;
  return true;
}

template <int32_t kPer>
__device__ __forceinline__ StatusCode encode_item(const WeightedEncode& call,
                                                  const WeightedItem& item,
                                                  const SharedFamily& family,
                                                  const WeightedMemory& memory) {
  const WeightedRange range = call.ranges[item.range];
  const auto component = static_cast<int32_t>(item.component);
  WeightedPlace* const place =
      call.places[component] + (range.first_block + range.first / kBlockTokens + item.index);
  WeightedFaults faults;
  StatusCode code;
  if (begin_block<kPer>(call, range, item, memory.warp, &faults, &code)) {
    const bool wide = item.component == Component::kKey ? stage_codes<kPer, true>(memory, faults)
                                                        : stage_codes<kPer, false>(memory, faults);
    code = faults.worst();
    const bool saturated = call.saturates && code == StatusCode::kOutOfRange;
    if (saturated) code = StatusCode::kOk;
    if (code == StatusCode::kOk && !family.usable) code = StatusCode::kUnsupported;
    if (code == StatusCode::kOk) {
      code = write_staged<kPer>(call, family, range.row, wide, memory, place);
    }
    if (saturated && code == StatusCode::kOk) return StatusCode::kOutOfRange;
  }
  const bool known = code != StatusCode::kInvalidArgument ||
                     is_valid_range(range, call.rows.num_rows, call.most_blocks);
  if (code != StatusCode::kOk && known && lane_index() == 0) place->units = 0;
  return code;
}

// By a CTA of whole warps. shared: encode_cta_bytes() and encode_warp_bytes() of each warp.
template <int32_t kPer>
__device__ __forceinline__ void encode_weighted_items(const WeightedEncode& call, uint8_t* shared) {
  load_families(call, shared);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  uint8_t* const mine = shared + encode_cta_bytes(call) + warp * encode_warp_bytes(kPer * 32);
  uint8_t* const codes = mine + kEncodeWarpBytes;
  const WeightedMemory memory{
      reinterpret_cast<const uint32_t*>(shared + kFamiliesBytes),
      reinterpret_cast<EncodeWarp*>(mine), codes,
      reinterpret_cast<uint32_t*>(codes + kBlockTokens * kPer * kWarpLanes)};
  const int64_t items = int64_t{2} * call.num_ranges * call.most_blocks;
  const int64_t stride = int64_t{gridDim.x} * warps;
  for (int64_t i = int64_t{blockIdx.x} * warps + warp; i < items; i += stride) {
    const WeightedItem item = weighted_item(call, i);
    const auto* families = reinterpret_cast<const SharedFamily*>(shared);
    const StatusCode code =
        encode_item<kPer>(call, item, families[static_cast<int32_t>(item.component)], memory);
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

// Codes into histograms.
template <int32_t kPer, bool kKey>
struct CountSink {
  static constexpr int32_t kAhead = 2;
  static constexpr int32_t kTogether = kKey ? 1 : 2;
  const CodeCounter& counter;
  int32_t tokens;

  __device__ __forceinline__ int32_t clip(int32_t code) const { return code; }
  __device__ __forceinline__ void take(int32_t t, const int32_t (&codes)[kTogether][kPer]) const {
#pragma unroll
    for (int32_t k = 0; k < kPer; ++k) {
      if constexpr (kKey) {
        const int32_t other = __shfl_xor_sync(kFullWarp, codes[0][k], 1);
        if (lane_index() % 2 == 0) counter.count(codes[0][k], other);
      } else {
        if (t + 1 < tokens) counter.count(codes[0][k], codes[1][k]);
      }
    }
  }
};

// By a CTA of kCounterThreads, for the component blockIdx.y. shared: kCounterBytes and
// kEncodeWarpBytes of each warp.
template <int32_t kPer>
__device__ __forceinline__ void count_weighted_items(const WeightedEncode& call,
                                                     const WeightedCounts& counts,
                                                     uint8_t* shared) {
  constexpr int32_t kWarps = kCounterThreads / kWarpLanes;
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto c = static_cast<int32_t>(blockIdx.y);
  const CodeCounter counter{reinterpret_cast<uint32_t*>(shared), counts.pairs[c], counts.wide[c]};
  auto* const mine =
      reinterpret_cast<EncodeWarp*>(shared + kCounterBytes + warp * kEncodeWarpBytes);
  counter.clear();
  const int64_t groups = int64_t{call.num_ranges} * call.most_blocks;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + warp; i < groups;
       i += int64_t{gridDim.x} * kWarps) {
    const WeightedItem item = weighted_item(call, 2 * i + c);
    WeightedFaults faults;
    StatusCode code;
    if (begin_block<kPer>(call, call.ranges[item.range], item, mine, &faults, &code)) {
      if (c == 0) {
        CountSink<kPer, true> sink{counter, mine->job.tokens};
        find_codes<kPer, true>(mine->job, mine->exponents, sink, faults);
      } else {
        CountSink<kPer, false> sink{counter, mine->job.tokens};
        find_codes<kPer, false>(mine->job, mine->exponents, sink, faults);
      }
      code = faults.worst();
    }
    if (lane_index() == 0) call.status[2 * i + c] = code;
    __syncwarp();
  }
  counter.flush();
}

}  // namespace tierkv

// The warps that encode weighted blocks and that count their codes.
//
// A warp codes a block once: each lane's bits go to words of its own in shared memory, and when all
// lengths are known to the block, shifted to where the stream begins. Only a raw block, and the
// first slice of two, is coded again. Bound: instructions, about 20 a code.
#pragma once

#include "codec/gpu/coded/code_counter.cuh"
#include "codec/gpu/coded/weighted_form.cuh"
#include "codec/gpu/coded/weighted_tiles.cuh"

namespace tierkv {

inline constexpr int32_t kWeightedWarps = 8;

// A slice's exceptions in any order.
struct alignas(16) ExceptionList {
  int32_t count;  // may exceed what the list holds
  uint32_t at[kMaxWeightedExceptions];
};
// Rows of words, one of each lane: a slice's streams of the longest code words, and what is left of
// a word.
TKV_HD constexpr int32_t stream_rows(int32_t head_dim) {
  const int32_t pairs = head_dim < kSliceDims ? head_dim : kSliceDims;  // of a lane
  return pairs * kMaxCodeLength / 32 + 2;
}
TKV_HD constexpr int32_t encode_warp_bytes(int32_t head_dim) {
  return tile_warp_bytes(head_dim) + static_cast<int32_t>(sizeof(ExceptionList)) +
         stream_rows(head_dim) * kWarpLanes * 4;
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
      const bool is_narrow = book.base >= -kMostSureCode && book.base <= kMostSureCode &&
                             book.base + book.levels - 1 <= kMostSureCode;
      families[c].books[b] = {at, book.base, book.levels, is_narrow ? kSureOff : -1.0f};
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

// ---- streams ----

// What a warp works with in shared memory.
struct WeightedMemory {
  const uint32_t* words;  // of the CTA
  TileMemory tile;
  ExceptionList* exceptions;
  uint32_t* rows;  // of the streams, from this lane's words on

  // of: encode_warp_bytes().
  __device__ __forceinline__ WeightedMemory(const uint32_t* of_cta, uint8_t* of, int32_t head_dim)
      : words(of_cta),
        tile(of, head_dim),
        exceptions(reinterpret_cast<ExceptionList*>(of + tile_warp_bytes(head_dim))),
        rows(reinterpret_cast<uint32_t*>(exceptions + 1) + lane_index()) {}
};

// Bits of a stream into a lane's words.
struct LaneBits {
  uint32_t* word;  // that is filled
  uint32_t pending = 0;
  int32_t filled = 0, words = 0;

  __device__ __forceinline__ explicit LaneBits(uint32_t* first) : word(first) {}
  // length: at most 28, the bits of `code`.
  __device__ __forceinline__ void put(uint32_t code, int32_t length) {
    const uint64_t bits = static_cast<uint64_t>(code) << filled;
    pending |= static_cast<uint32_t>(bits);
    *word = pending;
    filled += length;
    const bool is_full = filled >= 32;
    pending = is_full ? static_cast<uint32_t>(bits >> 32) : pending;
    word += is_full ? kWarpLanes : 0;
    words += is_full ? 1 : 0;
    filled &= 31;
  }
  // The bits that were put.
  __device__ __forceinline__ int32_t finish() {
    *word = pending;
    return 32 * words + filled;
  }
};

// A pair whose codes are in doubt, or whose symbol the codebook lacks.
struct SettledPair {
  uint32_t word, codes;
  bool possible;
  StatusCode status;
};
__device__ __noinline__ inline SettledPair settle_pair(const EncodeWarp* warp, LaneBook book,
                                                       int32_t slice, int32_t tile, int32_t f,
                                                       int32_t r, ExceptionList* list) {
  const ExactPair exact = exact_pair(warp, slice, tile, f, r);
  const int32_t code[2] = {exact.code[0], exact.code[1]};
  SettledPair settled{
      book.word_of(code),
      (static_cast<uint32_t>(code[0]) & 0xffffu) | static_cast<uint32_t>(code[1]) << 16, true,
      exact.status};
  if (settled.word != 0) return settled;
  const Substitute other = find_substitute(book, code[0], code[1]);
  settled.word = other.word;
  settled.possible = other.fits();
  const Component component = warp->job.component;
  const PairPosition p = pair_position(component, tile, f, r, lane_index());
  const int32_t first = p.token * kSliceDims + p.dim;
  for (int32_t h = 0; h < 2; ++h) {
    if (other.delta[h] == 0) continue;
    const int32_t index = first + (h == 0 ? 0 : component == Component::kKey ? 1 : kSliceDims);
    const int32_t i = atomicAdd(&list->count, 1);
    if (i >= kMaxWeightedExceptions) continue;
    list->at[i] = static_cast<uint32_t>(index) | static_cast<uint32_t>(other.delta[h]) << 16;
  }
  return settled;
}

// A slice's codes to streams.
template <int32_t kDims>
struct StreamSink {
  const WeightedMemory& memory;
  const SharedFamily& family;
  uint32_t book_field;
  int32_t slice, streams;
  WeightedFaults& faults;
  LaneBits out[2];
  CodeRange range;
  bool possible = true;

  __device__ __forceinline__ StreamSink(const WeightedMemory& of, const SharedFamily& books,
                                        uint32_t field, int32_t of_slice, WeightedFaults& worst)
      : memory(of),
        family(books),
        book_field(field),
        slice(of_slice),
        streams(books.streams),
        faults(worst),
        out{LaneBits(of.rows), LaneBits(of.rows + stream_rows(kDims) / 2 * kWarpLanes)} {
    if (lane_index() == 0) memory.exceptions->count = 0;
    __syncwarp();
  }

  __device__ __forceinline__ void take(int32_t tile, int32_t f, const QuickFragment& codes) {
    const int32_t i = book_field >> (2 * f) & 3u;
    const SharedBook book = family.books[i];
    const uint32_t* const of_book = memory.words + book.words;
    const uint32_t first = kQuickBits + static_cast<uint32_t>(book.base);
    const auto levels = static_cast<uint32_t>(book.levels);
    uint32_t word[kPairsPerFragment], both[kPairsPerFragment];
    bool all = true;
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const uint32_t a = codes[r][0].bits - first, b = codes[r][1].bits - first;
      const float off = fmaxf(codes[r][0].off, codes[r][1].off);
      word[r] = a < levels && b < levels && off < book.sure_off ? of_book[a + levels * b] : 0u;
      both[r] = __byte_perm(codes[r][0].bits, codes[r][1].bits, 0x5410);
      all &= word[r] != 0;
    }
    if (!all) {
#pragma unroll
      for (int32_t r = 0; r < kPairsPerFragment; ++r) {
        if (word[r] != 0) continue;
        const SettledPair settled =
            settle_pair(memory.tile.warp, {of_book, family.cheapest[i], book.base, book.levels},
                        slice, tile, f, r, memory.exceptions);
        word[r] = settled.word, both[r] = settled.codes;
        possible &= settled.possible;
        add_fault(settled.status, faults);
      }
    }
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) range.add(both[r]);
    if (streams == 1) {
      put_two(out[0], word[0], word[1]);
      put_two(out[0], word[2], word[3]);
    } else {
      put_two(out[0], word[0], word[2]);
      put_two(out[1], word[1], word[3]);
    }
  }
  __device__ __forceinline__ static void put_two(LaneBits& to, uint32_t a, uint32_t b) {
    const auto length = static_cast<int32_t>(a >> 16);
    to.put((a & 0xffffu) | (b & 0xffffu) << length, length + static_cast<int32_t>(b >> 16));
  }

  __device__ __forceinline__ SlicePlan finish() {
    SlicePlan plan{};
#pragma unroll
    for (int32_t s = 0; s < 2; ++s) plan.bits[s] = s < streams ? out[s].finish() : 0;
    int32_t ahead = 0, behind = 0;
    plan.start[0] = sum_before(plan.bits[0], &ahead);
    plan.start[1] = ahead + sum_before(plan.bits[1], &behind);
    plan.payload_bits = ahead + behind;
    __syncwarp();
    plan.exceptions = memory.exceptions->count;
    plan.possible = __all_sync(kFullWarp, possible) && plan.exceptions <= kMaxWeightedExceptions &&
                    plan.payload_bits <= kMaxPayloadBits;
    return plan;
  }
};

// ---- blocks ----

// A lane's stream to bit `start` of the payload, whose words are zero. Neighbouring streams may
// share the first and the last word.
__device__ __forceinline__ void place_stream(const uint32_t* rows, int32_t bits, int32_t start,
                                             uint32_t* payload) {
  if (bits == 0) return;
  const int32_t skip = start % 32, words = (bits + 31) / 32, last = (skip + bits - 1) / 32;
  uint32_t* const to = payload + start / 32;
  uint32_t before = 0;
  for (int32_t i = 0; i <= last; ++i) {
    const uint32_t word = i < words ? rows[i * kWarpLanes] : 0u;
    const auto shifted =
        static_cast<uint32_t>((static_cast<uint64_t>(word) << 32 | before) << skip >> 32);
    before = word;
    if (i > 0 && i < last) {
      to[i] = shifted;
    } else {
      atomicOr(to + i, shifted);
    }
  }
}

// In ascending order: indices are different, so an exception's rank is the number of lower ones.
__device__ __forceinline__ void place_exceptions(const ExceptionList& list, uint32_t* to) {
  for (int32_t i = lane_index(); i < list.count; i += kWarpLanes) {
    const uint32_t mine = list.at[i];
    int32_t rank = 0;
    for (int32_t j = 0; j < list.count; ++j) rank += (list.at[j] & 0xffffu) < (mine & 0xffffu);
    to[rank] = mine;
  }
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

  __device__ __forceinline__ StatusCode encode(int32_t row, WeightedFaults& faults,
                                               WeightedPlace* place) {
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
    if (chosen.to != nullptr) {
      write_slice(Slices::kCount - 1, plan, form, chosen.to + before);
      if constexpr (Slices::kCount > 1) {
        plan = code_slice(0, false, faults, &form);
        write_slice(0, plan, form, chosen.to);
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
                                                  const WeightedMemory& memory) {
  const WeightedRange range = call.ranges[item.range];
  const auto component = static_cast<int32_t>(item.component);
  WeightedPlace* const place =
      call.places[component] + (range.first_block + range.first / kBlockTokens + item.index);
  WeightedFaults faults;
  StatusCode code;
  if (begin_block(call, range, item, memory.tile.warp, &faults, &code)) {
    if (item.component == Component::kKey) {
      code = BlockEncoder<kDims, true>{call, family, memory, {}}.encode(range.row, faults, place);
    } else {
      code = BlockEncoder<kDims, false>{call, family, memory, {}}.encode(range.row, faults, place);
    }
    if (call.saturates && code == StatusCode::kOutOfRange) return code;  // and is written
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
  constexpr int32_t kDims = kPer * kWarpLanes;
  const WeightedMemory memory(reinterpret_cast<const uint32_t*>(shared + kFamiliesBytes),
                              shared + encode_cta_bytes(call) + warp * encode_warp_bytes(kDims),
                              kDims);
  const int64_t items = int64_t{2} * call.num_ranges * call.most_blocks;
  const int64_t stride = int64_t{gridDim.x} * warps;
  for (int64_t i = int64_t{blockIdx.x} * warps + warp; i < items; i += stride) {
    const WeightedItem item = weighted_item(call, i);
    const auto* families = reinterpret_cast<const SharedFamily*>(shared);
    const StatusCode code =
        encode_item<kDims>(call, item, families[static_cast<int32_t>(item.component)], memory);
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

// Pairs of a tile's fragment into histograms.
struct CountSink {
  const CodeCounter& counter;
  const EncodeWarp* warp;
  int32_t slice;
  WeightedFaults& faults;

  __device__ __forceinline__ void take(int32_t tile, int32_t f, const QuickFragment& codes) const {
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      int32_t code[2];
      settled_codes(warp, slice, tile, f, r, codes[r], faults, code);
      if (code[0] < kPaddingCodes && code[1] < kPaddingCodes) counter.count(code[0], code[1]);
    }
  }
};

template <int32_t kDims, bool kKey>
__device__ __forceinline__ void count_block(const CodeCounter& counter, const TileMemory& memory,
                                            WeightedFaults& faults) {
#pragma unroll 1
  for (int32_t slice = 0; slice < SlicesOf<kDims>::kCount; ++slice) {
    const CountSink sink{counter, memory.warp, slice, faults};
    take_slice<kDims, kKey>(
        memory, slice, slice == 0, faults,
        [&](int32_t tile, int32_t f, const QuickFragment& codes) { sink.take(tile, f, codes); });
  }
}

// By a CTA of whole warps, for the component blockIdx.y. shared: kCounterBytes and
// tile_warp_bytes() of each warp.
template <int32_t kPer>
__device__ __forceinline__ void count_weighted_items(const WeightedEncode& call,
                                                     const WeightedCounts& counts,
                                                     uint8_t* shared) {
  constexpr int32_t kDims = kPer * kWarpLanes;
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  const auto c = static_cast<int32_t>(blockIdx.y);
  const CodeCounter counter{reinterpret_cast<uint32_t*>(shared), counts.pairs[c], counts.wide[c]};
  const TileMemory memory(shared + kCounterBytes + warp * tile_warp_bytes(kDims), kDims);
  counter.clear();
  const int64_t groups = int64_t{call.num_ranges} * call.most_blocks;
  for (int64_t i = int64_t{blockIdx.x} * warps + warp; i < groups;
       i += int64_t{gridDim.x} * warps) {
    const WeightedItem item = weighted_item(call, 2 * i + c);
    WeightedFaults faults;
    StatusCode code;
    if (begin_block(call, call.ranges[item.range], item, memory.warp, &faults, &code)) {
      if (c == 0) {
        count_block<kDims, true>(counter, memory, faults);
      } else {
        count_block<kDims, false>(counter, memory, faults);
      }
      code = faults.worst();
    }
    if (lane_index() == 0) call.status[2 * i + c] = code;
    __syncwarp();
  }
  counter.flush();
}

}  // namespace tierkv

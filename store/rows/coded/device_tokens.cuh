// SPDX-License-Identifier: Apache-2.0
// The tokens of cells into staging memory: new ones as fp16 with what is decided about them, those
// of blocks that are continued as codes.
#pragma once

#include "codec/format/element.h"
#include "codec/format/same_log.h"
#include "codec/gpu/coded/weighted_decode.cuh"
#include "store/place/raw_tokens.h"
#include "store/rows/coded/device_coded_call.cuh"
#include "store/rows/device_tokens.h"
#include "store/rows/raw_tiles.h"

namespace tierkv::store {

// An element of raw tiles from `tiles` on.
TKV_HD uint16_t raw_tile_element(const uint8_t* tiles, int32_t head_dim, Component c, int32_t t,
                                 int32_t d) {
  return *reinterpret_cast<const uint16_t*>(tiles + raw_tile_byte(head_dim, c, t, d));
}

TKV_HD Importance token_importance_of(const CodedCall& call, const CellOf& cell, int32_t kv_head,
                                      int32_t position) {
  const DeviceStoreView& view = call.device.view;
  const RawTokens tokens = raw_tokens(view.raw, view.raw_row(cell.slot, cell.layer, kv_head),
                                      call.works.from[cell.entry].tokens, call.works.chunk,
                                      {cell.entry / call.works.num_layers, kv_head, call.heads()});
  return tokens.importance(position);
}

// The positions of a cell about which nothing is decided yet.
TKV_HD Positions undecided(const CodedCall& call, const CellOf& cell) {
  const EntryDraft& draft = call.entries[cell.entry];
  const Positions at = tokens_of(call, cell);
  return {most(at.first, most(draft.waited, draft.coded)), at.end};
}
TKV_HD LogMean log_of(const Importance& known) {
  return is_averaged(known) ? log_mean_of(known.value) : LogMean{};
}
// The sums of `lanes` neighbours, in all of them.
__device__ inline LogMean sum_of(LogMean mine, int32_t lanes) {
  for (int32_t i = 1; i < lanes; i *= 2) {
    mine.add(
        {__shfl_xor_sync(kFullWarp, mine.seen, i), 0, __shfl_xor_sync(kFullWarp, mine.logs, i)});
  }
  return mine;
}
// What the undecided tokens of a cell add to the row's mean. By a warp.
__device__ inline LogMean added_mean(const CodedCall& call, const CellOf& cell, int32_t kv_head) {
  LogMean mine;
  if (call.device.layers[cell.layer].is_raw != 0) return mine;
  const Positions range = undecided(call, cell);
  for (int32_t p = range.first + lane_index(); p < range.end; p += kWarpLanes) {
    mine.add(log_of(token_importance_of(call, cell, kv_head, p)));
  }
  return sum_of(mine, kWarpLanes);
}

// A CTA for a (cell, kv_head): elements of new tokens, G of those in raw blocks, the range that the
// encoder takes, what the block adds to the row's mean. Reports elements of the chunk that fp16
// does not hold.
struct GatherTokens : CallWork {
  static constexpr int32_t kThreads = 256;

  __device__ void operator()(uint8_t*) const {
    if (is_loaded(call)) return;
    const int32_t heads = call.heads(), items = cells_of_group(call) * heads;
    for (auto i = static_cast<int32_t>(blockIdx.x); i < items;
         i += static_cast<int32_t>(gridDim.x)) {
      gather(i, cell_of(call, i / heads), i % heads);
    }
  }
  // By a CTA.
  __device__ void gather(int32_t row, const CellOf& cell, int32_t kv_head) const {
    if (cell.entry < 0) return;
    const bool coded = is_written(call, cell, EntryForm::kCoded);
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const EntryDraft& draft = call.entries[cell.entry];
    const Positions at = tokens_of(call, cell);
    const int32_t dims = call.head_dim(), first = most(at.first, draft.coded);
    const auto threads = static_cast<int32_t>(blockDim.x);
    const int32_t apart = least(at.end, most(first, call.works.from[cell.entry].tokens));
    const int32_t ring_first = most(first, draft.waited);
    if (first < draft.waited) {
      copy_tiles(row, cell, kv_head, at.first, {first, least(draft.waited, at.end)});
    }
    if (ring_first < apart) copy_ring(row, cell, kv_head, at.first, {ring_first, apart});
    int32_t largest = 0;
    for (const Component c : {Component::kKey, Component::kValue}) {
      if (apart == at.end) break;
      uint16_t* const to = call.staged(c, row) + (apart - at.first) * dims;
      largest = most(largest, copy_chunk(cell, c, kv_head, {apart, at.end}, to));
    }
    const StatusCode code = code_of_magnitude(call.works.chunk.dtype, largest);
    if (code != StatusCode::kOk) {
      report_fault(call.device.fault, {code, cell.slot, cell.layer, kv_head});
    }
    uint8_t(*const words)[4] = call.decided + int64_t{row} * kBlockTokens;
    const uint8_t* waited =
        first < draft.waited ? old_block(call, cell, kv_head, Component::kKey) : nullptr;
    for (int32_t t = thread; t < least(draft.waited, at.end) - at.first; t += threads) {
      words[t][0] = waited[t];
      words[t][1] = words[t][2] = words[t][3] = 0;
    }
    if (thread >= kWarpLanes) return;
    const LogMean added = added_mean(call, cell, kv_head);
    if (thread != 0) return;
    call.sums[cell.cell * heads() + kv_head] = added;
    WeightedRange range;
    if (coded) {
      range.at = int64_t{row} * kBlockTokens * dims;
      range.decided = int64_t{row} * kBlockTokens;
      range.first = at.first, range.last = at.end;
      range.row = call.device.row(cell.slot, cell.layer, kv_head);
      range.first_block = static_cast<int32_t>(cell.cell * heads() + kv_head - cell.block);
      range.body_first = draft.coded;
    }
    call.ranges[row] = range;
  }

 private:
  __device__ int32_t heads() const { return call.heads(); }

  // Positions in the ring.
  __device__ void copy_ring(int32_t row, const CellOf& cell, int32_t kv_head,
                            int32_t first_of_block, Positions range) const {
    const RawLayout& raw = call.device.view.raw;
    const uint8_t* const ring = call.device.view.raw_row(cell.slot, cell.layer, kv_head);
    const int32_t octets = call.head_dim() / 8, each = range.count() * octets;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < 2 * each;
         i += static_cast<int32_t>(blockDim.x)) {
      const auto c = static_cast<Component>(i / each);
      const int32_t p = range.first + i % each / octets, octet = i % octets;
      auto* const to =
          reinterpret_cast<uint4*>(call.staged(c, row)) + (p - first_of_block) * octets;
      to[octet] = reinterpret_cast<const uint4*>(ring + raw.token_byte(c, p))[octet];
    }
  }
  // Positions in a raw block's tiles. A warp turns fragments of 16 channels into rows.
  __device__ void copy_tiles(int32_t row, const CellOf& cell, int32_t kv_head,
                             int32_t first_of_block, Positions range) const {
    const int32_t dims = call.head_dim(), fragments = dims / kDimBlock;
    const int32_t first = range.first - (range.first - first_of_block) % kTileTokens;
    const int32_t count = tile_count(range.end - first) * fragments;
    const auto warps = static_cast<int32_t>(blockDim.x / 32u);
    for (auto i = static_cast<int32_t>(threadIdx.x / 32u); i < count; i += warps) {
      const int32_t tile = first + i / fragments * kTileTokens, f = i % fragments;
      uint4 x[2];  // in flight together
#pragma unroll
      for (int32_t n = 0; n < 2; ++n) {
        const auto c = static_cast<Component>(n);
        const uint8_t* const bytes = old_block(call, cell, kv_head, c) + kBlockTokens +
                                     raw_tile_byte(dims, c, tile - first_of_block, 0);
        x[n] = reinterpret_cast<const uint4*>(bytes)[f * kWarpLanes + lane_index()];
      }
#pragma unroll
      for (int32_t n = 0; n < 2 * kPairsPerFragment; ++n) {
        const auto c = static_cast<Component>(n / kPairsPerFragment);
        const int32_t r = n % kPairsPerFragment;
        const uint4& of = x[n / kPairsPerFragment];
        const uint32_t word = r == 0 ? of.x : r == 1 ? of.y : r == 2 ? of.z : of.w;
        const PairPosition at = pair_position(c, 0, f, r, lane_index());
        const int32_t p = tile + at.token;
        uint16_t* const to = call.staged(c, row) + (p - first_of_block) * dims + at.dim;
        const bool is_first_in = p >= range.first && p < range.end;
        if (c == Component::kKey) {
          if (is_first_in) *reinterpret_cast<uint32_t*>(to) = word;
        } else {
          if (is_first_in) to[0] = static_cast<uint16_t>(word);
          if (p + 1 >= range.first && p + 1 < range.end)
            to[dims] = static_cast<uint16_t>(word >> 16);
        }
      }
    }
  }
  // Returns the largest magnitude of what the thread copied.
  __device__ int32_t copy_chunk(const CellOf& cell, Component c, int32_t kv_head, Positions range,
                                uint16_t* to) const {
    const Chunk& chunk = call.works.chunk;
    const int64_t i = cell.entry / call.works.num_layers;
    constexpr int32_t kLoads = 4;  // in flight
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t octets = call.head_dim() / 8, rows = static_cast<int32_t>(blockDim.x) / octets;
    if (thread >= rows * octets) return 0;
    const int32_t last = range.count() - 1, column = thread % octets;
    const int64_t first = i * chunk.tokens + range.first - call.works.from[cell.entry].tokens;
    const auto* from = reinterpret_cast<const uint4*>(c == Component::kKey ? chunk.k : chunk.v) +
                       (first * call.heads() + kv_head) * octets + column;
    auto* const staged = reinterpret_cast<uint4*>(to) + column;
    int32_t largest = 0;
    for (int32_t row = thread / octets; row <= last; row += kLoads * rows) {
      uint4 x[kLoads];
#pragma unroll
      for (int32_t n = 0; n < kLoads; ++n) {
        x[n] = from[int64_t{least(row + n * rows, last)} * call.heads() * octets];
      }
#pragma unroll
      for (int32_t n = 0; n < kLoads; ++n) {
        const int32_t magnitude = largest_magnitude(x[n]);
        largest = most(largest, magnitude);
        if (chunk.dtype == DType::kBFloat16) x[n] = four_bfloats_to_halves(x[n]);
        if (code_of_magnitude(chunk.dtype, magnitude) != StatusCode::kOk) {
          x[n] = {finite(x[n].x), finite(x[n].y), finite(x[n].z), finite(x[n].w)};
        }
        if (row + n * rows <= last) staged[(row + n * rows) * octets] = x[n];
      }
    }
    return largest;
  }
  // Two halves, 0 where one is not finite.
  __device__ static uint32_t finite(uint32_t x) {
    if ((x & 0x7c00u) == 0x7c00u) x &= 0xffff0000u;
    if ((x & 0x7c000000u) == 0x7c000000u) x &= 0xffffu;
    return x;
  }
};

// A warp for a (cell, kv_head): exponents of its new tokens, as CodedRows::decide(). GatherTokens
// has left what each block adds to the row's mean.
struct DecideExponents : CallWork {
  static constexpr int32_t kThreads = 128;

  __device__ void operator()(uint8_t*) const {
    if (is_loaded(call)) return;
    const int32_t heads = call.heads(), items = cells_of_group(call) * heads;
    for (int32_t i = warp_of_grid(); i < items; i += warps_of_grid()) {
      decide_cell(i / heads, i % heads);
    }
  }
  // By a warp.
  __device__ void decide_cell(int32_t index, int32_t kv_head) const {
    const CellOf cell = cell_of(call, index);
    if (cell.entry < 0) return;
    const EntryDraft& draft = call.entries[cell.entry];
    const auto* const state = call.device.state<CodedRowState>(cell.slot, cell.layer,
                                                               call.device.shape.row_byte(kv_head));
    const int32_t before = cell.block - draft.first_block;
    const LogMean* const own = call.sums + cell.cell * call.heads() + kv_head;
    LogMean mean;
    for (int32_t b = 1 + lane_index(); b <= before; b += kWarpLanes) {
      mean.add(own[-int64_t{b} * call.heads()]);
    }
    mean = sum_of(mean, kWarpLanes);
    mean.add(state->mean);
    decide_block(index, cell, kv_head, call.device.layers[cell.layer].is_raw == 0, mean);
    if (cell.block + 1 != draft.end_block || lane_index() != 0) return;
    CodedRowState made = *state;
    made.mean = mean;
    made.mean.add(*own);
    call.rows[int64_t{cell.entry} * call.heads() + kv_head] = made;
  }

 private:
  // Two tiles at once, half a warp each. `mean` is of the row's tokens before the block.
  __device__ void decide_block(int32_t index, const CellOf& cell, int32_t kv_head, bool is_coded,
                               LogMean mean) const {
    const Positions range = undecided(call, cell);
    const int32_t begin = tokens_of(call, cell).first;
    uint8_t(*const words)[4] =
        call.decided + (int64_t{index} * call.heads() + kv_head) * kBlockTokens;
    const int32_t half = lane_index() / kTileTokens;
    for (int32_t base = range.first & ~(kTileTokens - 1); base < range.end; base += kWarpLanes) {
      const int32_t p = base + lane_index();
      const bool is_mine = p >= range.first && p < range.end;
      Importance known;
      if (is_mine && is_coded) known = token_importance_of(call, cell, kv_head, p);
      const LogMean tile = sum_of(log_of(known), kTileTokens);
      const LogMean other = {__shfl_xor_sync(kFullWarp, tile.seen, kTileTokens), 0,
                             __shfl_xor_sync(kFullWarp, tile.logs, kTileTokens)};
      LogMean up_to_tile = mean;
      up_to_tile.add(tile);
      if (half == 1) up_to_tile.add(other);
      mean.add(tile);
      mean.add(other);
      if (!is_mine) continue;
      const uint32_t bits = is_coded ? decide_exponents(known, p, up_to_tile).bits() : 0;
      for (int32_t i = 0; i < 4; ++i) words[p - begin][i] = static_cast<uint8_t>(bits >> (8 * i));
    }
  }
};

// Both, where an entry has one cell at most: a row's mean before a block is what its state has.
struct LoadTokens : CallWork {
  static constexpr int32_t kThreads = GatherTokens::kThreads;

  __device__ void operator()(uint8_t*) const {
    if (is_loaded(call)) return;
    const int32_t heads = call.heads(), items = cells_of_group(call) * heads;
    for (auto i = static_cast<int32_t>(blockIdx.x); i < items;
         i += static_cast<int32_t>(gridDim.x)) {
      GatherTokens{{call}}.gather(i, cell_of(call, i / heads), i % heads);
      __syncwarp();
      if (threadIdx.x < kWarpLanes) DecideExponents{{call}}.decide_cell(i / heads, i % heads);
    }
  }
};

// The codes and exponents of the blocks of a group that are continued: a warp for a block of a
// component. blockIdx.y: layer of the call and component.
struct DecodeOldBlocks : CallWork {
  static constexpr int32_t kThreads = 128;

  __device__ void operator()(uint8_t* shared) const {
    const auto layer = static_cast<int32_t>(blockIdx.y / 2);
    const int32_t items = cells_of_layer(call, layer).count() * call.heads();
    if (is_loaded(call) || static_cast<int32_t>(blockIdx.x * blockDim.x / 32u) >= items) return;
    if (!continues_blocks(layer)) return;
    decode(layer, static_cast<Component>(blockIdx.y % 2), shared, warp_of_grid(), warps_of_grid());
  }
  // What the group has of a layer: this warp takes every step-th block from `first` on. By a CTA.
  __device__ void decode(int32_t layer, Component c, uint8_t* shared, int32_t first,
                         int32_t step) const {
    auto* const decode = reinterpret_cast<WeightedDecode*>(shared);
    if (threadIdx.x == 0) *decode = decode_call(call.works.first_layer + layer, c);
    __syncthreads();
    if (decode->book.codebook == nullptr) return;
    const auto region_bytes = static_cast<uint32_t>(weighted_region_bytes(*decode));
    const uint32_t start = shared_address(shared + kCallBytes);
    uint8_t* const region =
        shared + kCallBytes + ((start + region_bytes - 1) / region_bytes * region_bytes - start);
    auto* const book = reinterpret_cast<DecodeBook*>(region + region_bytes);
    load_book(*decode, book, region);
    const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
    uint8_t* const of_warps = region + region_bytes + kDecodeBookBytes;
    TableReader reader(book->codebook, region);
    const auto warps = static_cast<int32_t>(blockDim.x / 32u);
    const int32_t heads = call.heads();
    const Positions cells = cells_of_layer(call, layer);
    bool is_done = true;
    // First all warps, then those with large slices in turn, each with the memory of all.
#pragma unroll 1
    for (int32_t turn = -1; turn < warps; ++turn) {
      const bool is_first = turn < 0, is_mine = is_first || (turn == warp && !is_done);
      const int32_t room = is_first ? call.slice_bytes : kMaxCodedBlockBytes;
      const int32_t begin = is_first ? warp * weighted_decode_warp_bytes(*decode) : 0;
      const WeightedDecodeWarp memory(*decode, {}, of_warps + begin);
      if (is_mine) is_done = true;
      for (int32_t i = first; is_mine && i < cells.count() * heads; i += step) {
        const int32_t row = cells.first * heads + i;
        const CellOf cell = cell_of(call, row / heads);
        if (is_written(call, cell, EntryForm::kCoded)) {
          is_done &= decode_block(*decode, row, cell, book->codebook, reader, memory, room);
        }
        __syncwarp();
      }
      if (__syncthreads_and(is_done) != 0) return;
    }
  }

  static constexpr int32_t kCallBytes = (sizeof(WeightedDecode) + 15) / 16 * 16;
  // What the kernel takes, but for the layer's own. The shape is all that sizes depend on.
  TKV_HD WeightedDecode shape_of_call(int32_t max_length) const {
    WeightedDecode d;
    d.rows.head_dim = call.head_dim();
    d.component = Component::kValue;
    d.book.max_length = max_length;
    d.max_block_bytes = call.slice_bytes;
    return d;
  }
  // Shared memory of a CTA, without its warps and with them.
  TKV_HD static int32_t cta_bytes(const WeightedDecode& d) {
    return kCallBytes + 2 * weighted_region_bytes(d) + kDecodeBookBytes + 16;
  }
  TKV_HD static int32_t shared_bytes(const WeightedDecode& d, int32_t warps) {
    WeightedDecode largest = d;
    largest.max_block_bytes = kMaxCodedBlockBytes;
    return cta_bytes(d) +
           most(warps * weighted_decode_warp_bytes(d), weighted_decode_warp_bytes(largest));
  }

 private:
  // In all threads of a CTA.
  __device__ bool continues_blocks(int32_t layer) const {
    bool all_new = true;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < call.works.count; i += kThreads) {
      const EntryDraft& d = call.entries[i * call.works.num_layers + layer];
      all_new &=
          d.form != EntryForm::kCoded || d.coded <= call.device.shape.first_of(d.first_block);
    }
    return __syncthreads_and(all_new) == 0;
  }
  __device__ WeightedDecode decode_call(int32_t layer, Component c) const {
    const DeviceBook& book = call.device.layers[layer].books[static_cast<int32_t>(c)];
    WeightedDecode d = shape_of_call(book.max_length);
    d.book = book;
    d.component = c;
    d.bytes = call.device.view.pages.base;
    return d;
  }

  // False where a slice has more bytes than `room`: nothing is defined of the block then.
  __device__ bool decode_block(const WeightedDecode& decode, int32_t row, const CellOf& cell,
                               const DeviceCodebook& book, TableReader& reader,
                               const WeightedDecodeWarp& memory, int32_t room) const {
    const EntryDraft& draft = call.entries[cell.entry];
    const int32_t first = call.device.shape.first_of(cell.block);
    const int32_t tokens = CodedShape::end_of(cell.block, draft.coded) - first;
    if (tokens <= 0) return true;
    const Component c = decode.component;
    const int32_t kv_head = row % call.heads(), dims = call.head_dim();
    const uint8_t* bytes = old_block(call, cell, kv_head, c);
    const CodedBlockRef ref = call.device.refs(cell.slot, cell.layer, kv_head, c)[cell.block];
    RangeTarget target{};
    target.tokens = target.end = tokens;
    uint16_t* const to = call.staged(c, row);
    uint8_t(*const words)[4] = call.decided + int64_t{row} * kBlockTokens;
    const auto finish = [&](int32_t first_dim, int32_t slice_dims, int32_t tile,
                            const int16_t* codes) {
      const int32_t here = least(kTileTokens, tokens - tile * kTileTokens);
      const auto octets = static_cast<uint32_t>(slice_dims) / 8;
      for (auto i = static_cast<uint32_t>(lane_index()); i < here * octets; i += kWarpLanes) {
        const auto t = static_cast<int32_t>(i / octets), d = static_cast<int32_t>(i % octets) * 8;
        *reinterpret_cast<uint4*>(to + (tile * kTileTokens + t) * dims + first_dim + d) =
            *reinterpret_cast<const uint4*>(codes + t * kTileStride + d);
      }
      if (first_dim == 0 && tile == 0) put_exponents(memory.block, tokens, words);
    };
    // The place is relative to the bytes.
    WeightedDecode own = decode;
    own.bytes = bytes;
    own.size = int64_t{ref.units} * kUnitBytes;
    own.max_block_bytes = room;
    const StatusCode code =
        decode_block_tiles(own, target, {0, ref.units}, book, reader, memory, finish);
    if (code == StatusCode::kOutOfRange && room < kMaxCodedBlockBytes) return false;
    if (code != StatusCode::kOk && lane_index() == 0) {
      report_fault(call.device.fault, {code, cell.slot, cell.layer, kv_head});
    }
    return true;
  }
  // block: the first slice.
  __device__ static void put_exponents(const uint8_t* block, int32_t tokens, uint8_t (*words)[4]) {
    const BlockHeader h = load_header(block);
    for (int32_t t = lane_index(); t < tokens; t += kWarpLanes) {
      const auto e = static_cast<uint8_t>(h.least_exponent +
                                          static_cast<int32_t>(load_word_field(
                                              block + kCodedBlockHeaderBytes, t, h.exponent_bits)));
      if (h.component == Component::kKey) {
        words[t][0] = e;
      } else {
        words[t][1] = e, words[t][2] = 1;
      }
    }
  }
};

// The blocks that entries with kRewritesEntry held, out of the way of what is written: a warp for a
// block.
struct SaveBlocks {
  static constexpr int32_t kThreads = 128;
  CodedCall call;

  __device__ void operator()(uint8_t*) const {
    const int32_t per_entry = kMostSavedBlocks * call.heads() * 2;
    const int32_t items = call.works.entries() * per_entry;
    for (int32_t i = warp_of_grid(); i < items; i += warps_of_grid()) {
      const int32_t entry = i / per_entry, kv_head = i / 2 % call.heads();
      if ((call.hints[entry] & kRewritesEntry) == 0) continue;
      const EntryDraft& draft = call.entries[entry];
      CellOf cell;
      cell.entry = entry;
      cell.block = draft.first_block + i % per_entry / (2 * call.heads());
      const DeviceEntry at = call.works.entry(entry);
      cell.slot = at.slot, cell.layer = at.layer;
      if (cell.block >= block_count(call.works.from[entry].body_end)) continue;
      const auto c = static_cast<Component>(i % 2);
      const CodedBlockRef ref = call.device.refs(cell.slot, cell.layer, kv_head, c)[cell.block];
      const auto* from = reinterpret_cast<const uint4*>(call.device.view.pages.base +
                                                        int64_t{ref.offset} * kUnitBytes);
      auto* to = reinterpret_cast<uint4*>(const_cast<uint8_t*>(old_block(call, cell, kv_head, c)));
      const int32_t units = least(static_cast<int32_t>(ref.units), call.saved_bytes / kUnitBytes);
      for (int32_t u = lane_index(); u < units; u += kWarpLanes) to[u] = from[u];
    }
  }
};

}  // namespace tierkv::store

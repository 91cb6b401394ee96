// SPDX-License-Identifier: Apache-2.0
// The kernels of attention over channel blocks, of a cache as ChannelWarp takes it: a CTA for an
// item of a row and a group of passes, then a warp for 128 dims of a query column whose parts it
// joins. Their launches.
#pragma once

#include "attention/channel/channel_plan.h"
#include "attention/channel/channel_warp.cuh"
#include "attention/core/parts_join.cuh"
#include "attention/core/query_unit.h"
#include "codec/format/head_dim.h"
#include "gpu/lanes.cuh"
#include "gpu/launch.cuh"
#include "gpu/math.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

// Where a call writes: outputs, and parts of rows with their states. The kernel that joins parts is
// given this alone. The columns are those of all passes.
struct ChannelOutputs {
  ChannelCtas ctas;
  int32_t splits = 1;  // of every row
  int32_t num_rows = 0;
  bool is_bfloat16 = false;
  uint16_t* out = nullptr;         // like ChannelLaunch::q
  float* lse = nullptr;            // likewise without head_dim, or null
  PriorAttention prior;            // what `out` holds
  SoftmaxState* states = nullptr;  // [parts, columns]
  float* parts = nullptr;          // [parts, columns, head_dim]
};
template <class Cache>
struct ChannelLaunch : ChannelOutputs {
  Cache cache;
  const uint16_t* q = nullptr;   // [num_rows / kv_heads, q_len, kv_heads, group, head_dim]
  StatusCode* status = nullptr;  // of row r at r * status_stride
  int32_t status_stride = 0;
  float scale_log2 = 0;
};

template <class Cache>
__device__ void report_corrupt(const ChannelLaunch<Cache>& p, int32_t row) {
  atomicCAS(reinterpret_cast<int32_t*>(p.status) + row * p.status_stride,
            static_cast<int32_t>(StatusCode::kOk), static_cast<int32_t>(StatusCode::kCorrupt));
}

// Where things lie in the dynamic shared memory of a CTA; its item, which would take registers for
// long, comes first.
struct ChannelCtaShared {
  int32_t largest;  // float [kChannelWarps]
  int32_t states;   // SoftmaxState [kChannelWarps][8]
  int32_t parts;    // float [kChannelWarps][8][part_stride]
  int32_t queries;  // uint32_t [passes][kQueryWords]
};
TKV_HD constexpr ChannelCtaShared channel_cta_shared(int32_t head_dim) {
  ChannelCtaShared s{};
  s.largest = static_cast<int32_t>(sizeof(ChannelItem));
  s.states = s.largest + kChannelWarps * 4;
  s.parts = s.states + kChannelWarps * kBlockColumns * static_cast<int32_t>(sizeof(SoftmaxState));
  s.queries = s.parts + kChannelWarps * kBlockColumns * part_stride(head_dim) * 4;
  return s;
}
TKV_HD constexpr int32_t channel_cta_bytes(int32_t head_dim, int32_t passes) {
  return channel_cta_shared(head_dim).queries + passes * kBlockColumns * head_dim * 2;
}

template <class Cache, class Warp>
class ChannelCta {
 public:
  static constexpr int32_t kHeadDim = Warp::kHeadDim;
  static constexpr ChannelCtaShared kPlace = channel_cta_shared(kHeadDim);

  __device__ ChannelCta(const ChannelLaunch<Cache>& p, uint8_t* shared) : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    // A cache has an item_of() of its own.
    const ChannelItem item = item_of(p_, quotient(blockIdx.x, p_.ctas.groups));
    if (threadIdx.x == 0) *reinterpret_cast<ChannelItem*>(shared_) = item;
    const WarpShare share = share_of(item);
    const typename Cache::Row line = p_.cache.row(item.row);
    // Asked for one after another, so that they are waited for together.
    const QueryPlace place = place_of_query(item.row);
    uint32_t words[kReadAtOnce];
    read_queries(place, 0, words);
    const int32_t id = Warp::first_id(p_.cache, line, share.blocks);
    write_queries(place, 0, words);
    for (int32_t turn = 1; turn < kChannelWarps / p_.ctas.team; ++turn) {
      read_queries(place, turn, words);
      write_queries(place, turn, words);
    }
    const float unit = p_.is_bfloat16 ? convert_queries(place) : 1.0f;
    __syncthreads();
    attend(share, line, id, p_.scale_log2 * unit);
    __syncthreads();
    const int32_t tasks = p_.ctas.passes * p_.ctas.columns.of_row * kSlices;
    for (int32_t task = warp(); task < tasks; task += p_.ctas.warps) join(task);
  }

 private:
  static constexpr int32_t kJoinDims = 128;  // of a warp
  static constexpr int32_t kSlices = slices_of(kHeadDim, kJoinDims);

  // Read anew by every caller: kept, it would take a register for long.
  __device__ __forceinline__ static int32_t warp() {
    uint32_t thread = threadIdx.x;
#if defined(__CUDA_ARCH__)
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
#endif
    return static_cast<int32_t>(thread / 32);
  }
  // Most launches have one pass: no division.
  __device__ __forceinline__ static int32_t quotient(int32_t x, int32_t by) {
    return by == 1 ? x : x / by;
  }
  __device__ __forceinline__ int32_t first_pass() const {
    const int32_t index = blockIdx.x, groups = p_.ctas.groups;
    return (index - quotient(index, groups) * groups) * p_.ctas.passes;
  }
  __device__ __forceinline__ int32_t pass() const {
    const int32_t of_warp = warp();
    return of_warp - quotient(of_warp, p_.ctas.passes) * p_.ctas.passes;
  }
  // The row of the launch that a pass of a row is, as QueryColumns has it.
  __device__ __forceinline__ int32_t pass_row(int32_t row, int32_t pass) const {
    return row * p_.ctas.columns.passes + first_pass() + pass;
  }
  // When it is there for all.
  __device__ __forceinline__ const ChannelItem& item() const {
    return *reinterpret_cast<const ChannelItem*>(shared_);
  }
  __device__ __forceinline__ uint32_t* queries() const {
    return reinterpret_cast<uint32_t*>(shared_ + kPlace.queries);
  }
  __device__ __forceinline__ SoftmaxState* states(int32_t of_warp) const {
    return reinterpret_cast<SoftmaxState*>(shared_ + kPlace.states) + of_warp * kBlockColumns;
  }
  __device__ __forceinline__ float* part(int32_t of_warp) const {
    return reinterpret_cast<float*>(shared_ + kPlace.parts) +
           of_warp * kBlockColumns * part_stride(kHeadDim);
  }

  // A lane's column in the queries of its warp's pass, and the rows of 32 words that the warp
  // stages. The warps of a team stage all rows together.
  static constexpr int32_t kReadAtOnce = Warp::kQueryWords / 32 / kChannelWarps;
  struct QueryPlace {
    const uint16_t* from;  // null: there is no such column
    uint32_t* to;
    int32_t first_row;
  };
  __device__ __forceinline__ QueryPlace place_of_query(int32_t row) const {
    const QueryColumns& columns = p_.ctas.columns;
    const int32_t lane = threadIdx.x % 32, of_cta = pass();
    const int64_t at = first_pass() + of_cta < columns.passes
                           ? columns.place(pass_row(row, of_cta), lane / 4)
                           : -1;
    return {at < 0 ? nullptr : p_.q + at * kHeadDim + 2 * (lane % 4),
            queries() + of_cta * Warp::kQueryWords + lane, quotient(warp(), p_.ctas.passes)};
  }
  __device__ __forceinline__ int32_t row_of(const QueryPlace& place, int32_t turn,
                                            int32_t i) const {
    return place.first_row + p_.ctas.team * (turn * kReadAtOnce + i);
  }
  __device__ __forceinline__ void read_queries(const QueryPlace& place, int32_t turn,
                                               uint32_t (&words)[kReadAtOnce]) const {
#pragma unroll
    for (int32_t i = 0; i < kReadAtOnce; ++i) {
      words[i] = 0;
      if (place.from == nullptr) continue;
      words[i] = *reinterpret_cast<const uint32_t*>(place.from + 8 * row_of(place, turn, i));
    }
  }
  __device__ __forceinline__ void write_queries(const QueryPlace& place, int32_t turn,
                                                const uint32_t (&words)[kReadAtOnce]) const {
#pragma unroll
    for (int32_t i = 0; i < kReadAtOnce; ++i) place.to[32 * row_of(place, turn, i)] = words[i];
  }

  // From bfloat16 to fp16; what they are multiples of then. As they are, unless fp16 would lose of
  // them: scales of keys times queries in this range pass the largest number of fp16 only where a
  // channel alone moves a logit by thousands.
  __device__ __forceinline__ float convert_queries(const QueryPlace& place) const {
    constexpr int32_t kLeastExponent = -5, kMostExponent = 8;
    const int32_t rows = kChannelWarps / p_.ctas.team * kReadAtOnce;
    float* of_warps = reinterpret_cast<float*>(shared_ + kPlace.largest);
    float largest = 0;
    for (int32_t i = 0; i < rows; ++i) {
      const float2 pair = unpack_bfloats(place.to[32 * row_of(place, 0, i)]);
      largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
#pragma unroll
    for (int32_t i = 1; i < 32; i *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, i));
    }
    if (threadIdx.x % 32 == 0) of_warps[warp()] = largest;
    __syncthreads();
    for (int32_t w = 0; w < p_.ctas.warps; ++w) largest = fmaxf(largest, of_warps[w]);
    const float unit = query_unit(largest, kLeastExponent, kMostExponent), inverse = 1.0f / unit;
    for (int32_t i = 0; i < rows; ++i) {
      uint32_t& word = place.to[32 * row_of(place, 0, i)];
      const float2 pair = unpack_bfloats(word);
      word = pack_halves(pair.x * inverse, pair.y * inverse);
    }
    return unit;
  }

  // This warp's units of an item. The warps of its team take units in turn.
  struct WarpShare {
    WarpUnits tiles, blocks;
  };
  __device__ __forceinline__ WarpShare share_of(const ChannelItem& item) const {
    const int32_t team = p_.ctas.team;  // a power of two
    const int32_t tiles = (item.raw_tokens + kTileTokens - 1) / kTileTokens;
    const int32_t mine = item.first + quotient(warp(), p_.ctas.passes);
    const int32_t of_tiles = max(0, min(item.end, tiles) - mine);
    const int32_t block = mine + ((of_tiles + team - 1) & ~(team - 1));
    return {{mine, min(item.end, tiles), team}, {block - tiles, item.end - tiles, team}};
  }

  __device__ __forceinline__ void attend(const WarpShare& share, typename Cache::Row line,
                                         int32_t id, float scale_log2) const {
    if (first_pass() + pass() >= p_.ctas.columns.passes) return;
    const auto report = [&] {
      if (threadIdx.x % 32 == 0) report_corrupt(p_, item().row);
    };
    Warp warp_attention(queries() + pass() * Warp::kQueryWords, scale_log2);
    warp_attention.attend_raw(p_.cache, line, share.tiles, item().raw_tokens, report);
    warp_attention.attend_blocks(p_.cache, line, share.blocks, id, report);
    warp_attention.store_part(states(warp()), part(warp()));
  }

  // A slice of a column of the CTA, of all warps that attended to it: to the row's output, or as a
  // part of it.
  __device__ __forceinline__ void join(int32_t task) const {
    const QueryColumns& columns = p_.ctas.columns;
    const int32_t cta_column = task / kSlices, dim = task % kSlices * kJoinDims;
    const int32_t pass = p_.ctas.passes == 1 ? 0 : cta_column / columns.of_row;
    const int32_t column = cta_column - pass * columns.of_row;
    if (first_pass() + pass >= columns.passes) return;
    PartsJoin<kJoinDims, kChannelWarps, false> sum(kHeadDim - dim);
    const int32_t distance = p_.ctas.passes * kBlockColumns;  // columns, from a warp to the next
    sum.join(even_parts(states(pass) + column, part(pass) + column * part_stride(kHeadDim) + dim,
                        distance, distance * part_stride(kHeadDim), p_.ctas.team));
    if (item().part >= 0) {
      const int64_t to = int64_t{item().part} * p_.ctas.all_columns() +
                         (first_pass() + pass) * columns.of_row + column;
      sum.store(dim == 0 ? p_.states + to : nullptr, p_.parts + to * kHeadDim + dim);
      return;
    }
    const int64_t place = columns.place(pass_row(item().row, pass), column);
    if (place < 0) return;
    sum.write_joined({p_.out + place * kHeadDim + dim,
                      p_.lse == nullptr || dim != 0 ? nullptr : p_.lse + place, p_.is_bfloat16},
                     p_.prior, place, columns.head(pass_row(item().row, pass), column));
  }

  const ChannelLaunch<Cache>& p_;
  uint8_t* shared_;
};

template <class Cache, class Warp>
__global__ void __launch_bounds__(32 * kChannelWarps, channel_ctas_per_sm(Warp::kHeadDim))
    channel_attention_kernel(const __grid_constant__ ChannelLaunch<Cache> p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  touch_parameters(p, static_cast<int32_t>(threadIdx.x) / 32);
  wait_for_previous_kernel();
  let_next_kernel_start();
  ChannelCta<Cache, Warp>(p, shared_bytes).run();
}

template <class Cache>
using ChannelKernel = void (*)(ChannelLaunch<Cache>);

template <class Cache, int32_t kHeadDim>
ChannelKernel<Cache> channel_kernel_of_bits(const ChannelLayout& l) {
  const bool narrow_values = l.v_tile.type == kCodes2;
  if (l.k_tile.type == kCodes4) {
    return narrow_values ? channel_attention_kernel<Cache, ChannelWarp<kHeadDim, kCodes4, kCodes2>>
                         : channel_attention_kernel<Cache, ChannelWarp<kHeadDim, kCodes4, kCodes4>>;
  }
  return narrow_values ? channel_attention_kernel<Cache, ChannelWarp<kHeadDim, kCodes2, kCodes2>>
                       : channel_attention_kernel<Cache, ChannelWarp<kHeadDim, kCodes2, kCodes4>>;
}

// The kernel for a layout that make_channel_layout() makes.
template <class Cache>
ChannelKernel<Cache> channel_kernel(const ChannelLayout& l) {
  return with_head_dim(l.head_dim(),
                       [&](auto dim) { return channel_kernel_of_bits<Cache, dim>(l); });
}

inline constexpr int32_t kChannelJoinWarps = 4;
inline constexpr int32_t kChannelJoinDims = 64;  // of a warp
inline constexpr int32_t kJoinedAtOnce = 4;      // parts, by each half of a warp

// Rows with several parts; a warp for a slice of a column.
inline __global__ void __launch_bounds__(32 * kChannelJoinWarps)
    join_channel_kernel(const __grid_constant__ ChannelOutputs p, int32_t head_dim) {
  touch_parameters(p, static_cast<int32_t>(threadIdx.x) / 32);
  let_next_kernel_start();
  wait_for_previous_kernel();
  const QueryColumns& columns = p.ctas.columns;
  const int32_t slices = slices_of(head_dim, kChannelJoinDims), all_columns = p.ctas.all_columns();
  const int32_t index =
      static_cast<int32_t>(blockIdx.x) * kChannelJoinWarps + static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t row = index / (all_columns * slices), task = index % (all_columns * slices);
  if (row >= p.num_rows) return;
  const int32_t column = task / slices, dim = task % slices * kChannelJoinDims;
  const int32_t pass_row = row * columns.passes + column / columns.of_row;
  const int32_t of_pass = column % columns.of_row;
  const int64_t place = columns.place(pass_row, of_pass);
  if (place < 0) return;
  const int64_t first = int64_t{row} * p.splits * all_columns + column;
  PartsJoin<kChannelJoinDims, kJoinedAtOnce, true> sum(head_dim - dim);
  sum.join(even_parts(p.states + first, p.parts + first * head_dim + dim, all_columns,
                      all_columns * head_dim, p.splits));
  sum.write_joined({p.out + place * head_dim + dim,
                    p.lse == nullptr || dim != 0 ? nullptr : p.lse + place, p.is_bfloat16},
                   p.prior, place, columns.head(pass_row, of_pass));
}

// num_items > 0; joins: rows may have several.
template <class Cache>
Status launch_channel(const ChannelLaunch<Cache>& p, int32_t num_items, bool joins,
                      GpuStream stream) {
  const int32_t head_dim = p.cache.layout.head_dim();
  const auto ctas = static_cast<uint32_t>(num_items) * static_cast<uint32_t>(p.ctas.groups);
  const int32_t bytes = channel_cta_bytes(head_dim, p.ctas.passes);
  const Status s = launch_after_previous(channel_kernel<Cache>(p.cache.layout), ctas,
                                         32 * p.ctas.warps, bytes, stream, p);
  if (!s || !joins) return s;
  const int64_t tasks =
      int64_t{p.num_rows} * p.ctas.all_columns() * slices_of(head_dim, kChannelJoinDims);
  const auto join_ctas = static_cast<uint32_t>((tasks + kChannelJoinWarps - 1) / kChannelJoinWarps);
  return launch_after_previous(join_channel_kernel, join_ctas, 32 * kChannelJoinWarps, 0, stream,
                               static_cast<const ChannelOutputs&>(p), head_dim);
}

}  // namespace tierkv

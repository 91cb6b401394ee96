// SPDX-License-Identifier: Apache-2.0
// What probabilities a call of coded attention gave tokens: a pass of its own over the keys, once
// the lse of every column is known. So the kernels of attention keep their registers.
//
// Scores are those of attention, instruction by instruction; of the columns of a query the largest
// probability is kept. With one slot a warp no values are asked for.
#pragma once

#include "attention/coded/coded_kernel.cuh"
#include "gpu/barrier.cuh"
#include "gpu/constants.h"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/pdl.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

template <int kDimBlocks, class Code>
struct ProbabilityWarp : CodedWarp<kDimBlocks, Code, CodedBreadth::kSlices> {
  using Base = CodedWarp<kDimBlocks, Code, CodedBreadth::kSlices>;
  using Base::call, Base::params, Base::state, Base::ring, Base::run, Base::row_index;
  using Base::from, Base::to;
  float shift[2];  // of columns 2t, 2t + 1: added to a score in log2 units

  // -infinity for columns that are not there, and where the lse is: probabilities are then 0.
  __device__ __forceinline__ void find_shifts(const CodedRow& row) {
    const auto t = static_cast<int32_t>(fresh_lane() % 4);
    float product = 0.0f;  // of q and the mean of the keys, of column lane / 4
    if (row.mean >= 0 && call.keys.means != nullptr) {
      const float* mean = call.keys.means + int64_t{row.mean} * Base::kHeadDim + 2 * t;
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 q = unpack_halves(state.q[f][h]);
          product += q.x * mean[16 * f + 8 * h] + q.y * mean[16 * f + 8 * h + 1];
        }
      }
    }
    product += __shfl_xor_sync(kFullWarp, product, 1);
    product += __shfl_xor_sync(kFullWarp, product, 2);
#pragma unroll
    for (int32_t c = 0; c < 2; ++c) {
      const int32_t column = 2 * t + c;
      const float of_mean = this->score_scale() * __shfl_sync(kFullWarp, product, 4 * column);
      float lse = -INFINITY;
      if (column < call.columns) {
        lse = call.lse[params.queries.place(row_index, params.first_column + column)];
      }
      shift[c] = lse == -INFINITY ? lse : of_mean - lse * kLog2E;
    }
  }

  // Scores of 64 tokens into probabilities; scale and shifts bring them to log2 units.
  __device__ __forceinline__ static void exponentiate(float scale, const float (&shifts)[2],
                                                      float (&s)[kItemTiles][4]) {
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float by = shifts[i % 2];
        s[o][i] = by == -INFINITY ? 0.0f : fminf(1.0f, exp2_fast(fmaf(s[o][i], scale, by)));
      }
    }
  }
  // The largest of those of each query, of `tokens` tokens from `position` on. A query's columns
  // may belong to several passes.
  __device__ __forceinline__ void keep(const float (&p)[kItemTiles][4], int32_t tokens,
                                       int32_t position) {
    const int32_t group = params.queries.group;
    const auto g = static_cast<int32_t>(fresh_lane() / 4);
    const auto t = static_cast<int32_t>(fresh_lane() % 4);
    const int32_t column = params.first_column + 2 * t;
    const int32_t last_query = (params.first_column + call.columns - 1) / group;
#pragma unroll 1
    for (int32_t query = params.first_column / group; query <= last_query; ++query) {
      const bool first = column / group == query, second = (column + 1) / group == query;
      float* line = call.probabilities +
                    (int64_t{query} * call.num_rows + row_index) * call.probability_stride;
#pragma unroll
      for (int i = 0; i < 2 * kItemTiles; ++i) {
        const float(&of_tile)[4] = p[i / 2];
        float most =
            fmaxf(first ? of_tile[i % 2 * 2] : 0.0f, second ? of_tile[i % 2 * 2 + 1] : 0.0f);
        most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
        const int32_t token = 8 * i + g, at = position + token;
        if (t != 0 || token >= tokens || at >= call.probability_stride) continue;
        line[at] = fmaxf(line[at], most);
      }
    }
  }

  // Scores of a fixed-rate block; those of zeros where it breaks a rule.
  __device__ __forceinline__ void score_fixed_block(int32_t block, float (&s)[kItemTiles][4]) {
    uint32_t bad = 0;
    if (!__all_sync(kFullWarp, is_fixed<Base::kHeadDim>(call, block, &bad))) return;
    const uint8_t* keys = block_of(call.keys, block);
    if (call.fixed.key_bits == 8) {
      score_fixed<8>(keys, state, s);
    } else {
      score_fixed<4>(keys, state, s);
    }
  }

  // The blocks that begin_row() asked for, of which the row's item `from` is the first.
  __device__ __forceinline__ void find_blocks(const CodedRow& row) {
    const float shifts[2] = {state.offset[0] + shift[0], state.offset[1] + shift[1]};
#pragma unroll 1
    for (int32_t i = 0; i < run.count; i += 2) {
      const int32_t position = (from + i / 2) * kBlockTokens;
      const int32_t tokens = min(row.coded_tokens - position, kBlockTokens);
      float s[kItemTiles][4] = {};
      bool fixed = false;
      if constexpr (Code::kFixed) {
        ring.wait();
        fixed = is_fixed_header(load_shared_16(ring.slot));
      }
      if (fixed) {
        if constexpr (Code::kFixed) score_fixed_block(row.first_block + from + i / 2, s);
        exponentiate(this->score_scale(), shift, s);
      } else {
        this->score_block(i, tokens, s);
        exponentiate(this->key_scale * kDigitScale, shifts, s);
      }
      this->next_block(i + 1);  // the values have not been asked for
      keep(s, tokens, position);
    }
  }

  // Pages first .. first + count - 1 of the row's window.
  __device__ __forceinline__ void find_window(const CodedRow& row, int32_t first, int32_t count) {
    const ColumnSight sight(params, row.window_tokens);
#pragma unroll 1
    for (int32_t i = first; i < first + count; ++i) {
      const int32_t tokens = min(row.window_tokens - i * kBlockTokens, kBlockTokens);
      const uint8_t* keys = this->window_page(row, i);
      if (keys == nullptr) return;  // attention made the row corrupt
      float s[kItemTiles][4] = {};
      this->score_window(keys, tokens, s);
      sight.hide(i * kBlockTokens, s);
      exponentiate(this->score_scale(), shift, s);
      keep(s, tokens, row.coded_tokens + i * kBlockTokens);
    }
  }

  // What begin_row() began.
  __device__ __forceinline__ void find_row_items() {
    if (to <= from) return;
    const CodedRow& row = call.rows[row_index];
    const int32_t blocks = (row.coded_tokens + kBlockTokens - 1) / kBlockTokens;
    find_shifts(row);
    find_blocks(row);
    const int32_t first = max(from - blocks, 0);
    if (to > blocks) find_window(row, first, to - blocks - first);
  }
};

// Shared memory and the items of warps are those of coded_attention_kernel(), with one slot a warp.
template <int kDimBlocks, class Code>
__global__ void __launch_bounds__(coded_warps(kDimBlocks* kDimBlock) * 32, 1)
    coded_probability_kernel(const __grid_constant__ CodedKernelParams params) {
  constexpr int kCopiesLog = Code::kCopiesLog;
  extern __shared__ __align__(1024) uint8_t shared[];
  const CodedAttention& call = params.call;
  const CodedAttentionGrid& grid = params.grid;
  const uint32_t start = shared_address(shared), region = params.table_bytes;
  const uint32_t key_tables = 1 + params.key_family.count;
  const uint32_t tables = key_tables + 1 + params.value_family.count;
  const auto slot_bytes = static_cast<uint32_t>(grid.slot_bytes);
  const CodedSharedLayout layout =
      coded_shared_layout(start, region, slot_bytes, static_cast<uint32_t>(grid.warps), tables);
  const bool fits =
      grid.slots_per_warp == 1 && layout.end - start <= static_cast<uint32_t>(grid.shared_bytes);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  auto* barrier = reinterpret_cast<uint64_t*>(shared) + warp;
  if (is_first_lane()) init_barrier(barrier);
  publish_barriers();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (fits) {
    TableFill(call.keys.codebook).store<kCopiesLog>(layout.tables);
    fill_family<kCopiesLog>(params.key_family, layout.tables + region, region);
  }
  __syncthreads();
  BlockRing ring = warp_ring(layout, barrier, slot_bytes, slot_bytes, 1);
  const SharedTable<kCopiesLog> table(layout.tables, params.key_mask);
  ProbabilityWarp<kDimBlocks, Code> worker{{call, ring, params, table, table, fits}};
  const auto cta = static_cast<int32_t>(blockIdx.x);
  WarpItems<CodedAttention> items{call};
  const ItemShares shares = item_shares(params, grid.warps);
  if (!items.begin(shares.begin(cta, warp), shares.begin(cta, warp + 1))) return;
  while (true) {
    worker.begin_row(items.row, items.first, items.end);
    worker.find_row_items();
    if (!items.next_row()) return;
  }
}

}  // namespace tierkv

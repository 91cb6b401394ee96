// What quantises the rows of a coded store, found at the end of their prompts: means and steps.

#include <cuda_runtime.h>

#include "store/coded/coded_device_prompt.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / kWarpLanes;
constexpr int32_t kTilesOfBlock = kBlockTokens / kTileTokens;

// The raw tiles of a component of a row, of which a CTA reads dim block f.
struct RawTiles {
  CodedRowOf r;
  Component component;
  int32_t tokens;
  int32_t dim_block;

  // The channel and the token of a tile of value h of pair r of a lane; keys have two channels of a
  // token in a pair, values two tokens of a channel.
  __device__ __forceinline__ int32_t channel(int32_t pair, int32_t h) const {
    return component == Component::kKey ? 2 * (lane_index() % 4) + h + pair / 2 * 8
                                        : lane_index() / 4 + pair % 2 * 8;
  }
  __device__ __forceinline__ int32_t token(int32_t pair, int32_t h) const {
    return component == Component::kKey ? lane_index() / 4 + pair % 2 * 8
                                        : 2 * (lane_index() % 4) + h + pair / 2 * 8;
  }
  // visit(words, tokens of their tile) for the words of this lane. What is behind the tokens in
  // their last tile is zeros.
  template <class Visit>
  __device__ __forceinline__ void for_each(const CodedDeviceState& d, Visit visit) const {
    const int32_t tile_bytes = kTileTokens * 2 * d.s.head_dim, tiles = tile_count(tokens);
    const int32_t in_tile = (dim_block * kDimBlock * kTileTokens + lane_index() * 8) * 2;
#pragma unroll 2
    for (auto block = static_cast<int32_t>(threadIdx.x / kWarpLanes); block * kTilesOfBlock < tiles;
         block += kWarps) {
      const uint8_t* page = d.s.page_bytes(d.s.page_id(r.row, kRawSide, block));
      const uint8_t* from = page + raw_tile_byte(d.s.head_dim, component, 0) + in_tile;
      uint4 x[kTilesOfBlock];
#pragma unroll
      for (int32_t t = 0; t < kTilesOfBlock; ++t) {
        x[t] = block * kTilesOfBlock + t < tiles
                   ? *reinterpret_cast<const uint4*>(from + t * tile_bytes)
                   : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int32_t t = 0; t < kTilesOfBlock; ++t) {
        visit(x[t], tokens - (block * kTilesOfBlock + t) * kTileTokens);
      }
    }
  }
};
// A CTA for a dim block of a component of a row: blockIdx.y, blockIdx.x.
__device__ RawTiles raw_tiles(const CodedDeviceState& d) {
  RawTiles x{coded_row_of(d, static_cast<int32_t>(blockIdx.x / 2)), component_of(blockIdx.x), 0,
             static_cast<int32_t>(blockIdx.y)};
  if (x.r.sequence != kPaddingSequence) x.tokens = d.s.infos[x.r.sequence].num_tokens;
  return x;
}

// Sums of a lane's channels; of values both tokens of a pair are of one channel, [..][0].
struct LaneSums {
  int64_t of[2][2] = {};  // [pair / 2 or % 2][half]

  __device__ __forceinline__ void add(const uint4& x, Component c) {
    const uint32_t pairs[kPairsPerFragment] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const int64_t low = half_to_fixed(static_cast<uint16_t>(pairs[r])),
                    high = half_to_fixed(static_cast<uint16_t>(pairs[r] >> 16));
      if (c == Component::kKey) {
        of[r / 2][0] += low, of[r / 2][1] += high;
      } else {
        of[r % 2][0] += low + high;
      }
    }
  }
};

// The sums are exact, so their order does not matter.
__global__ void __launch_bounds__(kThreads)
    means_kernel(const __grid_constant__ CodedDeviceState d, MeanSource source) {
  __shared__ unsigned long long sums[kDimBlock];
  const RawTiles tiles = raw_tiles(d);
  const CodedRowOf& r = tiles.r;
  if (r.sequence == kPaddingSequence) return;
  const Component c = tiles.component;
  if (threadIdx.x < kDimBlock) sums[threadIdx.x] = 0;
  __syncthreads();
  if (source == MeanSource::kPrompt) {
    LaneSums lane;
    tiles.for_each(d, [&](const uint4& x, int32_t) { lane.add(x, c); });
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const int32_t pair = c == Component::kKey ? 2 * i : i;
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        if (c == Component::kValue && h == 1) continue;
        atomicAdd(sums + tiles.channel(pair, h), static_cast<unsigned long long>(lane.of[i][h]));
      }
    }
  }
  __syncthreads();
  if (threadIdx.x >= kDimBlock) return;
  const int32_t dim = tiles.dim_block * kDimBlock + static_cast<int32_t>(threadIdx.x);
  const float* given = c == Component::kKey ? d.given_key_means : d.given_value_means;
  float mean = 0.0f;
  if (source == MeanSource::kPrompt && tiles.tokens > 0) {
    mean = fixed_mean(static_cast<int64_t>(sums[threadIdx.x]), tiles.tokens);
  }
  if (source == MeanSource::kGiven) mean = given[int64_t{r.within} * d.s.head_dim + dim];
  d.s.means(c, r.row)[dim] = mean;
}

// Bits of numbers that are not negative are in the order of the numbers.
__device__ uint32_t* range_of(const CodedDeviceState& d, Component c, int32_t row) {
  return d.ranges + (int64_t{row} * 2 + static_cast<int32_t>(c)) * 2;
}

__global__ void __launch_bounds__(kThreads)
    range_kernel(const __grid_constant__ CodedDeviceState d) {
  __shared__ float means[kDimBlock];
  const RawTiles tiles = raw_tiles(d);
  if (tiles.r.sequence == kPaddingSequence) return;
  if (threadIdx.x < kDimBlock) {
    means[threadIdx.x] =
        d.s.means(tiles.component, tiles.r.row)[tiles.dim_block * kDimBlock + threadIdx.x];
  }
  __syncthreads();
  ValueRange range;
  tiles.for_each(d, [&](const uint4& x, int32_t tokens) {
    const uint32_t pairs[kPairsPerFragment] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        if (tiles.token(r, h) >= tokens) continue;
        range.add(centred(static_cast<uint16_t>(pairs[r] >> (16 * h)), means[tiles.channel(r, h)]));
      }
    }
  });
  const uint32_t least = __reduce_max_sync(kFullWarp, float_bits(fabsf(range.least))),
                 most = __reduce_max_sync(kFullWarp, float_bits(range.most));
  if (lane_index() != 0) return;
  uint32_t* const of_row = range_of(d, tiles.component, tiles.r.row);
  atomicMax(of_row, least);
  atomicMax(of_row + 1, most);
}

__global__ void __launch_bounds__(kThreads)
    clear_ranges_kernel(const __grid_constant__ CodedDeviceState d, int32_t rows) {
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= rows) return;
  const CodedRowOf r = coded_row_of(d, i);
  if (r.sequence == kPaddingSequence) return;
  for (int32_t j = 0; j < 4; ++j) range_of(d, Component::kKey, r.row)[j] = 0;
}

__global__ void __launch_bounds__(kThreads) steps_kernel(const __grid_constant__ CodedDeviceState d,
                                                         const __grid_constant__ PromptEnd prompt) {
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= prompt.count * d.s.rows_per_sequence()) return;
  const CodedRowOf r = coded_row_of(d, i);
  if (r.sequence == kPaddingSequence) return;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const bool key = c == Component::kKey;
    if (prompt.steps == StepSource::kGiven) {
      d.s.step(c, r.row) = (key ? d.given_key_steps : d.given_value_steps)[r.within];
      continue;
    }
    const uint32_t* const range = range_of(d, c, r.row);
    d.s.step(c, r.row) = relative_step({-bits_float(range[0]), bits_float(range[1])},
                                       key ? prompt.key_relative : prompt.value_relative);
  }
}

}  // namespace

Status find_prompt_basis(const CodedDeviceState& d, const PromptEnd& prompt, GpuStream stream) {
  const int32_t rows = rows_of(d, prompt.count);
  const dim3 parts(static_cast<uint32_t>(rows) * 2,
                   static_cast<uint32_t>(d.s.head_dim / kDimBlock));
  means_kernel<<<parts, kThreads, 0, stream>>>(d, prompt.means);
  if (Status s = launch_status("end_prompt"); !s) return s;
  const uint32_t ctas = ctas_for(rows, kThreads);
  if (prompt.steps == StepSource::kPrompt) {
    clear_ranges_kernel<<<ctas, kThreads, 0, stream>>>(d, rows);
    if (Status s = launch_status("end_prompt"); !s) return s;
    range_kernel<<<parts, kThreads, 0, stream>>>(d);
    if (Status s = launch_status("end_prompt"); !s) return s;
  }
  steps_kernel<<<ctas, kThreads, 0, stream>>>(d, prompt);
  return launch_status("end_prompt");
}

}  // namespace tierkv

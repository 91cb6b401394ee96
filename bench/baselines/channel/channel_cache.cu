// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/channel/channel_cache.h"

#include "codec/gpu/channel_encode.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

// Whether both halves of a word are finite.
__device__ __forceinline__ bool are_finite_halves(uint32_t x) {
  return is_finite_half(static_cast<uint16_t>(x)) && is_finite_half(static_cast<uint16_t>(x >> 16));
}

// Raw tiles, tile_at(component, tile) of a block's, which this CTA may have written; they are
// finite.
template <class TileAt>
struct RawSource {
  TileAt tile_at;

  template <int32_t kHeadDim>
  __device__ __forceinline__ bool stage(const ChannelLayout& l, Component c,
                                        ChannelShared<kHeadDim>& s) const {
    constexpr int32_t kBlocks = kHeadDim / kDimBlock;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < l.tiles() * kBlocks * 32;
         i += kChannelThreads) {
      const int32_t tile = i / (32 * kBlocks), f = i / 32 % kBlocks, lane = i % 32;
      const auto w = *reinterpret_cast<const uint4*>(tile_at(c, tile) + f * 512 + lane * 16);
      const uint32_t words[4] = {w.x, w.y, w.z, w.w};  // registers of the fragment
#pragma unroll
      for (int32_t part = 0; part < 8; ++part) {
        const int32_t th = part / 4, dh = part / 2 % 2, par = part % 2;
        const int32_t r = c == Component::kKey ? th + 2 * dh : dh + 2 * th;
        const int32_t t = tile * kTileTokens + fragment_token(c, lane, th, par);
        const int32_t d = f * kDimBlock + fragment_dim(c, lane, dh, par);
        s.x[t * ChannelShared<kHeadDim>::kLine + d] = static_cast<uint16_t>(words[r] >> (16 * par));
      }
    }
    return true;
  }
};
template <class TileAt>
__device__ __forceinline__ RawSource<TileAt> make_raw_source(const TileAt& tile_at) {
  return {tile_at};
}

// Values as they come: tokens `stride` elements apart.
struct DenseSource {
  const uint16_t* x[2];  // k, v
  int64_t stride;

  template <int32_t kHeadDim>
  __device__ __forceinline__ bool stage(const ChannelLayout& l, Component c,
                                        ChannelShared<kHeadDim>& s) const {
    const uint16_t* from = x[static_cast<int32_t>(c)];
    bool finite = true;
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < l.tokens * (kHeadDim / 8);
         i += kChannelThreads) {
      const int32_t t = i / (kHeadDim / 8), d = i % (kHeadDim / 8) * 8;
      const uint4 w = *reinterpret_cast<const uint4*>(from + t * stride + d);
      finite &= are_finite_halves(w.x) && are_finite_halves(w.y) && are_finite_halves(w.z) &&
                are_finite_halves(w.w);
      *reinterpret_cast<uint4*>(&s.x[t * ChannelShared<kHeadDim>::kLine + d]) = w;
    }
    return finite;
  }
};

__device__ __forceinline__ void put_residual(const ChannelLayout& l, uint8_t* residual, Component c,
                                             int32_t token, int32_t dim, uint16_t x) {
  *reinterpret_cast<uint16_t*>(residual + residual_byte(l, c, token, dim)) = x;
}

// A CTA per row.
template <int32_t kHeadDim>
__global__ void __launch_bounds__(kChannelThreads)
    append_channel_kernel(const __grid_constant__ ChannelCache cache,
                          const __grid_constant__ ChannelAppend append) {
  __shared__ ChannelShared<kHeadDim> shared;
  const ChannelLayout& l = cache.layout;
  const auto row = static_cast<int32_t>(blockIdx.x), i = static_cast<int32_t>(threadIdx.x);
  const int32_t dim = kHeadDim;
  const int32_t at = cache.residual_tokens[row];
  const int32_t blocks = cache.block_count[row];
  const bool sound = at >= 0 && at < l.tokens && blocks >= 0, fills = at + 1 == l.tokens;
  const int32_t id = sound && fills ? cache.block_id(row, blocks) : 0;
  constexpr int32_t kValues = (2 * kHeadDim + kChannelThreads - 1) / kChannelThreads;
  uint16_t x[kValues] = {};  // keys, then values
  bool finite = true;
#pragma unroll
  for (int32_t j = 0; j < kValues; ++j) {
    const int32_t v = i + j * kChannelThreads;
    if (v >= 2 * dim) continue;
    x[j] = (v < dim ? append.k : append.v)[static_cast<int64_t>(row) * dim + v % dim];
    finite &= is_finite_half(x[j]);
  }
  finite = __syncthreads_and(finite) != 0;
  const StatusCode status = !sound   ? StatusCode::kCorrupt
                            : id < 0 ? StatusCode::kOutOfPages
                            : finite ? StatusCode::kOk
                                     : StatusCode::kNonFinite;
  if (i == 0) append.status[row] = status;
  if (status != StatusCode::kOk) return;
  uint8_t* residual = cache.residual_of(row);
#pragma unroll
  for (int32_t j = 0; j < kValues; ++j) {
    const int32_t v = i + j * kChannelThreads;
    const Component c = v < dim ? Component::kKey : Component::kValue;
    if (v < 2 * dim) put_residual(l, residual, c, at, v % dim, x[j]);
  }
  // All have read the counts before the barrier above.
  if (i == 0) cache.residual_tokens[row] = fills ? 0 : at + 1;
  if (!fills) return;
  __syncthreads();
  const auto tile_at = [&](Component c, int32_t tile) {
    return residual + residual_tile(l, c, tile);
  };
  (void)encode_channels(l, make_raw_source(tile_at), cache.block(id), shared);
  if (i == 0) cache.block_count[row] = blocks + 1;
}

struct PromptRow {
  int32_t head, first, tokens;
};
__device__ PromptRow prompt_row(const ChannelPrompt& p, int32_t row) {
  const int32_t sequence = row / p.num_kv_heads, first = p.indptr[sequence];
  return {row % p.num_kv_heads, first, p.indptr[sequence + 1] - first};
}

// What can be told of a row before its values are read; a thread each. Counts are set here, and
// taken back where a value turns out not to be finite.
__global__ void __launch_bounds__(kChannelThreads)
    begin_fill_kernel(const __grid_constant__ ChannelCache cache,
                      const __grid_constant__ ChannelPrompt p) {
  const int32_t row =
      static_cast<int32_t>(blockIdx.x) * kChannelThreads + static_cast<int32_t>(threadIdx.x);
  if (row >= cache.num_rows) return;
  const PromptRow r = prompt_row(p, row);
  const int32_t blocks = r.tokens / cache.layout.tokens;
  StatusCode status = StatusCode::kOk;
  if (r.first < 0 || r.tokens < 0 || blocks > cache.max_blocks) status = StatusCode::kCorrupt;
  for (int32_t b = 0; status == StatusCode::kOk && b < blocks; ++b) {
    if (cache.block_id(row, b) < 0) status = StatusCode::kOutOfPages;
  }
  p.status[row] = status;
  const bool ok = status == StatusCode::kOk;
  cache.block_count[row] = ok ? blocks : 0;
  cache.residual_tokens[row] = ok ? r.tokens % cache.layout.tokens : 0;
}

// Grid: blocks of a row and its residual, rows. Counts are not read: other CTAs may take them back.
template <int32_t kHeadDim>
__global__ void __launch_bounds__(kChannelThreads)
    fill_channel_kernel(const __grid_constant__ ChannelCache cache,
                        const __grid_constant__ ChannelPrompt p) {
  __shared__ ChannelShared<kHeadDim> shared;
  const ChannelLayout& l = cache.layout;
  const auto row = static_cast<int32_t>(blockIdx.y), i = static_cast<int32_t>(threadIdx.x);
  const PromptRow r = prompt_row(p, row);
  const int32_t dim = kHeadDim;
  const int32_t blocks = r.tokens / l.tokens;
  const StatusCode before = *static_cast<volatile StatusCode*>(p.status + row);
  if (before != StatusCode::kOk) return;
  const int64_t stride = static_cast<int64_t>(p.num_kv_heads) * dim;
  bool finite = true;
  for (auto b = static_cast<int32_t>(blockIdx.x); b <= blocks && finite; b += gridDim.x) {
    const int32_t first = b * l.tokens;
    const int64_t at = (static_cast<int64_t>(r.first) + first) * stride + int64_t{r.head} * dim;
    const DenseSource source = {{p.k + at, p.v + at}, stride};
    if (b < blocks) {
      finite = encode_channels(l, source, cache.block(cache.block_id(row, b)), shared);
      continue;
    }
    for (int32_t v = i; v < (r.tokens - first) * dim; v += kChannelThreads) {
      for (const Component c : {Component::kKey, Component::kValue}) {
        const uint16_t x = source.x[static_cast<int32_t>(c)][v / dim * stride + v % dim];
        finite &= is_finite_half(x);
        // The residual stays finite whatever came.
        put_residual(l, cache.residual_of(row), c, v / dim, v % dim, is_finite_half(x) ? x : 0);
      }
    }
    finite = __syncthreads_and(finite) != 0;
  }
  if (finite || i != 0) return;
  p.status[row] = StatusCode::kNonFinite;
  cache.block_count[row] = cache.residual_tokens[row] = 0;
}

}  // namespace

Status append_channel(const ChannelCache& cache, const ChannelAppend& append, GpuStream stream) {
  if (Status s = cache.validate(); !s) return s;
  if (append.k == nullptr || append.v == nullptr || append.status == nullptr) {
    return Status(StatusCode::kInvalidArgument, "k, v or status is null");
  }
  if (cache.num_rows == 0) return Status::ok();
  with_head_dim(cache.layout.head_dim(), [&](auto dim) {
    append_channel_kernel<dim><<<cache.num_rows, kChannelThreads, 0, stream>>>(cache, append);
  });
  return cuda_status(cudaGetLastError(), "append");
}

Status fill_channel(const ChannelCache& cache, const ChannelPrompt& prompt, GpuStream stream) {
  if (Status s = cache.validate(); !s) return s;
  if (prompt.k == nullptr || prompt.v == nullptr || prompt.status == nullptr ||
      prompt.indptr == nullptr) {
    return Status(StatusCode::kInvalidArgument, "k, v, indptr or status is null");
  }
  if (reinterpret_cast<uintptr_t>(prompt.k) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(prompt.v) % 16 != 0) {
    return Status(StatusCode::kInvalidArgument, "k or v is misaligned");
  }
  if (prompt.num_kv_heads < 1 || cache.num_rows % prompt.num_kv_heads != 0) {
    return Status(StatusCode::kInvalidArgument, "num_kv_heads");
  }
  if (cache.num_rows > 65535) return Status(StatusCode::kUnsupported, "more than 65535 rows");
  if (cache.num_rows == 0) return Status::ok();
  const auto ctas = static_cast<uint32_t>((cache.num_rows + kChannelThreads - 1) / kChannelThreads);
  begin_fill_kernel<<<ctas, kChannelThreads, 0, stream>>>(cache, prompt);
  const dim3 grid(static_cast<uint32_t>(cache.max_blocks) + 1, cache.num_rows);
  with_head_dim(cache.layout.head_dim(), [&](auto dim) {
    fill_channel_kernel<dim><<<grid, kChannelThreads, 0, stream>>>(cache, prompt);
  });
  return cuda_status(cudaGetLastError(), "fill");
}

}  // namespace tierkv

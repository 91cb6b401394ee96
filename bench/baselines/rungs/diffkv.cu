// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/rungs/diffkv.h"

#include "bench/baselines/rungs/diffkv_kernel.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

constexpr int32_t kTranscodeThreads = 256;

// The word of a segment of codes in DiffKV's layout, gathered from our page.
template <class PlaceOf>
__device__ __forceinline__ uint32_t gather_word(const PageLayout& page, Component component,
                                                const uint8_t* from, int32_t word,
                                                PlaceOf place_of) {
  const TileLayout tile = page.tile(component);
  const int32_t per_word = 32 / tile.type.bits();
  uint32_t codes = 0;
  for (int32_t k = 0; k < per_word; ++k) {
    const DiffkvPlace place = place_of(tile.type.bits(), page.tokens, word * per_word + k);
    const CodePosition at = code_position(tile, component, place.token % kTileTokens, place.dim);
    const auto* x = reinterpret_cast<const uint32_t*>(
        from + page.tile_codes_byte(component, place.token / kTileTokens) + at.byte);
    codes |= (*x >> at.bit & ((1u << tile.type.bits()) - 1)) << k * tile.type.bits();
  }
  return codes;
}

__device__ __forceinline__ uint32_t gather_metadata(const PageLayout& page, Component component,
                                                    const uint8_t* from, int32_t token) {
  return *reinterpret_cast<const uint32_t*>(
      from + page.tile_metadata_byte(component, token / kTileTokens) +
      token_metadata_byte(0, token % kTileTokens));
}

// One CTA per row; a page goes through shared memory, so `to` may be the pool itself.
__global__ void __launch_bounds__(kTranscodeThreads)
    transcode_kernel(const __grid_constant__ RungParams p,
                     const __grid_constant__ TranscodeParams pages) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const RowChunks chunks(p, blockIdx.x);
  for (int32_t i = 0; i < chunks.count(); ++i) {
    const RowChunk chunk = chunks.at(i);
    const uint8_t* from = page_of(p, chunk);
    if (from == nullptr) continue;
    const PageLayout& page = pages.layouts[chunk.tier];
    auto* to = reinterpret_cast<uint32_t*>(pages.to + (from - p.pool));
    for (int32_t w = threadIdx.x; w < page.scores / 4; w += kTranscodeThreads) {
      reinterpret_cast<uint32_t*>(shared_bytes)[w] = reinterpret_cast<const uint32_t*>(from)[w];
    }
    __syncthreads();
    for (int32_t w = threadIdx.x; w < page.scores / 4; w += kTranscodeThreads) {
      uint32_t word;
      if (4 * w < page.k_metadata) {
        word = gather_word(page, Component::kKey, shared_bytes, w, diffkv_key_place);
      } else if (4 * w < page.v_codes) {
        word = gather_metadata(page, Component::kKey, shared_bytes, w - page.k_metadata / 4);
      } else if (4 * w < page.v_metadata) {
        word = gather_word(page, Component::kValue, shared_bytes, w - page.v_codes / 4,
                           diffkv_value_place);
      } else {
        word = gather_metadata(page, Component::kValue, shared_bytes, w - page.v_metadata / 4);
      }
      to[w] = word;
    }
    __syncthreads();
  }
}

}  // namespace

RungKernel diffkv_rung(const RungShape& shape) {
  RungKernel k;
  k.kernel = diffkv_kernel;
  k.threads = kDiffkvThreads;
  k.shared_bytes = diffkv_shared().bytes;
  k.row_ctas = shape.group;
  k.slot_bytes = kMaxPageBytes;  // whole pages
  k.chunk_tiles = kAnyTiles;
  return k;
}

Status launch_transcode(const RungParams& params, const TranscodeParams& pages,
                        int32_t shared_bytes, GpuStream stream) {
  const cudaError_t set = cudaFuncSetAttribute(
      transcode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (Status s = cuda_status(set, "cudaFuncSetAttribute"); !s) return s;
  transcode_kernel<<<params.rows.num_rows, kTranscodeThreads, shared_bytes, stream>>>(params,
                                                                                      pages);
  return cuda_status(cudaGetLastError(), "transcode_kernel");
}

}  // namespace tierkv

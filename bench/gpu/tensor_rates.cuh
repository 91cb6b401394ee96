// SPDX-License-Identifier: Apache-2.0
// What the tensor cores could do for decode attention, without memory: mma.m16n8k16 and wgmma
// m64n8k16 with all operands in place, and the arithmetic of keys and values as operand A over one
// chunk that stays in shared memory. docs/notes/2026-11-22-attention-ladder.md compares them with
// what memory delivers.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "bench/baselines/rungs/kv_warp.cuh"
#include "bench/gpu/gpu_timing.cuh"

namespace tierkv::bench {

inline constexpr int32_t kRateWarps = 8;  // of an SM, as the product has
inline constexpr int32_t kRateRounds = 4096;

// kChains independent accumulators of a warp, kRateRounds mma each.
template <int32_t kChains>
__global__ void __launch_bounds__(kRateWarps * 32) mma_rate(float* sink, uint32_t one) {
  const uint32_t a[4] = {one, one, one, one};
  float d[kChains][4] = {};
  for (int32_t i = 0; i < kRateRounds; ++i) {
#pragma unroll
    for (int32_t c = 0; c < kChains; ++c) mma_m16n8k16(d[c], a, one, one);
  }
  float sum = 0.0f;
#pragma unroll
  for (int32_t c = 0; c < kChains; ++c) sum += d[c][0] + d[c][1] + d[c][2] + d[c][3];
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// d = a b + d of a warpgroup: a is 64 x 16 in registers or shared memory, b 16 x 8 in shared
// memory, d 64 x 8.
__device__ __forceinline__ void wgmma_m64n8k16(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_m64n8k16(float (&d)[4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b));
}

// The descriptor of an operand of 16 halves in the contracted dim, without swizzle: 8 x 8 core
// matrices of 128 bytes, neighbours in that dim one behind another, so 256 bytes to the next in the
// other dim.
__device__ __forceinline__ uint64_t plain_operand(const void* shared) {
  const uint64_t address = shared_address(shared);
  return (address >> 4 & 0x3fff) | uint64_t{128 >> 4} << 16 | uint64_t{256 >> 4} << 32;
}

inline constexpr int32_t kWgmmaChains = 4;

// kWgmmaChains accumulators of a warpgroup, kRateRounds wgmma each; waits for them every kTogether
// rounds. Eight rounds are the keys of 64 tokens: their registers may not change before the wait.
template <bool kFromRegisters, int32_t kTogether>
__global__ void __launch_bounds__(kRateWarps * 32) wgmma_rate(float* sink, uint32_t one) {
  __shared__ __align__(128) uint32_t a_tile[64 * 16 / 2], b_tile[8 * 16 / 2];
  for (int32_t i = threadIdx.x; i < 64 * 16 / 2; i += blockDim.x) a_tile[i] = one;
  if (threadIdx.x < 8 * 16 / 2) b_tile[threadIdx.x] = one;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const uint64_t a_shared = plain_operand(a_tile), b = plain_operand(b_tile);
  const uint32_t a[4] = {one, one, one, one};
  float d[kWgmmaChains][4] = {};
  for (int32_t i = 0; i < kRateRounds; i += kTogether) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int32_t k = 0; k < kTogether; ++k) {
#pragma unroll
      for (int32_t c = 0; c < kWgmmaChains; ++c) {
        if constexpr (kFromRegisters) {
          wgmma_m64n8k16(d[c], a, b);
        } else {
          wgmma_m64n8k16(d[c], a_shared, b);
        }
      }
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
  float sum = 0.0f;
#pragma unroll
  for (int32_t c = 0; c < kWgmmaChains; ++c) sum += d[c][0] + d[c][1] + d[c][2] + d[c][3];
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

inline constexpr int32_t kChunkTiles = 2;

struct Bits {
  int32_t k, v;
};

struct ArithmeticParams {
  const uint8_t* chunk;  // kChunkTiles tiles as they lie in a ring: both components and metadata
  const __half* q;       // [4][128]
  float* sink;           // a float per thread
  Bits bits;
  int32_t chunk_bytes, rounds;
};

// Every warp attends `rounds` times to a copy of the chunk in shared memory.
__global__ void __launch_bounds__(kRateWarps * 32, 1)
    arithmetic_rate(const __grid_constant__ ArithmeticParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* chunk = shared_bytes + warp * p.chunk_bytes;
  for (int32_t at = 16 * lane; at < p.chunk_bytes; at += 512) {
    *reinterpret_cast<uint4*>(chunk + at) = *reinterpret_cast<const uint4*>(p.chunk + at);
  }
  __syncwarp();
  KvWarp attention;
  attention.start(p.q, 4, 0.1f);
  for (int32_t i = 0; i < p.rounds; ++i) {
    attention.attend(chunk, pair_format(CodeType::of_bits(p.bits.k), CodeType::of_bits(p.bits.v)),
                     kChunkTiles, kChunkTiles * kTileTokens);
  }
  __syncthreads();  // the parts take the place of the chunks
  auto* states = reinterpret_cast<SoftmaxState*>(shared_bytes) + warp * 4;
  auto* parts = reinterpret_cast<float*>(shared_bytes + 512) + warp * 4 * kKvPartStride;
  attention.store_part(states, parts, 4);
  __syncwarp();
  p.sink[blockIdx.x * blockDim.x + threadIdx.x] = states[0].sum + parts[lane];
}

struct WgmmaRate {
  const char* name;
  double per_us;  // of one SM
};

struct TensorRates {
  double mma_per_us = 0;  // m16n8k16, of one SM
  WgmmaRate wgmma[4];     // m64n8k16
  struct {
    Bits bits;
    double tiles_per_us;  // of one SM: the arithmetic of keys and values as operand A alone
    double gbps;          // the bytes of so many tiles, of all SMs
  } arithmetic[4];
  bool is_right = true;  // wgmma's sums
};

// Where they are measured. memory: of the device, at least 16 MiB, overwritten.
struct TensorBench {
  cudaStream_t stream;
  int32_t sms;
  int replays;
  uint8_t* memory;
  const uint16_t* q;  // fp16, at least [4][128]
};

template <class Launch>
double per_us(const TensorBench& b, double count, const Launch& launch) {
  return count / time_graph(b.stream, 1, b.replays, [&](int) { launch(); }).median;
}

inline std::vector<uint16_t> random_halves(size_t count) {
  std::mt19937_64 rng(std::random_device{}());
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(count);
  for (uint16_t& h : x) h = float_to_half(normal(rng));
  return x;
}

// A chunk of kChunkTiles tiles with plausible metadata.
inline std::vector<uint8_t> random_chunk(Bits bits) {
  std::mt19937_64 rng(std::random_device{}());
  std::vector<uint8_t> chunk;
  for (const int32_t component_bits : {bits.k, bits.v}) {
    const int32_t codes = kChunkTiles * TileLayout{CodeType::of_bits(component_bits), 128}.bytes();
    const std::vector<uint16_t> halves = random_halves(codes / 2);
    const size_t at = chunk.size();
    chunk.resize(at + codes);
    std::memcpy(chunk.data() + at, halves.data(), codes);
    if (component_bits == 16) continue;
    for (int32_t i = 0; i < codes; ++i) chunk[at + i] = static_cast<uint8_t>(rng());
    const float scale = 2.0f / static_cast<float>((1 << component_bits) - 1);
    const uint16_t metadata[2] = {float_to_half(scale), float_to_half(-1.0f)};
    const auto* bytes = reinterpret_cast<const uint8_t*>(metadata);
    for (int32_t token = 0; token < kChunkTiles * kTileTokens; ++token) {
      chunk.insert(chunk.end(), bytes, bytes + 4);
    }
  }
  return chunk;
}

template <bool kFromRegisters, int32_t kTogether>
double wgmma_per_us(const TensorBench& b, bool& is_right) {
  auto* sink = reinterpret_cast<float*>(b.memory);
  const double count = static_cast<double>(kRateRounds) * kWgmmaChains * kRateWarps / 4;
  const double rate = per_us(b, count, [&] {
    wgmma_rate<kFromRegisters, kTogether>
        <<<b.sms, kRateWarps * 32, 0, b.stream>>>(sink, 0x3c003c00u);
  });
  float sum = 0;  // of 16 elements, to each of which a round adds 16 products of 1
  check(cudaMemcpy(&sum, sink, 4, cudaMemcpyDeviceToHost), "read sink");
  is_right &= sum == 16.0f * 16 * kRateRounds;
  return rate;
}

inline void measure_instructions(const TensorBench& b, TensorRates& rates) {
  constexpr int32_t kChains = 4;
  const double count = static_cast<double>(kRateRounds) * kChains * kRateWarps;
  rates.mma_per_us = per_us(b, count, [&] {
    mma_rate<kChains>
        <<<b.sms, kRateWarps * 32, 0, b.stream>>>(reinterpret_cast<float*>(b.memory), 0x3c003c00u);
  });
  bool& is_right = rates.is_right;
  rates.wgmma[0] = {"registers, wait every 8", wgmma_per_us<true, 8>(b, is_right)};
  rates.wgmma[1] = {"registers, wait every 4", wgmma_per_us<true, 4>(b, is_right)};
  rates.wgmma[2] = {"shared, wait every 8", wgmma_per_us<false, 8>(b, is_right)};
  rates.wgmma[3] = {"shared, wait every 32", wgmma_per_us<false, 32>(b, is_right)};
}

inline void measure_arithmetic(const TensorBench& b, TensorRates& rates) {
  constexpr int32_t kThreads = kRateWarps * 32, kRounds = 512, kSharedBytes = 160 << 10;
  check(cudaFuncSetAttribute(arithmetic_rate, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSharedBytes),
        "cudaFuncSetAttribute");
  auto* sink = reinterpret_cast<float*>(b.memory);
  uint8_t* page = b.memory + (8 << 20);
  const Bits formats[4] = {{16, 16}, {8, 4}, {4, 4}, {4, 2}};
  for (int32_t i = 0; i < 4; ++i) {
    const Bits bits = formats[i];
    const std::vector<uint8_t> chunk = random_chunk(bits);
    const auto bytes = static_cast<int32_t>(chunk.size());
    check(cudaMemcpy(page, chunk.data(), chunk.size(), cudaMemcpyHostToDevice), "upload");
    const double tiles = static_cast<double>(kRounds) * kChunkTiles * kRateWarps;
    const double rate = per_us(b, tiles, [&] {
      arithmetic_rate<<<b.sms, kThreads, kSharedBytes, b.stream>>>(
          {page, reinterpret_cast<const __half*>(b.q), sink, bits, bytes, kRounds});
    });
    rates.arithmetic[i] = {bits, rate, rate * b.sms * bytes / kChunkTiles / 1e3};
  }
}

inline TensorRates measure_tensor_cores(const TensorBench& b) {
  TensorRates rates;
  measure_instructions(b, rates);
  measure_arithmetic(b, rates);
  return rates;
}

inline void write_tensor(std::FILE* f, const TensorRates& rates) {
  std::fprintf(f, " \"tensor\": {\"mma_m16n8k16_per_us_sm\": %.1f, ", rates.mma_per_us);
  const char* separator = "\"wgmma_m64n8k16_per_us_sm\": {";
  for (const WgmmaRate& w : rates.wgmma) {
    std::fprintf(f, "%s\"%s\": %.1f", separator, w.name, w.per_us);
    separator = ", ";
  }
  separator = "},\n  \"arithmetic\": [";
  for (const auto& a : rates.arithmetic) {
    std::fprintf(
        f, "%s\n  {\"k_bits\": %d, \"v_bits\": %d, \"tiles_per_us_sm\": %.3f, \"gbps\": %.1f}",
        separator, a.bits.k, a.bits.v, a.tiles_per_us, a.gbps);
    separator = ",";
  }
  std::fprintf(f, "]},\n");
}

}  // namespace tierkv::bench

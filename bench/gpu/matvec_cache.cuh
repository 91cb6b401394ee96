// SPDX-License-Identifier: Apache-2.0
// The caches of bench_matvec: a component of a real cache as KVComp quantises it, as coded blocks,
// their units, and the plain fp16 matrix beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "bench/baselines/matvec/coded_matvec.h"
#include "bench/gpu/coded_blocks.cuh"

namespace tierkv::bench {

// KVComp section 4.2: a step of `relative` times the range of its unit. Keys: a channel of 64
// tokens; values: a token. Whole blocks only.
struct RelativeMatrix {
  DumpCodes shape;              // without layers
  LayerCodes layer;             // codes, of one component
  std::vector<uint16_t> units;  // of every block of the dump: [heads * blocks, 2, n]
  double squared_error = 0, squared_norm = 0;
};

inline int32_t dump_blocks(const DumpCodes& dump) {
  return dump.tokens / kBlockTokens;
}

// One unit: `count` values, `stride` apart.
inline void quantise_unit(const uint16_t* from, int16_t* to, int32_t count, int64_t stride,
                          double relative, uint16_t* step, uint16_t* low, RelativeMatrix* m) {
  float least = half_to_float(from[0]), most = least;
  for (int32_t i = 1; i < count; ++i) {
    least = std::min(least, half_to_float(from[i * stride]));
    most = std::max(most, half_to_float(from[i * stride]));
  }
  *step = float_to_half(static_cast<float>(relative * (most - least)));
  *low = float_to_half(least);
  const float unit = half_to_float(*step), base = half_to_float(*low);
  for (int32_t i = 0; i < count; ++i) {
    const float x = half_to_float(from[i * stride]);
    const float code = unit > 0 ? std::rint((x - base) / unit) : 0.0f;
    to[i * stride] = static_cast<int16_t>(code);
    const double error = x - (double{base} + double{unit} * code);
    m->squared_error += error * error;
    m->squared_norm += double{x} * x;
  }
}

inline RelativeMatrix quantise(const DumpCodes& dump, const std::vector<uint16_t>& halves,
                               Component component, double relative) {
  RelativeMatrix m;
  m.shape = {dump.heads, dump.tokens, dump.head_dim, {}};
  const bool is_key = component == Component::kKey;
  std::vector<int16_t>& codes = m.layer.component[static_cast<int32_t>(component)];
  codes.resize(halves.size());
  const int32_t dims = dump.head_dim, n = block_unit_count(component, dims) / 2;
  for (int32_t h = 0; h < dump.heads; ++h) {
    for (int32_t b = 0; b < dump_blocks(dump); ++b) {
      const int64_t at = (int64_t{h} * dump.tokens + int64_t{b} * kBlockTokens) * dims;
      const size_t unit = m.units.size();
      m.units.resize(unit + 2 * static_cast<size_t>(n));
      for (int32_t i = 0; i < n; ++i) {
        const int64_t first = at + int64_t{i} * (is_key ? 1 : dims);
        quantise_unit(&halves[first], &codes[first], is_key ? kBlockTokens : dims,
                      is_key ? dims : 1, relative, &m.units[unit + i], &m.units[unit + n + i], &m);
      }
    }
  }
  return m;
}

// Which block of the dump each of the kMostItems blocks of `blocks` is.
inline std::vector<int32_t> sources_of(const Blocks& blocks, const RelativeMatrix& m,
                                       Component component) {
  const int16_t* base = m.layer.component[static_cast<int32_t>(component)].data();
  const int64_t head = int64_t{m.shape.tokens} * m.shape.head_dim;
  std::vector<int32_t> sources;
  for (const int16_t* codes : blocks.codes) {
    const int64_t at = codes - base;
    sources.push_back(static_cast<int32_t>(at / head * dump_blocks(m.shape) +
                                           at % head / (kBlockTokens * m.shape.head_dim)));
  }
  return sources;
}

// Units in the order of the blocks.
inline std::vector<uint16_t> units_of(const std::vector<int32_t>& sources, const RelativeMatrix& m,
                                      Component component) {
  const auto count = static_cast<size_t>(block_unit_count(component, m.shape.head_dim));
  std::vector<uint16_t> units;
  units.reserve(sources.size() * count);
  for (int32_t s : sources) {
    const auto from = m.units.begin() + static_cast<int64_t>(static_cast<size_t>(s) * count);
    units.insert(units.end(), from, from + static_cast<int64_t>(count));
  }
  return units;
}

// Block i of the matrix is block from[i] of the dump: [kMostItems, 64, head_dim].
__global__ void spread_blocks(const uint4* dump, const int32_t* from, uint4* to,
                              int32_t block_words) {
  const uint4* source = dump + int64_t{from[blockIdx.x]} * block_words;
  uint4* target = to + int64_t{blockIdx.x} * block_words;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < block_words;
       i += static_cast<int32_t>(blockDim.x)) {
    target[i] = source[i];
  }
}

// The fp16 matrix whose blocks are those.
inline std::unique_ptr<Device<uint16_t>> spread_halves(const DumpCodes& dump,
                                                       const std::vector<uint16_t>& halves,
                                                       const std::vector<int32_t>& sources) {
  const int64_t block = int64_t{kBlockTokens} * dump.head_dim;
  std::vector<uint16_t> whole;  // without what does not fill a block
  for (int32_t h = 0; h < dump.heads; ++h) {
    const auto from = halves.begin() + int64_t{h} * dump.tokens * dump.head_dim;
    whole.insert(whole.end(), from, from + dump_blocks(dump) * block);
  }
  const Device<uint16_t> source(whole);
  const Device<int32_t> places(sources);
  auto to = std::make_unique<Device<uint16_t>>(sources.size() * static_cast<size_t>(block));
  spread_blocks<<<static_cast<unsigned>(sources.size()), 256>>>(
      reinterpret_cast<const uint4*>(source.get()), places.get(),
      reinterpret_cast<uint4*>(to->get()), static_cast<int32_t>(block / 8));
  check(cudaDeviceSynchronize(), "spread");
  return to;
}

// From codes to fp16: the second kernel of the unfused pipeline, one word of two channels a thread.
struct Dequantise {
  const int16_t* codes;   // [blocks, 64, head_dim]
  const uint16_t* units;  // [blocks, 2, n]
  uint16_t* values;       // like codes
  int32_t head_dim;
  bool is_key;
};
__global__ void dequantise_kernel(const __grid_constant__ Dequantise d) {
  const int32_t words = kBlockTokens * d.head_dim / 2, n = d.is_key ? d.head_dim : kBlockTokens;
  const auto* codes = reinterpret_cast<const uint32_t*>(d.codes) + int64_t{blockIdx.x} * words;
  auto* values = reinterpret_cast<uint32_t*>(d.values) + int64_t{blockIdx.x} * words;
  const uint16_t* steps = d.units + int64_t{blockIdx.x} * 2 * n;
  const uint16_t* lows = steps + n;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < words;
       i += static_cast<int32_t>(blockDim.x)) {
    const int32_t dim = 2 * i % d.head_dim, token = 2 * i / d.head_dim;
    const int32_t first = d.is_key ? dim : token, second = d.is_key ? dim + 1 : token;
    const uint32_t word = codes[i];
    const float x =
        fmaf(half_to_float(steps[first]), static_cast<float>(static_cast<int16_t>(word)),
             half_to_float(lows[first]));
    const float y =
        fmaf(half_to_float(steps[second]), static_cast<float>(static_cast<int16_t>(word >> 16)),
             half_to_float(lows[second]));
    values[i] = float_to_half(x) | static_cast<uint32_t>(float_to_half(y)) << 16;
  }
}

}  // namespace tierkv::bench

// SPDX-License-Identifier: Apache-2.0
// Raw rows of some sequences, by the host place and by kernels that run on the host.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "store/place/device/raw_append_kernel.cuh"
#include "store/place/raw_tokens.h"
#include "tests/support/random_input.h"

namespace tierkv::store::test {

using tierkv::testing::RandomInput;

template <class Kernel>
void emulate(int32_t x, int32_t y, int32_t threads, Kernel kernel) {
  for (int32_t i = 0; i < x; ++i) {
    for (int32_t j = 0; j < y; ++j) emulator::cta().run({i, j}, threads, kernel, {x, y});
  }
}

// Raw rows of some sequences, twice: by the host and by the kernels.
struct RawWorld {
  RandomInput input;
  TokenLaws laws;
  RawRows rows;
  int32_t sequences, layers = 2, layer = 1, kv_heads;
  std::vector<uint8_t> host, device;
  std::vector<LayerTokens> counts;  // [sequences][layers]
  DeviceFault fault = {};
  DType dtype;
  int32_t most_ctas = 3;  // of a row
  // Changes a chunk: keys, values, significances.
  struct Tensors {
    std::vector<uint16_t> k, v;
    std::vector<float> significance;
    int32_t stride = 0;
  };
  std::function<void(Tensors*)> change = [](Tensors*) {};

  RawWorld(int32_t head_dim, DType type) : dtype(type) {
    constexpr int32_t kUnits[] = {1, 16, 32, 64};
    const int32_t unit = kUnits[input.uniform(0, 3)], window = input.uniform(8, 90);
    const int32_t ring = static_cast<int32_t>(round_up(std::max(window + unit - 1, 63), 16));
    laws = {input.uniform(0, 16), window, unit, 64, ring};
    sequences = input.uniform(1, 4);
    kv_heads = input.uniform(1, 3);
    rows = {laws, RawLayout(laws, head_dim)};
    host.assign(static_cast<size_t>(sequences) * memory().slot_bytes, 0);
    device = host;
    // Places that nobody has written weigh nothing, whatever finite values lie there.
    for (int32_t row = 0; row < sequences * kv_heads; ++row) {
      uint8_t* const bytes = host_raw(row / kv_heads) + row % kv_heads * rows.raw.row_bytes;
      const auto largest = static_cast<uint16_t>(input.chance(0.5) ? 0x7bff : 0xfbff);
      for (int32_t i = 0; i < rows.raw.scores; i += 2) std::memcpy(bytes + i, &largest, 2);
    }
    device = host;
    counts.assign(sequences * layers, {});
  }
  DeviceSlots memory() {
    const int64_t raw = int64_t{rows.raw.row_bytes} * kv_heads;
    return {device.data(), (raw + 128) * layers, raw + 128, raw};
  }
  uint8_t* host_raw(int32_t slot) {
    return host.data() + (memory().raw(slot, layer) - device.data());
  }
  LayerTokens& at(int32_t slot) { return counts[slot * layers + layer]; }

  // n tokens to every sequence, in reverse order of slots.
  void append(int32_t n, bool in_step) {
    const int32_t dim = rows.raw.head_dim;
    const int64_t per_sequence = int64_t{n} * kv_heads;
    const auto fill = [&] {
      std::vector<uint8_t> bytes = input.values(dtype, sequences * per_sequence, dim);
      std::vector<uint16_t> x(bytes.size() / 2);
      std::memcpy(x.data(), bytes.data(), bytes.size());
      return x;
    };
    Tensors x = {fill(), fill(), {}, n + input.uniform(0, 3)};
    x.significance.resize(static_cast<size_t>(sequences * kv_heads) * x.stride);
    for (float& s : x.significance) s = input.real(0, 1);
    if (input.chance(0.5)) x.significance.clear();
    change(&x);
    std::vector<int32_t> slots;
    std::vector<LayerTokens> to;
    const float* const significance = x.significance.empty() ? nullptr : x.significance.data();
    const Chunk chunk = {x.k.data(), x.v.data(), significance, x.stride, dtype, n};
    for (int32_t i = 0; i < sequences; ++i) {
      const int32_t slot = sequences - 1 - i;
      LayerTokens after = after_append(laws, at(slot), n);
      for (int32_t h = 0; h < kv_heads; ++h) {
        uint8_t* const row = host_raw(slot) + int64_t{h} * rows.raw.row_bytes;
        const RawTokens tokens =
            raw_tokens(rows.raw, row, at(slot).tokens, chunk, {i, h, kv_heads});
        write_chunk(rows, row, tokens, after);
      }
      if (in_step) after.tokens -= n;
      slots.push_back(slot);
      to.insert(to.end(), in_step ? layers : 1, after);
    }
    RawAppendCall call;
    call.memory = memory();
    call.raw = rows.raw;
    call.laws = laws;
    call.slots = slots.data();
    call.to = to.data() + (in_step ? layer : 0);
    call.stride = in_step ? layers : 1;
    call.added = in_step ? n : 0;
    call.counts = counts.data();
    call.num_layers = layers;
    call.layer = layer;
    call.num_kv_heads = kv_heads;
    call.chunk = chunk;
    call.fault = &fault;
    const int32_t pieces = (n + kAppendTokens - 1) / kAppendTokens;
    emulate(sequences * kv_heads, std::min(pieces, most_ctas), kAppendThreads,
            [&] { raw_append_kernel(call); });
  }
};

}  // namespace tierkv::store::test

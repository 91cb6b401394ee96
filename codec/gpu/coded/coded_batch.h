// SPDX-License-Identifier: Apache-2.0
// A codebook on the GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/codebook.h"
#include "codec/format/coded_block_format.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

// A codebook as kernels take it. The arrays lie in device memory and are the caller's.
struct DeviceCodebook : CodebookShape {
  const uint32_t* table = nullptr;     // [2^max_length]: device_table()
  const uint32_t* words = nullptr;     // [symbols]: encoder_words(); encoding only
  const uint16_t* cheapest = nullptr;  // [1 + places * radix]: Codebook::cheapest; encoding only
};
// The shape of a codebook; the caller uploads the arrays.
inline DeviceCodebook device_codebook(const Codebook& c) {
  return {c};
}
// Code word in bits 0-15, length above; 0 where the symbol is absent.
inline std::vector<uint32_t> encoder_words(const Codebook& c) {
  std::vector<uint32_t> words;
  for (size_t s = 0; s < c.lengths.size(); ++s) {
    words.push_back(c.lengths[s] == 0 ? 0 : c.words[s] | uint32_t{c.lengths[s]} << 16);
  }
  return words;
}

}  // namespace tierkv

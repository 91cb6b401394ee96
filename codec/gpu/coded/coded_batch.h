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
struct DeviceCodebook {
  const uint32_t* table = nullptr;     // [2^max_length]: device_table()
  const uint32_t* words = nullptr;     // [symbols]: encoder_words(); encoding only
  const uint16_t* cheapest = nullptr;  // [1 + places * radix]: Codebook::cheapest; encoding only
  int32_t max_length = 0;
  int32_t levels = 0;
  int32_t base = 0;
  int32_t streams_per_lane = 1;
  BlockMode mode = BlockMode::kPair;
  Component component = Component::kKey;
  uint8_t table_id = 0;
};
// The scalars of a codebook; the caller uploads the arrays.
DeviceCodebook device_codebook(const Codebook& codebook);
// Code word in bits 0-15, length above; 0 where the symbol is absent.
std::vector<uint32_t> encoder_words(const Codebook& codebook);

}  // namespace tierkv

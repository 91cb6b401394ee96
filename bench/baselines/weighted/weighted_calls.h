// SPDX-License-Identifier: Apache-2.0
// The warps of coded blocks as kernels of their own, to be timed and tested apart from a store,
// whose kernels they are parts of.
#pragma once

#include "codec/gpu/coded/weighted_batch.h"

namespace tierkv {

// One kernel: encode_weighted_items() of codec/gpu/coded/weighted_encode.cuh.
Status encode_weighted(const WeightedEncode& call, GpuStream stream);
// One kernel: decode_weighted_items() of codec/gpu/coded/weighted_decode.cuh.
Status decode_weighted(const WeightedDecode& call, GpuStream stream);

}  // namespace tierkv

#include "attention/tiers/decode_kernel.cuh"

namespace tierkv {

template <>
DecodeKernel decode_kernel_of<96>(int32_t blocks, DecodeMode mode) {
  return decode_kernel_for<96>(blocks, mode);
}

}  // namespace tierkv

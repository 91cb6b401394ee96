#include "attention/tiers/decode_kernel.cuh"

namespace tierkv {

template <>
DecodeKernel decode_kernel_of<256>(int32_t blocks, DecodeMode mode) {
  return decode_kernel_for<256>(blocks, mode);
}

}  // namespace tierkv

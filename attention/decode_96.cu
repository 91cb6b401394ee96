#include "attention/decode_kernel.cuh"

namespace tierkv {

template <>
DecodeKernel decode_kernel_of<96>(int32_t blocks, bool is_plain) {
  if (blocks == 2) return decode_kernel<96, 2, false>;
  return is_plain ? decode_kernel<96, 1, true> : decode_kernel<96, 1, false>;
}

}  // namespace tierkv

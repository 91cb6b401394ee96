#include "attention/decode_kernel.cuh"

namespace tierkv {

template <>
DecodeKernel decode_kernel_of<128>(int32_t blocks, bool is_plain) {
  if (blocks == 2) return decode_kernel<128, 2, false>;
  return is_plain ? decode_kernel<128, 1, true> : decode_kernel<128, 1, false>;
}

}  // namespace tierkv

#include "attention/decode_kernel.cuh"

namespace tierkv {

template <>
DecodeKernel decode_kernel_of<256>(int32_t blocks, bool is_plain) {
  if (blocks == 2) return nullptr;
  return is_plain ? decode_kernel<256, 1, true> : decode_kernel<256, 1, false>;
}

}  // namespace tierkv

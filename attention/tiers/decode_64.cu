#include "attention/tiers/decode_kernel.cuh"

namespace tierkv {

template <>
DecodeKernel decode_kernel_of<64>(const DecodeChoice& choice) {
  return decode_kernel_for<64>(choice);
}

}  // namespace tierkv

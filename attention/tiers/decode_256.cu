#include "attention/tiers/decode_kernel.cuh"

namespace tierkv {

template <>
DecodeKernel decode_kernel_of<256>(const DecodeChoice& choice) {
  return decode_kernel_for<256>(choice);
}

}  // namespace tierkv

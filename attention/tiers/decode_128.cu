#include "attention/tiers/decode_kernel.cuh"

namespace tierkv {

template <>
DecodeKernel decode_kernel_of<128>(const DecodeChoice& choice) {
  return decode_kernel_for<128>(choice);
}

}  // namespace tierkv

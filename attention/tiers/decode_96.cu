#include "attention/tiers/decode_kernel.cuh"

namespace tierkv {

template <>
DecodeKernel decode_kernel_of<96>(const DecodeChoice& choice) {
  return decode_kernel_for<96>(choice);
}

}  // namespace tierkv

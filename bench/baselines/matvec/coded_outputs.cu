#include "bench/baselines/matvec/coded_outputs.cuh"

#include "bench/baselines/matvec/coded_matvec_kernel.cuh"

namespace tierkv {

MatvecKernel find_output_kernel(const CodedMatvec& call, int32_t copies_log) {
  return find_matvec_kernel<OutputWarp>(call, copies_log);
}

}  // namespace tierkv

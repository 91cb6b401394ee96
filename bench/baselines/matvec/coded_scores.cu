#include "bench/baselines/matvec/coded_scores.cuh"

#include "bench/baselines/matvec/coded_matvec_kernel.cuh"

namespace tierkv {

MatvecKernel find_score_kernel(const CodedMatvec& call, int32_t copies_log) {
  return find_matvec_kernel<ScoreWarp>(call, copies_log);
}

}  // namespace tierkv

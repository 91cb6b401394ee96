#include "attention/rungs/query_as_a_kernel.cuh"
#include "attention/rungs/rung_kernel.h"

namespace tierkv {

RungKernel query_as_a_rung(int32_t tile_bytes) {
  RungKernel k;
  k.kernel = query_as_a_kernel;
  k.threads = kCoopThreads;
  k.chunk_tiles = kCoopTiles;
  k.shared_bytes = coop_shared(kCoopTiles * tile_bytes).bytes;
  return k;
}

}  // namespace tierkv

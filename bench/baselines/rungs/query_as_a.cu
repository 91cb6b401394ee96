// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/rungs/query_as_a_kernel.cuh"
#include "bench/baselines/rungs/rung_kernel.h"

namespace tierkv {

RungKernel query_as_a_rung(const RungShape& shape) {
  RungKernel k;
  k.kernel = query_as_a_kernel;
  k.threads = kCoopThreads;
  k.slot_bytes = kCoopTiles * shape.tile_bytes;
  k.chunk_tiles = kCoopTiles;
  k.shared_bytes = coop_shared(k.slot_bytes).bytes;
  return k;
}

}  // namespace tierkv

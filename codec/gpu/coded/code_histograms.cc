// SPDX-License-Identifier: Apache-2.0
#include "codec/gpu/coded/code_histograms.h"

#include <utility>
#include <vector>

namespace tierkv {

CodeHistogram histogram_of_counts(Component component, int32_t head_dim, const uint32_t* pairs,
                                  const uint32_t* wide) {
  std::vector<uint64_t> singles(kHistogramCounts, 0), table(pairs, pairs + kHistogramCounts);
  // Codes by residue modulo 256; what wide ones have of it is known apart.
  uint64_t residues[256] = {};
  for (int32_t i = 0; i < kHistogramCounts; ++i) {
    residues[i >> 8] += pairs[i];
    residues[i & 255] += pairs[i];
  }
  for (int32_t i = 0; i < kHistogramCounts; ++i) {
    singles[i] = wide[i];
    residues[i & 255] -= wide[i];
  }
  for (int32_t code = -128; code < 128; ++code) {
    singles[static_cast<uint16_t>(code)] = residues[static_cast<uint8_t>(code)];
  }
  return CodeHistogram(component, head_dim, std::move(singles), std::move(table));
}

}  // namespace tierkv

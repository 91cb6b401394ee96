#include "codec/gpu/coded/code_histograms.h"

#include <string>

#include "codec/format/fragment_order.h"
#include "tierkv/layout.h"

namespace tierkv {

Status CodeHistograms::validate() const {
  const auto invalid = [](const char* what) {
    return Status(StatusCode::kInvalidArgument, std::string("code histograms: ") + what);
  };
  if (num_rows < 0 || num_blocks < 0) return invalid("a count is negative");
  if (num_histograms < 1) return invalid("num_histograms must be positive");
  if (head_dim < kDimBlock || head_dim > kMaxHeadDim || head_dim % kDimBlock != 0) {
    return invalid("head_dim");
  }
  if (token_stride < head_dim || token_stride % 8 != 0) return invalid("token_stride");
  if (num_blocks == 0) return Status::ok();
  if (codes == nullptr || rows == nullptr || pairs == nullptr || wide == nullptr) {
    return invalid("codes, rows, pairs and wide are needed");
  }
  if (reinterpret_cast<uintptr_t>(codes) % 16 != 0) return invalid("codes alignment");
  return Status::ok();
}

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

// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/tree/tree_blocks.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "codec/host/coded/coded_block.h"

namespace tierkv {
namespace {

// Appends the digits of a block's codes in the order of the lanes' streams.
void append_digits(const int16_t* codes, const Codebook& codebook, std::vector<uint32_t>* out) {
  constexpr int32_t kBlocks = kSliceDims / kDimBlock;
  const size_t begin = out->size();
  out->resize(begin + kLaneWords * kWarpLanes, 0);
  for (int32_t i = 0; i < kTreeBlockCodes; ++i) {
    const int32_t lane = i % kWarpLanes, n = i / kWarpLanes;  // number n of the lane's stream
    const int32_t pair = n / 2, fragment = pair / kPairsPerFragment;
    const PairPosition at =
        pair_position(codebook.component, fragment / kBlocks,
                      dim_block_at(codebook.component, kBlocks, fragment % kBlocks),
                      pair % kPairsPerFragment, lane);
    const bool key = codebook.component == Component::kKey;
    const int32_t token = at.token + (key ? 0 : n % 2), dim = at.dim + (key ? n % 2 : 0);
    const auto digit = static_cast<uint8_t>(codes[token * kSliceDims + dim] - codebook.base);
    (*out)[begin + n / 4 * kWarpLanes + lane] |= uint32_t{digit} << 8 * (n % 4);
  }
}

}  // namespace

Result<TreeBlocks> make_tree_blocks(const std::vector<int16_t>& codes, const Codebook& codebook) {
  TreeBlocks made;
  made.units.push_back(0);
  for (size_t i = 0; i < codes.size(); i += kTreeBlockCodes) {
    const size_t begin = made.bytes.size();
    Status s = encode_block({&codes[i], nullptr, kBlockTokens, kSliceDims}, {&codebook, 1}, nullptr,
                            &made.bytes);
    if (!s) return s;
    const uint8_t* const block = &made.bytes[begin];
    const BlockHeader header = load_header_and_payload(block);
    if (header.mode != codebook.mode) {
      return Status(StatusCode::kUnsupported, "tree blocks: smaller raw");
    }
    std::vector<int16_t> coded(&codes[i], &codes[i] + kTreeBlockCodes);
    for (int32_t e = 0; e < header.exceptions; ++e) {
      const uint32_t x = load_u32(block + block_layout(header).exceptions + kExceptionBytes * e);
      coded[x & 0xffffu] = static_cast<int16_t>(coded[x & 0xffffu] - static_cast<int16_t>(x >> 16));
    }
    append_digits(coded.data(), codebook, &made.digits);
    made.units.push_back(static_cast<uint32_t>(made.bytes.size() / kBlockAlignment));
    made.most_bytes = std::max(made.most_bytes, header.units * kBlockAlignment);
    made.payload_bits += header.payload_bits;
  }
  return made;
}

std::vector<uint16_t> build_tree(const Codebook& codebook) {
  std::vector<uint16_t> tree(2, 0);
  for (size_t s = 0; s < codebook.lengths.size(); ++s) {
    size_t node = 0;
    for (int32_t b = 0; b < codebook.lengths[s]; ++b) {
      const size_t entry = 2 * node + (codebook.words[s] >> b & 1u);
      if (b + 1 == codebook.lengths[s]) {
        tree[entry] = static_cast<uint16_t>(kLeaf | s);
      } else {
        if (tree[entry] == 0) {
          tree[entry] = static_cast<uint16_t>(tree.size() / 2);
          tree.resize(tree.size() + 2, 0);
        }
        node = tree[entry];
      }
    }
  }
  return tree;
}

Result<Codebook> tree_codebook(const std::vector<int16_t>& codes, BlockMode mode,
                               int32_t max_length) {
  CodeHistogram histogram(Component::kKey, kSliceDims);
  histogram.add(codes.data(), static_cast<int64_t>(codes.size()) / kSliceDims);
  CodebookSpec spec;
  spec.mode = mode;
  spec.max_length = max_length;
  return build_codebook(histogram, spec);
}

std::vector<int16_t> laplace_codes(int64_t blocks, double spread, uint32_t seed) {
  std::mt19937 rng(seed);
  std::exponential_distribution<double> one_side(1 / spread);
  std::vector<int16_t> codes(static_cast<size_t>(blocks * kTreeBlockCodes));
  for (int16_t& code : codes) {
    const double x = one_side(rng) * (rng() % 2 == 0 ? 1 : -1);
    code = static_cast<int16_t>(std::clamp(std::nearbyint(x), -15.0, 15.0));
  }
  return codes;
}

}  // namespace tierkv

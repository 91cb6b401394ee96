#include "codec/lane_pairs.h"

#include <algorithm>
#include <cstring>

namespace tierkv {
namespace {

constexpr int32_t kGroups = kWarpLanes / 4;  // lanes of equal t: eight rows of a fragment

// Keys: the four lanes of a group hold eight neighbouring channels of one token.
void scatter_keys(const uint32_t* lanes, int32_t r, int16_t* tile, int64_t stride) {
  for (int32_t g = 0; g < kGroups; ++g) {
    memcpy(tile + (g + 8 * (r % 2)) * stride + 8 * (r / 2), lanes + 4 * g, 16);
  }
}

// Values: lanes of equal t hold eight neighbouring channels of two tokens.
void scatter_values(const uint32_t* lanes, int32_t r, int16_t* tile, int64_t stride) {
  for (int32_t t = 0; t < 4; ++t) {
    uint16_t first[kGroups], second[kGroups];
    for (int32_t g = 0; g < kGroups; ++g) {
      first[g] = static_cast<uint16_t>(lanes[4 * g + t]);
      second[g] = static_cast<uint16_t>(lanes[4 * g + t] >> 16);
    }
    int16_t* row = tile + (2 * t + 8 * (r / 2)) * stride + 8 * (r % 2);
    memcpy(row, first, sizeof(first));
    memcpy(row + stride, second, sizeof(second));
  }
}

}  // namespace

void scatter_pairs_reference(const LanePairs& pairs, Component component, const SliceCodes& out) {
  const bool key = component == Component::kKey;
  const int32_t tiles = tile_count(out.tokens), blocks = dim_block_count(out.dims);
  const auto store = [&](int32_t token, int32_t dim, uint32_t code) {
    if (token < out.tokens && dim < out.dims) {
      out.codes[token * out.stride + dim] = static_cast<int16_t>(code & 0xffffu);
    }
  };
  for (int32_t p = 0; p < tiles * blocks * kPairsPerFragment; ++p) {
    const int32_t r = p % kPairsPerFragment, block = p / kPairsPerFragment % blocks;
    const int32_t tile = p / kPairsPerFragment / blocks;
    for (int32_t lane = 0; lane < kWarpLanes; ++lane) {
      const PairPosition at = pair_position(component, tile, block, r, lane);
      const uint32_t pair = pairs.pairs[p * kWarpLanes + lane];
      store(at.token, at.dim, pair);
      store(at.token + !key, at.dim + key, pair >> 16);
    }
  }
}

void scatter_pairs(const LanePairs& pairs, Component component, const SliceCodes& out) {
  const int32_t tiles = tile_count(out.tokens), blocks = dim_block_count(out.dims);
  const bool whole = out.tokens % kTileTokens == 0 && out.dims % kDimBlock == 0;
  alignas(64) int16_t padded[kBlockTokens * kSliceDims];
  int16_t* target = whole ? out.codes : padded;
  const int64_t stride = whole ? out.stride : kSliceDims;
  const uint32_t* lanes = pairs.pairs;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    for (int32_t block = 0; block < blocks; ++block) {
      int16_t* corner = target + tile * kTileTokens * stride + block * kDimBlock;
      for (int32_t r = 0; r < kPairsPerFragment; ++r, lanes += kWarpLanes) {
        if (component == Component::kKey) {
          scatter_keys(lanes, r, corner, stride);
        } else {
          scatter_values(lanes, r, corner, stride);
        }
      }
    }
  }
  if (whole) return;
  for (int32_t t = 0; t < out.tokens; ++t) {
    std::copy_n(padded + t * kSliceDims, out.dims, out.codes + t * out.stride);
  }
}

}  // namespace tierkv

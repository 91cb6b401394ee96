// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/coded/tree_decode.h"

#include "bench/baselines/coded/array_tree.cuh"
#include "bench/baselines/coded/coded_decode_launch.cuh"
#include "bench/baselines/coded/coded_tree.cuh"

namespace tierkv {
namespace {

// What both forms keep in shared memory.
struct TreeRegion {
  using Params = DeviceTree;
  static __host__ __device__ constexpr int32_t region_bytes(const CodedDecode&) {
    return 2 * kMaxSymbols * static_cast<int32_t>(sizeof(uint16_t));
  }
  __device__ static void fill(const CodedDecode&, const DeviceTree& tree, uint8_t* region) {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < tree.entries;
         i += static_cast<int32_t>(blockDim.x)) {
      reinterpret_cast<uint16_t*>(region)[i] = tree.nodes[i];
    }
  }
};

__device__ __forceinline__ DigitPair pair_digits(int32_t symbol, int32_t levels) {
  return {symbol % levels, symbol / levels};
}

class LoopReader : public TreeRegion {
 public:
  static constexpr int32_t kWarpBytes = 0;

  __device__ LoopReader(const CodedDecode& call, const DeviceTree& tree, const uint8_t* region,
                        uint8_t*)
      : book_(call.codebook),
        walk_{shared_address(region), static_cast<uint32_t>(tree.entries - 1),
              call.codebook.max_length} {}
  __device__ __forceinline__ void open(const BlockStreams& streams) {
    for (int32_t s = 0; s < 2; ++s) {
      if (s < streams.count) {
        stream_[s].open(shared_address(streams.payload), streams.begin(s), TreeWalk::kBias);
      }
    }
  }
  __device__ __forceinline__ void pairs(DigitPair (&pairs)[4]) {
#pragma unroll
    for (int32_t r = 0; r < 4; ++r) {
      TreeWalk::Stream& stream =
          book_.streams_per_lane == 2 && r % 2 == 1 ? stream_[1] : stream_[0];
      const int32_t first = walk_.symbol(stream);
      pairs[r] = book_.mode == BlockMode::kSingle ? DigitPair{first, walk_.symbol(stream)}
                                                  : pair_digits(first, book_.levels);
    }
  }
  __device__ __forceinline__ bool ends(const BlockStreams& streams) const {
    bool valid = true;
    for (int32_t s = 0; s < 2; ++s) {
      if (s < streams.count) {
        valid &= stream_[s].end(shared_address(streams.payload), TreeWalk::kBias) == streams.end(s);
      }
    }
    return valid;
  }

 private:
  const DeviceCodebook& book_;
  TreeWalk walk_;
  TreeWalk::Stream stream_[2];
};

class ArrayReader : public TreeRegion {
 public:
  static constexpr int32_t kWarpBytes = kArraySymbolsBytes;

  __device__ ArrayReader(const CodedDecode& call, const DeviceTree& tree, const uint8_t* region,
                         uint8_t* symbols)
      : book_(call.codebook),
        tree_{reinterpret_cast<const uint16_t*>(region), static_cast<uint32_t>(tree.entries - 1)},
        symbols_(reinterpret_cast<uint16_t*>(symbols) + lane_index()) {}
  __device__ __forceinline__ void open(const BlockStreams& streams) {
    const int32_t per_symbol = book_.mode == BlockMode::kPair ? 2 : 1;
    const uint32_t expected = streams.codes / per_symbol / streams.count;
    valid_ = true;
    for (int32_t s = 0; s < streams.count; ++s) {
      next_[s] = symbols_ + s * kArrayRows / 2 * kWarpLanes;
      valid_ &= tree_.decode(reinterpret_cast<const uint32_t*>(streams.payload), streams.begin(s),
                             streams.end(s), next_[s], expected) == expected;
    }
  }
  __device__ __forceinline__ void pairs(DigitPair (&pairs)[4]) {
#pragma unroll
    for (int32_t r = 0; r < 4; ++r) {
      const int32_t s = book_.streams_per_lane == 2 ? r % 2 : 0;
      const int32_t first = take(s);
      pairs[r] = book_.mode == BlockMode::kSingle ? DigitPair{first, take(s)}
                                                  : pair_digits(first, book_.levels);
    }
  }
  // A stream is read to its end: it holds its symbols, or it is wrong.
  __device__ __forceinline__ bool ends(const BlockStreams&) const {
    return valid_;
  }

 private:
  __device__ __forceinline__ int32_t take(int32_t s) {
    const int32_t symbol = *next_[s] % kLeaf;
    next_[s] += kWarpLanes;
    return symbol;
  }

  const DeviceCodebook& book_;
  ArrayTree tree_;
  uint16_t* symbols_;  // of this lane
  uint16_t* next_[2];
  bool valid_ = true;
};

}  // namespace

Status decode_by_tree(const CodedDecode& call, const DeviceTree& tree, TreeForm form,
                      GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  if (Status s = validate_tree(tree, call.codebook); !s) return s;
  if (call.num_groups == 0) return Status::ok();
  return form == TreeForm::kLoop ? launch_coded_decode<LoopReader>(call, tree, stream)
                                 : launch_coded_decode<ArrayReader>(call, tree, stream);
}

}  // namespace tierkv

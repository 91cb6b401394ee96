// SPDX-License-Identifier: Apache-2.0
// What every GPU benchmark here needs: checked CUDA calls, graph-replay timing, the read ceiling of
// the device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace tierkv::bench {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Microseconds of one launch.
struct Timing {
  double median = 0, low = 0, high = 0;  // low and high: the 10th and 90th percentile
};

// Captures `launches` calls of launch(i) in one graph and replays it `replays` times after three
// warm-up replays.
template <class Launch>
Timing time_graph(cudaStream_t stream, int launches, int replays, Launch&& launch) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
  for (int i = 0; i < launches; ++i) launch(i);
  check(cudaStreamEndCapture(stream, &graph), "end capture");
  check(cudaGraphInstantiate(&replay, graph, 0), "instantiate");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<double> times;
  for (int i = 0; i < replays + 3; ++i) {
    check(cudaEventRecord(begin, stream), "record");
    check(cudaGraphLaunch(replay, stream), "replay");
    check(cudaEventRecord(end, stream), "record");
    check(cudaStreamSynchronize(stream), "replay");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 3) times.push_back(1e3 * ms / launches);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[times.size() / 10], times[times.size() * 9 / 10]};
}

inline constexpr int kReadThreads = 512;

// Reads n 16-byte words and does nothing with them: the floor of every kernel that must read as
// much.
__global__ void __launch_bounds__(kReadThreads)
    read_only(const uint4* p, int64_t n, uint32_t* sink) {
  constexpr int kInFlight = 8;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kReadThreads;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kReadThreads + threadIdx.x;
  uint32_t folded = 0;
  for (; i + (kInFlight - 1) * stride < n; i += kInFlight * stride) {
    uint4 v[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) v[k] = __ldcs(p + i + k * stride);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) folded ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < n; i += stride) {
    const uint4 v = __ldcs(p + i);
    folded ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (folded == 0x12345679u) *sink = folded;
}

inline void launch_read_only(const uint8_t* from, int64_t bytes, int sms, uint32_t* sink,
                             cudaStream_t stream) {
  read_only<<<4 * sms, kReadThreads, 0, stream>>>(reinterpret_cast<const uint4*>(from), bytes / 16,
                                                  sink);
}

}  // namespace tierkv::bench

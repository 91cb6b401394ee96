// SPDX-License-Identifier: Apache-2.0
// What the benches of the codec share: cases beside the copy ceiling of the same run, their report,
// and device arrays of random elements.
#pragma once

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bench/gpu/gpu_timing.cuh"
#include "tierkv/half.h"
#include "tierkv/status.h"

namespace tierkv::bench {

inline constexpr int64_t kCopyBytes = 1ll << 30;

struct Options {
  std::string out, commit = "unknown", only;
  int replays = 21;
};

struct Measured {
  std::string name, shape;
  int64_t bytes_read = 0, bytes_written = 0;
  Timing time;
  int64_t operations = 0;  // of matrix products, where they are the bound

  double teraflops() const { return static_cast<double>(operations) / time.median * 1e-6; }
  double terabytes_per_second() const {
    return static_cast<double>(bytes_read + bytes_written) / time.median * 1e-6;
  }
};

__global__ void __launch_bounds__(512) copy_only(const uint4* from, uint4* to, int64_t n) {
  constexpr int kInFlight = 4;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * 512;
  int64_t i = static_cast<int64_t>(blockIdx.x) * 512 + threadIdx.x;
  for (; i + (kInFlight - 1) * stride < n; i += kInFlight * stride) {
    uint4 v[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) v[k] = __ldcs(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) __stcs(to + i + k * stride, v[k]);
  }
  for (; i < n; i += stride) __stcs(to + i, __ldcs(from + i));
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    check(cudaStreamCreate(&stream_), "stream");
    int sms = 0;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
    measure_ceiling(sms);
  }
  bool wants(const std::string& name) const {
    return name.find(options_.only) != std::string::npos;
  }
  template <class Launch>
  void run(Measured m, Launch&& launch, int launches = 1) {
    m.time = time_graph(stream_, launches, options_.replays, launch);
    add(m);
  }
  // What was timed otherwise.
  void add(const Measured& m) {
    std::printf("%-34s %-22s %9.2f us [%.2f, %.2f] %6.3f TB/s %5.1f %% of copy\n", m.name.c_str(),
                m.shape.c_str(), m.time.median, m.time.low, m.time.high, m.terabytes_per_second(),
                100 * of_ceiling(m));
    if (m.operations > 0) std::printf("%57s %9.1f TFLOP/s\n", "", m.teraflops());
    std::fflush(stdout);
    results_.push_back(m);
  }
  cudaStream_t stream() const { return stream_; }
  int replays() const { return options_.replays; }

  void write_json() const {
    if (options_.out.empty()) return;
    cudaDeviceProp gpu{};
    check(cudaGetDeviceProperties(&gpu, 0), "properties");
    std::FILE* f = std::fopen(options_.out.c_str(), "w");
    if (f == nullptr) {
      std::fprintf(stderr, "cannot write %s\n", options_.out.c_str());
      std::exit(1);
    }
    std::fprintf(f,
                 "{\"schema\":\"tierkv.bench.codec/1\",\"commit\":\"%s\",\"gpu\":\"%s\","
                 "\"replays\":%d,\"copy_ceiling_tb_per_s\":%.4f,\n\"results\":[\n",
                 options_.commit.c_str(), gpu.name, options_.replays, ceiling_);
    for (size_t i = 0; i < results_.size(); ++i) {
      const Measured& m = results_[i];
      std::fprintf(f,
                   "{\"name\":\"%s\",\"shape\":\"%s\",\"bytes_read\":%lld,\"bytes_written\":%lld,"
                   "\"median_us\":%.3f,\"p10_us\":%.3f,\"p90_us\":%.3f,\"tb_per_s\":%.4f,"
                   "\"of_ceiling\":%.4f,\"tflop_per_s\":%.2f}%s\n",
                   m.name.c_str(), m.shape.c_str(), static_cast<long long>(m.bytes_read),
                   static_cast<long long>(m.bytes_written), m.time.median, m.time.low, m.time.high,
                   m.terabytes_per_second(), of_ceiling(m), m.teraflops(),
                   i + 1 < results_.size() ? "," : "");
    }
    std::fprintf(f, "]}\n");
    std::fclose(f);
  }

 private:
  // Copies of 1 GiB by the driver and by a kernel: the faster is what every kernel that reads and
  // writes is held against.
  void measure_ceiling(int sms) {
    void *from = nullptr, *to = nullptr;
    check(cudaMalloc(&from, kCopyBytes), "copy");
    check(cudaMalloc(&to, kCopyBytes), "copy");
    check(cudaMemset(from, 0x5a, kCopyBytes), "copy");
    run({"copy by the driver", "1 GiB", kCopyBytes, kCopyBytes, {}}, [&](int) {
      check(cudaMemcpyAsync(to, from, kCopyBytes, cudaMemcpyDeviceToDevice, stream_), "copy");
    });
    run({"copy by a kernel", "1 GiB", kCopyBytes, kCopyBytes, {}}, [&](int) {
      copy_only<<<4 * sms, 512, 0, stream_>>>(static_cast<const uint4*>(from),
                                              static_cast<uint4*>(to), kCopyBytes / 16);
    });
    for (const Measured& m : results_) ceiling_ = std::max(ceiling_, m.terabytes_per_second());
    check(cudaFree(from), "free");
    check(cudaFree(to), "free");
  }
  double of_ceiling(const Measured& m) const {
    return ceiling_ == 0 ? 1 : m.terabytes_per_second() / ceiling_;
  }

  Options options_;
  cudaStream_t stream_ = nullptr;
  double ceiling_ = 0;  // TB/s; 0 while it is being measured
  std::vector<Measured> results_;
};

inline void require(const Status& s) {
  if (s) return;
  std::fprintf(stderr, "%s\n", s.message().c_str());
  std::exit(1);
}

__device__ uint32_t hash(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ x >> 16;
}
// About normal: the sum of four uniform numbers.
__global__ void fill_elements(uint16_t* x, int64_t n, uint32_t seed, bool is_bfloat16) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n; i += step) {
    const uint32_t h = hash(static_cast<uint32_t>(i) ^ seed), g = hash(h + 0x9e3779b9u);
    const float sum = static_cast<float>((h & 0xffff) + (h >> 16) + (g & 0xffff) + (g >> 16));
    const float value = (sum - 131070.0f) / 37837.0f;
    x[i] = is_bfloat16 ? float_to_bfloat16(value) : float_to_half(value);
  }
}

template <class T>
T* device_array(const std::vector<T>& from) {
  void* p = nullptr;
  check(cudaMalloc(&p, from.size() * sizeof(T)), "array");
  check(cudaMemcpy(p, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "array");
  return static_cast<T*>(p);
}

// Options from the command line.
inline Options read_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--out") options.out = argv[i + 1];
    if (flag == "--commit") options.commit = argv[i + 1];
    if (flag == "--only") options.only = argv[i + 1];
    if (flag == "--replays") options.replays = std::max(1, std::atoi(argv[i + 1]));
  }
  return options;
}

}  // namespace tierkv::bench

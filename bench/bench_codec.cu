// The codec's kernels at the shapes of docs/BENCHMARKS.md, each beside the copy ceiling of the same
// run.
//
//   bench_codec [--out FILE] [--commit HASH] [--only TEXT] [--replays N]
//
// Every case is one launch, timed by graph replay. Its arrays are several times the L2 cache.
#include <cstring>
#include <random>
#include <string>

#include "bench/gpu_timing.cuh"
#include "codec/page_batch.h"
#include "codec/page_codec.h"
#include "codec/page_token.cuh"
#include "codec/prompt_scores.h"

namespace tierkv::bench {
namespace {

constexpr int64_t kCopyBytes = 1ll << 30;

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
  }
  bool wants(const std::string& name) const {
    return name.find(options_.only) != std::string::npos;
  }
  template <class Launch>
  void run(Measured m, Launch&& launch, int launches = 1) {
    m.time = time_graph(stream_, launches, options_.replays, launch);
    std::printf("%-34s %-22s %9.2f us [%.2f, %.2f] %6.3f TB/s %5.1f %% of copy\n", m.name.c_str(),
                m.shape.c_str(), m.time.median, m.time.low, m.time.high, m.terabytes_per_second(),
                100 * of_ceiling(m));
    if (m.operations > 0) std::printf("%57s %9.1f TFLOP/s\n", "", m.teraflops());
    std::fflush(stdout);
    results_.push_back(m);
  }
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
  cudaStream_t stream() const { return stream_; }

  void write_json(const std::string& path) const {
    cudaDeviceProp gpu{};
    check(cudaGetDeviceProperties(&gpu, 0), "properties");
    std::FILE* f = std::fopen(path.c_str(), "w");
    if (f == nullptr) {
      std::fprintf(stderr, "cannot write %s\n", path.c_str());
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
  double of_ceiling(const Measured& m) const {
    return ceiling_ == 0 ? 1 : m.terabytes_per_second() / ceiling_;
  }

  Options options_;
  cudaStream_t stream_ = nullptr;
  double ceiling_ = 0;  // TB/s; 0 while it is being measured
  std::vector<Measured> results_;
};

void require(const Status& s) {
  if (s) return;
  std::fprintf(stderr, "bench_codec: %s\n", s.message().c_str());
  std::exit(1);
}

// ---- quantise and pack ----

constexpr int32_t kSequences = 64, kTokens = 4096, kHeads = 8, kHeadDim = 128;
constexpr int64_t kAllTokens = int64_t{kSequences} * kTokens * kHeads;

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

// Keys and values [sequence, token, head, dim], scores [row, token]; shared by all formats.
struct Input {
  uint16_t *k = nullptr, *v = nullptr;
  float* scores = nullptr;

  Input() {
    const int64_t n = kAllTokens * kHeadDim;
    check(cudaMalloc(&k, 2 * n), "keys");
    check(cudaMalloc(&v, 2 * n), "values");
    std::vector<float> host(kAllTokens);
    for (int64_t i = 0; i < kAllTokens; ++i) host[i] = static_cast<float>(i % 1024) / 1024;
    scores = device_array(host);
  }
  void fill(DType dtype, uint32_t seed, cudaStream_t stream) const {
    const int64_t n = kAllTokens * kHeadDim;
    fill_elements<<<1024, 256, 0, stream>>>(k, n, seed, dtype == DType::kBFloat16);
    fill_elements<<<1024, 256, 0, stream>>>(v, n, ~seed, dtype == DType::kBFloat16);
    check(cudaStreamSynchronize(stream), "fill");
  }
};

struct PackCase {
  std::string name;
  TierFormat format;
  DType dtype = DType::kFloat16;
};

// One job a page: heads of the same tokens next to each other, as they lie in the input.
std::vector<PageJob> pack_jobs(const PageLayout& layout) {
  std::vector<PageJob> jobs;
  for (int32_t s = 0; s < kSequences; ++s) {
    for (int32_t first = 0; first < kTokens; first += layout.tokens) {
      for (int32_t head = 0; head < kHeads; ++head) {
        PageJob job;
        job.row = s * kHeads + head;
        job.input = (int64_t{s} * kTokens * kHeads + head) * kHeadDim;
        job.scalars = int64_t{job.row} * kTokens;
        job.first = first;
        job.page = static_cast<int32_t>(jobs.size());
        job.count = std::min(layout.tokens, kTokens - first);
        jobs.push_back(job);
      }
    }
  }
  return jobs;
}

void run_pack(Bench* bench, const Input& input, const PackCase& c, uint32_t seed) {
  if (!bench->wants(c.name)) return;
  const TierFormat tiers[] = {token_wise_tier(8, 4), token_wise_tier(4, 2), c.format};
  const int64_t page_bytes = choose_page_size({tiers, tiers + 3}, kHeadDim)->page_bytes;
  const PageLayout layout = *make_page_layout(c.format, kHeadDim, page_bytes);
  const std::vector<PageJob> jobs = pack_jobs(layout);
  PageEncode e;
  PageBatch& b = e.batch;
  check(cudaMalloc(&b.pool.base, jobs.size() * page_bytes), "pool");
  b.pool.records = device_array(std::vector<PageRecord>(jobs.size(), kEmptyPageRecord));
  b.pool.page_bytes = page_bytes;
  b.pool.num_pages = static_cast<int32_t>(jobs.size());
  b.formats.layout[0] = layout;
  b.formats.count = 1;
  b.formats.raw_dtype = c.dtype;
  b.jobs = device_array(jobs);
  b.num_jobs = static_cast<int32_t>(jobs.size());
  b.num_rows = kSequences * kHeads;
  b.status = device_array(std::vector<StatusCode>(b.num_rows, StatusCode::kOk));
  b.token_stride = kHeads * kHeadDim;
  b.dtype = c.dtype;
  e.k = input.k, e.v = input.v, e.scores = input.scores;
  input.fill(c.dtype, seed, bench->stream());
  Measured m{"pack " + c.name,
             "64 x 4096 x 8 x 128",
             kAllTokens * (4 * kHeadDim + 4) + static_cast<int64_t>(jobs.size() * sizeof(PageJob)),
             0,
             {}};
  for (const PageJob& job : jobs) {
    m.bytes_written +=
        (job.count + kTileTokens - 1) / kTileTokens * (layout.used_bytes / layout.tiles());
  }
  bench->run(m, [&](int) { require(encode_pages(e, bench->stream())); });
  PageDecode d;
  d.batch = b;
  d.k = input.k, d.v = input.v, d.scores = input.scores;
  m.name = "decode " + c.name;
  std::swap(m.bytes_read, m.bytes_written);
  bench->run(m, [&](int) { require(decode_pages(d, bench->stream())); });
  std::vector<StatusCode> status(b.num_rows);
  check(cudaMemcpy(status.data(), b.status, status.size() * sizeof(StatusCode),
                   cudaMemcpyDeviceToHost),
        "status");
  for (const StatusCode s : status) {
    if (s != StatusCode::kOk) std::exit(1);
  }
  for (void* p : {static_cast<void*>(b.pool.base), static_cast<void*>(b.pool.records),
                  static_cast<void*>(b.status)}) {
    check(cudaFree(p), "free");
  }
  check(cudaFree(const_cast<PageJob*>(b.jobs)), "free");
}

void run_packs(Bench* bench, uint32_t seed) {
  const Input input;
  run_pack(bench, input, {"k8v4", token_wise_tier(8, 4)}, seed);
  run_pack(bench, input, {"k4v2", token_wise_tier(4, 2)}, seed);
  run_pack(bench, input, {"k8v4 bf16", token_wise_tier(8, 4), DType::kBFloat16}, seed);
  run_pack(bench, input, {"k4v4 groups of 32", {token_wise(4, 32), token_wise(4, 32)}}, seed);
  run_pack(bench, input, {"raw", raw_tier()}, seed);
}

// ---- append ----

constexpr int32_t kLayers = 32, kRows = kSequences * kHeads;

struct AppendLayer {
  uint8_t* pool;
  const int32_t* pages;   // [rows]
  const int32_t* tokens;  // [rows] in the page
  const uint16_t *k, *v;  // [rows, head_dim]
  StatusCode* status;     // [rows]
  int64_t page_bytes;
};

// One token for every row of a layer: a warp looks up the page and appends. The tables are settled
// long before, so with overlap (programmatic dependent launch) they are read while the kernel
// before, which makes the keys and values, still runs.
__global__ void __launch_bounds__(64)
    append_layer(const __grid_constant__ AppendLayer a, const __grid_constant__ PageLayout layout) {
  const auto row = static_cast<int32_t>(blockIdx.x * 2 + threadIdx.x / 32);
  const PageRef page = {a.pool + a.pages[row] * a.page_bytes, &layout, DType::kFloat16};
  const int32_t slot = a.tokens[row];
  const int64_t at = int64_t{row} * kHeadDim;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const TokenInput token = {a.k + at, a.v + at, DType::kFloat16, 0.0f, slot};
  const StatusCode code = append_page_token(page, slot, token);
  if (code != StatusCode::kOk && threadIdx.x % 32 == 0) a.status[row] = code;
}

void launch_append(const AppendLayer& a, const PageLayout& layout, bool overlaps,
                   cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = kRows / 2;
  config.blockDim = 64;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  check(cudaLaunchKernelEx(&config, append_layer, a, layout), "append");
}

void run_append(Bench* bench, const std::string& name, const TierFormat& format, uint32_t seed) {
  if (!bench->wants("append " + name)) return;
  const int64_t page_bytes =
      choose_page_size({token_wise_tier(8, 4), token_wise_tier(4, 2), format}, kHeadDim)
          ->page_bytes;
  const PageLayout layout = *make_page_layout(format, kHeadDim, page_bytes);
  std::mt19937 rng(seed);
  std::vector<int32_t> pages(kLayers * kRows), tokens(kLayers * kRows);
  for (size_t i = 0; i < pages.size(); ++i) {
    pages[i] = static_cast<int32_t>(i);
    tokens[i] = static_cast<int32_t>(rng() % layout.tokens);
  }
  std::shuffle(pages.begin(), pages.end(), rng);
  AppendLayer a{};
  check(cudaMalloc(&a.pool, pages.size() * page_bytes), "pool");
  a.pages = device_array(pages), a.tokens = device_array(tokens);
  a.status = device_array(std::vector<StatusCode>(kRows));
  a.page_bytes = page_bytes;
  uint16_t *k = nullptr, *v = nullptr;
  const int64_t elements = int64_t{kLayers} * kRows * kHeadDim;
  check(cudaMalloc(&k, 2 * elements), "keys");
  check(cudaMalloc(&v, 2 * elements), "values");
  fill_elements<<<256, 256, 0, bench->stream()>>>(k, elements, seed, false);
  fill_elements<<<256, 256, 0, bench->stream()>>>(v, elements, ~seed, false);
  const int64_t token_bytes = layout.used_bytes / layout.tokens;
  for (const bool overlaps : {false, true}) {
    bench->run(
        {"append " + name + (overlaps ? ", overlapped" : ""),
         "64 x 8 x 128, a layer",
         kRows * 4 * kHeadDim,
         kRows * token_bytes,
         {}},
        [&](int layer) {
          AppendLayer l = a;
          l.pages += layer * kRows, l.tokens += layer * kRows;
          l.k = k + int64_t{layer} * kRows * kHeadDim;
          l.v = v + int64_t{layer} * kRows * kHeadDim;
          launch_append(l, layout, overlaps, bench->stream());
        },
        kLayers);
  }
  for (const void* p : {static_cast<const void*>(a.pool), static_cast<const void*>(a.pages),
                        static_cast<const void*>(a.tokens), static_cast<const void*>(a.status),
                        static_cast<const void*>(k), static_cast<const void*>(v)}) {
    check(cudaFree(const_cast<void*>(p)), "free");
  }
}

// ---- significance ----

constexpr int32_t kPromptTokens = 8192, kQHeads = 32;

void run_scores(Bench* bench, uint32_t seed) {
  if (!bench->wants("significance")) return;
  PromptScores p;
  p.num_sequences = 1;
  p.max_tokens = p.total_tokens = kPromptTokens;
  p.num_q_heads = kQHeads, p.num_kv_heads = kHeads;
  p.head_dim = kHeadDim;
  p.sm_scale = 0.08838834764831845;
  p.q_head_stride = p.k_head_stride = kHeadDim;
  p.q_token_stride = kQHeads * kHeadDim, p.k_token_stride = kHeads * kHeadDim;
  uint16_t *q = nullptr, *k = nullptr;
  float *lse = nullptr, *significance = nullptr;
  const int64_t q_elements = p.q_token_stride * kPromptTokens;
  const int64_t k_elements = p.k_token_stride * kPromptTokens;
  check(cudaMalloc(&q, 2 * q_elements), "queries");
  check(cudaMalloc(&k, 2 * k_elements), "keys");
  check(cudaMalloc(&lse, 4 * kQHeads * kPromptTokens), "lse");
  check(cudaMalloc(&significance, 4 * kHeads * kPromptTokens), "significance");
  fill_elements<<<1024, 256, 0, bench->stream()>>>(q, q_elements, seed, false);
  fill_elements<<<1024, 256, 0, bench->stream()>>>(k, k_elements, ~seed, false);
  p.q = q, p.k = k;
  p.starts = device_array(std::vector<int32_t>{0, kPromptTokens});
  Measured m{
      "lse", "8192, 32/8 x 128", 2 * (q_elements + k_elements), 4 * kQHeads * kPromptTokens, {}};
  m.operations = int64_t{kPromptTokens} * kPromptTokens * kQHeads * kHeadDim;
  bench->run(m, [&](int) { require(prompt_lse(p, lse, bench->stream())); });
  m.name = "significance";
  m.bytes_read += 4 * kQHeads * kPromptTokens, m.bytes_written = 4 * kHeads * kPromptTokens;
  bench->run(m, [&](int) { require(prompt_significance(p, lse, significance, bench->stream())); });
  for (void* x : {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(lse),
                  static_cast<void*>(significance)}) {
    check(cudaFree(x), "free");
  }
  check(cudaFree(const_cast<int32_t*>(p.starts)), "free");
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv::bench;
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--out") options.out = argv[i + 1];
    if (flag == "--commit") options.commit = argv[i + 1];
    if (flag == "--only") options.only = argv[i + 1];
    if (flag == "--replays") options.replays = std::max(1, std::atoi(argv[i + 1]));
  }
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
  const uint32_t seed = std::random_device{}();
  Bench bench(options);
  bench.measure_ceiling(sms);
  run_packs(&bench, seed);
  run_append(&bench, "k8v4", tierkv::token_wise_tier(8, 4), seed);
  run_append(&bench, "raw", tierkv::raw_tier(), seed);
  run_scores(&bench, seed);
  if (!options.out.empty()) bench.write_json(options.out);
  return 0;
}

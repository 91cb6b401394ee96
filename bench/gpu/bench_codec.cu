// SPDX-License-Identifier: Apache-2.0
// Baselines of the codec, each beside the copy ceiling of the same run: global steps, append of a
// token.
//
//   bench_codec [--out FILE] [--commit HASH] [--only TEXT] [--replays N]
//
// Every case is timed by graph replay. Its arrays are several times the L2 cache.
#include "bench/baselines/kernels/page_append.cuh"
#include "bench/baselines/kernels/step_codes.h"
#include "bench/gpu/codec_bench.cuh"
#include "codec/host/page_codec.h"

namespace tierkv::bench {
namespace {

// ---- global steps ----

constexpr int32_t kSequences = 64, kTokens = 4096, kHeads = 8, kHeadDim = 128;
constexpr int64_t kAllTokens = int64_t{kSequences} * kTokens * kHeads;

// The codes of one component with a global step, one call.
void run_step_codes(Bench* bench, uint32_t seed) {
  if (!bench->wants("global step")) return;
  uint16_t* x = nullptr;
  check(cudaMalloc(&x, 2 * kAllTokens * kHeadDim), "keys");
  fill_elements<<<1024, 256, 0, bench->stream()>>>(x, kAllTokens * kHeadDim, seed, false);
  StepCodes s;
  std::vector<StepRow> rows;
  for (int32_t i = 0; i < kSequences * kHeads; ++i) {
    const int64_t first =
        (int64_t{i} / kHeads * kTokens * kHeads + i % kHeads) * kHeadDim;  // of token 0
    rows.push_back({first, first, kTokens, i % kHeads});
  }
  s.x = x;
  check(cudaMalloc(&s.codes, 2 * kAllTokens * kHeadDim), "codes");
  s.rows = device_array(rows);
  s.steps = device_array(std::vector<float>(kHeads, 0.37f));
  s.means = device_array(std::vector<float>(kHeads * kHeadDim, 0.25f));
  s.status = device_array(std::vector<StatusCode>(rows.size()));
  s.x_token_stride = s.codes_token_stride = kHeads * kHeadDim;
  s.num_rows = static_cast<int32_t>(rows.size());
  s.num_steps = kHeads;
  s.max_tokens = kTokens;
  s.head_dim = kHeadDim;
  const int64_t bytes = 2 * kAllTokens * kHeadDim;
  bench->run({"global step, one component", "64 x 4096 x 8 x 128", bytes, bytes, {}},
             [&](int) { require(step_codes(s, bench->stream())); });
  for (const void* p : {static_cast<const void*>(x), static_cast<const void*>(s.codes),
                        static_cast<const void*>(s.rows), static_cast<const void*>(s.steps),
                        static_cast<const void*>(s.means), static_cast<const void*>(s.status)}) {
    check(cudaFree(const_cast<void*>(p)), "free");
  }
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

// One token for every row of a layer: two warps look up the page and append. The tables are settled
// long before, so with overlap (programmatic dependent launch) they are read while the kernel
// before, which makes the keys and values, still runs.
__global__ void __launch_bounds__(64)
    append_layer(const __grid_constant__ AppendLayer a, const __grid_constant__ PageLayout layout) {
  const auto row = static_cast<int32_t>(blockIdx.x);
  const PageRef page = {a.pool + a.pages[row] * a.page_bytes, &layout, DType::kFloat16};
  const int32_t slot = a.tokens[row];
  const int64_t at = int64_t{row} * kHeadDim;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const TokenInput token = {a.k + at, a.v + at, DType::kFloat16, 0.0f, slot};
  const StatusCode code =
      append_page_side(page, slot, static_cast<Component>(threadIdx.x / 32), token);
  if (code != StatusCode::kOk && threadIdx.x % 32 == 0) a.status[row] = code;
}

void launch_append(const AppendLayer& a, const PageLayout& layout, bool overlaps,
                   cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = kRows;
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

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv::bench;
  const uint32_t seed = std::random_device{}();
  Bench bench(read_options(argc, argv));
  run_step_codes(&bench, seed);
  run_append(&bench, "k8v4", tierkv::token_wise_tier(8, 4), seed);
  run_append(&bench, "raw", tierkv::raw_tier(), seed);
  bench.write_json();
  return 0;
}

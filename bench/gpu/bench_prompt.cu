// SPDX-License-Identifier: Apache-2.0
// The kernels of a prompt's first half: its log-sum-exp and significance.
//
//   bench_prompt [--out FILE] [--commit HASH] [--only TEXT] [--replays N]
//
// peers_prompt_torch.py times causal attention over the same prompt.
#include "bench/gpu/codec_bench.cuh"
#include "tierkv/significance.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kHeads = 8, kHeadDim = 128;

// ---- significance ----

constexpr int32_t kPromptTokens = 8192, kQHeads = 32;

// Times log-sum-exp and significance by one kind of products: of every query and of every 16th.
void run_products(Bench* bench, SignificanceCall p, float* lse, float* significance) {
  const std::string by = p.products == ScoreProducts::kMma ? ", mma.sync" : "";
  for (const int32_t stride : {1, 16}) {
    p.query_stride = stride;
    const std::string name = (stride == 1 ? "" : ", every 16th query") + by;
    const int64_t queries = kPromptTokens / stride, scalar_bytes = 4 * kQHeads * queries;
    Measured m{"lse" + name,
               "8192, 32/8 x 128",
               2 * kHeadDim * (kQHeads * queries + int64_t{kHeads} * kPromptTokens),
               scalar_bytes,
               {}};
    m.operations = queries * kPromptTokens * kQHeads * kHeadDim;
    bench->run(m, [&](int) { require(prompt_lse(p, lse, bench->stream())); });
    m.name = "significance" + name;
    m.bytes_read += scalar_bytes, m.bytes_written = 4 * kHeads * kPromptTokens;
    bench->run(m,
               [&](int) { require(prompt_significance(p, lse, significance, bench->stream())); });
  }
}

void run_scores(Bench* bench, uint32_t seed) {
  if (!bench->wants("significance")) return;
  SignificanceCall p;
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
  run_products(bench, p, lse, significance);
  p.products = ScoreProducts::kMma;
  run_products(bench, p, lse, significance);
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
  const uint32_t seed = std::random_device{}();
  Bench bench(read_options(argc, argv));
  run_scores(&bench, seed);
  bench.write_json();
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// Host speed of the page codec: the quantiser alone, tiering, and page encode and decode, plain and
// SIMD. Rates count fp16 bytes of keys and values, in (encode) or out (decode);
// `--benchmark_format=json` for machines.
#include <benchmark/benchmark.h>

#include <memory>
#include <random>
#include <vector>

#include "codec/format/quantize.h"
#include "codec/host/page_codec.h"
#include "tools/analysis/scheme/tiering.h"

namespace {

using namespace tierkv;

constexpr int32_t kTokens = 4096;

std::vector<uint16_t> random_halves(int64_t n) {
  std::mt19937 rng(std::random_device{}());
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(n);
  for (uint16_t& h : x) h = float_to_half(normal(rng));
  return x;
}

// Rows of one sequence and the pages they fill.
struct Row {
  Row(int32_t k_bits, int32_t v_bits, int32_t head_dim)
      : k(random_halves(int64_t{kTokens} * head_dim)),
        v(random_halves(int64_t{kTokens} * head_dim)),
        scores(kTokens, 0.5f),
        positions(kTokens, 1) {
    const TierFormat format = token_wise_tier(k_bits, v_bits);
    const int32_t page_bytes = choose_page_size({format}, head_dim)->page_bytes;
    page.layout = *make_page_layout(format, head_dim, page_bytes);
    pages = (kTokens + page.layout.tokens - 1) / page.layout.tokens;
    pool.resize(static_cast<size_t>(pages) * page_bytes + kPageAlignment);
    stride = page_bytes;
    const auto at = reinterpret_cast<uintptr_t>(pool.data());
    base = pool.data() + (kPageAlignment - at % kPageAlignment) % kPageAlignment;
  }
  HostPage at(int32_t i) {
    HostPage p = page;
    p.bytes = base + int64_t{i} * stride;
    return p;
  }
  int32_t tokens_of(int32_t i) const {
    return std::min(page.layout.tokens, kTokens - i * page.layout.tokens);
  }
  TokenBatch batch(int32_t i) const {
    const int64_t first = int64_t{i} * page.layout.tokens;
    TokenBatch b;
    b.k = k.data() + first * page.layout.head_dim();
    b.v = v.data() + first * page.layout.head_dim();
    b.scores = scores.data() + first;
    b.positions = positions.data() + first;
    b.count = tokens_of(i);
    return b;
  }
  int64_t bytes() const { return int64_t{kTokens} * page.layout.head_dim() * 2 * 2; }

  std::vector<uint16_t> k, v;
  std::vector<float> scores;
  std::vector<int32_t> positions;
  std::vector<uint8_t> pool;
  uint8_t* base;
  HostPage page;
  int32_t pages;
  int32_t stride;
};

template <class Append>
void encode(benchmark::State& state, Append append) {
  Row row(static_cast<int32_t>(state.range(0)), static_cast<int32_t>(state.range(1)),
          static_cast<int32_t>(state.range(2)));
  for (auto _ : state) {
    for (int32_t i = 0; i < row.pages; ++i) {
      if (!append(row.at(i), 0, row.batch(i))) return state.SkipWithError("append failed");
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * row.bytes());
}

template <class Decode>
void decode(benchmark::State& state, DType dtype, Decode read) {
  Row row(static_cast<int32_t>(state.range(0)), static_cast<int32_t>(state.range(1)),
          static_cast<int32_t>(state.range(2)));
  for (int32_t i = 0; i < row.pages; ++i) {
    if (!append_tokens(row.at(i), 0, row.batch(i))) return state.SkipWithError("append failed");
  }
  const int64_t page_elements = int64_t{row.page.layout.tokens} * row.page.layout.head_dim();
  std::vector<uint8_t> k(row.pages * page_elements * 4), v(k.size());
  for (auto _ : state) {
    for (int32_t i = 0; i < row.pages; ++i) {
      TokenOutput out;
      out.k = k.data() + i * page_elements * dtype_bytes(dtype);
      out.v = v.data() + i * page_elements * dtype_bytes(dtype);
      out.count = row.tokens_of(i);
      out.dtype = dtype;
      if (!read(row.at(i), 0, out)) return state.SkipWithError("decode failed");
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * row.bytes());
}

void BM_EncodeSimd(benchmark::State& state) {
  encode(state, append_tokens);
}
void BM_EncodePlain(benchmark::State& state) {
  encode(state, reference::append_tokens);
}
void BM_DecodeHalfSimd(benchmark::State& state) {
  decode(state, DType::kFloat16, decode_tokens);
}
void BM_DecodeFloatSimd(benchmark::State& state) {
  decode(state, DType::kFloat32, decode_tokens);
}
void BM_DecodeHalfPlain(benchmark::State& state) {
  decode(state, DType::kFloat16, reference::decode_tokens);
}

void BM_QuantizePlain(benchmark::State& state) {
  const auto bits = static_cast<int32_t>(state.range(0));
  constexpr int32_t kHeadDim = 128;
  const std::vector<uint16_t> half = random_halves(int64_t{kTokens} * kHeadDim);
  std::vector<float> x(half.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = half_to_float(half[i]);
  std::vector<uint8_t> codes(x.size());
  std::vector<QuantParams> params(kTokens);
  for (auto _ : state) {
    for (int64_t t = 0; t < kTokens; ++t) {
      benchmark::DoNotOptimize(quantize_minmax(x.data() + t * kHeadDim, kHeadDim, 1, 1 << bits,
                                               &params[t], codes.data() + t * kHeadDim));
    }
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(half.size()) * 2);
}

// Scattering codes that are already there: the shuffle of the plain codec without the arithmetic.
void BM_PackPlain(benchmark::State& state) {
  Row row(8, 4, 128);
  TokenCodes token{};
  const HostPage page = row.at(0);
  for (auto _ : state) {
    for (int32_t slot = 0; slot < page.layout.tokens; ++slot) store_token(page, slot, token);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * page.layout.tokens * 128 * 2 * 2);
}

void BM_PromptTiers(benchmark::State& state) {
  std::mt19937 rng(std::random_device{}());
  std::exponential_distribution<float> d(4000.0f);
  std::vector<float> significance(kTokens);
  for (float& s : significance) s = d(rng);
  std::vector<Tier> tiers(kTokens);
  for (auto _ : state) {
    benchmark::DoNotOptimize(analysis::assign_prompt_tiers({1.0, 0.02, 64, 4}, significance.data(),
                                                           kTokens, tiers.data(), nullptr));
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(state.iterations() * kTokens);
}

void formats(benchmark::internal::Benchmark* b) {
  b->ArgNames({"k", "v", "d"});
  for (const int64_t head_dim : {128, 64, 96, 256}) b->Args({8, 4, head_dim});
  for (const auto& [k, v] : {std::pair{4, 2}, {8, 8}, {4, 4}, {2, 2}, {16, 16}})
    b->Args({k, v, 128});
}

BENCHMARK(BM_EncodeSimd)->Apply(formats);
BENCHMARK(BM_DecodeHalfSimd)->Apply(formats);
BENCHMARK(BM_DecodeFloatSimd)->Args({8, 4, 128})->ArgNames({"k", "v", "d"});
BENCHMARK(BM_EncodeSimd)
    ->Args({8, 4, 128})
    ->ArgNames({"k", "v", "d"})
    ->ThreadRange(1, 4)
    ->UseRealTime();
BENCHMARK(BM_DecodeHalfSimd)
    ->Args({8, 4, 128})
    ->ArgNames({"k", "v", "d"})
    ->ThreadRange(1, 4)
    ->UseRealTime();
BENCHMARK(BM_EncodePlain)->Args({8, 4, 128})->ArgNames({"k", "v", "d"});
BENCHMARK(BM_DecodeHalfPlain)->Args({8, 4, 128})->ArgNames({"k", "v", "d"});
BENCHMARK(BM_QuantizePlain)->Arg(8)->Arg(4)->Arg(2);
BENCHMARK(BM_PackPlain);
BENCHMARK(BM_PromptTiers);

}  // namespace

BENCHMARK_MAIN();

// SPDX-License-Identifier: Apache-2.0
// Entropy coding on one core: histogram, codebook, encoder and decoder, beside zstd level 1 on
// the same codes (one byte a code). Codes are those of the global step (k 0.3, v 0.25, means
// removed) of datasets/sample_1k.h5 when it is found from the working directory, else rounded
// Laplace and Gauss numbers of about the same entropy.
//
// items_per_second are codes; bytes_per_second are the fp16 bytes they stand for.
#include <benchmark/benchmark.h>
#include <zstd.h>

#include <cmath>
#include <memory>
#include <random>

#include "codec/format/global_step.h"
#include "codec/host/coded/coded_block.h"
#include "datasets/dump.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

constexpr const char* kSample = "datasets/sample_1k.h5";

// The codes of all rows of a component, [tokens, head_dim] with tokens in whole blocks.
struct Codes {
  Component component = Component::kKey;
  int32_t head_dim = 128;
  std::vector<int16_t> codes;
  int64_t tokens() const { return static_cast<int64_t>(codes.size()) / head_dim; }
};

void append_row(const std::vector<float>& x, double step, Codes* out) {
  const int32_t d = out->head_dim;
  const auto tokens = static_cast<int64_t>(x.size()) / d / kBlockTokens * kBlockTokens;
  std::vector<double> mean(d, 0.0);
  for (size_t i = 0; i < x.size(); ++i) mean[i % d] += x[i] * static_cast<double>(d) / x.size();
  for (int64_t i = 0; i < tokens * d; ++i) {
    out->codes.push_back(static_cast<int16_t>(std::nearbyint((x[i] - mean[i % d]) / step)));
  }
}

double mean_square_norm(const std::vector<float>& x, int32_t head_dim) {
  double sum = 0;
  for (float v : x) sum += static_cast<double>(v) * v;
  return sum * head_dim / static_cast<double>(x.size());
}

bool read_sample(Component component, Codes* out) {
  Result<datasets::DumpReader> reader = datasets::DumpReader::open(kSample);
  if (!reader) return false;
  const CacheLayout& layout = reader->info().layout;
  *out = {component, layout.head_dim, {}};
  for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
    for (int32_t head = 0; head < layout.num_kv_heads; ++head) {
      RowData row;
      std::vector<float> q;
      const int32_t group = layout.group_size();
      if (!reader->read_row(0, layer, head, component, &row)) return false;
      if (!reader->read_queries(0, layer, head * group, group, &q)) return false;
      std::vector<float> x(static_cast<size_t>(row.tokens) * row.head_dim);
      row_to_float(row, 0, row.tokens, x.data());
      const double trace = (1 + kMetricRidge) * mean_square_norm(q, layout.head_dim);
      append_row(x,
                 component == Component::kKey
                     ? key_step(0.3, trace, layout.sm_scale)
                     : value_step(0.25, mean_square_norm(x, layout.head_dim), layout.head_dim),
                 out);
    }
  }
  return true;
}

Codes generate(Component component) {
  Codes out{component, 128, std::vector<int16_t>(12 * 1024 * 128)};
  std::mt19937 rng(1);
  std::exponential_distribution<double> side(1 / 1.9);
  std::normal_distribution<double> gauss(0, 1.17);
  for (int16_t& c : out.codes) {
    const double x = component == Component::kValue ? gauss(rng) : side(rng) * (rng() & 1 ? 1 : -1);
    c = static_cast<int16_t>(std::nearbyint(x));
  }
  return out;
}

const Codes& codes_of(Component component) {
  static const auto load = [](Component c) {
    Codes codes;
    const bool real = read_sample(c, &codes);
    if (!real) codes = generate(c);
    benchmark::AddCustomContext(c == Component::kKey ? "key codes" : "value codes",
                                real ? kSample : "generated");
    return codes;
  };
  static const Codes keys = load(Component::kKey), values = load(Component::kValue);
  return component == Component::kKey ? keys : values;
}

struct Coded {
  Codebook codebook;
  std::vector<uint8_t> bytes;
  std::vector<int64_t> offsets;  // of each block, and the end
};

void encode_all(const Codes& codes, Coded* out) {
  out->bytes.clear();
  out->offsets.clear();
  for (int64_t t = 0; t < codes.tokens(); t += kBlockTokens) {
    out->offsets.push_back(static_cast<int64_t>(out->bytes.size()));
    const Status s = encode_block(
        {codes.codes.data() + t * codes.head_dim, nullptr, kBlockTokens, codes.head_dim},
        {&out->codebook, 1}, nullptr, &out->bytes);
    if (!s) return out->bytes.clear();
  }
  out->offsets.push_back(static_cast<int64_t>(out->bytes.size()));
}

CodebookSpec spec_of(BlockMode mode, int32_t streams) {
  CodebookSpec spec;
  spec.mode = mode;
  spec.streams_per_lane = streams;
  return spec;
}

Coded make_coded(const Codes& codes, const CodebookSpec& spec) {
  CodeHistogram h(codes.component, codes.head_dim);
  h.add(codes.codes.data(), codes.tokens());
  Coded out{*build_codebook(h, spec), {}, {}};
  encode_all(codes, &out);
  return out;
}

void report(benchmark::State& state, const Codes& codes, int64_t coded_bytes) {
  const auto n =
      static_cast<int64_t>(codes.codes.size()) * static_cast<int64_t>(state.iterations());
  state.SetItemsProcessed(n);
  state.SetBytesProcessed(2 * n);
  if (coded_bytes > 0) {
    state.counters["bits_per_code"] =
        8.0 * static_cast<double>(coded_bytes) / static_cast<double>(codes.codes.size());
  }
}

void histogram(benchmark::State& state, Component component) {
  const Codes& codes = codes_of(component);
  for (auto _ : state) {
    CodeHistogram h(component, codes.head_dim);
    h.add(codes.codes.data(), codes.tokens());
    benchmark::DoNotOptimize(h.max_code());
  }
  report(state, codes, 0);
}

void build(benchmark::State& state, Component component) {
  const Codes& codes = codes_of(component);
  CodeHistogram h(component, codes.head_dim);
  h.add(codes.codes.data(), codes.tokens());
  for (auto _ : state) {
    Result<Codebook> c = build_codebook(h);
    benchmark::DoNotOptimize(c);
  }
}

void encode(benchmark::State& state, Component component, BlockMode mode) {
  const Codes& codes = codes_of(component);
  Coded coded = make_coded(codes, spec_of(mode, 1));
  for (auto _ : state) {
    encode_all(codes, &coded);
    benchmark::ClobberMemory();
  }
  report(state, codes, static_cast<int64_t>(coded.bytes.size()));
}

void decode(benchmark::State& state, Component component, CodebookSpec spec) {
  const Codes& codes = codes_of(component);
  const Coded coded = make_coded(codes, spec);
  std::vector<int16_t> back(codes.codes.size());
  for (auto _ : state) {
    for (size_t b = 0; b + 1 < coded.offsets.size(); ++b) {
      int16_t* const to = back.data() + static_cast<int64_t>(b) * kBlockTokens * codes.head_dim;
      const Status s = decode_block(coded.bytes.data() + coded.offsets[b],
                                    coded.offsets[b + 1] - coded.offsets[b], {&coded.codebook, 1},
                                    {to, nullptr, kBlockTokens, codes.head_dim});
      if (!s) return state.SkipWithError(s.message().c_str());
    }
    benchmark::ClobberMemory();
  }
  if (back != codes.codes) state.SkipWithError("decoded codes differ");
  report(state, codes, static_cast<int64_t>(coded.bytes.size()));
}

// One byte a code: the codes of the step fit.
std::vector<char> as_bytes(const Codes& codes) {
  return {codes.codes.begin(), codes.codes.end()};
}

void zstd_encode(benchmark::State& state, Component component) {
  const Codes& codes = codes_of(component);
  const std::vector<char> plain = as_bytes(codes);
  std::vector<char> packed(ZSTD_compressBound(plain.size()));
  const std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> context(ZSTD_createCCtx(),
                                                                   ZSTD_freeCCtx);
  size_t size = 0;
  for (auto _ : state) {
    size = ZSTD_compressCCtx(context.get(), packed.data(), packed.size(), plain.data(),
                             plain.size(), 1);
    benchmark::ClobberMemory();
  }
  report(state, codes, static_cast<int64_t>(size));
}

void zstd_decode(benchmark::State& state, Component component) {
  const Codes& codes = codes_of(component);
  const std::vector<char> plain = as_bytes(codes);
  std::vector<char> packed(ZSTD_compressBound(plain.size())), back(plain.size());
  const size_t size = ZSTD_compress(packed.data(), packed.size(), plain.data(), plain.size(), 1);
  const std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context(ZSTD_createDCtx(),
                                                                   ZSTD_freeDCtx);
  for (auto _ : state) {
    ZSTD_decompressDCtx(context.get(), back.data(), back.size(), packed.data(), size);
    benchmark::ClobberMemory();
  }
  if (back != plain) state.SkipWithError("zstd failed");
  report(state, codes, static_cast<int64_t>(size));
}

constexpr Component kKey = Component::kKey, kValue = Component::kValue;

BENCHMARK_CAPTURE(histogram, keys, kKey);
BENCHMARK_CAPTURE(histogram, values, kValue);
BENCHMARK_CAPTURE(build, keys, kKey);
BENCHMARK_CAPTURE(build, values, kValue);
BENCHMARK_CAPTURE(encode, keys_pair, kKey, BlockMode::kPair);
BENCHMARK_CAPTURE(encode, values_pair, kValue, BlockMode::kPair);
BENCHMARK_CAPTURE(encode, keys_single, kKey, BlockMode::kSingle);
BENCHMARK_CAPTURE(decode, keys_single_table, kKey, spec_of(BlockMode::kSingle, 1));
BENCHMARK_CAPTURE(decode, values_single_table, kValue, spec_of(BlockMode::kSingle, 1));
BENCHMARK_CAPTURE(decode, keys_pair_table, kKey, spec_of(BlockMode::kPair, 1));
BENCHMARK_CAPTURE(decode, values_pair_table, kValue, spec_of(BlockMode::kPair, 1));
BENCHMARK_CAPTURE(decode, keys_pair_table_2_streams, kKey, spec_of(BlockMode::kPair, 2));
BENCHMARK_CAPTURE(zstd_encode, keys, kKey);
BENCHMARK_CAPTURE(zstd_encode, values, kValue);
BENCHMARK_CAPTURE(zstd_decode, keys, kKey);
BENCHMARK_CAPTURE(zstd_decode, values, kValue);

}  // namespace
}  // namespace tierkv

BENCHMARK_MAIN();

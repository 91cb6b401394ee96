// SPDX-License-Identifier: Apache-2.0
// KVComp's Figures 9 to 11 on this GPU: the two matrix-vector products of a decoding step over
// coded blocks in one kernel, in several kernels, and over the plain fp16 cache in cuBLAS.
//
//   bench_matvec --halves FILE [--out FILE] [--commit HASH] [--replays N]
//                [--setting NAME] [--relative STEP] [--tokens N]
//
// FILE comes from bench/coded_codes.py --halves: keys and values of one layer. They are quantised
// as in KVComp (bench/gpu/matvec_cache.cuh), with one codebook for the component, and coded in two
// ways: for the tree walk as the paper has it, and for tables. Rows take their blocks from the
// heads in turn, every row from another place on. Calls of a graph read different bytes.
#include "bench/gpu/matvec_runs.cuh"

namespace tierkv::bench {
namespace {

// Sequences x q heads / kv heads.
constexpr MatvecSetting kSettings[] = {
    {"1 x 32/32", 1, 32, 1}, {"1 x 32/8", 1, 8, 4}, {"1 x 64/8", 1, 8, 8}, {"8 x 32/8", 8, 8, 4}};
constexpr int32_t kContexts[] = {2048, 4096, 8192, 16384, 32768};
constexpr double kRelative[] = {0.02, 0.05, 0.1, 0.15, 0.2, 0.3};

struct Options {
  std::string halves, out, commit = "unknown", setting;
  int replays = 0, tokens = 0;
  double relative = 0;
};

Options parse(int argc, char** argv) {
  Options o;
  std::string replays = "9", tokens = "0", relative = "0";
  read_options(argc, argv,
               {{"--halves", &o.halves},
                {"--out", &o.out},
                {"--commit", &o.commit},
                {"--setting", &o.setting},
                {"--relative", &relative},
                {"--tokens", &tokens},
                {"--replays", &replays}});
  o.replays = std::atoi(replays.c_str());
  o.tokens = std::atoi(tokens.c_str());
  o.relative = std::atof(relative.c_str());
  if (o.halves.empty()) fail("--halves FILE is needed");
  return o;
}

// One way to code a matrix, and what is measured with it.
struct Coding {
  Rung rung;
  std::unique_ptr<Blocks> blocks;
  std::unique_ptr<DeviceBlocks> device;
  std::unique_ptr<Device<uint16_t>> units;
};

class Figures {
 public:
  Figures(const Options& options, std::FILE* out) : options_(options), out_(out) {
    check(cudaStreamCreateWithFlags(&bench_.stream, cudaStreamNonBlocking), "stream");
    check_blas(cublasCreate(&bench_.blas), "create");
    check_blas(cublasSetStream(bench_.blas, bench_.stream), "stream");
    // Its own workspace, so that it can be captured.
    check_blas(cublasSetWorkspace(bench_.blas, workspace_.get(), kBlasWorkspace), "workspace");
    bench_.replays = options.replays;
    const size_t most = size_t{kMostItems} * kBlockTokens * kMatvecDims;
    bench_.codes = std::make_unique<Device<int16_t>>(most);
    bench_.decoded = std::make_unique<Device<uint16_t>>(most);
  }
  ~Figures() { cublasDestroy(bench_.blas); }

  void run(const DumpCodes& dump, Component component) {
    const std::vector<int16_t>& bits = dump.layers[0].component[static_cast<int32_t>(component)];
    const std::vector<uint16_t> halves(bits.begin(), bits.end());
    std::unique_ptr<Device<uint16_t>> plain;
    for (double relative : kRelative) {
      if (options_.relative > 0 && options_.relative != relative) continue;
      const RelativeMatrix matrix = quantise(dump, halves, component, relative);
      const Coding tree =
          encode(matrix, component, {"tree walk", BlockMode::kSingle, 14, 1, 0, TreeForm::kLoop});
      // Pairs hold 32 levels.
      const Coding table =
          31 * relative >= 1
              ? encode(matrix, component, {"pair 10 bits x16 /2", BlockMode::kPair, 10, 2, 4})
              : encode(matrix, component, {"single 10 bits x16 /2", BlockMode::kSingle, 10, 2, 4});
      if (tree.blocks == nullptr || table.blocks == nullptr) fail("not these codes");
      if (plain == nullptr) {
        plain = spread_halves(dump, halves, sources_of(*table.blocks, matrix, component));
      }
      for (const MatvecSetting& setting : kSettings) {
        if (!options_.setting.empty() && options_.setting != setting.name) continue;
        for (int32_t tokens : kContexts) {
          if (options_.tokens > 0 && options_.tokens != tokens) continue;
          const MatvecSize size{setting, tokens};
          if (size.blocks() <= kMostItems) {
            measure(size, component, relative, matrix, tree, table, plain->get());
          }
        }
      }
    }
  }

 private:
  static constexpr size_t kBlasWorkspace = size_t{32} << 20;

  static Coding encode(const RelativeMatrix& m, Component component, const Rung& rung) {
    Coding c{rung, nullptr, nullptr, nullptr};
    auto blocks = make_blocks(m.shape, m.layer, component, rung);
    if (!blocks) return c;
    c.blocks = std::make_unique<Blocks>(std::move(*blocks));
    c.device = std::make_unique<DeviceBlocks>(*c.blocks);
    c.units = std::make_unique<Device<uint16_t>>(
        units_of(sources_of(*c.blocks, m, component), m, component));
    return c;
  }

  // Queries of a unit normal distribution; weights of a softmax over such scores.
  static std::vector<uint16_t> inputs(const MatvecSize& size, Component component) {
    std::vector<uint16_t> x = random_query(size.x_count(component));
    if (component == Component::kKey) return x;
    const auto tokens = static_cast<size_t>(size.tokens);
    for (size_t first = 0; first < x.size(); first += tokens) {
      double sum = 0;
      for (size_t i = 0; i < tokens; ++i) sum += std::exp(half_to_float(x[first + i]));
      for (size_t i = 0; i < tokens; ++i) {
        x[first + i] =
            float_to_half(static_cast<float>(std::exp(half_to_float(x[first + i])) / sum));
      }
    }
    return x;
  }

  void timing(const char* name, const Timing& t) {
    std::fprintf(out_, ", \"%s\": {\"median\": %.3f, \"p10\": %.3f, \"p90\": %.3f}", name, t.median,
                 t.low, t.high);
  }

  void measure(const MatvecSize& size, Component component, double relative,
               const RelativeMatrix& matrix, const Coding& tree, const Coding& table,
               const uint16_t* plain) {
    const Device<uint16_t> x(inputs(size, component));
    bench_.blas_y = std::make_unique<Device<uint16_t>>(size.y_count(component));
    const BlasTiming blas = time_blas(bench_, size, component, plain, x.get());
    const double codes = double{kMostItems} * kBlockTokens * kMatvecDims;
    std::fprintf(out_,
                 "%s\n  {\"component\": \"%s\", \"setting\": \"%s\", \"columns\": %d, "
                 "\"tokens\": %d, \"relative\": %.2f, \"fp16_mb\": %.3f, \"unit_bits\": %.3f, "
                 "\"relative_error\": %.5f, \"blas\": \"%s\"",
                 first_ ? "" : ",", component == Component::kKey ? "keys" : "values",
                 size.setting.name, size.setting.columns, size.tokens, relative,
                 1e-6 * size.fp16_bytes(), component == Component::kKey ? 0.5 : 0.25,
                 std::sqrt(matrix.squared_error / matrix.squared_norm),
                 blas.form == 1 ? "gemv" : "gemm");
    first_ = false;
    timing("blas_us", blas.best);
    double fused[2];
    for (const Coding* coding : {&tree, &table}) {
      const MatvecCase c{component, *coding->blocks, *coding->device, *coding->units, coding->rung};
      std::vector<float> y;
      const Timing one = time_fused(bench_, size, c, x.get(), &y);
      const PipelineTiming many = time_pipeline(bench_, size, c, x.get(), blas.form);
      // fp16's rounding of values and results, each 2^-12 in the mean, and room for sums.
      const double difference = relative_difference(y, bench_.blas_y->read());
      if (!(difference < 2e-3)) fail("one kernel and several disagree");
      std::fprintf(out_, ", \"%s\": {\"rung\": \"%s\", \"bits\": %.4f, \"difference\": %.2e",
                   coding == &tree ? "tree" : "table", coding->rung.name,
                   8.0 * static_cast<double>(coding->blocks->bytes.size()) / codes, difference);
      timing("one_us", one);
      timing("several_us", many.total);
      timing("decode_us", many.decode);
      std::fprintf(out_, "}");
      fused[coding == &table] = one.median;
    }
    std::fprintf(out_, "}");
    std::fprintf(stderr,
                 "%s %s %5d tokens, %.2f: blas %.1f us, tree %.1f us, %s %.1f us, %.0f GB/s\n",
                 component == Component::kKey ? "keys  " : "values", size.setting.name, size.tokens,
                 relative, blas.best.median, fused[0], table.rung.name, fused[1],
                 1e-3 * size.fp16_bytes() / fused[1]);
  }

  const Options& options_;
  std::FILE* out_;
  Device<uint8_t> workspace_{kBlasWorkspace};
  MatvecBench bench_;
  bool first_ = true;
};

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const DumpCodes dump = read_codes(options.halves);
  std::FILE* out = options.out.empty() ? stdout : std::fopen(options.out.c_str(), "w");
  if (out == nullptr) fail("cannot write " + options.out);
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  std::fprintf(out,
               "{\"schema\": \"tierkv.bench.matvec/1\", \"gpu\": \"%s\", \"commit\": \"%s\", "
               "\"head_dim\": %d, \"replays\": %d, \"results\": [",
               device.name, options.commit.c_str(), kMatvecDims, options.replays);
  Figures figures(options, out);
  for (Component component : {Component::kKey, Component::kValue}) figures.run(dump, component);
  std::fprintf(out, "\n]}\n");
  return std::fclose(out) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  return tierkv::bench::run(argc, argv);
}

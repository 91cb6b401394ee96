// SPDX-License-Identifier: Apache-2.0
// The rungs of bench/baselines/rungs beside the product's kernel and the floor, in BitDecoding's
// settings (its section VI): Single is one long sequence, Batches equal lengths in contiguous
// pages, Page pages scattered at random.
//
//   bench_rungs [--out FILE] [--commit HASH] [--only TEXT] [--replays N]
//
// Graph replay over enough disjoint sets of pages that none is in L2 when its turn comes again, as
// in bench_attention. Every rung's output is compared with the product's; bench_rungs exits with 1
// when one differs by more than kMostDeviation. `product` has its plan made before; `step` is plan
// and attend. Before the cases: what the tensor cores do without memory.
#include <cmath>
#include <cstring>
#include <string>

#include "bench/baselines/rungs/rung_kernel.h"
#include "bench/baselines/rungs/rungs.h"
#include "bench/gpu/attention_run.cuh"
#include "bench/gpu/rung_cases.cuh"
#include "bench/gpu/tensor_rates.cuh"

namespace tierkv::bench {
namespace {

constexpr size_t kMaxQueryValues = 1ull << 22;
constexpr int32_t kHeadDim = 128;
constexpr double kMostDeviation = 4e-3;  // both are within 2e-3 of the double reference

struct Options {
  std::string out, commit = "unknown", only;
  int replays = 15;
};

struct RungTime {
  Timing timing;
  int32_t splits = 0;
  double deviation = 0;  // relative, from the product's output
};

struct Measured {
  int64_t bytes = 0;
  Timing floor, product, step;
  RungTime rungs[kRungs];
};

struct Bench : AttentionBench {
  Options options;
  uint8_t* rung_workspace = nullptr;
  bool agrees = true;  // every rung with the product
};

// What the last call left, which is poisoned.
std::vector<float> read_out(const Bench& b, const AttentionRun& run) {
  const size_t values = static_cast<size_t>(run.count()) * run.config().num_q_heads * kHeadDim;
  std::vector<uint16_t> halves(values);
  check(cudaStreamSynchronize(b.stream), "synchronise");
  check(cudaMemcpy(halves.data(), b.out, values * 2, cudaMemcpyDeviceToHost), "read out");
  check(cudaMemset(b.out, 0xff, values * 2), "poison out");
  std::vector<float> out(values);
  for (size_t i = 0; i < values; ++i) out[i] = half_to_float(halves[i]);
  return out;
}

double deviation(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - b[i];
    difference += d * d;
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(difference / norm);
}

RungTime time_rung(Bench& b, const AttentionRun& run, Rung rung,
                   const std::vector<float>& expected) {
  const Result<RungGrid> rung_plan = rung_grid(rung, run.config(), run.count());
  expect_ok(rung_plan.status(), rung_name(rung));
  const size_t bytes = rung_workspace_bytes(run.config(), *rung_plan, run.count());
  if (bytes > kWorkspaceBytes) {
    std::fprintf(stderr, "%s needs %zu bytes of workspace\n", rung_name(rung), bytes);
    std::exit(1);
  }
  check(cudaMemset(b.rung_workspace, 0, bytes), "cudaMemset");
  const auto launch = [&](int i) {
    const AttentionWorkspace memory{b.rung_workspace, bytes};
    const Status s = run_rung(rung, run.config(), *rung_plan, run.call(i), memory, b.stream);
    expect_ok(s, rung_name(rung));
  };
  RungTime t;
  t.splits = rung_plan->splits;
  launch(0);
  t.deviation = deviation(read_out(b, run), expected);
  b.agrees &= t.deviation < kMostDeviation;  // false for NaN
  t.timing = run.time(launch);
  return t;
}

Measured run_case(Bench& b, const RungCase& c) {
  const AttentionRun run(b, c.cache, grid_of(c.cache.config));
  Measured m;
  m.bytes = run.bytes();
  run.attend_set(0, false, Settled::kNothing);
  const std::vector<float> expected = read_out(b, run);
  m.floor = run.time_floor();
  m.product = run.time_attend(Settled::kNothing);
  m.step = run.time_step();
  for (int32_t r = kRungs - 1; r >= 0; --r) {
    const auto rung = static_cast<Rung>(r);
    if (rung == Rung::kDiffkv) {  // last: its pages take the place of ours
      for (int i = 0; i < run.sets(); ++i) {
        expect_ok(transcode_pages(run.config(), run.call(i), b.pool, b.stream), "transcode_pages");
      }
    }
    m.rungs[r] = time_rung(b, run, rung, expected);
  }
  return m;
}

void print_row(const RungCase& c, const Measured& m) {
  std::printf("%-28s floor %7.2f product %7.2f step %7.2f", c.name().c_str(), m.floor.median,
              m.product.median, m.step.median);
  for (int32_t r = 0; r < kRungs; ++r) {
    std::printf(" %s %.2f (%d, %.1e)", rung_name(static_cast<Rung>(r)), m.rungs[r].timing.median,
                m.rungs[r].splits, m.rungs[r].deviation);
  }
  std::printf("\n");
  std::fflush(stdout);
}

void write_timing(std::FILE* f, const char* name, const Timing& t) {
  std::fprintf(f, "\"%s_us\": {\"median\": %.3f, \"p10\": %.3f, \"p90\": %.3f}", name, t.median,
               t.low, t.high);
}

// What each rung's kernel takes of an SM, for 32/8 heads and K4V4.
void write_kernels(std::FILE* f, const Bench& b) {
  const AttentionConfig config = make_case("Single", {1, 4096}, kFormats[2], 8).cache.config;
  const auto shared = static_cast<int32_t>(b.device.sharedMemPerBlockOptin);
  std::fprintf(f, " \"kernels\": [\n");
  for (int32_t r = 0; r < kRungs; ++r) {
    const RungKernel k = rung_kernel(static_cast<Rung>(r), rung_shape(config, shared));
    cudaFuncAttributes a{};
    check(cudaFuncGetAttributes(&a, k.kernel), "cudaFuncGetAttributes");
    check(
        cudaFuncSetAttribute(k.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared_bytes),
        "cudaFuncSetAttribute");
    int per_sm = 0;
    check(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, k.kernel, k.threads, k.shared_bytes),
        "occupancy");
    std::fprintf(f,
                 "  {\"name\": \"%s\", \"registers\": %d, \"local_bytes\": %zu, \"shared_bytes\": "
                 "%d, \"threads\": %d, \"ctas_per_sm\": %d}%s\n",
                 rung_name(static_cast<Rung>(r)), a.numRegs, a.localSizeBytes, k.shared_bytes,
                 k.threads, per_sm, r + 1 < kRungs ? "," : "");
  }
  std::fprintf(f, " ],\n");
}

void write_result(std::FILE* f, const RungCase& c, const Measured& m) {
  std::fprintf(f,
               "  {\"setting\": \"%s\", \"heads\": \"%s\", \"shape\": \"%s\", \"format\": \"%s\", "
               "\"bytes\": %lld, ",
               c.setting.c_str(), c.heads.c_str(), c.shape.c_str(), c.format.c_str(),
               static_cast<long long>(m.bytes));
  write_timing(f, "floor", m.floor);
  std::fprintf(f, ", ");
  write_timing(f, "product", m.product);
  std::fprintf(f, ", ");
  write_timing(f, "step", m.step);
  std::fprintf(f, ", \"rungs\": {");
  for (int32_t r = 0; r < kRungs; ++r) {
    std::fprintf(f, "\"%s\": {\"splits\": %d, \"deviation\": %.2e, ",
                 rung_name(static_cast<Rung>(r)), m.rungs[r].splits, m.rungs[r].deviation);
    write_timing(f, "attend", m.rungs[r].timing);
    std::fprintf(f, "}%s", r + 1 < kRungs ? ", " : "}}");
  }
}

void write_json(const Bench& b, const TensorRates& rates, const std::vector<RungCase>& cases,
                const std::vector<Measured>& all) {
  std::FILE* f = std::fopen(b.options.out.c_str(), "w");
  if (f == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", b.options.out.c_str());
    std::exit(1);
  }
  std::fprintf(f,
               "{\"schema\": \"tierkv.bench.rungs/1\", \"gpu\": \"%s\", \"sms\": %d, \"commit\": "
               "\"%s\",\n \"head_dim\": %d, \"replays\": %d, \"ceiling_gbps\": %.1f,\n",
               b.device.name, b.device.multiProcessorCount, b.options.commit.c_str(), kHeadDim,
               b.options.replays, b.ceiling_gbps);
  write_tensor(f, rates);
  write_kernels(f, b);
  std::fprintf(f, " \"results\": [\n");
  for (size_t i = 0; i < all.size(); ++i) {
    write_result(f, cases[i], all[i]);
    std::fprintf(f, "%s\n", i + 1 < all.size() ? "," : "");
  }
  std::fprintf(f, " ]}\n");
  std::fclose(f);
}

Options parse_options(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (has_value && std::strcmp(argv[i], "--out") == 0) {
      o.out = argv[++i];
    } else if (has_value && std::strcmp(argv[i], "--commit") == 0) {
      o.commit = argv[++i];
    } else if (has_value && std::strcmp(argv[i], "--only") == 0) {
      o.only = argv[++i];
    } else if (has_value && std::strcmp(argv[i], "--replays") == 0) {
      o.replays = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: %s [--out FILE] [--commit HASH] [--only TEXT] [--replays N]\n",
                   argv[0]);
      std::exit(2);
    }
  }
  return o;
}

int run(int argc, char** argv) {
  Bench b;
  b.options = parse_options(argc, argv);
  prepare(b, b.options.replays, kMaxQueryValues);
  b.rung_workspace = device_alloc<uint8_t>(kWorkspaceBytes);
  std::printf("%s, %d SMs, ceiling %.0f GB/s\n", b.device.name, b.device.multiProcessorCount,
              b.ceiling_gbps);
  const TensorRates rates = measure_tensor_cores(
      {b.stream, b.device.multiProcessorCount, b.options.replays, b.pool, b.q});
  b.agrees &= rates.is_right;
  std::printf("per us and SM: %.0f mma m16n8k16", rates.mma_per_us);
  for (const WgmmaRate& w : rates.wgmma) {
    std::printf(", %.0f wgmma m64n8k16 (%s)", w.per_us, w.name);
  }
  std::printf("\n");
  for (const auto& a : rates.arithmetic) {
    std::printf("k%dv%d arithmetic: %.2f tiles per us and SM, %.0f GB/s\n", a.bits.k, a.bits.v,
                a.tiles_per_us, a.gbps);
  }
  std::vector<RungCase> cases;
  std::vector<Measured> all;
  for (const RungCase& c : rung_cases()) {
    if (c.name().find(b.options.only) == std::string::npos) continue;
    cases.push_back(c);
    all.push_back(run_case(b, c));
    print_row(c, all.back());
  }
  if (!b.options.out.empty()) write_json(b, rates, cases, all);
  if (!b.agrees) std::fprintf(stderr, "a rung's output is not the product's\n");
  return b.agrees ? 0 : 1;
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  return tierkv::bench::run(argc, argv);
}

// SPDX-License-Identifier: Apache-2.0
// Decoding, encoding and attention over entropy-coded blocks, with the codes of real caches.
//
//   bench_coded --codes FILE [--out FILE] [--commit HASH] [--replays N]
//               [--rung NAME] [--layer N] [--shape BATCHxTOKENS] [--only attention|codec]
//
// FILE comes from bench/coded_codes.py. Rows of a cache take their blocks from the layer's heads in
// turn, every row from another place on, so that a call reads as many different bytes as a real
// one; one codebook for the keys and one for the values of the layer. 32 q heads, 8 kv heads, a raw
// window of 64 tokens in every row. Beside each time: a kernel that only reads the same bytes.
#include "bench/gpu/coded_runs.cuh"

namespace tierkv::bench {
namespace {

constexpr Shape kShapes[] = {{64, 4096}, {8, 32768}, {64, 16384}, {1, 32768}, {1, 131072}};

struct Options {
  std::string codes, out, commit = "unknown", rung, shape, only;
  int replays = 0, layer = -1;
};

Options parse(int argc, char** argv) {
  Options o;
  std::string replays = "15", layer = "-1";
  read_options(argc, argv,
               {{"--codes", &o.codes},
                {"--out", &o.out},
                {"--commit", &o.commit},
                {"--rung", &o.rung},
                {"--shape", &o.shape},
                {"--only", &o.only},
                {"--replays", &replays},
                {"--layer", &layer}});
  o.replays = std::atoi(replays.c_str());
  o.layer = std::atoi(layer.c_str());
  if (o.codes.empty()) fail("--codes FILE is needed");
  return o;
}

bool wants(const Options& o, const Shape& shape) {
  return o.shape.empty() ||
         o.shape == std::to_string(shape.batch) + "x" + std::to_string(shape.tokens);
}

void run_layer(CodedReport* to, const Options& o, const DumpCodes& dump, int32_t layer) {
  for (const Rung& rung : kRungs) {
    if (!o.rung.empty() && o.rung != rung.name) continue;
    const LayerCodes& codes = dump.layers[static_cast<size_t>(layer)];
    const auto keys = make_blocks(dump, codes, Component::kKey, rung);
    const auto values = make_blocks(dump, codes, Component::kValue, rung);
    if (!keys || !values) {
      std::fprintf(stderr, "%s layer %d: not these codes\n", rung.name, layer);
      continue;
    }
    const DeviceBlocks device_keys(*keys), device_values(*values);
    const CodedCase c{rung, layer, *keys, *values, device_keys, device_values};
    for (const Shape& shape : kShapes) {
      if (wants(o, shape) && o.only != "codec" && is_attended(rung)) run_attention(to, c, shape);
    }
    if (o.only == "attention") continue;
    for (Component component : {Component::kKey, Component::kValue}) {
      run_decode(to, c, component);
      if (!is_attended(rung) || layer != 0) continue;
      for (const bool counter : {false, true}) run_encode(to, c, component, counter);
    }
  }
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const DumpCodes dump = read_codes(options.codes);
  CodedReport report;
  report.out = options.out.empty() ? stdout : std::fopen(options.out.c_str(), "w");
  if (report.out == nullptr) fail("cannot write " + options.out);
  report.replays = options.replays;
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  check(cudaStreamCreateWithFlags(&report.stream, cudaStreamNonBlocking), "stream");
  report.sms = device.multiProcessorCount;
  const Device<uint32_t> sink(1);
  report.sink = sink.get();
  std::fprintf(report.out,
               "{\"schema\": \"tierkv.bench.coded/1\", \"gpu\": \"%s\", \"commit\": \"%s\", "
               "\"head_dim\": 128, \"q_heads\": 32, \"kv_heads\": 8, \"window\": %d, "
               "\"replays\": %d, \"results\": [",
               device.name, options.commit.c_str(), kWindow, options.replays);
  for (const Shape& shape : kShapes) {
    if (int64_t{shape.batch} * shape.tokens > 64 * 4096) continue;  // the pool's size
    for (int32_t bits : {16, 4}) {
      if (wants(options, shape) && options.only != "codec") run_pages(&report, shape, bits);
    }
  }
  for (size_t layer = 0; layer < dump.layers.size(); ++layer) {
    if (options.layer >= 0 && options.layer != static_cast<int32_t>(layer)) continue;
    run_layer(&report, options, dump, static_cast<int32_t>(layer));
  }
  std::fprintf(report.out, "\n]}\n");
  return std::fclose(report.out) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  return tierkv::bench::run(argc, argv);
}

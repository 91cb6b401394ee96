// SPDX-License-Identifier: Apache-2.0
// Decoders of Huffman codes on the GPU, without anything behind them: KVComp's array tree, a loop
// over the bits of each code word, and lookups in a table, of single codes and of pairs.
//
//   bench_tree [--out FILE] [--commit HASH] [--only NAME] [--replays N] [--seed N]
//
// Codes are rounded Laplace numbers of about 2 bits. Every decoder writes a byte a code. What it
// writes is compared with the host's digits before it is timed.
#include "bench/baselines/tree/tree_decode.h"
#include "bench/gpu/codec_bench.cuh"

namespace tierkv::bench {
namespace {

// Different blocks, and copies of all of them that lie apart: more than an L2 cache holds.
constexpr int32_t kBlocks = 2048, kCopies = 16;
constexpr double kSpread = 0.72;
constexpr struct {
  const char* name;
  DecodeForm form;
  BlockMode mode;
} kDecoders[] = {{"array tree", DecodeForm::kArrayTree, BlockMode::kSingle},
                 {"loop over bits", DecodeForm::kTreeLoop, BlockMode::kSingle},
                 {"table, single codes", DecodeForm::kTable, BlockMode::kSingle},
                 {"table, pairs", DecodeForm::kTable, BlockMode::kPair}};

// Blocks of one codebook on the device.
struct World {
  TreeBlocks blocks;
  TreeDecode call;

  World(const std::vector<int16_t>& codes, BlockMode mode) {
    const auto book = tree_codebook(codes, mode, mode == BlockMode::kPair ? 10 : 8);
    require(book.status());
    auto made = make_tree_blocks(codes, *book);
    require(made.status());
    blocks = std::move(*made);
    std::vector<uint8_t> bytes;
    std::vector<uint32_t> units;
    for (uint32_t c = 0; c < kCopies; ++c) {
      bytes.insert(bytes.end(), blocks.bytes.begin(), blocks.bytes.end());
      for (int32_t i = 0; i < kBlocks; ++i) {
        units.push_back(c * blocks.units.back() + blocks.units[i]);
      }
    }
    units.push_back(kCopies * blocks.units.back());
    call.bytes = device_array(bytes);
    call.units = device_array(units);
    const std::vector<uint16_t> tree = build_tree(*book);
    call.tree = device_array(tree);
    call.tree_entries = static_cast<int32_t>(tree.size());
    call.codebook = device_codebook(*book);
    call.codebook.table = device_array(device_table(*book));
    call.num_blocks = kCopies * kBlocks;
    call.most_bytes = blocks.most_bytes;
  }
  int64_t codes() const { return int64_t{call.num_blocks} * kTreeBlockCodes; }
  double bits() const {
    return static_cast<double>(blocks.payload_bits) / kBlocks / kTreeBlockCodes;
  }
};

// Decodes once over poison and stops where a digit is not the host's.
void check_digits(const World& world, DecodeForm form, const char* name, cudaStream_t stream) {
  const size_t words = world.blocks.digits.size();
  check(cudaMemsetAsync(world.call.digits, 0xee, world.codes(), stream), "poison");
  require(decode_by_form(world.call, form, stream));
  check(cudaStreamSynchronize(stream), name);
  std::vector<uint32_t> found(words);
  for (int32_t c = 0; c < kCopies; ++c) {
    check(
        cudaMemcpy(found.data(), world.call.digits + c * words, words * 4, cudaMemcpyDeviceToHost),
        "download");
    if (found == world.blocks.digits) continue;
    std::fprintf(stderr, "bench_tree: %s: digits that are not the host's\n", name);
    std::exit(1);
  }
}

int main_of(int argc, char** argv) {
  uint32_t seed = 17;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--seed") seed = static_cast<uint32_t>(std::atoi(argv[i + 1]));
  }
  Bench bench(read_options(argc, argv));
  const std::vector<int16_t> codes = laplace_codes(kBlocks, kSpread, seed);
  World single(codes, BlockMode::kSingle), pairs(codes, BlockMode::kPair);
  void* digits = nullptr;
  check(cudaMalloc(&digits, static_cast<size_t>(single.codes())), "digits");
  for (const auto& d : kDecoders) {
    if (!bench.wants(d.name)) continue;
    World& world = d.mode == BlockMode::kPair ? pairs : single;
    world.call.digits = static_cast<uint32_t*>(digits);
    check_digits(world, d.form, d.name, bench.stream());
    char shape[64];
    std::snprintf(shape, sizeof(shape), "%d blocks, %.3f bits", world.call.num_blocks,
                  world.bits());
    Measured m{d.name,
               shape,
               int64_t{kCopies} * static_cast<int64_t>(world.blocks.bytes.size()),
               world.codes(),
               {}};
    m.time = time_graph(bench.stream(), 1, bench.replays(),
                        [&](int) { require(decode_by_form(world.call, d.form, bench.stream())); });
    bench.add(m);
    std::printf("%57s %9.1f G codes/s\n", "",
                1e-3 * static_cast<double>(world.codes()) / m.time.median);
  }
  bench.write_json();
  return 0;
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  return tierkv::bench::main_of(argc, argv);
}

// SPDX-License-Identifier: Apache-2.0
// Attention over coded blocks, with the codes of real caches.
//
//   bench_weighted_attention --codes FILE [--out FILE] [--commit HASH] [--replays N] [--layer N]
//                            [--shape BATCHxTOKENS] [--only NAME]
//
// FILE comes from bench/weighted_codes.py. Rows of a cache take their blocks from the layer's heads
// in turn, every row from another place on; one codebook for the keys and one for the values of the
// layer. 32 q heads, 8 kv heads; the blocks begin behind 4 sinks. Beside each time: a kernel that
// only reads the same bytes.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "attention/coded/coded_attention.h"
#include "attention/coded/weighted_tables.h"
#include "bench/gpu/gpu_timing.cuh"
#include "codec/host/coded/coded_block.h"
#include "codec/host/coded/weighted_books.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kHeads = 8, kColumns = 4, kSinks = 4;
constexpr int32_t kMostItems = 32768;  // blocks that lie apart: 64 x 4096 tokens of 8 heads
constexpr struct Shape {
  int32_t batch, tokens;
} kShapes[] = {{64, 4096}, {8, 32768}, {1, 32768}, {1, 131072}};

struct Variant {
  const char* name;
  int32_t max_length, streams;
  RopePairing pairing;
};
constexpr Variant kVariants[] = {
    {"rope, 10 bits x16 /2", 10, 2, RopePairing::kHalves},
    {"rope, 10 bits x16", 10, 1, RopePairing::kHalves},
    {"rope, 11 bits x8 /2", 11, 2, RopePairing::kHalves},
    {"no rope, 11 bits x8 /2", 11, 2, RopePairing::kNone},
    {"no rope, 10 bits x16 /2", 10, 2, RopePairing::kNone},
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "bench_weighted_attention: %s\n", what.c_str());
  std::exit(1);
}

// Every argument is a name and its value.
struct NamedOption {
  const char* name;
  std::string* value;
};
void read_options(int argc, char** argv, const std::vector<NamedOption>& known) {
  for (int i = 1; i < argc; i += 2) {
    const auto option = std::find_if(known.begin(), known.end(), [&](const NamedOption& o) {
      return std::string(o.name) == argv[i];
    });
    if (option == known.end()) fail(std::string("no option ") + argv[i]);
    if (i + 1 == argc) fail(std::string(argv[i]) + " needs a value");
    *option->value = argv[i + 1];
  }
}

template <class T>
class Device {
 public:
  explicit Device(const std::vector<T>& from) : Device(from.size()) {
    check(cudaMemcpy(memory_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
  }
  explicit Device(size_t count) : count_(count) {
    check(cudaMalloc(&memory_, count * sizeof(T) + 16), "cudaMalloc");
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(memory_); }
  T* get() const { return memory_; }
  std::vector<T> read() const {
    std::vector<T> x(count_);
    check(cudaMemcpy(x.data(), memory_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return x;
  }

 private:
  T* memory_ = nullptr;
  size_t count_;
};

struct Options {
  std::string codes, out, commit = "unknown", shape, only;
  int replays = 0, layer = -1;
};
Options parse(int argc, char** argv) {
  Options o;
  std::string replays = "9", layer = "-1";
  read_options(argc, argv,
               {{"--codes", &o.codes},
                {"--out", &o.out},
                {"--commit", &o.commit},
                {"--shape", &o.shape},
                {"--only", &o.only},
                {"--replays", &replays},
                {"--layer", &layer}});
  o.replays = std::atoi(replays.c_str());
  o.layer = std::atoi(layer.c_str());
  if (o.codes.empty()) fail("--codes FILE is needed");
  return o;
}

struct Codes {
  std::vector<int16_t> codes;     // [heads, tokens, head_dim]
  std::vector<int8_t> exponents;  // [heads, tokens]
};
struct Dump {
  int32_t heads = 0, tokens = 0, head_dim = 0;
  std::vector<std::vector<Codes>> layers;  // [layers][2]
};
Dump read_dump(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) fail("cannot open " + path);
  int32_t head[4];
  if (std::fread(head, 4, 4, file) != 4) fail("not a file of codes");
  Dump dump{head[1], head[2], head[3], {}};
  const size_t rows = static_cast<size_t>(head[1]) * static_cast<size_t>(head[2]);
  for (int32_t layer = 0; layer < head[0]; ++layer) {
    std::vector<Codes> both(2);
    for (Codes& c : both) {
      c.codes.resize(rows * static_cast<size_t>(head[3]));
      c.exponents.resize(rows);
      if (std::fread(c.codes.data(), 2, c.codes.size(), file) != c.codes.size() ||
          std::fread(c.exponents.data(), 1, rows, file) != rows) {
        fail("the file is cut short");
      }
    }
    dump.layers.push_back(std::move(both));
  }
  std::fclose(file);
  return dump;
}

// The blocks of one component of a layer, 64 tokens and the first 60 of them.
struct Unique {
  Codebook book;
  std::vector<std::vector<uint8_t>> whole, first;
  int32_t largest = 0;
  double exceptions = 0;

  Unique(const Dump& dump, const Codes& from, Component component, const Variant& v) {
    std::vector<RowCodes> rows;
    for (int32_t h = 0; h < dump.heads; ++h) {
      rows.push_back({from.codes.data() + int64_t{h} * dump.tokens * dump.head_dim, dump.tokens});
    }
    BookSpec spec;
    spec.books = 1;
    spec.code.mode = BlockMode::kPair;
    spec.code.max_length = v.max_length;
    spec.code.streams_per_lane = v.streams;
    auto choice = choose_books(component, dump.head_dim, rows, spec);
    if (!choice.is_ok()) fail(choice.status().message());
    book = choice->family.books.front();
    for (int32_t h = 0; h < dump.heads; ++h) {
      for (int32_t t = 0; t + kBlockTokens <= dump.tokens; t += kBlockTokens) {
        const int64_t at = int64_t{h} * dump.tokens + t;
        for (const bool all : {true, false}) {
          std::vector<uint8_t> bytes;
          const int32_t tokens = kBlockTokens - (all ? 0 : kSinks);
          const Status s = encode_block({from.codes.data() + at * dump.head_dim,
                                         from.exponents.data() + at, tokens, dump.head_dim},
                                        choice->family.books, nullptr, &bytes);
          if (!s) fail(s.message());
          const BlockHeader h0 = load_header(bytes.data());
          if (!is_raw_mode(h0.mode))
            largest = std::max(largest, static_cast<int32_t>(bytes.size()));
          if (all) exceptions += h0.exceptions;
          (all ? whole : first).push_back(std::move(bytes));
        }
      }
    }
    exceptions /= static_cast<double>(whole.size());
  }
};

// kMostItems of them, as the rows of a shape have them.
struct Laid {
  Device<uint8_t> bytes;
  Device<CodedBlockRef> refs;
  Device<uint32_t> table;
  int64_t size;

  static std::pair<std::vector<uint8_t>, std::vector<CodedBlockRef>> lay(const Unique& u,
                                                                         int32_t heads,
                                                                         int32_t per_row) {
    std::vector<uint8_t> bytes;
    std::vector<CodedBlockRef> refs;
    const auto per_head = static_cast<int32_t>(u.whole.size()) / heads;
    for (int32_t i = 0; i < kMostItems; ++i) {
      const int32_t row = i / 64,
                    at = row % heads * per_head + (row / heads * 37 + i % 64) % per_head;
      const auto& b = (i % per_row == 0 ? u.first : u.whole)[static_cast<size_t>(at)];
      refs.push_back(
          {static_cast<uint32_t>(bytes.size() / 16), static_cast<uint32_t>(b.size() / 16)});
      bytes.insert(bytes.end(), b.begin(), b.end());
    }
    return {bytes, refs};
  }
  Laid(const Unique& u, std::pair<std::vector<uint8_t>, std::vector<CodedBlockRef>> from)
      : bytes(from.first),
        refs(from.second),
        table(device_table(u.book)),
        size(static_cast<int64_t>(from.first.size())) {}

  CodedComponent component(const Unique& u, const float* steps) const {
    CodedComponent c;
    c.bytes = bytes.get();
    c.blocks = refs.get();
    c.steps = steps;
    c.size = size;
    c.codebook = device_codebook(u.book);
    c.codebook.table = table.get();
    return c;
  }
};

struct Run {
  std::FILE* out;
  cudaStream_t stream;
  int replays, sms;
  uint32_t* sink;
  bool first = true;
};

std::vector<uint16_t> normal_halves(size_t count, float spread) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<uint16_t> x(count);
  for (uint16_t& h : x) h = float_to_half(normal(rng));
  return x;
}

void run_case(Run* run, const Dump& dump, int32_t layer, const Variant& v,
              const Unique (&unique)[2], Shape shape) {
  const int32_t dims = dump.head_dim, rows = shape.batch * kHeads, per_row = shape.tokens / 64;
  const int32_t sets = std::max(1, kMostItems / (rows * per_row));
  const Laid keys(unique[0], Laid::lay(unique[0], dump.heads, per_row)),
      values(unique[1], Laid::lay(unique[1], dump.heads, per_row));
  const float step = 0.1f;  // a key's weights are all 1
  Rope rope = Rope::plain(10000, dims);
  rope.pairing = v.pairing;
  if (v.pairing == RopePairing::kNone) rope = Rope{};
  auto table = make_rope_table(rope, dims, shape.tokens);
  if (!table.is_ok()) fail(table.status().message());
  auto turns = weighted_turns(*table, dims, kSinks);
  if (!turns.is_ok()) fail(turns.status().message());
  const auto channels = static_cast<size_t>(dims);
  const Device<uint16_t> key_means(normal_halves(channels, 0x1p-9f * 0.3f / step)),
      place(turns->place), block(turns->block);
  const Device<float> key_scales(std::vector<float>(channels, 0.5f));
  const Device<float> unit(std::vector<float>{0x1p10f * step}),
      value_step(std::vector<float>{step});
  std::vector<CodedRow> all;
  for (int32_t i = 0; i < rows * sets; ++i) {
    CodedRow r;
    r.coded_tokens = shape.tokens - kSinks;
    r.sink_tokens = kSinks;
    r.first_item = i % rows * coded_row_blocks(r.coded_tokens, r.sink_tokens);
    r.first_block = i * per_row % kMostItems;
    all.push_back(r);
  }
  const Device<CodedRow> device_rows(all);
  const size_t query = static_cast<size_t>(rows) * kColumns * static_cast<size_t>(dims);
  const Device<uint16_t> q(normal_halves(query, 1.0f)), out(query);
  const Device<float> lse(static_cast<size_t>(rows) * kColumns);
  const Device<StatusCode> status(static_cast<size_t>(rows));
  CodedAttention call;
  call.keys = keys.component(unique[0], unit.get());
  call.values = values.component(unique[1], value_step.get());
  call.weighted.key_scales = key_scales.get();
  call.weighted.key_means = key_means.get();
  call.weighted.place_turns = place.get();
  call.weighted.block_turns = block.get();
  call.weighted.num_block_turns = table->blocks;
  call.weighted.sink_tokens = kSinks;
  call.weighted.pairing = v.pairing;
  call.weighted.pairs = table->pairs;
  call.q = q.get();
  call.out = out.get();
  call.lse = lse.get();
  call.row_status = status.get();
  call.num_rows = rows;
  call.num_items = rows * coded_row_blocks(shape.tokens - kSinks, kSinks);
  call.num_blocks = kMostItems;
  call.num_steps = 1;
  call.columns = kColumns;
  call.head_dim = dims;
  call.sm_scale = static_cast<float>(1 / std::sqrt(dims));
  call.max_block_bytes = std::max(unique[0].largest, unique[1].largest);
  auto grid = coded_attention_grid(call);
  if (!grid.is_ok()) fail(grid.status().message());
  const Device<uint8_t> workspace(coded_attention_workspace_bytes(call, *grid));
  call.workspace = workspace.get();
  const int launches = std::max(sets, 2);
  const Timing t = time_graph(run->stream, launches, run->replays, [&](int i) {
    call.rows = device_rows.get() + static_cast<int64_t>(i % sets) * rows;
    const Status s = attend_coded(call, *grid, run->stream);
    if (!s) fail(s.message());
  });
  for (StatusCode code : status.read()) {
    if (code != StatusCode::kOk) fail("a row was refused");
  }
  const double symbols = 2.0 * rows * shape.tokens * dims;
  const int64_t bytes = (keys.size + values.size) / kMostItems * rows * per_row;
  const Timing floor = time_graph(run->stream, launches, run->replays, [&](int i) {
    for (const Laid* from : {&keys, &values}) {
      const int64_t share = from->size / sets / 16 * 16;
      launch_read_only(from->bytes.get() + i % sets * share, share, run->sms, run->sink,
                       run->stream);
    }
  });
  std::fprintf(
      run->out,
      "%s\n  {\"kind\": \"weighted\", \"variant\": \"%s\", \"head_dim\": %d, \"layer\": %d, "
      "\"shape\": \"%dx%d\", \"bytes\": %lld, \"bits_per_code\": %.4f, "
      "\"exceptions_per_key_block\": %.2f, \"exceptions_per_value_block\": %.2f, "
      "\"warps\": %d, \"copies\": %d, \"slot_bytes\": %d, "
      "\"floor_us\": {\"median\": %.3f, \"p10\": %.3f, \"p90\": %.3f}, "
      "\"attend_us\": {\"median\": %.3f, \"p10\": %.3f, \"p90\": %.3f}, "
      "\"tera_codes_per_s\": %.3f}",
      run->first ? "" : ",", v.name, dims, layer, shape.batch, shape.tokens,
      static_cast<long long>(bytes), 8.0 * static_cast<double>(bytes) / symbols,
      unique[0].exceptions, unique[1].exceptions, grid->warps, 1 << grid->copies_log,
      grid->slot_bytes, floor.median, floor.low, floor.high, t.median, t.low, t.high,
      symbols / t.median * 1e-6);
  run->first = false;
  std::fprintf(
      stderr, "%-24s d%d layer %d %dx%d: %.2f bits, %d warps x%d, %.1f us, %.2f T, floor %.1f\n",
      v.name, dims, layer, shape.batch, shape.tokens, 8.0 * static_cast<double>(bytes) / symbols,
      grid->warps, 1 << grid->copies_log, t.median, symbols / t.median * 1e-6, floor.median);
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const Dump dump = read_dump(options.codes);
  Run run{options.out.empty() ? stdout : std::fopen(options.out.c_str(), "w"), nullptr,
          options.replays, 0, nullptr};
  if (run.out == nullptr) fail("cannot write " + options.out);
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  check(cudaStreamCreateWithFlags(&run.stream, cudaStreamNonBlocking), "stream");
  run.sms = device.multiProcessorCount;
  const Device<uint32_t> sink(1);
  run.sink = sink.get();
  std::fprintf(run.out,
               "{\"schema\": \"tierkv.bench.weighted/1\", \"gpu\": \"%s\", \"commit\": \"%s\", "
               "\"q_heads\": 32, \"kv_heads\": 8, \"sinks\": %d, \"replays\": %d, "
               "\"results\": [",
               device.name, options.commit.c_str(), kSinks, options.replays);
  for (size_t layer = 0; layer < dump.layers.size(); ++layer) {
    if (options.layer >= 0 && options.layer != static_cast<int>(layer)) continue;
    for (const Variant& v : kVariants) {
      if (!options.only.empty() && options.only != v.name) continue;
      const Unique unique[2] = {{dump, dump.layers[layer][0], Component::kKey, v},
                                {dump, dump.layers[layer][1], Component::kValue, v}};
      for (const Shape& shape : kShapes) {
        const std::string name = std::to_string(shape.batch) + "x" + std::to_string(shape.tokens);
        if (!options.shape.empty() && options.shape != name) continue;
        run_case(&run, dump, static_cast<int32_t>(layer), v, unique, shape);
      }
    }
  }
  std::fprintf(run.out, "\n]}\n");
  return std::fclose(run.out) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  return tierkv::bench::run(argc, argv);
}

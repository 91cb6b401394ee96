// Decoding and attention over entropy-coded blocks, with the codes of real caches.
//
//   bench_coded --codes FILE [--out FILE] [--commit HASH] [--replays N]
//
// FILE comes from bench/coded_codes.py. Rows of a cache take their blocks from the layer's heads in
// turn, every row from another place on, so that a call reads as many different bytes as a real
// one; one codebook for the keys and one for the values of the layer. 32 q heads, 8 kv heads, a raw
// window of 64 tokens in every row. Beside each time: a kernel that only reads the same bytes.
#include <cmath>
#include <memory>
#include <string>

#include "attention/coded_attention.h"
#include "bench/attention_cache.cuh"
#include "codec/coded_block.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kKvHeads = 8, kColumns = 4, kWindow = 64;
constexpr int32_t kMostItems = 32768;  // of blocks, in a call: 64 x 4096 tokens of 8 heads

struct Options {
  std::string codes, out, commit = "unknown";
  int replays = 15;
};

// Codes of one layer.
struct LayerCodes {
  std::vector<int16_t> component[2];  // [heads, tokens, head_dim]
};
struct DumpCodes {
  int32_t heads = 0, tokens = 0, head_dim = 0;
  std::vector<LayerCodes> layers;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "bench_coded: %s\n", what.c_str());
  std::exit(1);
}

DumpCodes read_codes(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) fail("cannot open " + path);
  int32_t head[4];
  if (std::fread(head, 4, 4, file) != 4 || head[3] != 128 || head[0] < 1 || head[1] < 1 ||
      head[2] < kBlockTokens) {
    fail("not a file of codes");
  }
  DumpCodes codes{head[1], head[2], head[3], std::vector<LayerCodes>(head[0])};
  const size_t count = static_cast<size_t>(head[1]) * head[2] * head[3];
  for (LayerCodes& layer : codes.layers) {
    for (std::vector<int16_t>& c : layer.component) {
      c.resize(count);
      if (std::fread(c.data(), 2, count, file) != count) fail("the file is cut short");
    }
  }
  std::fclose(file);
  return codes;
}

struct Rung {
  const char* name;
  int32_t max_length, streams, copies_log;
};
constexpr Rung kRungs[] = {
    {"pair 9 bits x32 /2", 9, 2, 5},  {"pair 10 bits x16 /2", 10, 2, 4},
    {"pair 10 bits x16", 10, 1, 4},   {"pair 11 bits x8 /2", 11, 2, 3},
    {"pair 11 bits x1 /2", 11, 2, 0}, {"pair 11 bits x1", 11, 1, 0},
    {"pair 12 bits x1 /2", 12, 2, 0},
};

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

// One component of kMostItems blocks, in the order of a call's rows.
struct Blocks {
  Codebook book;
  std::vector<uint8_t> bytes;
  std::vector<CodedBlockRef> refs;
  std::vector<CodedGroup> groups;
  int32_t largest = 0;
  // Of `unique` different ones.
  int64_t exceptions = 0, raw = 0;
  double unique = 0;
};

Blocks make_blocks(const DumpCodes& dump, const LayerCodes& layer, Component component,
                   const Rung& rung) {
  const std::vector<int16_t>& codes = layer.component[static_cast<int32_t>(component)];
  const int64_t head_codes = int64_t{dump.tokens} * dump.head_dim;
  CodeHistogram histogram(component, dump.head_dim);
  for (int32_t h = 0; h < dump.heads; ++h) histogram.add(&codes[h * head_codes], dump.tokens);
  CodebookSpec spec;
  spec.mode = BlockMode::kPair;
  spec.max_length = rung.max_length;
  spec.streams_per_lane = rung.streams;
  Blocks blocks;
  auto book = build_codebook(histogram, spec);
  if (!book.is_ok()) fail(book.status().message());
  blocks.book = *book;
  const int32_t per_head = dump.tokens / kBlockTokens;
  std::vector<std::vector<uint8_t>> unique(static_cast<size_t>(dump.heads) * per_head);
  blocks.unique = static_cast<double>(unique.size());
  for (size_t i = 0; i < unique.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i / per_head) * head_codes +
                       static_cast<int64_t>(i % per_head) * kBlockTokens * dump.head_dim;
    if (!encode_block(&codes[at], kBlockTokens, dump.head_dim, blocks.book, &unique[i]).is_ok()) {
      fail("encode_block");
    }
    const CodedBlockHeader h = load_header(unique[i].data());
    blocks.exceptions += h.exceptions;
    blocks.raw += is_raw_mode(h.mode);
    if (!is_raw_mode(h.mode)) {
      blocks.largest = std::max(blocks.largest, static_cast<int32_t>(unique[i].size()));
    }
  }
  for (int32_t i = 0; i < kMostItems; ++i) {
    // 64 blocks of a row lie together; rows begin 37 blocks further each.
    const int32_t row = i / 64, head = row % dump.heads;
    const int32_t at = (row / dump.heads * 37 + i % 64) % per_head;
    const std::vector<uint8_t>& b = unique[static_cast<size_t>(head) * per_head + at];
    CodedGroup group;
    group.offset = static_cast<int64_t>(blocks.bytes.size());
    group.codes = int64_t{i} * kBlockTokens * dump.head_dim;
    group.bytes = static_cast<int32_t>(b.size());
    group.tokens = kBlockTokens;
    blocks.groups.push_back(group);
    blocks.refs.push_back(
        {static_cast<uint32_t>(group.offset / 16), static_cast<uint32_t>(b.size() / 16)});
    blocks.bytes.insert(blocks.bytes.end(), b.begin(), b.end());
  }
  return blocks;
}

// A component on the device.
struct DeviceBlocks {
  explicit DeviceBlocks(const Blocks& from)
      : bytes(from.bytes),
        refs(from.refs),
        groups(from.groups),
        table(device_table(from.book)),
        steps(std::vector<float>{0.02f}),
        means(std::vector<float>(128, 0.1f)) {
    component.bytes = bytes.get();
    component.blocks = refs.get();
    component.steps = steps.get();
    component.means = means.get();
    component.size = static_cast<int64_t>(from.bytes.size());
    component.codebook = device_codebook(from.book);
    component.codebook.table = table.get();
  }
  Device<uint8_t> bytes;
  Device<CodedBlockRef> refs;
  Device<CodedGroup> groups;
  Device<uint32_t> table;
  Device<float> steps, means;
  CodedComponent component;
};

struct Shape {
  int32_t batch, tokens;
};
constexpr Shape kShapes[] = {{64, 4096}, {8, 32768}, {1, 32768}};

void print_timing(std::FILE* out, const char* name, const Timing& t) {
  std::fprintf(out, "\"%s\": {\"median\": %.3f, \"p10\": %.3f, \"p90\": %.3f}", name, t.median,
               t.low, t.high);
}

class Bench {
 public:
  Bench(const Options& options, std::FILE* out) : options_(options), out_(out), sink_(1) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0), "attribute");
  }

  void run_layer(const DumpCodes& dump, int32_t layer) {
    for (const Rung& rung : kRungs) {
      const Blocks keys = make_blocks(dump, dump.layers[layer], Component::kKey, rung);
      const Blocks values = make_blocks(dump, dump.layers[layer], Component::kValue, rung);
      const DeviceBlocks device_keys(keys), device_values(values);
      for (const Shape& shape : kShapes) {
        attend(rung, layer, shape, keys, values, device_keys, device_values);
      }
      decode(rung, layer, "keys", keys, device_keys);
      decode(rung, layer, "values", values, device_values);
    }
  }

  // Pages of the fixed-rate kernel in the same run.
  void run_pages(Shape shape, int32_t bits) {
    static const Device<uint8_t> pool(size_t{3} << 30);
    AttentionConfig config;
    config.num_q_heads = kKvHeads * kColumns;
    config.num_kv_heads = kKvHeads;
    config.head_dim = 128;
    config.sm_scale = 0.0883883;
    config.num_tiers = 1;
    config.tiers[0] = {0, token_wise_tier(bits, bits)};
    config.page_bytes = choose_page_size({config.tiers[0].format}, 128)->page_bytes;
    CacheShape cache_shape;
    cache_shape.config = config;
    cache_shape.sequences.assign(static_cast<size_t>(shape.batch), {{shape.tokens, 0, 0}});
    const Cache cache(cache_shape, pool.get(), int64_t{3} << 30, 1, int64_t{192} << 20, stream_);
    auto grid = attention_grid(config);
    if (!grid.is_ok()) fail(grid.status().message());
    const size_t bytes = attention_workspace_bytes(config, *grid, shape.batch);
    std::vector<std::unique_ptr<Device<uint8_t>>> workspaces;
    const size_t query = static_cast<size_t>(shape.batch) * config.num_q_heads * 128;
    const Device<uint16_t> q(std::vector<uint16_t>(query, 0x3400)), out(query);
    const int sets = std::min(cache.sets(), 8);
    for (int i = 0; i < sets; ++i) {
      workspaces.push_back(std::make_unique<Device<uint8_t>>(std::vector<uint8_t>(bytes, 0)));
      const Status s = plan_attention(config, *grid, cache.table(i), {nullptr, shape.batch},
                                      {workspaces.back()->get(), bytes}, stream_);
      if (!s) fail(s.message());
    }
    check(cudaStreamSynchronize(stream_), "plan");
    const Timing t = time_graph(stream_, sets, options_.replays, [&](int i) {
      AttendCall call;
      call.table = cache.table(i);
      call.pages = cache.pages();
      call.batch = {nullptr, shape.batch};
      call.q = q.get();
      call.out = out.get();
      call.plan_is_settled = true;
      const Status s = tierkv::attend(config, *grid, call, {workspaces[i]->get(), bytes}, stream_);
      if (!s) fail(s.message());
    });
    const double symbols = 2.0 * shape.batch * shape.tokens * kKvHeads * 128;
    begin_result("pages");
    std::fprintf(out_, "\"bits\": %d, \"shape\": \"%dx%d\", \"bytes\": %lld, ", bits, shape.batch,
                 shape.tokens, static_cast<long long>(cache.bytes()));
    print_timing(out_, "attend_us", t);
    std::fprintf(out_, ", \"tera_symbols_per_s\": %.3f}", symbols / t.median * 1e-6);
    std::fprintf(stderr, "pages %2d bits %dx%d: %.1f us, %.2f T\n", bits, shape.batch, shape.tokens,
                 t.median, symbols / t.median * 1e-6);
  }

 private:
  void begin_result(const char* kind) {
    std::fprintf(out_, "%s\n  {\"kind\": \"%s\", ", first_ ? "" : ",", kind);
    first_ = false;
  }

  void attend(const Rung& rung, int32_t layer, Shape shape, const Blocks& keys,
              const Blocks& values, const DeviceBlocks& device_keys,
              const DeviceBlocks& device_values) {
    const int32_t rows = shape.batch * kKvHeads, blocks = shape.tokens / kBlockTokens;
    const int sets = kMostItems / (rows * blocks);
    std::vector<CodedRow> all;
    const int32_t window_bytes = 2 * kWindow * 128 * 2;
    for (int32_t i = 0; i < rows * sets; ++i) {
      CodedRow row;
      row.first_item = i % rows * coded_row_items(shape.tokens, kWindow);
      row.first_block = i * blocks;
      row.coded_tokens = shape.tokens;
      row.window_tokens = kWindow;
      row.window = int64_t{i} * window_bytes;
      all.push_back(row);
    }
    const Device<CodedRow> device_rows(all);
    const Device<uint8_t> window(
        std::vector<uint8_t>(static_cast<size_t>(rows) * sets * window_bytes, 0x30));
    const size_t query = static_cast<size_t>(rows) * kColumns * 128;
    const Device<uint16_t> q(std::vector<uint16_t>(query, 0x3400)), out(query);
    const Device<float> lse(static_cast<size_t>(rows) * kColumns);
    const Device<StatusCode> status(static_cast<size_t>(rows));
    CodedAttention call;
    call.keys = device_keys.component;
    call.values = device_values.component;
    call.window = window.get();
    call.window_size = int64_t{rows} * sets * window_bytes;
    call.q = q.get();
    call.out = out.get();
    call.lse = lse.get();
    call.row_status = status.get();
    call.num_rows = rows;
    call.num_items = rows * coded_row_items(shape.tokens, kWindow);
    call.num_blocks = kMostItems;
    call.num_steps = 1;
    call.columns = kColumns;
    call.head_dim = 128;
    call.sm_scale = 0.0883883f;
    call.max_block_bytes = std::max({keys.largest, values.largest, 16});
    auto grid = coded_attention_grid(call, rung.copies_log);
    if (!grid.is_ok()) fail(grid.status().message());
    const Device<uint8_t> workspace(coded_attention_workspace_bytes(call, *grid));
    call.workspace = workspace.get();
    const int launches = std::max(sets, 2);
    const Timing t = time_graph(stream_, launches, options_.replays, [&](int i) {
      call.rows = device_rows.get() + static_cast<int64_t>(i % sets) * rows;
      const Status s = attend_coded(call, *grid, stream_);
      if (!s) fail(s.message());
    });
    for (StatusCode code : status.read()) {
      if (code != StatusCode::kOk) fail("a row was refused");
    }
    const int64_t coded =
        (static_cast<int64_t>(keys.bytes.size()) + static_cast<int64_t>(values.bytes.size())) /
        sets;
    const int64_t window_total = int64_t{rows} * window_bytes;
    const Timing floor = time_graph(stream_, launches, options_.replays, [&](int i) {
      const int64_t k = static_cast<int64_t>(keys.bytes.size()) / sets / 16 * 16;
      const int64_t v = static_cast<int64_t>(values.bytes.size()) / sets / 16 * 16;
      launch_read_only(device_keys.bytes.get() + i % sets * k, k, sms_, sink_.get(), stream_);
      launch_read_only(device_values.bytes.get() + i % sets * v, v, sms_, sink_.get(), stream_);
    });
    const double symbols = 2.0 * rows * shape.tokens * 128;
    begin_result("attention");
    std::fprintf(out_,
                 "\"rung\": \"%s\", \"layer\": %d, \"shape\": \"%dx%d\", \"bytes\": %lld, "
                 "\"bits_per_symbol\": %.4f, \"exceptions_per_key_block\": %.2f, "
                 "\"exceptions_per_value_block\": %.2f, \"raw_blocks\": %lld, "
                 "\"copies\": %d, \"slots\": %d, \"slot_bytes\": %d, ",
                 rung.name, layer, shape.batch, shape.tokens,
                 static_cast<long long>(coded + window_total), 8.0 * coded / symbols,
                 per_block(keys), per_block(values), static_cast<long long>(keys.raw + values.raw),
                 1 << grid->copies_log, grid->slots_per_warp, grid->slot_bytes);
    print_timing(out_, "floor_us", floor);
    std::fprintf(out_, ", ");
    print_timing(out_, "attend_us", t);
    std::fprintf(out_, ", \"tera_symbols_per_s\": %.3f}", symbols / t.median * 1e-6);
    std::fprintf(
        stderr,
        "%-20s layer %d %dx%d: %.2f bits, x%d, %d slots of %d, %.1f us, %.2f T, floor %.1f\n",
        rung.name, layer, shape.batch, shape.tokens, 8.0 * coded / symbols, 1 << grid->copies_log,
        grid->slots_per_warp, grid->slot_bytes, t.median, symbols / t.median * 1e-6, floor.median);
  }

  static double per_block(const Blocks& b) { return static_cast<double>(b.exceptions) / b.unique; }

  void decode(const Rung& rung, int32_t layer, const char* component, const Blocks& blocks,
              const DeviceBlocks& device) {
    const size_t values = size_t{kMostItems} * kBlockTokens * 128;
    const Device<uint16_t> out(values);
    const Device<StatusCode> status(kMostItems);
    CodedDecode call;
    call.bytes = device.bytes.get();
    call.groups = device.groups.get();
    call.values = out.get();
    call.steps = device.steps.get();
    call.means = device.means.get();
    call.status = status.get();
    call.codebook = device.component.codebook;
    call.size = device.component.size;
    call.token_stride = 128;
    call.num_groups = kMostItems;
    call.num_steps = 1;
    call.head_dim = 128;
    call.max_block_bytes = std::max(blocks.raw > 0 ? 8208 : 16, blocks.largest);
    const Timing t = time_graph(stream_, 2, options_.replays, [&](int) {
      const Status s = decode_coded(call, stream_);
      if (!s) fail(s.message());
    });
    for (StatusCode code : status.read()) {
      if (code != StatusCode::kOk) fail("a block was refused");
    }
    begin_result("decode");
    std::fprintf(out_, "\"rung\": \"%s\", \"layer\": %d, \"component\": \"%s\", ", rung.name, layer,
                 component);
    print_timing(out_, "decode_us", t);
    std::fprintf(out_, ", \"output_gb_per_s\": %.1f}", 2e-3 * values / t.median);
    std::fprintf(stderr, "%-20s layer %d decode %s to fp16: %.1f us, %.0f GB/s\n", rung.name, layer,
                 component, t.median, 2e-3 * values / t.median);
  }

  const Options& options_;
  std::FILE* out_;
  cudaStream_t stream_ = nullptr;
  int sms_ = 0;
  Device<uint32_t> sink_;
  bool first_ = true;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--codes") o.codes = argv[i + 1];
    if (name == "--out") o.out = argv[i + 1];
    if (name == "--commit") o.commit = argv[i + 1];
    if (name == "--replays") o.replays = std::atoi(argv[i + 1]);
  }
  if (o.codes.empty()) fail("--codes FILE is needed");
  return o;
}

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const DumpCodes dump = read_codes(options.codes);
  std::FILE* out = options.out.empty() ? stdout : std::fopen(options.out.c_str(), "w");
  if (out == nullptr) fail("cannot write " + options.out);
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "device");
  std::fprintf(out,
               "{\"schema\": \"tierkv.bench.coded/1\", \"gpu\": \"%s\", \"commit\": \"%s\", "
               "\"head_dim\": 128, \"q_heads\": 32, \"kv_heads\": 8, \"window\": %d, "
               "\"replays\": %d, \"results\": [",
               device.name, options.commit.c_str(), kWindow, options.replays);
  Bench bench(options, out);
  for (const Shape& shape : kShapes) {
    for (int32_t bits : {16, 4}) bench.run_pages(shape, bits);
  }
  for (size_t layer = 0; layer < dump.layers.size(); ++layer) {
    bench.run_layer(dump, static_cast<int32_t>(layer));
  }
  std::fprintf(out, "\n]}\n");
  return std::fclose(out) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  return tierkv::bench::run(argc, argv);
}

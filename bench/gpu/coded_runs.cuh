// SPDX-License-Identifier: Apache-2.0
// What bench_coded measures: one function a measurement, each writes one result.
#pragma once

#include <memory>
#include <numeric>
#include <random>

#include "bench/baselines/coded/coded_encode.h"
#include "bench/gpu/attention_cache.cuh"
#include "bench/gpu/coded_blocks.cuh"

namespace tierkv::bench {

inline constexpr int32_t kKvHeads = 8, kColumns = 4, kWindow = 64;

struct Shape {
  int32_t batch, tokens;
};

// Where results go, and how they are timed.
struct CodedReport {
  std::FILE* out = nullptr;
  cudaStream_t stream = nullptr;
  int replays = 15, sms = 0;
  uint32_t* sink = nullptr;  // device
  bool first = true;

  void begin(const char* kind) {
    std::fprintf(out, "%s\n  {\"kind\": \"%s\", ", first ? "" : ",", kind);
    first = false;
  }
  void timing(const char* name, const Timing& t) const {
    std::fprintf(out, "\"%s\": {\"median\": %.3f, \"p10\": %.3f, \"p90\": %.3f}", name, t.median,
                 t.low, t.high);
  }
};

// A layer's blocks with one rung of the ladder.
struct CodedCase {
  const Rung& rung;
  int32_t layer;
  const Blocks &keys, &values;
  const DeviceBlocks &device_keys, &device_values;
};

// Pages of the fixed-rate kernel in the same run.
inline void run_pages(CodedReport* to, Shape shape, int32_t bits) {
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
  const Cache cache(cache_shape, pool.get(), int64_t{3} << 30, 1, int64_t{192} << 20, to->stream);
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
                                    {workspaces.back()->get(), bytes}, to->stream);
    if (!s) fail(s.message());
  }
  check(cudaStreamSynchronize(to->stream), "plan");
  const Timing t = time_graph(to->stream, sets, to->replays, [&](int i) {
    AttendCall call;
    call.table = cache.table(i);
    call.pages = cache.pages();
    call.batch = {nullptr, shape.batch};
    call.q = q.get();
    call.out = out.get();
    call.plan_is_settled = true;
    const Status s = tierkv::attend(config, *grid, call, {workspaces[i]->get(), bytes}, to->stream);
    if (!s) fail(s.message());
  });
  const double symbols = 2.0 * shape.batch * shape.tokens * kKvHeads * 128;
  to->begin("pages");
  std::fprintf(to->out, "\"bits\": %d, \"shape\": \"%dx%d\", \"bytes\": %lld, ", bits, shape.batch,
               shape.tokens, static_cast<long long>(cache.bytes()));
  to->timing("attend_us", t);
  std::fprintf(to->out, ", \"tera_symbols_per_s\": %.3f}", symbols / t.median * 1e-6);
  std::fprintf(stderr, "pages %2d bits %dx%d: %.1f us, %.2f T\n", bits, shape.batch, shape.tokens,
               t.median, symbols / t.median * 1e-6);
}

// The rows of `sets` calls, one after the other.
inline std::vector<CodedRow> make_rows(Shape shape, int32_t sets) {
  const int32_t rows = shape.batch * kKvHeads, blocks = shape.tokens / kBlockTokens;
  std::vector<CodedRow> all;
  for (int32_t i = 0; i < rows * sets; ++i) {
    CodedRow row;
    row.first_item = i % rows * coded_row_items(shape.tokens, kWindow);
    row.first_block = i * blocks;
    row.coded_tokens = shape.tokens;
    row.window_tokens = kWindow;
    row.first_page = i;
    row.mean = 0;
    all.push_back(row);
  }
  return all;
}

inline double per_block(const Blocks& b) {
  return static_cast<double>(b.exceptions) / b.unique;
}

// Of a unit normal distribution.
inline std::vector<uint16_t> random_query(size_t count) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<uint16_t> q(count);
  for (uint16_t& x : q) x = float_to_half(normal(rng));
  return q;
}

inline void run_attention(CodedReport* to, const CodedCase& c, Shape shape) {
  const int32_t rows = shape.batch * kKvHeads, blocks = shape.tokens / kBlockTokens;
  const int sets = std::max(1, kMostItems / (rows * blocks));
  const int32_t window_bytes = 2 * kWindow * 128 * 2;  // a page of each row
  const Device<CodedRow> device_rows(make_rows(shape, sets));
  std::vector<int32_t> pages(static_cast<size_t>(rows) * sets);
  std::iota(pages.begin(), pages.end(), 0);
  const Device<int32_t> window_pages(pages);
  const Device<uint8_t> window(
      std::vector<uint8_t>(static_cast<size_t>(rows) * sets * window_bytes, 0x30));
  const size_t query = static_cast<size_t>(rows) * kColumns * 128;
  const Device<uint16_t> q(random_query(query)), out(query);
  const Device<float> lse(static_cast<size_t>(rows) * kColumns);
  const Device<StatusCode> status(static_cast<size_t>(rows));
  CodedAttention call;
  call.keys = c.device_keys.component;
  call.values = c.device_values.component;
  call.window = window.get();
  call.window_size = int64_t{rows} * sets * window_bytes;
  call.window_pages = window_pages.get();
  call.window_page_bytes = window_bytes;
  call.num_window_pages = int64_t{rows} * sets;
  call.q = q.get();
  call.out = out.get();
  call.lse = lse.get();
  call.row_status = status.get();
  call.num_rows = rows;
  call.num_items = rows * coded_row_items(shape.tokens, kWindow);
  call.num_blocks = kMostRefs;
  call.num_steps = call.num_means = 1;
  call.columns = kColumns;
  call.head_dim = 128;
  call.sm_scale = 0.0883883f;
  call.max_block_bytes = std::max({c.keys.largest, c.values.largest, 16});
  auto grid = coded_attention_grid(call, c.rung.copies_log);
  if (!grid.is_ok() && grid.status().code() == StatusCode::kUnsupported) {
    std::fprintf(stderr, "%s layer %d: %s\n", c.rung.name, c.layer,
                 grid.status().message().c_str());
    return;
  }
  if (!grid.is_ok()) fail(grid.status().message());
  const Device<uint8_t> workspace(coded_attention_workspace_bytes(call, *grid));
  call.workspace = workspace.get();
  const int launches = std::max(sets, 2);
  const Timing t = time_graph(to->stream, launches, to->replays, [&](int i) {
    call.rows = device_rows.get() + static_cast<int64_t>(i % sets) * rows;
    const Status s = attend_coded(call, *grid, to->stream);
    if (!s) fail(s.message());
  });
  for (StatusCode code : status.read()) {
    if (code != StatusCode::kOk) fail("a row was refused");
  }
  const double symbols = 2.0 * rows * shape.tokens * 128;
  const auto bytes = static_cast<int64_t>(c.keys.bytes.size() + c.values.bytes.size());
  const int64_t coded = bytes * rows * blocks / kMostItems;
  const int64_t window_total = int64_t{rows} * window_bytes;
  const int turns = std::max(1, rows * blocks / kMostItems);
  const Timing floor = time_graph(to->stream, launches, to->replays, [&](int i) {
    for (const DeviceBlocks* from : {&c.device_keys, &c.device_values}) {
      const int64_t share = from->component.size / sets / 16 * 16;
      for (int turn = 0; turn < turns; ++turn) {
        launch_read_only(from->bytes.get() + i % sets * share, share, to->sms, to->sink,
                         to->stream);
      }
    }
  });
  to->begin("attention");
  std::fprintf(to->out,
               "\"rung\": \"%s\", \"layer\": %d, \"shape\": \"%dx%d\", \"bytes\": %lld, "
               "\"bits_per_symbol\": %.4f, \"exceptions_per_key_block\": %.2f, "
               "\"exceptions_per_value_block\": %.2f, \"raw_blocks\": %lld, "
               "\"copies\": %d, \"slots\": %d, \"slot_bytes\": %d, ",
               c.rung.name, c.layer, shape.batch, shape.tokens,
               static_cast<long long>(coded + window_total), 8.0 * coded / symbols,
               per_block(c.keys), per_block(c.values),
               static_cast<long long>(c.keys.raw + c.values.raw), 1 << grid->copies_log,
               grid->slots_per_warp, grid->slot_bytes);
  to->timing("floor_us", floor);
  std::fprintf(to->out, ", ");
  to->timing("attend_us", t);
  std::fprintf(to->out, ", \"tera_symbols_per_s\": %.3f}", symbols / t.median * 1e-6);
  std::fprintf(
      stderr, "%-20s layer %d %dx%d: %.2f bits, x%d, %d slots of %d, %.1f us, %.2f T, floor %.1f\n",
      c.rung.name, c.layer, shape.batch, shape.tokens, 8.0 * coded / symbols, 1 << grid->copies_log,
      grid->slots_per_warp, grid->slot_bytes, t.median, symbols / t.median * 1e-6, floor.median);
}

inline void run_decode(CodedReport* to, const CodedCase& c, Component component) {
  const bool is_key = component == Component::kKey;
  const char* name = is_key ? "keys" : "values";
  const Blocks& blocks = is_key ? c.keys : c.values;
  const DeviceBlocks& device = is_key ? c.device_keys : c.device_values;
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
  const Timing t = time_graph(to->stream, 2, to->replays, [&](int) {
    const Status s = decode(call, device, c.rung, to->stream);
    if (!s) fail(s.message());
  });
  for (StatusCode code : status.read()) {
    if (code != StatusCode::kOk) fail("a block was refused");
  }
  const double bits = 8.0 * static_cast<double>(blocks.bytes.size()) / static_cast<double>(values);
  to->begin("decode");
  std::fprintf(to->out,
               "\"rung\": \"%s\", \"layer\": %d, \"component\": \"%s\", "
               "\"bits_per_symbol\": %.4f, ",
               c.rung.name, c.layer, name, bits);
  to->timing("decode_us", t);
  std::fprintf(to->out, ", \"output_gb_per_s\": %.1f}", 2e-3 * values / t.median);
  std::fprintf(stderr, "%-20s layer %d decode %s to fp16: %.1f us, %.0f GB/s\n", c.rung.name,
               c.layer, name, t.median, 2e-3 * values / t.median);
}

// Where the host put the blocks, or by the paper's counter.
inline void run_encode(CodedReport* to, const CodedCase& c, Component component, bool counter) {
  const bool is_key = component == Component::kKey;
  const Blocks& blocks = is_key ? c.keys : c.values;
  const DeviceBlocks& device = is_key ? c.device_keys : c.device_values;
  std::vector<int16_t> all;
  for (const int16_t* from : blocks.codes) {
    all.insert(all.end(), from, from + kBlockTokens * 128);
  }
  const Device<int16_t> codes(all);
  const Device<CodedGroup> groups(blocks.groups);
  const Device<uint8_t> bytes(blocks.bytes.size());
  const Device<StatusCode> status(kMostItems);
  const Device<unsigned long long> cursor(1);
  CodedEncode call;
  call.codes = codes.get();
  call.bytes = bytes.get();
  call.groups = groups.get();
  call.status = status.get();
  call.codebook = device.component.codebook;
  call.cursor = counter ? cursor.get() : nullptr;
  call.size = static_cast<int64_t>(blocks.bytes.size());
  call.token_stride = 128;
  call.num_groups = kMostItems;
  call.head_dim = 128;
  const Timing t = time_graph(to->stream, 2, to->replays, [&](int) {
    if (counter) (void)cudaMemsetAsync(cursor.get(), 0, sizeof(unsigned long long), to->stream);
    const Status s = encode_coded(call, to->stream);
    if (!s) fail(s.message());
  });
  for (StatusCode code : status.read()) {
    if (code != StatusCode::kOk) fail("a group was refused");
  }
  if (!counter && bytes.read() != blocks.bytes) fail("not the host's bytes");
  if (counter && cursor.read()[0] != blocks.bytes.size()) fail("not as many bytes as the host's");
  const double symbols = 1.0 * kMostItems * kBlockTokens * 128;
  const char* name = is_key ? "keys" : "values";
  const char* where = counter ? "counter" : "given";
  to->begin("encode");
  std::fprintf(to->out,
               "\"rung\": \"%s\", \"layer\": %d, \"component\": \"%s\", \"places\": \"%s\", ",
               c.rung.name, c.layer, name, where);
  to->timing("encode_us", t);
  std::fprintf(to->out, ", \"giga_symbols_per_s\": %.1f}", 1e-3 * symbols / t.median);
  std::fprintf(stderr, "%-20s layer %d encode %s, places %s: %.1f us, %.0f G symbols/s\n",
               c.rung.name, c.layer, name, where, t.median, 1e-3 * symbols / t.median);
}

}  // namespace tierkv::bench

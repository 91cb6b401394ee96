// SPDX-License-Identifier: Apache-2.0
// An engine's cache: encoding by slots, plan, attention over block tables, decoding of ranges.
//
//   bench_engine [--out FILE] [--commit HASH] [--only TEXT] [--replays N]
//
// Times are of one call, all of its kernels, in a graph of calls for several layers.
#include <algorithm>
#include <numeric>
#include <random>

#include "bench/gpu/codec_bench.cuh"
#include "tierkv/engine.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kKvHeads = 8, kQHeads = 32, kDim = 128, kBlock = 64;
constexpr int32_t kPromptTokens = 8192, kRangeTokens = 16384;

struct Batch {
  int32_t sequences, tokens, queries, layers;
};
constexpr Batch kBatches[] = {
    {1, 32768, 1, 4}, {8, 8192, 1, 2}, {64, 4096, 1, 2}, {64, 4096, 4, 2}};

template <class T>
T* device_memory(int64_t count, const char* what) {
  void* p = nullptr;
  check(cudaMalloc(&p, std::max<int64_t>(count, 1) * sizeof(T)), what);
  check(cudaMemset(p, 0, std::max<int64_t>(count, 1) * sizeof(T)), what);
  return static_cast<T*>(p);
}

// A batch whose sequences' blocks lie in random order, in several layers.
class Cache {
 public:
  Cache(const TierFormat& format, const Batch& batch, std::mt19937& rng) : batch_(batch) {
    config.num_q_heads = kQHeads;
    config.num_kv_heads = kKvHeads;
    config.head_dim = kDim;
    config.format = format;
    config.dtype = DType::kBFloat16;
    config.sm_scale = 0.08838834764831845;
    config.max_sequences = batch.sequences;
    config.max_queries = batch.queries;
    config.max_blocks = batch.tokens / kBlock;
    const Result<EngineGrid> found = engine_grid(config);
    require(found.status());
    grid = *found;
    num_blocks_ = int64_t{batch.sequences} * config.max_blocks;
    table_.resize(num_blocks_);
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), rng);
    std::vector<int32_t> lens(batch.sequences, batch.tokens), starts(batch.sequences + 1);
    for (int32_t s = 0; s <= batch.sequences; ++s) starts[s] = s * batch.queries;
    std::vector<float> means(kKvHeads * kDim, 0.5f), reflections(means.size());
    require(engine_key_reflections(config, means.data(), reflections.data()));
    table = device_array(table_), lens_ = device_array(lens), starts_ = device_array(starts);
    reflections_ = device_array(reflections);
    const int64_t rows = std::max<int64_t>(kRangeTokens, batch.sequences * batch.queries);
    q_ = device_memory<uint16_t>(rows * kQHeads * kDim, "queries");
    out_ = device_memory<uint16_t>(rows * kQHeads * kDim, "outputs");
    k = device_memory<uint16_t>(kRangeTokens * kKvHeads * kDim, "keys");
    v = device_memory<uint16_t>(kRangeTokens * kKvHeads * kDim, "values");
    fill_elements<<<1024, 256>>>(q_, rows * kQHeads * kDim, 1, true);
    fill_elements<<<1024, 256>>>(k, kRangeTokens * kKvHeads * kDim, 2, true);
    fill_elements<<<1024, 256>>>(v, kRangeTokens * kKvHeads * kDim, 3, true);
    const size_t bytes = engine_workspace_bytes(config, grid);
    workspace = {device_memory<uint8_t>(static_cast<int64_t>(bytes), "workspace"), bytes};
    for (int32_t layer = 0; layer < batch.layers; ++layer) {
      blocks_.push_back(device_memory<uint8_t>(num_blocks_ * config.block_bytes(), "blocks"));
      fill(layer);
    }
  }
  ~Cache() {
    for (void* p : blocks_) cudaFree(p);
    for (void* p :
         {static_cast<void*>(table), static_cast<void*>(lens_), static_cast<void*>(starts_),
          static_cast<void*>(reflections_), static_cast<void*>(q_), static_cast<void*>(out_),
          static_cast<void*>(k), static_cast<void*>(v), workspace.memory}) {
      cudaFree(p);
    }
  }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  EngineLayer layer(int32_t i) const {
    return {blocks_[i % blocks_.size()], 0, num_blocks_, reflections_};
  }
  EngineBatch batch() const {
    EngineBatch b;
    b.block_table = table;
    b.table_columns = config.max_blocks;
    b.num_sequences = b.count = batch_.sequences;
    b.seq_lens = lens_;
    b.query_start_loc = starts_;
    b.queries = batch_.queries;
    b.num_blocks = num_blocks_;
    return b;
  }
  EngineAttend attend(int32_t i) const {
    EngineAttend a;
    a.batch = batch();
    a.layer = layer(i);
    a.q = q_;
    a.out = out_;
    a.num_tokens = int64_t{batch_.sequences} * batch_.queries;
    return a;
  }
  // Slots of tokens first .. of a sequence.
  std::vector<int64_t> slots(int32_t sequence, int32_t first, int32_t count) const {
    std::vector<int64_t> x;
    for (int32_t t = first; t < first + count; ++t) {
      x.push_back(int64_t{table_[sequence * config.max_blocks + t / kBlock]} * kBlock + t % kBlock);
    }
    return x;
  }
  EngineTokens tokens(const int64_t* on_device, int64_t count) const {
    EngineTokens t;
    t.k = k;
    t.v = v;
    t.slots = on_device;
    t.count = count;
    return t;
  }

  EngineConfig config;
  EngineGrid grid;
  AttentionWorkspace workspace;
  int32_t* table;
  uint16_t *k, *v;

 private:
  void fill(int32_t at) {
    for (int32_t s = 0; s < batch_.sequences; ++s) {
      for (int32_t t = 0; t < batch_.tokens; t += kPromptTokens) {
        const std::vector<int64_t> of = slots(s, t, std::min(kPromptTokens, batch_.tokens - t));
        int64_t* there = device_array(of);
        require(engine_encode(config, layer(at), tokens(there, static_cast<int64_t>(of.size())),
                              nullptr));
        check(cudaFree(there), "slots");
      }
    }
    check(cudaDeviceSynchronize(), "fill");
  }

  Batch batch_;
  int64_t num_blocks_ = 0;
  std::vector<int32_t> table_;
  std::vector<void*> blocks_;
  int32_t *lens_, *starts_;
  float* reflections_;
  uint16_t *q_, *out_;
};

void run_attend(Bench* bench, const std::string& name, const Batch& batch, const Cache& cache) {
  const std::string shape = std::to_string(batch.sequences) + " x " + std::to_string(batch.tokens) +
                            ", " + std::to_string(batch.queries) + " queries";
  const int64_t read =
      int64_t{batch.sequences} * batch.tokens / kBlock * cache.config.block_bytes();
  const int64_t queries = int64_t{batch.sequences} * batch.queries * kQHeads * kDim * 2;
  bench->run(
      {"plan " + name, shape, 0, 0, {}},
      [&](int) {
        require(
            engine_plan(cache.config, cache.grid, cache.batch(), cache.workspace, bench->stream()));
      },
      8);
  require(engine_plan(cache.config, cache.grid, cache.batch(), cache.workspace, bench->stream()));
  bench->run(
      {"attend " + name, shape, read + queries, queries, {}},
      [&](int layer) {
        require(engine_attend(cache.config, cache.grid, cache.attend(layer), cache.workspace,
                              bench->stream()));
      },
      8);
}

// A decode step's tokens, one of each sequence, and a prompt's.
void run_encode(Bench* bench, const std::string& name, const Batch& batch, const Cache& cache) {
  const int64_t token_bytes = cache.config.block_bytes() / kBlock, raw = 4 * kKvHeads * kDim;
  std::vector<int64_t> step;
  for (int32_t s = 0; s < batch.sequences; ++s) {
    step.push_back(cache.slots(s, batch.tokens - 1 - s % kBlock, 1)[0]);
  }
  std::vector<int64_t> prompt;
  for (int32_t s = 0; static_cast<int32_t>(prompt.size()) < kPromptTokens; ++s) {
    const int32_t left = kPromptTokens - static_cast<int32_t>(prompt.size());
    const std::vector<int64_t> more = cache.slots(s, 0, std::min(left, batch.tokens));
    prompt.insert(prompt.end(), more.begin(), more.end());
  }
  for (const std::vector<int64_t>* slots : {&step, &prompt}) {
    const auto count = static_cast<int64_t>(slots->size());
    int64_t* there = device_array(*slots);
    bench->run(
        {"encode " + name, std::to_string(count) + " tokens", count * raw, count * token_bytes, {}},
        [&](int layer) {
          require(engine_encode(cache.config, cache.layer(layer), cache.tokens(there, count),
                                bench->stream()));
        },
        8);
    check(cudaFree(there), "slots");
  }
}

void run_decode(Bench* bench, const std::string& name, const Cache& cache) {
  const int32_t starts[2] = {0, kRangeTokens};
  int32_t* there = device_array(std::vector<int32_t>(starts, starts + 2));
  EngineRanges r;
  r.block_table = cache.table;
  r.table_stride = cache.config.max_blocks;
  r.num_sequences = r.count = 1;
  r.starts = there;
  r.max_tokens = kRangeTokens;
  r.num_rows = kRangeTokens;
  r.k = cache.k;
  r.v = cache.v;
  bench->run(
      {"decode " + name,
       std::to_string(kRangeTokens) + " tokens",
       kRangeTokens / kBlock * cache.config.block_bytes(),
       int64_t{kRangeTokens} * 4 * kKvHeads * kDim,
       {}},
      [&](int layer) {
        require(engine_decode(cache.config, cache.layer(layer), r, bench->stream()));
      },
      4);
  check(cudaFree(there), "starts");
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv::bench;
  Bench bench(read_options(argc, argv));
  std::mt19937 rng(std::random_device{}());
  for (const char* name : {"k8v4", "k4v4", "k4v2n", "k16v16"}) {
    if (!bench.wants(name)) continue;
    const tierkv::TierFormat format = *tierkv::parse_tier_format(name);
    for (const Batch& batch : kBatches) {
      const Cache cache(format, batch, rng);
      run_attend(&bench, name, batch, cache);
      if (batch.sequences == 64 && batch.queries == 1) run_encode(&bench, name, batch, cache);
      if (batch.sequences == 1) run_decode(&bench, name, cache);
    }
  }
  bench.write_json();
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// The store on a device, at the shape of Llama-3-8B: 32 layers, 32/8 heads of 128 channels.
//
//   bench_kv_store [--out FILE] [--commit HASH] [--only coded|tiers|fp16|transfers] [--replays N]
//
// A step of 64 sequences of 4096 tokens in one CUDA graph, and of it begin() and attention alone; a
// prompt of 8192 tokens, a layer at a time, alone and with its queries; attention of 512 queries to
// one; fork and truncate; export and import, and beside them one pinned copy of the same bytes.
// Keys and values are random.
#include <chrono>
#include <cstring>
#include <memory>
#include <random>

#include "bench/gpu/codec_bench.cuh"
#include "codec/policy/profile.h"
#include "tierkv/kv_store.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kLayers = 32, kKvHeads = 8, kQHeads = 32, kDim = 128;
constexpr int32_t kSequences = 64, kTokens = 4096, kPrompt = 8192, kTurn = 512;
constexpr int64_t kTokenElements = int64_t{kKvHeads} * kDim;

// Queries of one size in all channels, keys without means.
std::shared_ptr<const Profile> make_profile() {
  auto profile = std::make_shared<Profile>();
  profile->model_id = "random";
  profile->num_layers = kLayers;
  profile->num_q_heads = kQHeads;
  profile->num_kv_heads = kKvHeads;
  profile->head_dim = kDim;
  profile->sm_scale = 0.08838834764831845;
  RowProfile row;
  row.key_mean.assign(kDim, 0.0f);
  row.value_mean.assign(kDim, 0.0f);
  row.key_mean_before_rope.assign(kDim, 0.0f);
  row.query_energy.assign(kDim, 1.0f);
  row.query_trace = kDim;
  row.value_signal = kDim;
  profile->rows.assign(int64_t{kLayers} * kKvHeads, row);
  profile->key_sensitivity.assign(profile->rows.size(), 1.0);  // heads alike: the usual steps
  return profile;
}

StoreConfig make_config(const std::string& format, int32_t sequences, int32_t max_tokens) {
  StoreConfig config;
  config.layout.num_layers = kLayers;
  config.layout.num_q_heads = kQHeads;
  config.layout.num_kv_heads = kKvHeads;
  config.layout.head_dim = kDim;
  config.layout.sm_scale = 0.08838834764831845;
  config.layout.dtype = DType::kBFloat16;
  config.rope = {Rope::plain(500000.0, kDim)};
  config.profile = make_profile();
  if (format == "tiers") {
    TierClass of;
    of.high = token_wise_tier(4, 4);
    of.low = token_wise_tier(4, 4);
    TiersFormat tiers;
    tiers.classes = {of};
    config.format = tiers;
  }
  if (format == "fp16") {
    config.format = TiersFormat{};
    for (int32_t l = 0; l < kLayers; ++l) config.raw_layers.push_back(l);
  }
  config.max_sequences = sequences;
  config.max_tokens = max_tokens;
  const int64_t raw = int64_t{sequences} * max_tokens * kLayers * kTokenElements * 4;
  config.memory_bytes = (format == "fp16" ? raw + raw / 8 : raw / 2) + (2ll << 30);
  return config;
}

class Cache {
 public:
  Cache(const StoreConfig& config, int32_t sequences, cudaStream_t stream) : stream_(stream) {
    Result<std::unique_ptr<KvStore>> made = KvStore::create_device(config, stream);
    require(made.status());
    store = std::move(*made);
    const int64_t most = std::max<int64_t>(int64_t{kPrompt}, sequences) * kTokenElements;
    k = allocate(most), v = allocate(most);
    const int64_t queries = std::max<int64_t>(int64_t{kPrompt}, sequences) * kQHeads * kDim;
    q = allocate(queries), out = allocate(std::max(sequences, kTurn) * int64_t{kQHeads} * kDim);
    fill_elements<<<1024, 256>>>(k, most, 2, true);
    fill_elements<<<1024, 256>>>(v, most, 3, true);
    fill_elements<<<1024, 256>>>(q, queries, 4, true);
    check(cudaDeviceSynchronize(), "fill");
  }
  ~Cache() {
    store.reset();
    for (uint16_t* x : {k, v, q, out}) cudaFree(x);
  }
  SequenceId add(int32_t tokens) {
    const Result<SequenceId> id = store->add_sequence();
    require(id.status());
    ids.push_back(*id);
    prompt(*id, tokens);
    return *id;
  }
  // query_stride: of the queries that come along; 0: none do.
  void prompt(SequenceId id, int32_t tokens, int32_t query_stride = 0) {
    require(store->begin({&id, 1}, tokens));
    for (int32_t l = 0; l < kLayers; ++l) append({&id, 1}, l, tokens, query_stride);
  }
  void append(SequenceList list, int32_t layer, int32_t tokens, int32_t query_stride = 0) {
    LayerAppend call;
    call.sequences = list;
    call.layer = layer;
    call.tokens = tokens;
    call.k = k;
    call.v = v;
    if (query_stride > 0) call.q = q, call.query_stride = query_stride;
    require(store->append(call));
  }
  void attend(SequenceList list, int32_t layer, bool counts = false, int32_t q_len = 1) {
    LayerAttend call;
    call.sequences = list;
    call.q_len = q_len;
    call.layer = layer;
    call.q = q;
    call.out = out;
    call.dtype = DType::kBFloat16;
    call.count_query = counts;
    require(store->attend(call));
  }
  SequenceList all() const { return {ids.data(), static_cast<int32_t>(ids.size())}; }

  std::unique_ptr<KvStore> store;
  std::vector<SequenceId> ids;
  uint16_t *k, *v, *q, *out;

 private:
  static uint16_t* allocate(int64_t count) {
    void* p = nullptr;
    check(cudaMalloc(&p, count * 2), "tokens");
    return static_cast<uint16_t*>(p);
  }
  cudaStream_t stream_;
};

Timing timing_of(std::vector<double> us) {
  std::sort(us.begin(), us.end());
  const auto at = [&](double share) {
    return us[static_cast<size_t>(share * static_cast<double>(us.size() - 1))];
  };
  Timing t;
  t.median = at(0.5), t.low = at(0.1), t.high = at(0.9);
  return t;
}

// An event of a graph, which events around its launch can be compared with.
void record_in_graph(cudaEvent_t event, cudaStream_t stream) {
  check(cudaEventRecordWithFlags(event, stream, cudaEventRecordExternal), "event");
}

// Times of a graph of what `capture` enqueues; `before` comes before each launch. `from` and `to`:
// events that it records, between which the time is taken; null: of the whole graph.
template <class Capture, class Before>
Timing time_replays(cudaStream_t stream, int replays, Capture&& capture, Before&& before,
                    cudaEvent_t from = nullptr, cudaEvent_t to = nullptr) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  capture();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "graph");
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  std::vector<double> us;
  for (int i = 0; i < replays + 2; ++i) {
    if (i > 0) before();
    check(cudaEventRecord(begin, stream), "event");
    check(cudaGraphLaunch(exec, stream), "launch");
    check(cudaEventRecord(end, stream), "event");
    check(cudaEventSynchronize(end), "event");
    float ms = 0;
    const bool is_part = from != nullptr;
    check(cudaEventElapsedTime(&ms, is_part ? from : begin, is_part ? to : end), "event");
    if (i > 1) us.push_back(1e3 * ms);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
  return timing_of(us);
}

template <class Work>
double microseconds(cudaStream_t stream, Work&& work) {
  check(cudaStreamSynchronize(stream), "wait");
  const auto begin = std::chrono::steady_clock::now();
  work();
  check(cudaStreamSynchronize(stream), "wait");
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

void run_steps(Bench* bench, const std::string& format) {
  Cache cache(make_config(format, kSequences, kTokens + 512), kSequences, bench->stream());
  // Lengths differ, so that blocks fill in different steps.
  int64_t tokens = 0;
  for (int32_t s = 0; s < kSequences; ++s) {
    const int32_t n = kTokens - s;
    cache.add(n);
    tokens += n;
  }
  require(cache.store->take_status());
  const Result<StoreUsage> usage = cache.store->usage();
  require(usage.status());
  const double held = static_cast<double>(usage->held_bytes()),
               raw = static_cast<double>(usage->raw_bytes);
  std::printf("%s: held %.1f %% of fp16, nominal %.1f %%\n", format.c_str(), 100 * held / raw,
              100 * static_cast<double>(usage->nominal_bytes) / raw);
  const std::string shape = "64 x 4096, 32 layers";
  const auto read = usage->nominal_bytes;
  const auto none = [] {};
  Measured m;
  for (const bool counts : {false, true}) {
    m = {counts ? "attention that counts, " + format : "attention alone, " + format,
         shape,
         read,
         0,
         {}};
    m.time = time_replays(
        bench->stream(), bench->replays(),
        [&] {
          for (int32_t l = 0; l < kLayers; ++l) cache.attend(cache.all(), l, counts);
        },
        none);
    bench->add(m);
  }
  const auto note = [&] { require(cache.store->note_replay(cache.all(), 1)); };
  m = {"step, " + format, shape, read, 0, {}};
  m.time = time_replays(
      bench->stream(), bench->replays() * 3,
      [&] {
        require(cache.store->begin(cache.all(), 1));
        for (int32_t l = 0; l < kLayers; ++l) {
          cache.append(cache.all(), l, 1);
          cache.attend(cache.all(), l);
        }
      },
      note);
  bench->add(m);
  cudaEvent_t from, to;
  check(cudaEventCreate(&from), "event");
  check(cudaEventCreate(&to), "event");
  m = {"begin, " + format, "16,384 rows", 0, 0, {}};
  m.time = time_replays(
      bench->stream(), bench->replays() * 3,
      [&] {
        record_in_graph(from, bench->stream());
        require(cache.store->begin(cache.all(), 1));
        record_in_graph(to, bench->stream());
        for (int32_t l = 0; l < kLayers; ++l) cache.append(cache.all(), l, 1);
      },
      note, from, to);
  bench->add(m);
  cudaEventDestroy(from), cudaEventDestroy(to);
  m = {"step without attention, " + format, shape, 0, 0, {}};
  m.time = time_replays(
      bench->stream(), bench->replays() * 3,
      [&] {
        require(cache.store->begin(cache.all(), 1));
        for (int32_t l = 0; l < kLayers; ++l) cache.append(cache.all(), l, 1);
      },
      note);
  bench->add(m);
  require(cache.store->take_status());

  const SequenceId first = cache.ids[0];
  std::vector<double> forks, cuts;
  for (int i = 0; i < bench->replays(); ++i) {
    require(cache.store->release(cache.ids.back()));
    SequenceId copy;
    forks.push_back(microseconds(bench->stream(), [&] { copy = *cache.store->fork(first); }));
    const int32_t n = *cache.store->num_tokens(copy);
    cuts.push_back(
        microseconds(bench->stream(), [&] { require(cache.store->truncate(copy, n - 4)); }));
    cache.ids.back() = copy;
  }
  m = {"fork, " + format, "4096 tokens, waited for", 0, 0, timing_of(forks)};
  bench->add(m);
  m = {"truncate in the window, " + format, "4 tokens, waited for", 0, 0, timing_of(cuts)};
  bench->add(m);
}

// The bytes of a sequence, pinned, each way in one copy: what the link gives.
void measure_link(Bench* bench, const std::string& format, int64_t bytes) {
  void *host = nullptr, *device = nullptr;
  check(cudaHostAlloc(&host, static_cast<size_t>(bytes), cudaHostAllocDefault), "link");
  check(cudaMalloc(&device, static_cast<size_t>(bytes)), "link");
  std::memset(host, 1, static_cast<size_t>(bytes));
  for (const bool out : {true, false}) {
    std::vector<double> us;
    for (int i = 0; i < 12; ++i) {
      us.push_back(microseconds(bench->stream(), [&] {
        check(cudaMemcpyAsync(out ? host : device, out ? device : host, static_cast<size_t>(bytes),
                              cudaMemcpyDefault, bench->stream()),
              "link");
      }));
    }
    us.erase(us.begin());
    bench->add({std::string(out ? "export" : "import") + " as one pinned copy, " + format,
                "4096 tokens", out ? bytes : 0, out ? 0 : bytes, timing_of(us)});
  }
  cudaFreeHost(host), cudaFree(device);
}

// A sequence out to `memory` and back in as another one.
void measure_transfers(Bench* bench, const std::string& format, Cache* cache, SequenceId first,
                       SequenceId* last, uint8_t* memory) {
  std::vector<double> exports, imports;
  size_t bytes = 0;
  for (int i = 0; i < 12; ++i) {
    exports.push_back(microseconds(bench->stream(), [&] {
      require(cache->store->export_sequence(first, [&](size_t size) {
        bytes = size;
        return memory;
      }));
    }));
    require(cache->store->release(*last));
    imports.push_back(microseconds(bench->stream(), [&] {
      const Result<SequenceId> id = cache->store->import_sequence(memory, bytes);
      require(id.status());
      *last = *id;
    }));
  }
  std::printf("%s: the first export took %.0f us, the first import %.0f us\n", format.c_str(),
              exports[0], imports[0]);
  exports.erase(exports.begin()), imports.erase(imports.begin());
  const auto moved = static_cast<int64_t>(bytes);
  bench->add({"export, " + format, "4096 tokens", moved, 0, timing_of(exports)});
  bench->add({"import, " + format, "4096 tokens", 0, moved, timing_of(imports)});
}

// One sequence, in a store that holds another one; memory of the caller that is used again, as one
// would who moves many.
void run_transfers(Bench* bench, const std::string& format) {
  Cache cache(make_config(format, 3, kTokens + 64), 3, bench->stream());
  const SequenceId first = cache.add(kTokens);
  SequenceId last = cache.add(kTokens);
  require(cache.store->take_status());
  std::vector<uint8_t> plain(cache.store->export_sequence(first)->size());
  uint8_t* pinned = nullptr;
  check(cudaHostAlloc(&pinned, plain.size(), cudaHostAllocDefault), "pinned memory");
  measure_transfers(bench, format + ", pinned memory", &cache, first, &last, pinned);
  measure_transfers(bench, format, &cache, first, &last, plain.data());
  measure_link(bench, format, static_cast<int64_t>(plain.size()));
  cudaFreeHost(pinned);
}

// The queries of a turn, over tokens that the store decodes for them.
void run_turns(Bench* bench, const std::string& format, Cache* cache, SequenceId id) {
  std::vector<double> us;
  for (int i = 0; i < bench->replays(); ++i) {
    us.push_back(microseconds(bench->stream(), [&] { cache->attend({&id, 1}, 0, false, kTurn); }));
  }
  bench->add({"attend, 512 queries of a sequence, " + format, "8192 tokens",
              kPrompt * kTokenElements * 4, 0, timing_of(us)});
  require(cache->store->take_status());
}

void run_prompts(Bench* bench, const std::string& format) {
  Cache cache(make_config(format, 2, kPrompt + 64), 2, bench->stream());
  const SequenceId first = cache.add(kPrompt);  // codebooks, where there are any
  require(cache.store->take_status());
  run_turns(bench, format, &cache, first);
  for (const int32_t query_stride : {0, 16}) {
    if (query_stride > 0 && format == "fp16") continue;  // it has no use for significances
    std::vector<double> us;
    for (int i = 0; i < bench->replays(); ++i) {
      const SequenceId id = *cache.store->add_sequence();
      const auto prompt = [&] { cache.prompt(id, kPrompt, query_stride); };
      us.push_back(microseconds(bench->stream(), prompt) / kLayers);
      require(cache.store->release(id));
    }
    const char* name =
        query_stride == 0 ? "prompt, a layer, " : "prompt that brings queries, a layer, ";
    bench->add({name + format, "8192 tokens", kPrompt * kTokenElements * 4, 0, timing_of(us)});
    require(cache.store->take_status());
  }
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv::bench;
  Bench bench(read_options(argc, argv));
  for (const char* format : {"tiers", "coded", "fp16"}) {
    if (bench.wants(format)) {
      run_prompts(&bench, format);
      run_steps(&bench, format);
    }
    if (bench.wants(format) || bench.wants("transfers")) run_transfers(&bench, format);
  }
  bench.write_json();
  return 0;
}

// The store's calls on a device at the size of a serving batch: 64 sequences of 4096 tokens, 32
// layers, 8 kv heads, head_dim 128, K8V4 and K4V2, window 64.
//
//   bench_store --out FILE.json --commit HASH [--sequences N] [--layers N] [--keep high|low]
//
// The compaction of a step (begin_step, all layers) and the calls of a layer are captured in a
// graph each and timed by events around its replay, in the order in which a decoding loop makes
// them, so that each finds in the cache what the calls before it left there. Before each a kernel
// reads as much as a model's weights: the host's launch is not in the times, nor the write-back of
// what another call left in L2. "On an idle device" is without. A score_prompt with thresholds on
// both sides and running means that sink keep victims coming; what the steps moved is printed
// beside the times.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/gpu_timing.cuh"
#include "tierkv/half.h"
#include "tierkv/store.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kTokens = 4096, kSteps = 40, kWarmSteps = 8, kKvHeads = 8, kHeadDim = 128;
constexpr int64_t kStride = kTokens + 64;

void require(const Status& status, const char* what) {
  if (status) return;
  std::fprintf(stderr, "%s: %s: %s\n", what, status_name(status.code()), status.message().c_str());
  std::exit(1);
}

struct Shape {
  int32_t sequences = 64, layers = 32;
  std::string keep;  // high or low: all tokens behind the window in that tier; otherwise both
};

KvStoreConfig config_of(const Shape& shape) {
  KvStoreConfig c;
  c.layout.num_layers = shape.layers;
  c.layout.num_q_heads = 4 * kKvHeads;
  c.layout.num_kv_heads = kKvHeads;
  c.layout.head_dim = kHeadDim;
  c.layout.sm_scale = 0.08838834764;
  c.policy.alpha_low = shape.keep.empty() ? 0.02 : 0.0;
  if (!shape.keep.empty()) c.policy.alpha_high = shape.keep == "high" ? 0.0 : 1e9;
  c.max_sequences = shape.sequences;
  c.max_tokens = kStride;
  // Of a row: at most 66 high pages in the end, and those of one prompt at a time twice.
  c.num_pages = (shape.sequences + 2) * shape.layers * kKvHeads * 72;
  return c;
}

template <class T>
T* upload(const std::vector<T>& x) {
  T* p = nullptr;
  check(cudaMalloc(&p, x.size() * sizeof(T)), "memory");
  check(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice), "memory");
  return p;
}

// Keys, values, queries and scores that all layers and sequences share.
struct Inputs {
  const uint16_t *k, *v;      // a prompt of one sequence, a step of all
  const float* significance;  // of one sequence
  const float* probabilities;
  uint16_t* out;
  float* seen;  // probabilities that attend() finds
  uint8_t* scratch;
  size_t scratch_bytes;
};

Inputs make_inputs(const Shape& shape, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  std::vector<uint16_t> x(int64_t{kTokens} * kKvHeads * kHeadDim);
  for (uint16_t& bits : x) bits = float_to_half(normal(rng));
  // 2 u^2 against alpha_high = 1 and alpha_low = 0.02: 29% high, 61% low, 10% pruned.
  std::vector<float> significance(kKvHeads * kStride), seen(shape.sequences * kKvHeads * kStride);
  for (int64_t i = 0; i < kKvHeads * kStride; ++i) {
    const float u = uniform(rng);
    significance[i] = 2 * u * u / static_cast<float>(i % kStride + 1);
  }
  // Window tokens are seen on both sides of the threshold; older ones hardly, so that their means
  // sink and the least of a tier falls below it.
  for (size_t i = 0; i < seen.size(); ++i) {
    const bool is_new = static_cast<int64_t>(i % kStride) >= kTokens - 64;
    seen[i] = (is_new ? 2.0f : 0.2f) * uniform(rng) / kTokens;
  }
  Inputs in{};
  in.k = upload(x);
  in.v = upload(x);
  in.significance = upload(significance);
  in.probabilities = upload(seen);
  in.out = upload(std::vector<uint16_t>(int64_t{shape.sequences} * 4 * kKvHeads * kHeadDim));
  in.seen = upload(std::vector<float>(seen.size()));
  in.scratch_bytes = count_scratch_bytes(config_of(shape), shape.sequences, kStride);
  in.scratch = upload(std::vector<uint8_t>(in.scratch_bytes));
  return in;
}

struct Row {
  std::string name;
  Timing us;
};

// What passes between two steps of a decoder: weights. Reading them leaves L2 with nothing of the
// cache and with nothing to write back, and takes longer than the host takes to queue a graph.
class Weights {
 public:
  Weights() {
    int device = 0;
    check(cudaGetDevice(&device), "device");
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device), "processors");
    check(cudaMalloc(&bytes_, kBytes), "weights");
    check(cudaMalloc(&sink_, sizeof(uint32_t)), "weights");
    check(cudaMemset(bytes_, 1, kBytes), "weights");
  }
  void read(cudaStream_t stream) const { launch_read_only(bytes_, kBytes, sms_, sink_, stream); }

 private:
  static constexpr int64_t kBytes = int64_t{768} << 20;
  uint8_t* bytes_ = nullptr;
  uint32_t* sink_ = nullptr;
  int sms_ = 0;
};

// Times of one call, collected over steps.
class Watch {
 public:
  Watch(cudaStream_t stream, const Weights& weights) : stream_(stream), weights_(weights) {
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
  }
  template <class Call>
  void time(bool kept, Call&& call) {
    weights_.read(stream_);
    time_now(kept, call);
  }
  // The host's launch included, where nothing is queued before.
  template <class Call>
  void time_now(bool kept, Call&& call) {
    check(cudaEventRecord(begin_, stream_), "record");
    call();
    check(cudaEventRecord(end_, stream_), "record");
    check(cudaStreamSynchronize(stream_), "wait");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "elapsed");
    if (kept) us_.push_back(1e3 * ms);
  }
  Row result(const std::string& name, int32_t calls = 1) {
    std::sort(us_.begin(), us_.end());
    const auto at = [&](size_t tenth) { return us_[us_.size() * tenth / 10] / calls; };
    return {name, {at(5), at(1), at(9)}};
  }

 private:
  cudaStream_t stream_;
  const Weights& weights_;
  cudaEvent_t begin_, end_;
  std::vector<double> us_;
};

template <class Call>
cudaGraphExec_t capture(cudaStream_t stream, Call&& call) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  call();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  return exec;
}

// Every sequence through its prompt, one after the other.
void fill(DeviceKvStore* store, const Shape& shape, const Inputs& in, cudaStream_t stream,
          std::vector<SequenceId>* ids, std::vector<Row>* results) {
  const Weights weights;
  Watch pack(stream, weights), end(stream, weights);
  for (int32_t s = 0; s < shape.sequences; ++s) {
    const auto id = store->add_sequence();
    require(id.status(), "add_sequence");
    ids->push_back(*id);
    const SequenceList one = {&ids->back(), 1};
    require(store->begin_prompt(one, kTokens), "begin_prompt");
    pack.time(s > 0, [&] {
      for (int32_t layer = 0; layer < shape.layers; ++layer) {
        require(store->append({one, layer, kTokens, in.k, in.v}), "append");
      }
    });
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      require(store->score_prompt({one, layer, in.significance, kStride}), "score_prompt");
    }
    end.time(s > 0, [&] { require(store->end_prompt(one), "end_prompt"); });
  }
  require(store->take_status(), "prompts");
  results->push_back(pack.result("append of a prompt of 4096 tokens, a layer", shape.layers));
  results->push_back(end.result("end_prompt of 4096 tokens, all layers"));
}

void run_steps(DeviceKvStore* store, const Shape& shape, const Inputs& in, cudaStream_t stream,
               const std::vector<SequenceId>& ids, std::vector<Row>* results) {
  const SequenceList all = {ids.data(), shape.sequences};
  const auto append = [&](int32_t layer) {
    require(store->append({all, layer, 1, in.k, in.v}), "append");
  };
  const auto count = [&](int32_t layer) {
    require(store->update_scores({all, layer, 0, in.probabilities, kStride}), "update_scores");
  };
  const auto attend = [&](int32_t layer, float* seen, bool counts) {
    AttendRequest request;
    request.sequences = all;
    request.layer = layer;
    request.q = in.k;
    request.out = in.out;
    request.probabilities = seen;
    request.stride = kStride;
    request.count_query = counts;
    request.scratch = in.scratch;
    request.scratch_bytes = in.scratch_bytes;
    require(store->attend(request), "attend");
  };
  const auto each_layer = [&](auto call) {
    return [call, &shape] {
      for (int32_t layer = 0; layer < shape.layers; ++layer) call(layer);
    };
  };
  cudaGraphExec_t begin =
      capture(stream, [&] { require(store->begin_step(all, 1), "begin_step"); });
  cudaGraphExec_t append_all = capture(stream, each_layer(append));
  cudaGraphExec_t count_all = capture(stream, each_layer(count));
  const auto attend_all =
      capture(stream, each_layer([&](int32_t l) { attend(l, nullptr, false); }));
  const auto observe_all =
      capture(stream, each_layer([&](int32_t l) { attend(l, in.seen, false); }));
  const auto attend_and_count =
      capture(stream, each_layer([&](int32_t l) { attend(l, nullptr, true); }));
  const Weights weights;
  Watch begins(stream, weights), appends(stream, weights), counts(stream, weights);
  Watch attends(stream, weights), observes(stream, weights), both(stream, weights);
  Watch after_scores(stream, weights);
  for (int32_t step = 0; step < kWarmSteps + kSteps; ++step) {
    const bool kept = step >= kWarmSteps;
    if (step > 0) require(store->note_replay(all, 1), "note_replay");
    const auto replay = [&](cudaGraphExec_t g) {
      return [g, stream] { check(cudaGraphLaunch(g, stream), "replay"); };
    };
    if (step % 4 == 3) {
      after_scores.time_now(kept, replay(begin));
    } else {
      begins.time(kept, replay(begin));
    }
    appends.time(kept, replay(append_all));
    attends.time(kept, replay(attend_all));
    if (step % 8 == 0) observes.time(true, replay(observe_all));
    if (step % 8 == 4) both.time(true, replay(attend_and_count));
    counts.time(kept, replay(count_all));
  }
  require(store->take_status(), "steps");
  results->push_back(begins.result("begin_step: compaction of all layers, one graph"));
  results->push_back(after_scores.result("begin_step on an idle device, scores to write back"));
  results->push_back(appends.result("append of a layer", shape.layers));
  results->push_back(attends.result("attend of a layer", shape.layers));
  results->push_back(observes.result("attend of a layer with probabilities", shape.layers));
  results->push_back(counts.result("update_scores of a layer", shape.layers));
  results->push_back(both.result("attend of a layer, its query counted", shape.layers));
}

void print_tokens(const char* when, const StoreStats& stats) {
  std::printf("%s: %lld high, %lld low, %lld pruned; pool gain %.2f, nominal %.2f\n", when,
              static_cast<long long>(stats.tokens[1]), static_cast<long long>(stats.tokens[2]),
              static_cast<long long>(stats.tokens[3]), stats.pool_gain(), stats.nominal_ratio());
}

void write_json(const char* path, const char* commit, const Shape& shape,
                const std::vector<Row>& results, const StoreStats* stats) {
  cudaDeviceProp gpu{};
  check(cudaGetDeviceProperties(&gpu, 0), "properties");
  std::FILE* f = std::fopen(path, "w");
  if (f == nullptr) std::exit(1);
  std::fprintf(f, "{\"schema\":\"tierkv.bench.store/1\",\"commit\":\"%s\",\"gpu\":\"%s\",", commit,
               gpu.name);
  std::fprintf(f, "\"sequences\":%d,\"layers\":%d,\"tokens\":%d,\"steps\":%d,\n", shape.sequences,
               shape.layers, kTokens, kSteps);
  for (int32_t i = 0; i < 2; ++i) {
    const int64_t* t = stats[i].tokens;
    std::fprintf(f, "\"%s\":{\"high\":%lld,\"low\":%lld,\"pruned\":%lld,\"pool_gain\":%.3f},\n",
                 i == 0 ? "before" : "after", static_cast<long long>(t[1]),
                 static_cast<long long>(t[2]), static_cast<long long>(t[3]), stats[i].pool_gain());
  }
  std::fprintf(f, "\"results\":[\n");
  for (size_t i = 0; i < results.size(); ++i) {
    const Row& r = results[i];
    std::fprintf(f, "{\"name\":\"%s\",\"median_us\":%.3f,\"p10_us\":%.3f,\"p90_us\":%.3f}%s\n",
                 r.name.c_str(), r.us.median, r.us.low, r.us.high,
                 i + 1 < results.size() ? "," : "");
  }
  std::fprintf(f, "]}\n");
  if (std::fclose(f) != 0) std::exit(1);
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv;
  using namespace tierkv::bench;
  const char *out = nullptr, *commit = "unknown";
  Shape shape;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--out") out = argv[i + 1];
    if (flag == "--commit") commit = argv[i + 1];
    if (flag == "--sequences") shape.sequences = std::atoi(argv[i + 1]);
    if (flag == "--layers") shape.layers = std::atoi(argv[i + 1]);
    if (flag == "--keep") shape.keep = argv[i + 1];
  }
  if (out == nullptr || shape.sequences < 1 || shape.layers < 1) {
    std::fprintf(stderr,
                 "usage: bench_store --out FILE.json --commit HASH [--sequences N] [--layers N] "
                 "[--keep high|low]\n");
    return 2;
  }
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  const auto store = create_device_store(config_of(shape), stream);
  require(store.status(), "create");
  const Inputs in = make_inputs(shape, std::random_device{}());
  std::vector<SequenceId> ids;
  ids.reserve(shape.sequences);
  std::vector<Row> results;
  fill(store->get(), shape, in, stream, &ids, &results);
  StoreStats stats[2];
  stats[0] = *(*store)->stats();
  print_tokens("after the prompts", stats[0]);
  run_steps(store->get(), shape, in, stream, ids, &results);
  stats[1] = *(*store)->stats();
  print_tokens("after the steps", stats[1]);
  for (const Row& r : results) {
    std::printf("%-50s %9.2f us  [%.2f, %.2f]\n", r.name.c_str(), r.us.median, r.us.low, r.us.high);
  }
  write_json(out, commit, shape, results, stats);
  return 0;
}

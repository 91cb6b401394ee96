// The store's calls on a device at the size of a serving batch: 64 sequences of 4096 tokens, 32
// layers, 8 kv heads, head_dim 128, K8V4 and K4V2, window 64.
//
//   bench_store --out FILE.json --commit HASH [--sequences N] [--layers N] [--keep high|low]
//               [--only counting]
//
// The compaction of a step (begin_step, all layers) and the calls of a layer are captured in a
// graph each and timed by events around its replay, in the order in which a decoding loop makes
// them, so that each finds in the cache what the calls before it left there. Before each a kernel
// reads as much as a model's weights: the host's launch is not in the times, nor the write-back of
// what another call left in L2. "On an idle device" is without. A score_prompt with thresholds on
// both sides and running means that sink keep victims coming; what the steps moved is printed
// beside the times. Append and attend of a layer are timed apart, and as a model's step has them,
// one behind the other. What counting a query adds to attention is timed part by part, for this
// cache and for caches that hold all tokens behind the window in one tier.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bench/gpu/store_counting.cuh"

namespace tierkv::bench {
namespace {

// The calls of a step.
class Step {
 public:
  Step(DeviceKvStore* store, const Shape& shape, const Inputs& in, cudaStream_t stream,
       const std::vector<SequenceId>& ids)
      : store_(store),
        in_(in),
        stream_(stream),
        all_{ids.data(), shape.sequences},
        layers_(shape.layers) {}

  void append(int32_t layer) const {
    require(store_->append({all_, layer, 1, in_.k, in_.v}), "append");
  }
  void count(int32_t layer) const {
    require(store_->update_scores({all_, layer, 0, in_.probabilities, kStride}), "update_scores");
  }
  void attend(int32_t layer, float* seen) const {
    AttendRequest request;
    request.sequences = all_;
    request.layer = layer;
    request.q = in_.k;
    request.out = in_.out;
    request.probabilities = seen;
    request.stride = kStride;
    require(store_->attend(request), "attend");
  }
  cudaGraphExec_t capture_begin() const {
    return capture(stream_, [&] { require(store_->begin_step(all_, 1), "begin_step"); });
  }
  template <class Call>
  cudaGraphExec_t capture_layers(Call call) const {
    return capture(stream_, [&] {
      for (int32_t layer = 0; layer < layers_; ++layer) call(layer);
    });
  }
  auto replay(cudaGraphExec_t g) const {
    return [g, stream = stream_] { check(cudaGraphLaunch(g, stream), "replay"); };
  }
  // A captured step is about to be replayed once more.
  void note_replay() const { require(store_->note_replay(all_, 1), "note_replay"); }
  void finish() const { require(store_->take_status(), "steps"); }

 private:
  DeviceKvStore* store_;
  const Inputs& in_;
  cudaStream_t stream_;
  SequenceList all_;
  int32_t layers_;
};

void run_steps(const Step& s, const Shape& shape, cudaStream_t stream, const Inputs& in,
               std::vector<Row>* results) {
  cudaGraphExec_t begin = s.capture_begin();
  cudaGraphExec_t append_all = s.capture_layers([&](int32_t l) { s.append(l); });
  cudaGraphExec_t count_all = s.capture_layers([&](int32_t l) { s.count(l); });
  cudaGraphExec_t attend_all = s.capture_layers([&](int32_t l) { s.attend(l, nullptr); });
  cudaGraphExec_t observe_all = s.capture_layers([&](int32_t l) { s.attend(l, in.seen); });
  const Weights weights;
  Watch begins(stream, weights), appends(stream, weights), counts(stream, weights);
  Watch attends(stream, weights), observes(stream, weights), after_scores(stream, weights);
  for (int32_t step = 0; step < kWarmSteps + kSteps; ++step) {
    const bool kept = step >= kWarmSteps;
    if (step > 0) s.note_replay();
    if (step % 4 == 3) {
      after_scores.time_now(kept, s.replay(begin));
    } else {
      begins.time(kept, s.replay(begin));
    }
    appends.time(kept, s.replay(append_all));
    attends.time(kept, s.replay(attend_all));
    if (step % 8 == 0) observes.time(true, s.replay(observe_all));
    counts.time(kept, s.replay(count_all));
  }
  s.finish();
  results->push_back(begins.result("begin_step: compaction of all layers, one graph"));
  results->push_back(after_scores.result("begin_step on an idle device, scores to write back"));
  results->push_back(appends.result("append of a layer", shape.layers));
  results->push_back(attends.result("attend of a layer", shape.layers));
  results->push_back(observes.result("attend of a layer with probabilities", shape.layers));
  results->push_back(counts.result("update_scores of a layer", shape.layers));
}

// Layer after layer as a model's step has them, its append and then at once its attend.
void run_layers(const Step& s, const Shape& shape, cudaStream_t stream, std::vector<Row>* results) {
  cudaGraphExec_t begin = s.capture_begin();
  cudaGraphExec_t layers = s.capture_layers([&](int32_t l) {
    s.append(l);
    s.attend(l, nullptr);
  });
  const Weights weights;
  Watch begins(stream, weights), both(stream, weights);
  constexpr int32_t kWarm = 2;
  for (int32_t step = 0; step < kLayerSteps; ++step) {
    if (step > 0) s.note_replay();
    begins.time(false, s.replay(begin));
    both.time(step >= kWarm, s.replay(layers));
  }
  s.finish();
  results->push_back(both.result("append and attend of a layer", shape.layers));
}

void print_tokens(const char* when, const StoreStats& stats) {
  std::printf("%s: %lld high, %lld low, %lld pruned; pool gain %.2f, nominal %.2f\n", when,
              static_cast<long long>(stats.tokens[1]), static_cast<long long>(stats.tokens[2]),
              static_cast<long long>(stats.tokens[3]), stats.pool_gain(), stats.nominal_ratio());
}

struct Report {
  std::vector<Row> results;
  StoreStats before, after;  // the steps
  std::vector<CountingTimes> counting;
};

void print_times(const Report& report) {
  for (const Row& r : report.results) {
    std::printf("%-50s %9.2f us  [%.2f, %.2f]\n", r.name.c_str(), r.us.median, r.us.low, r.us.high);
  }
  for (const CountingTimes& c : report.counting) {
    std::printf("%s: attend %.2f us, leaving scores %.2f, counting from them %.2f, both %.2f\n",
                c.cache.c_str(), c.attend.median, c.leaves.median, c.counts.median,
                c.together.median);
  }
}

void write_timing(std::FILE* f, const char* name, const Timing& us) {
  std::fprintf(f, ",\"%s\":{\"median_us\":%.3f,\"p10_us\":%.3f,\"p90_us\":%.3f}", name, us.median,
               us.low, us.high);
}

void write_json(const char* path, const char* commit, const Shape& shape, const Report& report) {
  cudaDeviceProp gpu{};
  check(cudaGetDeviceProperties(&gpu, 0), "properties");
  std::FILE* f = std::fopen(path, "w");
  if (f == nullptr) std::exit(1);
  std::fprintf(f, "{\"schema\":\"tierkv.bench.store/1\",\"commit\":\"%s\",\"gpu\":\"%s\",", commit,
               gpu.name);
  std::fprintf(f, "\"sequences\":%d,\"layers\":%d,\"tokens\":%d,\"steps\":%d,\n", shape.sequences,
               shape.layers, kTokens, kSteps);
  for (const StoreStats* stats : {&report.before, &report.after}) {
    const int64_t* t = stats->tokens;
    std::fprintf(f, "\"%s\":{\"high\":%lld,\"low\":%lld,\"pruned\":%lld,\"pool_gain\":%.3f},\n",
                 stats == &report.before ? "before" : "after", static_cast<long long>(t[1]),
                 static_cast<long long>(t[2]), static_cast<long long>(t[3]), stats->pool_gain());
  }
  std::fprintf(f, "\"results\":[");
  for (const Row& r : report.results) {
    std::fprintf(f, "%s\n{\"name\":\"%s\",\"median_us\":%.3f,\"p10_us\":%.3f,\"p90_us\":%.3f}",
                 &r == report.results.data() ? "" : ",", r.name.c_str(), r.us.median, r.us.low,
                 r.us.high);
  }
  std::fprintf(f, "],\n\"counting\":[");
  for (const CountingTimes& c : report.counting) {
    std::fprintf(f, "%s\n{\"cache\":\"%s\"", &c == report.counting.data() ? "" : ",",
                 c.cache.c_str());
    write_timing(f, "attend", c.attend);
    write_timing(f, "leaving_scores", c.leaves);
    write_timing(f, "counting", c.counts);
    write_timing(f, "attend_and_count", c.together);
    std::fprintf(f, "}");
  }
  std::fprintf(f, "]}\n");
  if (std::fclose(f) != 0) std::exit(1);
}

// A store of its own, gone when it has been timed.
void run(const Shape& shape, bool steps, const Inputs& in, cudaStream_t stream, Report* report) {
  const auto store = create_device_store(config_of(shape), stream);
  require(store.status(), "create");
  std::vector<SequenceId> ids;
  ids.reserve(shape.sequences);
  std::vector<Row> prompts;
  fill(store->get(), shape, in, stream, &ids, &prompts);
  if (steps) {
    report->results = prompts;
    report->before = *(*store)->stats();
    print_tokens("after the prompts", report->before);
    const Step step(store->get(), shape, in, stream, ids);
    run_steps(step, shape, stream, in, &report->results);
    run_layers(step, shape, stream, &report->results);
    report->after = *(*store)->stats();
    print_tokens("after the steps", report->after);
  } else {
    take_step(store->get(), shape, in, ids);
  }
  report->counting.push_back(time_counting(store->get(), shape, in, stream, ids));
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv;
  using namespace tierkv::bench;
  const char *out = nullptr, *commit = "unknown";
  bool steps = true;
  Shape shape;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--out") out = argv[i + 1];
    if (flag == "--commit") commit = argv[i + 1];
    if (flag == "--sequences") shape.sequences = std::atoi(argv[i + 1]);
    if (flag == "--layers") shape.layers = std::atoi(argv[i + 1]);
    if (flag == "--keep") shape.keep = argv[i + 1];
    if (flag == "--only") steps = std::string(argv[i + 1]) != "counting";
  }
  if (out == nullptr || shape.sequences < 1 || shape.layers < 1) {
    std::fprintf(stderr,
                 "usage: bench_store --out FILE.json --commit HASH [--sequences N] [--layers N] "
                 "[--keep high|low] [--only counting]\n");
    return 2;
  }
  cudaStream_t stream;
  check(cudaStreamCreate(&stream), "stream");
  const Inputs in = make_inputs(shape, std::random_device{}());
  Report report;
  run(shape, steps, in, stream, &report);
  if (shape.keep.empty()) {
    for (const char* tier : {"high", "low"}) {
      shape.keep = tier;
      run(shape, false, in, stream, &report);
    }
    shape.keep.clear();
  }
  print_times(report);
  write_json(out, commit, shape, report);
  return 0;
}

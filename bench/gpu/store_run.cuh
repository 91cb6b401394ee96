// What the benchmarks of a store's calls share: a store of 64 sequences of 4096 tokens, 8 kv heads
// and its inputs, and how a call is timed behind a decoder's weights.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "bench/gpu/gpu_timing.cuh"
#include "tierkv/half.h"
#include "tierkv/store.h"

namespace tierkv::bench {

inline constexpr int32_t kTokens = 4096, kSteps = 40, kWarmSteps = 8, kKvHeads = 8, kHeadDim = 128;
inline constexpr int32_t kLayerSteps = 14;
inline constexpr int64_t kStride = kTokens + 64;
static_assert(kTokens + kWarmSteps + kSteps + kLayerSteps <= kStride);

inline void require(const Status& status, const char* what) {
  if (status) return;
  std::fprintf(stderr, "%s: %s: %s\n", what, status_name(status.code()), status.message().c_str());
  std::exit(1);
}

struct Shape {
  int32_t sequences = 64, layers = 32;
  std::string keep;  // high or low: all tokens behind the window in that tier; otherwise both
};

inline KvStoreConfig config_of(const Shape& shape) {
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

inline Inputs make_inputs(const Shape& shape, uint32_t seed) {
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
cudaGraph_t capture_graph(cudaStream_t stream, Call&& call) {
  cudaGraph_t graph;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  call();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  return graph;
}
inline cudaGraphExec_t instantiate(cudaGraph_t graph) {
  cudaGraphExec_t exec;
  check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  return exec;
}
template <class Call>
cudaGraphExec_t capture(cudaStream_t stream, Call&& call) {
  return instantiate(capture_graph(stream, call));
}

// Every sequence through its prompt, one after the other.
inline void fill(DeviceKvStore* store, const Shape& shape, const Inputs& in, cudaStream_t stream,
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

}  // namespace tierkv::bench

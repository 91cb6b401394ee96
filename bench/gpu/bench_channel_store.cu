// A store of channel blocks on the GPU, through the calls of KvStore: attention of one layer beside
// a store of fp16 pages, beside a kernel that only reads as many bytes; a step of 32 layers in
// which no block or every row's block is due; append of a layer.
//
//   bench_channel_store [--out FILE] [--commit HASH] [--only TEXT] [--replays N]
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "bench/gpu/codec_bench.cuh"
#include "tierkv/store.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kQHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr int kCalls = 16;  // of a graph; attention plans once in it, as for all layers of a model
constexpr int32_t kChunk = 512;  // tokens of each sequence that a prompt's append brings

struct Shape {
  int32_t sequences, tokens, layers;
  const char* name;
  bool ragged = false;  // lengths spread evenly up to `tokens`, in random order
};
struct Queries {
  int32_t q_len = 1;
  DType dtype = DType::kFloat16;
  const char* name = "";
};
struct Format {
  const char* name;
  int32_t k_bits, v_bits, block_tokens;  // 16: fp16 pages
};

KvStoreConfig store_config(const Format& f, const Shape& s) {
  KvStoreConfig c;
  c.layout.num_layers = s.layers;
  c.layout.num_q_heads = kQHeads;
  c.layout.num_kv_heads = kKvHeads;
  c.layout.head_dim = kHeadDim;
  c.layout.sm_scale = 1 / std::sqrt(static_cast<double>(kHeadDim));
  c.max_sequences = s.sequences;
  c.max_tokens = s.tokens + 512;
  const int64_t rows = int64_t{s.sequences} * s.layers * kKvHeads;
  if (f.k_bits == 16) {
    c.window_format = c.high_format = c.low_format = raw_tier();
    c.page_bytes = 64 * (4 * kHeadDim + 8);
    // While a prompt ends its tokens lie on pages of both kinds.
    c.num_pages = static_cast<int32_t>(rows * 2 * (c.max_tokens / 64 + 3));
    return c;
  }
  c.channel.enabled = true;
  c.channel.k_bits = f.k_bits;
  c.channel.v_bits = f.v_bits;
  c.channel.block_tokens = f.block_tokens;
  c.num_pages = static_cast<int32_t>(rows * (c.max_tokens / f.block_tokens + 14));
  return c;
}

// A filled store of random tokens.
class Filled {
 public:
  Filled(const Format& f, const Shape& s, cudaStream_t stream) {
    store_ = value_of(create_device_store(store_config(f, s), stream));
    const int64_t values = int64_t{s.sequences} * kChunk * kKvHeads * kHeadDim;
    check(cudaMalloc(&x_, 2 * values), "tokens");
    fill_elements<<<1024, 256>>>(x_, values, std::random_device{}(), false);
    for (int32_t i = 0; i < s.sequences; ++i) ids_.push_back(value_of(store_->add_sequence()));
    for (int32_t done = 0; done < s.tokens; done += kChunk) {
      const int32_t tokens = std::min(kChunk, s.tokens - done);
      // The first are the longest: they still want tokens.
      const int32_t longer =
          s.ragged ? static_cast<int32_t>(
                         (int64_t{s.sequences} * (s.tokens - done) + s.tokens - 1) / s.tokens)
                   : s.sequences;
      const SequenceList some = {ids_.data(), longer};
      require(store_->begin_prompt(some, tokens));
      for (int32_t layer = 0; layer < s.layers; ++layer) {
        require(store_->append({some, layer, tokens, x_, x_}));
      }
    }
    require(store_->end_prompt(list()));
    require(store_->take_status());
    if (s.ragged) std::shuffle(ids_.begin(), ids_.end(), std::mt19937(std::random_device{}()));
  }
  ~Filled() { check(cudaFree(x_), "free"); }
  Filled(const Filled&) = delete;
  Filled& operator=(const Filled&) = delete;

  DeviceKvStore& store() { return *store_; }
  SequenceList list() const { return {ids_.data(), static_cast<int32_t>(ids_.size())}; }
  void append(int32_t layer, int32_t tokens) {
    require(store_->append({list(), layer, tokens, x_, x_}));
  }

 private:
  template <class T>
  static T value_of(Result<T> result) {
    require(result ? Status::ok() : result.status());
    return std::move(*result);
  }

  std::unique_ptr<DeviceKvStore> store_;
  std::vector<SequenceId> ids_;
  uint16_t* x_ = nullptr;
};

// Bytes that attention of a layer reads: blocks, and raw tokens.
int64_t attended_bytes(Filled* filled, const Shape& s) {
  const Result<StoreStats> stats = filled->store().stats();
  require(stats ? Status::ok() : stats.status());
  return stats->nominal_bytes / s.layers;
}

// Layers alternate: what one reads has left L2 before it is read again.
void run_attention(Bench* bench, const Format& f, const Shape& s, const Queries& queries, int sms) {
  const std::string name = std::string("attend ") + f.name + queries.name;
  if (!bench->wants(name)) return;
  Filled filled(f, s, bench->stream());
  const int64_t values = int64_t{s.sequences} * queries.q_len * kQHeads * kHeadDim;
  std::vector<uint16_t> host(values, 0x2e00);
  uint16_t *q = device_array(host), *out = device_array(host);
  const int64_t bytes = attended_bytes(&filled, s);
  uint8_t* contiguous = nullptr;
  uint32_t* sink = nullptr;
  check(cudaMalloc(&contiguous, bytes * s.layers), "floor");
  check(cudaMalloc(&sink, 4), "sink");
  AttendRequest request;
  request.sequences = filled.list();
  request.q = q;
  request.out = out;
  request.q_len = queries.q_len;
  request.dtype = queries.dtype;
  require(filled.store().attend(request));
  bench->run(
      {name, s.name, bytes + 2 * values, 2 * values, {}},
      [&](int i) {
        request.layer = i % s.layers;
        require(filled.store().attend(request));
      },
      kCalls);
  require(filled.store().take_status());
  const auto read = [&](int i) {
    launch_read_only(contiguous + i % s.layers * bytes, bytes, sms, sink, bench->stream());
  };
  const bool is_usual = queries.name[0] == '\0';
  if (is_usual) {
    bench->run({std::string("only read ") + f.name, s.name, bytes, 0, {}}, read, kCalls);
  }
  for (void* p : {static_cast<void*>(q), static_cast<void*>(out), static_cast<void*>(contiguous),
                  static_cast<void*>(sink)}) {
    check(cudaFree(p), "free");
  }
}

// Times of calls that each come behind a kernel which reads as much as a model's weights: it leaves
// nothing of the cache in L2 and takes longer than the host takes to enqueue the call.
class Watch {
 public:
  Watch(cudaStream_t stream, int sms) : stream_(stream), sms_(sms) {
    check(cudaMalloc(&weights_, kBytes), "weights");
    check(cudaMalloc(&sink_, 4), "sink");
    check(cudaEventCreate(&begin_), "event");
    check(cudaEventCreate(&end_), "event");
  }
  ~Watch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    for (void* p : {static_cast<void*>(weights_), static_cast<void*>(sink_)}) {
      check(cudaFree(p), "free");
    }
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  template <class Call>
  double microseconds(Call&& call) {
    launch_read_only(weights_, kBytes, sms_, sink_, stream_);
    check(cudaEventRecord(begin_, stream_), "record");
    call();
    check(cudaEventRecord(end_, stream_), "record");
    check(cudaStreamSynchronize(stream_), "call");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "elapsed");
    return 1e3 * ms;
  }

 private:
  static constexpr int64_t kBytes = int64_t{768} << 20;
  cudaStream_t stream_;
  int sms_;
  uint8_t* weights_ = nullptr;
  uint32_t* sink_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

Timing timing_of(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[times.size() / 10], times[times.size() * 9 / 10]};
}

// Until every row's block has been due three times, with append() of a layer in each step.
void run_steps(Bench* bench, const Format& f, const Shape& s, int sms) {
  const std::string name = std::string("begin_step ") + f.name;
  if (!bench->wants(name)) return;
  Filled filled(f, s, bench->stream());
  Watch watch(bench->stream(), sms);
  std::vector<double> idle, making, append;
  for (int32_t n = s.tokens + 1; making.size() < 3; ++n) {
    const double step =
        watch.microseconds([&] { require(filled.store().begin_step(filled.list(), 1)); });
    // The default window is of 64 tokens, a divisor of every block.
    ((n - 64) % f.block_tokens == 0 ? making : idle).push_back(step);
    append.push_back(watch.microseconds([&] { filled.append(0, 1); }));
    for (int32_t layer = 1; layer < s.layers; ++layer) filled.append(layer, 1);
  }
  require(filled.store().take_status());
  const int64_t rows = int64_t{s.sequences} * s.layers * kKvHeads;
  const int64_t token = int64_t{s.sequences} * kKvHeads * kHeadDim * 4;
  const int64_t raw = rows * f.block_tokens * kHeadDim * 4;
  const int64_t made =
      rows * f.block_tokens * (kHeadDim * (f.k_bits + f.v_bits) / 8 + 4) + rows * 4 * kHeadDim;
  bench->add({name + ", no block due", s.name, 0, 0, timing_of(idle)});
  bench->add({name + ", all rows' blocks", s.name, raw, made, timing_of(making)});
  bench->add({std::string("append ") + f.name, s.name, token, token, timing_of(append)});
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv::bench;
  Bench bench(read_options(argc, argv));
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
  const Format formats[] = {{"fp16 pages", 16, 16, 64}, {"kc4v4/64", 4, 4, 64},
                            {"kc4v4/128", 4, 4, 128},   {"kc4v2/128", 4, 2, 128},
                            {"kc2v2/64", 2, 2, 64},     {"kc2v2/128", 2, 2, 128}};
  const Shape shapes[] = {
      {64, 4096, 1, "64 x 4096"}, {8, 32768, 1, "8 x 32768"}, {1, 32768, 4, "1 x 32768"}};
  for (const Format& f : formats) {
    for (const Shape& s : shapes) run_attention(&bench, f, s, {}, sms);
  }
  // A batch of very different lengths, and one of as many tokens in equal rows.
  const Shape ragged[] = {{64, 16640, 1, "64 x 16640"},
                          {64, 32768, 1, "64, 512 to 32768", true},
                          {8, 18432, 1, "8 x 18432"},
                          {8, 32768, 1, "8, 4096 to 32768", true}};
  for (const Shape& s : ragged) run_attention(&bench, formats[1], s, {}, sms);
  const Queries queries[] = {{1, tierkv::DType::kBFloat16, ", bfloat16"},
                             {2, tierkv::DType::kFloat16, ", 2 queries"},
                             {4, tierkv::DType::kFloat16, ", 4 queries"},
                             {8, tierkv::DType::kFloat16, ", 8 queries"}};
  for (const Queries& q : queries) {
    for (const Format& f : {formats[1], formats[4]}) {
      for (const Shape& s : shapes) run_attention(&bench, f, s, q, sms);
    }
  }
  const Shape step_shape = {64, 1024, 32, "64 x 1024, 32 layers"};
  for (const Format& f : {formats[1], formats[4]}) run_steps(&bench, f, step_shape, sms);
  bench.write_json();
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// Channel blocks: attention over them beside a kernel that only reads them, what a step pays to
// append, and prompts, beside the copy ceiling of the same run.
//
//   bench_channel [--out FILE] [--commit HASH] [--only TEXT] [--replays N]
#include <algorithm>

#include "bench/baselines/channel/channel_attention.h"
#include "bench/gpu/codec_bench.cuh"

namespace tierkv::bench {
namespace {

constexpr int32_t kKvHeads = 8, kGroup = 4, kHeadDim = 128;

struct Shape {
  int32_t sequences, tokens;
  const char* name;
};
struct Format {
  const char* name;
  int32_t k_bits, v_bits, tokens;
};

// A filled cache of one layer.
class Channels {
 public:
  Channels(const Format& f, const Shape& s, uint32_t seed) : shape_(s) {
    TierFormat format = token_wise_tier(f.k_bits, f.v_bits);
    format.k.unit = Unit::kChannel;
    format.k.group = f.tokens;
    cache_.layout = *make_channel_layout(format, kHeadDim);
    cache_.num_rows = s.sequences * kKvHeads;
    cache_.max_blocks = s.tokens / f.tokens + 2;
    cache_.num_blocks = cache_.num_rows * cache_.max_blocks;
    check(cudaMalloc(&cache_.pool, pool_bytes()), "pool");
    check(cudaMalloc(&cache_.residual, residual_bytes()), "residual");
    check(cudaMemset(cache_.residual, 0, residual_bytes()), "residual");
    std::vector<int32_t> ids(cache_.num_blocks);
    for (int32_t i = 0; i < cache_.num_blocks; ++i) ids[i] = i;
    std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
    cache_.table = device_array(ids);
    cache_.block_count = device_array(std::vector<int32_t>(cache_.num_rows, 0));
    cache_.residual_tokens = device_array(std::vector<int32_t>(cache_.num_rows, 0));
    status_ = device_array(std::vector<StatusCode>(cache_.num_rows));
    const int64_t values = int64_t{s.sequences} * s.tokens * kKvHeads * kHeadDim;
    check(cudaMalloc(&k_, 2 * values), "keys");
    check(cudaMalloc(&v_, 2 * values), "values");
    fill_elements<<<1024, 256>>>(k_, values, seed, false);
    fill_elements<<<1024, 256>>>(v_, values, ~seed, false);
    std::vector<int32_t> indptr(s.sequences + 1);
    for (int32_t i = 0; i <= s.sequences; ++i) indptr[i] = i * s.tokens;
    indptr_ = device_array(indptr);
    fill(nullptr);
    check(cudaDeviceSynchronize(), "fill");
  }
  ~Channels() {
    for (void* p : {static_cast<void*>(cache_.pool), static_cast<void*>(cache_.residual),
                    static_cast<void*>(const_cast<int32_t*>(cache_.table)),
                    static_cast<void*>(cache_.block_count),
                    static_cast<void*>(cache_.residual_tokens), static_cast<void*>(status_),
                    static_cast<void*>(k_), static_cast<void*>(v_), static_cast<void*>(indptr_)}) {
      cudaFree(p);
    }
  }
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  void fill(cudaStream_t stream) const {
    require(fill_channel(cache_, {k_, v_, indptr_, kKvHeads, status_}, stream));
  }
  void append(cudaStream_t stream) const {
    require(append_channel(cache_, {k_, v_, status_}, stream));
  }
  void set_residual(int32_t tokens) const {
    const std::vector<int32_t> counts(cache_.num_rows, tokens);
    check(cudaMemcpy(cache_.residual_tokens, counts.data(), 4 * counts.size(),
                     cudaMemcpyHostToDevice),
          "counts");
  }
  size_t pool_bytes() const { return size_t(cache_.num_blocks) * cache_.layout.bytes; }
  size_t residual_bytes() const {
    return size_t(cache_.num_rows) * tierkv::residual_bytes(cache_.layout);
  }
  // What attention reads: whole blocks, and what is raw of the residual.
  int64_t attended_bytes() const {
    const ChannelLayout& l = cache_.layout;
    const int64_t raw = shape_.tokens % l.tokens * int64_t{kHeadDim} * 4;
    return cache_.num_rows *
           (int64_t{shape_.tokens / l.tokens} * (l.v_metadata + 4 * l.tokens) + raw);
  }
  const ChannelCache& cache() const { return cache_; }
  StatusCode* status() const { return status_; }

 private:
  Shape shape_;
  ChannelCache cache_;
  StatusCode* status_ = nullptr;
  uint16_t *k_ = nullptr, *v_ = nullptr;
  int32_t* indptr_ = nullptr;
};

void run_attention(Bench* bench, const Format& f, const Shape& s, int sms, uint32_t seed) {
  const Channels channels(f, s, seed);
  const int64_t heads = int64_t{s.sequences} * kKvHeads * kGroup;
  std::vector<uint16_t> host(heads * kHeadDim, 0x2e00);
  uint16_t *q = device_array(host), *out = device_array(host);
  uint8_t* workspace = nullptr;
  uint32_t* sink = nullptr;
  check(cudaMalloc(&workspace, channel_workspace_bytes(channels.cache(), kGroup)), "workspace");
  check(cudaMalloc(&sink, 4), "sink");
  const ChannelAttention call = {kGroup, 0.088, q, out, nullptr, channels.status()};
  const int64_t bytes = channels.attended_bytes();
  uint8_t* contiguous = nullptr;
  check(cudaMalloc(&contiguous, bytes), "floor");
  const std::string name = std::string("attend ") + f.name;
  bench->run({name, s.name, bytes + 2 * heads * kHeadDim, 2 * heads * kHeadDim, {}}, [&](int) {
    require(attend_channel(channels.cache(), call, workspace, bench->stream()));
  });
  bench->run({std::string("only read ") + f.name, s.name, bytes, 0, {}},
             [&](int) { launch_read_only(contiguous, bytes, sms, sink, bench->stream()); });
  for (void* p : {static_cast<void*>(q), static_cast<void*>(out), static_cast<void*>(workspace),
                  static_cast<void*>(sink), static_cast<void*>(contiguous)}) {
    check(cudaFree(p), "free");
  }
}

// An append puts a token into every residual; the last one of a block quantises it.
void run_append(Bench* bench, const Format& f, uint32_t seed) {
  const Shape s = {64, 4096, "64 x 8 rows"};
  const Channels channels(f, s, seed);
  const int64_t rows = channels.cache().num_rows, token = rows * kHeadDim * 4;
  const int32_t tokens = f.tokens;
  channels.set_residual(0);
  // 24 replays: the residual does not fill.
  bench->run({std::string("append ") + f.name, s.name, token, token, {}},
             [&](int) { channels.append(bench->stream()); });
  // Every row fills its block at once; its residual is then one token short again.
  const std::vector<int32_t> counts(rows, tokens - 1), zeros(rows, 32);
  int32_t *full = device_array(counts), *blocks = device_array(zeros);
  const int64_t block = rows * (int64_t{tokens} * kHeadDim * 4);
  bench->run({std::string("append and quantise ") + f.name,
              s.name,
              token + block,
              token + rows * channels.cache().layout.bytes,
              {}},
             [&](int) {
               check(cudaMemcpyAsync(channels.cache().residual_tokens, full, 4 * rows,
                                     cudaMemcpyDeviceToDevice, bench->stream()),
                     "counts");
               check(cudaMemcpyAsync(channels.cache().block_count, blocks, 4 * rows,
                                     cudaMemcpyDeviceToDevice, bench->stream()),
                     "counts");
               channels.append(bench->stream());
             });
  check(cudaFree(full), "free");
  check(cudaFree(blocks), "free");
}

void run_fill(Bench* bench, const Format& f, uint32_t seed) {
  const Shape s = {32, 4096, "32 x 4096 tokens, a layer"};
  const Channels channels(f, s, seed);
  const int64_t values = int64_t{s.sequences} * s.tokens * kKvHeads * kHeadDim;
  bench->run({std::string("fill ") + f.name, s.name, 4 * values, channels.attended_bytes(), {}},
             [&](int) { channels.fill(bench->stream()); });
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv::bench;
  const uint32_t seed = std::random_device{}();
  Bench bench(read_options(argc, argv));
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
  const Format formats[] = {{"kc4v4/128", 4, 4, 128},
                            {"kc4v2/128", 4, 2, 128},
                            {"kc2v2/128", 2, 2, 128},
                            {"kc4v4/64", 4, 4, 64}};
  const Shape shapes[] = {{1, 32768, "1 x 32768"},
                          {8, 32768, "8 x 32768"},
                          {64, 4096, "64 x 4096"},
                          {64, 4159, "64 x 4159"}};
  for (const Format& f : formats) {
    for (const Shape& s : shapes) run_attention(&bench, f, s, sms, seed);
  }
  for (const Format& f : {formats[0], formats[2], formats[3]}) {
    run_append(&bench, f, seed);
    run_fill(&bench, f, seed);
  }
  bench.write_json();
  return 0;
}

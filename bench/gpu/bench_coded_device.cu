// A store of coded pages on the GPU: attention of one layer through KvStore::attend(), a step of
// all rows with and without blocks that fill up, the end of the prompts: the first ones, from which
// the codebooks are made, and later ones. Random keys and values whose codes carry about 2.7 bits.
//
//   bench_coded_device [--mixed | --broad] [--out FILE] [--commit HASH]
//
// --mixed: rows of which every n-th block is kept at a fixed rate (K8V4), beside rows of coded
// blocks alone. --broad: other queries and head_dims.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tierkv/half.h"
#include "tierkv/store.h"

namespace {

using namespace tierkv;

struct Shape {
  int32_t sequences, tokens, layers;
  int32_t max_length = 11;  // of a code word
  int32_t fixed_every = 0;  // 0: no block is at a fixed rate
  int32_t head_dim = 128, q_heads = 32, q_len = 1;
  DType dtype = DType::kFloat16;  // of queries

  int64_t token_values() const { return int64_t{8} * head_dim; }  // of a layer's keys
  size_t query_values() const { return size_t(sequences) * q_len * q_heads * head_dim; }
};

KvStoreConfig store_config(const Shape& shape) {
  KvStoreConfig c;
  c.layout.num_layers = shape.layers;
  c.layout.num_q_heads = shape.q_heads;
  c.layout.num_kv_heads = 8;
  c.layout.head_dim = shape.head_dim;
  c.layout.sm_scale = 1 / std::sqrt(static_cast<double>(shape.head_dim));
  c.policy.window_tokens = 64;
  c.max_sequences = shape.sequences;
  c.max_tokens = shape.tokens + 300;
  const int64_t rows = int64_t{shape.sequences} * shape.layers * 8;
  // Raw in the prompt; a block at a fixed rate takes 0.39 pages.
  const int32_t blocks = shape.tokens / 64, fixed = shape.fixed_every > 0 ? blocks / 4 : 0;
  c.num_pages = static_cast<int32_t>(rows * (blocks + 4 + blocks / 4 + fixed));
  c.coded.enabled = true;
  c.coded.max_length = shape.max_length;
  c.coded.key_steps.assign(shape.layers * 8, 0.63f);  // of values of deviation 1
  c.coded.value_steps.assign(shape.layers * 8, 0.63f);
  c.coded.fixed_blocks = shape.fixed_every > 0;
  return c;
}

float milliseconds(cudaEvent_t begin, cudaEvent_t end) {
  float ms = 0;
  cudaEventSynchronize(end);
  cudaEventElapsedTime(&ms, begin, end);
  return ms;
}

float median(std::vector<float> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<int64_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

struct Timed {
  std::vector<SequenceId> ids;
  uint16_t *x = nullptr, *q = nullptr, *out = nullptr;
  float* scores = nullptr;  // [sequences, 8, tokens]: a significant token in every n-th block
  float* probabilities = nullptr;  // [sequences, 8, tokens + 300]
  cudaEvent_t begin = nullptr, end = nullptr;
  SequenceList list() const { return {ids.data(), static_cast<int32_t>(ids.size())}; }
};

// As many tokens of all sequences as a call of append() gets.
constexpr int32_t kChunk = 512;

void make_tokens(const Shape& shape, Timed* t) {
  const size_t chunk = size_t(shape.token_values()) * kChunk * shape.sequences;
  std::mt19937 rng(std::random_device{}());
  std::normal_distribution<float> normal;
  std::vector<uint16_t> some(size_t{1} << 20);
  for (uint16_t& x : some) x = float_to_half(normal(rng));
  cudaMalloc(&t->x, (chunk + some.size()) * 2);
  for (size_t i = 0; i < chunk; i += some.size()) {
    cudaMemcpy(t->x + i, some.data(), some.size() * 2, cudaMemcpyHostToDevice);
  }
}

void make_scores(const Shape& shape, Timed* t) {
  if (shape.fixed_every == 0) return;
  std::vector<float> line(shape.tokens), all;
  for (int32_t p = 0; p < shape.tokens; p += 64 * shape.fixed_every) line[p] = 1;
  for (int32_t i = 0; i < shape.sequences * 8; ++i) all.insert(all.end(), line.begin(), line.end());
  cudaMalloc(&t->scores, all.size() * sizeof(float));
  cudaMemcpy(t->scores, all.data(), all.size() * sizeof(float), cudaMemcpyHostToDevice);
}

// Prompts of new sequences, in place of those that there are.
Status fill(const Shape& shape, DeviceKvStore* store, Timed* t, float* end_ms) {
  for (const SequenceId id : t->ids) {
    if (Status s = store->release(id); !s) return s;
  }
  t->ids.clear();
  for (int32_t i = 0; i < shape.sequences; ++i) {
    const Result<SequenceId> id = store->add_sequence();
    if (!id) return id.status();
    t->ids.push_back(*id);
  }
  for (int32_t done = 0; done < shape.tokens; done += kChunk) {
    if (Status s = store->begin_prompt(t->list(), kChunk); !s) return s;
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      if (Status s = store->append({t->list(), layer, kChunk, t->x, t->x + 1024}); !s) return s;
    }
  }
  for (int32_t layer = 0; layer < shape.layers && t->scores != nullptr; ++layer) {
    if (Status s = store->score_prompt({t->list(), layer, t->scores, shape.tokens}); !s) return s;
  }
  if (Status s = store->take_status(); !s) return s;
  cudaEventRecord(t->begin);
  if (Status s = store->end_prompt(t->list()); !s) return s;
  cudaEventRecord(t->end);
  *end_ms = milliseconds(t->begin, t->end);
  return store->take_status();
}

struct Times {
  std::vector<float> attend, idle, filling;
  std::vector<float> with_probabilities;  // attend that gives them, too
  float first_end_prompt = 0, end_prompt = 0;
  float device_books = 0;  // first_end_prompt where the device makes the codebooks
};

// Steps, each with attention of one layer.
Status time_steps(const Shape& shape, DeviceKvStore* store, Timed* t, Times* times) {
  for (int32_t i = 0; i < 140; ++i) {
    cudaEventRecord(t->begin);
    if (Status s = store->begin_step(t->list(), 1); !s) return s;
    cudaEventRecord(t->end);
    const float step = milliseconds(t->begin, t->end);
    // A block fills up whenever 64 tokens are behind the window.
    ((shape.tokens + i + 1) % 64 == 0 ? times->filling : times->idle).push_back(step);
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      if (Status s = store->append({t->list(), layer, 1, t->x, t->x + 1024}); !s) return s;
    }
    AttendRequest request;
    request.sequences = t->list();
    request.q_len = shape.q_len;
    request.dtype = shape.dtype;
    request.q = t->q;
    request.out = t->out;
    if (Status s = store->attend(request); !s) return s;  // plans
    request.layer = shape.layers - 1;
    cudaEventRecord(t->begin);
    if (Status s = store->attend(request); !s) return s;
    cudaEventRecord(t->end);
    times->attend.push_back(milliseconds(t->begin, t->end));
    if (i >= 20) continue;
    request.probabilities = t->probabilities;
    request.stride = shape.tokens + 300;
    cudaEventRecord(t->begin);
    if (Status s = store->attend(request); !s) return s;
    cudaEventRecord(t->end);
    times->with_probabilities.push_back(milliseconds(t->begin, t->end));
  }
  return store->take_status();
}

// The first prompts of a store that makes its codebooks on the device.
Status time_device_books(const Shape& shape, Timed* t, float* end_ms) {
  KvStoreConfig config = store_config(shape);
  config.coded.codebooks = CodebookSource::kDevice;
  auto store = create_device_store(config, nullptr);
  if (!store) return store.status();
  Status s = fill(shape, store->get(), t, end_ms);
  t->ids.clear();
  return s;
}

// Of all tokens.
double fixed_share(const Shape& shape, const StoreStats& stats) {
  const double all = double(shape.sequences) * shape.tokens * 8 * shape.layers;
  return shape.fixed_every == 0 ? 0 : double(stats.tokens[static_cast<int32_t>(Tier::kHigh)]) / all;
}

// *json: the shape and its times.
Status run(const Shape& shape, std::string* json) {
  auto made = create_device_store(store_config(shape), nullptr);
  if (!made) return made.status();
  DeviceKvStore* store = made->get();
  Timed t;
  Times times;
  cudaEventCreate(&t.begin);
  cudaEventCreate(&t.end);
  std::vector<uint16_t> q(shape.query_values());
  std::mt19937 rng(std::random_device{}());
  std::normal_distribution<float> normal;
  const bool is_half = shape.dtype == DType::kFloat16;
  for (uint16_t& x : q) x = is_half ? float_to_half(normal(rng)) : float_to_bfloat16(normal(rng));
  cudaMalloc(&t.q, q.size() * 2);
  cudaMalloc(&t.out, q.size() * 2);
  cudaMalloc(&t.probabilities,
             size_t(shape.sequences) * shape.q_len * 8 * (shape.tokens + 300) * sizeof(float));
  cudaMemcpy(t.q, q.data(), q.size() * 2, cudaMemcpyHostToDevice);
  make_tokens(shape, &t);
  make_scores(shape, &t);
  if (Status s = time_device_books(shape, &t, &times.device_books); !s) return s;
  if (Status s = fill(shape, store, &t, &times.first_end_prompt); !s) return s;
  std::vector<float> ends(3);
  for (float& ms : ends) {
    if (Status s = fill(shape, store, &t, &ms); !s) return s;
  }
  times.end_prompt = median(ends);
  const Result<StoreStats> stats = store->stats();
  if (!stats) return stats.status();
  if (Status s = time_steps(shape, store, &t, &times); !s) return s;
  const double values = 2.0 * shape.sequences * shape.token_values();  // of a token of all
  const double codes = values * (shape.tokens + 70), coded = values * (shape.tokens - 64);
  const double attend = median(times.attend);
  char text[800];
  std::snprintf(
      text, sizeof(text),
      "{\"sequences\":%d,\"tokens\":%d,\"layers\":%d,\"max_length\":%d,\"fixed_every\":%d,"
      "\"head_dim\":%d,\"q_heads\":%d,\"q_len\":%d,\"queries\":\"%s\","
      "\"fixed_share\":%.4f,\"ratio\":%.3f,"
      "\"pool_gain\":%.3f,\"attend_us\":%.1f,\"tera_codes_per_s\":%.3f,"
      "\"attend_with_probabilities_us\":%.1f,\"step_us\":%.1f,"
      "\"filling_step_us\":%.1f,\"first_end_prompt_ms\":%.2f,"
      "\"first_end_prompt_device_books_ms\":%.2f,\"end_prompt_ms\":%.2f,"
      "\"end_prompt_giga_codes_per_s\":%.1f}",
      shape.sequences, shape.tokens, shape.layers, shape.max_length, shape.fixed_every,
      shape.head_dim, shape.q_heads, shape.q_len, is_half ? "fp16" : "bfloat16",
      fixed_share(shape, *stats), stats->nominal_ratio(), stats->pool_gain(), attend * 1e3,
      codes / attend * 1e-9, median(times.with_probabilities) * 1e3, median(times.idle) * 1e3,
      median(times.filling) * 1e3, times.first_end_prompt, times.device_books, times.end_prompt,
      coded * shape.layers / times.end_prompt * 1e-6);
  *json = text;
  cudaFree(t.x);
  cudaFree(t.q);
  cudaFree(t.out);
  cudaFree(t.scores);
  cudaFree(t.probabilities);
  return Status::ok();
}

}  // namespace

int main(int argc, char** argv) {
  std::string out, commit = "unknown", runs;
  const bool mixed = argc > 1 && std::strcmp(argv[1], "--mixed") == 0;
  const bool broad = argc > 1 && std::strcmp(argv[1], "--broad") == 0;
  for (int i = mixed || broad ? 2 : 1; i < argc; i += 2) {
    const bool has_value = i + 1 < argc;
    if (has_value && std::strcmp(argv[i], "--out") == 0) {
      out = argv[i + 1];
    } else if (has_value && std::strcmp(argv[i], "--commit") == 0) {
      commit = argv[i + 1];
    } else {
      std::fprintf(stderr, "bench_coded_device [--mixed | --broad] [--out FILE] [--commit HASH]\n");
      return 2;
    }
  }
  std::string unused;  // the first calls load kernels
  if (const Status s = run({1, 1024, 1}, &unused); !s) {
    std::fprintf(stderr, "%s\n", s.message().c_str());
    return 1;
  }
  const std::vector<Shape> plain_shapes = {{64, 4096, 4, 11}, {64, 4096, 4, 10}, {8, 32768, 2, 11},
                                           {8, 32768, 2, 10}, {1, 32768, 4, 11}, {1, 32768, 4, 10}};
  const std::vector<Shape> mixed_shapes = {
      {64, 4096, 1, 10},    {64, 4096, 1, 10, 16}, {64, 4096, 1, 10, 8},  {64, 4096, 1, 10, 4},
      {64, 4096, 1, 10, 1}, {8, 32768, 1, 10},     {8, 32768, 1, 10, 16}, {8, 32768, 1, 10, 8},
      {1, 32768, 1, 10},    {1, 32768, 1, 10, 8}};
  constexpr Shape kUsual = {64, 4096, 1, 10};
  std::vector<Shape> broad_shapes(10, kUsual);
  for (int32_t i = 0; i < 3; ++i) broad_shapes[1 + i].q_len = 2 << i;
  broad_shapes[4].dtype = DType::kBFloat16;
  for (int32_t i = 0; i < 3; ++i) broad_shapes[5 + i].q_heads = i == 0 ? 8 : 32 << i;
  broad_shapes[8].head_dim = 64;
  broad_shapes[9].head_dim = 256;
  for (const Shape& shape : mixed ? mixed_shapes : broad ? broad_shapes : plain_shapes) {
    std::string json;
    if (const Status s = run(shape, &json); !s) {
      std::fprintf(stderr, "%s\n", s.message().c_str());
      return 1;
    }
    std::printf("%s\n", json.c_str());
    runs += (runs.empty() ? "  " : ",\n  ") + json;
  }
  if (out.empty()) return 0;
  cudaDeviceProp device;
  FILE* f = std::fopen(out.c_str(), "w");
  if (f == nullptr || cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
    std::fprintf(stderr, "%s: cannot be written\n", out.c_str());
    return 1;
  }
  std::fprintf(f,
               "{\"schema\": \"tierkv.bench.coded_device/4\", \"gpu\": \"%s\", \"commit\": \"%s\", "
               "\"kv_heads\": 8, \"window\": 64, \"runs\": "
               "[\n%s\n]}\n",
               device.name, commit.c_str(), runs.c_str());
  return std::fclose(f) == 0 ? 0 : 1;
}

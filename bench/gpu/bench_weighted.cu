// SPDX-License-Identifier: Apache-2.0
// Coded blocks on the GPU: encoding and decoding of the keys and values of a layer.
//
//   bench_weighted [--out FILE] [--commit HASH] [--only NAME] [--replays N]
//
// Keys and values are about normal; keys get RoPE in halves, weights and means. 0.63 deviations a
// step of keys, 0.45 sqrt(12) root mean squares of values: about 2.7 and 1.5 bits a code.
#include <cmath>
#include <functional>

#include "bench/baselines/weighted/weighted_calls.h"
#include "bench/gpu/codec_bench.cuh"
#include "codec/format/element.h"
#include "codec/host/coded/weighted_books.h"
#include "codec/host/coded/weighted_rows.h"
#include "tools/analysis/scheme/importance.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kTokens = 4096, kSinks = 4, kBlocks = kTokens / kBlockTokens;
constexpr float kKeyStep = 0.63f, kValueStep = 1.5588f;

template <class T>
T* device_memory(int64_t count, int byte = 0) {
  void* p = nullptr;
  check(cudaMalloc(&p, static_cast<size_t>(count) * sizeof(T)), "array");
  check(cudaMemset(p, byte, static_cast<size_t>(count) * sizeof(T)), "array");
  return static_cast<T*>(p);
}
template <class T>
std::vector<T> download(const T* from, int64_t count) {
  std::vector<T> x(static_cast<size_t>(count));
  check(cudaMemcpy(x.data(), from, x.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return x;
}

void require_ok(const StatusCode* status, int64_t count) {
  for (const StatusCode code : download(status, count)) {
    if (code == StatusCode::kOk) continue;
    std::fprintf(stderr, "bench_weighted: a block is %s\n", status_name(code));
    std::exit(1);
  }
}

// A layer of `rows` rows of kTokens tokens.
struct Layer {
  int32_t head_dim, rows;
  DType dtype;
  int64_t elements;  // of a component
  WeightedEncode call;
  WeightedPlace* room[2];     // what places are before a call
  int64_t bytes[2] = {0, 0};  // of the blocks, by component
  RopeTable rope;
  WeightedRow row;  // every row
  std::vector<int8_t> importance;

  Layer(int32_t head_dim_, int32_t rows_, DType dtype_)
      : head_dim(head_dim_),
        rows(rows_),
        dtype(dtype_),
        elements(int64_t{rows_} * kTokens * head_dim_) {
    uint16_t* x[2];
    for (uint32_t c = 0; c < 2; ++c) {
      x[c] = device_memory<uint16_t>(elements);
      fill_elements<<<1024, 256>>>(x[c], elements, 17 + c, dtype == DType::kBFloat16);
    }
    call.keys = x[0], call.values = x[1];
    make_rows();
    make_ranges();
    call.token_stride = head_dim;
    call.dtype = dtype;
    call.num_ranges = rows, call.most_blocks = kBlocks;
    call.status = device_memory<StatusCode>(2 * blocks());
    call.size = 2 * elements;  // 8 bits a code
    call.bytes = device_memory<uint8_t>(call.size);
    make_places();
    make_importance();
    for (int32_t c = 0; c < 2; ++c) make_book(c);
  }
  int64_t blocks() const { return int64_t{rows} * kBlocks; }

 private:
  void make_rows() {
    Result<RopeTable> table = make_rope_table(Rope::plain(500000, head_dim), head_dim, kTokens);
    require(table.status());
    rope = std::move(*table);
    call.rows.rope = {device_array(rope.place), device_array(rope.block), rope.pairing, rope.pairs,
                      rope.blocks};
    std::vector<float> scales;
    std::vector<uint16_t> means;
    for (int64_t i = 0; i < int64_t{rows} * head_dim; ++i) {
      const auto turn = static_cast<float>(i % head_dim % 11) / 10;
      scales.push_back(dim_scale(kKeyStep, 0.8f + 0.4f * turn));
      means.push_back(float_to_half(turn - 0.5f));
      if (i >= head_dim) continue;
      row.key_weight.push_back(0.8f + 0.4f * turn);
      row.key_mean.push_back(means.back());
    }
    row.key_step = kKeyStep, row.value_step = kValueStep;
    row.head_dim = head_dim;
    row.rope = &rope;
    call.rows.key_scales = device_array(scales);
    call.rows.key_means = device_array(means);
    call.rows.value_steps = device_array(std::vector<float>(static_cast<size_t>(rows), kValueStep));
    call.rows.num_rows = rows, call.rows.head_dim = head_dim;
  }
  void make_ranges() {
    std::vector<WeightedRange> ranges;
    for (int32_t r = 0; r < rows; ++r) {
      WeightedRange range;
      range.decided = int64_t{r} * kTokens + kSinks;
      range.at = range.decided * head_dim;
      range.first = range.body_first = kSinks;
      range.last = range.body_last = kTokens;
      range.row = r;
      range.first_block = r * kBlocks;
      ranges.push_back(range);
    }
    call.ranges = device_array(ranges);
  }
  // 8 bits a code for each block.
  void make_places() {
    const auto units = static_cast<uint32_t>(kBlockTokens * head_dim / kBlockAlignment);
    for (uint32_t c = 0; c < 2; ++c) {
      std::vector<WeightedPlace> places;
      for (uint32_t i = 0; i < blocks(); ++i) places.push_back({(2 * i + c) * units, units});
      room[c] = device_array(places);
      call.places[c] = device_memory<WeightedPlace>(blocks());
    }
  }
  void make_importance() {
    std::vector<float> significance;
    for (size_t i = 0; i < kTokens; ++i) {
      significance.push_back(std::exp2(static_cast<float>(i * 2654435761u % 97) / 16 - 4) /
                             kTokens);
    }
    importance.resize(kTokens);
    require(importance_exponents(significance.data(), kTokens, 0, importance.data()));
    std::vector<uint32_t> words;  // the exponent in byte 0
    for (int64_t i = 0; i < int64_t{rows} * kTokens; ++i) {
      words.push_back(static_cast<uint8_t>(importance[i % kTokens]));
    }
    call.decided = reinterpret_cast<const uint8_t(*)[4]>(device_array(words));
  }
  // Makes a codebook of the codes of row 0.
  void make_book(int32_t c) {
    const auto component = static_cast<Component>(c);
    std::vector<float> x;
    for (const uint16_t bits :
         download(c == 0 ? call.keys : call.values, int64_t{kTokens} * head_dim)) {
      x.push_back(raw_to_float(dtype, bits));
    }
    const WeightedTokens tokens{x.data(), kTokens, 0};
    std::vector<int8_t> exponents(kTokens);
    std::vector<int16_t> codes(x.size());
    require(token_exponents(component, tokens, head_dim, importance.data(), exponents.data()));
    require(quantize_weighted(row, component, tokens, exponents.data(), codes.data()));
    BookSpec spec;
    spec.books = 1;
    spec.code.mode = BlockMode::kPair;
    const auto choice = choose_books(component, head_dim, {{codes.data(), kTokens}}, spec);
    require(choice.status());
    const Codebook& book = choice->family.books.front();
    DeviceCodebook on_device = device_codebook(book);
    on_device.words = device_array(encoder_words(book));
    on_device.table = device_array(device_table(book));
    on_device.cheapest = device_array(book.cheapest);
    call.books[c].codebook = device_array(std::vector<DeviceCodebook>{on_device});
  }
};

std::string shape_of(const Layer& layer) {
  return std::to_string(layer.rows) + "x" + std::to_string(kTokens) + " d" +
         std::to_string(layer.head_dim) + (layer.dtype == DType::kBFloat16 ? " bf16" : " fp16");
}
void print_codes(const char* what, int64_t codes, const Timing& t) {
  std::printf("%58s %s: %.1f G codes/s\n", "", what, 1e-3 * static_cast<double>(codes) / t.median);
}
Timing run(Bench* bench, const Measured& m, int64_t codes, const std::function<void(int)>& launch) {
  if (!bench->wants(m.name)) return {};
  Measured timed = m;
  timed.time = time_graph(bench->stream(), 1, bench->replays(), launch);
  bench->add(timed);
  if (codes > 0) print_codes(m.name.c_str(), codes, timed.time);
  return timed.time;
}

void run_encode(Bench* bench, Layer* layer) {
  const std::string shape = shape_of(*layer);
  const int64_t codes = 2 * layer->elements;
  WeightedEncode& call = layer->call;
  const cudaStream_t stream = bench->stream();
  const auto encode_to = [&](const WeightedEncode& to) {
    for (int32_t c = 0; c < 2; ++c) {
      check(cudaMemcpyAsync(to.places[c], layer->room[c], sizeof(WeightedPlace) * layer->blocks(),
                            cudaMemcpyDeviceToDevice, stream),
            "places");
    }
    require(encode_weighted(to, stream));
  };
  const auto encode = [&](int) { encode_to(call); };
  encode(0);
  require_ok(call.status, 2 * layer->blocks());
  for (int32_t c = 0; c < 2; ++c) {
    for (const WeightedPlace& p : download(call.places[c], layer->blocks())) {
      layer->bytes[c] += int64_t{16} * p.units;
    }
  }
  std::printf("%58s keys %.3f bits, values %.3f bits a code\n", "",
              8.0 * static_cast<double>(layer->bytes[0]) / static_cast<double>(layer->elements),
              8.0 * static_cast<double>(layer->bytes[1]) / static_cast<double>(layer->elements));
  run(bench, {"weighted: encode a layer", shape, 2 * codes, layer->bytes[0] + layer->bytes[1], {}},
      codes, encode);
  WeightedEncode sizes = call;
  sizes.bytes = nullptr;
  run(bench, {"weighted: sizes of a layer", shape, 2 * codes, 0, {}}, codes,
      [&](int) { encode_to(sizes); });
}

// Times decoding of the blocks that encode() left.
void run_decode(Bench* bench, const Layer& layer) {
  uint16_t* const out = device_memory<uint16_t>(layer.elements);
  for (int32_t c = 0; c < 2; ++c) {
    const WeightedEncode& from = layer.call;
    WeightedDecode call;
    call.bytes = from.bytes;
    call.places = from.places[c];
    call.ranges = from.ranges;
    call.out = out;
    call.status = from.status;
    call.rows = from.rows;
    call.book = from.books[c];
    call.component = static_cast<Component>(c);
    call.dtype = from.dtype;
    call.size = from.size;
    call.token_stride = layer.head_dim;
    call.num_ranges = layer.rows, call.most_blocks = kBlocks;
    // Twice the mean of a slice holds every block of these.
    const int64_t slices = layer.blocks() * ((layer.head_dim + kSliceDims - 1) / kSliceDims);
    call.max_block_bytes = static_cast<int32_t>(2 * layer.bytes[c] / slices);
    const auto name = std::string("weighted: decode ") + (c == 0 ? "keys" : "values");
    run(bench, {name, shape_of(layer), layer.bytes[c], 2 * layer.elements, {}}, layer.elements,
        [&](int) { require(decode_weighted(call, bench->stream())); });
    require_ok(call.status, layer.blocks());
    if (c == 1) continue;
    call.rows.rope = {};
    run(bench, {name + " without RoPE", shape_of(layer), layer.bytes[c], 2 * layer.elements, {}},
        layer.elements, [&](int) { require(decode_weighted(call, bench->stream())); });
  }
  check(cudaFree(out), "free");
}

int main_of(int argc, char** argv) {
  const Options options = read_options(argc, argv);
  Bench bench(options);
  const struct {
    int32_t head_dim, rows;
    DType dtype;
  } kLayers[] = {{128, 512, DType::kFloat16},
                 {128, 512, DType::kBFloat16},
                 {64, 512, DType::kFloat16},
                 {96, 512, DType::kFloat16},
                 {256, 256, DType::kFloat16}};
  for (const auto& l : kLayers) {
    Layer layer(l.head_dim, l.rows, l.dtype);
    check(cudaDeviceSynchronize(), "layer");
    run_encode(&bench, &layer);
    run_decode(&bench, layer);
  }
  bench.write_json();
  return 0;
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  return tierkv::bench::main_of(argc, argv);
}

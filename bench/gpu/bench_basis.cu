// Changes of basis: what a step and a prompt pay for them in a layer, beside the copy ceiling of
// the same run.
//
//   bench_basis [--out FILE] [--commit HASH] [--only TEXT] [--replays N]
//
// Every case is timed by graph replay over several layers, so that vectors and matrices come from
// memory and not from the L2 cache.
#include "bench/gpu/codec_bench.cuh"
#include "codec/format/element.h"
#include "codec/gpu/basis_batch.h"

namespace tierkv::bench {
namespace {

constexpr int32_t kKvHeads = 8, kQueryHeads = 32, kHeadDim = 128;

template <class T>
const T* uploaded(const std::vector<T>& x) {
  return x.empty() ? nullptr : device_array(x);
}
BasisOperand upload(const std::vector<Basis>& rows, BasisUse use, DType dtype) {
  const PackedBasis p = pack_basis(rows, use, dtype);
  return {p.kind,
          use,
          p.head_dim,
          uploaded(p.signs),
          uploaded(p.mean),
          uploaded(p.parts),
          uploaded(p.unscale),
          uploaded(p.matrix)};
}

// Orthonormal, so that its transpose is its inverse; the time does not depend on the values.
std::vector<Basis> bases(BasisKind kind, int32_t rows, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> mean(kHeadDim), forward(kHeadDim * kHeadDim), inverse(forward.size());
  for (float& x : mean) x = normal(rng);
  Basis basis = Basis::hadamard(kHeadDim);
  if (kind == BasisKind::kMatrix) {
    for (int32_t i = 0; i < kHeadDim; ++i) {
      std::vector<float> e(kHeadDim, 0.0f);
      e[i] = 1;
      basis.apply(e.data(), 1);
      for (int32_t j = 0; j < kHeadDim; ++j) {
        forward[i * kHeadDim + j] = inverse[j * kHeadDim + i] = e[j];
      }
    }
    basis = Basis::matrix(mean, forward, inverse);
  }
  return std::vector<Basis>(rows, basis);
}

// Vectors of all layers of one component.
struct Vectors {
  uint8_t *x = nullptr, *y = nullptr;
  int64_t x_bytes, y_bytes;

  Vectors(int32_t layers, int64_t vectors, int32_t element_bytes, int32_t y_element_bytes,
          uint32_t seed)
      : x_bytes(vectors * kHeadDim * element_bytes), y_bytes(vectors * kHeadDim * y_element_bytes) {
    check(cudaMalloc(&x, layers * x_bytes), "vectors");
    check(cudaMalloc(&y, layers * y_bytes), "vectors");
    fill_elements<<<1024, 256>>>(reinterpret_cast<uint16_t*>(x), layers * x_bytes / 2, seed, false);
    check(cudaDeviceSynchronize(), "fill");
  }
  ~Vectors() { cudaFree(x), cudaFree(y); }
  Vectors(const Vectors&) = delete;
  Vectors& operator=(const Vectors&) = delete;

  void place(int32_t layer, BasisVectors* v) const {
    v->first_row = layer * kKvHeads;
    v->x = x + layer * x_bytes;
    v->y = y + layer * y_bytes;
  }
};

BasisVectors of(const BasisOperand& operand, int32_t heads, int64_t tokens, DType dtype) {
  BasisVectors v;
  v.operand = operand;
  v.kv_heads = kKvHeads;
  v.heads = heads;
  v.tokens = tokens;
  v.dtype = dtype;
  v.sm_scale = 0.088f;
  return v;
}

struct Case {
  std::string name;
  BasisKind kind;
  uint32_t seed;
};

void run_step(Bench* bench, const Case& c) {
  constexpr int32_t kLayers = 32, kTokens = 64;
  const std::vector<Basis> rows = bases(c.kind, kLayers * kKvHeads, c.seed);
  const DType half = DType::kFloat16;
  const BasisOperand apply[2] = {upload(rows, BasisUse::kApply, half),
                                 upload(rows, BasisUse::kApply, half)};
  const BasisOperand query = upload(rows, BasisUse::kQuery, half);
  const BasisOperand undo = upload(rows, BasisUse::kUndo, half);
  const Vectors k(kLayers, kTokens * kKvHeads, 2, 4, c.seed),
      v(kLayers, kTokens * kKvHeads, 2, 4, 1);
  const Vectors q(kLayers, kTokens * kQueryHeads, 2, 2, 2),
      o(kLayers, kTokens * kQueryHeads, 2, 2, 3);
  const std::vector<float> zeros(kTokens * kQueryHeads, 0.0f);
  float* shift = device_array(zeros);
  float *lse_in = device_array(zeros), *lse_out = device_array(zeros);
  const auto append = [&](int layer) {
    BasisBatch batch = {
        {of(apply[0], kKvHeads, kTokens, half), of(apply[1], kKvHeads, kTokens, half)}, 2};
    k.place(layer, &batch.part[0]);
    v.place(layer, &batch.part[1]);
    require(map_basis(batch, bench->stream()));
  };
  const auto map_q = [&](int layer) {
    BasisBatch batch = {{of(query, kQueryHeads, kTokens, half), {}}, 1};
    q.place(layer, &batch.part[0]);
    batch.part[0].lse_shift = shift;
    require(map_basis(batch, bench->stream()));
  };
  const auto map_out = [&](int layer) {
    BasisBatch batch = {{of(undo, kQueryHeads, kTokens, half), {}}, 1};
    o.place(layer, &batch.part[0]);
    batch.part[0].lse_shift = shift;
    batch.part[0].lse_in = lse_in;
    batch.part[0].lse_out = lse_out;
    require(map_basis(batch, bench->stream()));
  };
  const int64_t matrix =
      c.kind == BasisKind::kMatrix ? int64_t{kKvHeads} * kHeadDim * kHeadDim * 4 : 0;
  const int64_t query_bytes = int64_t{kTokens} * kQueryHeads * kHeadDim * 2;
  const int64_t append_bytes = int64_t{kTokens} * kKvHeads * kHeadDim * 2;
  const char* shape = "64 sequences, a layer";
  bench->run({c.name + " append", shape, 2 * (append_bytes + matrix), 4 * append_bytes, {}}, append,
             kLayers);
  bench->run({c.name + " q", shape, query_bytes + matrix, query_bytes, {}}, map_q, kLayers);
  bench->run({c.name + " out", shape, query_bytes + matrix, query_bytes, {}}, map_out, kLayers);
  bench->run(
      {c.name + " append, q and out",
       shape,
       2 * (append_bytes + query_bytes) + 4 * matrix,
       4 * append_bytes + 2 * query_bytes,
       {}},
      [&](int layer) { append(layer), map_q(layer), map_out(layer); }, kLayers);
}

struct PromptCase {
  int32_t sequences, layers;
  DType dtype;
  std::string shape;
};

void run_prompt(Bench* bench, const Case& c, const PromptCase& p) {
  const int64_t tokens = int64_t{p.sequences} * 4096, vectors = tokens * kKvHeads;
  const std::vector<Basis> rows = bases(c.kind, p.layers * kKvHeads, c.seed);
  const BasisOperand apply = upload(rows, BasisUse::kApply, p.dtype);
  const int32_t bytes = dtype_bytes(p.dtype);
  const Vectors k(p.layers, vectors, bytes, 4, c.seed), v(p.layers, vectors, bytes, 4, 1);
  Measured m = {
      c.name + " prompt " + dtype_name(p.dtype), p.shape, 2 * k.x_bytes, 2 * k.y_bytes, {}};
  if (c.kind == BasisKind::kMatrix) m.operations = 2 * vectors * kHeadDim * kHeadDim * 2;
  bench->run(
      m,
      [&](int layer) {
        BasisBatch batch = {
            {of(apply, kKvHeads, tokens, p.dtype), of(apply, kKvHeads, tokens, p.dtype)}, 2};
        k.place(layer, &batch.part[0]);
        v.place(layer, &batch.part[1]);
        require(map_basis(batch, bench->stream()));
      },
      p.layers);
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  using namespace tierkv;
  using namespace tierkv::bench;
  const uint32_t seed = std::random_device{}();
  Bench bench(read_options(argc, argv));
  for (const Case& c :
       {Case{"hadamard", BasisKind::kHadamard, seed}, Case{"matrix", BasisKind::kMatrix, seed}}) {
    run_step(&bench, c);
    run_prompt(&bench, c, {1, 8, DType::kFloat16, "4096 tokens, a layer"});
    run_prompt(&bench, c, {16, 1, DType::kFloat16, "16 x 4096 tokens, a layer"});
    run_prompt(&bench, c, {16, 1, DType::kBFloat16, "16 x 4096 tokens, a layer"});
    run_prompt(&bench, c, {1, 2, DType::kFloat32, "4096 tokens, a layer"});
  }
  bench.write_json();
  return 0;
}

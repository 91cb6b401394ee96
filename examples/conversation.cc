// SPDX-License-Identifier: Apache-2.0
// A conversation over one compressed KV cache: turns of any length and answers token by token, then
// the same tokens as one prompt, which the store holds as the same bytes. The model is a stand-in:
// random keys, values and queries.
#include <cstdio>
#include <random>
#include <vector>

#include "tierkv/half.h"
#include "tierkv/kv_store.h"

namespace {

using namespace tierkv;

constexpr int kLayers = 2, kQHeads = 6, kKvHeads = 2, kHeadDim = 64, kTokens = 700;
constexpr int kTurns[] = {400, 90, 120}, kAnswer = 30;  // an answer behind each turn

// fp16 values of a normal distribution.
std::vector<uint16_t> random_values(std::mt19937* rng, size_t count) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(count);
  for (uint16_t& bits : x) bits = float_to_half(normal(*rng));
  return x;
}

struct Model {
  std::vector<uint16_t> k, v, q;  // [layers, tokens, heads, head_dim]
};

// [append]
// Tokens first .. first + count - 1: a prompt, a turn or a step.
Status give(KvStore* store, SequenceId id, const Model& model, int first, int count) {
  if (Status s = store->begin({&id, 1}, count); !s) return s;
  for (int layer = 0; layer < kLayers; ++layer) {
    const size_t token = static_cast<size_t>(layer) * kTokens + first;
    LayerAppend append;
    append.sequences = {&id, 1};
    append.layer = layer;
    append.tokens = count;
    append.k = model.k.data() + token * kKvHeads * kHeadDim;
    append.v = model.v.data() + token * kKvHeads * kHeadDim;
    if (Status s = store->append(append); !s) return s;
  }
  return Status::ok();
}
// [append]

// The newest token's attention over the last layer.
Status attend(KvStore* store, SequenceId id, const Model& model, std::vector<uint16_t>* out) {
  const Result<int32_t> tokens = store->num_tokens(id);
  if (!tokens) return tokens.status();
  const size_t token = static_cast<size_t>(kLayers - 1) * kTokens + *tokens - 1;
  out->resize(kQHeads * kHeadDim);
  LayerAttend request;
  request.sequences = {&id, 1};
  request.layer = kLayers - 1;
  request.q = model.q.data() + token * kQHeads * kHeadDim;
  request.out = out->data();
  return store->attend(request);
}

Status converse(KvStore* store, SequenceId id, const Model& model, int* tokens) {
  std::vector<uint16_t> out;
  for (const int turn : kTurns) {
    if (Status s = give(store, id, model, *tokens, turn); !s) return s;
    *tokens += turn;
    for (int i = 0; i < kAnswer; ++i, ++*tokens) {
      if (Status s = give(store, id, model, *tokens, 1); !s) return s;
      if (Status s = attend(store, id, model, &out); !s) return s;
    }
  }
  return Status::ok();
}

Status run() {
  // [config]
  StoreConfig config;
  config.layout = {kLayers, kQHeads, kKvHeads, kHeadDim, DType::kFloat16, true, 10000, 0.125};
  config.rope = {Rope::plain(10000, kHeadDim)};
  config.format = CodedFormat{};
  config.memory_bytes = 8 << 20;
  config.max_sequences = 4;
  config.max_tokens = kTokens;
  Result<std::unique_ptr<KvStore>> store = KvStore::create(config);
  // [config]
  if (!store) return store.status();
  std::mt19937 rng(1);
  Model model;
  model.k = random_values(&rng, kLayers * kTokens * kKvHeads * kHeadDim);
  model.v = random_values(&rng, kLayers * kTokens * kKvHeads * kHeadDim);
  model.q = random_values(&rng, kLayers * kTokens * kQHeads * kHeadDim);
  const Result<SequenceId> talk = (*store)->add_sequence(), prompt = (*store)->add_sequence();
  int tokens = 0;
  if (Status s = converse(store->get(), *talk, model, &tokens); !s) return s;
  if (Status s = give(store->get(), *prompt, model, 0, tokens); !s) return s;
  std::vector<uint16_t> a, b;
  if (Status s = attend(store->get(), *talk, model, &a); !s) return s;
  if (Status s = attend(store->get(), *prompt, model, &b); !s) return s;
  if (a != b) return Status(StatusCode::kCorrupt, "turns and one prompt differ");
  const Result<int64_t> held = (*store)->bytes_held(*talk);
  if (!held) return held.status();
  const int64_t raw = int64_t{4} * tokens * kLayers * kKvHeads * kHeadDim;
  std::printf("%d tokens in %lld bytes, %.0f %% of fp16; one prompt gives the same\n", tokens,
              static_cast<long long>(*held), 100.0 * static_cast<double>(*held) / raw);
  return (*store)->release(*talk);
}

}  // namespace

int main() {
  const Status s = run();
  if (!s) std::fprintf(stderr, "%s: %s\n", status_name(s.code()), s.message().c_str());
  return s ? 0 : 1;
}

// SPDX-License-Identifier: Apache-2.0
// A server's loop over one compressed KV cache: requests come, share a system prompt, are served
// together step by step, and give their memory back. A request that finds no pages waits. The model
// is a stand-in: random keys, values and queries.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "tierkv/half.h"
#include "tierkv/kv_store.h"

namespace {

using namespace tierkv;

constexpr int kLayers = 2, kQHeads = 8, kKvHeads = 2, kHeadDim = 128;
constexpr int kSystem = 300, kRequests = 12, kPrompt = 500, kAnswer = 40;

struct Running {
  SequenceId id;
  int left = 0;  // tokens to generate
};

// What the projections of a layer would give: fp16 [rows, heads, head_dim].
struct Model {
  std::mt19937 rng{7};
  std::vector<uint16_t> k, v, q, out;

  void project(int rows, int queries) {
    std::normal_distribution<float> normal;
    k.resize(static_cast<size_t>(rows) * kKvHeads * kHeadDim);
    v.resize(k.size());
    q.resize(static_cast<size_t>(queries) * kQHeads * kHeadDim);
    out.resize(q.size());
    for (std::vector<uint16_t>* x : {&k, &v, &q}) {
      for (uint16_t& bits : *x) bits = float_to_half(normal(rng));
    }
  }
};

// [pass]
// A forward pass: `tokens` new tokens of each sequence, attention for the newest of them.
Status forward(KvStore* store, SequenceList sequences, int tokens, Model* model) {
  if (Status s = store->begin(sequences, tokens); !s) return s;
  for (int layer = 0; layer < kLayers; ++layer) {
    model->project(sequences.count * tokens, sequences.count);
    LayerAppend append{sequences, layer, tokens, model->k.data(), model->v.data()};
    if (Status s = store->append(append); !s) return s;
    LayerAttend attend{sequences, layer, 1, model->q.data(), model->out.data()};
    if (Status s = store->attend(attend); !s) return s;
  }
  return Status::ok();
}
// [pass]

// [admit]
// A request behind the system prompt. kOutOfPages: nothing is held, try again later.
Status admit(KvStore* store, SequenceId system, Model* model, std::vector<Running>* running) {
  const Result<SequenceId> id = store->fork(system);  // shares the system prompt's full pages
  if (!id) return id.status();
  if (Status s = forward(store, {&*id, 1}, kPrompt, model); !s) {
    const Status released = store->release(*id);
    return released ? s : released;
  }
  running->push_back({*id, kAnswer});
  return Status::ok();
}
// [admit]

// [step]
// A token for everyone. Without pages the youngest request is sent back to the queue.
Status step(KvStore* store, Model* model, std::vector<Running>* running, int* waiting) {
  std::vector<SequenceId> ids;
  for (const Running& r : *running) ids.push_back(r.id);
  Status s = forward(store, {ids.data(), static_cast<int32_t>(ids.size())}, 1, model);
  if (s.code() == StatusCode::kOutOfPages && running->size() > 1) {  // begin() changed nothing
    s = store->release(running->back().id);
    running->pop_back();
    ++*waiting;
    return s;
  }
  if (!s) return s;
  std::vector<Running> rest;
  for (Running r : *running) {
    if (--r.left > 0) {
      rest.push_back(r);
    } else if (Status released = store->release(r.id); !released) {
      return released;
    }
  }
  *running = rest;
  return Status::ok();
}
// [step]

Status serve() {
  // [config]
  StoreConfig config;
  config.layout.num_layers = kLayers;
  config.layout.num_q_heads = kQHeads;
  config.layout.num_kv_heads = kKvHeads;
  config.layout.head_dim = kHeadDim;
  config.layout.sm_scale = 1 / std::sqrt(double{kHeadDim});
  TiersFormat k4v4;
  k4v4.classes = {{token_wise_tier(4, 4), token_wise_tier(4, 4)}};
  config.format = k4v4;
  config.memory_bytes = 3 << 20;
  config.max_sequences = 8;
  config.max_tokens = kSystem + kPrompt + kAnswer;
  const Result<TokenCapacity> capacity = tokens_that_fit(config);
  if (!capacity) return capacity.status();
  Result<std::unique_ptr<KvStore>> store = KvStore::create(config);
  // [config]
  if (!store) return store.status();
  Model model;
  const Result<SequenceId> system = (*store)->add_sequence();
  if (!system) return system.status();
  if (Status s = forward(store->get(), {&*system, 1}, kSystem, &model); !s) return s;
  std::vector<Running> running;
  int waiting = kRequests, most = 0, steps = 0;
  // Whoever was sent back would take the pages that the next step needs: nobody comes until another
  // request has ended.
  bool admits = true;
  while (waiting > 0 || !running.empty()) {
    while (admits && waiting > 0) {
      const Status s = admit(store->get(), *system, &model, &running);
      if (s.code() == StatusCode::kOutOfPages || s.code() == StatusCode::kOutOfRange) break;
      if (!s) return s;
      --waiting;
    }
    most = std::max(most, static_cast<int>(running.size()));
    if (running.empty()) return Status(StatusCode::kOutOfPages, "not even one request fits");
    const size_t ran = running.size();
    const int waited = waiting;
    if (Status s = step(store->get(), &model, &running, &waiting); !s) return s;
    if (running.size() < ran) admits = waiting == waited;
    ++steps;
  }
  std::printf("%d requests in %d steps, at most %d at once; room for %lld tokens\n", kRequests,
              steps, most, static_cast<long long>(capacity->typical));
  return (*store)->release(*system);
}

}  // namespace

int main() {
  const Status s = serve();
  if (!s) std::fprintf(stderr, "%s: %s\n", status_name(s.code()), s.message().c_str());
  return s ? 0 : 1;
}

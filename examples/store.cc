// Keep the KV cache of one sequence compressed: a prompt, then tokens one by one, with attention
// over what is left, and a fork that shares pages. The model is a stand-in: random keys, values and
// queries.
#include <cstdio>
#include <random>
#include <vector>

#include "tierkv/half.h"
#include "tierkv/kv_store.h"

namespace {

using namespace tierkv;

constexpr int kLayers = 2, kQHeads = 8, kKvHeads = 2, kHeadDim = 128, kPrompt = 1000, kSteps = 30;

// fp16 values of a normal distribution.
std::vector<uint16_t> random_values(std::mt19937* rng, size_t count) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(count);
  for (uint16_t& bits : x) bits = float_to_half(normal(*rng));
  return x;
}

// What a prompt's attention would have found: a few tokens matter.
std::vector<float> random_significance(std::mt19937* rng) {
  std::exponential_distribution<float> score(kPrompt / 2);
  std::vector<float> x(kKvHeads * kPrompt);
  for (float& s : x) s = score(*rng);
  return x;
}

// [prompt]
Status fill_prompt(KvStore* store, SequenceId id, std::mt19937* rng) {
  if (Status s = store->begin({&id, 1}, kPrompt); !s) return s;
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto k = random_values(rng, kPrompt * kKvHeads * kHeadDim);
    const auto v = random_values(rng, kPrompt * kKvHeads * kHeadDim);
    const auto significance = random_significance(rng);
    LayerAppend call;
    call.sequences = {&id, 1};
    call.layer = layer;
    call.tokens = kPrompt;
    call.k = k.data();
    call.v = v.data();
    call.significance = significance.data();
    call.stride = kPrompt;
    if (Status s = store->append(call); !s) return s;
  }
  return Status::ok();
}
// [prompt]

// [step]
Status generate(KvStore* store, SequenceId id, std::mt19937* rng) {
  std::vector<uint16_t> out(kQHeads * kHeadDim);
  if (Status s = store->begin({&id, 1}, 1); !s) return s;  // compresses what leaves the window
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto k = random_values(rng, kKvHeads * kHeadDim);
    const auto v = random_values(rng, kKvHeads * kHeadDim);
    const auto q = random_values(rng, kQHeads * kHeadDim);
    LayerAppend token;
    token.sequences = {&id, 1};
    token.layer = layer;
    token.tokens = 1;
    token.k = k.data();
    token.v = v.data();
    if (Status s = store->append(token); !s) return s;
    LayerAttend request;
    request.sequences = {&id, 1};
    request.layer = layer;
    request.q = q.data();
    request.out = out.data();
    request.count_query = true;
    if (Status s = store->attend(request); !s) return s;
  }
  return Status::ok();
}
// [step]

Status run() {
  std::mt19937 rng(7);
  // [create]
  StoreConfig config;
  config.layout.num_layers = kLayers;
  config.layout.num_q_heads = kQHeads;
  config.layout.num_kv_heads = kKvHeads;
  config.layout.head_dim = kHeadDim;
  config.layout.sm_scale = 0.0884;
  TiersFormat tiers;
  tiers.classes[0].alpha_low = 0.02;  // prunes; 0 keeps every token
  config.format = tiers;
  config.memory_bytes = 16 << 20;
  config.max_sequences = 4;
  config.max_tokens = 2000;
  Result<std::unique_ptr<KvStore>> made = KvStore::create(config);
  if (!made) return made.status();
  KvStore* store = made->get();
  const Result<SequenceId> id = store->add_sequence();
  if (!id) return id.status();
  // [create]
  if (Status s = fill_prompt(store, *id, &rng); !s) return s;
  for (int i = 0; i < kSteps; ++i) {
    if (Status s = generate(store, *id, &rng); !s) return s;
  }
  const Result<SequenceId> copy = store->fork(*id);
  if (!copy) return copy.status();
  const Result<StoreUsage> usage = store->usage();
  if (!usage) return usage.status();
  std::printf("%lld of %lld pages in use, %lld shared; %lld of %lld bytes\n",
              static_cast<long long>(usage->pages - usage->pages_free),
              static_cast<long long>(usage->pages), static_cast<long long>(usage->pages_shared),
              static_cast<long long>(usage->nominal_bytes),
              static_cast<long long>(usage->raw_bytes));
  const bool compressed = 2 * usage->nominal_bytes < usage->raw_bytes && usage->pages_shared > 0;
  return compressed ? Status::ok() : Status(StatusCode::kCorrupt, "it did not compress");
}

}  // namespace

int main() {
  const Status status = run();
  if (!status) std::printf("%s: %s\n", status_name(status.code()), status.message().c_str());
  return status ? 0 : 1;
}

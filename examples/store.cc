// Keep the KV cache of one sequence compressed: a prompt, then tokens one by one, with attention
// over what is left, and a fork that shares pages. The model is a stand-in: random keys, values and
// queries.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "tierkv/half.h"
#include "tierkv/store.h"

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
  if (Status s = store->begin_prompt({&id, 1}, kPrompt); !s) return s;
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto k = random_values(rng, kPrompt * kKvHeads * kHeadDim);
    const auto v = random_values(rng, kPrompt * kKvHeads * kHeadDim);
    if (Status s = store->append({{&id, 1}, layer, kPrompt, k.data(), v.data()}); !s) return s;
    const auto significance = random_significance(rng);
    if (Status s = store->score_prompt({{&id, 1}, layer, significance.data(), kPrompt}); !s) {
      return s;
    }
  }
  return store->end_prompt({&id, 1});
}
// [prompt]

// [step]
Status generate(KvStore* store, SequenceId id, std::mt19937* rng) {
  std::vector<uint16_t> out(kQHeads * kHeadDim);
  std::vector<float> probabilities(kKvHeads * (kPrompt + kSteps));
  if (Status s = store->begin_step({&id, 1}, 1); !s) return s;  // compacts all layers
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto k = random_values(rng, kKvHeads * kHeadDim);
    const auto v = random_values(rng, kKvHeads * kHeadDim);
    const auto q = random_values(rng, kQHeads * kHeadDim);
    if (Status s = store->append({{&id, 1}, layer, 1, k.data(), v.data()}); !s) return s;
    AttendRequest request;
    request.sequences = {&id, 1};
    request.layer = layer;
    request.q = q.data();
    request.out = out.data();
    request.probabilities = probabilities.data();
    request.stride = kPrompt + kSteps;
    if (Status s = store->attend(request); !s) return s;
    const ScoreUpdate update = {{&id, 1}, layer, 0, probabilities.data(), kPrompt + kSteps};
    if (Status s = store->update_scores(update); !s) return s;
  }
  return Status::ok();
}
// [step]

Status run() {
  std::mt19937 rng(7);
  // [create]
  KvStoreConfig config;
  config.layout.num_layers = kLayers;
  config.layout.num_q_heads = kQHeads;
  config.layout.num_kv_heads = kKvHeads;
  config.layout.head_dim = kHeadDim;
  config.layout.sm_scale = 0.0884;
  config.policy.alpha_low = 0.02;  // prunes; 0 keeps every token
  config.num_pages = 400;
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
  const Result<StoreStats> stats = store->stats();
  if (!stats) return stats.status();
  const int64_t* tokens = stats->tokens;
  std::printf("rows hold %lld window, %lld high, %lld low tokens; %lld pruned\n",
              static_cast<long long>(tokens[0]), static_cast<long long>(tokens[1]),
              static_cast<long long>(tokens[2]), static_cast<long long>(tokens[3]));
  std::printf("%d of %d pages in use, %d shared; %.2f times smaller in tokens, %.2f in the pool\n",
              stats->pages - stats->pages_free, stats->pages, stats->pages_shared,
              stats->nominal_ratio(), stats->pool_gain());
  const bool compressed = stats->nominal_ratio() > 2 && stats->pages_shared > 0;
  return compressed ? Status::ok() : Status(StatusCode::kCorrupt, "it did not compress");
}

}  // namespace

int main() {
  const Status status = run();
  if (!status) std::printf("%s: %s\n", status_name(status.code()), status.message().c_str());
  return status ? 0 : 1;
}

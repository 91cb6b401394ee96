// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/support/tiers_world.h"

#include <algorithm>
#include <cmath>

namespace tierkv {

StoreConfig tiers_config(int32_t head_dim, int32_t pages, bool raw, std::mt19937* rng) {
  StoreConfig config;
  CacheLayout& layout = config.layout;
  layout.num_layers = raw ? 3 : 2;
  layout.num_kv_heads = 3;
  layout.num_q_heads = 6;
  layout.head_dim = head_dim;
  layout.sm_scale = 1 / std::sqrt(head_dim);
  layout.dtype = (*rng)() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
  if (raw) config.raw_layers = {1};
  config.sink_tokens = static_cast<int32_t>((*rng)() % 6);
  config.window_tokens = 8 + static_cast<int32_t>((*rng)() % 60);
  config.max_sequences = 4;
  config.max_tokens = 900;
  TiersFormat tiers;
  tiers.classes = {{token_wise_tier(8, 4), token_wise_tier(8, 4)},
                   {token_wise_tier(4, 4), *parse_tier_format("k4v2n")},
                   {token_wise_tier(4, 2), token_wise_tier(2, 2), 1, 0.4}};
  for (int32_t i = 0; i < layout.num_layers * layout.num_kv_heads; ++i) {
    tiers.class_of_head.push_back(static_cast<uint8_t>((*rng)() % 3));
  }
  tiers.rotate_values = (*rng)() % 4 != 0;
  config.format = tiers;
  if ((*rng)() % 2 == 0) config.profile = random_profile(layout, {}, rng);
  give_pages(pages, &config);
  return config;
}

TiersChunk tiers_chunk(const StoreConfig& config, int32_t tokens, bool significance,
                       std::mt19937* rng) {
  const CacheLayout& shape = config.layout;
  TiersChunk chunk;
  chunk.tokens = tokens;
  const size_t values = size_t{1} * shape.num_layers * tokens * shape.num_kv_heads * shape.head_dim;
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0, 1);
  for (std::vector<uint16_t>* x : {&chunk.k, &chunk.v}) {
    for (size_t i = 0; i < values; ++i) {
      x->push_back(float_to_raw(shape.dtype, (i % 131 == 5 ? 9.0f : 1.0f) * normal(*rng)));
    }
  }
  if (!significance) return chunk;
  for (int32_t i = 0; i < shape.num_layers * shape.num_kv_heads * tokens; ++i) {
    const float x = uniform(*rng);
    chunk.significance.push_back(i % 17 == 0 ? 0.0f : x * x * x * x);
  }
  return chunk;
}

bool TiersWorld::is_short(const Status& s) {
  if (s.code() != StatusCode::kOutOfPages) {
    EXPECT_TRUE(s) << s.message();
    return false;
  }
  EXPECT_GT(store_.place->shortage().pages, 0);
  ++out_of_pages_;
  return true;
}

// A chunk that runs out of pages is given up, and somebody released.
void TiersWorld::extend(Live* live) {
  const int32_t before = live->layers[0].tokens(), room = config_.max_tokens - before;
  if (room == 0) return;
  const int32_t tokens = std::min(room, pick(0, 2) == 0 ? pick(9, 200) : pick(1, kMaxStepTokens));
  const bool is_step = tokens <= kMaxStepTokens;
  const TiersChunk chunk = tiers_chunk(config_, tokens, pick(0, 2) > 0, &rng_);
  const int64_t values = int64_t{tokens} * config_.layout.num_kv_heads * config_.layout.head_dim;
  if (is_short(store_.engine->begin({&live->id, 1}, tokens))) return release(0);
  for (int32_t l = 0; is_step && l < config_.layout.num_layers; ++l) {
    model_.compress(&live->layers[l], l, before + tokens);
  }
  for (int32_t l = 0; l < config_.layout.num_layers; ++l) {
    LayerAppend call;
    call.sequences = {&live->id, 1};
    call.layer = l;
    call.tokens = tokens;
    call.k = chunk.k.data() + l * values;
    call.v = chunk.v.data() + l * values;
    call.stride = tokens;
    if (!chunk.significance.empty()) {
      call.significance = chunk.significance.data() + l * config_.layout.num_kv_heads * tokens;
    }
    if (is_short(store_.engine->append(call))) {
      ASSERT_TRUE(store_.engine->truncate(live->id, before));
      model_.truncate(&live->layers, before);
      return release(0);
    }
    model_.append(&live->layers[l], l,
                  {static_cast<const uint16_t*>(call.k), static_cast<const uint16_t*>(call.v),
                   call.significance, tokens});
  }
}

// Against the softmax of the model's tokens; what the queries saw may count.
void TiersWorld::attend(Live* live, int32_t layer) {
  const CacheLayout& shape = config_.layout;
  model::TiersLayer& at = live->layers[layer];
  const int32_t tokens = at.tokens(), dim = shape.head_dim, group = shape.group_size();
  if (tokens == 0) return;
  std::normal_distribution<float> normal;
  std::vector<uint16_t> q, out(size_t{1} * shape.num_q_heads * dim);
  for (size_t i = 0; i < out.size(); ++i) q.push_back(float_to_half(normal(rng_)));
  std::vector<float> lse(shape.num_q_heads), p(size_t{1} * shape.num_kv_heads * tokens);
  LayerAttend call;
  call.sequences = {&live->id, 1};
  call.layer = layer;
  call.q = q.data();
  call.out = out.data();
  call.lse = lse.data();
  call.probabilities = p.data();
  call.stride = tokens;
  call.count_query = pick(0, 1) == 1;
  const Status s = store_.engine->attend(call);
  ASSERT_TRUE(s) << s.message();
  for (int32_t h = 0; h < shape.num_q_heads; ++h) {
    const model::TiersModelRow& row = at.rows[h / group];
    std::vector<double> weight(tokens, 0.0), mean(dim, 0.0);
    double sum = 0;
    for (int32_t i = 0; i < tokens; ++i) {
      if (row.tokens[i].fate == model::Fate::kPruned) continue;
      double dot = 0;
      for (int32_t d = 0; d < dim; ++d) {
        dot += static_cast<double>(half_to_float(q[h * dim + d])) *
               static_cast<double>(row.tokens[i].k[d]);
      }
      sum += weight[i] = std::exp(dot * shape.sm_scale);
      for (int32_t d = 0; d < dim; ++d) {
        mean[d] += weight[i] * static_cast<double>(row.tokens[i].v[d]);
      }
    }
    if (sum == 0) {  // all of its tokens are pruned
      ASSERT_EQ(lse[h], -INFINITY);
      continue;
    }
    ASSERT_NEAR(lse[h], std::log(sum), 1e-4 * (1 + std::abs(std::log(sum))));
    for (int32_t d = 0; d < dim; ++d) {  // fp16 outputs: 2^-11 of themselves
      ASSERT_NEAR(half_to_float(out[h * dim + d]), mean[d] / sum,
                  1e-3 * (1e-2 + std::abs(mean[d] / sum)));
    }
  }
  if (!call.count_query) return;
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    model_.count_query(&at.rows[h], at.body_end, tokens - 1, p.data() + int64_t{h} * tokens);
  }
}

void TiersWorld::fork() {
  if (live_.size() == static_cast<size_t>(config_.max_sequences)) return;
  const Live& source = any();
  const Result<SequenceId> id = store_.engine->fork(source.id);
  if (!id && is_short(id.status())) return release(0);
  ASSERT_TRUE(id) << id.status().message();
  live_.push_back({*id, source.layers});
}

void TiersWorld::truncate(Live* live) {
  const int32_t tokens = live->layers[0].tokens();
  const int32_t left = pick(0, 3) == 0 ? pick(0, tokens) : std::max(0, tokens - pick(0, 90));
  const Status s = store_.engine->truncate(live->id, left);
  if (is_short(s)) return release(0);
  model_.truncate(&live->layers, left);
}

void TiersWorld::release(size_t place) {
  ASSERT_TRUE(store_.engine->release(live_[place].id));
  live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(place));
}

void TiersWorld::move(Live* live) {
  const Result<std::vector<uint8_t>> bytes = store_.engine->export_sequence(live->id);
  ASSERT_TRUE(bytes) << bytes.status().message();
  ASSERT_TRUE(store_.engine->release(live->id));
  const Result<SequenceId> id = store_.engine->import_sequence(bytes->data(), bytes->size());
  if (!id && is_short(id.status())) {  // its pages were shared
    live_.erase(live_.begin() + (live - live_.data()));
    return;
  }
  ASSERT_TRUE(id) << id.status().message();
  live->id = *id;
  const Result<std::vector<uint8_t>> again = store_.engine->export_sequence(live->id);
  ASSERT_TRUE(again) << again.status().message();
  EXPECT_EQ(*again, *bytes);
}

void TiersWorld::step() {
  const int32_t what = live_.empty() ? 20 : pick(0, 20);
  if (what < 10) return extend(&any());
  if (what < 13) return attend(&any(), pick(0, config_.layout.num_layers - 1));
  if (what < 15) return fork();
  if (what < 18) return truncate(&any());
  if (what == 18) return move(&any());
  if (what == 19)
    return release(static_cast<size_t>(pick(0, static_cast<int32_t>(live_.size()) - 1)));
  if (live_.size() == static_cast<size_t>(config_.max_sequences)) return;
  const Result<SequenceId> id = store_.engine->add_sequence();
  ASSERT_TRUE(id) << id.status().message();
  live_.push_back({*id, model_.empty()});
}

void TiersWorld::check_layer(const Live& live, int32_t layer) {
  const CacheLayout& shape = config_.layout;
  const model::TiersLayer& at = live.layers[layer];
  const int32_t tokens = at.tokens();
  LayerRange range;
  range.sequence = live.id;
  range.layer = layer;
  range.first = pick(0, tokens);
  range.end = pick(range.first, tokens);
  if (pick(0, 2) == 0) range.first = 0, range.end = tokens;
  std::vector<uint16_t> k(
      size_t{1} * (range.end - range.first) * shape.num_kv_heads * shape.head_dim + 1),
      v(k);
  range.k = k.data();
  range.v = v.data();
  const Status s = store_.engine->decode_range(range);
  ASSERT_TRUE(s) << s.message();
  for (int32_t p = range.first; p < range.end; ++p) {
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      const model::TiersToken& token = at.rows[h].tokens[p];
      pruned_ += token.fate == model::Fate::kPruned ? 1 : 0;
      const int64_t row = (int64_t{p - range.first} * shape.num_kv_heads + h) * shape.head_dim;
      for (int32_t d = 0; d < shape.head_dim; ++d) {
        uint16_t expected[2];
        store_element(expected, DType::kFloat16, 0, token.k[d]);
        store_element(expected, DType::kFloat16, 1, token.v[d]);
        ASSERT_EQ(k[row + d], expected[0]) << "key " << p << " of layer " << layer << ", dim " << d;
        ASSERT_EQ(v[row + d], expected[1]) << "value " << p << " of layer " << layer;
      }
    }
  }
}

void TiersWorld::check_all() {
  const Status s = invariants_.check(store_.place->pages().allocator);
  ASSERT_TRUE(s) << s.message();
  int64_t body = 0;
  for (const Live& live : live_) {
    for (int32_t l = 0; l < config_.layout.num_layers; ++l) {
      check_layer(live, l);
      if (::testing::Test::HasFatalFailure()) return;
      body += int64_t{std::max(0, live.layers[l].body_end - config_.sink_tokens)} *
              config_.layout.num_kv_heads;
    }
  }
  const Result<StoreUsage> usage = store_.engine->usage();
  ASSERT_TRUE(usage);
  EXPECT_EQ(usage->body_tokens, body);
  if (live_.empty()) {
    EXPECT_EQ(usage->pages_free, usage->pages);
  }
}

}  // namespace tierkv

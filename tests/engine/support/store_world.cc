// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/support/store_world.h"

#include <algorithm>
#include <cmath>

#include "codec/format/element.h"
#include "store/rows/row_format.h"

namespace tierkv {

OpenStore::OpenStore(const StoreConfig& config) {
  const Status valid = config.validate();
  EXPECT_TRUE(valid) << valid.message();
  auto format = store::make_row_format(config);
  auto made = store::HostPlace::make(config, std::move(*format));
  EXPECT_TRUE(made) << made.status().message();
  place = made->get();
  engine = store::Engine::make(config, std::move(*made));
}

StoreWorld::StoreWorld(const StoreConfig& config, uint32_t seed)
    : config_(config), rng_(seed), store_(config), model_(config) {
  std::normal_distribution<float> normal;
  const float offset = chance(0.5) ? 0.0f : 3.0f;
  for (int32_t i = 0; i < 20000; ++i) {
    float x = normal(rng_) + offset;
    if (i % 997 == 0) x *= 40;
    pool_.push_back(float_to_raw(config.layout.dtype, x));
  }
}

bool StoreWorld::is_short(const Status& s) {
  ++calls_;
  if (s) return false;
  EXPECT_EQ(s.code(), StatusCode::kOutOfPages) << s.message();
  EXPECT_GT(store_.place->shortage().pages, 0);
  ++out_of_pages_;
  return true;
}

void StoreWorld::step() {
  const int32_t kind = pick(0, 99);
  if (live_.empty() || kind < 8) return add();
  if (kind < 60) return extend();
  if (kind < 70)
    return attend(pick(0, config_.layout.num_layers - 1),
                  {pick(0, static_cast<int32_t>(live_.size()) - 1)});
  if (kind < 77) return fork();
  if (kind < 86) return truncate();
  if (kind < 90) return release(pick(0, static_cast<int32_t>(live_.size()) - 1));
  if (kind < 95) return move();
  refuse();
}

void StoreWorld::add() {
  const Result<SequenceId> id = store_.engine->add_sequence();
  ++calls_;
  const bool full = static_cast<int32_t>(live_.size()) == config_.max_sequences;
  ASSERT_EQ(id.is_ok(), !full);
  if (full) {
    EXPECT_EQ(id.status().code(), StatusCode::kOutOfRange);
    return;
  }
  live_.push_back({*id, model_.empty()});
}

Chunks StoreWorld::make_chunks(int32_t count, int32_t tokens) {
  const CacheLayout& shape = config_.layout;
  Chunks chunks;
  chunks.count = count;
  chunks.tokens = tokens;
  const int64_t rows = int64_t{shape.num_layers} * count * tokens * shape.num_kv_heads;
  for (std::vector<uint16_t>* x : {&chunks.k, &chunks.v}) {
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t from = pick(0, 20000 - shape.head_dim);
      if (chance(0.01)) {
        x->insert(x->end(), shape.head_dim, 0);
      } else {
        x->insert(x->end(), pool_.begin() + from, pool_.begin() + from + shape.head_dim);
      }
    }
  }
  if (chance(0.3)) {
    for (int64_t r = 0; r < rows; ++r) {
      const float u = std::uniform_real_distribution<float>(0, 1)(rng_);
      chunks.significance.push_back(chance(0.05) ? 0.0f : u * u * 0.02f);
    }
  }
  return chunks;
}

void StoreWorld::extend() {
  std::vector<int32_t> places;
  const int32_t wanted = pick(1, 2);
  for (int32_t p = 0; p < static_cast<int32_t>(live_.size()); ++p) places.push_back(p);
  std::shuffle(places.begin(), places.end(), rng_);
  places.resize(std::min<size_t>(places.size(), static_cast<size_t>(wanted)));
  const int32_t tokens = chance(0.6) ? pick(1, 8) : pick(9, chance(0.3) ? 320 : 90);
  std::vector<SequenceId> ids;
  int32_t longest = 0;
  for (const int32_t p : places) {
    ids.push_back(live_[p].id);
    longest = std::max(longest, live_[p].layers[0].tokens());
  }
  const SequenceList list = {ids.data(), static_cast<int32_t>(ids.size())};
  const Status s = store_.engine->begin(list, tokens);
  if (longest + tokens > config_.max_tokens) {
    ++calls_;
    EXPECT_EQ(s.code(), StatusCode::kOutOfRange) << s.message();
    if (chance(0.3)) release(places[0]);
    return;
  }
  if (is_short(s)) {
    EXPECT_LE(tokens, kMaxStepTokens);
    return release(pick(0, static_cast<int32_t>(live_.size()) - 1));
  }
  for (const int32_t p : places) {
    for (int32_t l = 0; l < config_.layout.num_layers && tokens <= kMaxStepTokens; ++l) {
      model_.compress(&live_[p].layers[l], l, live_[p].layers[l].tokens() + tokens);
    }
  }
  append_all(places, make_chunks(list.count, tokens));
}

void StoreWorld::append_all(const std::vector<int32_t>& places, const Chunks& chunks) {
  const CacheLayout& shape = config_.layout;
  const int64_t per_row = int64_t{chunks.tokens} * shape.num_kv_heads;
  const int64_t per_layer = chunks.count * per_row;
  std::vector<SequenceId> ids;
  std::vector<int32_t> before;
  for (const int32_t p : places) {
    ids.push_back(live_[p].id);
    before.push_back(live_[p].layers[0].tokens());
  }
  for (int32_t l = 0; l < shape.num_layers; ++l) {
    LayerAppend call;
    call.sequences = {ids.data(), chunks.count};
    call.layer = l;
    call.tokens = chunks.tokens;
    call.k = chunks.k.data() + l * per_layer * shape.head_dim;
    call.v = chunks.v.data() + l * per_layer * shape.head_dim;
    if (!chunks.significance.empty()) {
      call.significance = chunks.significance.data() + l * per_layer;
      call.stride = chunks.tokens;
    }
    const bool gives_up = l > 0 && chance(0.03);
    if (gives_up || is_short(store_.engine->append(call))) {
      for (size_t i = 0; i < places.size(); ++i) give_up({places[i]}, before[i]);
      return;
    }
    for (int32_t i = 0; i < chunks.count; ++i) {
      model::NewTokens added;
      added.k = static_cast<const uint16_t*>(call.k) + i * per_row * shape.head_dim;
      added.v = static_cast<const uint16_t*>(call.v) + i * per_row * shape.head_dim;
      added.tokens = chunks.tokens;
      added.stride = chunks.tokens;
      if (call.significance != nullptr) added.significance = call.significance + i * per_row;
      model_.append(&live_[places[i]].layers[l], l, added);
    }
    if (chance(0.3)) attend(l, places);
  }
  for (const int32_t p : places) {
    const int32_t n = live_[p].layers[0].tokens(), first = pick(0, n - 1);
    check_range(live_[p], pick(0, shape.num_layers - 1), first, std::min(n, first + 40));
  }
}

// What a chunk brought so far is forgotten; a truncation takes pages at most where some are shared.
void StoreWorld::give_up(const std::vector<int32_t>& places, int32_t tokens_before) {
  for (const int32_t p : places) {
    const Status s = store_.engine->truncate(live_[p].id, tokens_before);
    ++calls_;
    ASSERT_TRUE(s) << s.message();
    model_.truncate(&live_[p].layers, tokens_before);
  }
}

void StoreWorld::attend(int32_t layer, const std::vector<int32_t>& places) {
  const CacheLayout& shape = config_.layout;
  int32_t shortest = INT32_MAX, longest = 0;
  std::vector<SequenceId> ids;
  for (const int32_t p : places) {
    shortest = std::min(shortest, live_[p].layers[layer].tokens());
    longest = std::max(longest, live_[p].layers[layer].tokens());
    ids.push_back(live_[p].id);
  }
  if (shortest == 0) return;
  const auto count = static_cast<int32_t>(places.size());
  LayerAttend call;
  call.sequences = {ids.data(), count};
  call.layer = layer;
  call.q_len = pick(1, std::min(shortest, chance(0.8) ? 2 : 12));
  call.dtype = chance(0.5) ? DType::kFloat16 : DType::kBFloat16;
  call.count_query = chance(0.7);
  call.stride = longest + pick(0, 3);
  const int64_t heads = int64_t{count} * call.q_len * shape.num_q_heads;
  std::vector<uint16_t> q, out(heads * shape.head_dim);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < out.size(); ++i) q.push_back(float_to_raw(call.dtype, 2 * normal(rng_)));
  std::vector<float> lse(heads), sinks;
  std::vector<float> probabilities(int64_t{call.q_len} * count * shape.num_kv_heads * call.stride);
  for (int32_t h = 0; h < shape.num_q_heads; ++h)
    sinks.push_back(h % 3 == 0 ? -INFINITY : normal(rng_));
  call.q = q.data();
  call.out = out.data();
  call.lse = lse.data();
  call.probabilities = probabilities.data();
  if (chance(0.3)) call.sinks = sinks.data();
  const Status s = store_.engine->attend(call);
  expect_ok(s);
  if (!s) return;
  check_answers(call, places);
  if (!call.count_query) return;
  for (int32_t j = 0; j < call.q_len; ++j) {
    for (int32_t i = 0; i < count; ++i) {
      model::Layer& at = live_[places[i]].layers[layer];
      for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
        const int64_t line = (int64_t{j} * count + i) * shape.num_kv_heads + h;
        model_.count_query(&at.rows[h], at.body_end, at.tokens() - call.q_len + j,
                           probabilities.data() + line * call.stride);
      }
    }
  }
}

// Outputs are doubles rounded once: an error of 2^-8 (bfloat16) of the largest value and of 1e-5 of
// a probability or lse leaves room for the order of sums.
void StoreWorld::check_answers(const LayerAttend& call, const std::vector<int32_t>& places) {
  const CacheLayout& shape = config_.layout;
  const int32_t group = shape.group_size();
  for (size_t i = 0; i < places.size(); ++i) {
    const model::Layer& at = live_[places[i]].layers[call.layer];
    const auto j = pick(0, call.q_len - 1), head = pick(0, shape.num_q_heads - 1);
    const model::Row& row = at.rows[head / group];
    const int64_t line = (static_cast<int64_t>(i) * call.q_len + j) * shape.num_q_heads + head;
    const int32_t seen = at.tokens() - call.q_len + j + 1;
    const auto* q = static_cast<const uint16_t*>(call.q) + line * shape.head_dim;
    std::vector<double> p(seen);
    double sum = call.sinks == nullptr ? 0 : std::exp(static_cast<double>(call.sinks[head]));
    for (int32_t t = 0; t < seen; ++t) {
      for (int32_t d = 0; d < shape.head_dim; ++d) {
        p[t] += static_cast<double>(raw_to_float(call.dtype, q[d])) * model_.key(row, t, d);
      }
      sum += p[t] = std::exp(p[t] * shape.sm_scale);
    }
    EXPECT_NEAR(call.lse[line], std::log(sum), 1e-4 * (1 + std::fabs(std::log(sum))));
    const int64_t to =
        (int64_t{j} * call.sequences.count + static_cast<int64_t>(i)) * shape.num_kv_heads +
        head / group;
    for (int32_t t = 0; t < seen; ++t) {
      const double probability = call.probabilities[to * call.stride + t];
      ASSERT_GE(probability, p[t] / sum - 1e-5);
    }
    for (int32_t d = 0; d < shape.head_dim; d += 7) {
      double expected = 0, largest = 0;
      for (int32_t t = 0; t < seen; ++t) {
        const double v = model_.value(row, t, d);
        expected += p[t] / sum * v;
        largest = std::fmax(largest, std::fabs(v));
      }
      const float got =
          raw_to_float(call.dtype, static_cast<uint16_t*>(call.out)[line * shape.head_dim + d]);
      ASSERT_NEAR(got, expected, largest / 256 + 1e-6);
    }
  }
}

void StoreWorld::fork() {
  const int32_t from = pick(0, static_cast<int32_t>(live_.size()) - 1);
  const Result<SequenceId> id = store_.engine->fork(live_[from].id);
  ++calls_;
  if (static_cast<int32_t>(live_.size()) == config_.max_sequences) {
    EXPECT_EQ(id.status().code(), StatusCode::kOutOfRange);
    return;
  }
  if (!id) {
    EXPECT_EQ(id.status().code(), StatusCode::kOutOfPages) << id.status().message();
    ++out_of_pages_;
    return;
  }
  live_.push_back({*id, live_[from].layers});
}

void StoreWorld::truncate() {
  Live& live = live_[pick(0, static_cast<int32_t>(live_.size()) - 1)];
  const int32_t n = live.layers[0].tokens();
  const int32_t to = chance(0.5) ? pick(std::max(0, n - 9), n) : pick(0, n);
  if (is_short(store_.engine->truncate(live.id, to))) return;
  model_.truncate(&live.layers, to);
}

void StoreWorld::release(int32_t place) {
  expect_ok(store_.engine->release(live_[place].id));
  EXPECT_EQ(store_.engine->num_tokens(live_[place].id).status().code(), StatusCode::kStaleSequence);
  live_.erase(live_.begin() + place);
}

void StoreWorld::move() {
  const int32_t place = pick(0, static_cast<int32_t>(live_.size()) - 1);
  const Result<std::vector<uint8_t>> bytes = store_.engine->export_sequence(live_[place].id);
  expect_ok(bytes.status());
  expect_ok(store_.engine->release(live_[place].id));
  const Result<SequenceId> id = store_.engine->import_sequence(bytes->data(), bytes->size());
  if (is_short(id.status())) {
    live_.erase(live_.begin() + place);
    return;
  }
  live_[place].id = *id;
  const Result<std::vector<uint8_t>> again = store_.engine->export_sequence(*id);
  EXPECT_EQ(*bytes, *again);
}

void StoreWorld::refuse() {
  SequenceId id = live_[0].id;
  const SequenceId twice[] = {id, id};
  EXPECT_EQ(store_.engine->begin({&id, 1}, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(store_.engine->begin({twice, 2}, 1));
  EXPECT_FALSE(store_.engine->begin({nullptr, 1}, 1));
  EXPECT_FALSE(store_.engine->begin({&id, 0}, 1));
  EXPECT_EQ(store_.engine->truncate(id, live_[0].layers[0].tokens() + 1).code(),
            StatusCode::kInvalidArgument);
  ++id.generation;
  EXPECT_EQ(store_.engine->release(id).code(), StatusCode::kStaleSequence);
  EXPECT_EQ(store_.engine->begin({&id, 1}, 1).code(), StatusCode::kStaleSequence);
  id = live_[0].id;
  uint16_t x[1] = {};
  LayerRange range = {id, 0, 0, live_[0].layers[0].tokens() + 1, DType::kFloat16, x, x};
  EXPECT_EQ(store_.engine->decode_range(range).code(), StatusCode::kOutOfRange);
  LayerAppend call = {{&id, 1}, 0, 1, x, x};
  EXPECT_EQ(store_.engine->append(call).code(), StatusCode::kInvalidArgument);
  calls_ += 9;
}

void StoreWorld::check_range(const Live& live, int32_t layer, int32_t first, int32_t end) {
  const CacheLayout& shape = config_.layout;
  const int64_t values = int64_t{end - first} * shape.num_kv_heads * shape.head_dim;
  std::vector<uint16_t> k(values), v(values);
  const DType dtype = chance(0.5) ? DType::kFloat16 : DType::kBFloat16;
  expect_ok(store_.engine->decode_range({live.id, layer, first, end, dtype, k.data(), v.data()}));
  int64_t at = 0;
  for (int32_t p = first; p < end; ++p) {
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      const model::Row& row = live.layers[layer].rows[h];
      for (int32_t d = 0; d < shape.head_dim; ++d, ++at) {
        uint16_t expected_k, expected_v;
        store_element(&expected_k, dtype, 0, model_.key(row, p, d));
        store_element(&expected_v, dtype, 0, model_.value(row, p, d));
        ASSERT_EQ(k[at], expected_k) << "key, layer " << layer << " head " << h << " position " << p
                                     << " dim " << d << " of " << live.layers[layer].tokens();
        ASSERT_EQ(v[at], expected_v)
            << "value, layer " << layer << " head " << h << " position " << p << " dim " << d;
      }
    }
  }
}

void StoreWorld::check_all() {
  const Status laws = invariants_.check(store_.place->pages().allocator);
  EXPECT_TRUE(laws) << laws.message();
  const PageAllocator& a = store_.place->pages().allocator;
  for (int32_t row = 0; row < a.shape.table.num_rows(); ++row) {
    EXPECT_EQ(a.pages[row].of[0], pages_for(a.tokens[row].of[0], a.shape.table.tokens_per_page[0]));
  }
  for (const Live& live : live_) {
    const int32_t n = live.layers[0].tokens();
    EXPECT_EQ(*store_.engine->num_tokens(live.id), n);
    for (int32_t l = 0; l < config_.layout.num_layers; ++l) check_range(live, l, 0, n);
  }
  const Result<StoreUsage> usage = store_.engine->usage();
  EXPECT_EQ(usage->sequences, static_cast<int32_t>(live_.size()));
  int64_t sinks = 0, body = 0, ring = 0;
  for (const Live& live : live_) {
    for (const model::Layer& layer : live.layers) {
      const int32_t n = layer.tokens(), s = std::min(n, config_.sink_tokens);
      sinks += s;
      body += std::max(0, layer.body_end - config_.sink_tokens);
      ring += n - std::max(layer.body_end, s);
      if (layer.rows[0].tokens.size() > 32 && layer.rows[0].tokens[32].is_coded) {
        coded_tokens_ += layer.body_end;
      }
    }
  }
  const int32_t heads = config_.layout.num_kv_heads;
  EXPECT_EQ(usage->sink_tokens, heads * sinks);
  EXPECT_EQ(usage->body_tokens, heads * body);
  EXPECT_EQ(usage->ring_tokens, heads * ring);
  if (usage->pages_shared == 0) {
    EXPECT_LE(usage->nominal_bytes, usage->held_bytes());
  }
  if (live_.empty()) {
    EXPECT_EQ(usage->pages, usage->pages_free);
  }
}

}  // namespace tierkv

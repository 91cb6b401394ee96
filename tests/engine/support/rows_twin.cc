// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/support/rows_twin.h"

#include <algorithm>
#include <cmath>

#include "codec/format/element.h"
#include "tierkv/attention.h"

namespace tierkv::store::test {

RowsTwin::RowsTwin(const StoreConfig& config, TwinMemory* memory, const MakeFormat& make,
                   PageBytes page_bytes, std::mt19937* rng)
    : config_(config),
      rng_(*rng),
      memory_(memory),
      host_(config),
      twin_(config, host_.place, memory),
      page_bytes_(std::move(page_bytes)),
      fault_(memory),
      slot_array_(memory),
      from_(memory),
      to_(memory),
      kept_(memory),
      target_(memory),
      k_(memory),
      v_(memory),
      q_(memory),
      out_(memory),
      significance_(memory),
      lse_(memory) {
  host_format_ = std::move(*make_row_format(config));
  host_format_->bind(host_.place->pages());
  Result<std::unique_ptr<DeviceRowFormat>> format = make(config, host_format_.get());
  EXPECT_TRUE(format) << format.status().message();
  format_ = std::move(*format);
  fault_.assign({{StatusCode::kOk, -1, -1, -1}});
  const Status s = format_->bind(twin_.view(), fault_.data(), nullptr);
  EXPECT_TRUE(s) << s.message();
}

void RowsTwin::add() {
  live_.push_back({*host_.engine->add_sequence(), {}});
}

void RowsTwin::set_works(const std::vector<int32_t>& places, Positions layers,
                         const std::function<LayerTokens(LayerTokens)>& after) {
  works_ = {};
  slots_.clear();
  moves_.clear();
  std::vector<LayerTokens> from, to;
  for (const int32_t i : places) {
    slots_.push_back(live_[i].id.slot);
    for (int32_t l = layers.first; l < layers.end; ++l) {
      from.push_back(live_[i].at);
      to.push_back(after(live_[i].at));
      moves_.push_back({slots_.back(), l, from.back(), to.back()});
      works_.most_leaving = most(works_.most_leaving, to.back().body_end - from.back().body_end);
    }
  }
  works_.slots = slot_array_.assign(slots_);
  works_.from = from_.assign(from);
  works_.to = to_.assign(to);
  works_.count = static_cast<int32_t>(places.size());
  works_.first_layer = layers.first;
  works_.num_layers = layers.count();
  works_.moves = moves_.data();
}

void RowsTwin::set_chunk(const LayerAppend& call) {
  const CacheLayout& shape = config_.layout;
  const int64_t values =
      int64_t{call.sequences.count} * call.tokens * shape.num_kv_heads * shape.head_dim;
  const auto* k = static_cast<const uint16_t*>(call.k);
  const auto* v = static_cast<const uint16_t*>(call.v);
  works_.chunk.k = k_.assign({k, k + values});
  works_.chunk.v = v_.assign({v, v + values});
  if (call.significance != nullptr) {
    const int64_t count = int64_t{call.sequences.count} * shape.num_kv_heads * call.stride;
    works_.chunk.significance =
        significance_.assign({call.significance, call.significance + count});
  }
  works_.chunk.stride = call.stride;
  works_.chunk.dtype = shape.dtype;
  works_.chunk.tokens = call.tokens;
}

void RowsTwin::plan() {
  twin_.take_raw();
  pages_before_ = twin_.pages_in_use();
  const std::vector<SideCounts> held = twin_.counts_of(slots_);
  const DeviceRowCounts counts = {kept_.assign(held), target_.assign(held)};
  EXPECT_FALSE(format_->may_rewrite(works_));
  const Status s = format_->plan(works_, counts);
  ASSERT_TRUE(s) << s.message();
  memory_->wait();
}

// The host has done its work: tables have the pages.
void RowsTwin::write() {
  twin_.take_tables();
  const std::vector<SideCounts> held = twin_.counts_of(slots_);
  ASSERT_EQ(target_.read(held.size()), held);
  EXPECT_LE(twin_.pages_in_use() - pages_before_, format_->most_pages(works_));
  const Status s = format_->write(works_, nullptr);
  ASSERT_TRUE(s) << s.message();
  memory_->wait();
}

void RowsTwin::append_all(const std::vector<int32_t>& places, int32_t tokens, bool significance,
                          const std::function<void(int32_t)>& change_chunk) {
  std::vector<SequenceId> ids;
  for (const int32_t i : places) ids.push_back(live_[i].id);
  const SequenceList list = {ids.data(), static_cast<int32_t>(ids.size())};
  const CacheLayout& shape = config_.layout;
  const bool is_step = tokens <= kMaxStepTokens;
  const TiersChunk chunk = tiers_chunk(config_, tokens * list.count, significance, &rng_);
  if (is_step) {
    set_works(places, {0, shape.num_layers}, [&](LayerTokens at) {
      return LayerTokens{at.tokens, after_append(twin_.laws(), at, tokens).body_end};
    });
    plan();
  }
  ASSERT_TRUE(host_.engine->begin(list, tokens));
  if (is_step) write();
  const int64_t values = int64_t{tokens} * list.count * shape.num_kv_heads * shape.head_dim;
  for (int32_t l = 0; l < shape.num_layers; ++l) {
    LayerAppend call;
    call.sequences = list;
    call.layer = l;
    call.tokens = tokens;
    call.k = chunk.k.data() + l * values;
    call.v = chunk.v.data() + l * values;
    call.stride = tokens;
    if (significance) {
      call.significance =
          chunk.significance.data() + int64_t{l} * shape.num_kv_heads * list.count * tokens;
    }
    if (!is_step) {
      set_works(places, {l, l + 1},
                [&](LayerTokens at) { return after_append(twin_.laws(), at, tokens); });
      set_chunk(call);
      change_chunk(l);
      plan();
    }
    const Status s = host_.engine->append(call);
    ASSERT_TRUE(s) << s.message();
    if (!is_step) write();
    if (::testing::Test::HasFatalFailure()) return;
  }
  for (const int32_t i : places) live_[i].at = after_append(twin_.laws(), live_[i].at, tokens);
}

void RowsTwin::extend(const std::vector<int32_t>& places, int32_t tokens, bool significance) {
  append_all(places, tokens, significance, [](int32_t) {});
  if (!::testing::Test::HasFatalFailure()) compare();
}

bool RowsTwin::reads_finite(const LayerMove& at, int32_t position) {
  const size_t values = size_t{1} * config_.layout.num_kv_heads * config_.layout.head_dim;
  const Status s = format_->read({at.slot,
                                  at.layer,
                                  at.from.body_end,
                                  {position, position + 1},
                                  DType::kFloat16,
                                  k_.reserve(values),
                                  v_.reserve(values)});
  EXPECT_TRUE(s) << s.message();
  memory_->wait();
  return std::all_of(k_.data(), k_.data() + values,
                     [](uint16_t x) { return is_finite(half_to_float(x)); });
}

void RowsTwin::spoil(int32_t place, int32_t tokens) {
  const CacheLayout& shape = config_.layout;
  const LayerTokens from = live_[place].at, to = after_append(twin_.laws(), from, tokens);
  const int32_t layer = pick(0, shape.num_layers - 1), head = pick(0, shape.num_kv_heads - 1);
  const int32_t first = most(from.tokens, config_.sink_tokens);
  ASSERT_LT(first, to.body_end);
  const int32_t position = pick(first, to.body_end - 1);
  append_all({place}, tokens, false, [&](int32_t l) {
    const int64_t row = int64_t{position - from.tokens} * shape.num_kv_heads + head;
    if (l == layer) k_.data()[row * shape.head_dim + 3] = 0x7fff;  // NaN of both types
  });
  if (::testing::Test::HasFatalFailure()) return;
  EXPECT_TRUE(reads_finite({live_[place].id.slot, layer, to, to}, position));
  const DeviceFault& fault = *fault_.data();
  if (fault.status == StatusCode::kOk) {  // else the place tells
    EXPECT_FALSE(format_->checks_chunks());
    return;
  }
  EXPECT_EQ(fault.status, StatusCode::kNonFinite);
  EXPECT_EQ(fault.slot, live_[place].id.slot);
  EXPECT_EQ(fault.layer, layer);
  EXPECT_EQ(fault.kv_head, head);
}

void RowsTwin::fork(int32_t place) {
  const Result<SequenceId> id = host_.engine->fork(live_[place].id);
  ASSERT_TRUE(id);
  twin_.fork(live_[place].id.slot, id->slot);
  live_.push_back({*id, live_[place].at});
  compare();
}

void RowsTwin::truncate(int32_t place, int32_t tokens) {
  Live& live = live_[place];
  const LayerTokens to = after_truncate(twin_.laws(), live.at, tokens);
  set_works({place}, {0, config_.layout.num_layers}, [&](LayerTokens) { return to; });
  const std::vector<SideCounts> held = twin_.counts_of(slots_);
  ASSERT_TRUE(format_->cut_counts(works_, {kept_.assign(held), target_.assign(held)}));
  memory_->wait();
  const std::vector<SideCounts> asked = target_.read(held.size());
  ASSERT_TRUE(host_.engine->truncate(live.id, tokens));
  // What goes back to the ring is read before the tables change.
  const Positions range = {least(ring_first(twin_.laws(), to), to.tokens), to.tokens};
  if (to.body_end < live.at.body_end && range.count() > 0) {
    for (const LayerMove& move : moves_) ASSERT_TRUE(format_->restore(move, range));
    memory_->wait();
    for (int32_t l = 0; l < config_.layout.num_layers; ++l) {
      twin_.compare_raw(live.id.slot, l, range);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  twin_.take_tables();
  ASSERT_EQ(asked, twin_.counts_of(slots_));
  ASSERT_TRUE(format_->cut(works_, nullptr));
  memory_->wait();
  live.at = to;
  compare();
}

void RowsTwin::compare() {
  ASSERT_EQ(fault_.data()->status, StatusCode::kOk);
  for (const Live& live : live_) {
    for (int32_t l = 0; l < config_.layout.num_layers; ++l) {
      twin_.compare_state(live.id.slot, l);
      if (::testing::Test::HasFatalFailure()) return;
      for (int32_t r = 0; r < twin_.view().pages.rows_per_layer; ++r) {
        const int32_t row = twin_.view().pages.row(live.id.slot, l, r);
        const SideCounts& units = twin_.view().pages.allocator.tokens[row];
        twin_.compare_pages(live.id.slot, l, r, [&](int32_t side, int32_t page) {
          return page_bytes_(*host_format_, {l, r, side, page, units.of[side]});
        });
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

void RowsTwin::count_queries(int32_t place) {
  const CacheLayout& shape = config_.layout;
  std::normal_distribution<float> normal;
  for (int32_t l = 0; l < shape.num_layers; ++l) {
    std::vector<uint16_t> q, out(size_t{1} * shape.num_q_heads * shape.head_dim);
    for (size_t i = 0; i < out.size(); ++i) q.push_back(float_to_half(normal(rng_)));
    LayerAttend call;
    call.sequences = {&live_[place].id, 1};
    call.layer = l;
    call.q = q.data();
    call.out = out.data();
    call.count_query = true;
    const Status s = host_.engine->attend(call);
    ASSERT_TRUE(s) << s.message();
  }
}

void RowsTwin::read(int32_t place) {
  const CacheLayout& shape = config_.layout;
  const LayerTokens at = live_[place].at;
  if (body_count(twin_.laws(), at) == 0) return;
  LayerRange range;
  range.layer = pick(0, shape.num_layers - 1);
  range.first = pick(config_.sink_tokens, at.body_end - 1);
  range.end = pick(range.first + 1, least(at.body_end, range.first + 40));
  range.dtype = pick(0, 1) == 0 ? DType::kFloat16 : DType::kBFloat16;
  const size_t values = size_t{1} * (range.end - range.first) * shape.num_kv_heads * shape.head_dim;
  std::vector<uint16_t> k(values), v(values);
  range.k = k.data();
  range.v = v.data();
  const LayerMove move = {live_[place].id.slot, range.layer, at, at};
  ASSERT_TRUE(host_.place->decode(range, move));
  const Status s = format_->read({move.slot,
                                  move.layer,
                                  at.body_end,
                                  {range.first, range.end},
                                  range.dtype,
                                  k_.reserve(values),
                                  v_.reserve(values)});
  ASSERT_TRUE(s) << s.message();
  memory_->wait();
  EXPECT_EQ(k_.read(values), k);
  EXPECT_EQ(v_.read(values), v);
}

RowsTwin::Row RowsTwin::body_row(int32_t place, int32_t layer, int32_t kv_head) const {
  const Live& live = live_[place];
  const int32_t first = config_.sink_tokens, count = body_count(twin_.laws(), live.at);
  Row row;
  row.k.resize(size_t{1} * count * config_.layout.head_dim);
  row.v.resize(row.k.size());
  row.pruned.resize(count);
  if (count == 0) return row;
  host_format_->read(host_.place->layer_of({live.id.slot, layer, live.at, live.at}), kv_head, first,
                     first + count, row.k.data(), row.v.data(), row.pruned.data());
  return row;
}

// Queries are rotated and rounded to fp16: 2^-11 of every element, or of a rotated one. So a logit
// is off by at most e = 2^-10 sm_scale |q| |k|, weights by e^(2e), and an output by 2 e times the
// largest value beside what rounding weights and outputs to fp16 adds.
void RowsTwin::check_query(const DeviceAttendBody& call, const Row& row, int64_t vector) {
  const int32_t dim = config_.layout.head_dim;
  const double scale = config_.layout.sm_scale;
  const uint16_t* q = static_cast<const uint16_t*>(call.q) + vector * dim;
  double norm = 0, largest_key = 0, largest_value = 0, top = -INFINITY;
  std::vector<double> logits;
  for (int32_t d = 0; d < dim; ++d) {
    const double x = static_cast<double>(raw_to_float(call.dtype, q[d]));
    norm += x * x;
  }
  for (size_t t = 0; t < row.pruned.size(); ++t) {
    double dot = 0, key = 0;
    for (int32_t d = 0; d < dim; ++d) {
      const auto k = static_cast<double>(row.k[t * dim + d]);
      dot += static_cast<double>(raw_to_float(call.dtype, q[d])) * k;
      key += k * k;
      largest_value = std::fmax(largest_value, std::fabs(static_cast<double>(row.v[t * dim + d])));
    }
    logits.push_back(row.pruned[t] != 0 ? -INFINITY : dot * scale);
    if (row.pruned[t] == 0) largest_key = std::fmax(largest_key, key);
    top = std::fmax(top, logits.back());
  }
  const auto* out = static_cast<const uint16_t*>(call.out) + vector * dim;
  if (top == -INFINITY) {
    EXPECT_EQ(call.lse[vector], -INFINITY);
    return;
  }
  double sum = 0;
  std::vector<double> mean(dim, 0.0);
  for (size_t t = 0; t < logits.size(); ++t) {
    const double weight = std::exp(logits[t] - top);
    sum += weight;
    for (int32_t d = 0; d < dim; ++d) mean[d] += weight * static_cast<double>(row.v[t * dim + d]);
  }
  const double off = 0x1p-10 * scale * std::sqrt(norm * largest_key) + 0x1p-9;
  ASSERT_NEAR(call.lse[vector], top + std::log(sum), off);
  for (int32_t d = 0; d < dim; ++d) {
    const double rounding = call.dtype == DType::kFloat16 ? 0x1p-9 : 0x1p-7;
    ASSERT_NEAR(raw_to_float(call.dtype, out[d]), mean[d] / sum,
                (2 * off + rounding) * largest_value)
        << "vector " << vector << ", dim " << d;
  }
}

void RowsTwin::check_answers(const DeviceAttendBody& call, const std::vector<int32_t>& places) {
  const CacheLayout& shape = config_.layout;
  const int32_t group = shape.num_q_heads / shape.num_kv_heads;
  for (size_t i = 0; i < places.size(); ++i) {
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      const Row row = body_row(places[i], call.layer, h);
      for (int32_t j = 0; j < call.q_len * group; ++j) {
        const int64_t line = static_cast<int64_t>(i) * call.q_len + j / group;
        check_query(call, row, line * shape.num_q_heads + int64_t{h} * group + j % group);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

void RowsTwin::attend(const std::vector<int32_t>& places, int32_t q_len) {
  const CacheLayout& shape = config_.layout;
  const size_t vectors = places.size() * q_len * shape.num_q_heads;
  std::vector<int32_t> slots;
  std::normal_distribution<float> normal;
  const int32_t first = pick(0, shape.num_layers - 1);
  for (const int32_t p : places) slots.push_back(live_[p].id.slot);
  for (int32_t n = 0; n < shape.num_layers; ++n) {
    DeviceAttendBody call;
    call.layer = (first + n) % shape.num_layers;
    call.slots = slot_array_.assign(slots);
    std::vector<LayerTokens> at;
    for (const int32_t p : places) at.push_back(live_[p].at);
    call.at = from_.assign(at);
    for (const LayerTokens& x : at) call.most_tokens = most(call.most_tokens, x.tokens);
    call.count = static_cast<int32_t>(places.size());
    call.q_len = q_len;
    call.dtype = pick(0, 1) == 0 ? DType::kFloat16 : DType::kBFloat16;
    std::vector<uint16_t> q;
    while (q.size() < vectors * shape.head_dim) {
      q.push_back(float_to_raw(call.dtype, normal(rng_)));
    }
    call.q = q_.assign(q);
    call.out = out_.reserve(q.size());
    call.lse = lse_.reserve(vectors);
    call.new_plan = n == 0;
    const Status s = format_->attend(call);
    ASSERT_TRUE(s) << s.message();
    memory_->wait();
    SCOPED_TRACE(::testing::Message() << "layer " << call.layer << ", q_len " << q_len);
    check_answers(call, places);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

void RowsTwin::soak(int32_t rounds, int32_t longest, int32_t attend_every) {
  const auto failed = [] { return ::testing::Test::HasFatalFailure(); };
  add();
  add();
  for (int32_t i = 0; i < rounds && !failed(); ++i) {
    if (i == rounds / 2) fork(0);
    std::vector<int32_t> places = {pick(0, count() - 1)};
    const int32_t held = tokens(places[0]);
    if (i > 5 && held > 0 && pick(0, 2) == 0) truncate(places[0], pick(1, held));
    if (pick(0, 2) == 0) places = {1, 0};
    int32_t room = config_.max_tokens;
    for (const int32_t p : places) room = std::min(room, config_.max_tokens - tokens(p));
    const int32_t added = std::min(room, i < 3 || pick(0, 2) == 0 ? pick(9, longest) : pick(1, 8));
    if (added > 0 && !failed()) extend(places, added, pick(0, 2) > 0);
    if (!failed()) read(places[0]);
    if (!failed() && pick(0, 1) == 1) count_queries(places[0]);
    if (i % attend_every != attend_every - 1 || failed()) continue;
    attend(places, pick(0, 1) == 0 ? 1 : pick(1, kMaxQueryTokens));
  }
  if (!failed()) truncate(0, 1);
  if (!failed()) spoil(0, config_.window_tokens + pick(150, 300));
}

}  // namespace tierkv::store::test

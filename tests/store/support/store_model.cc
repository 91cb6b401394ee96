#include "tests/store/support/store_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "codec/format/quantize.h"
#include "tests/support/row_fixture.h"

namespace tierkv::testing {
namespace {

std::string at_text(int32_t side, int32_t index, const char* what) {
  std::ostringstream text;
  text << "side " << side << " index " << index << ": " << what;
  return text.str();
}

// What a component reads as after it was stored.
std::vector<float> stored(const ComponentFormat& format, DType raw, const std::vector<float>& x) {
  const auto dim = static_cast<int32_t>(x.size());
  std::vector<float> y(dim);
  if (format.is_raw()) {
    for (int32_t d = 0; d < dim; ++d) {
      y[d] = raw == DType::kFloat16 ? half_to_float(float_to_half(x[d]))
                                    : bfloat16_to_float(float_to_bfloat16(x[d]));
    }
    return y;
  }
  const int32_t width = format.group == 0 ? dim : format.group;
  std::vector<uint8_t> codes(dim);
  for (int32_t d = 0; d < dim; d += width) {
    QuantParams p;
    EXPECT_EQ(quantize_minmax(&x[d], width, 1, format.type.levels(), &p, &codes[d]),
              StatusCode::kOk);
    for (int32_t i = d; i < d + width; ++i) {
      y[i] = dequantize(codes[i], half_to_float(p.scale), half_to_float(p.zero_point));
    }
  }
  return y;
}

}  // namespace

TokenValues RowModel::quantized(const TokenValues& values, const TierFormat* from,
                                const TierFormat& to) const {
  const DType raw = config_->layout.dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  TokenValues out = values;
  // A component whose format stays is copied.
  if (from == nullptr || from->k != to.k) out.k = stored(to.k, raw, values.k);
  if (from == nullptr || from->v != to.v) out.v = stored(to.v, raw, values.v);
  return out;
}

void RowModel::demote(int32_t position, const TierFormat& from, const TierFormat& to) {
  values_[position] = quantized(values_[position], &from, to);
}

void RowModel::append_prompt(const TokenValues& values) {
  values_[num_tokens_] = quantized(values, nullptr, config_->window_format);
  significance_.push_back(neutral_significance(num_tokens_ + 1));
  window_.push_back({significance_.back(), 0, num_tokens_++, 0});
}

void RowModel::end_prompt() {
  significance_.resize(num_tokens_);
  Row row(num_tokens_ + 1);
  ASSERT_TRUE(start_row(config_->policy, significance_.data(), num_tokens_, &row.state));
  const auto read = [](const TokenSet& set) {
    Tokens tokens;
    for (int32_t i = 0; i < set.size; ++i) {
      tokens.push_back({set.scores[i], set.counts[i], set.positions[i], 0});
    }
    return tokens;
  };
  window_ = read(row.state.window);
  sinks_ = read(row.state.sinks);
  high_ = read(row.state.high);
  low_ = read(row.state.low);
  for (const Token& t : high_) demote(t.position, config_->window_format, config_->high_format);
  for (const Token& t : low_) demote(t.position, config_->window_format, config_->low_format);
  counted_prompt_ = num_tokens_;
  live_ = true;
}

void RowModel::step(const std::vector<TokenValues>& tokens) {
  const auto more = static_cast<int32_t>(tokens.size());
  for (int32_t i = 0; i < more; ++i) {
    values_[num_tokens_ + i] = quantized(tokens[i], nullptr, config_->window_format);
  }
  Row row(num_tokens_ + more + 1);
  TokenSet* sets[] = {&row.state.window, &row.state.sinks, &row.state.high, &row.state.low};
  Tokens* mine[] = {&window_, &sinks_, &high_, &low_};
  for (int32_t s = 0; s < 4; ++s) {
    for (const Token& t : *mine[s]) {
      row.add(sets[s], t.score, t.position);
      sets[s]->counts[sets[s]->size - 1] = t.count;
      sets[s]->frozen[sets[s]->size - 1] = t.frozen;
    }
  }
  row.state.num_tokens = num_tokens_;
  std::vector<StepAction> actions(window_.size() + more);
  int32_t count = 0;
  ASSERT_TRUE(generation_step(config_->policy, more, &row.state, actions.data(),
                              static_cast<int32_t>(actions.size()), &count));
  num_tokens_ += more;
  for (int32_t s = 0; s < 4; ++s) {
    mine[s]->clear();
    for (int32_t n = 0; n < sets[s]->size; ++n) {
      const int32_t i = s == 0 ? (row.state.window_head + n) % sets[s]->capacity : n;
      mine[s]->push_back(
          {sets[s]->scores[i], sets[s]->counts[i], sets[s]->positions[i], sets[s]->frozen[i]});
    }
  }
  for (int32_t i = 0; i < count; ++i) {
    if (actions[i].tier == Tier::kWindow || actions[i].tier == Tier::kPruned) continue;
    const bool high = actions[i].tier == Tier::kHigh;
    demote(actions[i].position, config_->window_format,
           high ? config_->high_format : config_->low_format);
    if (actions[i].victim_position != kNoPosition && actions[i].victim_tier == Tier::kLow) {
      demote(actions[i].victim_position, config_->high_format, config_->low_format);
    }
  }
}

void RowModel::observe(int32_t query, const float* probabilities) {
  const bool counted =
      query < counted_prompt_ || (query - counted_prompt_ + 1) % config_->score_interval == 0;
  if (!counted) return;
  for (Tokens* tokens : {&window_, &sinks_, &high_, &low_}) {
    for (Token& t : *tokens) {
      if (t.position >= query) continue;
      if (probabilities != nullptr && !t.frozen)
        t.score = running_mean(t.score, t.count, probabilities[t.position]);
      ++t.count;  // what was not observed counts as if the mean had been seen again
    }
  }
}

void RowModel::read_frozen(const StoreView& s, int32_t row) {
  for (const int32_t side : {kHighSide, kLowSide}) {
    Tokens& tokens = side == kHighSide ? high_ : low_;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const int32_t page = static_cast<int32_t>(i) / s.page_tokens(side);
      tokens[i].frozen = is_frozen(s.allocator, s.page_id(row, side, page));
    }
  }
}

void RowModel::forget(Tokens* tokens, int32_t end) {
  tokens->erase(std::remove_if(tokens->begin(), tokens->end(),
                               [end](const Token& t) { return t.position >= end; }),
                tokens->end());
  for (Token& t : *tokens) {
    // Counted queries that are left: those of the prompt, then every interval-th.
    const int32_t prompt = std::min(counted_prompt_, end);
    const auto through = [&](int32_t p) {
      return p < prompt ? p + 1 : prompt + (p + 1 - prompt) / config_->score_interval;
    };
    t.count = through(end - 1) - through(t.position);
  }
}

void RowModel::reorder(Tokens* tokens, int32_t side, const StoreView& s, int32_t row) {
  std::map<int32_t, Token> by_position;
  for (const Token& t : *tokens) by_position[t.position] = t;
  if (static_cast<size_t>(s.allocator.tokens[row].of[side]) != tokens->size()) return;
  for (size_t i = 0; i < tokens->size(); ++i) {
    const HostSlot at = row_slot(s, row, side, static_cast<int32_t>(i));
    const auto found = by_position.find(page_position(at.page, at.slot));
    if (found == by_position.end()) return;  // difference() will tell
    (*tokens)[i] = found->second;
    by_position.erase(found);
  }
}

void RowModel::truncate(int32_t tokens, const StoreView& s, int32_t row) {
  for (Tokens* set : {&window_, &sinks_, &high_, &low_}) forget(set, tokens);
  counted_prompt_ = std::min(counted_prompt_, tokens);
  num_tokens_ = tokens;
  significance_.resize(std::min<size_t>(significance_.size(), tokens));
  values_.erase(values_.lower_bound(tokens), values_.end());
  if (!live_) return;
  reorder(&high_, kHighSide, s, row);
  reorder(&low_, kLowSide, s, row);
}

int32_t RowModel::kept_tokens() const {
  return static_cast<int32_t>(window_.size() + sinks_.size() + high_.size() + low_.size());
}

std::string RowModel::tier_difference(const StoreView& s, int32_t row, int32_t side) const {
  const Tokens& tokens = tier(side);
  if (s.allocator.tokens[row].of[side] != static_cast<int32_t>(tokens.size())) {
    return at_text(side, s.allocator.tokens[row].of[side], "is the number of tokens");
  }
  for (int32_t i = 0; i < static_cast<int32_t>(tokens.size()); ++i) {
    const HostSlot at = row_slot(s, row, side, i);
    if (page_position(at.page, at.slot) != tokens[i].position) {
      return at_text(side, i, "position");
    }
    if (page_score(at.page, at.slot) != tokens[i].score) return at_text(side, i, "score");
  }
  for (int32_t page = 0; page < s.allocator.pages[row].of[side]; ++page) {
    const PageRecord& record = s.allocator.records[s.page_id(row, side, page)];
    PageRecord least = kEmptyPageRecord;
    for (int32_t i = page * s.page_tokens(side);
         i < std::min<int32_t>((page + 1) * s.page_tokens(side), tokens.size()); ++i) {
      if (least.min_slot == kNoSlot || is_better_victim(tokens[i].score, tokens[i].position,
                                                        least.min_score, least.min_position)) {
        least = {0, tokens[i].score, i % s.page_tokens(side), tokens[i].position};
      }
    }
    if (record.min_score != least.min_score || record.min_slot != least.min_slot ||
        record.min_position != least.min_position) {
      return at_text(side, page, "is a page with a wrong record");
    }
  }
  return "";
}

std::string RowModel::window_difference(const StoreView& s, int32_t row) const {
  std::map<int32_t, float> expected;
  for (const Token& t : window_) expected[t.position] = t.score;
  for (const Token& t : sinks_) expected[t.position] = t.score;
  if (s.allocator.tokens[row].of[kWindowSide] != static_cast<int32_t>(expected.size())) {
    return at_text(kWindowSide, s.allocator.tokens[row].of[kWindowSide], "is the number of tokens");
  }
  for (int32_t i = 0; i < static_cast<int32_t>(expected.size()); ++i) {
    const HostSlot at = row_slot(s, row, kWindowSide, i);
    const auto found = expected.find(page_position(at.page, at.slot));
    if (found == expected.end()) return at_text(kWindowSide, i, "position");
    if (live_ && page_score(at.page, at.slot) != found->second) {
      return at_text(kWindowSide, i, "score");
    }
    found->second = -1;  // no other slot may hold it
  }
  return "";
}

std::string RowModel::difference(const StoreView& s, int32_t row) const {
  for (const int32_t side : {kHighSide, kLowSide}) {
    if (std::string text = tier_difference(s, row, side); !text.empty()) return text;
  }
  return window_difference(s, row);
}

std::string RowModel::value_difference(const StoreView& s, int32_t row) const {
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (int32_t i = 0; i < s.allocator.tokens[row].of[side]; ++i) {
      const HostSlot at = row_slot(s, row, side, i);
      const auto found = values_.find(page_position(at.page, at.slot));
      if (found == values_.end()) return at_text(side, i, "no such token");
      std::vector<float> k(found->second.k.size(), NAN), v(k);
      TokenOutput out;
      out.k = k.data();
      out.v = v.data();
      out.count = 1;
      if (!decode_tokens(at.page, at.slot, out)) return at_text(side, i, "cannot be decoded");
      if (k != found->second.k) return at_text(side, i, "key");
      if (v != found->second.v) return at_text(side, i, "value");
    }
  }
  return "";
}

}  // namespace tierkv::testing

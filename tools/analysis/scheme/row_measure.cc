// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/row_measure.h"

#include <algorithm>
#include <cmath>

#include "tools/analysis/scheme/row_pages.h"
#include "tools/analysis/stop_watch.h"

namespace tierkv::analysis {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

// Pooled squared errors of decoded tokens against the original ones.
class ValueErrors {
 public:
  ValueErrors(const RowInput& input, PositionErrors* by_place)
      : input_(input), by_place_(by_place), original_(input.k->head_dim) {}

  void add(const int64_t* tokens, const float* k, const float* v, int32_t n, Tally* tally) {
    const int32_t d = input_.k->head_dim;
    for (const Component c : kComponents) {
      const float* decoded = c == Component::kKey ? k : v;
      Tally::PerComponent& sum = tally->component[static_cast<int>(c)];
      for (int32_t i = 0; i < n; ++i) {
        row_to_float(input_.of(c), tokens[i], 1, original_.data());
        const PositionErrors::Squares token = compare(decoded + static_cast<int64_t>(i) * d);
        sum.error_squared += token.error;
        sum.norm_squared += token.norm;
        if (by_place_ == nullptr) continue;
        PositionErrors::Squares& bin =
            by_place_->bins[static_cast<int>(c)][PositionErrors::bin(tokens[i], input_.k->tokens)];
        bin.error += token.error;
        bin.norm += token.norm;
      }
    }
  }

 private:
  // Several partial sums, so that the additions need not wait for one another.
  PositionErrors::Squares compare(const float* decoded) const {
    constexpr size_t kLanes = 8;
    double error[kLanes] = {}, norm[kLanes] = {};
    const size_t d = original_.size();
    const auto add = [&](size_t lane, size_t i) {
      const double e = static_cast<double>(original_[i]) - decoded[i];
      error[lane] += e * e;
      norm[lane] += static_cast<double>(original_[i]) * original_[i];
    };
    size_t i = 0;
    for (; i + kLanes <= d; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) add(lane, i + lane);
    }
    for (; i < d; ++i) add(0, i);
    PositionErrors::Squares sum;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      sum.error += error[lane];
      sum.norm += norm[lane];
    }
    return sum;
  }

  RowInput input_;
  PositionErrors* by_place_;
  std::vector<float> original_;
};

// Attention of a tile of queries over the tokens of a row as they are decoded. Every stored token
// is seen as stored (plain). With the window moving (online) a body token is seen compressed by
// queries at least `window` away and in the window's format by nearer ones. `both` collects what
// the two agree on.
class StoredAttention {
 public:
  StoredAttention(const QueryTile& tile, int64_t window)
      : window_(window),
        block_(tile),
        both_(tile.count(), tile.head_dim),
        plain_(tile.count(), tile.head_dim),
        online_(tile.count(), tile.head_dim) {}

  void add_stored(Part part, const int64_t* tokens, const float* k, const float* v, int32_t n) {
    load(tokens, k, v, n);
    if (part == Part::kSinks || part == Part::kWindow) {
      block_.add_to(&both_, all_);
    } else if (part == Part::kKeyGap) {
      block_.add_to(&plain_, all_);
    } else {
      block_.add_to(&both_, far_);
      block_.add_to(&plain_, near_);
    }
  }
  // Forms that are not stored but that the moving window asks for.
  StatusCode add_online(const RowCodec& codec, int64_t first_position) {
    const auto add = [&](const Visibility* visible) {
      return
          [this, visible](Part, const int64_t* tokens, const float* k, const float* v, int32_t n) {
            load(tokens, k, v, n);
            block_.add_to(&online_, visible);
          };
    };
    if (StatusCode s = codec.decode_gap_quantised(add(far_)); s != StatusCode::kOk) return s;
    if (window_ == 0) return StatusCode::kOk;
    const RowPlan& plan = codec.plan();
    const int64_t recent =
        std::clamp<int64_t>(first_position - window_ + 1, plan.body_begin, plan.body_end);
    return codec.decode_recent(recent, plan.body_end, add(near_));
  }
  void finish() {
    plain_.merge(both_);
    online_.merge(both_);
  }
  const SoftmaxState& plain() const { return plain_; }
  const SoftmaxState& online() const { return online_; }

 private:
  void load(const int64_t* tokens, const float* k, const float* v, int32_t n) {
    block_.load(k, v, n);
    constexpr int64_t kAlways = std::numeric_limits<int64_t>::max();
    for (int32_t i = 0; i < n; ++i) {
      all_[i] = {tokens[i], kAlways};
      far_[i] = {tokens[i] + window_, kAlways};
      near_[i] = {tokens[i], tokens[i] + window_ - 1};
    }
  }

  int64_t window_;
  BlockAttention block_;
  SoftmaxState both_, plain_, online_;
  Visibility all_[kBlockTokens], far_[kBlockTokens], near_[kBlockTokens];
};

void add_attention_errors(const StoredAttention& stored, const ExactAttention& exact,
                          Tally::Attention* sum, Tally::RowError* pooled) {
  const int32_t d = exact.tile.head_dim;
  std::vector<double> a(d), b(d);
  for (int64_t q = 0; q < exact.tile.count(); ++q) {
    stored.plain().output(q, a.data());
    stored.online().output(q, b.data());
    const double* o = exact.outputs.data() + q * d;
    double oo = 0, aa = 0, oa = 0, ea = 0, eb = 0;
    for (int32_t i = 0; i < d; ++i) {
      oo += o[i] * o[i];
      aa += a[i] * a[i];
      oa += o[i] * a[i];
      ea += (o[i] - a[i]) * (o[i] - a[i]);
      eb += (o[i] - b[i]) * (o[i] - b[i]);
    }
    if (oo == 0) continue;
    pooled->error_squared += eb;
    pooled->norm_squared += oo;
    sum->error += std::sqrt(ea / oo);
    sum->error_online += std::sqrt(eb / oo);
    if (aa > 0) sum->cosine += oa / std::sqrt(oo * aa);
    ++sum->queries;
  }
}

}  // namespace

void attend_exactly(const RowInput& row, ExactAttention* attention) {
  const QueryTile& tile = attention->tile;
  const int32_t d = tile.head_dim;
  BlockAttention block(tile);
  SoftmaxState state(tile.count(), d);
  std::vector<float> k(kBlockTokens * d), v(kBlockTokens * d);
  Visibility visible[kBlockTokens];
  const int64_t end = tile.positions.back() + 1;
  for (int64_t t = 0; t < end; t += kBlockTokens) {
    const auto n = static_cast<int32_t>(std::min<int64_t>(kBlockTokens, end - t));
    row_to_float(*row.k, t, n, k.data());
    row_to_float(*row.v, t, n, v.data());
    for (int32_t i = 0; i < n; ++i) visible[i] = {t + i, std::numeric_limits<int64_t>::max()};
    block.load(k.data(), v.data(), n);
    block.add_to(&state, visible);
  }
  attention->outputs.resize(tile.count() * d);
  for (int64_t q = 0; q < tile.count(); ++q) state.output(q, attention->outputs.data() + q * d);
}

void add_sizes(const RowCodec& codec, Tally* tally) {
  const RowPlan& plan = codec.plan();
  const Scheme& scheme = codec.scheme();
  const int64_t values = plan.tokens * codec.head_dim();
  tally->values += 2 * values;
  tally->input_fp16_bytes += 4 * values;
  for (int32_t i = 0; i < kNumTiers; ++i) tally->tokens[i] += plan.count[i];
  tally->stored_bytes += codec.stored_bytes();
  if (scheme.has_records()) {
    tally->stored_bytes += 8 * (plan.tokens - plan.count[static_cast<int>(Tier::kPruned)]);
  } else if (scheme.tiered) {
    tally->stored_bytes += (plan.tokens + 3) / 4;  // the row map
  }
  tally->page_bytes += row_page_bytes(scheme, plan, codec.head_dim(), codec.body_bytes());
  for (const Component c : kComponents) {
    Tally::PerComponent& sum = tally->component[static_cast<int>(c)];
    sum.coded_bits += 8.0 * static_cast<double>(codec.coded_bytes(c));
    sum.symbols += codec.coded_symbols(c);
    if (!codec.coding(c, Part::kHigh).stored.is_weighted()) continue;
    const std::vector<uint8_t>& blocks = codec.segment(c, Part::kHigh).data;
    tally->blocks.add_blocks(blocks.data(), static_cast<int64_t>(blocks.size()));
  }
}

StatusCode add_errors(const RowCodec& codec, const ExactAttention& exact,
                      const ValueErrorRequest& values, Tally* tally, Tally::RowError* pooled) {
  const bool attends = !exact.tile.positions.empty();
  if (!values.wanted && !attends) return StatusCode::kOk;
  ValueErrors errors(codec.input(), values.by_place);
  StoredAttention attention(exact.tile, codec.plan().tokens - codec.plan().window_begin());
  StopWatch whole;
  double elsewhere = 0;  // not spent on decoding
  StatusCode code = codec.decode(
      [&](Part part, const int64_t* tokens, const float* k, const float* v, int32_t n) {
        StopWatch visit;
        if (values.wanted) errors.add(tokens, k, v, n, tally);
        if (attends) attention.add_stored(part, tokens, k, v, n);
        elsewhere += visit.seconds();
      });
  if (values.wanted) tally->decode_seconds += whole.seconds() - elsewhere;
  if (code != StatusCode::kOk || !attends) return code;
  code = attention.add_online(codec, exact.tile.positions.front());
  if (code != StatusCode::kOk) return code;
  attention.finish();
  add_attention_errors(attention, exact, &tally->attention, pooled);
  return StatusCode::kOk;
}

}  // namespace tierkv::analysis

// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/histogram.h"

#include <algorithm>
#include <utility>

#include "codec/format/fragment_order.h"

namespace tierkv {

CodeHistogram::CodeHistogram(Component component, int32_t head_dim, std::vector<uint64_t> singles,
                             std::vector<uint64_t> pairs)
    : component_(component),
      head_dim_(head_dim),
      has_quads_(false),
      singles_(std::move(singles)),
      pairs_(std::move(pairs)) {
  for (int32_t code = INT16_MIN; code <= INT16_MAX; ++code) {
    const uint64_t n = count(code);
    if (n == 0) continue;
    min_ = total_ == 0 ? code : min_;
    max_ = code;
    total_ += static_cast<int64_t>(n);
  }
}

void CodeHistogram::add(const int16_t* codes, int64_t tokens) {
  for (int64_t t = 0; t < tokens; t += kBlockTokens) {
    const int64_t n = std::min<int64_t>(kBlockTokens, tokens - t);
    add_block(codes + t * head_dim_, static_cast<int32_t>(n));
  }
}

void CodeHistogram::add_block(const int16_t* codes, int32_t tokens) {
  const int64_t n = static_cast<int64_t>(tokens) * head_dim_, d = head_dim_;
  int32_t lo = total_ == 0 ? codes[0] : min_, hi = total_ == 0 ? codes[0] : max_;
  for (int64_t i = 0; i < n; ++i) {
    lo = std::min<int32_t>(lo, codes[i]);
    hi = std::max<int32_t>(hi, codes[i]);
    ++singles_[static_cast<uint16_t>(codes[i])];
  }
  min_ = lo;
  max_ = hi;
  total_ += n;

  const bool key = component_ == Component::kKey;
  // Keys: channels 2i and 2i + 1 of every token. Values: tokens 2i and 2i + 1 of every channel.
  const int64_t pair_rows = key ? tokens : tokens / 2;
  const int64_t pairs_a_row = key ? d / 2 : d;
  const int64_t row_stride = key ? d : 2 * d, pair_stride = key ? 2 : 1, partner = key ? 1 : d;
  for (int64_t r = 0; r < pair_rows; ++r) {
    const int16_t* row = codes + r * row_stride;
    for (int64_t i = 0; i < pairs_a_row; ++i) {
      ++pairs_[pair_index(row[i * pair_stride], row[i * pair_stride + partner])];
    }
  }
  int64_t lone = 0;
  if (key && d % 2 == 1) {
    for (int64_t r = 0; r < tokens; ++r) ++lone_[static_cast<uint8_t>(codes[r * d + d - 1])];
    lone = tokens;
  } else if (!key && tokens % 2 == 1) {
    for (int64_t i = 0; i < d; ++i) ++lone_[static_cast<uint8_t>(codes[(tokens - 1) * d + i])];
    lone = d;
  }
  const int64_t padded_pairs =
      int64_t{tile_count(tokens)} * kTileTokens * dim_block_count(head_dim_) * kDimBlock / 2;
  padding_pairs_ += static_cast<uint64_t>(padded_pairs - pair_rows * pairs_a_row - lone);
  if (quads_are_exact()) add_quads(codes, tokens);
}

// Pairs whose partner is padding are left out: at most 8 tokens of a sequence, or 8 channels.
void CodeHistogram::add_quads(const int16_t* codes, int32_t tokens) {
  const bool key = component_ == Component::kKey;
  const int64_t d = head_dim_;
  // From a pair to its second code, and to the first code of the pair that shares its lookup.
  const int64_t partner = key ? 1 : d, second = key ? 8 * d : 8;
  for (int64_t t = 0; t < tokens; ++t) {
    if (key ? t % 16 >= 8 || t + 8 >= tokens : t % 2 == 1 || t + 1 >= tokens) continue;
    for (int64_t c = 0; c < d; ++c) {
      if (key ? c % 2 == 1 || c + 1 >= d : c % 16 >= 8 || c + 8 >= d) continue;
      const int16_t* x = codes + t * d + c;
      ++quads_[quad_index(x[0], x[partner], x[second], x[second + partner])];
    }
  }
}

void CodeHistogram::merge(const CodeHistogram& other) {
  if (other.total_ == 0) return;
  min_ = total_ == 0 ? other.min_ : std::min(min_, other.min_);
  max_ = total_ == 0 ? other.max_ : std::max(max_, other.max_);
  total_ += other.total_;
  has_quads_ = has_quads_ && other.has_quads_;
  padding_pairs_ += other.padding_pairs_;
  for (size_t i = 0; i < singles_.size(); ++i) singles_[i] += other.singles_[i];
  for (size_t i = 0; i < pairs_.size(); ++i) pairs_[i] += other.pairs_[i];
  for (size_t i = 0; i < lone_.size(); ++i) lone_[i] += other.lone_[i];
  for (size_t i = 0; i < quads_.size(); ++i) quads_[i] += other.quads_[i];
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "tests/support/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "attention/core/workspace.h"
#include "codec/format/element.h"
#include "codec/format/errors.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

// Decoded tokens of one row, in the order of its tiers.
struct RowTokensDecoded {
  std::vector<double> k, v;  // [tokens, head_dim]
  std::vector<int32_t> age;  // [tokens] how many of the row's are newer; kNoTail: more than queries
};

double half_at(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return half_to_float(bits);
}

void decode_slot(const PageLayout& layout, const uint8_t* page, int32_t slot, DType raw,
                 RowTokensDecoded& row) {
  for (int32_t dim = 0; dim < layout.head_dim(); ++dim) {
    row.k.push_back(page_value(layout, page, Component::kKey, slot, dim, raw));
    row.v.push_back(page_value(layout, page, Component::kValue, slot, dim, raw));
  }
}

// The order of a tier of `tokens` tokens of a batch entry.
TailOrder tail_order(const AttentionConfig& config, const AttendCall& call, int32_t entry,
                     int32_t tokens) {
  const AttentionTail& tail = call.tail;
  const bool is_ring = tail.ring_tokens > 0 && tokens >= tail.ring_first + tail.ring_tokens;
  const int32_t newest = tail.newest == nullptr ? tokens - 1 : tail.newest[entry];
  return {config.q_len == 1 || tail.is_elsewhere ? kNoTail : newest, is_ring ? tail.ring_first : 0,
          is_ring ? tail.ring_tokens : 0};
}

// A tier of one row.
struct TierPlace {
  SideView side;
  int64_t table_row;
  int32_t entry;  // of the batch
  bool is_tail;
};

Status decode_tier(const AttentionConfig& config, const AttendCall& call, const PageLayout& layout,
                   const TierPlace& at, RowTokensDecoded& row) {
  const SideView& side = at.side;
  const int32_t tokens = side.tokens[at.table_row * side.token_stride];
  if (tokens < 0 || tokens > static_cast<int64_t>(side.max_pages) * layout.tokens) {
    return corrupt("token count " + std::to_string(tokens));
  }
  const TailOrder order = at.is_tail ? tail_order(config, call, at.entry, tokens) : TailOrder{};
  for (int32_t i = 0; i < tokens; ++i) {
    const int64_t slot = at.table_row * side.row_stride + (i / layout.tokens) * side.direction;
    const int32_t page = side.slots[slot];
    if (page < 0 || page >= call.pages.num_pages) return corrupt("page id " + std::to_string(page));
    decode_slot(layout, call.pages.base + page * call.pages.page_bytes, i % layout.tokens,
                config.dtype, row);
    row.age.push_back(order.age(i));
  }
  return Status::ok();
}

Result<RowTokensDecoded> decode_row(const AttentionConfig& config, const AttendCall& call,
                                    int32_t entry, int32_t kv_head) {
  RowTokensDecoded row;
  const int32_t sequence = call.batch.sequences == nullptr ? entry : call.batch.sequences[entry];
  if (sequence == -1) return row;
  const PageTableShape& shape = call.table.shape;
  if (sequence < 0 || sequence >= shape.num_sequences) {
    return corrupt("sequence " + std::to_string(sequence));
  }
  const int64_t table_row = static_cast<int64_t>(sequence) * shape.rows_per_sequence +
                            call.layer * config.num_kv_heads + kv_head;
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    const Result<PageLayout> layout =
        tier_layout(config, t, head_class_of(config, call.layer, kv_head));
    if (!layout) return layout.status();
    const int32_t tail_tier = call.tail.tier < 0 ? config.num_tiers - 1 : call.tail.tier;
    const TierPlace at = {call.table.side(config.tiers[t].side), table_row, entry, t == tail_tier};
    if (Status s = decode_tier(config, call, *layout, at, row); !s) return s;
  }
  return row;
}

struct Query {
  const uint16_t* q;  // [head_dim] of dtype
  DType dtype;
  int32_t head_dim;
  double sm_scale;
  int32_t least_age;  // of the tokens that it sees
  double sink;        // -infinity: none
};
struct QueryResult {
  std::vector<double> out;  // [head_dim]
  double lse;
};
QueryResult attend_row(const RowTokensDecoded& row, const Query& query) {
  const double infinity = std::numeric_limits<double>::infinity();
  const size_t tokens = row.age.size();
  std::vector<double> logits(tokens, -infinity);
  double largest = query.sink;
  for (size_t i = 0; i < tokens; ++i) {
    if (row.age[i] < query.least_age) continue;
    double dot = 0;
    for (int32_t d = 0; d < query.head_dim; ++d) {
      dot += raw_to_float(query.dtype, query.q[d]) * row.k[i * query.head_dim + d];
    }
    logits[i] = dot * query.sm_scale;
    largest = std::fmax(largest, logits[i]);
  }
  QueryResult result{std::vector<double>(query.head_dim, 0.0), -infinity};
  if (largest == -infinity) return result;
  double sum = std::exp(query.sink - largest);
  for (const double logit : logits) sum += std::exp(logit - largest);
  for (size_t i = 0; i < tokens; ++i) {
    const double p = std::exp(logits[i] - largest) / sum;
    if (p == 0) continue;
    for (int32_t d = 0; d < query.head_dim; ++d) {
      result.out[d] += p * row.v[i * query.head_dim + d];
    }
  }
  result.lse = largest + std::log(sum);
  return result;
}

}  // namespace

double page_value(const PageLayout& layout, const uint8_t* page, Component component, int32_t slot,
                  int32_t dim, DType raw) {
  const TileLayout& tile = layout.tile(component);
  const int32_t tile_index = slot / kTileTokens, token = slot % kTileTokens;
  const CodePosition at = code_position(tile, component, token, dim);
  const uint32_t code =
      load_code(page + layout.tile_codes_byte(component, tile_index), at, tile.type.bits());
  if (tile.type.is_raw()) return raw_to_float(raw, static_cast<uint16_t>(code));
  const int32_t groups = layout.groups(component), group = dim / (layout.head_dim() / groups);
  const uint8_t* metadata =
      page + layout.tile_metadata_byte(component, tile_index) + token_metadata_byte(group, token);
  return half_at(metadata) * code + half_at(metadata + 2);
}

Result<ReferenceOutput> attend_reference(const AttentionConfig& config, const AttendCall& call) {
  if (Status s = config.validate(); !s) return s;
  if (Status s = validate_tail(config, call.tail); !s) return s;
  const auto* q = static_cast<const uint16_t*>(call.q);
  const int32_t group = config.group_size(), dim = config.head_dim;
  const int64_t columns =
      static_cast<int64_t>(call.batch.count) * config.q_len * config.num_q_heads;
  ReferenceOutput output{std::vector<double>(columns * dim), std::vector<double>(columns)};
  for (int32_t entry = 0; entry < call.batch.count; ++entry) {
    for (int32_t h = 0; h < config.num_kv_heads; ++h) {
      const Result<RowTokensDecoded> row = decode_row(config, call, entry, h);
      if (!row) return row.status();
      for (int32_t j = 0; j < config.q_len * group; ++j) {
        const int32_t query = j / group;
        const int64_t place =
            (int64_t{entry} * config.q_len + query) * config.num_q_heads + h * group + j % group;
        const double sink = call.sinks == nullptr ? -std::numeric_limits<double>::infinity()
                                                  : call.sinks[h * group + j % group];
        QueryResult result = attend_row(*row, {q + place * dim, config.dtype, dim, config.sm_scale,
                                               config.q_len - 1 - query, sink});
        std::copy(result.out.begin(), result.out.end(), output.out.begin() + place * dim);
        output.lse[place] = result.lse;
      }
    }
  }
  return output;
}

}  // namespace tierkv

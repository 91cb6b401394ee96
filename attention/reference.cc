#include "attention/reference.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "tierkv/half.h"

namespace tierkv {
namespace {

// Decoded tokens of one row, in the order of its tiers.
struct RowTokensDecoded {
  std::vector<double> k, v;  // [tokens, head_dim]
  int64_t tokens = 0;
};

double half_at(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return half_to_float(bits);
}

Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, std::move(why));
}

void decode_slot(const PageLayout& layout, const uint8_t* page, int32_t slot,
                 RowTokensDecoded& row) {
  for (int32_t dim = 0; dim < layout.head_dim(); ++dim) {
    row.k.push_back(page_value(layout, page, Component::kKey, slot, dim));
    row.v.push_back(page_value(layout, page, Component::kValue, slot, dim));
  }
  ++row.tokens;
}

Status decode_tier(const AttendCall& call, const PageLayout& layout, const SideView& side,
                   int64_t table_row, RowTokensDecoded& row) {
  const int32_t tokens = side.tokens[table_row * side.token_stride];
  if (tokens < 0 || tokens > static_cast<int64_t>(side.max_pages) * layout.tokens) {
    return corrupt("token count " + std::to_string(tokens));
  }
  for (int32_t i = 0; i < tokens; ++i) {
    const int64_t slot = table_row * side.row_stride + (i / layout.tokens) * side.direction;
    const int32_t page = side.slots[slot];
    if (page < 0 || page >= call.pages.num_pages) return corrupt("page id " + std::to_string(page));
    decode_slot(layout, call.pages.base + page * call.pages.page_bytes, i % layout.tokens, row);
  }
  return Status::ok();
}

Result<RowTokensDecoded> decode_row(const AttentionConfig& config, const AttendCall& call,
                                    int32_t sequence, int32_t kv_head) {
  RowTokensDecoded row;
  if (sequence == -1) return row;
  const PageTableShape& shape = call.table.shape;
  if (sequence < 0 || sequence >= shape.num_sequences) {
    return corrupt("sequence " + std::to_string(sequence));
  }
  const int64_t table_row = static_cast<int64_t>(sequence) * shape.rows_per_sequence +
                            call.layer * config.num_kv_heads + kv_head;
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    const Result<PageLayout> layout =
        make_page_layout(config.tiers[t].format, config.head_dim, config.page_bytes);
    if (!layout) return layout.status();
    const SideView side = call.table.side(config.tiers[t].side);
    if (Status s = decode_tier(call, *layout, side, table_row, row); !s) return s;
  }
  return row;
}

// Softmax attention of one query; appends to the output.
void attend_row(const RowTokensDecoded& row, const uint16_t* q, int32_t head_dim, double sm_scale,
                ReferenceOutput& output) {
  std::vector<double> logits(row.tokens), out(head_dim, 0.0);
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t i = 0; i < row.tokens; ++i) {
    double dot = 0;
    for (int32_t d = 0; d < head_dim; ++d) dot += half_to_float(q[d]) * row.k[i * head_dim + d];
    logits[i] = dot * sm_scale;
    largest = std::fmax(largest, logits[i]);
  }
  for (int64_t i = 0; i < row.tokens; ++i) {
    const double p = std::exp(logits[i] - largest);
    sum += p;
    for (int32_t d = 0; d < head_dim; ++d) out[d] += p * row.v[i * head_dim + d];
  }
  for (const double x : out) output.out.push_back(row.tokens == 0 ? 0.0 : x / sum);
  output.lse.push_back(largest + (row.tokens == 0 ? 0.0 : std::log(sum)));
}

}  // namespace

double page_value(const PageLayout& layout, const uint8_t* page, Component component, int32_t slot,
                  int32_t dim) {
  const TileLayout& tile = layout.tile(component);
  const int32_t tile_index = slot / kTileTokens, token = slot % kTileTokens;
  const CodePosition at = code_position(tile, component, token, dim);
  uint32_t word;
  std::memcpy(&word, page + layout.tile_codes_byte(component, tile_index) + at.byte, sizeof(word));
  const uint32_t code = (word >> at.bit) & ((1u << tile.bits) - 1);
  if (tile.bits == 16) return half_to_float(static_cast<uint16_t>(code));
  const int32_t groups = layout.groups(component), group = dim / (layout.head_dim() / groups);
  const uint8_t* metadata =
      page + layout.tile_metadata_byte(component, tile_index) + token_metadata_byte(group, token);
  return half_at(metadata) * code + half_at(metadata + 2);
}

Result<ReferenceOutput> attend_reference(const AttentionConfig& config, const AttendCall& call) {
  if (Status s = config.validate(); !s) return s;
  const auto* q = static_cast<const uint16_t*>(call.q);
  ReferenceOutput output;
  for (int32_t i = 0; i < call.batch.count; ++i) {
    const int32_t sequence = call.batch.sequences == nullptr ? i : call.batch.sequences[i];
    for (int32_t h = 0; h < config.num_kv_heads; ++h) {
      const Result<RowTokensDecoded> row = decode_row(config, call, sequence, h);
      if (!row) return row.status();
      for (int32_t j = 0; j < config.group_size(); ++j) {
        attend_row(*row, q, config.head_dim, config.sm_scale, output);
        q += config.head_dim;
      }
    }
  }
  return output;
}

}  // namespace tierkv

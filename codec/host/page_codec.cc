// SPDX-License-Identifier: Apache-2.0
#include "codec/host/page_codec.h"

#include <bit>
#include <cstring>

#include "codec/format/element.h"
#include "codec/format/errors.h"

namespace tierkv {
namespace {

static_assert(std::endian::native == std::endian::little, "pages are little-endian words");

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

// Token i of a checked batch.
StatusCode quantize_row(const HostPage& page, const TokenBatch& batch, int32_t i,
                        TokenCodes* token) {
  const int32_t head_dim = page.layout.head_dim();
  const int64_t row = batch_row(batch.rows, i);
  const int64_t offset = row * row_stride_of(batch.row_stride, head_dim);
  float x[kMaxPageHeadDim];
  for (const Component c : kComponents) {
    const void* from = c == Component::kKey ? batch.k : batch.v;
    for (int32_t d = 0; d < head_dim; ++d) x[d] = load_element(from, batch.dtype, offset + d);
    const StatusCode s = quantize_side(page, c, x, &token->of(c));
    if (s != StatusCode::kOk) return s;
  }
  const bool has_records = page.layout.has_records();
  token->score = has_records ? batch.scores[row] : kNoScore;
  token->position = has_records ? batch.positions[row] : kNoPosition;
  return StatusCode::kOk;
}

Status check_page(const HostPage& page) {
  if (page.bytes == nullptr) return invalid("page is null");
  if (!is_page_layout(page.layout)) return invalid("page layout is not one of ours");
  if (!is_raw_dtype(page.raw_dtype)) return invalid("raw_dtype must be float16 or bfloat16");
  for (const Component c : kComponents) {
    if (!is_page_rule(page.rule_of(c), page.layout.tile(c).type)) {
      return invalid("rule is none that pages of these bits have");
    }
  }
  return Status::ok();
}

// Slots first..first + count - 1 lie in the page.
Status check_slots(const HostPage& page, int32_t first, int32_t count) {
  if (Status s = check_page(page); !s) return s;
  if (first < 0 || count < 0 || count > page.layout.tokens || first > page.layout.tokens - count) {
    return invalid("slots " + std::to_string(first) + " + " + std::to_string(count) +
                   " are outside a page of " + std::to_string(page.layout.tokens));
  }
  return Status::ok();
}

// What batches and outputs have in common.
template <class Tokens>
Status check_tokens(const HostPage& page, int32_t first, const Tokens& tokens) {
  if (Status s = check_slots(page, first, tokens.count); !s) return s;
  if (tokens.dtype != DType::kFloat32 && !is_raw_dtype(tokens.dtype)) return invalid("bad dtype");
  if (tokens.row_stride != 0 && tokens.row_stride < page.layout.head_dim()) {
    return invalid("row_stride is below head_dim");
  }
  return Status::ok();
}

Status token_failure(StatusCode code, int32_t i) {
  const char* what = code == StatusCode::kNonFinite
                         ? ": a key or value is not finite"
                         : ": a key or value is beyond the format's range";
  return Status(code, "token " + std::to_string(i) + what);
}

}  // namespace

Status check_batch(const HostPage& page, int32_t used, const TokenBatch& batch) {
  if (Status s = check_tokens(page, used, batch); !s) return s;
  if (batch.count == 0) return Status::ok();
  const bool has_records = page.layout.has_records();
  if (!batch.k || !batch.v) return invalid("keys or values are null");
  if (has_records && (!batch.scores || !batch.positions)) {
    return invalid("scores or positions are null");
  }
  for (int32_t i = 0; i < batch.count; ++i) {
    const int64_t row = batch_row(batch.rows, i);
    if (row < 0) return invalid("row of token " + std::to_string(i) + " is negative");
    if (!has_records) continue;
    if (batch.positions[row] < 0) {
      return invalid("position of token " + std::to_string(i) + " is negative");
    }
    if (!is_finite(batch.scores[row])) {
      return Status(StatusCode::kNonFinite,
                    "score of token " + std::to_string(i) + " is not finite");
    }
  }
  return Status::ok();
}

Status check_output(const HostPage& page, int32_t first_slot, const TokenOutput& out) {
  if (Status s = check_tokens(page, first_slot, out); !s) return s;
  if (!page.layout.has_records() && (out.scores != nullptr || out.positions != nullptr)) {
    return invalid("pages without records hold neither scores nor positions");
  }
  for (int32_t i = 0; i < out.count; ++i) {
    if (batch_row(out.rows, i) < 0) {
      return invalid("row of token " + std::to_string(i) + " is negative");
    }
  }
  return Status::ok();
}

StatusCode quantize_side(const HostPage& page, Component component, const float* x,
                         TokenCodes::Side* side) {
  const TileLayout& tile = page.layout.tile(component);
  if (tile.type.is_raw()) {
    for (int32_t d = 0; d < tile.head_dim; ++d) {
      if (!is_finite(x[d])) return StatusCode::kNonFinite;
      side->codes[d] = float_to_raw(page.raw_dtype, x[d]);
      if (!is_finite(raw_to_float(page.raw_dtype, side->codes[d]))) return StatusCode::kOutOfRange;
    }
    return StatusCode::kOk;
  }
  uint8_t codes[kMaxPageHeadDim];
  const int32_t groups = page.layout.groups(component), width = tile.head_dim / groups;
  for (int32_t g = 0; g < groups; ++g) {
    const float* group = x + g * width;
    QuantParams* params = &side->params[g];
    const StatusCode s =
        page.rule_of(component) == StepRule::kNorm
            ? quantize_norm(group, width, params, codes + g * width)
            : quantize_minmax(group, width, 1, tile.type.levels(), params, codes + g * width);
    if (s != StatusCode::kOk) return s;
  }
  for (int32_t d = 0; d < tile.head_dim; ++d) side->codes[d] = codes[d];
  return StatusCode::kOk;
}

void dequantize_side(const HostPage& page, Component component, const TokenCodes::Side& side,
                     float* x) {
  const TileLayout& tile = page.layout.tile(component);
  if (tile.type.is_raw()) {
    for (int32_t d = 0; d < tile.head_dim; ++d) x[d] = raw_to_float(page.raw_dtype, side.codes[d]);
    return;
  }
  const int32_t width = tile.head_dim / page.layout.groups(component);
  for (int32_t d = 0; d < tile.head_dim; ++d) {
    const QuantParams p = side.params[d / width];
    x[d] = dequantize(side.codes[d], half_to_float(p.scale), half_to_float(p.zero_point));
  }
}

void store_token(const HostPage& page, int32_t slot, const TokenCodes& token) {
  const PageLayout& layout = page.layout;
  const int32_t tile_index = slot / kTileTokens, in_tile = slot % kTileTokens;
  for (const Component c : kComponents) {
    const TileLayout& tile = layout.tile(c);
    const TokenCodes::Side& side = token.of(c);
    uint8_t* codes = page.bytes + layout.tile_codes_byte(c, tile_index);
    for (int32_t d = 0; d < tile.head_dim; ++d) {
      store_code(codes, code_position(tile, c, in_tile, d), tile.type.bits(), side.codes[d]);
    }
    uint8_t* metadata = page.bytes + layout.tile_metadata_byte(c, tile_index);
    for (int32_t g = 0; g < layout.groups(c); ++g) {
      memcpy(metadata + token_metadata_byte(g, in_tile), &side.params[g], sizeof(QuantParams));
    }
  }
  set_page_record(page, slot, token.score, token.position);
}

void load_token(const HostPage& page, int32_t slot, TokenCodes* token) {
  const PageLayout& layout = page.layout;
  const int32_t tile_index = slot / kTileTokens, in_tile = slot % kTileTokens;
  for (const Component c : kComponents) {
    const TileLayout& tile = layout.tile(c);
    TokenCodes::Side& side = token->of(c);
    const uint8_t* codes = page.bytes + layout.tile_codes_byte(c, tile_index);
    for (int32_t d = 0; d < tile.head_dim; ++d) {
      side.codes[d] = static_cast<uint16_t>(
          load_code(codes, code_position(tile, c, in_tile, d), tile.type.bits()));
    }
    const uint8_t* metadata = page.bytes + layout.tile_metadata_byte(c, tile_index);
    for (int32_t g = 0; g < layout.groups(c); ++g) {
      memcpy(&side.params[g], metadata + token_metadata_byte(g, in_tile), sizeof(QuantParams));
    }
  }
  token->score = page_score(page, slot);
  token->position = page_position(page, slot);
}

namespace reference {

Status append_tokens(const HostPage& page, int32_t used, const TokenBatch& batch) {
  if (Status s = check_batch(page, used, batch); !s) return s;
  for (int32_t i = 0; i < batch.count; ++i) {
    TokenCodes token;
    if (StatusCode code = quantize_row(page, batch, i, &token); code != StatusCode::kOk) {
      for (int32_t j = 0; j < i; ++j) clear_slot(page, used + j);
      return token_failure(code, i);
    }
    if ((used + i) % kTileTokens == 0) clear_tile(page, (used + i) / kTileTokens);
    store_token(page, used + i, token);
  }
  return Status::ok();
}

Status decode_tokens(const HostPage& page, int32_t first_slot, const TokenOutput& out) {
  if (Status s = check_output(page, first_slot, out); !s) return s;
  const int32_t head_dim = page.layout.head_dim();
  for (int32_t i = 0; i < out.count; ++i) {
    TokenCodes token;
    load_token(page, first_slot + i, &token);
    const int64_t row = batch_row(out.rows, i);
    const int64_t offset = row * row_stride_of(out.row_stride, head_dim);
    float x[kMaxPageHeadDim];
    for (const Component c : kComponents) {
      void* to = c == Component::kKey ? out.k : out.v;
      if (to == nullptr) continue;
      dequantize_side(page, c, token.of(c), x);
      for (int32_t d = 0; d < head_dim; ++d) store_element(to, out.dtype, offset + d, x[d]);
    }
    if (out.scores != nullptr) out.scores[row] = token.score;
    if (out.positions != nullptr) out.positions[row] = token.position;
  }
  return Status::ok();
}

}  // namespace reference

void clear_tile(const HostPage& page, int32_t tile_index) {
  const PageLayout& layout = page.layout;
  for (const Component c : kComponents) {
    memset(page.bytes + layout.tile_codes_byte(c, tile_index), 0, layout.tile(c).bytes());
    memset(page.bytes + layout.tile_metadata_byte(c, tile_index), 0,
           tile_metadata_bytes(layout.groups(c)));
  }
  for (int32_t i = 0; i < kTileTokens; ++i) {
    set_page_record(page, tile_index * kTileTokens + i, kNoScore, kNoPosition);
  }
}

void clear_slot(const HostPage& page, int32_t slot) {
  TokenCodes nothing{};
  nothing.score = kNoScore;
  nothing.position = kNoPosition;
  store_token(page, slot, nothing);
}

Status clear_token(const HostPage& page, int32_t slot) {
  if (Status s = check_slots(page, slot, 1); !s) return s;
  clear_slot(page, slot);
  return Status::ok();
}

}  // namespace tierkv

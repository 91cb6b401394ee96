// SPDX-License-Identifier: Apache-2.0
#include "store/place/raw_tokens.h"

#include <cstring>
#include <string>

namespace tierkv::store {

namespace {

std::string named(const char* what, int64_t kv_head, int64_t position, const char* fault) {
  return std::string(what) + ": kv_head " + std::to_string(kv_head) + " of the token at position " +
         std::to_string(position) + fault;
}

}  // namespace

Status check_values(const Chunk& chunk, int32_t head_dim, RowOfCall rows, int32_t first) {
  const int64_t per_token = int64_t{rows.num_kv_heads} * head_dim;
  const int64_t values = chunk.tokens * per_token;
  Status worst;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const uint16_t* x = (c == Component::kKey ? chunk.k : chunk.v) + rows.sequence * values;
    for (int64_t i = 0; i < values; ++i) {
      const float value = raw_to_float(chunk.dtype, x[i]);
      const bool finite = is_finite(value);
      if (finite && is_finite(half_to_float(float_to_half(value)))) continue;
      if (finite && !worst) continue;
      worst = Status(finite ? StatusCode::kOutOfRange : StatusCode::kNonFinite,
                     named(c == Component::kKey ? "k" : "v", i % per_token / head_dim,
                           first + i / per_token, finite ? " is beyond fp16" : " is not finite"));
      if (!finite) return worst;
    }
  }
  return worst;
}

Status check_significances(const Chunk& chunk, RowOfCall rows, int32_t first) {
  Status worst;
  for (int32_t h = 0; chunk.significance != nullptr && h < rows.num_kv_heads; ++h) {
    const int64_t row = int64_t{rows.sequence} * rows.num_kv_heads + h;
    for (int32_t t = 0; t < chunk.tokens; ++t) {
      const float x = chunk.significance[row * chunk.stride + t];
      const bool finite = is_finite(x);
      if ((finite && x >= 0) || (finite && !worst)) continue;
      worst =
          Status(finite ? StatusCode::kInvalidArgument : StatusCode::kNonFinite,
                 named("significance", h, first + t, finite ? " is negative" : " is not finite"));
      if (!finite) return worst;
    }
  }
  return worst;
}

void write_raw(const RawRows& rows, uint8_t* row, Component c, int32_t position,
               const void* token) {
  std::memcpy(row + rows.raw.token_byte(c, position), token, size_t{2} * rows.raw.head_dim);
}

void read_raw(const RawRows& rows, const uint8_t* row, Component c, int32_t position, void* token) {
  std::memcpy(token, row + rows.raw.token_byte(c, position), size_t{2} * rows.raw.head_dim);
}

void write_score(const RawRows& rows, uint8_t* row, int32_t position, RawScore score) {
  if (position < rows.laws.sink_tokens) return;
  std::memcpy(row + rows.raw.score_byte(position), &score, sizeof(score));
}

RawScore read_score(const RawRows& rows, const uint8_t* row, int32_t position) {
  RawScore score;
  if (position < rows.laws.sink_tokens) return score;
  std::memcpy(&score, row + rows.raw.score_byte(position), sizeof(score));
  return score;
}

// A token that stays raw has been seen by those of the chunk behind it.
void write_chunk(const RawRows& rows, uint8_t* row, const RawTokens& tokens, LayerTokens to) {
  uint16_t token[kMaxHeadDim];
  for (int32_t p = tokens.held; p < to.tokens; ++p) {
    if (p >= rows.laws.sink_tokens && p < ring_first(rows.laws, to)) continue;
    for (const Component c : {Component::kKey, Component::kValue}) {
      for (int32_t d = 0; d < rows.raw.head_dim; ++d) token[d] = tokens.half_at(c, p, d);
      write_raw(rows, row, c, p, token);
    }
    RawScore score;
    if (tokens.significance != nullptr) {
      score = chunk_score(tokens.significance[p - tokens.held], to.tokens - 1 - p);
    }
    write_score(rows, row, p, score);
  }
}

}  // namespace tierkv::store

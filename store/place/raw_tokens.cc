// SPDX-License-Identifier: Apache-2.0
#include "store/place/raw_tokens.h"

#include <cstring>
#include <string>

#include "codec/format/element.h"

namespace tierkv::store {
namespace {

const uint16_t* chunk_token(const Chunk& chunk, Component c, int32_t kv_head, int32_t position,
                            int32_t head_dim) {
  const auto* x = static_cast<const uint16_t*>(c == Component::kKey ? chunk.k : chunk.v);
  const int64_t token = position - chunk.first;
  return x + (token * chunk.num_kv_heads + kv_head) * head_dim;
}

void to_half(DType dtype, const uint16_t* from, int32_t count, uint16_t* to) {
  if (dtype == DType::kFloat16) {
    std::memcpy(to, from, count * sizeof(uint16_t));
    return;
  }
  for (int32_t d = 0; d < count; ++d) to[d] = float_to_half(bfloat16_to_float(from[d]));
}

// each(dim, its byte in the row). Dim blocks are alike, so places are found for one of them.
template <class Each>
void for_elements(const RawRows& rows, Component c, int32_t position, const Each& each) {
  const RawLayout& layout = rows.raw;
  const auto byte_of = [&](int32_t dim) {
    return position < rows.laws.sink_tokens ? layout.sink_byte(c, position, dim)
                                            : layout.ring_byte(c, position, dim);
  };
  int32_t bytes[kDimBlock];
  for (int32_t d = 0; d < kDimBlock; ++d) bytes[d] = byte_of(d);
  const int32_t apart = byte_of(kDimBlock) - bytes[0];
  for (int32_t first = 0; first < layout.head_dim; first += kDimBlock) {
    for (int32_t d = 0; d < kDimBlock; ++d) {
      each(first + d, bytes[d] + first / kDimBlock * apart);
    }
  }
}

}  // namespace

Status check_chunk(const Chunk& chunk, int32_t head_dim) {
  const int64_t per_token = int64_t{chunk.num_kv_heads} * head_dim;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const auto* x = static_cast<const uint16_t*>(c == Component::kKey ? chunk.k : chunk.v);
    for (int64_t i = 0; i < chunk.tokens * per_token; ++i) {
      const float value = raw_to_float(chunk.dtype, x[i]);
      const bool finite = is_finite(value);
      if (finite && is_finite(half_to_float(float_to_half(value)))) continue;
      return Status(finite ? StatusCode::kOutOfRange : StatusCode::kNonFinite,
                    std::string(c == Component::kKey ? "k" : "v") + ": kv_head " +
                        std::to_string(i % per_token / head_dim) + " of the token at position " +
                        std::to_string(chunk.first + i / per_token) +
                        (finite ? " is beyond fp16" : " is not finite"));
    }
  }
  for (int32_t h = 0; chunk.significance != nullptr && h < chunk.num_kv_heads; ++h) {
    for (int32_t t = 0; t < chunk.tokens; ++t) {
      const float x = chunk.significance[h * chunk.stride + t];
      if (is_finite(x) && x >= 0) continue;
      return Status(is_finite(x) ? StatusCode::kInvalidArgument : StatusCode::kNonFinite,
                    "significance: kv_head " + std::to_string(h) + " of the token at position " +
                        std::to_string(chunk.first + t) +
                        (is_finite(x) ? " is negative" : " is not finite"));
    }
  }
  return Status::ok();
}

void write_raw(const RawRows& rows, uint8_t* row, Component c, int32_t position,
               const void* token) {
  for_elements(rows, c, position, [&](int32_t dim, int32_t byte) {
    std::memcpy(row + byte, static_cast<const uint8_t*>(token) + 2 * dim, 2);
  });
}

void read_raw(const RawRows& rows, const uint8_t* row, Component c, int32_t position, void* token) {
  for_elements(rows, c, position, [&](int32_t dim, int32_t byte) {
    std::memcpy(static_cast<uint8_t*>(token) + 2 * dim, row + byte, 2);
  });
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

void RawTokens::read(Component c, int32_t kv_head, int32_t first, int32_t count, float* out) const {
  const int32_t dim = rows_->raw.head_dim;
  uint16_t token[kMaxHeadDim];
  for (int32_t p = first; p < first + count; ++p) {
    if (p < at_.tokens) {
      read_raw(*rows_, raw_ + int64_t{kv_head} * rows_->raw.row_bytes, c, p, token);
    } else {
      to_half(chunk_->dtype, chunk_token(*chunk_, c, kv_head, p, dim), dim, token);
    }
    for (int32_t d = 0; d < dim; ++d) *out++ = half_to_float(token[d]);
  }
}

Importance RawTokens::importance(int32_t kv_head, int32_t position) const {
  if (position >= at_.tokens) {
    if (chunk_->significance == nullptr) return {};
    const int64_t i = kv_head * chunk_->stride + position - chunk_->first;
    return chunk_importance(chunk_->first, chunk_->significance[i]);
  }
  return ring_importance(
      read_score(*rows_, raw_ + int64_t{kv_head} * rows_->raw.row_bytes, position));
}

// A token that stays raw has been seen by those of the chunk behind it.
void write_chunk(const RawRows& rows, uint8_t* raw, const Chunk& chunk, LayerTokens to) {
  uint16_t token[kMaxHeadDim];
  const int32_t dim = rows.raw.head_dim, first_in_ring = ring_first(rows.laws, to);
  for (int32_t p = chunk.first; p < to.tokens; ++p) {
    if (p >= rows.laws.sink_tokens && p < first_in_ring) continue;
    for (int32_t h = 0; h < chunk.num_kv_heads; ++h) {
      uint8_t* row = raw + int64_t{h} * rows.raw.row_bytes;
      for (const Component c : {Component::kKey, Component::kValue}) {
        to_half(chunk.dtype, chunk_token(chunk, c, h, p, dim), dim, token);
        write_raw(rows, row, c, p, token);
      }
      RawScore score;
      if (chunk.significance != nullptr) {
        score =
            chunk_score(chunk.significance[h * chunk.stride + p - chunk.first], to.tokens - 1 - p);
      }
      write_score(rows, row, p, score);
    }
  }
}

}  // namespace tierkv::store

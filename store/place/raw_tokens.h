// SPDX-License-Identifier: Apache-2.0
// Raw tokens: those that a row holds and, behind them, those of the caller's chunk. Every token is
// fp16 first, wherever it comes from, so that chunks do not matter.
#pragma once

#include <cstdint>

#include "codec/format/element.h"
#include "codec/format/quantize.h"
#include "store/engine/tokens.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv::store {

// The tokens of a layer that append() brings, for all sequences of a call. In a store on a device
// they are device memory.
struct Chunk {
  const uint16_t* k = nullptr;          // [count, tokens, num_kv_heads, head_dim]; null: no chunk
  const uint16_t* v = nullptr;          // likewise
  const float* significance = nullptr;  // [count, num_kv_heads, stride]; null: unknown
  int64_t stride = 0;
  DType dtype = DType::kFloat16;
  int32_t tokens = 0;
};

// What is known of a token's importance when its tier or exponent is decided.
enum class ImportanceKind : int32_t {
  kUnknown = 0,  // neutral
  kPrompt = 1,   // value: its significance by the queries behind it in the first chunk
  kSeen = 2,     // value: the mean of what the queries that were counted gave it
  kDecided = 3,  // bits: what the format kept, RawScore::sum
};
struct Importance {
  ImportanceKind kind = ImportanceKind::kUnknown;
  float value = 0;
  uint32_t bits = 0;
};

// Whether it is taken against those of its row, and goes into their mean.
TKV_HD bool is_averaged(const Importance& known) {
  return known.kind == ImportanceKind::kSeen && known.value > 0;
}

// What is known of a token of the ring, and of one of the chunk that begins at position `first`.
TKV_HD Importance ring_importance(RawScore score) {
  if (score.count < 0) return {ImportanceKind::kDecided, 0, float_bits(score.sum)};
  if (score.count == 0) return {};
  return {ImportanceKind::kSeen, div_rn(score.sum, static_cast<float>(score.count)), 0};
}
// What a later chunk's queries give its tokens is several times what a whole prompt's would.
// Nothing is known by a significance that is a fault.
TKV_HD Importance chunk_importance(int32_t first, float significance) {
  if (!is_finite(significance) || significance < 0) return {};
  return {first == 0 ? ImportanceKind::kPrompt : ImportanceKind::kSeen, significance, 0};
}

// What a chunk says of a token with `behind` tokens of it behind: their queries have seen it.
TKV_HD RawScore chunk_score(float significance, int32_t behind) {
  const float sum = significance * static_cast<float>(behind);
  return {sum < kMostSum ? sum : kMostSum, least(behind, kMostCounted)};
}

// A row of a layer, of a sequence of a call.
struct RowOfCall {
  int32_t sequence = 0, kv_head = 0, num_kv_heads = 1;
};
// The tokens of one row that are in its ring and in the chunk. In a store on a device its memory is
// the device's.
struct RawTokens {
  RawLayout layout;
  const uint8_t* raw = nullptr;  // the row's
  int32_t held = 0;              // tokens before those of the chunk
  // This row's elements of the chunk's first token.
  const uint16_t* k = nullptr;
  const uint16_t* v = nullptr;
  int64_t token_stride = 0;             // elements
  const float* significance = nullptr;  // [tokens]; null: unknown
  DType dtype = DType::kFloat16;

  // The elements of a token, in the ring or in the chunk, and their type.
  TKV_HD const uint16_t* token(Component c, int32_t position) const {
    if (position < held) {
      return reinterpret_cast<const uint16_t*>(raw + layout.token_byte(c, position));
    }
    return (c == Component::kKey ? k : v) + (position - held) * token_stride;
  }
  TKV_HD DType type_of(int32_t position) const { return position < held ? DType::kFloat16 : dtype; }
  // As fp16.
  TKV_HD uint16_t half_at(Component c, int32_t position, int32_t dim) const {
    const uint16_t x = token(c, position)[dim];
    return type_of(position) == DType::kFloat16 ? x : float_to_half(bfloat16_to_float(x));
  }
  TKV_HD Importance importance(int32_t position) const {
    if (position < held) {
      return ring_importance(*reinterpret_cast<const RawScore*>(raw + layout.score_byte(position)));
    }
    if (significance == nullptr) return {};
    return chunk_importance(held, significance[position - held]);
  }
  // Those of positions first .. first + count - 1. out: [count, head_dim].
  void read(Component c, int32_t first, int32_t count, float* out) const {
    for (int32_t p = first; p < first + count; ++p) {
      for (int32_t d = 0; d < layout.head_dim; ++d) *out++ = half_to_float(half_at(c, p, d));
    }
  }
};
// `raw` are the bytes of the row.
TKV_HD RawTokens raw_tokens(const RawLayout& layout, const uint8_t* raw, int32_t held,
                            const Chunk& chunk, RowOfCall row) {
  RawTokens t;
  t.layout = layout;
  t.raw = raw;
  t.held = held;
  t.dtype = chunk.dtype;
  t.token_stride = int64_t{row.num_kv_heads} * layout.head_dim;
  if (chunk.k == nullptr) return t;
  const int64_t first = int64_t{row.sequence} * chunk.tokens * t.token_stride +
                        int64_t{row.kv_head} * layout.head_dim;
  t.k = chunk.k + first;
  t.v = chunk.v + first;
  if (chunk.significance != nullptr) {
    t.significance = chunk.significance +
                     (int64_t{row.sequence} * row.num_kv_heads + row.kv_head) * chunk.stride;
  }
  return t;
}

// The worse of two faults of values, or of two faults of significances: kNonFinite is the worst. A
// call looks at its significances only if its values are fine.
TKV_HD constexpr StatusCode worse_of(StatusCode a, StatusCode b) {
  return a == StatusCode::kOk || b == StatusCode::kNonFinite ? b : a;
}

// Host memory from here on. Both check what a sequence brings, whose first token gets position
// `first`, and return its worst fault (worse_of()). Values: kNonFinite, or kOutOfRange beyond fp16.
// Significances: kNonFinite, or kInvalidArgument where negative.
Status check_values(const Chunk& chunk, int32_t head_dim, RowOfCall rows, int32_t first);
Status check_significances(const Chunk& chunk, RowOfCall rows, int32_t first);

// Writes or reads one token of a raw row, [head_dim] fp16 at any address, whose position is a
// sink's or in the ring.
void write_raw(const RawRows& rows, uint8_t* row, Component c, int32_t position, const void* token);
void read_raw(const RawRows& rows, const uint8_t* row, Component c, int32_t position, void* token);
void write_score(const RawRows& rows, uint8_t* row, int32_t position, RawScore score);
RawScore read_score(const RawRows& rows, const uint8_t* row, int32_t position);

// Puts the chunk's tokens that `to` keeps raw into the row.
void write_chunk(const RawRows& rows, uint8_t* row, const RawTokens& tokens, LayerTokens to);

}  // namespace tierkv::store

// SPDX-License-Identifier: Apache-2.0
// Raw tokens in host memory: those that a (sequence, layer) holds and, behind them, those of the
// caller's chunk. Every token is fp16 first, wherever it comes from, so that chunks do not matter.
#pragma once

#include <cstdint>

#include "codec/format/quantize.h"
#include "store/engine/tokens.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv::store {

// The tokens of one sequence and layer that append() brings.
struct Chunk {
  const void* k = nullptr;  // dtype [tokens, num_kv_heads, head_dim]
  const void* v = nullptr;
  const float* significance = nullptr;  // [num_kv_heads, stride]; null: unknown
  int64_t stride = 0;
  DType dtype = DType::kFloat16;
  int32_t first = 0;  // position of its first token
  int32_t tokens = 0;
  int32_t num_kv_heads = 0;
};

// kNonFinite; kOutOfRange for values beyond fp16.
Status check_chunk(const Chunk& chunk, int32_t head_dim);

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
TKV_HD Importance chunk_importance(int32_t first, float significance) {
  return {first == 0 ? ImportanceKind::kPrompt : ImportanceKind::kSeen, significance, 0};
}

// What a chunk says of a token with `behind` tokens of it behind: their queries have seen it.
TKV_HD RawScore chunk_score(float significance, int32_t behind) {
  const float sum = significance * static_cast<float>(behind);
  return {sum < kMostSum ? sum : kMostSum, least(behind, kMostCounted)};
}

class RawTokens {
 public:
  // `raw` [num_kv_heads] raw rows that hold the tokens of `at`. With a chunk, it begins at
  // at.tokens. All must outlive the object.
  RawTokens(const RawRows& rows, uint8_t* raw, LayerTokens at, const Chunk* chunk)
      : rows_(&rows), raw_(raw), at_(at), chunk_(chunk) {}

  // Raw positions first .. first + count - 1: sinks, ring or chunk. out: [count, head_dim].
  void read(Component c, int32_t kv_head, int32_t first, int32_t count, float* out) const;
  Importance importance(int32_t kv_head, int32_t position) const;

 private:
  const RawRows* rows_;
  uint8_t* raw_;
  LayerTokens at_;
  const Chunk* chunk_;
};

// Writes or reads one token of a raw row, [head_dim] fp16 at any address, whose position is a
// sink's or in the ring.
void write_raw(const RawRows& rows, uint8_t* row, Component c, int32_t position, const void* token);
void read_raw(const RawRows& rows, const uint8_t* row, Component c, int32_t position, void* token);
void write_score(const RawRows& rows, uint8_t* row, int32_t position, RawScore score);
RawScore read_score(const RawRows& rows, const uint8_t* row, int32_t position);

// Puts the chunk's tokens that `to` keeps raw into the rows.
void write_chunk(const RawRows& rows, uint8_t* raw, const Chunk& chunk, LayerTokens to);

}  // namespace tierkv::store

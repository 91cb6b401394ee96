// SPDX-License-Identifier: Apache-2.0
// Tokens into unified pages and back, on the host: the reference of every kernel that writes or
// reads pages.
//
// A page in use holds `used` tokens in slots 0..used-1. Its defined bytes are the first (used + 15)
// / 16 tiles of each segment; unused slots of the last tile hold codes 0, metadata 0, score
// -infinity and position -1, so that the same tokens in the same slots are always the same bytes.
// Which token lies in which slot carries no meaning. Pages without records hold no scores and
// positions: those of a batch are not read, and those of a loaded token are -infinity and -1.
//
// A token is quantised alone (codec/format/quantize.h), then its codes are scattered by
// code_position(). Functions that fail leave the defined bytes of every page as they were.
#pragma once

#include <cstdint>

#include "codec/format/page_layout.h"
#include "codec/format/quantize.h"
#include "tierkv/codec.h"
#include "tierkv/layout.h"
#include "tierkv/page.h"
#include "tierkv/status.h"

namespace tierkv {

inline constexpr int32_t kMaxPageHeadDim = 256;
inline constexpr int32_t kMaxPageGroups = kMaxPageHeadDim / kDimBlock;

// A page in host memory and the format it is in.
struct HostPage {
  uint8_t* bytes = nullptr;  // layout.used_bytes
  PageLayout layout{};
  DType raw_dtype = DType::kFloat16;  // of raw components: kFloat16 or kBFloat16
  // How steps of keys and of values are found when tokens are written: kMinMax, or kNorm where
  // codes have 2 bits. Reading needs neither.
  StepRule rule[2] = {StepRule::kMinMax, StepRule::kMinMax};

  StepRule rule_of(Component c) const { return rule[static_cast<int>(c)]; }
};

// Appends the batch to a page of `used` tokens, opening tiles as they are reached. kNonFinite,
// kOutOfRange: a key or value that its format cannot hold (raw components refuse NaN and infinity
// too), or a score that is not finite. kInvalidArgument: slots outside the page, null arrays, a
// negative position.
Status append_tokens(const HostPage& page, int32_t used, const TokenBatch& batch);

// Reads slots first_slot, first_slot + 1, ... of a page. Any bytes can be read: hostile metadata
// gives NaN or infinity, never an error. kInvalidArgument: slots outside the page, a bad dtype,
// scores or positions of a page without records.
Status decode_tokens(const HostPage& page, int32_t first_slot, const TokenOutput& out);

// The plain implementations. The ones above use SIMD and write the same bytes; where a value read
// is NaN, its bits may differ.
namespace reference {
Status append_tokens(const HostPage& page, int32_t used, const TokenBatch& batch);
Status decode_tokens(const HostPage& page, int32_t first_slot, const TokenOutput& out);
}  // namespace reference

// Makes a slot unused: codes 0, metadata 0, score -infinity, position -1.
Status clear_token(const HostPage& page, int32_t slot);

inline float page_score(const HostPage& page, int32_t slot) {
  if (!page.layout.has_records()) return kNoScore;
  float score;
  memcpy(&score, page.bytes + page.layout.score_byte(slot), 4);
  return score;
}
inline int32_t page_position(const HostPage& page, int32_t slot) {
  if (!page.layout.has_records()) return kNoPosition;
  int32_t position;
  memcpy(&position, page.bytes + page.layout.position_byte(slot), 4);
  return position;
}
// Nothing where the page has no records.
inline void set_page_record(const HostPage& page, int32_t slot, float score, int32_t position) {
  if (!page.layout.has_records()) return;
  memcpy(page.bytes + page.layout.score_byte(slot), &score, 4);
  memcpy(page.bytes + page.layout.position_byte(slot), &position, 4);
}

// One token outside a page, codes in the order of the dims: what a page stores, before its bytes
// are shuffled.
struct TokenCodes {
  struct Side {
    uint16_t codes[kMaxPageHeadDim];     // bits wide; of raw elements their pattern
    QuantParams params[kMaxPageGroups];  // none of raw elements
  };
  Side k, v;
  float score;
  int32_t position;

  Side& of(Component c) { return c == Component::kKey ? k : v; }
  const Side& of(Component c) const { return c == Component::kKey ? k : v; }
};

// One component of a token in the page's format: head_dim values. kNonFinite, kOutOfRange.
StatusCode quantize_side(const HostPage& page, Component component, const float* x,
                         TokenCodes::Side* side);
void dequantize_side(const HostPage& page, Component component, const TokenCodes::Side& side,
                     float* x);
// The slot is trusted.
void store_token(const HostPage& page, int32_t slot, const TokenCodes& token);
void load_token(const HostPage& page, int32_t slot, TokenCodes* token);

// ---- what the plain and the fast codec share ----

// Page, slots and arguments.
Status check_batch(const HostPage& page, int32_t used, const TokenBatch& batch);
Status check_output(const HostPage& page, int32_t first_slot, const TokenOutput& out);

inline int64_t batch_row(const int32_t* rows, int32_t i) {
  return rows == nullptr ? i : rows[i];
}
inline int64_t row_stride_of(int64_t row_stride, int32_t head_dim) {
  return row_stride == 0 ? head_dim : row_stride;
}

// Trusted slots and tiles.
void clear_tile(const HostPage& page, int32_t tile_index);
void clear_slot(const HostPage& page, int32_t slot);

}  // namespace tierkv

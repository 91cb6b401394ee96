// SPDX-License-Identifier: Apache-2.0
// What the kernels of a place in device memory take; all pointers lead to device memory unless a
// comment says otherwise.
#pragma once

#include <cstdint>

#include "store/engine/tokens.h"
#include "store/rows/device_row_format.h"
#include "tierkv/allocator.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv::store {

// Ids of sequences travel by value, so that a captured call needs no host memory.
inline constexpr int32_t kIdChunk = 512;
struct IdChunk {
  int32_t slots[kIdChunk];
};

// The sequences of a call and the counts of their layers.
struct DeviceBatch {
  int32_t* slots = nullptr;     // [max_sequences]
  LayerTokens* from = nullptr;  // [max_sequences * num_layers], as DeviceWorks has them
  LayerTokens* to = nullptr;
  LayerTokens* at = nullptr;  // [num_layers][max_sequences], what attention finds
};

// From what a layer has to what it will have (store/engine/tokens.h).
enum class CountLaw : int32_t {
  kHeld,      // as it is
  kBegin,     // `tokens` more will come: their place is made
  kAppend,    // `tokens` more come
  kTruncate,  // cut to `tokens`
};
TKV_HD LayerTokens after(CountLaw law, const TokenLaws& laws, LayerTokens at, int32_t tokens) {
  switch (law) {
    case CountLaw::kBegin:
      return {at.tokens, body_end_at(laws, at.body_end, at.tokens + tokens)};
    case CountLaw::kAppend:
      return after_append(laws, at, tokens);
    case CountLaw::kTruncate:
      return after_truncate(laws, at, tokens);
    default:
      return at;
  }
}

struct CountCall {
  DeviceBatch batch;
  const LayerTokens* counts = nullptr;  // [max_sequences][num_layers]
  TokenLaws laws;
  CountLaw law = CountLaw::kHeld;
  int32_t tokens = 0;
  int32_t total = 0;             // sequences of the batch
  int32_t first = 0, count = 0;  // of them those in the chunk of ids
  // Null unless the step is captured. What note_replay() wrote last: how many captures came before
  // it, how many sequences it names, their slots. A launch uses this if its capture came before.
  // So the first launch of a graph runs for the captured sequences.
  const int32_t* replayed = nullptr;
  int32_t capture = 0;  // the number of this one, from 1
  DeviceFault* fault = nullptr;
  int32_t first_layer = 0, layers = 0;
  int32_t num_layers = 0, max_sequences = 0;
  // Where a plan follows, the kernel also copies what table rows hold. rows: of a sequence; 0: no
  // plan follows.
  int32_t rows = 0;
  const SideCounts* held = nullptr;  // [max_sequences, rows]
  DeviceRowCounts row_counts;

  TKV_HD int32_t threads_of_sequence() const { return most(layers, rows); }
};

// Pages that rows take which keep `kept` and then grow to `target`.
struct PageNeeds {
  unsigned long long fresh;      // taken less given back, of all rows together
  unsigned long long exchanged;  // taken before any is given back
  int32_t beyond;                // rows that would outgrow their table
};

struct RawCall : RawRows {
  DeviceSlots memory;
  int32_t layer = 0, num_kv_heads = 0;
  DeviceFault* fault = nullptr;
};

struct RawAppendCall : RawCall {
  const int32_t* slots = nullptr;   // [count]
  const LayerTokens* to = nullptr;  // sequence i's at i * stride
  int32_t stride = 1;
  int32_t added = 0;              // tokens that `to` does not count yet
  LayerTokens* counts = nullptr;  // [max_sequences][num_layers]
  int32_t num_layers = 0;
  Chunk chunk;
  bool is_checked = false;  // the row format has checked the tokens that go into the body
};

inline constexpr int32_t kRawColumns = 8;  // of a round of attention over raw tokens
inline constexpr int32_t kKeptTiles = 8;   // of a row, whose scores stay for the count
struct RawAttendCall : RawCall {
  const int32_t* slots = nullptr;   // [count]
  const LayerTokens* at = nullptr;  // [count]
  bool is_settled = false;          // both were complete before the last kernel on the stream began
  int32_t group = 0, q_len = 1;
  int32_t newer = 0;            // tokens behind that of the last query
  const uint16_t* q = nullptr;  // [count, q_len, num_kv_heads * group, head_dim] of dtype, aligned
                                // to 16 bytes
  uint16_t* out = nullptr;      // likewise; a count does not use it, nor sinks
  // Likewise without head_dim, natural. Attention writes that over raw tokens, unless it is null; a
  // count reads that over all tokens.
  float* lse = nullptr;
  const float* sinks = nullptr;  // learned, [num_kv_heads * group]; may be null
  // Scores of the ring's first tiles, from attention to the count, as lanes have them; null: the
  // count computes them again, as it must for more than kRawColumns columns. 16-byte aligned,
  // [count * num_kv_heads, kKeptTiles, 16 * kRawColumns].
  float* kept = nullptr;
  float sm_scale = 0;
  DType dtype = DType::kFloat16;
};

struct RawReadCall : RawCall {
  int32_t slot = 0;
  int32_t first = 0, end = 0;  // raw positions
  int32_t origin = 0;          // the position of the first token of k and v
  DType dtype = DType::kFloat16;
  uint16_t* k = nullptr;  // [.., num_kv_heads, head_dim]
  uint16_t* v = nullptr;
};

}  // namespace tierkv::store

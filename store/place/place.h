// SPDX-License-Identifier: Apache-2.0
// The contract of a place: where the bytes of a store are, and who moves them. A place trusts its
// arguments: the engine has admitted the call, and does the arithmetic of counts, so that a place
// that runs behind the host (a device) needs no answer to go on.
//
// Calls that fail have changed nothing. What a device finds out late take_status() tells.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "store/engine/tokens.h"
#include "store/place/raw_tokens.h"
#include "tierkv/kv_store.h"
#include "tierkv/sequence.h"
#include "tierkv/significance.h"
#include "tierkv/status.h"

namespace tierkv::store {

// How messages name a sequence: the number that C and Python know, then the fields that C++ knows.
inline std::string name_of(SequenceId id) {
  return "sequence " + std::to_string(number_of(id)) + " (slot " + std::to_string(id.slot) +
         ", generation " + std::to_string(id.generation) + ")";
}

// A (sequence, layer) in a call: its tokens before and after.
struct LayerMove {
  int32_t slot = 0, layer = 0;
  LayerTokens from, to;
  uint32_t generation = 0;  // of the slot, for messages

  SequenceId id() const { return {slot, generation}; }
  bool moves_body() const { return to.body_end != from.body_end; }
};
using LayerMoves = std::vector<LayerMove>;
inline bool any_moves_body(const LayerMoves& moves) {
  return std::any_of(moves.begin(), moves.end(), [](const LayerMove& m) { return m.moves_body(); });
}

// kOutOfPages, and what is missing.
Status out_of_pages(int64_t needed, int64_t free, int64_t page_bytes, Shortage* shortage);

inline Chunk chunk_of(const LayerAppend& call, DType dtype) {
  return {static_cast<const uint16_t*>(call.k),
          static_cast<const uint16_t*>(call.v),
          call.significance,
          call.stride,
          dtype,
          call.tokens};
}
// The queries and keys of sequence i of a chunk that came with queries.
inline SignificanceCall chunk_queries(const CacheLayout& layout, const LayerAppend& call,
                                      size_t i) {
  const int32_t heads[2] = {layout.num_q_heads, layout.num_kv_heads};
  const auto of_sequence = [&](const void* x, int32_t h) {
    return static_cast<const uint16_t*>(x) +
           static_cast<int64_t>(i) * call.tokens * heads[h] * layout.head_dim;
  };
  SignificanceCall p;
  p.q = of_sequence(call.q, 0), p.k = of_sequence(call.k, 1);
  p.q_head_stride = p.k_head_stride = layout.head_dim;
  p.q_token_stride = int64_t{heads[0]} * layout.head_dim;
  p.k_token_stride = int64_t{heads[1]} * layout.head_dim;
  p.num_sequences = 1;
  p.max_tokens = p.total_tokens = call.tokens;
  p.num_q_heads = heads[0], p.num_kv_heads = heads[1];
  p.head_dim = layout.head_dim;
  p.dtype = layout.dtype;
  p.sm_scale = layout.sm_scale;
  p.query_stride = call.query_stride;
  return p;
}

// What call() returns; kOutOfMemory where it throws std::bad_alloc, so that its caller can give
// back what it has taken.
template <class Call>
Status without_bad_alloc(const Call& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "no host memory");
  }
}

// What the chunks of a sequence hold that comes in (store/transfer/sequence_chunks.h); the bytes
// are the caller's.
struct SequenceParts {
  std::vector<LayerTokens> layers;               // [num_layers]
  std::vector<std::span<const uint8_t>> shared;  // [num_layers]
  std::vector<std::span<const uint8_t>> raw;     // [num_layers * num_kv_heads]
  std::vector<std::span<const uint8_t>> bodies;  // likewise
  // The checksums that SequenceSource::write() found. Empty: nobody compares them, and nothing lies
  // behind the parts.
  std::vector<uint64_t> checksums;
  // Whether the checksums of the parts of `count` rows match; null: they do. A place asks for all
  // rows, or compares them itself, before it says that an import has succeeded, or failed for
  // another reason. Any number of threads at once.
  std::function<Status(int64_t first, int64_t count)> verify;

  Status check(int64_t first, int64_t count) const {
    return verify ? verify(first, count) : Status::ok();
  }
  // Why an import failed: a wrong checksum, else what was found.
  Status why_failed(const Status& found) const {
    const Status sound =
        without_bad_alloc([&] { return check(0, static_cast<int64_t>(raw.size())); });
    return sound ? found : sound;
  }
};

// What is wrong with the numbers of a sequence that comes in. The least kind of the first layer
// that has any is reported, whichever heads have it.
enum class ImportFault : int32_t { kRawValue, kRawScore, kBody };
// Both as one number, the least of which counts.
inline constexpr int32_t kNoImportFault = 0x7f7f7f7f;
inline constexpr int32_t kImportFaults = 3;  // kinds
TKV_HD constexpr int32_t import_fault(int32_t layer, ImportFault fault) {
  return layer * kImportFaults + static_cast<int32_t>(fault);
}
Status import_status(int32_t fault);

// What a sequence that leaves has. Valid until the next call of the place.
struct SequenceSource {
  std::vector<LayerTokens> layers;
  std::vector<std::vector<uint8_t>> shared;
  // [2 * rows]: of the raw tokens of row layer * num_kv_heads + kv_head, then of its body.
  std::vector<int64_t> part_bytes;
  // Writes each part to its place [2 * rows] and zeros behind it up to a multiple of 16, and finds
  // the checksums of both together. Parts lie one behind the other.
  std::function<Status(const std::vector<uint8_t*>& parts, std::vector<uint64_t>* checksums)> write;
};

class Place {
 public:
  virtual ~Place() = default;

  virtual const TokenLaws& laws() const = 0;

  virtual Status open(int32_t slot) = 0;
  virtual Status release(int32_t slot) = 0;

  // Compresses what leaves, in every step of up to kMaxStepTokens `tokens` a sequence: moves change
  // body_end, or nothing. One decision for all rows. All layers of a sequence together.
  // kOutOfPages.
  virtual Status compress(const LayerMoves& moves, int32_t tokens) = 0;
  // One move per sequence of the call, in its order: what leaves the window is compressed, out of
  // the tokens held and those of the call; of these, sinks, window and open unit are kept raw.
  virtual Status append(const LayerAppend& call, const LayerMoves& moves) = 0;
  virtual Status attend(const LayerAttend& call, const LayerMoves& moves) = 0;
  virtual Status decode(const LayerRange& range, const LayerMove& move) = 0;

  // Slot `to` is free. [num_layers] moves of it, with the counts of `from`.
  virtual Status fork(int32_t from, int32_t to, const LayerMoves& layers) = 0;
  virtual Status truncate(const LayerMoves& layers) = 0;

  // A captured step is about to run once more; moves as compress() has them. kOutOfPages.
  virtual Status note_replay(const LayerMoves& moves, int32_t tokens) = 0;
  // Waits. The first failure since the last call, which is forgotten with it.
  virtual Status take_status() = 0;

  // What is in use by sequences; `layers` are those of all open ones.
  virtual Status add_usage(const LayerMoves& layers, StoreUsage* usage) const = 0;
  // Of a sequence: its pages and its slot.
  virtual Result<int64_t> bytes_held(int32_t slot) const = 0;
  virtual int64_t free_pages() = 0;
  virtual Shortage shortage() const = 0;

  virtual std::vector<uint8_t> identity() const = 0;
  virtual Result<SequenceSource> export_parts(const LayerMoves& layers) = 0;
  virtual Status import_parts(int32_t slot, const SequenceParts& parts) = 0;
};

}  // namespace tierkv::store

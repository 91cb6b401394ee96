// SPDX-License-Identifier: Apache-2.0
// Sizes and offsets of the coded format: what a (sequence, layer) keeps in its slot, and what lies
// on its pages. Host and device share it.
//
// store/ENGINE.md, "Coded rows", has where blocks lie. Offsets count units of 16 bytes. The blocks
// of a fixed layer are coded blocks (codec/format/coded_block_format.h), those of others raw
// blocks:
//
//   64 bytes                G of each token, i8; 0 behind the last one
//   1 to 4 raw tiles        fp16, keys or values, in the order of fragments; 0 behind the last one
#pragma once

#include <cstdint>
#include <span>

#include "attention/coded/coded_attention.h"
#include "codec/format/coded_block_format.h"
#include "codec/format/weighted_step.h"
#include "store/place/raw_tokens.h"
#include "store/rows/log_mean.h"
#include "tierkv/layout.h"

namespace tierkv::store {

inline constexpr int32_t kUnitBytes = 16;
// A layer is fixed at the latest when it has this many blocks, from whose tokens means, steps and
// codebooks are made.
inline constexpr int32_t kSampleBlocks = 4;

// What a row keeps beside its means, which follow: fp16 [head_dim].
struct alignas(16) CodedRowState {
  float key_step = 0, value_step = 0;
  LogMean mean;  // of significances seen in generation
  int64_t unused = 0;
};
static_assert(sizeof(CodedRowState) == 32);

struct CodedShape {
  int32_t head_dim = 0;
  int32_t num_kv_heads = 0;
  int32_t sink_tokens = 0;
  int32_t max_blocks = 0;  // of a row
  int32_t page_units = 0;

  // Positions of block b, of a row whose body ends at body_end, that are not sinks.
  TKV_HD constexpr int32_t first_of(int32_t b) const { return most(kBlockTokens * b, sink_tokens); }
  TKV_HD static constexpr int32_t end_of(int32_t b, int32_t body_end) {
    return least(kBlockTokens * (b + 1), body_end);
  }
  TKV_HD constexpr int32_t tokens_of(int32_t b, int32_t body_end) const {
    return end_of(b, body_end) - first_of(b);
  }

  TKV_HD constexpr int32_t raw_block_bytes(int32_t tokens) const {
    return kBlockTokens + tile_count(tokens) * TileLayout{kRawCodes, head_dim}.bytes();
  }
  // The largest size of a coded block with all its slices.
  TKV_HD constexpr int32_t most_block_bytes() const {
    const int32_t slices = (head_dim + kSliceDims - 1) / kSliceDims;
    return kBlockTokens + slices * kCodedBlockHeaderBytes + kBlockTokens * head_dim * 2;
  }

  TKV_HD constexpr int32_t largest_block_bytes() const {
    return most(most_block_bytes(), raw_block_bytes(kBlockTokens));
  }
  // Pages of so many blocks at most: no page but the last has room left for a largest block.
  constexpr int64_t most_pages(int64_t blocks) const {
    const int64_t bytes = largest_block_bytes();
    const int64_t pages = blocks * bytes / ((int64_t{page_units} + 1) * kUnitBytes - bytes) + 1;
    return pages < blocks ? pages : blocks;
  }

  // The state of a (sequence, layer). fixed: i32, 0 or 1.
  TKV_HD constexpr int64_t fixed_byte() const { return 0; }
  // u32 [max_blocks]: units of the layer behind each block.
  TKV_HD constexpr int64_t ends_byte() const { return 16; }
  TKV_HD constexpr int64_t row_byte(int32_t kv_head) const {
    return ends_byte() + round_up(int64_t{4} * max_blocks, 16) + kv_head * record_bytes();
  }
  // A CodedRowState and means.
  TKV_HD constexpr int64_t record_bytes() const {
    return static_cast<int64_t>(sizeof(CodedRowState)) + 2 * head_dim;
  }
  TKV_HD constexpr int64_t means_byte(int32_t kv_head) const {
    return row_byte(kv_head) + static_cast<int64_t>(sizeof(CodedRowState));
  }
  // CodedBlockRef [max_blocks], offsets from the pool's base.
  TKV_HD constexpr int64_t refs_byte(int32_t kv_head, Component c) const {
    return row_byte(num_kv_heads) +
           (2 * kv_head + static_cast<int32_t>(c)) * int64_t{max_blocks} * 8;
  }
  TKV_HD constexpr int64_t state_bytes() const {
    return round_up(refs_byte(num_kv_heads, Component::kKey), 16);
  }
};

TKV_HD constexpr int32_t block_count(int32_t body_end) {
  return (body_end + kBlockTokens - 1) / kBlockTokens;
}

// Where blocks go behind `used` units of a layer: calls each(i, page, unit in it) for blocks of
// these units, and returns what is used then.
template <class Each>
int32_t place_blocks(std::span<const uint32_t> units, int32_t used, int32_t page_units,
                     const Each& each) {
  int32_t page = used / page_units, unit = used % page_units;
  for (size_t i = 0; i < units.size(); ++i) {
    const auto count = static_cast<int32_t>(units[i]);
    if (unit + count > page_units) ++page, unit = 0;
    each(i, page, unit);
    unit += count;
  }
  return page * page_units + unit;
}

// What a truncated token keeps (RawScore::sum, as bits): G, and the exponent of its value once
// there is one.
struct DecidedExponents {
  int32_t importance = 0;
  int32_t value = 0;
  bool has_value = false;

  TKV_HD uint32_t bits() const {
    return (static_cast<uint32_t>(importance) & 255) | (static_cast<uint32_t>(value) & 255) << 8 |
           (has_value ? 65536u : 0u);
  }
  TKV_HD static DecidedExponents of(uint32_t bits) {
    DecidedExponents d;
    d.importance = static_cast<int8_t>(bits & 255);
    if (d.importance < kLeastImportanceExponent) d.importance = kLeastImportanceExponent;
    if (d.importance > kMostImportanceExponent) d.importance = kMostImportanceExponent;
    d.value = static_cast<int8_t>(bits >> 8 & 255);
    d.has_value = (bits >> 16 & 1) != 0;
    return d;
  }
};

// About the token at `position`, which leaves; the mean has its tile.
TKV_HD DecidedExponents decide_exponents(const Importance& known, int32_t position,
                                         const LogMean& mean) {
  if (known.kind == ImportanceKind::kDecided) return DecidedExponents::of(known.bits);
  DecidedExponents decided;
  if (known.kind != ImportanceKind::kUnknown) {
    decided.importance = importance_exponent(relative_importance(known, position, mean));
  }
  return decided;
}

}  // namespace tierkv::store

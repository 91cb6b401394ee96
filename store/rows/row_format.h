// SPDX-License-Identifier: Apache-2.0
// The contract of a row format in host memory. In which order a place calls it, and what may fail:
// store/ENGINE.md, "Calls".
//
// Memory of a format: pages, which the allocator deals to rows of its table (rows_per_layer for
// each (sequence, layer)), and state_bytes of each (sequence, layer) in the sequence's slot. The
// state must be plain bytes: fork() copies it. It begins with zeros. What serves all sequences
// (codebooks) is the format's own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/row_plan.h"
#include "store/engine/tokens.h"
#include "store/place/raw_tokens.h"
#include "tierkv/allocator.h"
#include "tierkv/kv_store.h"
#include "tierkv/status.h"

namespace tierkv::store {

// Pages and page tables of a store.
struct PagesView {
  PageAllocator allocator;
  uint8_t* base = nullptr;
  int64_t page_bytes = 0;
  int32_t rows_per_layer = 1;

  // Table row i of a (sequence, layer).
  TKV_HD int32_t row(int32_t slot, int32_t layer, int32_t i) const {
    return slot * allocator.shape.table.rows_per_sequence + layer * rows_per_layer + i;
  }
  const SideCounts& tokens(int32_t row) const { return allocator.tokens[row]; }
  // Id of page `index` of a side.
  TKV_HD int32_t page(int32_t row, int32_t side, int32_t index) const {
    return page_at(allocator, row, side, index);
  }
  uint8_t* bytes(int32_t page) const { return base + page * page_bytes; }
};

// What a table row costs that keeps `kept` of what it holds and then grows to `target`. A page that
// others share does not come back, and what is kept of it moves to a new one.
struct PageDemand {
  int64_t fresh = 0;       // pages taken less those given back
  int64_t exchanged = 0;   // pages taken before any is given back
  bool is_beyond = false;  // the row would outgrow its table
};
TKV_HD PageDemand page_demand(const PageAllocator& a, int32_t row, const SideCounts& kept,
                              const SideCounts& target) {
  const PageTableShape& table = a.shape.table;
  PageDemand demand;
  int32_t pages[kMaxTables] = {};
  for (int32_t side = 0; side < table.num_sides; ++side) {
    const int32_t per_page = table.tokens_per_page[side];
    const int32_t kept_pages = pages_for(kept.of[side], per_page);
    const int32_t target_pages = pages_for(target.of[side], per_page);
    pages[side / 2] += target_pages;
    demand.fresh += most(0, target_pages - kept_pages);
    for (int32_t p = kept.of[side] / per_page; p < a.pages[row].of[side]; ++p) {
      const bool shared = is_frozen(a, page_at(a, row, side, p));
      demand.fresh -= p >= kept_pages && !shared ? 1 : 0;
      demand.exchanged += p < kept_pages && shared ? 1 : 0;
    }
  }
  demand.fresh += demand.exchanged;
  demand.is_beyond = pages[0] > table.table_slots[0] || pages[1] > table.table_slots[1];
  return demand;
}

struct FormatSizes {
  int32_t unit_tokens = 64;  // the body grows by units that begin at multiples of it
  // A truncation inside the body cuts it at a multiple of cut_tokens, itself a multiple of
  // unit_tokens; 0: unit_tokens.
  int32_t cut_tokens = 0;
  // Tokens that the ring takes; at least window_tokens + unit_tokens - 1 and cut_tokens - 1, a
  // multiple of 16.
  int32_t ring_tokens = 0;
  int64_t page_bytes = 0;              // a multiple of kPageAlignment
  int64_t most_pages = INT32_MAX / 2;  // that the format can address
  int64_t state_bytes = 0;             // of a (sequence, layer), a multiple of 16
  int32_t rows_per_layer = 1;
  // num_sides, table_slots and tokens_per_page count; what a "token" of the table is, the format
  // decides (the coded format counts units of 16 bytes).
  PageTableShape table;
};

// Slots of a table for a layer whose tokens take pages() pages at most, by page_bytes as they are.
// Where they are too many, pages become larger if they may.
template <class Pages>
Result<int32_t> fit_table(bool may_grow, int64_t* page_bytes, const Pages& pages) {
  int64_t slots = pages();
  while (may_grow && slots > kMaxTableSlots) *page_bytes *= 2, slots = pages();
  if (slots <= kMaxTableSlots) return static_cast<int32_t>(std::max<int64_t>(slots, 1));
  return Status(StatusCode::kInvalidArgument,
                "page_bytes: max_tokens may take " + std::to_string(slots) +
                    " pages of a layer, a table has " + std::to_string(kMaxTableSlots));
}

// One (sequence, layer).
struct HostLayer {
  int32_t slot = 0, layer = 0;
  LayerTokens at;
  uint8_t* raw = nullptr;    // [num_kv_heads] raw rows of RawLayout::row_bytes
  uint8_t* state = nullptr;  // [state_bytes]
  uint32_t generation = 0;   // of the slot, for messages

  SequenceId id() const { return {slot, generation}; }
};

// Tokens that leave: the body positions [layer.at.body_end, body_end), which `tokens` have.
struct BodyWork {
  HostLayer layer;
  int32_t body_end = 0;           // afterwards
  std::vector<RawTokens> tokens;  // [num_kv_heads]
};

// What an import must find in bytes of fp16, or refuse the sequence.
enum class RangeCheck : int32_t {
  kNone,
  kFinite,
  kParams,  // pairs of scale and zero point (codec/format/sound_halves.h)
};
struct CheckedBytes {
  int32_t first = 0, end = 0;  // from the range's first byte on
  RangeCheck check = RangeCheck::kNone;
};
// Bytes that are the same on a page and in a sequence: from the page to where the place writes, or
// from the sequence to the page. All numbers and addresses are multiples of 16, those in a sequence
// from the body's first byte on.
struct PageRange {
  const uint8_t* from = nullptr;  // null: zeros
  uint8_t* to = nullptr;
  int64_t bytes = 0;
  CheckedBytes keys = {}, values = {};  // what of them is to be checked
};
using PageRanges = std::vector<PageRange>;
// What place() needs of one work. `tokens` [rows_per_layer]: what the layer's table rows hold
// afterwards. `kept` [rows_per_layer], empty where it is all: what they hold now and place() leaves
// as it is; what is behind it is given back before pages are taken. A shared page that is left
// partly filled is exchanged for a copy, of which relocate() tells before place().
struct LayerPlan {
  std::vector<SideCounts> tokens;
  std::vector<SideCounts> kept = {};
  PageRanges ranges = {};  // empty, with room for those that place() returns
};
struct BodyPlan {
  virtual ~BodyPlan() = default;
  std::vector<LayerPlan> layers;  // [works]
};

// A body as it leaves: `head` [a multiple of 16], then the ranges one behind the other.
struct ExportedBody {
  std::vector<uint8_t> head;
  PageRanges pages;

  // Joins what lies together.
  void add(const uint8_t* page, int64_t bytes) {
    if (!pages.empty() && pages.back().from + pages.back().bytes == page) {
      pages.back().bytes += bytes;
    } else {
      pages.push_back({page, nullptr, bytes});
    }
  }
};

// A (sequence, layer) that comes in from bytes: `layer` is empty, with a table row that holds
// nothing, and gets the body [0, body_end).
struct ImportWork {
  HostLayer layer;
  int32_t body_end = 0;
  std::span<const uint8_t> shared;                   // as export_shared() wrote it
  std::span<const std::span<const uint8_t>> bodies;  // [num_kv_heads], of export_body()
  // The caller decodes the blocks that stay as they are, before anybody reads them. So the format
  // need not decode them to find hostile ones. The plan is null where it must nevertheless.
  bool decodes_later = false;
};

class RowFormat {
 public:
  virtual ~RowFormat() = default;

  virtual const FormatSizes& sizes() const = 0;
  // Before all other calls. The view stays valid.
  virtual void bind(const PagesView& pages) = 0;
  // Pages that a layer takes for the body of a sequence of `tokens` tokens: the most, or typically.
  virtual int64_t layer_pages(int32_t layer, int32_t tokens, bool at_most) const = 0;

  // Several sequences, or several layers, but none twice. kOutOfRange, kNonFinite. Nothing changes.
  virtual Result<std::unique_ptr<BodyPlan>> plan(const std::vector<BodyWork>& works) = 0;
  // The table holds what the plan asked for: makes the state of the layer of work `work` and tells
  // where bytes go. It takes what it needs out of the plan, and allocates nothing where the plan is
  // plan()'s: earlier works have changed already. Of an import it touches no page; other pages it
  // may write itself. For different layers of imports, any number of threads at once.
  virtual PageRanges place(const HostLayer& layer, BodyPlan& plan, size_t work) = 0;
  // The bytes of all works are there, and sound: what serves all sequences follows, out of the
  // plan. Allocates nothing.
  virtual void finish(BodyPlan& /*plan*/) {}

  // Body positions [first, end) of a row: finished keys (after RoPE) and values, each
  // [end - first, head_dim]. `pruned` [end - first], zeros, null where nobody asks: 1 for a token
  // that is no longer there, whose values are then 0.
  virtual void read(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end, float* k,
                    float* v, uint8_t* pruned) const = 0;
  // The RawScores with which body positions [first, end), less than cut_tokens, go back to the ring
  // when a truncation cuts there. [end - first]; count = kDecided, 0 where nothing was decided.
  virtual void read_decided(const HostLayer& /*layer*/, int32_t /*kv_head*/, int32_t first,
                            int32_t end, RawScore* scores) const {
    std::fill(scores, scores + (end - first), RawScore{});
  }

  // What the table rows hold once the body ends at body_end, a multiple of cut_tokens: [rows_per_
  // layer], none more than now on any side.
  virtual std::vector<SideCounts> cut_counts(const HostLayer& layer, int32_t body_end) const = 0;
  // The table was cut to these counts.
  virtual void cut(const HostLayer& /*layer*/, int32_t /*body_end*/) {}
  // Pages of this layer were replaced by copies, which are made: [rows_per_layer * kMaxSides],
  // source kNoPage where there is none.
  virtual void relocate(const HostLayer& /*layer*/, const PageCopy* /*copies*/) {}

  // Bytes of the body: codes, exponents, directories, means; without what pages waste.
  virtual int64_t nominal_bytes(const HostLayer& layer) const = 0;

  // What names the format in an exported sequence: everything of the config and the profile that
  // the bytes of a body depend on.
  virtual std::vector<uint8_t> identity() const = 0;
  // What the bodies of this layer need beside themselves (codebooks); may be empty.
  virtual std::vector<uint8_t> export_shared(const HostLayer& /*layer*/) const { return {}; }
  // These two read the state, but no pages. Any number of threads at once.
  virtual int64_t body_bytes(const HostLayer& layer, int32_t kv_head) const = 0;
  virtual ExportedBody export_body(const HostLayer& layer, int32_t kv_head) const = 0;
  // The inverse, in parts. kCorrupt: the bytes are hostile; everything that read() relies on is
  // checked, but for what ranges are to be checked for. The bytes, and work.bodies itself, stay
  // where they are until the ranges are copied. Any number of threads at once.
  virtual Result<std::unique_ptr<BodyPlan>> plan_import(const ImportWork& work) = 0;
  // The bytes of the layer are there: what lies behind its tokens is cleared.
  virtual void clear_behind(const HostLayer& /*layer*/) {}
};

// What plan_import() says of a hostile body.
inline Status corrupt_body(const std::string& why) {
  return Status(StatusCode::kCorrupt, "body: " + why);
}

// The config is valid but for what the format itself finds: kInvalidArgument, kUnsupported with the
// field.
Result<std::unique_ptr<RowFormat>> make_row_format(const StoreConfig& config);

}  // namespace tierkv::store

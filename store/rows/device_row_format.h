// SPDX-License-Identifier: Apache-2.0
// The contract of a row format in device memory, as kernels on the store's stream. Nothing here
// waits for the device or allocates, unless a declaration says so, so that steps can be captured. A
// replayed step finds other counts on the device, so host arguments are bounds for every replay.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "attention/core/prior_attention.h"
#include "codec/format/head_dim.h"
#include "store/engine/tokens.h"
#include "store/place/place.h"
#include "store/rows/row_format.h"
#include "tierkv/allocator.h"
#include "tierkv/kv_store.h"
#include "tierkv/status.h"

namespace tierkv::store {

// A sequence's slot: [num_layers] of raw rows [num_kv_heads], then the format's state.
struct DeviceSlots {
  uint8_t* base = nullptr;
  int64_t slot_bytes = 0, layer_bytes = 0, raw_bytes = 0;

  TKV_HD uint8_t* raw(int32_t slot, int32_t layer) const {
    return base + slot * slot_bytes + layer * layer_bytes;
  }
  TKV_HD uint8_t* state(int32_t slot, int32_t layer) const { return raw(slot, layer) + raw_bytes; }
};
// A (sequence, layer) of a call; sequence: its place in the call.
struct DeviceEntry {
  int32_t sequence, slot, layer;
};
struct DeviceStoreView : RawRows {
  PagesView pages;  // device memory
  DeviceSlots slots;
  int32_t num_layers = 0, num_kv_heads = 0, head_dim = 0;

  TKV_HD uint8_t* raw_row(int32_t slot, int32_t layer, int32_t kv_head) const {
    return slots.raw(slot, layer) + int64_t{kv_head} * raw.row_bytes;
  }
  // Where the counts of the entry's first table row lie in DeviceRowCounts.
  TKV_HD int64_t counts_row(const DeviceEntry& e) const {
    return int64_t{e.sequence} * pages.allocator.shape.table.rows_per_sequence +
           e.layer * pages.rows_per_layer;
  }
};

// The first failure that kernels find, device memory; later ones are dropped (report_fault() of
// store/place/device/device_reports.cuh). It stays until the caller takes it, and nothing else
// takes notice: counts move on, so kernels must go on whatever it says, with values that they can
// hold. A format reads values of a chunk that are not finite as 0. The place reports such values,
// unless the format does (checks_chunks()).
struct DeviceFault {
  StatusCode status = StatusCode::kOk;
  int32_t slot = -1, layer = -1, kv_head = -1;  // -1: unknown, as where a kernel tells status alone
};

// What becomes valid with a call once its pages are dealt: commit() of
// store/place/device/device_reports.cuh.
struct DeviceCommit {
  LayerTokens* counts = nullptr;  // device [max_sequences][num_layers] that become `to`; or null
  int32_t num_layers = 0;
  const RingCursors* cursors = nullptr;
  const OpState* state = nullptr;
  DeviceFault* fault = nullptr;   // of a refused operation
  int64_t* least_free = nullptr;  // that was ever free
  // Mapped host memory: the free pages, in the low 32 bits the number of the next page operation.
  // Null: none of this.
  uint64_t* published = nullptr;
};

// The (sequence, layer) pairs of a call: entry i * num_layers + l is sequence i, layer first_layer
// + l.
struct DeviceWorks {
  const int32_t* slots = nullptr;  // device [count]
  // Device [count * num_layers]: what each entry holds before and after; body positions
  // [max(from.body_end, sinks), to.body_end) leave, none where the ends are equal. Their values and
  // scores are in the ring and, from position from.tokens on, in the chunk.
  const LayerTokens* from = nullptr;
  const LayerTokens* to = nullptr;
  int32_t count = 0, first_layer = 0, num_layers = 0;
  int32_t most_leaving = 0;  // a bound for how many leave of an entry
  Chunk chunk;               // aligned to 16 bytes
  // The same on the host where the call is not captured; else null, but for may_rewrite(),
  // require_capturable() and most_pages(), which always have them. [count * num_layers]
  const LayerMove* moves = nullptr;
  // Device, for write() and cut(): of the page operation before them. They do nothing unless it
  // says kOk.
  const OpReport* report = nullptr;
  DeviceCommit commit;

  TKV_HD int32_t entries() const { return count * num_layers; }
  TKV_HD DeviceEntry entry(int32_t e) const {
    const int32_t sequence = e / num_layers;
    return {sequence, slots[sequence], first_layer + e - sequence * num_layers};
  }
  // Whether the page operation succeeded.
  TKV_HD bool has_pages() const { return report == nullptr || report->status == StatusCode::kOk; }
};

// What plan() says, device memory. By table row of the sequences: [count * rows_per_sequence], row
// (i, layer, r) at i * rows_per_sequence + layer * rows_per_layer + r. The place has filled both
// with what the rows hold now; a format changes the rows of its entries. A target that is less than
// what is kept takes units from the end, whose pages stay; they must not be shared.
struct DeviceRowCounts {
  SideCounts* kept = nullptr;    // as LayerPlan::kept
  SideCounts* target = nullptr;  // as LayerPlan::tokens
};

struct DeviceAttendBody {
  const int32_t* slots = nullptr;   // device [count]
  const LayerTokens* at = nullptr;  // device [count], of this layer
  int32_t count = 0, layer = 0, q_len = 1;
  int32_t most_tokens = 0;  // a bound for at.tokens
  const void* q = nullptr;  // [count, q_len, num_q_heads, head_dim] of dtype
  void* out = nullptr;      // like q
  float* lse = nullptr;     // [count, q_len, num_q_heads]; may be null
  PriorAttention prior;     // over raw tokens
  DType dtype = DType::kFloat16;
  bool is_captured = false;  // its memory is written anew in every replay
  bool new_plan = false;     // the first layer since a step began: works are to be cut anew
};

// Body positions of one (sequence, layer) as finished keys and values.
struct DeviceRead {
  int32_t slot = 0, layer = 0;
  int32_t body_end = 0;
  Positions range;
  DType dtype = DType::kFloat16;  // or kBFloat16
  uint16_t* k = nullptr;          // device [range, num_kv_heads, head_dim]
  uint16_t* v = nullptr;
  // Device, [num_kv_heads, pruned_stride], by place in the range. A pruned token has zeros for its
  // key and value; the format writes a 1 for it here, and nothing for others. Null: nobody asks.
  uint8_t* pruned = nullptr;
  int64_t pruned_stride = 0;

  TKV_HD uint16_t* of(Component c) const { return c == Component::kKey ? k : v; }
};

class DeviceRowFormat {
 public:
  virtual ~DeviceRowFormat() = default;

  // Allocates. The view stays valid.
  virtual Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) = 0;
  // Device memory beside pages and slots that bind() took: workspaces, codebooks. The place binds a
  // format to a view without memory first, to learn this.
  virtual int64_t workspace_bytes() const = 0;
  // The slot is free; it will be zeros when it is taken again.
  virtual void released(int32_t /*slot*/) {}

  // Whether plan() reports values that fp16 does not hold in the chunk's tokens that go into the
  // body.
  virtual bool checks_chunks() const { return false; }
  // Whether plan() may ask for less than all to be kept, by the host's knowledge: then, and only
  // then, the place runs a truncation first. A captured step must not.
  virtual bool may_rewrite(const DeviceWorks& /*works*/) const { return false; }
  // kInvalidArgument, naming the sequence, where a step of these cannot be captured yet.
  virtual Status require_capturable(const DeviceWorks& /*works*/) const { return Status::ok(); }
  // Pages that go from `kept` to `target` of plan() at most, all entries together.
  virtual int64_t most_pages(const DeviceWorks& works) const = 0;
  // Changes `counts` and scratch of the format alone. A value that the format cannot hold is a
  // fault; it is written as one that the format can hold.
  virtual Status plan(const DeviceWorks& works, const DeviceRowCounts& counts) = 0;
  // The tables hold what the plan asked for; works as plan() got them, nothing in between. `copies`
  // [count * rows_per_sequence * kMaxSides], null where nothing was truncated. One kernel commits
  // the works. A format may launch none where nothing can leave (most_leaving is 0); the place does
  // not call it then. The first kernel may start while pages are still dealt. Then plan() and all
  // work before it have ended, and the kernel must wait before it reads tables or writes anything.
  virtual Status write(const DeviceWorks& works, const PageCopy* copies) = 0;

  // Attention over the bodies of a layer, joined with what `out` holds (PriorAttention): out and
  // lse of every row, also of one without a body. Bodies lie before the window, so every query sees
  // all of them. The kernel in front of the call waits, in all its CTAs, for all work before it and
  // only then lets the next one start; it writes nothing but out and prior.lse. So kernels that
  // touch neither may begin before it has ended, if they wait for its end before their own.
  virtual Status attend(const DeviceAttendBody& call) = 0;
  // The range is not empty; nor is that of restore().
  virtual Status read(const DeviceRead& call) = 0;

  // Positions [first, end), end the body's after a truncation to less than it was, go back to the
  // ring: fp16 values and RawScores, for all kv_heads, as truncate() of the host place does. A
  // format that is cut at every token is not asked.
  virtual Status restore(const LayerMove& /*move*/, Positions /*range*/) {
    return Status(StatusCode::kUnsupported, "restore");
  }
  // Counts of the table rows once the bodies end at to.body_end, into `target` as plan() has them.
  virtual Status cut_counts(const DeviceWorks& works, const DeviceRowCounts& counts) {
    return plan(works, counts);
  }
  // The tables were cut, or forked: the states (copied already) follow. copies as in write().
  virtual Status cut(const DeviceWorks& /*works*/, const PageCopy* /*copies*/) {
    return Status::ok();
  }
  // Before the cut() of a fork, after the slot's bytes.
  virtual Status forked(int32_t /*from*/, int32_t /*to*/) { return Status::ok(); }

  // Exports and imports ask the format in host memory where bytes are, by tables and states that
  // the place brings there (transfer has one owner). What serves all sequences (codebooks) is made
  // equal here: from the device to the host format and back.
  // `layers`: layers of an imported slot one behind the other, with their states in host memory.
  virtual Status download_shared(RowFormat* /*host*/) { return Status::ok(); }
  // Bytes and states of these layers are there: what lies behind their tokens is cleared. Kernels
  // tell *fault, the least import_fault(), where a block that plan_import() did not decode is
  // hostile (ImportWork::decodes_later). Device memory: counts [num_layers], fault.
  virtual Status check_imported(std::span<const HostLayer> /*layers*/,
                                const LayerTokens* /*counts*/, int32_t* /*fault*/) {
    return Status::ok();
  }
  // After all layers of a slot, `layers`, which are sound.
  virtual Status upload_shared(const RowFormat& /*host*/, std::span<const HostLayer> /*layers*/) {
    return Status::ok();
  }
};

// `host` is the same format in host memory, bound to no pages; it outlives the result.
// kUnsupported: key_books beyond 1; means or weights that attention has no numbers for.
Result<std::unique_ptr<DeviceRowFormat>> make_device_coded_rows(const StoreConfig& config,
                                                                RowFormat* host);
// kUnsupported: what attention over pages does not take.
Result<std::unique_ptr<DeviceRowFormat>> make_device_tiers_rows(const StoreConfig& config,
                                                                RowFormat* host);
Result<std::unique_ptr<DeviceRowFormat>> make_device_channel_rows(const StoreConfig& config,
                                                                  RowFormat* host);

}  // namespace tierkv::store

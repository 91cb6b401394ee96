// SPDX-License-Identifier: Apache-2.0
// A store in device memory: the layouts of the host place, its calls as kernels on one stream.
// store/ENGINE.md, "The device place", has how counts, pages and captures work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "store/engine/engine.h"
#include "store/place/device/batch_book.h"
#include "store/place/device/device_kernels.h"
#include "store/place/device/sequence_link.h"
#include "store/place/host_place.h"
#include "store/place/place.h"
#include "store/rows/device_memory.cuh"
#include "store/rows/device_row_format.h"

namespace tierkv::store {

struct DecodedAttendCall;  // decoded_attend_kernel.cuh

inline bool is_aligned(const void* p, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}
// The slots of moves, `step` moves a sequence.
inline std::vector<int32_t> slots_of(const LayerMoves& moves, int32_t step) {
  std::vector<int32_t> slots;
  for (size_t i = 0; i < moves.size(); i += step) slots.push_back(moves[i].slot);
  return slots;
}

class DevicePlace final : public Place {
 public:
  // kOutOfMemory, kCuda, kUnsupported for what the format lacks on a device. Waits.
  static Result<std::unique_ptr<DevicePlace>> make(const StoreConfig& config, GpuStream stream);
  ~DevicePlace() override;

  const TokenLaws& laws() const override { return layout_.laws; }
  Status open(int32_t slot) override;
  Status release(int32_t slot) override;
  Status compress(const LayerMoves& moves, int32_t tokens) override;
  Status append(const LayerAppend& call, const LayerMoves& moves) override;
  Status attend(const LayerAttend& call, const LayerMoves& moves) override;
  Status decode(const LayerRange& range, const LayerMove& move) override;
  Status fork(int32_t from, int32_t to, const LayerMoves& layers) override;
  Status truncate(const LayerMoves& layers) override;
  Status note_replay(const LayerMoves& moves, int32_t tokens) override;
  Status take_status() override;
  Status add_usage(const LayerMoves& layers, StoreUsage* usage) const override;
  Result<int64_t> bytes_held(int32_t slot) const override;
  int64_t free_pages() override { return std::max<int64_t>(free_.at_least(), 0); }
  Shortage shortage() const override { return shortage_; }
  std::vector<uint8_t> identity() const override { return host_format_->identity(); }
  Result<SequenceSource> export_parts(const LayerMoves& layers) override;
  Status import_parts(int32_t slot, const SequenceParts& parts) override;

 private:
  using Slots = std::vector<int32_t>;
  DevicePlace(const StoreConfig& config, GpuStream stream)
      : config_(config), stream_(stream), book_(config.layout.num_layers) {}
  Status allocate();
  Status take_word();
  DeviceStoreView view_of(const StoreLayout& layout, const PageAllocator& allocator, uint8_t* pages,
                          uint8_t* slots) const;
  Result<int64_t> measure_format(const StoreLayout& layout) const;
  Status wait() const;
  Status copy(void* to, const void* from, int64_t bytes) const;
  Status zero(void* at, int64_t bytes) const;
  Status clear_fault() const;

  // Before every call: which memory of batches it uses.
  Status enter(const char* call, bool can_be_captured);
  // The id of the capture under way, 0 where there is none. Refuses calls that cannot be captured
  // and those of a thread whose device is another one.
  Result<uint64_t> capture_of(const char* call, bool can_be_captured) const;
  DeviceBatch& batch() { return batches_[book_.index()]; }
  // Writes slots and counts of the batch and, where a plan follows, what its table rows hold.
  Status write_counts(CountLaw law, int32_t tokens, const Slots& slots, Positions layers,
                      bool plans);
  // values to device memory, by value.
  Status put_ids(const Slots& values, int32_t* to) const;
  Status commit(const DeviceWorks& works);
  // After an operation on pages alone, which may have been refused where it is reported.
  Status commit_op(bool is_reported);
  DeviceCommit commit_of(LayerTokens* counts) const {
    const PageAllocator& a = view_.pages.allocator;
    return {counts,    config_.layout.num_layers, a.ring.cursors, a.state, fault_, least_free_,
            published_};
  }

  template <class Call>
  Call raw_call(int32_t layer) const {
    Call raw;
    static_cast<RawRows&>(raw) = view_;
    raw.memory = view_.slots;
    raw.layer = layer;
    raw.num_kv_heads = config_.layout.num_kv_heads;
    raw.fault = fault_;
    return raw;
  }
  // Significances of a chunk that came with queries, [count, num_kv_heads, tokens].
  Status find_significance(const LayerAppend& call, size_t count, const float** significance);
  Status append_raw(const RawAppendCall& call, int32_t count);
  // What no begin() has compressed for.
  Status append_chunk(const LayerAppend& call, const LayerMoves& moves, RawAppendCall raw);

  // The slots of the batch, and what the layers of an attend hold.
  Status find_held(const LayerAttend& call, const LayerMoves& moves);
  RawAttendCall raw_attend_call(const LayerAttend& call) const;
  DeviceAttendBody bodies_of(const LayerAttend& call, const LayerMoves& moves);
  Status attend_step(const LayerAttend& call, const LayerMoves& moves);
  Status attend_decoded(const LayerAttend& call, const LayerMoves& moves);
  Status take_piece(const LayerAttend& call, int32_t tokens, DecodedAttendCall* taken);
  template <class Launch>
  Status each_piece(DecodedAttendCall call, const LayerMove& move, const Launch& launch);
  Status attend_sequence(const DecodedAttendCall& call, const LayerMove& move);
  Status count_sequence(const RawAttendCall& call);
  // pruned: zeros, as DeviceRead has them; or null.
  Status decode_tokens(const LayerRange& range, const LayerMove& move, uint8_t* pruned);

  DeviceWorks works_of(const LayerMoves& moves, Positions layers, int32_t tokens);
  Status compress_works(const DeviceWorks& works, const LayerMoves& moves);
  int64_t most_pages(const DeviceWorks& works, bool rewrites) const;
  Status require_alike(const LayerMoves& moves) const;

  // Whether `at_most` pages are free for sure; waits where the bound does not say so, and once
  // after a capture, which the caller may have given up.
  Result<bool> has_pages(int64_t at_most);
  Status refuse_pages(int64_t needed) {
    return out_of_pages(needed, free_pages(), layout_.page_bytes, &shortage_);
  }
  DeviceRowCounts row_counts() const { return {kept_, target_}; }
  // Waits for what the row counts ask for: kOutOfPages, kOutOfRange.
  Status require_needs(const DeviceWorks& works);
  Status run(const PageOp& op, int64_t at_most);
  Status run_and_wait(const PageOp& op, int64_t at_most);
  int32_t rows_per_sequence() const { return layout_.allocator.table.rows_per_sequence; }
  int64_t state_bytes() const { return layout_.layer_bytes - layout_.raw_bytes; }
  Status copy_pages(int32_t count);
  Status open_mirror();
  Status copy_tables(int32_t slot) const;
  // The states of all layers of a slot, one behind the other.
  Status copy_states(int32_t slot, uint8_t* to) const;
  Status take_pages(int32_t slot, const std::vector<LayerPlan>& plans,
                    const std::vector<LayerTokens>& layers);
  Status send_layers(int32_t slot, const LayerMoves& layers, const std::vector<int64_t>& sizes,
                     const std::vector<uint8_t*>& parts);
  uint64_t checksum_of(int64_t part, int64_t bytes, const uint8_t* at) const;
  // *is_open: whether it took the slot, also where it fails.
  Status bring_or_name(int32_t slot, const SequenceParts& parts, bool* is_open);
  // A sequence that comes in. pinned: its bytes from the first part on; is_direct: they are the
  // caller's.
  struct Incoming {
    std::vector<int64_t> sizes;  // of the parts
    uint8_t* pinned = nullptr;
    bool is_direct = false;
    std::vector<HostPlace::LayerImport> imports;
    std::vector<HostLayer> layers;  // afterwards, in their slot here; the states are the mirror's
  };
  // Whether parts are of sizes that a sequence of this store can have.
  bool may_fit(const SequenceParts& parts) const;
  Status bring(int32_t slot, const SequenceParts& parts, bool* is_open);
  Status receive_layers(int32_t slot, const SequenceParts& parts, const Incoming& from);
  Status cut_bodies(const DeviceWorks& works, const LayerMoves& layers);

  StoreConfig config_;
  GpuStream stream_;
  int device_ = 0;
  StoreLayout layout_;
  std::unique_ptr<RowFormat> host_format_;
  DeviceMemory memory_{"memory_bytes"};
  PinnedMemory word_;                        // what free_ reads
  std::unique_ptr<DeviceRowFormat> format_;  // goes before the memory
  DeviceStoreView view_;
  LayerTokens* counts_ = nullptr;  // [max_sequences][num_layers]
  DeviceBatch batches_[kBatchMemories];
  SideCounts *kept_ = nullptr, *target_ = nullptr;  // [max_sequences * rows_per_sequence]
  PageCopy* copies_ = nullptr;                      // [.. * kMaxSides]
  DeviceWorkspace op_workspace_;
  OpReport* report_ = nullptr;
  PageNeeds* needs_ = nullptr;
  int64_t* least_free_ = nullptr;
  int32_t* op_slots_ = nullptr;  // [2]: of an operation on one sequence, and its source
  int32_t* replayed_ = nullptr;  // [2 + max_sequences], CountCall::replayed
  DeviceFault* fault_ = nullptr;
  // Of attention over raw tokens, and over all where the caller wants none: [max_sequences,
  // kMaxStepTokens, num_q_heads].
  float *raw_lse_ = nullptr, *whole_lse_ = nullptr;
  float* kept_scores_ = nullptr;  // RawAttendCall::kept
  uint64_t* published_ = nullptr;
  FreePages free_;
  bool was_captured_ = false;  // a page operation, since has_pages() waited last
  BatchBook book_;
  Shortage shortage_;
  PoolMemory scores_;   // significances, and log-sum-exps behind them, of prompts with queries
  PoolMemory decoded_;  // a piece of a sequence, and sums over it
  // Null until a sequence is exported or imported.
  std::unique_ptr<HostPlace> mirror_;
  std::unique_ptr<SequenceLink> link_;
};

}  // namespace tierkv::store

// The device back end: host bookkeeping, and the order in which kernels and page operations are
// enqueued. Rare calls (truncate, export, import) are carried out by a host store that holds
// the tables and the pages of the sequences concerned for the time of the call.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "store/call_memory.h"
#include "store/device_state.h"
#include "store/host_store.h"
#include "tierkv/store.h"

namespace tierkv {

class DeviceStore final : public DeviceKvStore {
 public:
  static Result<std::unique_ptr<DeviceStore>> make(const KvStoreConfig& config, GpuStream stream);
  ~DeviceStore() override;

  const KvStoreConfig& config() const override { return mirror_->config(); }
  int64_t page_bytes() const override { return mirror_->page_bytes(); }
  Result<SequenceId> add_sequence() override;
  Status begin_prompt(SequenceList sequences, int32_t tokens) override;
  Status append(const AppendCall& call) override;
  Status score_prompt(const PromptScores& scores) override;
  Status end_prompt(SequenceList sequences) override;
  Status begin_step(SequenceList sequences, int32_t tokens) override;
  Status update_scores(const ScoreUpdate& update) override;
  Status attend(const AttendRequest& request) override;
  Result<SequenceId> fork(SequenceId source) override;
  Status truncate(SequenceId sequence, int32_t tokens) override;
  Status release(SequenceId sequence) override;
  Result<int32_t> num_tokens(SequenceId sequence) override;
  Result<StoreStats> stats() override;
  Result<std::vector<uint8_t>> export_sequence(SequenceId sequence) override;
  Result<SequenceId> import_sequence(const uint8_t* bytes, size_t size) override;
  Status take_status() override;
  Status note_replay(SequenceList sequences, int32_t tokens) override;
  const SequenceTable& sequences() const { return mirror_->sequences(); }

  // Everything in host memory, for tests. Valid until the next call.
  Result<StoreView> download();

 private:
  DeviceStore(std::unique_ptr<HostStore> mirror, GpuStream stream)
      : mirror_(std::move(mirror)), stream_(stream) {}
  Status allocate();
  Status allocate_attention();
  // Device memory that lives as long as the store.
  Status take_bytes(size_t bytes, void** memory);
  template <class T>
  Status take(size_t count, T** memory) {
    void* p = nullptr;
    if (Status s = take_bytes(std::max<size_t>(count, 1) * sizeof(T), &p); !s) return s;
    *memory = static_cast<T*>(p);
    return Status::ok();
  }
  Status clear(void* memory, size_t bytes);
  Status grow_jobs(size_t jobs);

  SequenceTable& table() { return mirror_->table_; }
  int32_t rows_per_sequence() const { return state_.s.rows_per_sequence(); }
  SequenceBatch batch(const Slots& slots) const {
    return {state_.batch, static_cast<int32_t>(slots.size())};
  }
  // What the call uses of the memories: before its first kernel.
  Status enter_call();
  // Writes the batch; after a failure as padding.
  Status set_batch(DeviceCall call, const Slots& slots, int32_t tokens);
  // Unless it is what the device has already, and never as padding, of which a plan that is in use
  // knows nothing: the kernels of these calls look for failures themselves.
  Status use_batch(const Slots& slots);
  Status run(const PageOp& op);
  const Result<AttentionGrid>& grid(int32_t q_len) const { return grids_[q_len - 1]; }
  Status plan_attention_of(const AttentionConfig& attention, const Slots& slots);
  bool is_any_counted(const Slots& slots, int32_t q_len) const;
  Status validate_scratch(const AttendRequest& request, const AttentionConfig& attention,
                          const Slots& slots) const;
  Status count_queries(const AttendRequest& request, const AttentionConfig& attention,
                       const AttendCall& call);
  Status find_probabilities_of(const AttendRequest& request, const AttendCall& call);
  // Waits. Whether there are pages for a copy; the counts of its shared tokens lie in row_counts.
  Status count_fork(int32_t source);

  // Waits; refused while a failure waits to be taken.
  Status settle();
  Status copy(void* to, const void* from, size_t bytes);
  // The tables, and the pages of `slots`, to the mirror; and back, but for pages that are shared.
  Status to_mirror(const Slots& slots);
  Status from_mirror(const Slots& slots);
  // Calls copy(device page, mirror page) for the pages of a sequence.
  template <class Copy>
  Status for_each_page(int32_t slot, Copy copy_page);
  Status read_bookkeeping();

  std::unique_ptr<HostStore> mirror_;
  GpuStream stream_;
  DeviceState state_;
  DeviceWorkspace op_workspace_;
  std::vector<void*> memory_;
  void* allocator_memory_ = nullptr;
  ChunkScratch chunk_;
  size_t num_jobs_ = 0;
  CallMemory calls_;
  int32_t* batches_ = nullptr;  // [kCallMemories * max_sequences]

  AttentionConfig attention_;                 // of one query
  std::vector<Result<AttentionGrid>> grids_;  // by q_len - 1; or why attend() is refused
  AttentionWorkspace attention_workspaces_[kCallMemories];
  float* lse_ = nullptr;  // [max_sequences * kMaxQueryTokens * num_q_heads]
  // [max_sequences] of the plan, where it has several queries
  int32_t* newest_[kCallMemories] = {};
};

}  // namespace tierkv

// The device back end of a coded store: host bookkeeping, and the order in which kernels and page
// operations are enqueued. Rare calls are carried out by a host store that holds the tables and the
// pages of the sequences concerned for the time of the call.
#pragma once

#include <memory>
#include <vector>

#include "store/call_memory.h"
#include "store/coded_device_state.h"
#include "store/coded_host.h"
#include "tierkv/store.h"

namespace tierkv {

class CodedDeviceStore final : public DeviceKvStore {
 public:
  static Result<std::unique_ptr<CodedDeviceStore>> make(const KvStoreConfig& config,
                                                        GpuStream stream);
  ~CodedDeviceStore() override;

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

  // Everything in host memory, for tests. Valid until the next call.
  Result<const CodedHostStore*> download();

 private:
  CodedDeviceStore(std::unique_ptr<CodedHostStore> mirror, GpuStream stream)
      : mirror_(std::move(mirror)), stream_(stream) {}
  Status allocate();
  Status allocate_attention();
  // Device memory that lives as long as the store.
  Status take_bytes(size_t bytes, void** memory);
  template <class T>
  Status take(size_t count, T** memory) {
    void* p = nullptr;
    const Status s = take_bytes(count * sizeof(T), &p);
    *memory = static_cast<T*>(p);
    return s;
  }
  template <class T>
  Status upload(const std::vector<T>& from, const T** to);
  Status upload_books();

  SequenceTable& table() { return mirror_->table_; }
  int32_t rows_per_sequence() const { return state_.s.rows_per_sequence(); }
  SequenceBatch batch(const Slots& slots) const {
    return {state_.common.batch, static_cast<int32_t>(slots.size())};
  }
  // What the call uses of the memories: before its first kernel.
  Status enter_call();
  // Writes the batch, unless it is what the device has already.
  Status set_batch(DeviceCall call, const Slots& slots, int32_t tokens);
  Status use_batch(DeviceCall call, const Slots& slots);
  Status run(const PageOp& op);
  // From the codes of the prompts that end; waits.
  Status make_books(const PromptEnd& prompt);
  Status build_books_on_host(const uint32_t* pairs, const uint32_t* wide);
  Status build_books_here(const uint32_t* pairs, const uint32_t* wide);
  Status forget_unused_books();
  Status begin_step_on_device(const Slots& slots, int32_t tokens);
  // What attention at a layer is of, but for its arrays; whether a device can run it.
  CodedAttention layer_attention(int32_t layer) const;
  Status check_attention() const;
  Status attend_coded_rows(const AttendRequest& request, const Slots& slots);

  // Waits; refused while a failure waits to be taken.
  Status settle();
  Status copy(void* to, const void* from, size_t bytes);
  Status wait();
  enum class Content { kBlocks, kPages };
  // The tables, and of `slots` the directories and the pages, to the mirror; and back.
  Status to_mirror(const Slots& slots, Content content);
  Status from_mirror(const Slots& slots);
  Status copy_directory(int32_t slot, const CodedView& from, const CodedView& to);
  template <class Copy>
  Status for_each_page(int32_t slot, Copy copy_page);
  Status read_bookkeeping();

  std::unique_ptr<CodedHostStore> mirror_;
  GpuStream stream_;
  CodedDeviceState state_;
  DeviceWorkspace op_workspace_;
  std::vector<void*> memory_;
  void* allocator_memory_ = nullptr;
  std::vector<DeviceCodebook> books_;  // as state_.books, arrays in device memory
  CallMemory calls_;
  int32_t* batches_ = nullptr;  // [kCallMemories * max_sequences]

  unsigned long long* fixed_count_ = nullptr;
  // A plan of attention.
  struct Plan {
    CodedRow* rows = nullptr;  // [max_sequences * num_kv_heads]
    int32_t* item_count = nullptr;
  };
  Plan plans_[kCallMemories];
  StatusCode* row_status_ = nullptr;  // [max_sequences * num_kv_heads]
  float* lse_ = nullptr;              // of calls that want probabilities without it
  void* coded_workspace_ = nullptr;
  const uint32_t* empty_table_ = nullptr;  // of what stands for a codebook where there is none yet
};

}  // namespace tierkv

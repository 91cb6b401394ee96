// The host back end of a coded store: plain, and the reference of the device's. store/CODED.md
// holds the states and laws.
//
// As in store/tiers/host_store.h a call checks everything that it can be refused for, then runs
// page operations that can only fail for want of pages, then writes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "store/coded/coded_books.h"
#include "store/coded/coded_row.h"
#include "store/coded/coded_shape.h"
#include "store/shared/host_pages.h"
#include "store/shared/sequence_table.h"
#include "tierkv/store.h"

namespace tierkv {

class CodedHostStore final : public KvStore {
 public:
  static Result<std::unique_ptr<CodedHostStore>> make(const KvStoreConfig& config);

  const KvStoreConfig& config() const override { return config_; }
  int64_t page_bytes() const override { return view_.pages.page_bytes; }
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
  Status take_status() override { return Status::ok(); }

  // For tests and for the comparison of back ends.
  const CodedView& view() const { return view_; }
  const CodedBooks& books() const { return books_; }

 private:
  friend class CodedDeviceStore;  // whose rare calls are carried out here
  struct FreeMemory {
    void operator()(void* p) const { std::free(p); }
  };
  // Blocks that a call is about to code: `count` ones from first_block on in every row of `slot`.
  struct BlockRange {
    int32_t slot;
    int32_t first_block;
    int32_t count;
  };
  // What end_prompt() and begin_step() will write, by slot and row.
  struct CodingPlan {
    std::vector<BlockRange> ranges;
    std::vector<std::vector<float>> means[2];  // [entries * rows] of prompts; else empty
    std::vector<float> steps[2];               // likewise
    CodedBooks books;                          // as they are after the call
    std::vector<PendingBlocks> rows;           // [entries * rows]
  };

  explicit CodedHostStore(const KvStoreConfig& config) : config_(config), table_(config_) {}
  Status allocate(const CodedShape& shape);

  int32_t rows() const { return view_.rows_per_sequence(); }
  int32_t row(int32_t slot, int32_t within) const { return slot * rows() + within; }
  static SequenceBatch batch(const Slots& slots) {
    return {slots.data(), static_cast<int32_t>(slots.size())};
  }

  // Of which so many blocks are at a fixed rate.
  StoreStats count_stats(int64_t fixed) const;
  Status check_append(const AppendCall& call, const Slots& slots) const;
  void append_row(int32_t row, const SequenceInfo& info, Component c, const CodedTokens& tokens);

  // Basis of row `within` of entry `entry` of a plan.
  RowBasis plan_basis(const CodingPlan& plan, size_t entry, int32_t within, Component c) const;
  std::vector<float> new_means(int32_t row, Component c) const;
  float new_step(int32_t row, Component c, const float* mean) const;
  Status check_raw_rest(const CodingPlan& plan) const;
  Status plan_codebooks(CodingPlan* plan) const;
  Status plan_blocks(CodingPlan* plan) const;
  void finish_prompt_row(int32_t row, const SequenceInfo& before, const SequenceInfo& after);

  KvStoreConfig config_;
  CodedView view_;
  SequenceTable table_;
  CodedBooks books_;
  std::unique_ptr<void, FreeMemory> pool_, allocator_memory_;
  std::vector<CodedBlockRef> key_blocks_, value_blocks_;
  std::vector<float> key_means_, value_means_, key_steps_, value_steps_;
};

}  // namespace tierkv

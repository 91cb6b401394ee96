// The host back end: the plain form of every operation, and the reference of the device's.
// It stores what it is given: a basis of the config is only named in what it exports
// (store/tiers/basis_store.h changes it).
//
// Each call checks everything that it can be refused for, then runs page operations that can only
// fail for want of pages, then writes tokens, which cannot fail: values were checked when they came
// in.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "store/shared/host_pages.h"
#include "store/shared/sequence_table.h"
#include "store/tiers/row_pages.h"
#include "store/tiers/store_shape.h"
#include "tierkv/store.h"

namespace tierkv {

class HostStore final : public KvStore {
 public:
  static Result<std::unique_ptr<HostStore>> make(const KvStoreConfig& config);

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

  const SequenceTable& sequences() const { return table_; }
  // For tests and for the comparison of back ends.
  const StoreView& view() const { return view_; }

 private:
  friend class DeviceStore;  // whose rare calls are carried out here
  struct FreeMemory {
    void operator()(void* p) const { std::free(p); }
  };

  explicit HostStore(const KvStoreConfig& config) : config_(config), table_(config_) {}
  Status allocate(const StoreShape& shape);

  int32_t row(int32_t slot, int32_t within) const {
    return slot * view_.rows_per_sequence() + within;
  }

  Status run(const PageOp& op) const { return run_page_op(view_.allocator, op); }
  static SequenceBatch batch(const std::vector<int32_t>& slots) {
    return {slots.data(), static_cast<int32_t>(slots.size())};
  }
  Status require_pages(int64_t needed) const {
    return tierkv::require_pages(view_.allocator, needed);
  }
  void grow_to(int32_t slot, const std::vector<SideCounts>& target) const {
    grow_sides(view_.allocator, slot, target);
  }
  // No shared page may be left partly filled.
  void shrink_to(int32_t slot, const std::vector<SideCounts>& target) const {
    (void)shrink_sides(view_.allocator, slot, target);
  }

  Status truncate_prompt(int32_t slot, int32_t tokens);
  void use_probabilities(const AttendRequest& request, const Slots& slots, int32_t query,
                         const double* lse);

  KvStoreConfig config_;
  StoreView view_;
  SequenceTable table_;
  std::unique_ptr<void, FreeMemory> pool_, allocator_memory_;
};

// kNonFinite; kOutOfRange beyond +-65504, which no tier could hold.
Status check_values(const void* x, DType dtype, int64_t count);
// kNonFinite; kInvalidArgument for a negative one.
Status check_scores(const float* x, int64_t count);
// kNonFinite but for -infinity; null is none.
Status check_sinks(const float* sinks, int32_t count);

// What the calls do to one row of a sequence; host memory throughout.

// The tokens of an append, of one kv_head. Keys and values are `stride` elements apart.
struct AppendedTokens {
  const void* k;
  const void* v;
  int64_t stride;
  DType dtype;
  int32_t first_position;
  int32_t count;
};
// Behind the prompt's tokens so far.
void append_prompt_row(const StoreView& s, int32_t row, const AppendedTokens& tokens);
// To the window's indices that begin_step() freed.
void append_step_row(const StoreView& s, int32_t row, const SequenceInfo& info,
                     const AppendedTokens& tokens);

// Moves a prompt's tokens to their tiers and returns what each side then holds. The worst case is
// reserved; low tokens go to the pages that keep() will turn into low ones.
SideCounts place_prompt_row(const StoreView& s, int32_t row, const SequenceInfo& after);

// Carries out the actions of plan_row_step(); the sides have grown already, `before` has not.
void apply_step_row(const StoreView& s, int32_t row, const SequenceInfo& before,
                    const std::vector<StepAction>& actions);

// One query at position `query`; probabilities by position.
void score_row(const StoreView& s, int32_t row, const SequenceInfo& info, int32_t query,
               const float* probabilities);

}  // namespace tierkv

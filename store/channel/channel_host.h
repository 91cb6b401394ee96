// The host back end of a store of channel blocks: plain, and the reference of the device's.
// store/CHANNEL.md holds the states and laws.
//
// As in store/tiers/host_store.h a call checks everything that it can be refused for, then runs
// page operations that can only fail for want of pages, then writes.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "store/channel/channel_row.h"
#include "store/channel/channel_shape.h"
#include "store/shared/host_pool.h"
#include "store/shared/sequence_table.h"
#include "tierkv/store.h"

namespace tierkv {

class ChannelHostStore final : public KvStore {
 public:
  static Result<std::unique_ptr<ChannelHostStore>> make(const KvStoreConfig& config);

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
  const ChannelView& view() const { return view_; }

 private:
  friend class ChannelDeviceStore;  // whose rare calls are carried out here

  ChannelHostStore(const KvStoreConfig& config, HostPool pool)
      : config_(config), table_(config_), pool_(std::move(pool)) {}

  int32_t rows() const { return view_.rows_per_sequence(); }
  int32_t row(int32_t slot, int32_t within) const { return slot * rows() + within; }
  static SequenceBatch batch(const Slots& slots) {
    return {slots.data(), static_cast<int32_t>(slots.size())};
  }
  SequenceInfo after_begin(int32_t slot, int32_t tokens) const {
    return channel_info_after_begin(table_.info(slot), tokens, view_.window_tokens,
                                    view_.layout.tokens);
  }
  void append_row(int32_t row, const SequenceInfo& info, const ChannelTokens& keys,
                  const ChannelTokens& values);
  // The copies that a fork or a truncation asks for, [rows][kMaxSides].
  void copy_open_pages(const std::vector<PageCopy>& copies);

  KvStoreConfig config_;
  ChannelView view_;
  SequenceTable table_;
  HostPool pool_;
};

}  // namespace tierkv

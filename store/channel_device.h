// The device back end of a store of channel blocks: host bookkeeping, and the order in which
// kernels and page operations are enqueued. Rare calls are carried out by a host store that holds
// the tables and the pages of the sequences concerned for the time of the call.
#pragma once

#include <memory>
#include <vector>

#include "store/channel_device_state.h"
#include "store/channel_host.h"
#include "store/device_sequences.h"
#include "tierkv/store.h"

namespace tierkv {

class ChannelDeviceStore final : public DeviceKvStore {
 public:
  static Result<std::unique_ptr<ChannelDeviceStore>> make(const KvStoreConfig& config,
                                                          GpuStream stream);

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
  Result<const ChannelHostStore*> download();

 private:
  ChannelDeviceStore(std::unique_ptr<ChannelHostStore> mirror, GpuStream stream)
      : mirror_(std::move(mirror)), sequences_(mirror_->config_, &mirror_->table_, stream) {}
  Status allocate();

  SequenceTable& table() { return mirror_->table_; }
  GpuStream stream() const { return sequences_.stream(); }
  // As DeviceSequences', for the store's kernels too.
  Status set_batch(DeviceCall call, const Slots& slots, int32_t tokens);
  Status use_batch(DeviceCall call, const Slots& slots);
  void begin_in_table(const Slots& slots, int32_t tokens);
  ChannelCtas ctas_of(int32_t q_len) const;
  ChannelLengths lengths_of(const Slots& slots);
  // How sequences are attended to, planned unless it is already.
  Result<const ChannelPlan*> plan(const Slots& slots, int32_t q_len);

  // The tables, and the pages of `slots`, to the mirror; and back.
  Status to_mirror(const Slots& slots);
  Status from_mirror(int32_t slot);
  Slots open_slots();
  template <class Copy>
  Status for_each_page(int32_t slot, Copy copy_page);

  std::unique_ptr<ChannelHostStore> mirror_;
  DeviceSequences sequences_;
  ChannelDeviceState state_;
  // A plan of attention.
  struct Planned {
    ChannelSequence* sequences = nullptr;  // [max_sequences]
    ChannelPlan plan;
  };
  void forget_plans() { sequences_.calls().forget_plans(); }

  int32_t sms_ = 0;
  Planned planned_[kCallMemories];
  void* workspace_ = nullptr;
};

}  // namespace tierkv

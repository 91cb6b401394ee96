// What device back ends without tiers have in common: device memory, the batch of a call, the
// allocator's operations on it, what the device found and the host's bookkeeping after it.
#pragma once

#include <cstddef>
#include <vector>

#include "store/call_memory.h"
#include "store/device_state.h"
#include "store/sequence_table.h"
#include "tierkv/allocator.h"
#include "tierkv/store.h"

namespace tierkv {

class DeviceSequences {
 public:
  // The table must outlive this.
  DeviceSequences(const KvStoreConfig& config, SequenceTable* table, GpuStream stream)
      : config_(config), table_(*table), stream_(stream) {}
  ~DeviceSequences();
  DeviceSequences(const DeviceSequences&) = delete;
  DeviceSequences& operator=(const DeviceSequences&) = delete;

  // An empty pool and the state of all sequences. Waits.
  Status allocate(const AllocatorShape& shape, int64_t page_bytes);
  // Device memory that lives as long as this.
  Status take_bytes(size_t bytes, void** memory);
  template <class T>
  Status take(size_t count, T** memory) {
    void* p = nullptr;
    const Status s = take_bytes(count * sizeof(T), &p);
    *memory = static_cast<T*>(p);
    return s;
  }

  const DeviceState& state() const { return state_; }
  GpuStream stream() const { return stream_; }
  void* allocator_memory() const { return allocator_memory_; }
  SequenceBatch batch(const Slots& slots) const {
    return {state_.batch, static_cast<int32_t>(slots.size())};
  }

  // What the batch and the plan are; of the memories that the last call here has entered.
  CallMemory& calls() { return calls_; }
  // Writes the batch; use_batch(): unless it is what the device has already.
  Status set_batch(DeviceCall call, const Slots& slots, int32_t tokens);
  Status use_batch(DeviceCall call, const Slots& slots);
  Status run(const PageOp& op) const;

  Result<SequenceId> add_sequence();
  Status release(SequenceId sequence);

  Status copy(void* to, const void* from, size_t bytes) const;
  Status wait() const;
  // Waits; refused while a failure waits to be taken.
  Status settle() const;
  // Waits, tells the first failure, and makes the table what the device has.
  Status take_status();
  // What the table has of a slot, to the device.
  Status send_info(int32_t slot);

 private:
  int32_t rows_per_sequence() const { return state_.s.rows_per_sequence(); }
  Status enter_call();
  Status read_bookkeeping();

  const KvStoreConfig& config_;
  SequenceTable& table_;
  GpuStream stream_;
  DeviceState state_;
  DeviceWorkspace op_workspace_;
  std::vector<void*> memory_;
  void* allocator_memory_ = nullptr;
  CallMemory calls_;
  int32_t* batches_ = nullptr;  // [kCallMemories * max_sequences]
};

}  // namespace tierkv

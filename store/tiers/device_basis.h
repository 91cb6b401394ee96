// The device back end in a basis: kernels of codec/gpu/basis_batch.h before and behind it.
#pragma once

#include <memory>
#include <vector>

#include "codec/gpu/basis_batch.h"
#include "store/tiers/basis_store.h"
#include "store/tiers/device_store.h"

namespace tierkv {

class DeviceBasisStore final : public BasisStore<DeviceKvStore, DeviceStore> {
 public:
  // The config has a basis.
  static Result<std::unique_ptr<DeviceBasisStore>> make(const KvStoreConfig& config,
                                                        GpuStream stream);
  ~DeviceBasisStore() override;

  Status append(const AppendCall& call) override;
  Status attend(const AttendRequest& request) override;
  Status note_replay(SequenceList sequences, int32_t tokens) override {
    return inner_->note_replay(sequences, tokens);
  }

 private:
  DeviceBasisStore(const KvStoreConfig& config, std::unique_ptr<DeviceStore> inner,
                   GpuStream stream)
      : BasisStore(config, std::move(inner)), stream_(stream) {}
  Status allocate();
  Status upload(Component c, BasisUse use, DType dtype, BasisOperand* operand);
  template <class T>
  Status take(size_t count, T** memory);
  template <class T>
  Status put(const std::vector<T>& from, const T** to);
  // Coordinates of both components, [2][values]. A step's are where captured graphs know them.
  Status coordinates_for(bool is_prompt, int64_t values, float** memory);
  BasisVectors vectors(const BasisOperand& operand, int32_t heads, int64_t tokens,
                       int32_t layer) const;

  GpuStream stream_;
  std::vector<void*> memory_;
  BasisOperand apply_[2], undo_;
  BasisOperand query_[2];    // of fp16, of bfloat16
  float* step_ = nullptr;    // [2][max_sequences * kMaxStepTokens * num_kv_heads * head_dim]
  float* prompt_ = nullptr;  // of the longest prompt's call so far
  int64_t prompt_values_ = 0;
  // Of the queries of a call: [max_sequences * kMaxQueryTokens * num_q_heads], times head_dim for
  // q_ and out_.
  uint16_t *q_ = nullptr, *out_ = nullptr;
  float *lse_ = nullptr, *shift_ = nullptr;
};

}  // namespace tierkv

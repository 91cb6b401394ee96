// A store whose keys and values lie in another basis: a store of coordinates behind it, which is
// given single precision and asked in fp16.
//
//   append()  maps keys and values, then appends the coordinates
//   attend()  maps q, attends to the coordinates, maps the outputs back and adds q . mean to the
//             LSE, so that it can be merged with attention to anything outside
//
// All else is the same in every basis: significance is made of probabilities, and q . k is kept.
// What attend() is of: the softmax over T^-1 of what the pages decode to, plus the mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tierkv/store.h"

namespace tierkv {

// Of the store of coordinates. The basis stays, because exports name it.
inline KvStoreConfig coordinates_config(const KvStoreConfig& config) {
  KvStoreConfig inner = config;
  inner.layout.dtype = DType::kFloat32;
  return inner;
}

// kUnsupported for types of q and out that a store in a basis does not take.
inline Status check_query_dtype(const KvStoreConfig& config, DType dtype) {
  const bool is_layouts = dtype == DType::kBFloat16 && config.layout.dtype == dtype;
  if (dtype == DType::kFloat16 || is_layouts) return Status::ok();
  return Status(StatusCode::kUnsupported,
                "dtype of q and out: with a basis float16, or bfloat16 where layout.dtype is");
}

// kUnsupported for learned sinks where logits or values lack their means: what a sink takes of a
// softmax it takes of these, too.
inline Status check_sinks_in(const CacheBasis& basis, const float* sinks) {
  for (const Component c : {Component::kKey, Component::kValue}) {
    const std::vector<Basis>& rows = basis.of(c);
    if (sinks == nullptr || rows.empty() || rows[0].mean.empty()) continue;
    return Status(StatusCode::kUnsupported, "sinks with a basis that has means");
  }
  return Status::ok();
}

// Everything but append() and attend(). Base is KvStore or DeviceKvStore.
template <class Base, class Inner>
class BasisStore : public Base {
 public:
  const KvStoreConfig& config() const override { return config_; }
  int64_t page_bytes() const override { return inner_->page_bytes(); }
  Result<SequenceId> add_sequence() override { return inner_->add_sequence(); }
  Status begin_prompt(SequenceList sequences, int32_t tokens) override {
    return inner_->begin_prompt(sequences, tokens);
  }
  Status score_prompt(const PromptScores& scores) override { return inner_->score_prompt(scores); }
  Status end_prompt(SequenceList sequences) override { return inner_->end_prompt(sequences); }
  Status begin_step(SequenceList sequences, int32_t tokens) override {
    return inner_->begin_step(sequences, tokens);
  }
  Status update_scores(const ScoreUpdate& update) override { return inner_->update_scores(update); }
  Result<SequenceId> fork(SequenceId source) override { return inner_->fork(source); }
  Status truncate(SequenceId sequence, int32_t tokens) override {
    return inner_->truncate(sequence, tokens);
  }
  Status release(SequenceId sequence) override { return inner_->release(sequence); }
  Result<int32_t> num_tokens(SequenceId sequence) override { return inner_->num_tokens(sequence); }
  Result<StoreStats> stats() override { return inner_->stats(); }
  Result<std::vector<uint8_t>> export_sequence(SequenceId sequence) override {
    return inner_->export_sequence(sequence);
  }
  Result<SequenceId> import_sequence(const uint8_t* bytes, size_t size) override {
    return inner_->import_sequence(bytes, size);
  }
  Status take_status() override { return inner_->take_status(); }

  // The store of coordinates, for tests.
  Inner& inner() { return *inner_; }

 protected:
  BasisStore(const KvStoreConfig& config, std::unique_ptr<Inner> inner)
      : config_(config), inner_(std::move(inner)) {}

  const CacheBasis& basis() const { return *config_.basis; }

  KvStoreConfig config_;
  std::unique_ptr<Inner> inner_;
};

}  // namespace tierkv

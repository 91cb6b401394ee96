// A store with a model of every row beside it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "allocator/invariants.h"
#include "tests/store/support/store_model.h"
#include "tests/support/small_store.h"

namespace tierkv::testing {

// One sequence of a store, with its model.
struct ModelSequence {
  SequenceId id;
  bool live = false;
  std::vector<RowModel> rows;
};

// Calls on a store that are mirrored by models; every status is returned, and a call that fails
// leaves the models alone.
class ModelledStore {
 public:
  ModelledStore(const KvStoreConfig& config, RandomInput* input)
      : config_(config), store_(make_store(config)), input_(input) {}

  HostStore& store() { return *store_; }
  const StoreView& view() const { return store_->view(); }
  const KvStoreConfig& config() const { return config_; }

  Status add(ModelSequence* s) {
    const Result<SequenceId> id = store_->add_sequence();
    if (!id) return id.status();
    *s = {*id, false, std::vector<RowModel>(rows(), RowModel(config_))};
    return Status::ok();
  }
  // A chunk of a prompt for all of `list`, every layer; then scores for what is there.
  Status prompt(const std::vector<ModelSequence*>& list, int32_t tokens, bool scored);
  Status end_prompt(const std::vector<ModelSequence*>& list);
  // A step, and its queries, newest last, if they are `observed`.
  Status step(const std::vector<ModelSequence*>& list, int32_t tokens, bool observed);
  Status fork(const ModelSequence& source, ModelSequence* copy);
  Status truncate(ModelSequence* s, int32_t tokens);
  // Exports and imports, and exports again: the same bytes.
  Status transfer(const ModelSequence& source, ModelSequence* copy);

  // "" or what differs from the models.
  std::string difference(const ModelSequence& s, bool values) const;
  int32_t rows() const { return config_.layout.num_layers * config_.layout.num_kv_heads; }

 private:
  static std::vector<SequenceId> ids(const std::vector<ModelSequence*>& list) {
    std::vector<SequenceId> out;
    for (const ModelSequence* s : list) out.push_back(s->id);
    return out;
  }
  int32_t row(const ModelSequence& s, int32_t within) const { return s.id.slot * rows() + within; }
  Status append_layers(const std::vector<ModelSequence*>& list, int32_t tokens);
  Status observe(const std::vector<ModelSequence*>& list, int32_t back, bool called);

  KvStoreConfig config_;
  std::unique_ptr<HostStore> store_;
  RandomInput* input_;
};

}  // namespace tierkv::testing

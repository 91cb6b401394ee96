// A coded store with a model of every row beside it: which values a token should read as, from the
// values that came in, by plain arithmetic.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "store/coded/coded_host.h"
#include "tests/store/support/coded_laws.h"
#include "tests/support/random_input.h"

namespace tierkv::testing {

// Two layers of two kv heads, a window of 16.
KvStoreConfig small_coded_config(RandomInput* input);

// Steps relative to prompts instead of given ones.
void use_prompt_steps(KvStoreConfig* config, RandomInput* input);

// One component of one row.
struct CodedRowModel {
  std::vector<uint16_t> values;  // [tokens, head_dim]: in the prompt as they came in, then centred
  std::vector<float> means;
  float step = 0;
};
struct CodedModel {
  SequenceId id;
  bool live = false;
  int32_t tokens = 0;
  int32_t coded = 0;
  std::vector<CodedRowModel> rows[2];      // keys, values
  std::vector<std::vector<float>> scores;  // [rows][tokens], of the prompt
  std::vector<std::vector<bool>> fixed;    // [rows][coded / 64]: the block is at a fixed rate
};

class CodedWorld {
 public:
  CodedWorld(const KvStoreConfig& config, RandomInput* input);

  CodedHostStore& store() { return *store_; }
  const CodedView& view() const { return store_->view(); }
  const KvStoreConfig& config() const { return config_; }
  // How far values lie from 0: a step of 1 codes them well where this is 1.
  void set_spread(float spread) { spread_ = spread; }

  Status add(CodedModel* m);
  // With fixed-rate blocks scores some layers, so that now and then a token is significant.
  Status prompt(const std::vector<CodedModel*>& list, int32_t tokens);
  Status end_prompt(const std::vector<CodedModel*>& list);
  Status step(const std::vector<CodedModel*>& list, int32_t tokens);
  Status fork(const CodedModel& source, CodedModel* copy);
  Status truncate(CodedModel* m, int32_t tokens);
  // Exports and imports, and exports again: the same bytes.
  Status transfer(const CodedModel& source, CodedModel* copy);

  // "" or what differs from the model.
  std::string difference(const CodedModel& m) const;
  // The same of the output and the lse of a random query at `layer`.
  std::string attention_difference(const CodedModel& m, int32_t layer);

 private:
  int32_t rows() const { return config_.layout.num_layers * config_.layout.num_kv_heads; }
  int32_t row(const CodedModel& m, int32_t within) const { return m.id.slot * rows() + within; }
  // Of a row whose prompt ends.
  float new_step(const CodedRowModel& row, int32_t component, int32_t within) const;
  // What token t reads as without its mean.
  double value(const CodedModel& m, int32_t component, int32_t within, int64_t i) const;
  Status append_layers(const std::vector<CodedModel*>& list, int32_t tokens);
  Status score(CodedModel* m, int32_t layer);
  // The model's oldest raw block becomes a coded or a fixed-rate one.
  void make_block(CodedModel* m);

  KvStoreConfig config_;
  std::unique_ptr<CodedHostStore> store_;
  RandomInput* input_;
  float spread_ = 1;
};

}  // namespace tierkv::testing

// What a row of the store should hold, without pages: the state machine of codec/policy/tiering.h
// for places and scores, and for each token the values it should read as, requantised at each move
// by the quantiser alone.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "codec/policy/tiering.h"
#include "tests/support/small_store.h"

namespace tierkv::testing {

class RowModel {
 public:
  explicit RowModel(const KvStoreConfig& config) : config_(&config) {}

  // Keys and values: head_dim floats, as they came in.
  void append_prompt(const TokenValues& values);
  void score_prompt(const std::vector<float>& significance) { significance_ = significance; }
  void end_prompt();
  void step(const std::vector<TokenValues>& tokens);
  // Null probabilities: a query that was due and never came.
  void observe(int32_t query, const float* probabilities);
  // Which tokens lie on shared pages is the store's to say.
  void read_frozen(const StoreView& s, int32_t row);
  // Afterwards the order of a tier is the store's, the tokens are the model's: difference().
  void truncate(int32_t tokens, const StoreView& s, int32_t row);

  // Empty when the row holds the same tokens at the same places with the same scores.
  std::string difference(const StoreView& s, int32_t row) const;
  // The same of the values of all tokens.
  std::string value_difference(const StoreView& s, int32_t row) const;

  int32_t num_tokens() const { return num_tokens_; }
  int32_t kept_tokens() const;

 private:
  struct Token {
    float score;
    int32_t count;
    int32_t position;
    uint8_t frozen;
  };
  using Tokens = std::vector<Token>;

  TokenValues quantized(const TokenValues& values, const TierFormat* from,
                        const TierFormat& to) const;
  void demote(int32_t position, const TierFormat& from, const TierFormat& to);
  const Tokens& tier(int32_t side) const { return side == kHighSide ? high_ : low_; }
  void forget(Tokens* tokens, int32_t end);
  void reorder(Tokens* tokens, int32_t side, const StoreView& s, int32_t row);
  std::string tier_difference(const StoreView& s, int32_t row, int32_t side) const;
  std::string window_difference(const StoreView& s, int32_t row) const;

  const KvStoreConfig* config_;
  int32_t num_tokens_ = 0;
  int32_t counted_prompt_ = 0;  // tokens of the prompt that are left
  bool live_ = false;
  std::vector<float> significance_;
  std::map<int32_t, TokenValues> values_;
  Tokens window_, sinks_, high_, low_;  // the window oldest first
};

}  // namespace tierkv::testing

// SPDX-License-Identifier: Apache-2.0
// What a store must hold, by definition: every token of every row by itself, no pages, no blocks of
// bytes. It shares the codec's arithmetic of single tokens with the store and nothing else.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/rope_turn.h"
#include "codec/host/coded/weighted_rows.h"
#include "codec/policy/profile.h"
#include "tierkv/kv_store.h"

namespace tierkv::model {

struct Token {
  std::vector<uint16_t> k, v;  // fp16
  float sum = 0;               // of what counted queries gave it
  int32_t count = 0;
  bool from_prompt = false;  // sum is its significance in a prompt
  bool is_decided = false;
  int8_t importance = 0;  // once decided
  bool has_value_exponent = false;
  int8_t value_exponent = 0;
  bool is_coded = false;
  std::vector<float> coded_k, coded_v;
};

struct Row {
  std::vector<Token> tokens;
  WeightedRow weighted;
  double log_sum = 0;
  int32_t seen = 0;
};

struct Layer {
  std::vector<Row> rows;  // [num_kv_heads]
  int32_t body_end = 0;
  bool is_fixed = false;

  int32_t tokens() const { return static_cast<int32_t>(rows[0].tokens.size()); }
};
using Sequence = std::vector<Layer>;

// What an append brings, for one sequence and layer: fp16 or bf16 [tokens, num_kv_heads, head_dim].
struct NewTokens {
  const uint16_t* k = nullptr;
  const uint16_t* v = nullptr;
  const float* significance = nullptr;  // [num_kv_heads, stride]
  int64_t stride = 0;
  int32_t tokens = 0;
};

// The model of the coded and of the channel-wise format.
class CodedModel {
 public:
  explicit CodedModel(const StoreConfig& config);

  Sequence empty() const;
  // begin() of a step; long chunks do it in append().
  void compress(Layer* layer, int32_t layer_index, int32_t tokens_after);
  void append(Layer* layer, int32_t layer_index, const NewTokens& added);
  void truncate(Sequence* sequence, int32_t tokens) const;
  // The probabilities of the query at `position` for a row.
  void count_query(Row* row, int32_t body_end, int32_t position, const float* probabilities) const;

  float key(const Row& row, int32_t position, int32_t d) const;
  float value(const Row& row, int32_t position, int32_t d) const;
  bool has_books(int32_t layer) const { return has_books_[layer]; }
  void set_books(int32_t layer) { has_books_[layer] = true; }

 private:
  bool is_raw(int32_t layer) const;
  void decide(Row* row, int32_t first, int32_t end) const;
  void fit(Row* row, int32_t layer_index, int32_t kv_head, int32_t end) const;
  void code(Row* row, int32_t position) const;
  void code_channel_block(Row* row, int32_t first) const;

  StoreConfig config_;
  int32_t unit_ = 64, block_ = 64;
  double k_ = 0, v_ = 0;
  std::vector<RopeTable> ropes_;
  std::vector<bool> has_books_;
};

}  // namespace tierkv::model

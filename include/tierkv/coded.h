// A cache held as entropy-coded pages: what a store must know beside its capacities.
//
//   KvStoreConfig config = ...;               // layout, policy.window_tokens, capacities
//   config.coded.enabled = true;
//   config.coded.key_steps = ...;             // a profile's (`tierkv calibrate`)
//   config.coded.value_steps = ...;
//   KvStore::create(config)
//
// Every token but the newest ones is quantised with one step per row and component, absolute or
// relative to the range of the row's prompt, and stored in Huffman-coded blocks of 64 tokens
// (docs/reference/format.md, section 5); the newest policy.window_tokens and up to 63 more stay
// fp16. Blocks that matter more can be kept at a fixed rate (fixed_blocks). Tokens have no tiers
// and no scores, and nothing is pruned. store/CODED.md holds the states and laws.
//
// Sources: KVComp section 3 (quantise, Huffman, decode in attention); the shared absolute step and
// the mean basis are ours (docs/internals/architecture.md, "Quantisation").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tierkv/export.h"
#include "tierkv/format.h"
#include "tierkv/status.h"

namespace tierkv {

// What is taken off keys and values before they are quantised; free at read.
enum class MeanSource : int32_t {
  kNone = 0,
  kGiven = 1,   // channel means of a profile
  kPrompt = 2,  // those of the row's own prompt, stored with it as fp16
};

// Where the steps of a row's keys and values come from.
enum class StepSource : int32_t {
  kGiven = 0,  // absolute: a profile's, by layer and kv_head
  // Relative (KVComp section 3.1, with the row's prompt as the unit): a share of the range of the
  // values of its prompt, 0 included, means taken off. Tokens that come later have the same step.
  // Needs no profile; a prompt must have a token.
  kPrompt = 1,
};

// Where a store's codebooks come from, one per layer and component, or a family.
enum class CodebookSource : int32_t {
  // Made by the host from the codes of the first blocks that the store codes, then fixed (KVComp
  // section 3.1.2). On a device the prompt that does so waits for the host.
  kHost = 0,
  // The same codebooks, made on the device: only their code lengths come to the host. A store in
  // host memory makes them as kHost does.
  kDevice = 1,
  // Given ones; where there are several for a component, each block takes the one that codes it in
  // the fewest bytes.
  kGiven = 2,
};

struct TKV_API CodedConfig {
  bool enabled = false;
  StepSource steps = StepSource::kGiven;
  std::vector<float> key_steps;    // kGiven: [num_layers, num_kv_heads], positive
  std::vector<float> value_steps;  // likewise
  float key_relative = 0;          // kPrompt: step / (largest - smallest), 2^-14 to 1; else 0
  float value_relative = 0;        // likewise
  MeanSource means = MeanSource::kPrompt;
  std::vector<float> key_means;    // kGiven: [num_layers, num_kv_heads, head_dim]; rounded to fp16
  std::vector<float> value_means;  // likewise
  CodebookSource codebooks = CodebookSource::kHost;
  // kGiven: serialised (docs/reference/format.md, section 4), of both components, table ids unique
  // in each.
  std::vector<std::vector<uint8_t>> given;
  // Bits of the longest code word, 8 to 14; not for kGiven. A table of 10 bits lies 16 times in
  // shared memory: fewer conflicts, faster attention (store/CODED.md).
  int32_t max_length = 10;
  int32_t streams_per_lane = 2;  // 1 or 2; not for kGiven
  // Keeps important blocks at a fixed rate, in fixed_format, beside the coded ones of the row: a
  // block with a sink (policy.sink_tokens), or, where the prompt was scored (score_prompt()), with
  // a token i from 1 whose significance is at least policy.alpha_high / i. Blocks that steps make
  // have no significance. Which a block is does not change while it lasts.
  bool fixed_blocks = false;
  TierFormat fixed_format = token_wise_tier(8, 4);  // 8 or 4 bits, one group per 128 channels

  friend bool operator==(const CodedConfig& a, const CodedConfig& b) {
    return a.enabled == b.enabled && a.steps == b.steps && a.key_steps == b.key_steps &&
           a.value_steps == b.value_steps && a.key_relative == b.key_relative &&
           a.value_relative == b.value_relative && a.means == b.means &&
           a.key_means == b.key_means && a.value_means == b.value_means &&
           a.codebooks == b.codebooks && a.given == b.given && a.max_length == b.max_length &&
           a.streams_per_lane == b.streams_per_lane && a.fixed_blocks == b.fixed_blocks &&
           a.fixed_format == b.fixed_format;
  }
  friend bool operator!=(const CodedConfig& a, const CodedConfig& b) { return !(a == b); }
};
// One line of JSON, all fields; codebooks in hexadecimal.
TKV_API std::string to_json(const CodedConfig& config);

}  // namespace tierkv

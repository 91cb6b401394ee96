// The state of a coded store's device back end as its kernels see it, and their launches. Batches,
// failures and what they mean are those of store/tiers/device_state.h.
#pragma once

#include <cstdint>

#include "codec/format/coded_block.h"
#include "codec/gpu/coded/code_histograms.h"
#include "codec/gpu/coded/coded_batch.h"
#include "store/coded/coded_shape.h"
#include "store/tiers/device_state.h"

namespace tierkv {

// All pointers in device memory.
struct CodedDeviceState {
  CodedView s;
  DeviceState common;  // batch, failure, reports, counts, infos and appended tokens
  const float* given_key_steps = nullptr;    // [rows_per_sequence], StepSource::kGiven
  const float* given_value_steps = nullptr;  // likewise
  uint32_t* ranges = nullptr;                // [rows][2][2], StepSource::kPrompt: -least, most
  const float* given_key_means = nullptr;    // [rows_per_sequence, head_dim], MeanSource::kGiven
  const float* given_value_means = nullptr;
  const DeviceCodebook* books = nullptr;  // [num_layers][keys, then values]; null: none yet
  int32_t num_key_books = 1;              // of each layer
  int32_t num_value_books = 1;

  TKV_HD int32_t num_books() const { return num_key_books + num_value_books; }
  TKV_HD int32_t books_of(Component c) const {
    return c == Component::kKey ? num_key_books : num_value_books;
  }
  // Whether blocks have several slices, or codebooks to choose from.
  bool has_choices() const { return num_books() > 2 || slice_count(s.head_dim) > 1; }
};

// The end of prompts, in this order: begin (means, steps); where there are no codebooks yet the
// histograms that they are made from; plan; reserve (entry_counts); write; keep (row_counts);
// finish.
struct PromptEnd {
  int32_t count = 0;
  int32_t most_blocks = 0;  // that a row of the batch codes
  MeanSource means = MeanSource::kPrompt;
  StepSource steps = StepSource::kGiven;
  float key_relative = 0;
  float value_relative = 0;
};
Status begin_coded_prompt_end(const CodedDeviceState& d, const PromptEnd& prompt, GpuStream stream);
// All layers' histograms of the codes that the prompts will have: of keys, then of values.
struct PromptHistograms {
  uint32_t* pairs = nullptr;  // device, [2][num_layers][kHistogramCounts]; added to
  uint32_t* wide = nullptr;   // likewise
  int32_t entries = 0;        // of the batch
  int32_t most_blocks = 0;    // as in PromptEnd
};
Status count_prompt_codes(const CodedDeviceState& d, const PromptHistograms& to, GpuStream stream);
Status plan_coded_prompt(const CodedDeviceState& d, const PromptEnd& prompt, GpuStream stream);
Status write_coded_prompt(const CodedDeviceState& d, const PromptEnd& prompt, GpuStream stream);
Status finish_coded_prompt(const CodedDeviceState& d, const PromptEnd& prompt, GpuStream stream);

// Generation: plan, page operation, apply, in this order; blocks are coded twice, for their sizes
// and, once they have pages, for their bytes.
Status plan_coded_step(const CodedDeviceState& d, int32_t count, int32_t tokens, GpuStream stream);
Status apply_coded_step(const CodedDeviceState& d, int32_t count, int32_t tokens, GpuStream stream);

// Adds the fixed-rate blocks of all sequences to *count, device memory.
Status count_fixed_blocks(const CodedDeviceState& d, unsigned long long* count, GpuStream stream);

// Tokens of one layer, of a prompt or a step.
Status append_coded(const CodedDeviceState& d, const DeviceTokens& tokens, GpuStream stream);

// The rows of the batch as attend_coded() takes them, [count * num_kv_heads], and their items:
// those of layer 0, where other layers have theirs as far behind as they have their blocks, raw
// pages, means and steps.
struct CodedRowPlan {
  CodedRow* rows = nullptr;
  int32_t* item_count = nullptr;
  int32_t count = 0;
};
Status plan_coded_rows(const CodedDeviceState& d, const CodedRowPlan& plan, GpuStream stream);
// What attention found wrong becomes the store's failure.
struct CodedVerdict {
  const StatusCode* status = nullptr;  // [count * num_kv_heads]
  int32_t count = 0;
  int32_t layer = 0;
};
Status report_coded_rows(const CodedDeviceState& d, const CodedVerdict& v, GpuStream stream);

}  // namespace tierkv

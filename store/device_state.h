// The state of the device back end as its kernels see it, and their launches.
//
// Every call names its sequences by the batch: a list in device memory that begin_batch() writes.
// Where an earlier call has failed it writes padding instead (but for DeviceCall::kNone), so that
// nothing is done until take_status() has told the failure; where a call fails in its own kernels,
// the first failure is kept, and what follows it sees padding or looks for the failure itself.
#pragma once

#include <cstdint>

#include "attention/token_scores.h"
#include "store/store_shape.h"
#include "tierkv/allocator.h"

namespace tierkv {

enum class DeviceCall : int32_t {
  kNone = 0,
  kBeginPrompt,
  kAppend,
  kScorePrompt,
  kEndPrompt,
  kBeginStep,
  kUpdateScores,
  kAttend,
};

// The first failure since it was taken.
struct DeviceFailure {
  StatusCode status;
  DeviceCall call;
  int32_t layer;  // -1: all
  int32_t slot;   // of the sequence; -1: nobody's fault
};
inline constexpr DeviceFailure kNoFailure = {StatusCode::kOk, DeviceCall::kNone, -1, -1};

// A token of a row: its page and its index in its side. kNoPage: the new page of the side, which
// the step takes.
struct PlacedToken {
  int32_t page;
  int32_t index;
};
// A round of a step of one row, with all that its plan has found out. `to` is where the candidate
// goes; a victim is there before it, and goes down.
struct alignas(16) PlannedMove {
  PlacedToken from, to, down;
  float score;  // of the candidate
  int32_t position;
  float victim_score;
  int32_t victim_position;  // kNoPosition: no victim
  int32_t side;             // of `to`; kNoSide: nothing goes anywhere
  bool demotes;             // false: a victim is pruned, and `down` says nothing
};
inline constexpr int32_t kNoSide = -1;

struct StepTotals;  // allocator/page_step.cuh

// All pointers in device memory. Rows of a batch are counted as the allocator does: entry *
// rows_per_sequence + row within the sequence.
struct DeviceState {
  StoreView s;
  int32_t max_tokens = 0;
  DeviceFailure* failure = nullptr;
  int32_t* batch = nullptr;            // [max_sequences]; kPaddingSequence: nothing is done
  SequenceInfo* before = nullptr;      // [max_sequences] of the batch, before the call
  SideCounts* entry_counts = nullptr;  // [max_sequences]
  SideCounts* row_counts = nullptr;    // [max batch rows]
  PlannedMove* moves = nullptr;        // [max batch rows][kMaxStepTokens]
  PlannedGrowth* growth = nullptr;     // [max batch rows]
  int32_t* group_pages = nullptr;      // [max_sequences * step_groups(), padded to 4]
  StepTotals* totals = nullptr;
  PageCopy* copies = nullptr;        // [rows_per_sequence][kMaxSides] of an operation
  OpReport* report = nullptr;        // of the operation that may be refused
  OpReport* other_report = nullptr;  // of one that may not
  int32_t* appended = nullptr;       // [rows] tokens that each row has got
};

// Slots of a batch by value: a launch needs no memory of the host's.
inline constexpr int32_t kIdChunk = 512;
struct IdChunk {
  int32_t slots[kIdChunk];
};
struct BatchCall {
  DeviceCall call = DeviceCall::kNone;  // kNone: release and the like, which no failure stops
  int32_t count = 0;
  int32_t tokens = 0;  // for which max_tokens must have room
};
Status begin_batch(const DeviceState& d, const BatchCall& call, const int32_t* slots,
                   GpuStream stream);
// newest_index() of the batch's sequences to newest [count]; 0 for padding.
Status find_newest(const DeviceState& d, int32_t* newest, int32_t count, GpuStream stream);
// The batch's sequences become empty ones in their prompts.
Status reset_sequences(const DeviceState& d, int32_t count, GpuStream stream);

// Generation: two kernels, plan and apply, which are the page operation too (allocator/
// page_step.cuh). The plan writes the batch itself, and where the step may not go on (an earlier
// failure, max_tokens) it is at fault, so that the operation is refused for all rows at once.
struct StepCall {
  const int32_t* slots;  // host memory
  int32_t count;
  int32_t tokens;
};
Status plan_step(const DeviceState& d, const StepCall& call, GpuStream stream);
Status apply_step(const DeviceState& d, const StepCall& call, GpuStream stream);
// CTAs of the plan, of a sequence.
int32_t step_groups(const StoreView& s);
size_t step_totals_bytes();
// Before the first step.
Status clear_totals(const DeviceState& d, GpuStream stream);

// Keys and values of one layer, device memory.
struct DeviceTokens {
  const void* k = nullptr;  // dtype [count, tokens, num_kv_heads, head_dim]
  const void* v = nullptr;
  DType dtype = DType::kFloat16;
  int32_t count = 0;
  int32_t tokens = 0;
  int32_t layer = 0;
  bool plan_is_settled = false;  // of a step: as AttendCall's for an attend() in its place
};
// `slots` [count] is the batch, in host memory.
Status append_step(const DeviceState& d, const DeviceTokens& tokens, const int32_t* slots,
                   GpuStream stream);

// Prompts. Pages to reserve and tokens to keep, for a chunk; afterwards what the reports say.
Status plan_chunk(const DeviceState& d, int32_t count, int32_t tokens, GpuStream stream);
Status finish_chunk(const DeviceState& d, int32_t count, int32_t tokens, GpuStream stream);
Status plan_prompt_end(const DeviceState& d, int32_t count, GpuStream stream);
Status place_prompt(const DeviceState& d, int32_t count, GpuStream stream);
Status finish_prompt(const DeviceState& d, int32_t count, GpuStream stream);

// What append of a chunk needs beside the state.
struct ChunkScratch {
  void* jobs = nullptr;               // PageJob [max_sequences * num_kv_heads * chunk_jobs()]
  StatusCode* status = nullptr;       // [max_sequences * num_kv_heads]
  const float* neutral = nullptr;     // [max_tokens] neutral_significance() by position
  const int32_t* counting = nullptr;  // [max_tokens] 0, 1, 2, ...
};
int32_t chunk_jobs(const StoreView& s, int32_t tokens);  // of a row, at most
size_t chunk_job_bytes();
Status append_chunk(const DeviceState& d, const ChunkScratch& scratch, const DeviceTokens& tokens,
                    GpuStream stream);

// Scores of one layer by position: [count, num_kv_heads, stride].
struct DeviceScores {
  const float* values = nullptr;
  int64_t stride = 0;
  int32_t count = 0;
  int32_t layer = 0;
  int32_t back = 0;
};
Status score_prompt(const DeviceState& d, const DeviceScores& scores, GpuStream stream);
Status update_scores(const DeviceState& d, const DeviceScores& scores, GpuStream stream);

// Probabilities of one layer's tokens from q and the lse of attend().
struct DeviceProbabilities {
  const void* q = nullptr;  // [count, q_len, num_kv_heads, group, head_dim] of dtype
  DType dtype = DType::kFloat16;
  const float* lse = nullptr;  // [count, q_len, num_kv_heads, group]
  float* values = nullptr;     // [q_len, count, num_kv_heads, stride]
  int64_t stride = 0;
  int32_t count = 0;
  int32_t layer = 0;
  int32_t group = 1;
  int32_t q_len = 1;
  float sm_scale = 1;
};
Status find_probabilities(const DeviceState& d, const DeviceProbabilities& p, GpuStream stream);

// Counts the queries of each row, oldest first, from the scores that attention left.
struct DeviceCount {
  TokenScores scores;
  QueryColumns columns;
  const float* lse = nullptr;  // [count, q_len, num_kv_heads, group]
  int32_t count = 0;
  int32_t layer = 0;
};
Status count_query(const DeviceState& d, const DeviceCount& x, GpuStream stream);

}  // namespace tierkv

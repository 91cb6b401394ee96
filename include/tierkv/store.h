// The KV store: the compressed cache of many sequences, from the tokens of a prompt to attention.
//
//   Result<std::unique_ptr<KvStore>> store = KvStore::create(config);
//   SequenceId id = *(*store)->add_sequence();
//   begin_prompt({&id, 1}, n);                    // room for n tokens in every layer
//   for each layer: append(...), score_prompt(...);
//   end_prompt({&id, 1});                         // tiers, pages, surplus returned
//   for each token:
//     begin_step({&id, 1}, 1);                    // compaction of all layers, room for the token
//     for each layer: append(...), attend(...), update_scores(...);
//
// Tokens of a prompt, and the window after it, lie in the window format on pages of their own; all
// other tokens that were kept lie on high or low pages. begin_step() is the compaction of a step:
// the tokens that leave the window because of the new ones are placed and their victims demoted
// (docs/internals/policies.md) before the new tokens take their slots, which gives the state that
// appending first would give, without a page for the surplus.
//
// Calls are all or nothing: a status other than kOk means that nothing changed. Statuses common to
// all calls: kStaleSequence for an id that was released (or never given out), kInvalidArgument for
// null pointers, a layer or count out of range, a repeated sequence, a sequence in the wrong phase
// or a layer that lacks tokens. Calls on one store must not overlap.
//
// Two back ends, one contract. Host (create()): pointers are host memory, statuses come back at
// once. Device (create_device_store()): pointers to k, v, q, scores and results are device memory
// and calls are enqueued on the store's stream; what the device finds is told by take_status().
// store/README.md holds the states and laws of both.
//
// Sources: DiffKV section 5 (prompt and generation phase); the store's interface, fork, truncate
// and export are ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tierkv/attention.h"
#include "tierkv/basis.h"
#include "tierkv/channel.h"
#include "tierkv/coded.h"
#include "tierkv/export.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"
#include "tierkv/policy.h"
#include "tierkv/status.h"

namespace tierkv {

inline constexpr int32_t kMaxStepTokens = 8;  // of a sequence, in one step

struct TKV_API KvStoreConfig {
  CacheLayout layout;
  // A tier may not be wider than the one before it, in keys or in values. Pages hold 16, 8, 4 and 2
  // bit token-wise formats without entropy coder; their basis is that of the whole store.
  TierFormat window_format = token_wise_tier(8, 4);
  TierFormat high_format = token_wise_tier(8, 4);
  TierFormat low_format = token_wise_tier(4, 2);
  TierPolicy policy;           // window_tokens at least kMaxStepTokens
  int32_t score_interval = 1;  // generation: every n-th query is counted
  int64_t page_bytes = 0;      // 0: choose_page_size() of the three formats
  int32_t num_pages = 0;       // of the pool
  int32_t max_sequences = 0;   // at once
  int32_t max_tokens = 0;      // of a sequence, pruned ones included
  // Keys and values are stored in it, window included; null: as they come. append() and attend()
  // change bases by themselves, and 16-bit components then hold fp16 whatever layout.dtype is.
  std::shared_ptr<const CacheBasis> basis;
  // Entropy-coded pages instead of tiers: formats, alphas, sinks and score_interval stay as they
  // are here, but for alpha_high and sinks with coded.fixed_blocks.
  CodedConfig coded;
  // Blocks of channel-wise keys instead of tiers; likewise, and not with coded.
  ChannelConfig channel;

  // kInvalidArgument, kUnsupported or kOutOfRange with the field's name.
  Status validate() const;
  TKV_API friend bool operator==(const KvStoreConfig& a, const KvStoreConfig& b);
  friend bool operator!=(const KvStoreConfig& a, const KvStoreConfig& b) { return !(a == b); }
};
// One line of JSON, all fields.
TKV_API std::string to_json(const KvStoreConfig& config);

struct SequenceId {
  int32_t slot = -1;
  uint32_t generation = 0;  // a slot that is used again gives other ids

  friend bool operator==(const SequenceId& a, const SequenceId& b) {
    return a.slot == b.slot && a.generation == b.generation;
  }
};
// An id as one number, and back, for all numbers: slot + 1 below the generation, so that 0 is
// nobody's.
inline uint64_t number_of(SequenceId id) {
  return uint64_t{id.generation} << 32 | (static_cast<uint32_t>(id.slot) + 1);
}
inline SequenceId id_of(uint64_t number) {
  return {static_cast<int32_t>(static_cast<uint32_t>(number) - 1),
          static_cast<uint32_t>(number >> 32)};
}

// The sequences of a call, in host memory for both back ends; 1 to max_sequences, none twice.
struct SequenceList {
  const SequenceId* ids = nullptr;  // [count]
  int32_t count = 0;
};

// The keys and values of one layer for the newest `tokens` tokens of each sequence.
struct AppendCall {
  SequenceList sequences;
  int32_t layer = 0;
  int32_t tokens = 0;       // as begin_prompt() or begin_step() said
  const void* k = nullptr;  // layout.dtype [count, tokens, num_kv_heads, head_dim]
  const void* v = nullptr;  // likewise
};

// Significances of a whole prompt, of one layer.
struct PromptScores {
  SequenceList sequences;
  int32_t layer = 0;
  const float* significance = nullptr;  // [count, num_kv_heads, stride], by position
  int64_t stride = 0;                   // at least the tokens of the longest sequence
};

// What one query saw, of one layer: for each token the largest probability that a query head of the
// group gave it.
struct ScoreUpdate {
  SequenceList sequences;
  int32_t layer = 0;
  int32_t back = 0;                      // the query is that of the newest token but `back`
  const float* probabilities = nullptr;  // [count, num_kv_heads, stride], by position
  int64_t stride = 0;                    // at least the tokens of the longest sequence
};

// Attention of the newest tokens' queries over all that the layer holds, each over the tokens up to
// its own.
struct AttendRequest {
  SequenceList sequences;
  int32_t layer = 0;
  const void* q = nullptr;  // [count, q_len, num_q_heads, head_dim] of dtype
  void* out = nullptr;      // like q
  float* lse = nullptr;     // [count, q_len, num_q_heads], natural logarithm; may be null
  // [q_len, count, num_kv_heads, stride]: of query j what ScoreUpdate takes with back = q_len - 1 -
  // j; 0 for pruned tokens and for those that the query does not see. May be null.
  float* probabilities = nullptr;
  int64_t stride = 0;  // of probabilities
  // Of q and out: fp16 or bfloat16. Where a tier is raw, that of its pages: bfloat16 where
  // layout.dtype is, otherwise fp16. With a basis fp16, or bfloat16 where layout.dtype is. With
  // config().coded or channel either.
  DType dtype = DType::kFloat16;
  // Queries of each sequence, 1 to kMaxQueryTokens, oldest first. Of several the sequence must have
  // as many tokens, and all but the oldest of these must be sinks or in the window, as what was
  // appended since the last truncate() is.
  int32_t q_len = 1;
  // Learned sinks of the layer, [num_q_heads]: logits that are part of the softmaxes' denominators,
  // in lse and probabilities, too, and have no value; finite, or -infinity for none. Null: no head
  // has one. kUnsupported with a basis that has means; kNonFinite on the host.
  const float* sinks = nullptr;
  // Also counts the queries, as update_scores() of their probabilities would, oldest first, instead
  // of those calls; those of tokens that are then truncated stay in the means (where drafts may be
  // refused, ask for probabilities, truncate, and update the scores of what was accepted). The
  // sequences must be past their prompts. Host and device find probabilities that differ by up to
  // 2e-3 of themselves (attention/tiers/token_scores.h). Where config().score_interval skips all
  // queries of every sequence, nothing is added to attend(), in a captured graph neither now nor
  // when it is replayed.
  bool count_query = false;
  // Device memory of count_scratch_bytes(), 8-byte aligned, for count_query; the host needs none.
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
};
// For calls on up to `sequences` sequences of up to `tokens` tokens, with q_len queries each.
TKV_API size_t count_scratch_bytes(const KvStoreConfig& config, int32_t sequences, int32_t tokens,
                                   int32_t q_len = 1);

// Counts are sums over rows (sequence, layer, kv_head); a shared page counts for each of its
// owners' tokens, but once in the pages.
struct TKV_API StoreStats {
  int64_t tokens[kNumTiers] = {0, 0, 0, 0};  // by Tier; sinks count as window; coded: CODED.md
  int32_t sequences = 0;
  int32_t pages = 0;
  int32_t pages_free = 0;
  int32_t pages_shared = 0;
  int64_t page_bytes = 0;
  int64_t raw_bytes = 0;      // the same tokens, pruned ones included, as 16-bit values
  int64_t nominal_bytes = 0;  // codes, metadata, scores and positions of the tokens kept

  int64_t held_bytes() const { return (pages - pages_free) * page_bytes; }
  double nominal_ratio() const;  // raw_bytes / nominal_bytes; 0 where nothing is held
  double pool_gain() const;      // raw_bytes / held_bytes(); 0 where nothing is held
};

class TKV_API KvStore {
 public:
  // The host back end. kOutOfMemory when there is no memory for the pool.
  static Result<std::unique_ptr<KvStore>> create(const KvStoreConfig& config);
  virtual ~KvStore() = default;

  virtual const KvStoreConfig& config() const = 0;
  virtual int64_t page_bytes() const = 0;

  // An empty sequence, in its prompt. kOutOfRange when max_sequences are open.
  virtual Result<SequenceId> add_sequence() = 0;

  // Room for `tokens` more tokens of each sequence, all of them in their prompts. kOutOfPages;
  // kOutOfRange beyond max_tokens, with config().coded or channel also beyond 65534 * 64 tokens at
  // once. The layers before must have got theirs.
  virtual Status begin_prompt(SequenceList sequences, int32_t tokens) = 0;
  // Once per layer and begin. kNonFinite; kOutOfRange for a value beyond +-65504, which no tier
  // could hold (with a basis: a coordinate).
  virtual Status append(const AppendCall& call) = 0;
  // Before end_prompt(). A token that was never scored is neutral: its significance is 1 / i, i
  // counted from 1, which alpha_high <= 1 puts into the high tier. (Coded stores: 0.)
  // kNonFinite, kInvalidArgument for a negative one. Coded stores: with coded.fixed_blocks only.
  virtual Status score_prompt(const PromptScores& scores) = 0;
  // The prompt phase of all rows: tiers, pages, moves, surplus returned. kOutOfPages: the prompts
  // stay as they were.
  virtual Status end_prompt(SequenceList sequences) = 0;

  // A step of 1 to kMaxStepTokens tokens for each sequence, all of them past their prompts:
  // compacts all layers and makes room. kOutOfPages; kOutOfRange beyond max_tokens.
  virtual Status begin_step(SequenceList sequences, int32_t tokens) = 0;
  // Feeds the running means. Tokens older than the query are observed, except on shared pages;
  // sequences whose query config().score_interval skips are left alone. A query that is due and
  // never comes counts as if it had repeated every mean. kNonFinite,
  // kInvalidArgument for negative ones.
  virtual Status update_scores(const ScoreUpdate& update) = 0;
  // kUnsupported, by name, for what attention does not support (AttentionConfig::validate()).
  virtual Status attend(const AttendRequest& request) = 0;

  // A copy that shares full pages of the high and low tiers. The sequence must be past its prompt.
  virtual Result<SequenceId> fork(SequenceId source) = 0;
  // Forgets all tokens from position `tokens` on; what stays keeps its precision. kOutOfPages:
  // shared pages that would lose tokens are replaced by new ones.
  virtual Status truncate(SequenceId sequence, int32_t tokens) = 0;
  virtual Status release(SequenceId sequence) = 0;

  // Tokens of a sequence so far, pruned ones included.
  virtual Result<int32_t> num_tokens(SequenceId sequence) = 0;
  virtual Result<StoreStats> stats() = 0;

  // A sequence past its prompt as bytes, each row with a checksum, for a store of an equal config
  // but for capacities, alphas and score_interval. Equal states give equal bytes
  // (store/README.md, "Exported sequences").
  virtual Result<std::vector<uint8_t>> export_sequence(SequenceId sequence) = 0;
  // kCorrupt, kVersion; kInvalidArgument for bytes of another config or basis; kOutOfPages.
  virtual Result<SequenceId> import_sequence(const uint8_t* bytes, size_t size) = 0;

  // Waits for what was enqueued and tells the first failure that the device found since the last
  // call. The host back end has nothing to tell.
  virtual Status take_status() = 0;
};

// The device back end.
//
// begin_prompt(), append(), score_prompt(), end_prompt(), begin_step(), update_scores() and
// attend() return as soon as they are enqueued. What they can only find out on the device
// (kOutOfPages, kNonFinite, kOutOfRange of values, kInvalidArgument of scores) is kept: from the
// first failure on nothing that was enqueued is done, until take_status() tells it and brings the
// host's bookkeeping back to what the device has. add_sequence() and release() are always carried
// out.
//
// With config().basis, append() and attend() want 16-byte aligned pointers, and append() of a
// prompt keeps the call's coordinates in device memory, 8 bytes for a key and its value.
//
// fork(), truncate(), stats(), export and import wait for the stream and are refused
// (kInvalidArgument) while a failure waits to be taken. All but fork() go through host memory; with
// config().coded or channel fork() does, too. attend() does not look for values of q that are not
// finite.
//
// A step (begin_step() and what follows it for the layers) allocates nothing, does not wait and can
// be captured in a CUDA graph. While it is captured the bookkeeping moves on as if it had been
// carried out, which the first replay then does; note_replay() tells of each further one.
class TKV_API DeviceKvStore : public KvStore {
 public:
  // A captured step of `tokens` tokens for `sequences` was replayed once more. As begin_step().
  virtual Status note_replay(SequenceList sequences, int32_t tokens) = 0;
};
// kCuda when the device refuses; kOutOfMemory when there is no memory for the pool. The store uses
// `stream` alone, which must outlive it, on the device that is current now.
TKV_API Result<std::unique_ptr<DeviceKvStore>> create_device_store(const KvStoreConfig& config,
                                                                   GpuStream stream);

}  // namespace tierkv

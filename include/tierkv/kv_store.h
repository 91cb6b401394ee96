// SPDX-License-Identifier: Apache-2.0
// The KV store: the compressed cache of many sequences, from the tokens of a prompt to attention.
//
//   Result<std::unique_ptr<KvStore>> store = KvStore::create(config);
//   SequenceId id = *(*store)->add_sequence();
//   begin({&id, 1}, n);                           // a prompt, a turn or a step: any n >= 1
//   for each layer: append(...), attend(...);
//
// A row is a (sequence, layer, kv_head). By position its tokens are the sinks, which stay raw; the
// body, which is compressed; and the window with what waits before it, raw. The same calls serve
// prompts, turns and steps. A chunk of more than kMaxStepTokens is compressed layer by layer as
// append() brings it, so at most one layer of a chunk is raw at any time. A step of at most
// kMaxStepTokens is compressed for all layers by begin(). The same tokens give the same bytes in
// whatever chunks they come, unless significances come too.
//
// The config's format says how the body is compressed: Coded (entropy-coded weighted steps), Tiers
// (fixed widths by importance) or Channel (channel-wise keys). All calls serve every format.
//
// Calls are all or nothing: a status other than kOk means that nothing changed. Every call may
// answer kStaleSequence for an id that was released or never given out. kInvalidArgument names a
// null pointer, a layer or count out of range, a repeated sequence, or a layer that lacks tokens.
// After kOutOfPages, shortage() says what is missing: release other sequences and repeat the call.
// Calls on one store must not overlap.
//
// store/ENGINE.md holds the states and laws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <variant>
#include <vector>

#include "tierkv/export.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"
#include "tierkv/rope.h"
#include "tierkv/sequence.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

struct Profile;
namespace store {
class Engine;
}

// Format "coded": a step per row, times 2^(e / 8) for a token's exponent e, Huffman-coded in blocks
// of 64 positions (docs/reference/format.md, "Weighted steps"). Keys are quantised before RoPE.
struct TKV_API CodedFormat {
  // k: the standard deviation of the error that key steps may cause in a logit. v: value steps as a
  // fraction of the size of the token's value. Both 1e-6 to 1024. 0: 0.55 and 0.5 with a profile
  // that has query energies and sensitivities, 0.33 and 0.28 otherwise.
  double k = 0, v = 0;
  // Bits of the longest code word, 8 to 14. create_device() refuses lengths for whose tables the
  // GPU's shared memory has no room.
  int32_t max_length = 10;
  int32_t streams_per_lane = 2;  // 1 or 2
  int32_t key_books = 1;         // codebooks of a layer's keys, 1 to 4; on a device 1
  // Tokens that leave the window at once: 16, 32 or 64. Smaller units keep fewer tokens raw, and
  // code the newest block of a row up to four times as it fills.
  int32_t unit_tokens = 16;
};

// Format "tiers": token-wise widths, two in each class of heads, by importance. 8, 4 or 2 bits,
// values no more than keys. 8 and 4 bits span the range of a token; 2 bits are clipped at its norm,
// whether `high` and `low` say so or not.
struct TKV_API TierClass {
  TierFormat high = token_wise_tier(8, 4), low = token_wise_tier(4, 2);
  double alpha_high = 1;  // u >= alpha_high: high, u = i * significance, i from 1
  double alpha_low = 0;   // u < alpha_low: pruned
  // The share of the heads, the most sensitive first (Profile::joint_sensitivity). The last class
  // takes the rest.
  double share = 0;
};
struct TKV_API TiersFormat {
  std::vector<TierClass> classes = {TierClass{}};  // 1 to 4
  // [num_layers * num_kv_heads]; empty: by the classes' shares and the profile's
  // joint_sensitivity, which several classes then need.
  std::vector<uint8_t> class_of_head;
  bool rotate_keys = true, rotate_values = true;  // by a Hadamard matrix, key means removed
};

// Format "channel": blocks whose keys share a scale per channel (KIVI, BitDecoding).
struct TKV_API ChannelFormat {
  int32_t k_bits = 4, v_bits = 4;  // 4 or 2
  int32_t block_tokens = 64;       // 64, or 128 but for head_dim 256
};

using BodyFormat = std::variant<CodedFormat, TiersFormat, ChannelFormat>;

struct TKV_API StoreConfig {
  CacheLayout layout;  // dtype fp16 or bfloat16; head_dim 64, 96, 128 or 256
  // [1] of all layers or [num_layers]; empty: the profile's, or none. Layers that rotate have the
  // same pairing and rotary_dims.
  std::vector<Rope> rope;
  BodyFormat format = CodedFormat{};
  std::shared_ptr<const Profile> profile;  // tierkv/profile.h makes one; null: none
  std::vector<int32_t> raw_layers;         // these layers stay fp16; ascending
  int32_t sink_tokens = 4;                 // 0 to 16
  int32_t window_tokens = 64;              // kMaxStepTokens to 4096
  // Everything that the store allocates for its sequences, at most 2^46. kOutOfRange with
  // CodedFormat where more than 64 GiB would be pages, with ChannelFormat where 256 GiB would.
  int64_t memory_bytes = 0;
  int64_t page_bytes = 0;     // a multiple of 128, at most 1 MiB; 0: the format's choice
  int32_t max_sequences = 0;  // at once, at most 2^20
  int32_t max_tokens = 0;     // of a sequence, at most 2^24

  // kInvalidArgument, kUnsupported or kOutOfRange with the field's name; kNonFinite for a
  // profile's numbers.
  Status validate() const;
};

// Tokens of all sequences together, when all max_sequences are open and equally long, in host
// memory. On a device a few percent fewer fit, because workspaces come out of memory_bytes there.
struct TokenCapacity {
  int64_t typical = 0;  // with codes of typical size
  int64_t least = 0;    // whatever the values are
};
TKV_API Result<TokenCapacity> tokens_that_fit(const StoreConfig& config);

// The keys and values of one layer for the tokens that begin() announced.
struct LayerAppend {
  SequenceList sequences;
  int32_t layer = 0;
  int32_t tokens = 0;       // as begin() said
  const void* k = nullptr;  // layout.dtype [count, tokens, num_kv_heads, head_dim]
  const void* v = nullptr;  // likewise
  // Significances of these tokens, by the queries of these tokens (tierkv/significance.h):
  // [count, num_kv_heads, stride]. Null: unknown, which is neutral.
  const float* significance = nullptr;
  int64_t stride = 0;  // at least tokens
  // The queries in place of significances, which the store then finds: [count, tokens, num_q_heads,
  // head_dim] of layout.dtype. A store on a device takes 4 bytes for each token and head out of the
  // stream's memory pool (kOutOfMemory) and keeps them for later calls. Such a call cannot be
  // captured.
  const void* q = nullptr;
  int32_t query_stride = 1;  // 1 counts all queries; see SignificanceCall
};

// Attention of the newest tokens' queries over all that the layer holds, each over the tokens up to
// its own.
struct LayerAttend {
  SequenceList sequences;
  int32_t layer = 0;
  int32_t q_len = 1;        // queries of each sequence, oldest first
  const void* q = nullptr;  // [count, q_len, num_q_heads, head_dim] of dtype
  void* out = nullptr;      // like q
  float* lse = nullptr;     // [count, q_len, num_q_heads], natural logarithm; may be null
  // [q_len, count, num_kv_heads, stride]: the largest probability that a query head of the group
  // gave each position; 0 where the query sees no token or one that was pruned. May be null.
  float* probabilities = nullptr;
  int64_t stride = 0;             // of probabilities, at least the tokens of each sequence
  DType dtype = DType::kFloat16;  // of q and out: fp16 or bfloat16
  const float* sinks = nullptr;   // learned sinks [num_q_heads], -infinity: none; may be null
  bool count_query = false;       // what these queries saw counts as importance
};

// Finished keys (after RoPE) and values of the positions [first, end) of a layer.
struct LayerRange {
  SequenceId sequence;
  int32_t layer = 0;
  int32_t first = 0, end = 0;
  DType dtype = DType::kFloat16;  // of k and v: fp16 or bfloat16
  void* k = nullptr;              // [end - first, num_kv_heads, head_dim]
  void* v = nullptr;              // likewise
};

// Tokens count once for each row (sequence, layer, kv_head).
struct StoreUsage {
  int32_t sequences = 0;
  int64_t sink_tokens = 0, body_tokens = 0, ring_tokens = 0;
  int64_t pages = 0, pages_free = 0, pages_shared = 0;
  int64_t most_pages = 0;  // in use at once, since the store was made
  int64_t page_bytes = 0;
  int64_t slot_bytes = 0;     // of a sequence beside its pages: raw tokens, directories, means
  int64_t raw_bytes = 0;      // the same tokens as 16-bit values
  int64_t nominal_bytes = 0;  // raw tokens; codes, exponents, means and directories of the body

  int64_t held_bytes() const { return (pages - pages_free) * page_bytes + sequences * slot_bytes; }
};

// What the last call with kOutOfPages lacked.
struct Shortage {
  int64_t pages = 0;
  int64_t bytes = 0;
};

// Memory for a sequence of so many bytes that is exported; null refuses it.
using ExportTarget = std::function<uint8_t*(size_t bytes)>;

class TKV_API KvStore final {
 public:
  // In host memory. kOutOfMemory where there is not as much as memory_bytes; kOutOfRange, naming
  // memory_bytes, where that is too little for max_sequences.
  static Result<std::unique_ptr<KvStore>> create(const StoreConfig& config);
  // In the memory of the device that is current now; tensors, significances, lse, probabilities and
  // sinks of calls lie there, ids and exported bytes in host memory. Calls enqueue on `stream`,
  // which must outlive the store. They wait only where they say so, or where what the host knows of
  // free pages does not suffice. Exists where the library was built with CUDA.
  //
  // Calls tell kOutOfPages and other refusals at once, as in host memory; kInvalidArgument where
  // the current device is another one. Kernels look at the values, and take_status() tells what
  // they found. A NaN counts as 0 and a value beyond fp16 as 0 or the largest; with TiersFormat the
  // key or value of such a token may become zeros. A significance that is negative or not finite
  // counts as unknown.
  //
  // A step (begin, append and attend of every layer, up to kMaxStepTokens tokens) can be captured
  // in a CUDA graph. Captured calls count as done; the graph's first launch executes them. Call
  // note_replay() before each later launch, and launch before any other call of the store. If the
  // launch never comes, the sequences can only be released. Apart from steps only attend can be
  // captured; in a step's capture it takes only the step's sequences, behind begin()
  // (kUnsupported). kInvalidArgument refuses a step of sequences whose layers differ (a chunk was
  // given up), and a step of CodedFormat before a layer has its means and codebooks
  // (store/ENGINE.md).
  //
  // k, v, q and out are aligned to 16 bytes. Three kinds of attend() are slower and cannot be
  // captured: more than kMaxStepTokens queries of a sequence, probabilities, and several queries of
  // which a truncation has left the first in the body. For these the store decodes the tokens. It
  // takes memory for that out of the stream's pool (kOutOfMemory) and keeps it. kUnsupported for
  // groups of more than 16 q heads, and with CodedFormat for several key_books and for slots
  // (StoreUsage::slot_bytes * max_sequences) of more than 16 GiB.
  static Result<std::unique_ptr<KvStore>> create_device(const StoreConfig& config,
                                                        GpuStream stream);
  ~KvStore();

  const StoreConfig& config() const;

  // An empty sequence. kOutOfRange when max_sequences are open.
  Result<SequenceId> add_sequence();
  // Announces `tokens` more tokens of each sequence. Every layer must have got all tokens that were
  // announced before. kOutOfRange beyond max_tokens. kOutOfPages with up to kMaxStepTokens tokens,
  // where a page that sequences of the call share with each other counts for each of them; longer
  // chunks find out about pages in append(). In host memory kOutOfRange also where a token that
  // leaves the window does not fit the format, in append() for longer chunks; it stays so until
  // truncate() takes that token away.
  Status begin(SequenceList sequences, int32_t tokens);
  // Call it once per layer after begin(). kNonFinite; kOutOfRange for a value beyond +-65504;
  // kInvalidArgument for a negative significance; kOutOfPages. Where it finds several
  // faults, it tells a value that is not finite before one beyond fp16, and that before a
  // significance.
  Status append(const LayerAppend& call);
  // Every sequence must have at least q_len tokens. kNonFinite.
  Status attend(const LayerAttend& call);
  // kOutOfRange for positions that the layer does not hold, kInvalidArgument for a layer that is
  // not there.
  Status decode_range(const LayerRange& range);

  // A captured step of `tokens` tokens will run once more, for these sequences: those that were
  // captured or others, as many and in the order of its tensors. Counts as begin() and every
  // append(). kOutOfPages where the worst case does not fit, even if the step itself would.
  // kUnsupported in host memory. A launch for another number of sequences than named here takes
  // the captured ones, and take_status() tells kInvalidArgument.
  Status note_replay(SequenceList sequences, int32_t tokens);
  // Waits for the device and gives the first failure that kernels have found since the last call;
  // of failures in several rows of a call any may be the first. kCorrupt: attention gave up a row,
  // whose body then has weight 0. Always kOk in host memory.
  Status take_status();

  // A copy that shares full pages. kOutOfPages; kOutOfRange when max_sequences are open.
  Result<SequenceId> fork(SequenceId source);
  // Forgets all tokens from position `tokens` on; a body token that stays keeps its precision, and
  // a row the means and steps that its first tokens gave it. With 0 the sequence is as a new one.
  // Layers may differ behind that position. So a chunk that only some layers have got can be given
  // up. kInvalidArgument for more tokens than there are; kOutOfPages where a shared page is cut and
  // none is free to copy it to.
  Status truncate(SequenceId sequence, int32_t tokens);
  Status release(SequenceId sequence);

  // Those that begin() has announced included.
  Result<int32_t> num_tokens(SequenceId sequence);
  // Pages, shared ones included, and the slot. On a device bytes_held() and usage() wait for the
  // stream.
  Result<int64_t> bytes_held(SequenceId sequence);
  Result<StoreUsage> usage();
  // Pages that are free for sure once every call has run: for the admission of requests. Waits for
  // nothing. In host memory, and on a device that is idle, as many as there are.
  int64_t free_pages();
  Shortage shortage() const;

  // A complete sequence as a container (tierkv/container.h), every chunk with a checksum. Equal
  // states give equal bytes. Any store takes it whose config is equal but for max_sequences,
  // max_tokens and memory_bytes, and for page_bytes with CodedFormat and ChannelFormat. A
  // store on a device keeps memory for this: on the device at most four layers and 16 MiB, in
  // pinned host memory lists of a few percent of the sequence, tables of one with max_tokens, and
  // the whole sequence where the caller's memory is not pinned. kOutOfMemory where it gets none.
  Result<std::vector<uint8_t>> export_sequence(SequenceId sequence);
  // The same into memory of the caller. A store on a device writes to pinned memory directly,
  // and to other memory by several threads. It counts as pinned where its ends are: one allocation
  // or registration must hold all of it, or the copy may fail (kCuda). Fresh memory costs more
  // than the export: use it again. kBufferTooSmall, with the bytes needed, where the target gives
  // none. A failure while the memory is filled (kCuda) leaves no sequence there.
  Status export_sequence(SequenceId sequence, const ExportTarget& target);
  // The bytes may be pinned, as above. kCorrupt, kVersion; kInvalidArgument for bytes of another
  // config or profile; kOutOfRange where max_sequences are open or the sequence is longer than
  // max_tokens; kOutOfPages; kOutOfMemory as above.
  Result<SequenceId> import_sequence(const uint8_t* bytes, size_t size);

 private:
  friend class store::Engine;
  explicit KvStore(std::unique_ptr<store::Engine> engine);
  std::unique_ptr<store::Engine> engine_;
};

}  // namespace tierkv

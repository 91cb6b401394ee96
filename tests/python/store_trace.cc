// Plays a trace of calls, read from stdin, on the C++ host store and writes what every call told
// and gave to stdout; store_trace_test.py plays the same trace through the Python package.
//
// Numbers are little-endian. A call: int32 [operation, which, layer, n], then int32 bytes and as
// many bytes of payload. `which` names the ids that calls have given, in their order; -1 is none of
// them. An answer: int32 status, int32 bytes, message, int32 bytes, result.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tierkv/store.h"

namespace {

using namespace tierkv;

constexpr int32_t kMaxTokens = 150, kKvHeads = 2, kQHeads = 4, kHeadDim = 64;

enum class Op : int32_t {
  kAdd = 0,
  kBeginPrompt,
  kAppend,
  kScorePrompt,
  kEndPrompt,
  kBeginStep,
  kAttend,
  kUpdateScores,
  kFork,
  kTruncate,
  kRelease,
  kExport,
  kImport,
  kNumTokens,
  kStats,
};

struct Call {
  Op op;
  int32_t which, layer, n;
};

KvStoreConfig config() {
  KvStoreConfig c;
  c.layout.num_layers = 2;
  c.layout.num_q_heads = kQHeads;
  c.layout.num_kv_heads = kKvHeads;
  c.layout.head_dim = kHeadDim;
  c.layout.sm_scale = 0.125;
  c.policy = {1.0, 0.3, 8, 2};
  c.page_bytes = 1920;
  c.num_pages = 90;
  c.max_sequences = 4;
  c.max_tokens = kMaxTokens;
  return c;
}

template <class T>
void put(std::vector<uint8_t>* to, const T* values, size_t count) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values);
  to->insert(to->end(), bytes, bytes + count * sizeof(T));
}

class Player {
 public:
  explicit Player(std::unique_ptr<KvStore> store) : store_(std::move(store)) {}

  Status play(const Call& call, const std::vector<uint8_t>& in, std::vector<uint8_t>* out) {
    const SequenceId id = call.which < 0 ? SequenceId{} : ids_[call.which];
    const SequenceList list = {&id, 1};
    const auto* floats = reinterpret_cast<const float*>(in.data());
    switch (call.op) {
      case Op::kAdd:
        return keep(store_->add_sequence());
      case Op::kBeginPrompt:
        return store_->begin_prompt(list, call.n);
      case Op::kAppend:
        return store_->append({list, call.layer, call.n, in.data(), in.data() + in.size() / 2});
      case Op::kScorePrompt:
        return store_->score_prompt({list, call.layer, floats, kMaxTokens});
      case Op::kEndPrompt:
        return store_->end_prompt(list);
      case Op::kBeginStep:
        return store_->begin_step(list, call.n);
      case Op::kAttend:
        return attend(call, list, in, out);
      case Op::kUpdateScores:
        return store_->update_scores({list, call.layer, call.n, floats, kMaxTokens});
      case Op::kFork:
        return keep(store_->fork(id));
      case Op::kTruncate:
        return store_->truncate(id, call.n);
      case Op::kRelease:
        return store_->release(id);
      case Op::kExport:
        return export_sequence(id, out);
      case Op::kImport:
        return keep(store_->import_sequence(in.data(), in.size()));
      case Op::kNumTokens:
        return num_tokens(id, out);
      case Op::kStats:
        return stats(out);
    }
    return Status(StatusCode::kInvalidArgument, "no such operation");
  }

 private:
  Status keep(const Result<SequenceId>& id) {
    if (id) ids_.push_back(*id);
    return id.status();
  }
  Status attend(const Call& call, SequenceList list, const std::vector<uint8_t>& q,
                std::vector<uint8_t>* result) {
    const size_t queries = q.size() / (kQHeads * kHeadDim * sizeof(uint16_t));
    std::vector<uint16_t> out(queries * kQHeads * kHeadDim);
    std::vector<float> lse(queries * kQHeads), probabilities(queries * kKvHeads * kMaxTokens);
    AttendRequest request;
    request.q_len = static_cast<int32_t>(queries);
    request.sequences = list;
    request.layer = call.layer;
    request.q = q.data();
    request.out = out.data();
    request.lse = lse.data();
    request.probabilities = probabilities.data();
    request.stride = kMaxTokens;
    request.count_query = call.n != 0;
    if (Status s = store_->attend(request); !s) return s;
    put(result, out.data(), out.size());
    put(result, lse.data(), lse.size());
    put(result, probabilities.data(), probabilities.size());
    return Status::ok();
  }
  Status export_sequence(SequenceId id, std::vector<uint8_t>* result) {
    const Result<std::vector<uint8_t>> bytes = store_->export_sequence(id);
    if (bytes) *result = *bytes;
    return bytes.status();
  }
  Status num_tokens(SequenceId id, std::vector<uint8_t>* result) {
    const Result<int32_t> n = store_->num_tokens(id);
    if (n) put(result, &*n, 1);
    return n.status();
  }
  Status stats(std::vector<uint8_t>* result) {
    const Result<StoreStats> s = store_->stats();
    if (!s) return s.status();
    const int64_t counts[] = {s->sequences,  s->pages,     s->pages_free,   s->pages_shared,
                              s->page_bytes, s->raw_bytes, s->nominal_bytes};
    put(result, s->tokens, kNumTiers);
    put(result, counts, std::size(counts));
    return Status::ok();
  }

  std::unique_ptr<KvStore> store_;
  std::vector<SequenceId> ids_;
};

bool read(void* to, size_t bytes) {
  return std::fread(to, 1, bytes, stdin) == bytes;
}
void write(const void* from, size_t bytes) {
  const auto count = static_cast<int32_t>(bytes);
  std::fwrite(&count, sizeof(count), 1, stdout);
  std::fwrite(from, 1, bytes, stdout);
}

}  // namespace

int main() {
  Result<std::unique_ptr<KvStore>> store = KvStore::create(config());
  if (!store) return 1;
  Player player(std::move(*store));
  Call call;
  while (read(&call, sizeof(call))) {
    int32_t bytes = 0;
    if (!read(&bytes, sizeof(bytes))) return 1;
    std::vector<uint8_t> payload(bytes), result;
    if (!read(payload.data(), payload.size())) return 1;
    const Status status = player.play(call, payload, &result);
    const auto code = static_cast<int32_t>(status.code());
    std::fwrite(&code, sizeof(code), 1, stdout);
    write(status.message().data(), status.message().size());
    write(result.data(), result.size());
  }
  return 0;
}

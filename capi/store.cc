// The store of many sequences, host and device.
#include "tierkv/store.h"

#include "capi/buffer.h"
#include "capi/store_config.h"
#include "capi/tier_format.h"
#include "tierkv/cold.h"

struct tkv_store {
  std::unique_ptr<tierkv::KvStore> store;
  tierkv::DeviceKvStore* device;  // store, where it is one
};

namespace tierkv::capi {
namespace {

// The sequences of a call. What cannot be read becomes a list that the store refuses.
class Sequences {
 public:
  Sequences(const KvStore& store, const tkv_sequence_id* ids, int32_t count) : count_(count) {
    if (ids == nullptr || count < 1 || count > store.config().max_sequences) return;
    ids_.reserve(count);
    for (int32_t i = 0; i < count; ++i) ids_.push_back(id_of(ids[i]));
  }
  SequenceList list() const { return {ids_.empty() ? nullptr : ids_.data(), count_}; }

 private:
  std::vector<SequenceId> ids_;
  int32_t count_;
};

Status create(const tkv_store_config* config, tkv_store** out) {
  KvStoreConfig c;
  if (out == nullptr) return invalid("store is null");
  if (Status s = read_store_config(config, &c); !s) return s;
  Result<std::unique_ptr<KvStore>> store = KvStore::create(c);
  if (store) *out = new tkv_store{std::move(*store), nullptr};
  return store.status();
}

Status create_device(const tkv_store_config* config, void* stream, tkv_store** out) {
  KvStoreConfig c;
  if (out == nullptr) return invalid("store is null");
  if (Status s = read_store_config(config, &c); !s) return s;
  Result<std::unique_ptr<DeviceKvStore>> store =
      create_device_store(c, static_cast<GpuStream>(stream));
  if (!store) return store.status();
  DeviceKvStore* device = store->get();
  *out = new tkv_store{std::move(*store), device};
  return Status::ok();
}

Status append(KvStore& store, const tkv_append_call* call) {
  tkv_append_call c;
  if (Status s = read_struct(call, "call", &c); !s) return s;
  const Sequences sequences(store, c.sequences, c.num_sequences);
  return store.append({sequences.list(), c.layer, c.tokens, c.k, c.v});
}

Status score_prompt(KvStore& store, const tkv_prompt_scores* scores) {
  tkv_prompt_scores p;
  if (Status s = read_struct(scores, "scores", &p); !s) return s;
  const Sequences sequences(store, p.sequences, p.num_sequences);
  return store.score_prompt({sequences.list(), p.layer, p.significance, p.stride});
}

Status update_scores(KvStore& store, const tkv_score_update* update) {
  tkv_score_update u;
  if (Status s = read_struct(update, "update", &u); !s) return s;
  const Sequences sequences(store, u.sequences, u.num_sequences);
  return store.update_scores({sequences.list(), u.layer, u.back, u.probabilities, u.stride});
}

Status attend(KvStore& store, const tkv_attend_request* request) {
  tkv_attend_request r;
  if (Status s = read_struct(request, "request", &r); !s) return s;
  const Sequences sequences(store, r.sequences, r.num_sequences);
  AttendRequest out;
  out.sequences = sequences.list();
  out.layer = r.layer;
  out.q = r.q;
  out.out = r.out;
  out.lse = r.lse;
  out.probabilities = r.probabilities;
  out.stride = r.stride;
  out.scratch = r.scratch;
  out.scratch_bytes = r.scratch_bytes;
  if (r.q_len != 0) out.q_len = r.q_len;
  out.sinks = r.sinks;
  if (Status s = read_flag(r.count_query, "count_query", &out.count_query); !s) return s;
  if (Status s = read_dtype(r.dtype, &out.dtype); !s) return s;
  return store.attend(out);
}

// What the scratch is for.
struct ScratchUse {
  int32_t num_sequences;
  int32_t tokens;
  int32_t q_len;
};

Status scratch_bytes(const tkv_store* store, const ScratchUse& use, size_t* bytes) {
  if (store == nullptr || bytes == nullptr) return invalid("store or bytes is null");
  const KvStoreConfig& config = store->store->config();
  if (use.num_sequences < 1 || use.num_sequences > config.max_sequences) {
    return invalid("num_sequences must be 1 to max_sequences");
  }
  if (use.tokens < 1 || use.tokens > config.max_tokens) {
    return invalid("tokens must be 1 to max_tokens");
  }
  if (use.q_len < 1 || use.q_len > kMaxQueryTokens) return invalid("q_len must be 1 to 8");
  *bytes = store->device == nullptr
               ? 0
               : count_scratch_bytes(config, use.num_sequences, use.tokens, use.q_len);
  return Status::ok();
}

Status get_stats(KvStore& store, tkv_store_stats* out) {
  tkv_store_stats c;
  if (Status s = read_struct(out, "stats", &c); !s) return s;
  const Result<StoreStats> stats = store.stats();
  if (!stats) return stats.status();
  c.window_tokens = stats->tokens[static_cast<int32_t>(Tier::kWindow)];
  c.high_tokens = stats->tokens[static_cast<int32_t>(Tier::kHigh)];
  c.low_tokens = stats->tokens[static_cast<int32_t>(Tier::kLow)];
  c.pruned_tokens = stats->tokens[static_cast<int32_t>(Tier::kPruned)];
  c.sequences = stats->sequences;
  c.pages = stats->pages;
  c.pages_free = stats->pages_free;
  c.pages_shared = stats->pages_shared;
  c.page_bytes = stats->page_bytes;
  c.raw_bytes = stats->raw_bytes;
  c.nominal_bytes = stats->nominal_bytes;
  write_struct(c, out);
  return Status::ok();
}

Status get_info(const tkv_store* store, tkv_store_info* out) {
  tkv_store_info info;
  if (store == nullptr) return invalid("store is null");
  if (Status s = read_struct(out, "info", &info); !s) return s;
  info.page_bytes = store->store->page_bytes();
  info.on_device = store->device != nullptr ? 1 : 0;
  write_struct(info, out);
  return Status::ok();
}

Status import_sequence(KvStore& store, const uint8_t* bytes, size_t size, tkv_sequence_id* out) {
  if (bytes == nullptr || out == nullptr) return invalid("bytes or sequence is null");
  const Result<SequenceId> id = store.import_sequence(bytes, size);
  if (id) *out = number_of(*id);
  return id.status();
}

Status save_sequence(KvStore& store, tkv_sequence_id sequence, const ColdOptions& given,
                     tkv_buffer* out) {
  ColdOptions options = given;
  if (Status s = read_threads(given.threads, &options.threads); !s) return s;
  const Result<std::vector<uint8_t>> bytes = tierkv::save_sequence(store, id_of(sequence), options);
  return bytes ? fill(*bytes, out) : bytes.status();
}

Status load_sequence(KvStore& store, const uint8_t* bytes, size_t size, int32_t threads,
                     tkv_sequence_id* out) {
  if (bytes == nullptr || out == nullptr) return invalid("bytes or sequence is null");
  if (Status s = read_threads(threads, &threads); !s) return s;
  const Result<SequenceId> id = tierkv::load_sequence(store, bytes, size, threads);
  if (id) *out = number_of(*id);
  return id.status();
}

// body(KvStore&), guarded.
template <class Body>
tkv_status on_store(tkv_store* store, tkv_error* error, const Body& body) {
  return guarded(error, [&]() -> Status {
    return store == nullptr ? invalid("store is null") : body(*store->store);
  });
}

}  // namespace
}  // namespace tierkv::capi

namespace capi = tierkv::capi;
using tierkv::KvStore;
using tierkv::Result;
using tierkv::SequenceId;
using tierkv::Status;

extern "C" {

tkv_status tkv_store_create(const tkv_store_config* config, tkv_store** store, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::create(config, store); });
}

tkv_status tkv_store_create_device(const tkv_store_config* config, void* stream, tkv_store** store,
                                   tkv_error* error) {
  return capi::guarded(error, [&] { return capi::create_device(config, stream, store); });
}

void tkv_store_destroy(tkv_store* store) {
  delete store;
}

tkv_status tkv_store_get_info(const tkv_store* store, tkv_store_info* info, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::get_info(store, info); });
}

tkv_status tkv_store_add_sequence(tkv_store* store, tkv_sequence_id* sequence, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) -> Status {
    if (sequence == nullptr) return capi::invalid("sequence is null");
    const Result<SequenceId> id = s.add_sequence();
    if (id) *sequence = tierkv::number_of(*id);
    return id.status();
  });
}

tkv_status tkv_store_begin_prompt(tkv_store* store, const tkv_sequence_id* sequences,
                                  int32_t num_sequences, int32_t tokens, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    return s.begin_prompt(capi::Sequences(s, sequences, num_sequences).list(), tokens);
  });
}

tkv_status tkv_store_end_prompt(tkv_store* store, const tkv_sequence_id* sequences,
                                int32_t num_sequences, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    return s.end_prompt(capi::Sequences(s, sequences, num_sequences).list());
  });
}

tkv_status tkv_store_begin_step(tkv_store* store, const tkv_sequence_id* sequences,
                                int32_t num_sequences, int32_t tokens, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    return s.begin_step(capi::Sequences(s, sequences, num_sequences).list(), tokens);
  });
}

tkv_status tkv_store_append(tkv_store* store, const tkv_append_call* call, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) { return capi::append(s, call); });
}

tkv_status tkv_store_score_prompt(tkv_store* store, const tkv_prompt_scores* scores,
                                  tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) { return capi::score_prompt(s, scores); });
}

tkv_status tkv_store_attend(tkv_store* store, const tkv_attend_request* request, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) { return capi::attend(s, request); });
}

tkv_status tkv_store_count_scratch_bytes(const tkv_store* store, int32_t num_sequences,
                                         int32_t tokens, int32_t q_len, size_t* bytes,
                                         tkv_error* error) {
  return capi::guarded(error, [&] {
    return capi::scratch_bytes(store, {num_sequences, tokens, q_len}, bytes);
  });
}

tkv_status tkv_store_update_scores(tkv_store* store, const tkv_score_update* update,
                                   tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) { return capi::update_scores(s, update); });
}

tkv_status tkv_store_fork(tkv_store* store, tkv_sequence_id source, tkv_sequence_id* copy,
                          tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) -> Status {
    if (copy == nullptr) return capi::invalid("copy is null");
    const Result<SequenceId> id = s.fork(tierkv::id_of(source));
    if (id) *copy = tierkv::number_of(*id);
    return id.status();
  });
}

tkv_status tkv_store_truncate(tkv_store* store, tkv_sequence_id sequence, int32_t tokens,
                              tkv_error* error) {
  return capi::on_store(store, error,
                        [&](KvStore& s) { return s.truncate(tierkv::id_of(sequence), tokens); });
}

tkv_status tkv_store_release(tkv_store* store, tkv_sequence_id sequence, tkv_error* error) {
  return capi::on_store(store, error,
                        [&](KvStore& s) { return s.release(tierkv::id_of(sequence)); });
}

tkv_status tkv_store_num_tokens(tkv_store* store, tkv_sequence_id sequence, int32_t* tokens,
                                tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) -> Status {
    if (tokens == nullptr) return capi::invalid("tokens is null");
    const Result<int32_t> n = s.num_tokens(tierkv::id_of(sequence));
    if (n) *tokens = *n;
    return n.status();
  });
}

tkv_status tkv_store_get_stats(tkv_store* store, tkv_store_stats* stats, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) { return capi::get_stats(s, stats); });
}

tkv_status tkv_store_export_sequence(tkv_store* store, tkv_sequence_id sequence, tkv_buffer* out,
                                     tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) -> Status {
    const Result<std::vector<uint8_t>> bytes = s.export_sequence(tierkv::id_of(sequence));
    return bytes ? capi::fill(*bytes, out) : bytes.status();
  });
}

tkv_status tkv_store_import_sequence(tkv_store* store, const uint8_t* bytes, size_t size,
                                     tkv_sequence_id* sequence, tkv_error* error) {
  return capi::on_store(
      store, error, [&](KvStore& s) { return capi::import_sequence(s, bytes, size, sequence); });
}

tkv_status tkv_store_save_sequence(tkv_store* store, tkv_sequence_id sequence,
                                   int32_t entropy_coded, int32_t threads, tkv_buffer* out,
                                   tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) -> Status {
    bool is_coded = false;
    if (Status t = capi::read_flag(entropy_coded, "entropy_coded", &is_coded); !t) return t;
    return capi::save_sequence(s, sequence, {is_coded, threads}, out);
  });
}

tkv_status tkv_store_load_sequence(tkv_store* store, const uint8_t* bytes, size_t size,
                                   int32_t threads, tkv_sequence_id* sequence, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    return capi::load_sequence(s, bytes, size, threads, sequence);
  });
}

tkv_status tkv_store_take_status(tkv_store* store, tkv_error* error) {
  return capi::on_store(store, error, [](KvStore& s) { return s.take_status(); });
}

tkv_status tkv_store_note_replay(tkv_store* store, const tkv_sequence_id* sequences,
                                 int32_t num_sequences, int32_t tokens, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) -> Status {
    if (store->device == nullptr) {
      return Status(tierkv::StatusCode::kUnsupported, "a host store replays nothing");
    }
    return store->device->note_replay(capi::Sequences(s, sequences, num_sequences).list(), tokens);
  });
}

}  // extern "C"

// SPDX-License-Identifier: Apache-2.0
// The KV store.
#include "tierkv/kv_store.h"
#include "capi/buffer.h"
#include "capi/profile_data.h"
#include "capi/tier_format.h"
#include "tierkv/profile.h"

struct tkv_kv_store {
  std::unique_ptr<tierkv::KvStore> store;
};

namespace tierkv::capi {
namespace {

Status read_coded(const tkv_coded_format* in, BodyFormat* out) {
  tkv_coded_format f;
  if (Status s = read_struct(in, "coded", &f); !s) return s;
  CodedFormat coded;
  coded.k = f.k;
  coded.v = f.v;
  if (f.max_length != 0) coded.max_length = f.max_length;
  if (f.streams_per_lane != 0) coded.streams_per_lane = f.streams_per_lane;
  if (f.key_books != 0) coded.key_books = f.key_books;
  *out = coded;
  return Status::ok();
}

Status read_tiers(const tkv_tiers_format* in, BodyFormat* out) {
  tkv_tiers_format f;
  if (Status s = read_struct(in, "tiers", &f); !s) return s;
  if (f.num_classes < 0 || f.num_classes > 4) return invalid("tiers: num_classes must be 0 to 4");
  if (f.num_classes > 0 && f.classes == nullptr) return invalid("tiers: classes is null");
  TiersFormat tiers;
  if (f.num_classes > 0) tiers.classes.resize(f.num_classes);
  for (int32_t i = 0; i < f.num_classes; ++i) {
    tkv_tier_class c;
    TierClass& t = tiers.classes[i];
    if (Status s = read_struct(f.classes[i], "tier class", &c); !s) return s;
    if (Status s = read_tier_format(c.high, "high", &t.high); !s) return s;
    if (Status s = read_tier_format(c.low, "low", &t.low); !s) return s;
    if (c.alpha_high != 0) t.alpha_high = c.alpha_high;
    t.alpha_low = c.alpha_low;
    t.share = c.share;
  }
  bool plain = false;
  if (Status s = read_flag(f.plain_keys, "tiers: plain_keys", &plain); !s) return s;
  tiers.rotate_keys = !plain;
  if (Status s = read_flag(f.plain_values, "tiers: plain_values", &plain); !s) return s;
  tiers.rotate_values = !plain;
  *out = tiers;
  return Status::ok();
}

Status read_channel(const tkv_channel_config* in, BodyFormat* out) {
  tkv_channel_config f;
  if (Status s = read_struct(in, "channel", &f); !s) return s;
  ChannelFormat channel;
  if (f.k_bits != 0) channel.k_bits = f.k_bits;
  if (f.v_bits != 0) channel.v_bits = f.v_bits;
  if (f.block_tokens != 0) channel.block_tokens = f.block_tokens;
  *out = channel;
  return Status::ok();
}

Status read_format(const tkv_kv_config& c, BodyFormat* out) {
  if ((c.coded != nullptr) + (c.tiers != nullptr) + (c.channel != nullptr) > 1) {
    return invalid("several of coded, tiers and channel are given");
  }
  if (c.coded != nullptr) return read_coded(c.coded, out);
  if (c.tiers != nullptr) return read_tiers(c.tiers, out);
  if (c.channel != nullptr) return read_channel(c.channel, out);
  return Status::ok();
}

Status read_config(const tkv_kv_config* in, StoreConfig* out) {
  tkv_kv_config c;
  if (Status s = read_struct(in, "config", &c); !s) return s;
  out->layout.num_layers = c.num_layers;
  out->layout.num_q_heads = c.num_q_heads;
  out->layout.num_kv_heads = c.num_kv_heads;
  out->layout.head_dim = c.head_dim;
  out->layout.sm_scale = read_sm_scale(c.sm_scale, c.head_dim);
  if (Status s = read_dtype(c.dtype, &out->layout.dtype); !s) return s;
  if (Status s = out->layout.validate(); !s) return s;
  if (c.rope != nullptr) {
    tkv_rope r;
    if (Status s = read_struct(c.rope, "rope", &r); !s) return s;
    if (Status s = read_rope(r, "rope: ", out->layout, &out->rope); !s) return s;
  }
  if (Status s = read_format(c, &out->format); !s) return s;
  if (c.profile != nullptr) {
    Result<std::shared_ptr<const Profile>> profile = make_profile(*c.profile);
    if (!profile) return profile.status();
    out->profile = std::move(*profile);
  }
  if (c.num_raw_layers < 0 || c.num_raw_layers > c.num_layers) {
    return invalid("num_raw_layers must be 0 to num_layers");
  }
  if (c.num_raw_layers > 0 && c.raw_layers == nullptr) return invalid("raw_layers is null");
  out->raw_layers.assign(c.raw_layers, c.raw_layers + c.num_raw_layers);
  if (c.sink_tokens != 0) out->sink_tokens = c.sink_tokens == -1 ? 0 : c.sink_tokens;
  if (c.window_tokens != 0) out->window_tokens = c.window_tokens;
  out->max_sequences = c.max_sequences;
  out->max_tokens = c.max_tokens;
  out->memory_bytes = c.memory_bytes;
  out->page_bytes = c.page_bytes;
  return Status::ok();
}

// make(StoreConfig): a store.
template <class Make>
Status create(const tkv_kv_config* config, tkv_kv_store** out, const Make& make) {
  StoreConfig c;
  if (out == nullptr) return invalid("store is null");
  if (Status s = read_config(config, &c); !s) return s;
  Result<std::unique_ptr<KvStore>> store = make(c);
  if (store) *out = new tkv_kv_store{std::move(*store)};
  return store.status();
}

Status fit(const tkv_kv_config* config, int64_t* typical, int64_t* least) {
  StoreConfig c;
  if (typical == nullptr || least == nullptr) return invalid("typical or least is null");
  if (Status s = read_config(config, &c); !s) return s;
  const Result<TokenCapacity> capacity = tokens_that_fit(c);
  if (!capacity) return capacity.status();
  *typical = capacity->typical;
  *least = capacity->least;
  return Status::ok();
}

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

Status append(KvStore& store, const tkv_kv_append_call* call) {
  tkv_kv_append_call c;
  if (Status s = read_struct(call, "call", &c); !s) return s;
  const Sequences sequences(store, c.sequences, c.num_sequences);
  return store.append({sequences.list(), c.layer, c.tokens, c.k, c.v, c.significance, c.stride, c.q,
                       c.query_stride == 0 ? 1 : c.query_stride});
}

Status attend(KvStore& store, const tkv_kv_attend_call* call) {
  tkv_kv_attend_call c;
  if (Status s = read_struct(call, "call", &c); !s) return s;
  const Sequences sequences(store, c.sequences, c.num_sequences);
  LayerAttend out;
  out.sequences = sequences.list();
  out.layer = c.layer;
  if (c.q_len != 0) out.q_len = c.q_len;
  out.q = c.q;
  out.out = c.out;
  out.lse = c.lse;
  out.probabilities = c.probabilities;
  out.stride = c.stride;
  out.sinks = c.sinks;
  if (Status s = read_flag(c.count_query, "count_query", &out.count_query); !s) return s;
  if (Status s = read_dtype(c.dtype, &out.dtype); !s) return s;
  return store.attend(out);
}

Status decode_range(KvStore& store, const tkv_kv_range* range) {
  tkv_kv_range r;
  if (Status s = read_struct(range, "range", &r); !s) return s;
  LayerRange out;
  out.sequence = id_of(r.sequence);
  out.layer = r.layer;
  out.first = r.first;
  out.end = r.end;
  if (Status s = read_dtype(r.dtype, &out.dtype); !s) return s;
  out.k = r.k;
  out.v = r.v;
  return store.decode_range(out);
}

Status get_usage(KvStore& store, tkv_kv_usage* out) {
  tkv_kv_usage u;
  if (Status s = read_struct(out, "usage", &u); !s) return s;
  const Result<StoreUsage> usage = store.usage();
  if (!usage) return usage.status();
  u.sequences = usage->sequences;
  u.sink_tokens = usage->sink_tokens;
  u.body_tokens = usage->body_tokens;
  u.ring_tokens = usage->ring_tokens;
  u.pages = usage->pages;
  u.pages_free = usage->pages_free;
  u.pages_shared = usage->pages_shared;
  u.most_pages = usage->most_pages;
  u.page_bytes = usage->page_bytes;
  u.slot_bytes = usage->slot_bytes;
  u.raw_bytes = usage->raw_bytes;
  u.nominal_bytes = usage->nominal_bytes;
  u.missing_pages = store.shortage().pages;
  write_struct(u, out);
  return Status::ok();
}

// body(KvStore&), guarded.
template <class Body>
tkv_status on_store(tkv_kv_store* store, tkv_error* error, const Body& body) {
  return guarded(error, [&]() -> Status {
    return store == nullptr ? invalid("store is null") : body(*store->store);
  });
}

// What a call found, where the caller wants it.
template <class T, class Out, class Convert>
Status give(const Result<T>& found, Out* out, const Convert& convert) {
  if (found) *out = convert(*found);
  return found.status();
}

}  // namespace
}  // namespace tierkv::capi

namespace capi = tierkv::capi;
using tierkv::KvStore;

extern "C" {

tkv_status tkv_kv_create(const tkv_kv_config* config, tkv_kv_store** store, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::create(config, store, KvStore::create); });
}

tkv_status tkv_kv_create_device(const tkv_kv_config* config, void* stream, tkv_kv_store** store,
                                tkv_error* error) {
  return capi::guarded(error, [&] {
    return capi::create(config, store, [&](const tierkv::StoreConfig& c) {
      return KvStore::create_device(c, static_cast<tierkv::GpuStream>(stream));
    });
  });
}

void tkv_kv_destroy(tkv_kv_store* store) {
  delete store;
}

tkv_status tkv_kv_tokens_that_fit(const tkv_kv_config* config, int64_t* typical, int64_t* least,
                                  tkv_error* error) {
  return capi::guarded(error, [&] { return capi::fit(config, typical, least); });
}

tkv_status tkv_kv_add_sequence(tkv_kv_store* store, tkv_sequence_id* sequence, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    if (sequence == nullptr) return capi::invalid("sequence is null");
    return capi::give(s.add_sequence(), sequence, tierkv::number_of);
  });
}

tkv_status tkv_kv_begin(tkv_kv_store* store, const tkv_sequence_id* sequences,
                        int32_t num_sequences, int32_t tokens, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    return s.begin(capi::Sequences(s, sequences, num_sequences).list(), tokens);
  });
}

tkv_status tkv_kv_append(tkv_kv_store* store, const tkv_kv_append_call* call, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) { return capi::append(s, call); });
}

tkv_status tkv_kv_attend(tkv_kv_store* store, const tkv_kv_attend_call* call, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) { return capi::attend(s, call); });
}

tkv_status tkv_kv_note_replay(tkv_kv_store* store, const tkv_sequence_id* sequences,
                              int32_t num_sequences, int32_t tokens, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    return s.note_replay(capi::Sequences(s, sequences, num_sequences).list(), tokens);
  });
}

tkv_status tkv_kv_take_status(tkv_kv_store* store, tkv_error* error) {
  return capi::on_store(store, error, [](KvStore& s) { return s.take_status(); });
}

tkv_status tkv_kv_decode_range(tkv_kv_store* store, const tkv_kv_range* range, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) { return capi::decode_range(s, range); });
}

tkv_status tkv_kv_fork(tkv_kv_store* store, tkv_sequence_id source, tkv_sequence_id* copy,
                       tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    if (copy == nullptr) return capi::invalid("copy is null");
    return capi::give(s.fork(tierkv::id_of(source)), copy, tierkv::number_of);
  });
}

tkv_status tkv_kv_truncate(tkv_kv_store* store, tkv_sequence_id sequence, int32_t tokens,
                           tkv_error* error) {
  return capi::on_store(store, error,
                        [&](KvStore& s) { return s.truncate(tierkv::id_of(sequence), tokens); });
}

tkv_status tkv_kv_release(tkv_kv_store* store, tkv_sequence_id sequence, tkv_error* error) {
  return capi::on_store(store, error,
                        [&](KvStore& s) { return s.release(tierkv::id_of(sequence)); });
}

tkv_status tkv_kv_num_tokens(tkv_kv_store* store, tkv_sequence_id sequence, int32_t* tokens,
                             tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    if (tokens == nullptr) return capi::invalid("tokens is null");
    return capi::give(s.num_tokens(tierkv::id_of(sequence)), tokens, [](int32_t n) { return n; });
  });
}

tkv_status tkv_kv_free_pages(tkv_kv_store* store, int64_t* pages, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    if (pages == nullptr) return capi::invalid("pages is null");
    *pages = s.free_pages();
    return tierkv::Status::ok();
  });
}

tkv_status tkv_kv_bytes_held(tkv_kv_store* store, tkv_sequence_id sequence, int64_t* bytes,
                             tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    if (bytes == nullptr) return capi::invalid("bytes is null");
    return capi::give(s.bytes_held(tierkv::id_of(sequence)), bytes, [](int64_t n) { return n; });
  });
}

tkv_status tkv_kv_get_usage(tkv_kv_store* store, tkv_kv_usage* usage, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) { return capi::get_usage(s, usage); });
}

tkv_status tkv_kv_export_sequence(tkv_kv_store* store, tkv_sequence_id sequence, tkv_buffer* out,
                                  tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    tkv_buffer b;
    tierkv::Status status = capi::read_buffer(out, &b);
    if (!status) return status;
    return s.export_sequence(tierkv::id_of(sequence),
                             [&](size_t bytes) { return capi::room(bytes, &b, out); });
  });
}

tkv_status tkv_kv_import_sequence(tkv_kv_store* store, const uint8_t* bytes, size_t size,
                                  tkv_sequence_id* sequence, tkv_error* error) {
  return capi::on_store(store, error, [&](KvStore& s) {
    if (bytes == nullptr || sequence == nullptr) return capi::invalid("bytes or sequence is null");
    return capi::give(s.import_sequence(bytes, size), sequence, tierkv::number_of);
  });
}

}  // extern "C"

// SPDX-License-Identifier: Apache-2.0
#include "store/engine/engine.h"

#include <utility>

#include "codec/policy/profile.h"
#include "store/place/host_place.h"
#include "store/rows/row_format.h"
#include "store/transfer/sequence_chunks.h"

namespace tierkv {

std::unique_ptr<KvStore> store::Engine::make(const StoreConfig& config,
                                             std::unique_ptr<Place> place) {
  return std::unique_ptr<KvStore>(new KvStore(std::make_unique<Engine>(config, std::move(place))));
}

// What keys are rotated by belongs to what a sequence is, wherever it comes from.
StoreConfig store::resolve(const StoreConfig& config) {
  StoreConfig resolved = config;
  if (config.rope.empty() && config.profile != nullptr) resolved.rope = config.profile->rope;
  return resolved;
}

Result<std::unique_ptr<KvStore>> KvStore::create(const StoreConfig& config) {
  if (Status s = config.validate(); !s) return s;
  const StoreConfig resolved = store::resolve(config);
  Result<std::unique_ptr<store::RowFormat>> format = store::make_row_format(resolved);
  if (!format) return format.status();
  Result<std::unique_ptr<store::HostPlace>> place =
      store::HostPlace::make(resolved, std::move(*format));
  if (!place) return place.status();
  return store::Engine::make(resolved, std::move(*place));
}

KvStore::KvStore(std::unique_ptr<store::Engine> engine) : engine_(std::move(engine)) {}
KvStore::~KvStore() = default;

const StoreConfig& KvStore::config() const {
  return engine_->config;
}
Status KvStore::take_status() {
  return engine_->place->take_status();
}
Shortage KvStore::shortage() const {
  return engine_->place->shortage();
}

Result<SequenceId> KvStore::add_sequence() {
  const Result<int32_t> slot = engine_->sequences.free_slot();
  if (!slot) return slot.status();
  if (Status s = engine_->place->open(*slot); !s) return s;
  return engine_->sequences.claim(*slot);
}

// A step is compressed here for all layers at once, a longer chunk layer by layer in append().
Status KvStore::begin(SequenceList sequences, int32_t tokens) {
  if (Status s = engine_->sequences.admit_begin(sequences, tokens, &engine_->moves); !s) return s;
  if (tokens <= kMaxStepTokens) {
    if (Status s = engine_->place->compress(engine_->moves, tokens); !s) return s;
    engine_->sequences.commit(engine_->moves);
  }
  engine_->sequences.promise(engine_->moves, tokens);
  return Status::ok();
}

Status KvStore::append(const LayerAppend& call) {
  if (Status s = engine_->sequences.admit_append(call, &engine_->moves); !s) return s;
  if (Status s = engine_->place->append(call, engine_->moves); !s) return s;
  engine_->sequences.commit(engine_->moves);
  return Status::ok();
}

Status KvStore::attend(const LayerAttend& call) {
  if (Status s = engine_->sequences.admit_attend(call, &engine_->moves); !s) return s;
  return engine_->place->attend(call, engine_->moves);
}

Status KvStore::decode_range(const LayerRange& range) {
  const Result<store::LayerMove> move = engine_->sequences.admit_range(range);
  return move ? engine_->place->decode(range, *move) : move.status();
}

Status KvStore::note_replay(SequenceList sequences, int32_t tokens) {
  if (tokens > kMaxStepTokens) {
    return Status(StatusCode::kInvalidArgument, "tokens: a step has at most kMaxStepTokens");
  }
  if (Status s = engine_->sequences.admit_begin(sequences, tokens, &engine_->moves); !s) return s;
  if (Status s = engine_->place->note_replay(engine_->moves, tokens); !s) return s;
  for (store::LayerMove& move : engine_->moves) move.to.tokens += tokens;
  engine_->sequences.commit(engine_->moves);
  engine_->sequences.promise(engine_->moves, tokens);
  return Status::ok();
}

Result<SequenceId> KvStore::fork(SequenceId source) {
  const Result<int32_t> from = engine_->sequences.complete_slot_of(source);
  if (!from) return from.status();
  const Result<int32_t> to = engine_->sequences.free_slot();
  if (!to) return to.status();
  store::LayerMoves layers = engine_->sequences.layers_of(*from);
  for (store::LayerMove& move : layers) move.slot = *to;
  if (Status s = engine_->place->fork(*from, *to, layers); !s) return s;
  const SequenceId id = engine_->sequences.claim(*to);
  engine_->sequences.commit(layers);
  engine_->sequences.set_tokens(*to, engine_->sequences.tokens(*from));
  return id;
}

Status KvStore::truncate(SequenceId sequence, int32_t tokens) {
  if (Status s = engine_->sequences.admit_truncate(sequence, tokens, &engine_->moves); !s) return s;
  if (tokens > 0) {
    if (Status s = engine_->place->truncate(engine_->moves); !s) return s;
  } else {  // what its tokens have fixed goes as well
    if (Status s = engine_->place->release(sequence.slot); !s) return s;
    if (Status s = engine_->place->open(sequence.slot); !s) return s;
  }
  engine_->sequences.commit(engine_->moves);
  engine_->sequences.set_tokens(sequence.slot, tokens);
  return Status::ok();
}

Status KvStore::release(SequenceId sequence) {
  const Result<int32_t> slot = engine_->sequences.slot_of(sequence);
  if (!slot) return slot.status();
  if (Status s = engine_->place->release(*slot); !s) return s;
  engine_->sequences.release(*slot);
  return Status::ok();
}

Result<int32_t> KvStore::num_tokens(SequenceId sequence) {
  const Result<int32_t> slot = engine_->sequences.slot_of(sequence);
  if (!slot) return slot.status();
  return engine_->sequences.tokens(*slot);
}

Result<int64_t> KvStore::bytes_held(SequenceId sequence) {
  const Result<int32_t> slot = engine_->sequences.slot_of(sequence);
  if (!slot) return slot.status();
  return engine_->place->bytes_held(*slot);
}

int64_t KvStore::free_pages() {
  return engine_->place->free_pages();
}

Result<StoreUsage> KvStore::usage() {
  StoreUsage usage;
  const store::LayerMoves layers = engine_->sequences.all_layers();
  if (Status s = engine_->place->add_usage(layers, &usage); !s) return s;
  usage.sequences = engine_->sequences.open_count();
  const int64_t heads = engine_->config.layout.num_kv_heads;
  for (const store::LayerMove& move : layers) {
    usage.sink_tokens += heads * store::sink_count(engine_->place->laws(), move.from);
    usage.body_tokens += heads * store::body_count(engine_->place->laws(), move.from);
    usage.ring_tokens += heads * store::ring_count(engine_->place->laws(), move.from);
  }
  const int64_t token_bytes = int64_t{4} * engine_->config.layout.head_dim;
  const int64_t raw = usage.sink_tokens + usage.ring_tokens;
  usage.raw_bytes = (raw + usage.body_tokens) * token_bytes;
  usage.nominal_bytes += raw * token_bytes;
  return usage;
}

Result<std::vector<uint8_t>> KvStore::export_sequence(SequenceId sequence) {
  std::vector<uint8_t> bytes;
  Status s = export_sequence(sequence, [&](size_t size) {
    bytes.resize(size);
    return bytes.data();
  });
  if (!s) return s;
  return bytes;
}

Status KvStore::export_sequence(SequenceId sequence, const ExportTarget& target) {
  if (!target) return Status(StatusCode::kInvalidArgument, "target is empty");
  const Result<int32_t> slot = engine_->sequences.complete_slot_of(sequence);
  if (!slot) return slot.status();
  const Result<store::SequenceSource> source =
      engine_->place->export_parts(engine_->sequences.layers_of(*slot));
  if (!source) return source.status();
  return store::write_sequence(engine_->config, engine_->identity, *source, target);
}

Result<SequenceId> KvStore::import_sequence(const uint8_t* bytes, size_t size) {
  if (bytes == nullptr) return Status(StatusCode::kInvalidArgument, "bytes is null");
  const Result<store::SequenceParts> parts =
      store::read_sequence(engine_->config, engine_->place->laws(), engine_->identity, bytes, size);
  if (!parts) return parts.status();
  const Result<int32_t> slot = engine_->sequences.free_slot();
  if (!slot) return slot.status();
  store::LayerMoves layers = engine_->sequences.layers_of(*slot);
  for (store::LayerMove& move : layers) move.to = parts->layers[move.layer];
  if (Status s = engine_->place->import_parts(*slot, *parts); !s) return s;
  const SequenceId id = engine_->sequences.claim(*slot);
  engine_->sequences.commit(layers);
  engine_->sequences.set_tokens(*slot, parts->layers[0].tokens);
  return id;
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "store/engine/engine.h"

#include <utility>

#include "store/rows/row_format.h"
#include "store/transfer/sequence_chunks.h"

namespace tierkv::store {

Engine::Engine(const StoreConfig& config, const TokenLaws& laws)
    : config_(config), laws_(laws), sequences_(config_, laws) {}

Result<SequenceId> Engine::add_sequence() {
  const Result<int32_t> slot = sequences_.free_slot();
  if (!slot) return slot.status();
  if (Status s = place_->open(*slot); !s) return s;
  return sequences_.claim(*slot, {});
}

// A step is compressed here for all layers at once, a longer chunk layer by layer in append().
Status Engine::begin(SequenceList sequences, int32_t tokens) {
  if (Status s = sequences_.admit_begin(sequences, tokens, &moves_); !s) return s;
  if (tokens <= kMaxStepTokens) {
    if (Status s = place_->compress(moves_, tokens); !s) return s;
    sequences_.commit(moves_);
  }
  sequences_.promise(moves_, tokens);
  return Status::ok();
}

Status Engine::append(const LayerAppend& call) {
  if (Status s = sequences_.admit_append(call, &moves_); !s) return s;
  if (Status s = place_->append(call, moves_); !s) return s;
  sequences_.commit(moves_);
  return Status::ok();
}

Status Engine::attend(const LayerAttend& call) {
  if (Status s = sequences_.admit_attend(call, &moves_); !s) return s;
  return place_->attend(call, moves_);
}

Status Engine::decode_range(const LayerRange& range) {
  const Result<LayerMove> move = sequences_.admit_range(range);
  return move ? place_->decode(range, *move) : move.status();
}

Status Engine::note_replay(SequenceList sequences, int32_t tokens) {
  if (tokens > kMaxStepTokens) {
    return Status(StatusCode::kInvalidArgument, "tokens: a step has at most kMaxStepTokens");
  }
  if (Status s = sequences_.admit_begin(sequences, tokens, &moves_); !s) return s;
  if (Status s = place_->note_replay(moves_, tokens); !s) return s;
  for (LayerMove& move : moves_) move.to.tokens += tokens;
  sequences_.commit(moves_);
  sequences_.promise(moves_, tokens);
  return Status::ok();
}

Result<SequenceId> Engine::fork(SequenceId source) {
  const Result<int32_t> from = sequences_.complete_slot_of(source);
  if (!from) return from.status();
  const Result<int32_t> to = sequences_.free_slot();
  if (!to) return to.status();
  LayerMoves layers = sequences_.layers_of(*from);
  if (Status s = place_->fork(*from, *to, layers); !s) return s;
  const SequenceId id = sequences_.claim(*to, {});
  for (LayerMove& move : layers) move.slot = *to;
  sequences_.commit(layers);
  sequences_.set_tokens(*to, sequences_.tokens(*from));
  return id;
}

Status Engine::truncate(SequenceId sequence, int32_t tokens) {
  if (Status s = sequences_.admit_truncate(sequence, tokens, &moves_); !s) return s;
  if (Status s = place_->truncate(moves_); !s) return s;
  sequences_.commit(moves_);
  sequences_.set_tokens(sequence.slot, tokens);
  return Status::ok();
}

Status Engine::release(SequenceId sequence) {
  const Result<int32_t> slot = sequences_.slot_of(sequence);
  if (!slot) return slot.status();
  if (Status s = place_->release(*slot); !s) return s;
  sequences_.release(*slot);
  return Status::ok();
}

Result<int32_t> Engine::num_tokens(SequenceId sequence) const {
  const Result<int32_t> slot = sequences_.slot_of(sequence);
  if (!slot) return slot.status();
  return sequences_.tokens(*slot);
}

Result<int64_t> Engine::bytes_held(SequenceId sequence) const {
  const Result<int32_t> slot = sequences_.slot_of(sequence);
  if (!slot) return slot.status();
  StoreUsage usage;
  if (Status s = place_->add_usage({}, &usage); !s) return s;
  const Result<int64_t> pages = place_->pages_of(*slot);
  if (!pages) return pages.status();
  return *pages * usage.page_bytes + usage.slot_bytes;
}

Result<StoreUsage> Engine::usage() const {
  StoreUsage usage;
  const LayerMoves layers = sequences_.all_layers();
  if (Status s = place_->add_usage(layers, &usage); !s) return s;
  usage.sequences = sequences_.open_count();
  const int64_t heads = config_.layout.num_kv_heads;
  for (const LayerMove& move : layers) {
    usage.sink_tokens += heads * sink_count(laws_, move.from);
    usage.body_tokens += heads * body_count(laws_, move.from);
    usage.ring_tokens += heads * ring_count(laws_, move.from);
  }
  const int64_t token_bytes = int64_t{4} * config_.layout.head_dim;
  const int64_t raw = usage.sink_tokens + usage.ring_tokens;
  usage.raw_bytes = (raw + usage.body_tokens) * token_bytes;
  usage.nominal_bytes += raw * token_bytes;
  return usage;
}

Result<std::vector<uint8_t>> Engine::export_sequence(SequenceId sequence) {
  std::vector<uint8_t> bytes;
  Status s = export_sequence(sequence, [&](size_t size) {
    bytes.resize(size);
    return bytes.data();
  });
  if (!s) return s;
  return bytes;
}

Status Engine::export_sequence(SequenceId sequence, const ExportTarget& target) {
  const Result<int32_t> slot = sequences_.complete_slot_of(sequence);
  if (!slot) return slot.status();
  const Result<SequenceSource> source = place_->export_parts(sequences_.layers_of(*slot));
  if (!source) return source.status();
  return write_sequence(config_, place_->identity(), *source, target);
}

Result<SequenceId> Engine::import_sequence(const uint8_t* bytes, size_t size) {
  if (bytes == nullptr) return Status(StatusCode::kInvalidArgument, "bytes is null");
  const Result<SequenceParts> parts =
      read_sequence(config_, laws_, place_->identity(), bytes, size);
  if (!parts) return parts.status();
  const Result<int32_t> slot = sequences_.free_slot();
  if (!slot) return slot.status();
  if (Status s = place_->import_parts(*slot, *parts); !s) return s;
  const SequenceId id = sequences_.claim(*slot, {});
  LayerMoves layers = sequences_.layers_of(*slot);
  for (LayerMove& move : layers) move.to = parts->layers[move.layer];
  sequences_.commit(layers);
  sequences_.set_tokens(*slot, parts->layers[0].tokens);
  return id;
}

}  // namespace tierkv::store

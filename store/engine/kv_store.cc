// SPDX-License-Identifier: Apache-2.0
#include "tierkv/kv_store.h"

#include <utility>

#include "codec/policy/profile.h"
#include "store/engine/engine.h"
#include "store/place/host_place.h"

namespace tierkv {

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
  auto engine = std::make_unique<store::Engine>(resolved, (*place)->laws());
  engine->set_place(std::move(*place));
  return std::unique_ptr<KvStore>(new KvStore(std::move(engine)));
}

KvStore::KvStore(std::unique_ptr<store::Engine> engine) : engine_(std::move(engine)) {}
KvStore::~KvStore() = default;

const StoreConfig& KvStore::config() const {
  return engine_->config();
}
Result<SequenceId> KvStore::add_sequence() {
  return engine_->add_sequence();
}
Status KvStore::begin(SequenceList sequences, int32_t tokens) {
  return engine_->begin(sequences, tokens);
}
Status KvStore::append(const LayerAppend& call) {
  return engine_->append(call);
}
Status KvStore::attend(const LayerAttend& call) {
  return engine_->attend(call);
}
Status KvStore::decode_range(const LayerRange& range) {
  return engine_->decode_range(range);
}
Status KvStore::note_replay(SequenceList sequences, int32_t tokens) {
  return engine_->note_replay(sequences, tokens);
}
Status KvStore::take_status() {
  return engine_->take_status();
}
Result<SequenceId> KvStore::fork(SequenceId source) {
  return engine_->fork(source);
}
Status KvStore::truncate(SequenceId sequence, int32_t tokens) {
  return engine_->truncate(sequence, tokens);
}
Status KvStore::release(SequenceId sequence) {
  return engine_->release(sequence);
}
Result<int32_t> KvStore::num_tokens(SequenceId sequence) {
  return engine_->num_tokens(sequence);
}
Result<int64_t> KvStore::bytes_held(SequenceId sequence) {
  return engine_->bytes_held(sequence);
}
Result<StoreUsage> KvStore::usage() {
  return engine_->usage();
}
Shortage KvStore::shortage() const {
  return engine_->place().shortage();
}
Result<std::vector<uint8_t>> KvStore::export_sequence(SequenceId sequence) {
  return engine_->export_sequence(sequence);
}
Status KvStore::export_sequence(SequenceId sequence, const ExportTarget& target) {
  return engine_->export_sequence(sequence, target);
}
Result<SequenceId> KvStore::import_sequence(const uint8_t* bytes, size_t size) {
  return engine_->import_sequence(bytes, size);
}

}  // namespace tierkv

#include "tierkv/unified_store.h"

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

Result<std::unique_ptr<UnifiedStore>> UnifiedStore::create(const StoreConfig& config) {
  if (Status s = config.validate(); !s) return s;
  const StoreConfig resolved = store::resolve(config);
  Result<std::unique_ptr<store::RowFormat>> format = store::make_row_format(resolved);
  if (!format) return format.status();
  Result<std::unique_ptr<store::HostPlace>> place =
      store::HostPlace::make(resolved, std::move(*format));
  if (!place) return place.status();
  auto engine = std::make_unique<store::Engine>(resolved, (*place)->laws());
  engine->set_place(std::move(*place));
  return std::unique_ptr<UnifiedStore>(new UnifiedStore(std::move(engine)));
}

UnifiedStore::UnifiedStore(std::unique_ptr<store::Engine> engine) : engine_(std::move(engine)) {}
UnifiedStore::~UnifiedStore() = default;

const StoreConfig& UnifiedStore::config() const {
  return engine_->config();
}
Result<SequenceId> UnifiedStore::add_sequence() {
  return engine_->add_sequence();
}
Status UnifiedStore::begin(SequenceList sequences, int32_t tokens) {
  return engine_->begin(sequences, tokens);
}
Status UnifiedStore::append(const LayerAppend& call) {
  return engine_->append(call);
}
Status UnifiedStore::attend(const LayerAttend& call) {
  return engine_->attend(call);
}
Status UnifiedStore::decode_range(const LayerRange& range) {
  return engine_->decode_range(range);
}
Status UnifiedStore::note_replay(SequenceList sequences, int32_t tokens) {
  return engine_->note_replay(sequences, tokens);
}
Status UnifiedStore::take_status() {
  return engine_->take_status();
}
Result<SequenceId> UnifiedStore::fork(SequenceId source) {
  return engine_->fork(source);
}
Status UnifiedStore::truncate(SequenceId sequence, int32_t tokens) {
  return engine_->truncate(sequence, tokens);
}
Status UnifiedStore::release(SequenceId sequence) {
  return engine_->release(sequence);
}
Result<int32_t> UnifiedStore::num_tokens(SequenceId sequence) {
  return engine_->num_tokens(sequence);
}
Result<int64_t> UnifiedStore::bytes_held(SequenceId sequence) {
  return engine_->bytes_held(sequence);
}
Result<StoreUsage> UnifiedStore::usage() {
  return engine_->usage();
}
Shortage UnifiedStore::shortage() const {
  return engine_->place().shortage();
}
Result<std::vector<uint8_t>> UnifiedStore::export_sequence(SequenceId sequence) {
  return engine_->export_sequence(sequence);
}
Result<SequenceId> UnifiedStore::import_sequence(const uint8_t* bytes, size_t size) {
  return engine_->import_sequence(bytes, size);
}

}  // namespace tierkv

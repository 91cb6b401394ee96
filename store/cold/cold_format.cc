#include "store/cold/cold_format.h"

#include <algorithm>

#include "codec/format/byte_cursor.h"
#include "store/tiers/basis_store.h"
#include "store/tiers/store_shape.h"

namespace tierkv {
namespace {

enum class StoreKind : int32_t { kTiered = 0, kCoded = 1 };

Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, std::move(why));
}

ChunkKey key_of(ChunkKind kind, int32_t layer, int32_t head) {
  ChunkKey key;
  key.kind = kind;
  key.sequence = 0;
  key.layer = layer;
  key.head = head;
  return key;
}

// All that must agree between the stores beside the layout.
Result<std::vector<uint8_t>> config_bytes(const KvStoreConfig& config) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  const CodedConfig& coded = config.coded;
  w.i32(static_cast<int32_t>(coded.enabled ? StoreKind::kCoded : StoreKind::kTiered));
  w.i32(config.policy.window_tokens);
  w.i32(coded.enabled ? 0 : config.policy.sink_tokens);  // not where a coded store's tokens lie
  w.i32(coded.enabled ? static_cast<int32_t>(coded.means) : 0);
  w.u64(config.basis == nullptr ? 0 : config.basis->identity());
  if (coded.enabled) return out;
  const Result<StoreShape> shape = store_shape(config);
  if (!shape) return shape.status();
  w.i32(static_cast<int32_t>(shape->raw_dtype));
  for (const PageLayout& p : shape->layouts) {
    for (const int32_t x :
         {p.k_tile.type.bits(), p.k_groups, p.v_tile.type.bits(), p.v_groups, p.tokens}) {
      w.i32(x);
    }
  }
  return out;
}

}  // namespace

ChunkKey cold_store_key() {
  return key_of(ChunkKind::kStore, kNotApplicable, kNotApplicable);
}
ChunkKey cold_fixed_key() {
  return key_of(ChunkKind::kStoreFixed, kNotApplicable, kNotApplicable);
}
ChunkKey cold_row_key(int32_t layer, int32_t kv_head) {
  return key_of(ChunkKind::kStoreRow, layer, kv_head);
}
ChunkKey cold_page_key(ChunkKey row, uint8_t part, int32_t page) {
  row.kind = ChunkKind::kStorePage;
  row.part = part;
  row.page = page;
  return row;
}
ChunkKey cold_book_key(int32_t layer, uint8_t component, uint8_t part, int32_t number) {
  ChunkKey key = key_of(ChunkKind::kCodebook, layer, kNotApplicable);
  key.component = component;
  key.part = part;
  key.page = number;
  return key;
}

std::vector<uint8_t> serialize_cold_sequence(const KvStoreConfig& config,
                                             const ColdSequence& sequence) {
  std::vector<uint8_t> out = *config_bytes(config);  // of a store that there is
  ByteWriter w(&out);
  const SequenceInfo& info = sequence.info;
  for (const int32_t x :
       {info.num_tokens, info.window_first, info.window_origin, info.prompt_tokens}) {
    w.i32(x);
  }
  w.i32(sequence.has_codebooks ? 1 : 0);
  return out;
}

Result<ColdSequence> parse_cold_sequence(const KvStoreConfig& config,
                                         const std::vector<uint8_t>& bytes) {
  const Result<std::vector<uint8_t>> expected = config_bytes(config);
  if (!expected) return expected.status();
  ByteReader r(bytes);
  const uint8_t* found = r.take(expected->size());
  const bool same = found != nullptr && std::equal(expected->begin(), expected->end(), found);
  ColdSequence sequence;
  SequenceInfo& info = sequence.info;
  info.num_tokens = r.i32();
  info.window_first = r.i32();
  info.window_origin = r.i32();
  info.prompt_tokens = r.i32();
  const int32_t codebooks = r.i32();
  // A store of another kind or version has other fields.
  if (!same) {
    return Status(StatusCode::kInvalidArgument, "the sequence is of a store of another config");
  }
  if (!r.at_end()) return corrupt("size disagrees with its fields");
  if (codebooks != 0 && (codebooks != 1 || !config.coded.enabled)) return corrupt("codebooks");
  sequence.has_codebooks = codebooks == 1;
  return sequence;
}

std::vector<uint8_t> serialize_cold_fixed(const KvStoreConfig& config) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  w.i32(config.coded.fixed_format.k.type.bits());
  w.i32(config.coded.fixed_format.v.type.bits());
  return out;
}

Status check_cold_fixed(const KvStoreConfig& config, const std::vector<uint8_t>& bytes) {
  if (config.coded.fixed_blocks && bytes == serialize_cold_fixed(config)) return Status::ok();
  return Status(StatusCode::kInvalidArgument,
                "the sequence is of a store with other fixed-rate blocks");
}

Status ColdChunks::read(const ChunkKey& key, std::vector<uint8_t>* payload) {
  const int64_t chunk = reader_.find(key);
  if (chunk < 0) return corrupt("has no " + to_string(key));
  ++read_;
  return reader_.read(chunk, payload);
}

Status ColdChunks::at(const ChunkKey& key, const Status& why) const {
  return why.with_context(to_string(key));
}

Status ColdChunks::check_all_read() const {
  const auto known =
      std::count_if(reader_.chunks().begin(), reader_.chunks().end(),
                    [](const ChunkEntry& c) { return c.key.kind <= ChunkKind::kStoreFixed; });
  return read_ == known ? Status::ok() : corrupt("has chunks that are not of its sequence");
}

KvStoreConfig cold_config(const KvStore& store) {
  return store.config().basis == nullptr ? store.config() : coordinates_config(store.config());
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
#include "store/transfer/sequence_chunks.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "codec/file/container_format.h"
#include "codec/format/byte_cursor.h"
#include "codec/format/errors.h"
#include "tierkv/container.h"

namespace tierkv::store {
namespace {

constexpr uint32_t kVersion = 2;

ChunkKey key_of(ChunkKind kind, int32_t layer, int32_t head) {
  ChunkKey key;
  key.kind = kind;
  if (kind != ChunkKind::kModel) key.sequence = 0;
  key.layer = layer;
  key.head = head;
  return key;
}

ContainerModel model_of(const StoreConfig& config) {
  ContainerModel model;
  model.layout = config.layout;
  model.num_sequences = 1;
  model.preset = "store";
  model.rope = config.rope;
  return model;
}

// What the store must have in common with the sequence, beside the model.
std::vector<uint8_t> serialize_header(const StoreConfig& config,
                                      const std::vector<uint8_t>& identity) {
  std::vector<uint8_t> bytes;
  ByteWriter out(&bytes);
  out.u32(kVersion);
  out.i32(config.sink_tokens);
  out.i32(config.window_tokens);
  out.u32(static_cast<uint32_t>(config.format.index()));
  out.u32(static_cast<uint32_t>(config.raw_layers.size()));
  for (const int32_t layer : config.raw_layers) out.i32(layer);
  out.u32(static_cast<uint32_t>(identity.size()));
  bytes.insert(bytes.end(), identity.begin(), identity.end());
  return bytes;
}

// What byte `at` of a header belongs to.
const char* name_of_field(const StoreConfig& config, int64_t at) {
  if (at < 12) return at < 8 ? "sink_tokens" : "window_tokens";
  if (at < 16) return "format";
  const auto layers = static_cast<int64_t>(config.raw_layers.size());
  return at < 20 + 4 * layers ? "raw_layers" : "settings of the format, or profile";
}

Status corrupt(const std::string& why) {
  return Status(StatusCode::kCorrupt, "sequence: " + why);
}

// The payload of a chunk. kCorrupt where it is not there or its checksum does not match.
Result<std::span<const uint8_t>> read_chunk(const ContainerReader& reader, const ChunkKey& key) {
  const int64_t chunk = reader.find(key);
  if (chunk < 0) return corrupt("there is no " + to_string(key));
  const uint8_t* at = nullptr;
  if (Status s = reader.view(chunk, &at); !s) return s;
  return std::span(at, static_cast<size_t>(reader.chunks()[chunk].bytes));
}

// A container that is written where it stays: sizes first, then bytes.
class ChunkPlan {
 public:
  // The number of the chunk.
  int64_t add(const ChunkKey& key, int64_t bytes) {
    ChunkEntry& c = chunks_.emplace_back();
    c.key = key;
    c.offset = end_;
    c.bytes = static_cast<uint64_t>(bytes);
    end_ += align_chunk(c.bytes);
    return static_cast<int64_t>(chunks_.size()) - 1;
  }
  size_t bytes() const { return end_ + chunks_.size() * kIndexEntryBytes; }
  uint8_t* payload(uint8_t* container, int64_t chunk) const {
    return container + chunks_[chunk].offset;
  }
  void write(uint8_t* container, int64_t chunk, const std::vector<uint8_t>& payload) {
    uint8_t* const at = this->payload(container, chunk);
    const uint64_t padded = align_chunk(payload.size());
    std::fill(std::copy(payload.begin(), payload.end(), at), at + padded, uint8_t{0});
    set_checksum(chunk, xxh3(at, padded));
  }
  // The checksum covers the payload and the zeros behind it, up to a multiple of kChunkAlignment.
  void set_checksum(int64_t chunk, uint64_t checksum) { chunks_[chunk].checksum = checksum; }
  void finish(uint8_t* container) const {
    const std::vector<uint8_t> index = store_index(chunks_);
    std::copy(index.begin(), index.end(), container + end_);
    store_container_header(header_before(static_cast<int64_t>(end_), index), container);
  }

 private:
  std::vector<ChunkEntry> chunks_;
  uint64_t end_ = kContainerHeaderBytes;
};

Status check_model(const StoreConfig& config, std::span<const uint8_t> bytes) {
  const Result<ContainerModel> model = parse_model({bytes.begin(), bytes.end()});
  if (!model) return model.status();
  if (serialize_model(*model) == serialize_model(model_of(config))) return Status::ok();
  return invalid("the sequence is of a cache of another layout, dtype, sm_scale or rotation");
}

Status check_counts(const StoreConfig& config, const TokenLaws& laws,
                    const std::vector<LayerTokens>& layers) {
  for (const LayerTokens& at : layers) {
    const bool possible =
        at.tokens == layers[0].tokens && at.tokens >= 0 && at.body_end >= 0 &&
        at.body_end <= at.tokens && at.body_end % laws.unit_tokens == 0 &&
        ring_count(laws, at) <= most_in_ring(laws) &&
        (at.body_end > 0 || at.tokens < laws.cut_tokens || body_end_at(laws, 0, at.tokens) == 0);
    if (!possible) return corrupt("its counts are impossible");
    if (at.tokens > config.max_tokens) {
      return Status(StatusCode::kOutOfRange,
                    "the sequence has " + std::to_string(at.tokens) + " tokens, beyond max_tokens");
    }
  }
  return Status::ok();
}

Status parse_store(const StoreConfig& config, const TokenLaws& laws,
                   const std::vector<uint8_t>& identity, std::span<const uint8_t> bytes,
                   std::vector<LayerTokens>* layers) {
  if (ByteReader(bytes.data(), bytes.size()).u32() != kVersion) {
    return Status(StatusCode::kVersion, "the sequence is of another version");
  }
  const std::vector<uint8_t> header = serialize_header(config, identity);
  const auto end = header.begin() + std::min(header.size(), bytes.size());
  const auto same = std::mismatch(header.begin(), end, bytes.begin()).first - header.begin();
  if (static_cast<size_t>(same) < header.size()) {
    return invalid(std::string("the sequence is of a store that differs in ") +
                   name_of_field(config, same));
  }
  ByteReader in(bytes.data() + header.size(), bytes.size() - header.size());
  for (int32_t l = 0; l < config.layout.num_layers; ++l) {
    LayerTokens at;
    at.tokens = in.i32();
    at.body_end = in.i32();
    layers->push_back(at);
  }
  if (!in.at_end()) return corrupt("its header has the wrong size");
  return check_counts(config, laws, *layers);
}

}  // namespace

Status write_sequence(const StoreConfig& config, const std::vector<uint8_t>& identity,
                      const SequenceSource& source, const ExportTarget& target) {
  const std::vector<uint8_t> model = serialize_model(model_of(config));
  std::vector<uint8_t> header = serialize_header(config, identity);
  ByteWriter out(&header);
  for (const LayerTokens& at : source.layers) {
    out.i32(at.tokens);
    out.i32(at.body_end);
  }
  ChunkPlan plan;
  plan.add(ChunkKey{}, static_cast<int64_t>(model.size()));
  plan.add(key_of(ChunkKind::kStore, kNotApplicable, kNotApplicable),
           static_cast<int64_t>(header.size()));
  const int32_t heads = config.layout.num_kv_heads;
  std::vector<int64_t> shared(source.layers.size()), parts;
  for (int32_t l = 0; l < config.layout.num_layers; ++l) {
    const auto bytes = static_cast<int64_t>(source.shared[l].size());
    if (bytes > 0) shared[l] = plan.add(key_of(ChunkKind::kCodebook, l, kNotApplicable), bytes);
  }
  for (int32_t l = 0; l < config.layout.num_layers; ++l) {
    for (int32_t h = 0; h < heads; ++h) {
      for (const ChunkKind kind : {ChunkKind::kStoreRow, ChunkKind::kStorePage}) {
        parts.push_back(plan.add(key_of(kind, l, h), source.part_bytes[parts.size()]));
      }
    }
  }
  uint8_t* const bytes = target(plan.bytes());
  if (bytes == nullptr) {
    return Status(StatusCode::kBufferTooSmall, std::to_string(plan.bytes()) + " bytes are needed");
  }
  plan.write(bytes, 0, model);
  plan.write(bytes, 1, header);
  for (size_t l = 0; l < shared.size(); ++l) {
    if (!source.shared[l].empty()) plan.write(bytes, shared[l], source.shared[l]);
  }
  std::vector<uint8_t*> places;
  for (const int64_t part : parts) places.push_back(plan.payload(bytes, part));
  std::vector<uint64_t> checksums(parts.size());
  Status s = source.write(places, &checksums);
  for (size_t i = 0; i < parts.size(); ++i) plan.set_checksum(parts[i], checksums[i]);
  if (s) {
    plan.finish(bytes);
  } else {
    std::fill_n(bytes, kContainerHeaderBytes, uint8_t{0});  // of what was there before
  }
  return s;
}

Result<SequenceParts> read_sequence(const StoreConfig& config, const TokenLaws& laws,
                                    const std::vector<uint8_t>& identity, const uint8_t* bytes,
                                    size_t size) {
  Result<ContainerReader> opened = ContainerReader::over_bytes(bytes, size, "sequence");
  if (!opened) return opened.status();
  const auto reader = std::make_shared<const ContainerReader>(std::move(*opened));
  const ChunkKey store_key = key_of(ChunkKind::kStore, kNotApplicable, kNotApplicable);
  if (reader->find(store_key) < 0) {
    return invalid("the bytes are a .tkv container of a cache, which a store does not load");
  }
  const Result<std::span<const uint8_t>> model = read_chunk(*reader, ChunkKey{});
  if (!model) return model.status();
  if (Status s = check_model(config, *model); !s) return s;
  const Result<std::span<const uint8_t>> store = read_chunk(*reader, store_key);
  if (!store) return store.status();
  SequenceParts parts;
  if (Status s = parse_store(config, laws, identity, *store, &parts.layers); !s) return s;
  const std::vector<ChunkEntry>& all = reader->chunks();
  size_t read = 2;
  for (int32_t l = 0; l < config.layout.num_layers; ++l) {
    const ChunkKey key = key_of(ChunkKind::kCodebook, l, kNotApplicable);
    std::span<const uint8_t>& shared = parts.shared.emplace_back();
    if (reader->find(key) < 0) continue;
    const Result<std::span<const uint8_t>> codebook = read_chunk(*reader, key);
    if (!codebook) return codebook.status();
    shared = *codebook;
    ++read;
  }
  const int64_t first_part = reader->find(key_of(ChunkKind::kStoreRow, 0, 0));
  auto chunk = static_cast<size_t>(std::max<int64_t>(first_part, 0));
  for (int32_t l = 0; l < config.layout.num_layers; ++l) {
    for (int32_t i = 0; i < 2 * config.layout.num_kv_heads; ++i, ++chunk, ++read) {
      const ChunkKind kind = i % 2 == 0 ? ChunkKind::kStoreRow : ChunkKind::kStorePage;
      const ChunkKey key = key_of(kind, l, i / 2);
      if (chunk >= all.size() || all[chunk].key != key) {
        return corrupt(reader->find(key) < 0 ? "there is no " + to_string(key)
                                             : "the parts of rows do not follow each other");
      }
      (i % 2 == 0 ? parts.raw : parts.bodies)
          .emplace_back(bytes + all[chunk].offset, static_cast<size_t>(all[chunk].bytes));
      parts.checksums.push_back(all[chunk].checksum);
    }
  }
  if (read != all.size()) return corrupt("there are other chunks");
  parts.verify = [reader, first_part](int64_t first, int64_t count) {
    const uint8_t* same = nullptr;
    Status s = Status::ok();
    for (int64_t i = 2 * first; s && i < 2 * (first + count); ++i) {
      s = reader->view(first_part + i, &same);
    }
    return s;
  };
  return parts;
}

}  // namespace tierkv::store

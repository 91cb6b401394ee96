// save_sequence() and load_sequence(): what the cold forms of both kinds of stores share.
#include <utility>

#include "store/cold/cold_format.h"

namespace tierkv {
namespace {

Status check_threads(int32_t threads) {
  if (threads >= 1) return Status::ok();
  return Status(StatusCode::kInvalidArgument, "threads must be positive");
}

bool same_layout(const CacheLayout& a, const CacheLayout& b) {
  return a.num_layers == b.num_layers && a.num_q_heads == b.num_q_heads &&
         a.num_kv_heads == b.num_kv_heads && a.head_dim == b.head_dim && a.dtype == b.dtype &&
         a.rope_applied == b.rope_applied && a.rope_theta == b.rope_theta &&
         a.sm_scale == b.sm_scale;
}

// Reads the first two chunks.
Result<ColdSequence> open_sequence(const KvStore& store, ColdChunks* chunks) {
  if (!chunks->has(cold_store_key())) {
    return Status(StatusCode::kInvalidArgument, "the container does not hold a store's sequence");
  }
  std::vector<uint8_t> payload;
  if (Status s = chunks->read(ChunkKey{}, &payload); !s) return s;
  const Result<ContainerModel> model = parse_model(payload);
  if (!model) return model.status();
  if (!same_layout(model->layout, store.config().layout)) {
    return Status(StatusCode::kInvalidArgument, "the sequence is of a cache of another layout");
  }
  if (Status s = chunks->read(cold_store_key(), &payload); !s) return s;
  const KvStoreConfig config = cold_config(store);
  Result<ColdSequence> sequence = parse_cold_sequence(config, payload);
  if (!sequence) return chunks->at(cold_store_key(), sequence.status());
  sequence->has_fixed = chunks->has(cold_fixed_key());
  if (!sequence->has_fixed) return sequence;
  if (Status s = chunks->read(cold_fixed_key(), &payload); !s) return s;
  if (Status s = check_cold_fixed(config, payload); !s) return chunks->at(cold_fixed_key(), s);
  return sequence;
}

Status check_store(const KvStore& store) {
  if (!store.config().channel.enabled) return Status::ok();
  return Status(StatusCode::kUnsupported,
                "the cold tier of a cache with config.channel; export_sequence() has its bytes");
}

}  // namespace

Result<std::vector<uint8_t>> save_sequence(KvStore& store, SequenceId sequence,
                                           const ColdOptions& options) {
  if (Status s = check_threads(options.threads); !s) return s;
  if (Status s = check_store(store); !s) return s;
  const Result<std::vector<uint8_t>> exported = store.export_sequence(sequence);
  if (!exported) return exported.status();
  const KvStoreConfig config = cold_config(store);
  ColdSequence cold;
  Result<std::vector<ChunkBlock>> layers =
      config.coded.enabled ? cold_coded_chunks(config, *exported, options, &cold)
                           : cold_tiered_chunks(config, *exported, options, &cold);
  if (!layers) return layers.status();
  ContainerModel model;
  model.layout = store.config().layout;
  model.num_sequences = 1;
  model.preset = "store";
  ChunkBlock first;
  first.add(ChunkKey{}, serialize_model(model));
  first.add(cold_store_key(), serialize_cold_sequence(config, cold));
  if (config.coded.fixed_blocks) first.add(cold_fixed_key(), serialize_cold_fixed(config));
  std::vector<ChunkBlock> blocks;
  blocks.push_back(std::move(first));
  for (ChunkBlock& layer : *layers) blocks.push_back(std::move(layer));
  return assemble_container(blocks);
}

Result<SequenceId> load_sequence(KvStore& store, const uint8_t* bytes, size_t size,
                                 int32_t threads) {
  if (bytes == nullptr) return Status(StatusCode::kInvalidArgument, "bytes is null");
  if (Status s = check_threads(threads); !s) return s;
  if (Status s = check_store(store); !s) return s;
  const Result<ContainerReader> reader =
      ContainerReader::from_bytes(std::vector<uint8_t>(bytes, bytes + size), "sequence");
  if (!reader) return reader.status();
  ColdChunks chunks(*reader);
  const Result<ColdSequence> sequence = open_sequence(store, &chunks);
  if (!sequence) return sequence.status();
  const KvStoreConfig config = cold_config(store);
  const Result<std::vector<uint8_t>> exported =
      config.coded.enabled ? exported_coded_sequence(config, *sequence, threads, &chunks)
                           : exported_tiered_sequence(config, *sequence, threads, &chunks);
  if (!exported) return exported.status();
  if (Status s = chunks.check_all_read(); !s) return s;
  return store.import_sequence(exported->data(), exported->size());
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// compress(): a dump into a container.
//
// A layer is read, prepared, encoded and written in steps that several threads take. The steps
// stand in one order in which each comes after those it needs, and are handed out in that order, so
// that whoever waits for an earlier step waits for a thread that works on it. Layers share a few
// slots, whose memory is used again.
#include <algorithm>
#include <array>
#include <mutex>
#include <optional>

#include "codec/host/parallel.h"
#include "tools/analysis/stop_watch.h"
#include "tools/container/container_encode.h"
#include "tools/container/container_file.h"
#include "tools/container/step_log.h"

namespace tierkv::analysis {
namespace {

enum Kind { kRead, kPrepare, kEncode, kWrite };

constexpr int64_t kLargeLayerBytes = int64_t{64} << 20;  // of which two are held, not three

class Compressor {
 public:
  Compressor(datasets::DumpReader& reader, const CompressOptions& options, ContainerWriter* writer)
      : reader_(reader),
        info_(reader.info()),
        options_(options),
        scheme_(options.preset.scheme.for_head_dim(info_.layout.head_dim)),
        writer_(*writer),
        heads_(info_.layout.num_kv_heads),
        layers_(int64_t{info_.layout.num_layers} * static_cast<int64_t>(info_.sequences.size())),
        log_(layers_) {
    int64_t largest = 0;
    for (int64_t i = 0; i < layers_; ++i) {
      largest = std::max(largest, LayerData::dump_bytes(info_, seq_of(i), layer_of(i)));
    }
    slot_count_ = options.threads == 1 || largest > kLargeLayerBytes ? 2 : kMostSlots;
  }

  Status run();
  const CompressSummary& summary() const { return summary_; }

 private:
  struct Slot {
    int64_t held = -1;  // the layer
    LayerData data;
    std::optional<LayerScheme> scheme;
    ChunkBlock shared, queries;
    std::vector<ChunkBlock> rows;  // per kv_head
  };
  int32_t seq_of(int64_t i) const { return static_cast<int32_t>(i / info_.layout.num_layers); }
  int32_t layer_of(int64_t i) const { return static_cast<int32_t>(i % info_.layout.num_layers); }
  Slot& slot(int64_t i) { return slots_[i % slot_count_]; }
  bool stores_significance(int64_t i) const {
    return !options_.without_queries &&
           info_.sequences[seq_of(i)].layers[layer_of(i)].has_significance;
  }
  bool needs_significance(int64_t i) const {
    return stores_significance(i) || wants_significance(scheme_, info_, seq_of(i), layer_of(i));
  }
  Status write_head();
  void take(int64_t step);
  Status take_one(int64_t step, Kind kind, int64_t layer, int32_t part);
  Status read_part(int64_t layer, int32_t part);
  Status prepare(int64_t layer);
  Status encode(int64_t layer, int32_t head);
  Status write(int64_t layer);
  Status at(int64_t i, const Status& s) const {
    return s.with_context(info_.path + ": /seq/" + info_.sequences[seq_of(i)].id + "/layer/" +
                          std::to_string(layer_of(i)) + ": preset " + options_.preset.text);
  }

  datasets::DumpReader& reader_;
  const datasets::DumpInfo& info_;
  const CompressOptions& options_;
  Scheme scheme_;
  ContainerWriter& writer_;
  int64_t heads_, layers_;
  static constexpr int64_t kMostSlots = 3;
  int64_t slot_count_ = kMostSlots;
  std::array<Slot, kMostSlots> slots_;
  StepLog log_;
  std::mutex mutex_;  // of the slots' change of layers and of the summary
  CompressSummary summary_;
};

Status Compressor::write_head() {
  ContainerModel model;
  model.layout = info_.layout;
  model.num_sequences = static_cast<int32_t>(info_.sequences.size());
  model.preset = options_.preset.text;
  model.model_id = info_.model_id;
  model.created_by = info_.created_by;
  model.rope =
      !info_.rope.empty() || options_.profile == nullptr ? info_.rope : options_.profile->rope;
  ChunkKey key;
  if (Status s = writer_.add(key, serialize_model(model)); !s) return s;
  key.kind = ChunkKind::kSequence;
  for (key.sequence = 0; key.sequence < model.num_sequences; ++key.sequence) {
    const datasets::SequenceInfo& info = info_.sequences[key.sequence];
    ContainerSequence sequence{info.id, info.kind, {}};
    if (Status s = reader_.read_tokens(key.sequence, &sequence.tokens); !s) return s;
    if (Status s = writer_.add(key, serialize_sequence(sequence)); !s) return s;
  }
  return Status::ok();
}

// Part h < heads: keys and queries of a head; then the values of the heads; then what they share.
Status Compressor::read_part(int64_t layer, int32_t part) {
  LayerData& data = slot(layer).data;
  if (part == 2 * heads_) {
    return load_shared(reader_, needs_significance(layer), &data);
  }
  if (part >= heads_) {
    return load_component(reader_, static_cast<int32_t>(part - heads_), Component::kValue, &data);
  }
  if (Status s = load_component(reader_, part, Component::kKey, &data); !s) return s;
  return load_queries(reader_, part, &data);
}

Status Compressor::prepare(int64_t layer) {
  Slot& s = slot(layer);
  // Computed significance needs the queries of all heads.
  if (Status status = complete_significance(info_, needs_significance(layer), &s.data); !status)
    return status;
  s.scheme.emplace();
  const Status status = prepare_layer(scheme_, s.data, info_.layout, options_.profile, &*s.scheme);
  if (!status) return at(layer, status);
  const SharedBases bases = options_.profile == nullptr ? SharedBases::kOfSequence
                            : seq_of(layer) == 0        ? SharedBases::kOfAll
                                                        : SharedBases::kWritten;
  s.shared.clear();
  encode_shared(scheme_, s.data, *s.scheme, bases, &s.shared);
  s.queries.clear();
  if (!options_.without_queries) encode_queries(s.data, info_.layout, &s.queries);
  return Status::ok();
}

Status Compressor::encode(int64_t layer, int32_t head) {
  Slot& s = slot(layer);
  s.rows[head].clear();
  const Status status =
      encode_row(scheme_, s.data, *s.scheme, head, stores_significance(layer), &s.rows[head]);
  return status ? status : at(layer, status);
}

Status Compressor::write(int64_t layer) {
  Slot& s = slot(layer);
  std::vector<const ChunkBlock*> blocks = {&s.shared};
  for (const ChunkBlock& row : s.rows) blocks.push_back(&row);
  blocks.push_back(&s.queries);
  for (const ChunkBlock* block : blocks) {
    if (Status status = writer_.add(*block); !status) return status;
    summary_.query_bytes += block->optional_bytes();
  }
  for (const RowPlan& plan : s.scheme->plans) {
    summary_.values += 2 * plan.tokens * info_.layout.head_dim;
    for (int t = 0; t < kNumTiers; ++t) summary_.tokens[t] += plan.count[t];
  }
  if (options_.progress) {
    options_.progress(static_cast<double>(layer + 1) / static_cast<double>(layers_));
  }
  return Status::ok();
}

// Waits for what a step needs and does it.
Status Compressor::take_one(int64_t step, Kind kind, int64_t layer, int32_t part) {
  const int64_t parts = 2 * heads_ + 1, slots = slot_count_;
  const bool ready = kind == kRead      ? log_.wait(step, kWrite, layer - slots, 1)
                     : kind == kPrepare ? log_.wait(step, kRead, layer, parts)
                     : kind == kEncode  ? log_.wait(step, kPrepare, layer, 1)
                                        : log_.wait(step, kEncode, layer, heads_) &&
                                             log_.wait(step, kWrite, layer - 1, 1);
  if (!ready) return Status::ok();
  if (kind == kRead) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Slot& s = slot(layer);
    if (s.held != layer) {
      shape_layer(info_, seq_of(layer), layer_of(layer), &s.data);
      s.data.rope = rope_of(info_, options_.profile, layer_of(layer));
      s.rows.resize(heads_);
      s.held = layer;
    }
  }
  const StopWatch watch;
  const Status status = kind == kRead      ? read_part(layer, part)
                        : kind == kPrepare ? prepare(layer)
                        : kind == kEncode  ? encode(layer, part)
                                           : write(layer);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    (kind == kRead    ? summary_.read_seconds
     : kind == kWrite ? summary_.write_seconds
                      : summary_.encode_seconds) += watch.seconds();
  }
  if (status) log_.finish(kind, layer);
  return status;
}

// Round r of the steps: the write of layer r - 2, the reads of r, then preparation and encoding of
// r - 1, so that a slot is written before it is read into and reading runs ahead of encoding.
void Compressor::take(int64_t step) {
  const int64_t reads = 2 * heads_ + 1, round = step / (1 + reads + 1 + heads_);
  auto rest = static_cast<int32_t>(step % (1 + reads + 1 + heads_));
  Kind kind = kWrite;
  int64_t layer = round - 2;
  if (rest > 0) {
    rest -= 1;
    kind = kRead;
    layer = round;
    if (rest >= reads) {
      rest -= static_cast<int32_t>(reads) + 1;
      kind = rest < 0 ? kPrepare : kEncode;
      layer = round - 1;
    }
  }
  if (layer < 0 || layer >= layers_) return;
  log_.take(step, [&] { return take_one(step, kind, layer, rest); });
}

Status Compressor::run() {
  if (Status s = write_head(); !s) return s;
  const int64_t steps_a_round = 3 * heads_ + 3;
  parallel_for((layers_ + 2) * steps_a_round, options_.threads,
               [this](int64_t step) { take(step); });
  return log_.failure();
}

Status check(const datasets::DumpInfo& info, const CompressOptions& options) {
  if (Status s = check_unpruned(info); !s) return s;
  const Scheme scheme = options.preset.scheme.for_head_dim(info.layout.head_dim);
  const auto refuse = [&](StatusCode code, const std::string& why) {
    return Status(code, info.path + ": preset " + options.preset.text + ": " + why);
  };
  if (scheme.coder == Coder::kZstd || scheme.has_baseline_coder() ||
      scheme.eviction != Eviction::kNone) {
    return refuse(StatusCode::kUnsupported,
                  "it is a baseline that only analyze and sweep know; a container cannot hold it");
  }
  if (Status s = scheme.validate(info.layout.head_dim); !s) return refuse(s.code(), s.message());
  const Profile* p = options.profile;
  if (p != nullptr) {
    if (Status s = p->check_model(info.layout, info.model_id); !s)
      return refuse(s.code(), s.message());
    if (Status s = check_rope(info, p); !s) return s;
  }
  if (Status s = check_sensitivities(scheme, p); !s) return refuse(s.code(), s.message());
  for (const datasets::SequenceInfo& seq : info.sequences) {
    for (const datasets::LayerInfo& l : seq.layers) {
      if (scheme.needs_queries() && p == nullptr && !l.has_q) {
        return refuse(StatusCode::kInvalidArgument,
                      "a global step needs q in the dump, or a profile (--profile)");
      }
    }
  }
  return Status::ok();
}

}  // namespace

Result<CompressSummary> compress(datasets::DumpReader& reader, const CompressOptions& options,
                                 const std::string& path) {
  if (Status s = check(reader.info(), options); !s) return s;
  Result<ContainerWriter> writer = ContainerWriter::create(path);
  if (!writer) return writer.status();
  Compressor compressor(reader, options, &writer.value());
  if (Status s = compressor.run(); !s) return s;
  if (Status s = writer->finish(options.overwrite); !s) return s;
  CompressSummary summary = compressor.summary();
  summary.file_bytes = writer->file_bytes();
  return summary;
}

}  // namespace tierkv::analysis

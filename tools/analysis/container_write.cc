// compress(): a dump into a container.
#include <algorithm>
#include <future>
#include <memory>
#include <optional>

#include "codec/byte_cursor.h"
#include "tools/analysis/container_chunks.h"
#include "tools/analysis/container_file.h"
#include "tools/analysis/container_pages.h"
#include "tools/analysis/layer_scheme.h"
#include "tools/analysis/parallel.h"
#include "tools/analysis/row_pages.h"
#include "tools/analysis/stop_watch.h"

namespace tierkv::analysis {
namespace {

constexpr int64_t kBatchBytes = int64_t{12} << 20;  // layers encoded together, as in the dump
constexpr Component kComponents[] = {Component::kKey, Component::kValue};
constexpr Part kParts[] = {Part::kSinks, Part::kHigh, Part::kLow, Part::kKeyGap, Part::kWindow};

struct PendingChunk {
  ChunkKey key;
  std::vector<uint8_t> payload;
  bool optional = false;
};
using Pending = std::vector<PendingChunk>;

ChunkKey key_of(ChunkKind kind, int32_t seq, int32_t layer, int32_t head) {
  return {kind, seq, layer, head, 0, 0};
}

// Null where segments hold the part.
std::optional<StoredPageFormat> page_format_of(const Scheme& scheme, Part part, DType dtype,
                                               int32_t head_dim) {
  const bool low = part == Part::kLow;
  if (part != Part::kHigh && !low) return std::nullopt;
  if (scheme.coder != Coder::kNone || (low && !scheme.tiered)) return std::nullopt;
  const Result<PageChoice> choice = choose_page_size(page_formats(scheme), head_dim);
  if (!choice) return std::nullopt;
  const TierFormat& tier = low ? scheme.low : scheme.high;
  const Result<PageLayout> layout = make_page_layout(tier, head_dim, choice->page_bytes);
  const Result<PageShape> shape = page_shape(tier, head_dim);
  if (!layout || !shape) return std::nullopt;
  StoredPageFormat f;
  f.shape = *shape;
  f.shape.tokens = layout->tokens;
  f.raw_dtype = dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  f.has_scores = scheme.tiered;
  for (const Component c : kComponents) {
    const ComponentFormat& own = tier.of(c);
    if (!own.is_raw()) f.basis[static_cast<int>(c)] = own.basis;
  }
  return f;
}

std::vector<uint8_t> serialize_positions(const std::vector<int32_t>& positions) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  w.u64(positions.size());
  for (const int32_t p : positions) w.i32(p);
  return bytes;
}

// Bases and steps of one row, for one sequence or (kNotApplicable) for all.
void add_bases(const Scheme& scheme, int32_t seq, int32_t layer, int32_t head,
               const std::array<ComponentContext, 2>& context, Pending* out) {
  for (const Component c : kComponents) {
    const ComponentContext& own = context[static_cast<int>(c)];
    if (own.basis.kind == BasisKind::kNone && scheme.high.of(c).step_rule != StepRule::kAbsolute) {
      continue;
    }
    ChunkKey key = key_of(ChunkKind::kBasis, seq, layer, head);
    key.component = static_cast<uint8_t>(c);
    out->push_back({key, serialize_basis({own.basis, own.step})});
  }
}

Status encoding_failed(StatusCode code) {
  return Status(code, std::string("encoding failed (") + status_name(code) + ")");
}

Status encode_segment(RowCodec& codec, const LayerData& data, int32_t head, Component c, Part part,
                      Pending* out) {
  if (StatusCode s = codec.encode_part(c, part); s != StatusCode::kOk) return encoding_failed(s);
  const EncodedSegment& segment = codec.segment(c, part);
  if (segment.tokens == 0) return Status::ok();
  Result<std::vector<uint8_t>> bytes = serialize_segment(codec.segment_format(c, part), segment);
  if (!bytes) return bytes.status();
  ChunkKey key = key_of(ChunkKind::kSegment, data.seq, data.layer, head);
  key.component = static_cast<uint8_t>(c);
  key.part = static_cast<uint8_t>(part);
  out->push_back({key, std::move(bytes.value())});
  return Status::ok();
}

Status encode_pages(const StoredPageFormat& format, const LayerData& data,
                    const LayerScheme& shared, int32_t head, Part part, Pending* out) {
  const std::vector<int64_t> list = part_tokens(shared.plans[head], Component::kKey, part);
  const std::vector<int32_t> positions(list.begin(), list.end());
  PageSource source;
  source.input = {&data.k[head], &data.v[head]};
  if (format.has_scores) source.significance = data.significance[head].data();
  for (int c = 0; c < 2; ++c) source.basis[c] = &shared.context[head][c].basis;
  const auto total = static_cast<int32_t>(positions.size());
  ChunkKey key = key_of(ChunkKind::kPage, data.seq, data.layer, head);
  key.part = static_cast<uint8_t>(part);
  for (int32_t first = 0; first < total; first += format.shape.tokens, ++key.page) {
    out->push_back({key, {}});
    const PageTokens tokens = {positions.data() + first,
                               std::min(format.shape.tokens, total - first)};
    if (Status s = encode_page(format, source, tokens, &out->back().payload); !s) {
      return encoding_failed(s.code());
    }
  }
  return Status::ok();
}

Status encode_row(const Scheme& scheme, const LayerData& data, const LayerScheme& shared,
                  int32_t head, Pending* out) {
  RowCodec codec = shared.row(scheme, data, head);
  out->push_back(
      {key_of(ChunkKind::kRow, data.seq, data.layer, head), serialize_row(shared.plans[head])});
  for (const Part part : kParts) {
    const auto pages = page_format_of(scheme, part, data.k[head].dtype, data.k[head].head_dim);
    if (pages) {
      if (Status s = encode_pages(*pages, data, shared, head, part, out); !s) return s;
      continue;
    }
    for (const Component c : kComponents) {
      if (Status s = encode_segment(codec, data, head, c, part, out); !s) return s;
    }
  }
  return Status::ok();
}

// What a later analysis of the decompressed dump needs besides keys and values.
void add_queries(const LayerData& data, const CacheLayout& layout, Pending* out) {
  if (!data.has_queries()) return;
  out->push_back({key_of(ChunkKind::kQueryPositions, data.seq, data.layer, kNotApplicable),
                  serialize_positions(data.positions), true});
  const auto size = static_cast<int64_t>(data.positions.size()) * layout.head_dim;
  for (int32_t q = 0; q < layout.num_q_heads; ++q) {
    const float* x = data.q[q / layout.group_size()].data() + (q % layout.group_size()) * size;
    out->push_back({key_of(ChunkKind::kQueries, data.seq, data.layer, q),
                    serialize_values(std::vector<float>(x, x + size)), true});
  }
}

class Compressor {
 public:
  Compressor(datasets::DumpReader& reader, const CompressOptions& options, ContainerWriter* writer)
      : reader_(reader),
        info_(reader.info()),
        options_(options),
        scheme_(options.preset.scheme.for_head_dim(info_.layout.head_dim)),
        writer_(*writer) {}

  Status run();
  const CompressSummary& summary() const { return summary_; }

 private:
  struct Layer {
    LayerData data;
    LayerScheme shared;
    std::vector<Pending> rows;  // per kv_head
  };
  using Batch = std::vector<std::unique_ptr<Layer>>;
  int64_t total_layers() const {
    return static_cast<int64_t>(info_.layout.num_layers) *
           static_cast<int64_t>(info_.sequences.size());
  }
  Status write_head();
  Status load_batch(int64_t* next, Batch* batch);
  Status encode_batch(const Batch& layers);
  Status write_batch(const Batch& layers);
  Status write(const Pending& chunks);
  Status write_layer(const Layer& layer);
  Status at(const LayerData& l, const Status& s) const {
    return s.with_context(info_.path + ": /seq/" + info_.sequences[l.seq].id + "/layer/" +
                          std::to_string(l.layer) + ": preset " + options_.preset.text);
  }

  datasets::DumpReader& reader_;
  const datasets::DumpInfo& info_;
  const CompressOptions& options_;
  Scheme scheme_;
  ContainerWriter& writer_;
  CompressSummary summary_;
};

Status Compressor::write(const Pending& chunks) {
  for (const PendingChunk& c : chunks) {
    if (Status s = writer_.add(c.key, c.payload, c.optional); !s) return s;
    if (c.optional) summary_.query_bytes += static_cast<int64_t>(c.payload.size());
  }
  return Status::ok();
}

Status Compressor::write_head() {
  ContainerModel model;
  model.layout = info_.layout;
  model.num_sequences = static_cast<int32_t>(info_.sequences.size());
  model.preset = options_.preset.text;
  model.model_id = info_.model_id;
  model.created_by = info_.created_by;
  Pending head = {{key_of(ChunkKind::kModel, kNotApplicable, kNotApplicable, kNotApplicable),
                   serialize_model(model)}};
  for (int32_t s = 0; s < model.num_sequences; ++s) {
    ContainerSequence sequence{info_.sequences[s].id, info_.sequences[s].kind, {}};
    if (Status status = reader_.read_tokens(s, &sequence.tokens); !status) return status;
    head.push_back({key_of(ChunkKind::kSequence, s, kNotApplicable, kNotApplicable),
                    serialize_sequence(sequence)});
  }
  return write(head);
}

Status Compressor::write_layer(const Layer& layer) {
  Pending shared;
  const LayerData& data = layer.data;
  // A profile's bases serve every sequence; they are written once, with the first.
  const bool own = options_.profile == nullptr;
  for (int32_t h = 0; h < info_.layout.num_kv_heads && (own || data.seq == 0); ++h) {
    add_bases(scheme_, own ? data.seq : kNotApplicable, data.layer, h, layer.shared.context[h],
              &shared);
  }
  for (const Component c : kComponents) {
    for (const Part part : {Part::kHigh, Part::kLow}) {
      const auto& book = layer.shared.codebooks[static_cast<int>(c)][part == Part::kLow];
      if (!book) continue;
      ChunkKey key = key_of(ChunkKind::kCodebook, data.seq, data.layer, kNotApplicable);
      key.component = static_cast<uint8_t>(c);
      key.part = static_cast<uint8_t>(part);
      shared.push_back({key, {}});
      serialize_codebook(*book, &shared.back().payload);
    }
  }
  for (const Part part : {Part::kHigh, Part::kLow}) {
    const auto pages = page_format_of(scheme_, part, data.k[0].dtype, info_.layout.head_dim);
    if (!pages) continue;
    ChunkKey key = key_of(ChunkKind::kPageFormat, data.seq, data.layer, kNotApplicable);
    key.part = static_cast<uint8_t>(part);
    shared.push_back({key, serialize_page_format(*pages)});
  }
  if (Status s = write(shared); !s) return s;
  for (const Pending& row : layer.rows) {
    if (Status s = write(row); !s) return s;
  }
  Pending carried;
  add_queries(data, info_.layout, &carried);
  return write(carried);
}

Status Compressor::load_batch(int64_t* next, Batch* batch) {
  const auto layers = static_cast<int64_t>(info_.layout.num_layers);
  for (int64_t bytes = 0; *next < total_layers(); ++*next) {
    const auto seq = static_cast<int32_t>(*next / layers);
    const auto layer = static_cast<int32_t>(*next % layers);
    bytes += LayerData::dump_bytes(info_, seq, layer);
    if (!batch->empty() && bytes > kBatchBytes) break;
    batch->push_back(std::make_unique<Layer>());
    const bool stored = info_.sequences[seq].layers[layer].has_significance;
    const Status s = load_layer(reader_, seq, layer, scheme_.tiered || stored, options_.threads,
                                &batch->back()->data);
    if (!s) return s;
  }
  return Status::ok();
}

Status Compressor::encode_batch(const Batch& layers) {
  const auto heads = static_cast<int64_t>(info_.layout.num_kv_heads);
  const auto count = static_cast<int64_t>(layers.size());
  std::vector<Status> status(count * heads);
  parallel_for(count, options_.threads, [&](int64_t i) {
    Layer& l = *layers[i];
    status[i * heads] = prepare_layer(scheme_, l.data, info_.layout, options_.profile, &l.shared);
    l.rows.resize(heads);
  });
  for (int64_t i = 0; i < count; ++i) {
    if (Status s = status[i * heads]; !s) return at(layers[i]->data, s);
  }
  parallel_for(count * heads, options_.threads, [&](int64_t i) {
    Layer& l = *layers[i / heads];
    const auto h = static_cast<int32_t>(i % heads);
    status[i] = encode_row(scheme_, l.data, l.shared, h, &l.rows[h]);
    if (!status[i] || !info_.sequences[l.data.seq].layers[l.data.layer].has_significance) return;
    if (l.data.significance[h].empty()) return;
    l.rows[h].push_back({key_of(ChunkKind::kSignificance, l.data.seq, l.data.layer, h),
                         serialize_values(l.data.significance[h]), true});
  });
  for (int64_t i = 0; i < count * heads; ++i) {
    const Layer& l = *layers[i / heads];
    if (!status[i]) return at(l.data, status[i]);
    const RowPlan& plan = l.shared.plans[i % heads];
    summary_.values += 2 * plan.tokens * info_.layout.head_dim;
    for (int t = 0; t < kNumTiers; ++t) summary_.tokens[t] += plan.count[t];
  }
  return Status::ok();
}

Status Compressor::write_batch(const Batch& layers) {
  const StopWatch watch;
  for (const std::unique_ptr<Layer>& layer : layers) {
    if (Status s = write_layer(*layer); !s) return s;
  }
  summary_.write_seconds += watch.seconds();
  return Status::ok();
}

Status Compressor::run() {
  if (Status s = write_head(); !s) return s;
  // One batch is written while the next one is read and encoded.
  const auto policy = options_.threads > 1 ? std::launch::async : std::launch::deferred;
  std::future<Status> writing = std::async(std::launch::deferred, [] { return Status::ok(); });
  for (int64_t next = 0; next < total_layers();) {
    auto batch = std::make_shared<Batch>();
    const StopWatch reading;
    if (Status s = load_batch(&next, batch.get()); !s) return s;
    summary_.read_seconds += reading.seconds();
    const StopWatch encoding;
    if (Status s = encode_batch(*batch); !s) return s;
    summary_.encode_seconds += encoding.seconds();
    if (Status s = writing.get(); !s) return s;
    writing = std::async(policy, [this, batch] { return write_batch(*batch); });
    if (options_.progress) {
      options_.progress(static_cast<double>(next) / static_cast<double>(total_layers()));
    }
  }
  return writing.get();
}

Status check(const datasets::DumpInfo& info, const CompressOptions& options) {
  const Scheme scheme = options.preset.scheme.for_head_dim(info.layout.head_dim);
  const auto refuse = [&](StatusCode code, const std::string& why) {
    return Status(code, info.path + ": preset " + options.preset.text + ": " + why);
  };
  if (scheme.coder == Coder::kZstd || scheme.has_baseline_coder() ||
      scheme.eviction != Eviction::kNone) {
    return refuse(StatusCode::kUnsupported,
                  "it is a baseline of the analysis; the container does not hold it");
  }
  if (Status s = scheme.validate(info.layout.head_dim); !s) return refuse(s.code(), s.message());
  const Profile* p = options.profile;
  const bool matrix =
      scheme.high.k.basis == BasisKind::kMatrix || scheme.high.v.basis == BasisKind::kMatrix;
  if (p != nullptr &&
      (p->num_layers != info.layout.num_layers || p->num_kv_heads != info.layout.num_kv_heads ||
       p->head_dim != info.layout.head_dim)) {
    return refuse(StatusCode::kInvalidArgument, "the profile is of another model");
  }
  if (matrix && (p == nullptr || p->rows.empty() || p->rows[0].key_forward.empty())) {
    return refuse(StatusCode::kInvalidArgument,
                  "basis=matrix needs a profile with bases (calibrate --basis matrix)");
  }
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
  if (Status s = writer->finish(); !s) return s;
  CompressSummary summary = compressor.summary();
  summary.file_bytes = writer->file_bytes();
  return summary;
}

}  // namespace tierkv::analysis

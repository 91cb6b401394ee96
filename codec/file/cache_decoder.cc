// SPDX-License-Identifier: Apache-2.0
// CacheDecoder and verify(): a container back into rows.
#include <algorithm>
#include <set>
#include <string_view>

#include "codec/file/cache_decoder.h"
#include "codec/file/container_chunks.h"
#include "codec/file/container_pages.h"
#include "codec/format/byte_cursor.h"
#include "codec/format/errors.h"
#include "codec/host/parallel.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

constexpr int64_t kBatchBytes = int64_t{256} << 20;  // of rows decoded at once
constexpr int64_t kMaxRowValues = int64_t{1} << 30;  // a row is decoded whole, 8 GiB at most
constexpr Component kComponents[] = {Component::kKey, Component::kValue};
constexpr Part kParts[] = {Part::kSinks, Part::kHigh, Part::kLow, Part::kKeyGap, Part::kWindow};

ChunkKey key_of(ChunkKind kind, int32_t seq, int32_t layer, int32_t head) {
  return {kind, seq, layer, head, 0, 0};
}

bool all_finite(const float* x, int64_t n) {
  uint32_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) wrong |= static_cast<uint32_t>(!is_finite(x[i]));
  return wrong == 0;
}

void mark_pruned(const RowPlan& plan, int64_t tokens, DecodedRow* out) {
  out->pruned.assign(tokens, 0);
  out->any_pruned = false;
  for (size_t t = 0; t < plan.tiers.size(); ++t) {
    out->pruned[t] = plan.tiers[t] == Tier::kPruned;
    out->any_pruned |= out->pruned[t] != 0;
  }
}

}  // namespace

bool holds_store_sequence(const ContainerReader& container) {
  return container.find(key_of(ChunkKind::kStore, 0, kNotApplicable, kNotApplicable)) >= 0;
}

Result<CacheDecoder> CacheDecoder::open(ContainerReader reader) {
  CacheDecoder decoder(std::move(reader));
  if (Status s = decoder.load(); !s) return s;
  return decoder;
}

Status CacheDecoder::load() {
  if (holds_store_sequence(reader_)) {
    return Status(StatusCode::kUnsupported,
                  reader_.path() + ": holds a store's sequence, which only a store can load");
  }
  Result<ContainerModel> model = read_chunk(
      key_of(ChunkKind::kModel, kNotApplicable, kNotApplicable, kNotApplicable), parse_model);
  if (!model) return model.status();
  model_ = std::move(model.value());
  if (Status s = check_rope(); !s) return s;
  for (int32_t s = 0; s < model_.num_sequences; ++s) {
    Result<ContainerSequence> sequence =
        read_chunk(key_of(ChunkKind::kSequence, s, kNotApplicable, kNotApplicable), parse_sequence);
    if (!sequence) return sequence.status();
    const auto tokens = static_cast<int64_t>(sequence->tokens.size());
    if (tokens > kMaxRowValues / model_.layout.head_dim) {
      return Status(StatusCode::kUnsupported, reader_.path() + ": sequence " + std::to_string(s) +
                                                  ": rows of more than 2^30 values");
    }
    sequences_.push_back(std::move(sequence.value()));
  }
  if (Status s = check_ids(); !s) return s;
  return check_rows();
}

// A dump holds no other rotation, so that decompress() could not write it.
Status CacheDecoder::check_rope() const {
  if (model_.rope.empty()) return Status::ok();
  const Rope& first = model_.rope[0];  // layers share pairing and dims
  const bool turns = first.pairing != RopePairing::kNone;
  const char* what = turns != model_.layout.rope_applied ? "the pairing contradicts rope_applied"
                     : turns && first.rotary_dims == 0   ? "a pairing without rotary dims"
                                                         : nullptr;
  if (what == nullptr) return Status::ok();
  return corrupt(reader_.path() + ": model: rope: " + what);
}

// A dump holds no other ids either.
Status CacheDecoder::check_ids() const {
  constexpr size_t kMaxIdBytes = 100;
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  std::set<std::string_view> seen;
  for (size_t s = 0; s < sequences_.size(); ++s) {
    const std::string& id = sequences_[s].id;
    const ChunkKey key =
        key_of(ChunkKind::kSequence, static_cast<int32_t>(s), kNotApplicable, kNotApplicable);
    if (id == "." || id.size() > kMaxIdBytes || std::any_of(id.begin(), id.end(), is_control)) {
      return corrupt_chunk(key,
                           "its id is '.', has more than 100 bytes or holds a control character");
    }
    if (!seen.insert(id).second) {
      return corrupt_chunk(key, "another sequence has its id '" + id + "'");
    }
  }
  return Status::ok();
}

// Callers keep state for every row before they decode one: its size must not outgrow the file.
Status CacheDecoder::check_rows() const {
  const std::vector<ChunkEntry>& chunks = reader_.chunks();
  const int64_t found = std::count_if(chunks.begin(), chunks.end(), [](const ChunkEntry& c) {
    return c.key.kind == ChunkKind::kRow;
  });
  const CacheLayout& l = model_.layout;
  const int64_t needed = int64_t{model_.num_sequences} * l.num_layers * l.num_kv_heads;
  if (found >= needed) return Status::ok();
  return corrupt(reader_.path() + ": has " + std::to_string(found) +
                 " row maps, its sequences, layers and heads need " + std::to_string(needed));
}

// The basis of the (sequence, layer, head, component) that `key` names.
Result<StoredBasis> CacheDecoder::read_basis(ChunkKey key) const {
  key.kind = ChunkKind::kBasis;
  key.part = 0;
  key.page = 0;
  if (reader_.find(key) < 0) key.sequence = kNotApplicable;
  const int32_t d = model_.layout.head_dim;
  return read_chunk(key, [d](const auto& bytes) { return parse_basis(bytes, d); });
}

Status CacheDecoder::require_absent(const ChunkKey& key) const {
  if (reader_.find(key) < 0) return Status::ok();
  return corrupt_chunk(key, "the row map gives it no tokens");
}

// Decodes the segment `key` into rows tokens[i] of out [sequence tokens, head_dim].
Status CacheDecoder::decode_part(const ChunkKey& key, const std::vector<int64_t>& tokens,
                                 float* out) const {
  const int32_t d = model_.layout.head_dim;
  const auto refuse = [&](const std::string& what) { return corrupt_chunk(key, what); };
  Result<StoredSegment> segment =
      read_chunk(key, [d](const auto& bytes) { return parse_segment(bytes, d); });
  if (!segment) return segment.status();
  const auto count = static_cast<int64_t>(tokens.size());
  if (segment->data.tokens != count) {
    return refuse("holds " + std::to_string(segment->data.tokens) + " tokens, the row map says " +
                  std::to_string(count));
  }
  StoredBasis basis;
  if (segment->needs_basis()) {
    Result<StoredBasis> stored = read_basis(key);
    if (!stored) return stored.status();
    basis = std::move(stored.value());
    const ComponentFormat& f = segment->format.format;
    if (f.basis != basis.basis.kind) return refuse("its basis is of another kind");
    if (f.step_rule == StepRule::kAbsolute && !(basis.step > 0)) return refuse("has no step");
    segment->format.step = basis.step;
    if (f.basis != BasisKind::kNone) segment->format.basis = &basis.basis;
  }
  std::optional<Codebook> codebook;
  WeightedRow row;
  std::shared_ptr<const RopeTable> rope;  // of the row
  BookFamily family;
  if (segment->format.is_weighted()) {
    if (segment->format.weighted.first_position != tokens[0] ||
        tokens.back() - tokens[0] != count - 1) {
      return refuse("its tokens are not those of the row map");
    }
    Result<WeightedRow> stored = read_weighted_row(key);
    if (!stored) return stored.status();
    if (key.component == static_cast<uint8_t>(Component::kKey)) {
      Result<std::shared_ptr<const RopeTable>> table = rope_table(key.layer);
      if (!table) return table.status();
      rope = std::move(*table);
      stored->rope = rope.get();
    }
    Result<BookFamily> books = read_family(key);
    if (!books) return books.status();
    row = std::move(*stored);
    family = std::move(*books);
    WeightedSegment& weighted = segment->format.weighted;
    weighted.component = static_cast<Component>(key.component);
    weighted.row = &row;
    weighted.family = &family;
  } else if (segment->format.coded) {
    Result<Codebook> parsed = read_codebook(key);
    if (!parsed) return parsed.status();
    codebook = std::move(parsed.value());
    segment->format.codebook = &*codebook;
  }
  SegmentDecoder decoder(segment->format, segment->data);
  std::vector<float> x(kBlockTokens * d);
  for (int64_t t = 0; t < count; t += kBlockTokens) {
    const auto n = std::min<int64_t>(kBlockTokens, count - t);
    if (StatusCode s = decoder.read(n, x.data()); s != StatusCode::kOk) {
      return refuse("its codes cannot be decoded from token " + std::to_string(t) + " on");
    }
    if (!all_finite(x.data(), n * d)) {
      return refuse("a value is not finite from token " + std::to_string(t) + " on");
    }
    for (int64_t i = 0; i < n; ++i) std::copy_n(x.data() + i * d, d, out + tokens[t + i] * d);
  }
  return Status::ok();
}

// A part that is stored as pages; `key` is that of its first page.
Status CacheDecoder::decode_pages(ChunkKey key, const StoredPageFormat& format, const RowPlan& plan,
                                  DecodedRow* out) const {
  StoredBasis bases[2];
  PageSink sink = {out->k.data(), out->v.data(), {}};
  for (int c = 0; c < 2; ++c) {
    if (format.basis[c] == BasisKind::kNone) continue;
    ChunkKey basis_key = key;
    basis_key.component = static_cast<uint8_t>(c);
    Result<StoredBasis> stored = read_basis(basis_key);
    if (!stored) return stored.status();
    bases[c] = std::move(stored.value());
    if (bases[c].basis.kind != format.basis[c]) {
      return corrupt_chunk(key, "its basis is of another kind");
    }
    sink.basis[c] = &bases[c].basis;
  }
  const auto part = static_cast<Part>(key.part);
  const std::vector<int64_t> list = part_tokens(plan, Component::kKey, part);
  if (list != part_tokens(plan, Component::kValue, part)) {
    return corrupt_chunk(key, "the row map gives its keys and values different tokens");
  }
  const std::vector<int32_t> positions(list.begin(), list.end());
  const auto total = static_cast<int32_t>(positions.size());
  std::vector<uint8_t> bytes;
  for (int32_t first = 0; first < total; first += format.shape.tokens, ++key.page) {
    const PageTokens tokens = {positions.data() + first,
                               std::min(format.shape.tokens, total - first)};
    Status s = reader_.read(key, &bytes);
    // A page that the row map needs is no question of the caller's.
    if (s.code() == StatusCode::kNotFound) return corrupt(s.message());
    if (!s) return s;
    s = decode_page(format, bytes, tokens, sink);
    if (!s) return s.with_context(reader_.path() + ": " + to_string(key));
    const int64_t d = model_.layout.head_dim;
    for (int32_t t = 0; t < tokens.count; ++t) {
      const int64_t at = tokens.positions[t] * d;
      if (!all_finite(sink.k + at, d) || !all_finite(sink.v + at, d)) {
        return corrupt_chunk(key, "a value is not finite");
      }
    }
  }
  return require_absent(key);
}

Result<RowPlan> CacheDecoder::read_plan(int32_t seq, int32_t layer, int32_t kv_head) const {
  const auto tokens = static_cast<int64_t>(sequences_[seq].tokens.size());
  return read_chunk(key_of(ChunkKind::kRow, seq, layer, kv_head),
                    [tokens](const auto& bytes) { return parse_row(bytes, tokens); });
}

Status CacheDecoder::read_pruned(int32_t seq, int32_t layer, int32_t kv_head,
                                 DecodedRow* out) const {
  const Result<RowPlan> plan = read_plan(seq, layer, kv_head);
  if (!plan) return plan.status();
  mark_pruned(*plan, static_cast<int64_t>(sequences_[seq].tokens.size()), out);
  return Status::ok();
}

Status CacheDecoder::decode_row(int32_t seq, int32_t layer, int32_t kv_head,
                                DecodedRow* out) const {
  const auto tokens = static_cast<int64_t>(sequences_[seq].tokens.size());
  const int32_t d = model_.layout.head_dim;
  const Result<RowPlan> plan = read_plan(seq, layer, kv_head);
  if (!plan) return plan.status();
  out->k.assign(tokens * d, 0.0f);
  out->v.assign(tokens * d, 0.0f);
  for (const Part part : kParts) {
    ChunkKey key = key_of(ChunkKind::kPageFormat, seq, layer, kv_head);
    key.part = static_cast<uint8_t>(part);
    if (reader_.find(key) < 0) key.head = kNotApplicable;
    const bool paged = reader_.find(key) >= 0;
    if (paged) {
      Result<StoredPageFormat> format =
          read_chunk(key, [d](const auto& bytes) { return parse_page_format(bytes, d); });
      if (!format) return format.status();
      key.kind = ChunkKind::kPage;
      key.head = kv_head;
      if (Status s = decode_pages(key, *format, *plan, out); !s) return s;
    }
    key.kind = ChunkKind::kSegment;
    key.head = kv_head;
    for (const Component c : kComponents) {
      key.component = static_cast<uint8_t>(c);
      if (paged && reader_.find(key) < 0) continue;
      if (paged) return corrupt_chunk(key, "its part is stored as pages");
      const std::vector<int64_t> list = part_tokens(*plan, c, part);
      float* const to = c == Component::kKey ? out->k.data() : out->v.data();
      Status s = list.empty() ? require_absent(key) : decode_part(key, list, to);
      if (!s) return s;
    }
  }
  mark_pruned(*plan, tokens, out);
  return Status::ok();
}

Result<std::vector<int32_t>> CacheDecoder::query_positions(int32_t seq, int32_t layer) const {
  const ChunkKey key = key_of(ChunkKind::kQueryPositions, seq, layer, kNotApplicable);
  if (reader_.find(key) < 0) return std::vector<int32_t>();
  const auto tokens = static_cast<int64_t>(sequences_[seq].tokens.size());
  return read_chunk(key, [&](const auto& bytes) -> Result<std::vector<int32_t>> {
    ByteReader r(bytes);
    const uint64_t count = r.u64();
    if (!r.ok() || count == 0 || count != r.left() / 4 || r.left() % 4 != 0) {
      return corrupt("size disagrees with its fields");
    }
    std::vector<int32_t> positions(count);
    int32_t previous = -1;
    for (int32_t& p : positions) {
      p = r.i32();
      if (p <= previous || p >= tokens) {
        return corrupt("positions do not ascend within the sequence");
      }
      previous = p;
    }
    return positions;
  });
}

Result<std::vector<float>> CacheDecoder::values(const ChunkKey& key, int64_t count) const {
  return read_chunk(key, [count](const auto& bytes) { return parse_values(bytes, count); });
}

Result<std::vector<float>> CacheDecoder::queries(int32_t seq, int32_t layer, int32_t q_head,
                                                 int64_t positions) const {
  return values(key_of(ChunkKind::kQueries, seq, layer, q_head),
                positions * model_.layout.head_dim);
}

Result<std::vector<float>> CacheDecoder::significance(int32_t seq, int32_t layer,
                                                      int32_t kv_head) const {
  const ChunkKey key = key_of(ChunkKind::kSignificance, seq, layer, kv_head);
  if (reader_.find(key) < 0) return std::vector<float>();
  return values(key, static_cast<int64_t>(sequences_[seq].tokens.size()));
}

Status read_carried(const CacheDecoder& decoder, int32_t seq, int32_t layer, CarriedOver* out) {
  const CacheLayout& layout = decoder.model().layout;
  Result<std::vector<int32_t>> positions = decoder.query_positions(seq, layer);
  if (!positions) return positions.status();
  out->positions = std::move(positions.value());
  const auto count = static_cast<int64_t>(out->positions.size());
  for (int32_t q = 0; q < layout.num_q_heads && count > 0; ++q) {
    Result<std::vector<float>> values = decoder.queries(seq, layer, q, count);
    if (!values) return values.status();
    out->queries.push_back(std::move(values.value()));
  }
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    Result<std::vector<float>> values = decoder.significance(seq, layer, h);
    if (!values) return values.status();
    if (h > 0 && values->empty() != out->significance[0].empty()) {
      return corrupt(decoder.container().path() + ": some heads of layer " + std::to_string(layer) +
                     " have significance and some have not");
    }
    out->significance.push_back(std::move(values.value()));
  }
  return Status::ok();
}

Status decode_all(const CacheDecoder& decoder, int32_t threads, const VisitLayer& visit,
                  const std::function<void(double)>& progress) {
  const ContainerModel& model = decoder.model();
  const int32_t heads = model.layout.num_kv_heads, layers = model.layout.num_layers;
  const auto sequences = static_cast<int32_t>(decoder.sequences().size());
  for (int32_t seq = 0; seq < sequences; ++seq) {
    const int64_t layer_bytes = static_cast<int64_t>(decoder.sequences()[seq].tokens.size()) *
                                heads * 8 * model.layout.head_dim;
    // Enough layers to keep all threads busy, unless they are large.
    const int64_t affordable =
        std::max<int64_t>(1, kBatchBytes / std::max<int64_t>(1, layer_bytes));
    const auto batch = static_cast<int32_t>(
        std::min<int64_t>({affordable, (2 * threads + heads - 1) / heads, layers}));
    std::vector<DecodedRow> rows(int64_t{batch} * heads);
    for (int32_t first = 0; first < layers; first += batch) {
      const int32_t n = std::min(batch, layers - first);
      std::vector<CarriedOver> carried(n);
      const Status decoded = try_parallel_for(int64_t{n} * (heads + 1), threads, [&](int64_t i) {
        const auto l = static_cast<int32_t>(i / (heads + 1)),
                   h = static_cast<int32_t>(i % (heads + 1));
        return h < heads ? decoder.decode_row(seq, first + l, h, &rows[int64_t{l} * heads + h])
                         : read_carried(decoder, seq, first + l, &carried[l]);
      });
      if (!decoded) return decoded;
      for (int32_t l = 0; l < n; ++l) {
        if (Status s = visit(seq, first + l, rows.data() + int64_t{l} * heads, carried[l]); !s)
          return s;
        if (progress)
          progress((double{1} * seq * layers + first + l + 1) / (double{1} * sequences * layers));
      }
    }
  }
  return Status::ok();
}

Status verify_chunks(const ContainerReader& container, int32_t threads) {
  const auto chunks = static_cast<int64_t>(container.chunks().size());
  return try_parallel_for(chunks, threads, [&](int64_t i) {
    std::vector<uint8_t> payload;
    return container.read(i, &payload);
  });
}

Status verify(const CacheDecoder& decoder, int32_t threads,
              const std::function<void(double)>& progress) {
  if (Status s = verify_chunks(decoder.container(), threads); !s) return s;
  const auto nothing = [](int32_t, int32_t, const DecodedRow*, const CarriedOver&) {
    return Status::ok();
  };
  return decode_all(decoder, threads, nothing, progress);
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// Rows and layers of a dump as chunks of a container.
#include "tools/container/container_encode.h"

#include <algorithm>
#include <optional>

#include "codec/format/byte_cursor.h"
#include "tools/analysis/scheme/row_pages.h"
#include "tools/container/chunk_write.h"

namespace tierkv::analysis {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};
constexpr Part kParts[] = {Part::kSinks, Part::kHigh, Part::kLow, Part::kKeyGap, Part::kWindow};

ChunkKey key_of(ChunkKind kind, int32_t seq, int32_t layer, int32_t head) {
  return {kind, seq, layer, head, 0, 0};
}

// Null where segments hold the part.
std::optional<StoredPageFormat> page_format_of(const Scheme& scheme, Part part, DType dtype,
                                               int32_t head_dim) {
  const bool low = part == Part::kLow;
  if (part != Part::kHigh && !low) return std::nullopt;
  if (scheme.coder != Coder::kNone || (low && !scheme.tiered)) return std::nullopt;
  const std::vector<TierFormat> formats = page_formats(scheme);
  const Result<PageChoice> choice = choose_page_size(formats, head_dim, page_sizing(scheme));
  if (!choice) return std::nullopt;
  const TierFormat& tier = low ? scheme.low : scheme.high;
  const Result<PageShape> shape = page_shape(tier, head_dim);
  if (!shape) return std::nullopt;
  StoredPageFormat f;
  f.shape = *shape;
  f.shape.tokens =
      choice->tokens[std::find(formats.begin(), formats.end(), tier) - formats.begin()];
  f.raw_dtype = dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  f.has_scores = scheme.has_records();
  for (const Component c : kComponents) {
    const ComponentFormat& own = tier.of(c);
    if (own.is_raw()) continue;
    f.basis[static_cast<int>(c)] = own.basis;
    f.rule[static_cast<int>(c)] = own.step_rule;
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
               const std::array<ComponentContext, 2>& context, ChunkBlock* out) {
  for (const Component c : kComponents) {
    const ComponentContext& own = context[static_cast<int>(c)];
    if (own.basis.kind == BasisKind::kNone && scheme.high.of(c).step_rule != StepRule::kAbsolute) {
      continue;
    }
    ChunkKey key = key_of(ChunkKind::kBasis, seq, layer, head);
    key.component = static_cast<uint8_t>(c);
    out->add(key, serialize_basis({own.basis, own.step}));
  }
}

void add_weighted_row(int32_t seq, int32_t layer, int32_t head, const LayerScheme& shared,
                      ChunkBlock* out) {
  out->add(key_of(ChunkKind::kWeightedRow, seq, layer, head),
           serialize_weighted_row(shared.weighted[head]));
}

// The books of a family, one chunk each.
void add_family(const LayerData& data, Component c, const BookFamily& family, ChunkBlock* out) {
  ChunkKey key = key_of(ChunkKind::kCodebook, data.seq, data.layer, kNotApplicable);
  key.component = static_cast<uint8_t>(c);
  key.part = static_cast<uint8_t>(Part::kHigh);
  for (const Codebook& book : family.books) {
    std::vector<uint8_t> bytes;
    serialize_codebook(book, &bytes);
    out->add(key, bytes);
    ++key.page;
  }
}

Status encode_segment(RowCodec& codec, const LayerData& data, int32_t head, Component c, Part part,
                      ChunkBlock* out) {
  if (StatusCode s = codec.encode_part(c, part); s != StatusCode::kOk)
    return cannot_hold(s, data, head, {c});
  const EncodedSegment& segment = codec.segment(c, part);
  if (segment.tokens == 0) return Status::ok();
  Result<std::vector<uint8_t>> bytes = serialize_segment(codec.coding(c, part).stored, segment);
  if (!bytes) return bytes.status();
  ChunkKey key = key_of(ChunkKind::kSegment, data.seq, data.layer, head);
  key.component = static_cast<uint8_t>(c);
  key.part = static_cast<uint8_t>(part);
  out->add(key, *bytes);
  return Status::ok();
}

Status encode_pages(const StoredPageFormat& format, const LayerData& data,
                    const LayerScheme& shared, int32_t head, Part part, ChunkBlock* out) {
  const std::vector<int64_t> list = part_tokens(shared.plans[head], Component::kKey, part);
  const std::vector<int32_t> positions(list.begin(), list.end());
  PageSource source;
  source.input = {&data.k[head], &data.v[head]};
  if (format.has_scores) source.significance = data.significance[head].data();
  for (int c = 0; c < 2; ++c) source.basis[c] = &shared.context[head][c].basis;
  const auto total = static_cast<int32_t>(positions.size());
  ChunkKey key = key_of(ChunkKind::kPage, data.seq, data.layer, head);
  key.part = static_cast<uint8_t>(part);
  // Room for all of them at once; chunks are padded to 16 bytes.
  out->reserve(format.pages(total) * (format.bytes(format.shape.tokens) + 16));
  std::vector<uint8_t> page;
  for (int32_t first = 0; first < total; first += format.shape.tokens, ++key.page) {
    const PageTokens tokens = {positions.data() + first,
                               std::min(format.shape.tokens, total - first)};
    if (Status s = encode_page(format, source, tokens, &page); !s) {
      return cannot_hold(s.code(), data, head, {Component::kKey, Component::kValue});
    }
    out->add(key, page);
  }
  return Status::ok();
}

}  // namespace

Status encode_row(const Scheme& all, const LayerData& data, const LayerScheme& shared, int32_t head,
                  bool with_significance, ChunkBlock* out) {
  const Scheme& scheme = shared.scheme_of(all, head);
  RowCodec codec = shared.row(all, data, head);
  out->add(key_of(ChunkKind::kRow, data.seq, data.layer, head), serialize_row(shared.plans[head]));
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
  if (!with_significance || data.significance[head].empty()) return Status::ok();
  out->add(key_of(ChunkKind::kSignificance, data.seq, data.layer, head),
           serialize_values(data.significance[head]), true);
  return Status::ok();
}

void encode_shared(const Scheme& scheme, const LayerData& data, const LayerScheme& shared,
                   SharedBases bases, ChunkBlock* out) {
  const auto heads = static_cast<int32_t>(data.k.size());
  const int32_t owner = bases == SharedBases::kOfSequence ? data.seq : kNotApplicable;
  for (int32_t h = 0; h < heads && scheme.weighted(); ++h) {
    // A profile without means leaves them to the sequence.
    const bool own = bases == SharedBases::kOfSequence || shared.own_bytes[h] > 0;
    if (own || bases != SharedBases::kWritten)
      add_weighted_row(own ? data.seq : owner, data.layer, h, shared, out);
  }
  for (int32_t h = 0; h < heads && bases != SharedBases::kWritten; ++h) {
    add_bases(scheme, owner, data.layer, h, shared.context[h], out);
  }
  for (const Component c : kComponents) {
    const std::optional<BookChoice>& books = shared.books[static_cast<int>(c)];
    if (books) add_family(data, c, books->family, out);
    for (const Part part : {Part::kHigh, Part::kLow}) {
      const auto& book = shared.codebooks[static_cast<int>(c)][part == Part::kLow];
      if (!book) continue;
      ChunkKey key = key_of(ChunkKind::kCodebook, data.seq, data.layer, kNotApplicable);
      key.component = static_cast<uint8_t>(c);
      key.part = static_cast<uint8_t>(part);
      std::vector<uint8_t> bytes;
      serialize_codebook(*book, &bytes);
      out->add(key, bytes);
    }
  }
  // Rows of one class say their formats one by one, or else the layer says it for all of them.
  for (int32_t h = 0; h < (shared.schemes.empty() ? 1 : heads); ++h) {
    for (const Part part : {Part::kHigh, Part::kLow}) {
      const auto pages =
          page_format_of(shared.scheme_of(scheme, h), part, data.k[h].dtype, data.k[h].head_dim);
      if (!pages) continue;
      ChunkKey key = key_of(ChunkKind::kPageFormat, data.seq, data.layer,
                            shared.schemes.empty() ? kNotApplicable : h);
      key.part = static_cast<uint8_t>(part);
      out->add(key, serialize_page_format(*pages));
    }
  }
}

void encode_queries(const LayerData& data, const CacheLayout& layout, ChunkBlock* out) {
  if (!data.has_queries()) return;
  out->add(key_of(ChunkKind::kQueryPositions, data.seq, data.layer, kNotApplicable),
           serialize_positions(data.positions), true);
  const auto size = static_cast<int64_t>(data.positions.size()) * layout.head_dim;
  for (int32_t q = 0; q < layout.num_q_heads; ++q) {
    const float* x = data.q[q / layout.group_size()].data() + (q % layout.group_size()) * size;
    out->add(key_of(ChunkKind::kQueries, data.seq, data.layer, q),
             serialize_values(std::vector<float>(x, x + size)), true);
  }
}

}  // namespace tierkv::analysis

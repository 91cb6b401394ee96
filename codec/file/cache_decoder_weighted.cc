// SPDX-License-Identifier: Apache-2.0
// What a CacheDecoder reads for weighted steps: rotations, rows, families of codebooks.
#include <algorithm>

#include "codec/file/cache_decoder.h"
#include "codec/format/errors.h"

namespace tierkv {

// Layers of equal rotation share a table.
Status CacheDecoder::load_ropes() {
  const std::vector<ChunkEntry>& chunks = reader_.chunks();
  if (std::none_of(chunks.begin(), chunks.end(),
                   [](const ChunkEntry& c) { return c.key.kind == ChunkKind::kWeightedRow; })) {
    return Status::ok();
  }
  size_t tokens = 1;
  for (const ContainerSequence& s : sequences_) tokens = std::max(tokens, s.tokens.size());
  const int32_t layers = model_.layout.num_layers;
  rope_.resize(layers);
  for (int32_t l = 0; l < layers; ++l) {
    const Rope* rope = model_.rope_of(l);
    if (rope == nullptr || rope->pairing == RopePairing::kNone) continue;
    for (int32_t other = 0; other < l && rope_[l] == nullptr; ++other) {
      if (*model_.rope_of(other) == *rope) rope_[l] = rope_[other];
    }
    if (rope_[l] != nullptr) continue;
    Result<RopeTable> table =
        make_rope_table(*rope, model_.layout.head_dim, static_cast<int64_t>(tokens));
    if (!table) {
      return corrupt(reader_.path() + ": " + table.status().message());
    }
    rope_[l] = std::make_shared<const RopeTable>(std::move(*table));
  }
  return Status::ok();
}

// The means, weights and steps of the (sequence, layer, head) that `key` names.
Result<WeightedRow> CacheDecoder::read_weighted_row(ChunkKey key) const {
  const int32_t layer = key.layer;
  key.kind = ChunkKind::kWeightedRow;
  key.component = key.part = 0;
  key.page = 0;
  if (reader_.find(key) < 0) key.sequence = kNotApplicable;
  const int32_t d = model_.layout.head_dim;
  Result<WeightedRow> row =
      read_chunk(key, [d](const auto& bytes) { return parse_weighted_row(bytes, d); });
  if (row && !rope_.empty()) row->rope = rope_[layer].get();
  return row;
}

// A book of the (layer, component, part) that `key` names.
Result<Codebook> CacheDecoder::read_codebook(ChunkKey key) const {
  key.kind = ChunkKind::kCodebook;
  key.head = kNotApplicable;
  return read_chunk(key, [](const auto& bytes) {
    return parse_codebook(bytes.data(), static_cast<int64_t>(bytes.size()));
  });
}

Result<BookFamily> CacheDecoder::read_family(ChunkKey key) const {
  key.kind = ChunkKind::kCodebook;
  key.head = kNotApplicable;
  BookFamily family;
  for (key.page = 0; key.page < kMaxFamilyBooks; ++key.page) {
    if (key.page > 0 && reader_.find(key) < 0) break;
    Result<Codebook> book = read_codebook(key);
    if (!book) return book.status();
    family.books.push_back(std::move(*book));
  }
  key.page = 0;
  if (Status s = family.validate(); !s) return corrupt_chunk(key, s.message());
  return family;
}

}  // namespace tierkv

// SPDX-License-Identifier: Apache-2.0
// What a CacheDecoder reads for weighted steps: rotations, rows, families of codebooks.
#include <algorithm>

#include "codec/file/cache_decoder.h"
#include "codec/format/errors.h"

namespace tierkv {

Result<std::shared_ptr<const RopeTable>> CacheDecoder::rope_table(int32_t layer) const {
  constexpr size_t kMostTables = 4;  // a table may take 64 MiB
  const Rope* rope = model_.rope_of(layer);
  if (rope == nullptr || rope->pairing == RopePairing::kNone) {
    return std::shared_ptr<const RopeTable>();
  }
  const std::lock_guard<std::mutex> lock(ropes_->mutex);
  for (const RopeTables::Entry& e : ropes_->entries) {
    if (*e.rope == *rope) return e.table;
  }
  size_t tokens = 1;
  for (const ContainerSequence& s : sequences_) tokens = std::max(tokens, s.tokens.size());
  Result<RopeTable> table =
      make_rope_table(*rope, model_.layout.head_dim, static_cast<int64_t>(tokens));
  if (!table) return corrupt(reader_.path() + ": " + table.status().message());
  if (ropes_->entries.size() == kMostTables) ropes_->entries.pop_front();
  ropes_->entries.push_back({rope, std::make_shared<const RopeTable>(std::move(*table))});
  return ropes_->entries.back().table;
}

// The means, weights and steps of the (sequence, layer, head) that `key` names.
Result<WeightedRow> CacheDecoder::read_weighted_row(ChunkKey key) const {
  key.kind = ChunkKind::kWeightedRow;
  key.component = key.part = 0;
  key.page = 0;
  if (reader_.find(key) < 0) key.sequence = kNotApplicable;
  const int32_t d = model_.layout.head_dim;
  return read_chunk(key, [d](const auto& bytes) { return parse_weighted_row(bytes, d); });
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

// Sequences of tiered stores: a row, then its pages, side by side as in an export.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "codec/format/byte_cursor.h"
#include "codec/format/coded_block.h"
#include "codec/host/parallel.h"
#include "store/cold/cold_format.h"
#include "store/cold/cold_pages.h"
#include "store/cold/sequence_bytes.h"

namespace tierkv {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};
// Of a codebook's chunk beside its payload: its entry of the index, and padding at most.
constexpr int64_t kChunkCost = 64;
// Of a coded block beside its code words, with one stream a lane.
constexpr int64_t kBlockCost = kCodedBlockHeaderBytes + 64;

// The shapes of a store, without its memory.
Result<StoreView> view_of(const KvStoreConfig& config) {
  const Result<StoreShape> shape = store_shape(config);
  if (!shape) return shape.status();
  StoreView view = store_view(config, *shape);
  view.allocator.shape = shape->allocator;
  return view;
}

uint8_t part_of(int32_t side) {
  return side == kHighSide ? kHighPart : side == kLowSide ? kLowPart : kWindowPart;
}

// The codebooks of a layer; those that are not there say that codes are stored as they are.
struct LayerBooks {
  std::optional<Codebook> of[kStoreSides][2];
  PageBooks side(int32_t side) const {
    PageBooks books;
    for (int i = 0; i < 2; ++i) books.of[i] = of[side][i] ? &*of[side][i] : nullptr;
    return books;
  }
};

// visit(side, page index, tokens in use, packed bytes) for each page of a row.
template <class Visit>
void for_each_page(const StoreView& s, const ImportedRow& row, const Visit& visit) {
  const uint8_t* packed = row.pages;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (int32_t i = 0; i < pages_for(row.tokens.of[side], s.page_tokens(side)); ++i) {
      const int32_t used = s.page_used(side, i, row.tokens.of[side]);
      visit(side, i, used, packed);
      packed += packed_page_bytes(s.layouts[side], used);
    }
  }
}

// A codebook for the codes of one side and component of a layer, where it saves bytes.
Status choose_book(const StoreView& s, const ImportedRow* rows, int32_t side, Component c,
                   std::optional<Codebook>* book) {
  const PageLayout& layout = s.layouts[side];
  CodeHistogram histogram = make_field_histogram(layout, c);
  int64_t blocks = 0;
  for (int32_t h = 0; h < s.num_kv_heads; ++h) {
    for_each_page(s, rows[h], [&](int32_t of, int32_t, int32_t used, const uint8_t* packed) {
      if (of != side) return;
      count_page_fields(layout, packed, used, c, &histogram);
      const int32_t rows_of_tile = kTileTokens * slice_count(layout.head_dim());
      blocks += pages_for(pages_for(used, kTileTokens) * rows_of_tile, kBlockTokens);
    });
  }
  if (histogram.empty()) return Status::ok();
  int64_t payload = 0;
  Result<Codebook> found = build_field_codebook(histogram, layout.tile(c).type.bits(), &payload);
  if (!found) return found.status();
  const int64_t coded = payload + kBlockCost * blocks + codebook_bytes(*found) + kChunkCost;
  if (coded < histogram.total() * layout.tile(c).type.bits() / 8) *book = std::move(*found);
  return Status::ok();
}

Status add_books(const StoreView& s, const ImportedRow* rows, int32_t layer, LayerBooks* books,
                 ChunkBlock* out) {
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (const Component c : kComponents) {
      if (!has_coded_fields(s.layouts[side], c)) continue;
      const auto i = static_cast<uint8_t>(c);
      if (Status status = choose_book(s, rows, side, c, &books->of[side][i]); !status) {
        return status;
      }
      if (!books->of[side][i]) continue;
      std::vector<uint8_t> bytes;
      serialize_codebook(*books->of[side][i], &bytes);
      out->add(cold_book_key(layer, i, part_of(side), 0), bytes);
    }
  }
  return Status::ok();
}

Status add_layer(const StoreView& s, const ImportedRow* rows, int32_t layer, bool entropy_coded,
                 ChunkBlock* out) {
  LayerBooks books;
  if (entropy_coded) {
    if (Status status = add_books(s, rows, layer, &books, out); !status) return status;
  }
  for (int32_t h = 0; h < s.num_kv_heads; ++h) {
    const ChunkKey key = cold_row_key(layer, h);
    std::vector<uint8_t> payload;
    ByteWriter w(&payload);
    for (int32_t side = 0; side < kStoreSides; ++side) w.i32(rows[h].tokens.of[side]);
    out->add(key, payload);
    for_each_page(s, rows[h], [&](int32_t side, int32_t i, int32_t used, const uint8_t* packed) {
      payload.clear();
      encode_cold_page(s.layouts[side], packed, used, books.side(side), &payload);
      out->add(cold_page_key(key, part_of(side), i), payload);
    });
  }
  return Status::ok();
}

Status read_book(int32_t layer, int32_t side, Component c, ColdChunks* chunks,
                 std::optional<Codebook>* book) {
  const ChunkKey key = cold_book_key(layer, static_cast<uint8_t>(c), part_of(side), 0);
  if (!chunks->has(key)) return Status::ok();
  std::vector<uint8_t> bytes;
  if (Status s = chunks->read(key, &bytes); !s) return s;
  Result<Codebook> found = parse_codebook(bytes.data(), static_cast<int64_t>(bytes.size()));
  if (!found) return chunks->at(key, found.status());
  if (found->component != c) {
    return chunks->at(key, Status(StatusCode::kCorrupt, "is of the other component"));
  }
  *book = std::move(*found);
  return Status::ok();
}

Result<SideCounts> read_counts(const StoreView& s, const SequenceInfo& info, const ChunkKey& key,
                               ColdChunks* chunks) {
  std::vector<uint8_t> payload;
  if (Status status = chunks->read(key, &payload); !status) return status;
  ByteReader r(payload);
  SideCounts tokens;
  for (int32_t side = 0; side < kStoreSides; ++side) tokens.of[side] = r.i32();
  if (r.at_end() && row_counts_fit(s, info, tokens)) return tokens;
  return chunks->at(key, Status(StatusCode::kCorrupt, "token counts"));
}

// Appends the packed pages of a row.
Status read_pages(const StoreView& s, const ChunkKey& row, const SideCounts& tokens,
                  const LayerBooks& books, ColdChunks* chunks, std::vector<uint8_t>* packed) {
  std::vector<uint8_t> payload;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (int32_t i = 0; i < pages_for(tokens.of[side], s.page_tokens(side)); ++i) {
      const ChunkKey key = cold_page_key(row, part_of(side), i);
      if (Status status = chunks->read(key, &payload); !status) return status;
      const int32_t used = s.page_used(side, i, tokens.of[side]);
      const Status status =
          decode_cold_page(s.layouts[side], payload, used, books.side(side), packed);
      if (!status) return chunks->at(key, status);
    }
  }
  return Status::ok();
}

// Appends the rows of a layer as an export has them.
Status read_layer(const StoreView& s, const SequenceInfo& info, int32_t layer, ColdChunks* chunks,
                  std::vector<uint8_t>* out) {
  std::vector<SideCounts> tokens;
  SideCounts all;
  for (int32_t h = 0; h < s.num_kv_heads; ++h) {
    const Result<SideCounts> counts = read_counts(s, info, cold_row_key(layer, h), chunks);
    if (!counts) return counts.status();
    tokens.push_back(*counts);
    for (int32_t side = 0; side < kStoreSides; ++side) {
      all.of[side] = larger_of(all.of[side], counts->of[side]);
    }
  }
  LayerBooks books;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (const Component c : kComponents) {
      if (all.of[side] == 0 || !has_coded_fields(s.layouts[side], c)) continue;
      const Status status =
          read_book(layer, side, c, chunks, &books.of[side][static_cast<size_t>(c)]);
      if (!status) return status;
    }
  }
  std::vector<uint8_t> packed;
  for (int32_t h = 0; h < s.num_kv_heads; ++h) {
    packed.clear();
    const Status status = read_pages(s, cold_row_key(layer, h), tokens[h], books, chunks, &packed);
    if (!status) return status;
    export_packed_row(tokens[h], packed, out);
  }
  return Status::ok();
}

Status first_failure(const std::vector<Status>& all) {
  const auto failed = std::find_if(all.begin(), all.end(), [](const Status& s) { return !s; });
  return failed == all.end() ? Status::ok() : *failed;
}

}  // namespace

Result<std::vector<ChunkBlock>> cold_tiered_chunks(const KvStoreConfig& config,
                                                   const std::vector<uint8_t>& exported,
                                                   const ColdOptions& options,
                                                   ColdSequence* sequence) {
  const Result<StoreView> made = view_of(config);
  if (!made) return made.status();
  const StoreView& view = *made;
  const Result<ImportedSequence> rows =
      split_sequence(config, view, exported.data(), exported.size());
  if (!rows) return rows.status();
  sequence->info = rows->info;
  const int32_t layers = config.layout.num_layers;
  std::vector<ChunkBlock> blocks(layers);
  std::vector<Status> status(layers);
  parallel_for(layers, options.threads, [&](int64_t layer) {
    status[layer] = add_layer(view, &rows->rows[layer * view.num_kv_heads],
                              static_cast<int32_t>(layer), options.entropy_coded, &blocks[layer]);
  });
  if (Status s = first_failure(status); !s) return s;
  return blocks;
}

Result<std::vector<uint8_t>> exported_tiered_sequence(const KvStoreConfig& config,
                                                      const ColdSequence& sequence, int32_t threads,
                                                      ColdChunks* chunks) {
  const Result<StoreView> made = view_of(config);
  if (!made) return made.status();
  const StoreView& view = *made;
  if (Status s = check_exported_info(config, sequence.info); !s) {
    return chunks->at(cold_store_key(), s);
  }
  const int32_t layers = config.layout.num_layers;
  std::vector<std::vector<uint8_t>> rows(layers);
  std::vector<Status> status(layers);
  parallel_for(layers, threads, [&](int64_t layer) {
    status[layer] =
        read_layer(view, sequence.info, static_cast<int32_t>(layer), chunks, &rows[layer]);
  });
  if (Status s = first_failure(status); !s) return s;
  std::vector<uint8_t> bytes = export_header(config, view, sequence.info);
  for (const std::vector<uint8_t>& layer : rows) {
    bytes.insert(bytes.end(), layer.begin(), layer.end());
  }
  return bytes;
}

}  // namespace tierkv

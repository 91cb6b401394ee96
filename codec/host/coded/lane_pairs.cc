// SPDX-License-Identifier: Apache-2.0
// The plain steps. The fast forms are in lane_pairs_simd.cc.
#include "codec/host/coded/lane_pairs.h"

#include <cstring>

#include "codec/format/huffman.h"

namespace tierkv {

namespace {

// One stream by one tree, without a data-dependent branch.
bool walk_one_tree(const Codebook& book, const StreamSet& set, const uint32_t* words, int32_t s,
                   uint16_t* entries) {
  uint16_t found[kMaxStreamSymbols + 1];
  const int64_t n =
      decode_tree(words, set.bounds[s], set.bounds[s + 1], book.tree, set.symbols, found);
  if (n != set.symbols) return false;
  for (int32_t i = 0; i < set.symbols; ++i) {
    entries[i * set.streams + s] = table_entry(book, found[i]);
  }
  return true;
}

// One stream by the trees of its dim blocks.
bool walk_trees(const SliceBooks& books, const StreamSet& set, const uint32_t* words, int32_t s,
                uint16_t* entries) {
  uint32_t bit = set.bounds[s];
  const int32_t per_fragment = books.symbols_per_fragment();
  for (int32_t i = 0; i < set.symbols; ++i) {
    const int32_t f = dim_block_at(books.order, set.dim_blocks, i / per_fragment % set.dim_blocks);
    const Codebook& book = *books.of[f];
    uint32_t node = 0;
    for (; node < kLeaf; ++bit) {
      if (bit == set.bounds[s + 1]) return false;
      node = book.tree[2 * node + (words[bit / 32] >> bit % 32 & 1)];
    }
    entries[i * set.streams + s] = table_entry(book, node - kLeaf);
  }
  return bit == set.bounds[s + 1];
}

// The entries of one dim block: `symbols` of every stream.
void expand_fragment(const Codebook& codebook, int32_t symbols, const uint16_t* entries,
                     uint16_t* first, uint16_t* second) {
  const auto base = static_cast<uint32_t>(codebook.base);
  const int32_t streams = codebook.streams_per_lane * kWarpLanes, n = symbols * streams;
  const auto code = [base](uint32_t digit) { return static_cast<uint16_t>(base + digit); };
  switch (codebook.mode) {
    // With two streams a lane's symbols alternate between them, so entry i of all streams is
    // already one or two rows of 32 lanes in the order of the pairs.
    case BlockMode::kPair:
      for (int32_t i = 0; i < n; ++i) first[i] = code(entries[i] >> 6 & 31u);
      for (int32_t i = 0; i < n; ++i) second[i] = code(entries[i] >> 11);
      break;
    case BlockMode::kSplit:
      for (int32_t i = 0; i < n; ++i) first[i] = code(16 * (entries[i] >> 6 & 15u));
      for (int32_t i = 0; i < n; ++i) second[i] = code(16 * (entries[i] >> 10 & 15u));
      break;
    case BlockMode::kSingle:  // symbols 2 i and 2 i + 1 of a stream are a pair
      for (int32_t i = 0; i < n / 2; ++i) {
        const uint16_t* pair = entries + i / streams * 2 * streams + i % streams;
        first[i] = code(pair[0] >> 6);
        second[i] = code(pair[streams] >> 6);
      }
      break;
    default:  // kQuad: an entry is two pairs, 32 apart
      for (int32_t i = 0; i < n; ++i) {
        const int32_t pair = i / kWarpLanes * 2 * kWarpLanes + i % kWarpLanes;
        first[pair] = code(entries[i] >> 6 & 3u);
        second[pair] = code(entries[i] >> 8 & 3u);
        first[pair + kWarpLanes] = code(entries[i] >> 10 & 3u);
        second[pair + kWarpLanes] = code(entries[i] >> 12 & 3u);
      }
  }
}

}  // namespace

bool decode_streams_reference(const SliceBooks& books, const StreamSet& set, uint16_t* entries) {
  uint32_t words[(kMaxPayloadBits + 31) / 32];
  memcpy(words, set.payload, static_cast<size_t>(set.bounds[set.streams] + 31) / 32 * 4);
  const bool single = books.single();
  for (int32_t s = 0; s < set.streams; ++s) {
    const bool whole = single ? walk_one_tree(books.first(), set, words, s, entries)
                              : walk_trees(books, set, words, s, entries);
    if (!whole) return false;
  }
  return true;
}

void expand_entries(const SliceBooks& books, int32_t dim_blocks, const uint16_t* entries,
                    TilePlanes* planes) {
  const int32_t symbols = books.symbols_per_fragment(), entries_each = symbols * books.streams();
  for (int32_t i = 0; i < dim_blocks; ++i) {
    const int32_t f = dim_block_at(books.order, dim_blocks, i);
    const int32_t at = f * kPairsPerFragment * kWarpLanes;
    expand_fragment(*books.of[f], symbols, entries + i * entries_each, planes->first + at,
                    planes->second + at);
  }
}

void scatter_tile_reference(const TilePlanes& planes, Component component, const SliceCodes& out) {
  const bool key = component == Component::kKey;
  const auto store = [&](int32_t token, int32_t dim, uint16_t code) {
    if (token >= out.tokens || dim >= out.dims) return;
    out.codes[token * out.stride + dim] = static_cast<int16_t>(code);
  };
  for (int32_t i = 0; i < dim_block_count(out.dims) * kPairsPerFragment * kWarpLanes; ++i) {
    const int32_t p = i / kWarpLanes;
    const PairPosition at =
        pair_position(component, 0, p / kPairsPerFragment, p % kPairsPerFragment, i % kWarpLanes);
    store(at.token, at.dim, planes.first[i]);
    store(at.token + !key, at.dim + key, planes.second[i]);
  }
}

}  // namespace tierkv

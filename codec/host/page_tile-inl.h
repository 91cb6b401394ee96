// SPDX-License-Identifier: Apache-2.0
// The fragment order of a tile as register shuffles. Compiled once per SIMD target; the plain
// statement of the same order is code_position().
//
// Between tokens and tiles stand two forms:
//
//   unit rows: head_dim * bits / 8 bytes per token. 16 bits: the patterns in order. Fewer: 8 units
//   per dim block, unit j joining the codes of dims j and j + 8 (and, of 2 bits, the same two of
//   the next block), as they share a byte or half-word of the tile.
//
//   quads: 16 bytes per (word w, g): word w of the four lanes 4g + t.
//
// Keys: a quad is a piece of one or two unit rows. Values: a quad is a column of the unit rows, so
// pieces of 8 or 16 rows are transposed. A tile is then quads again, four (two, one) words per lane
// and access.
#if defined(TIERKV_CODEC_PAGE_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TIERKV_CODEC_PAGE_TILE_INL_H_
#undef TIERKV_CODEC_PAGE_TILE_INL_H_
#else
#define TIERKV_CODEC_PAGE_TILE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>

#include "codec/host/page_codec.h"

#if HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace tierkv {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using U8 = hn::FixedTag<uint8_t, 16>;
using U16 = hn::FixedTag<uint16_t, 8>;
using U32 = hn::FixedTag<uint32_t, 4>;
using Bytes = hn::Vec<U8>;

constexpr int32_t kMaxWords = kMaxPageHeadDim / 4;  // per lane, 16 bits
constexpr int32_t kMaxRowBytes = kMaxPageHeadDim * 2;

struct UnitRows {
  alignas(64) uint8_t row[kTileTokens][kMaxRowBytes];
};
struct Quads {
  alignas(64) uint8_t at[kMaxWords][8][16];
};

HWY_INLINE Bytes load_lower(const uint8_t* p) {
  return hn::ZeroExtendVector(U8(), hn::LoadU(hn::FixedTag<uint8_t, 8>(), p));
}
HWY_INLINE void store_lower(Bytes v, uint8_t* p) {
  hn::StoreU(hn::LowerHalf(v), hn::FixedTag<uint8_t, 8>(), p);
}

// One round of interleaving n vectors i and i + n / 2 rotates the bits of (vector, element);
// log2(n) rounds transpose an n x n block of elements of type D, which is its own inverse.
template <class D, size_t kRows>
HWY_INLINE void transpose(Bytes (&v)[kRows]) {
  const D d;
  const U8 d8;
  for (size_t n = kRows; n > 1; n /= 2) {
    Bytes w[kRows];
    for (size_t i = 0; i < kRows / 2; ++i) {
      const auto a = hn::BitCast(d, v[i]), b = hn::BitCast(d, v[i + kRows / 2]);
      w[2 * i] = hn::BitCast(d8, hn::InterleaveLower(d, a, b));
      w[2 * i + 1] = hn::BitCast(d8, hn::InterleaveUpper(d, a, b));
    }
    for (size_t i = 0; i < kRows; ++i) v[i] = w[i];
  }
}

// Tokens 0, 8, 1, 9, ...: the order of the bytes of a value word.
constexpr int32_t paired_token(size_t i) {
  return static_cast<int32_t>(i / 2 + 8 * (i % 2));
}

// The word of a 16-byte piece of a unit row, for 16 and 8 bits.
constexpr int32_t piece_word(int32_t bits, Component component, int32_t piece, int32_t token_half) {
  if (bits == 8 || component == Component::kKey) return 2 * piece + token_half;
  return 4 * (piece / 2) + piece % 2 + 2 * token_half;
}

// The functions below go from rows to quads and on to the tile (kPack), or back: a transpose is its
// own inverse.

// Wide units: 16 and 8 bits.
template <bool kPack>
HWY_INLINE void move_wide(TileLayout tile, Component component, UnitRows* rows, Quads* quads) {
  const U8 d;
  for (int32_t piece = 0; piece < tile.words_per_lane() / 2; ++piece) {
    for (int32_t half = 0; half < 2; ++half) {
      uint8_t(*quad)[16] = quads->at[piece_word(tile.type.bits(), component, piece, half)];
      const auto row = [&](int32_t i) { return rows->row[i + 8 * half] + 16 * piece; };
      Bytes v[8];
      for (int32_t i = 0; i < 8; ++i) v[i] = hn::Load(d, kPack ? row(i) : quad[i]);
      if (component == Component::kValue) transpose<U16>(v);
      for (int32_t i = 0; i < 8; ++i) hn::Store(v[i], d, kPack ? quad[i] : row(i));
    }
  }
}

// Byte units: 4 and 2 bits. Rows are padded, so the last odd word may be loaded and stored with a
// partner.
template <bool kPack>
HWY_INLINE void move_byte_keys(int32_t words, UnitRows* rows, Quads* quads) {
  const U8 d;
  for (int32_t w = 0; w < words; ++w) {
    for (int32_t g = 0; g < 8; ++g) {
      uint8_t *lower = rows->row[g] + 8 * w, *upper = rows->row[g + 8] + 8 * w;
      if (kPack) {
        hn::Store(hn::InterleaveLower(d, load_lower(lower), load_lower(upper)), d, quads->at[w][g]);
      } else {
        const Bytes v = hn::Load(d, quads->at[w][g]);
        store_lower(hn::ConcatEven(d, v, v), lower);
        store_lower(hn::ConcatOdd(d, v, v), upper);
      }
    }
  }
}
template <bool kPack>
HWY_INLINE void move_byte_values(int32_t words, UnitRows* rows, Quads* quads) {
  const U8 d;
  for (int32_t w = 0; w < words; w += 2) {
    const auto row = [&](size_t i) { return rows->row[paired_token(i)] + 8 * w; };
    const auto quad = [&](size_t i) { return quads->at[w + static_cast<int32_t>(i / 8)][i % 8]; };
    Bytes v[16];
    for (size_t i = 0; i < 16; ++i) v[i] = hn::Load(d, kPack ? row(i) : quad(i));
    transpose<U8>(v);
    for (size_t i = 0; i < 16; ++i) hn::Store(v[i], d, kPack ? quad(i) : row(i));
  }
}

template <bool kPack>
HWY_INLINE void move_tile(int32_t words, Quads* quads, uint8_t* tile) {
  const U8 d;
  const U32 d32;
  int32_t w = 0;
  for (; w + 4 <= words; w += 4) {
    for (int32_t g = 0; g < 8; ++g) {
      const auto lane = [&](int32_t t) { return tile + 128 * w + 64 * g + 16 * t; };
      const auto quad = [&](int32_t i) { return quads->at[w + i][g]; };
      Bytes v[4];
      for (int32_t i = 0; i < 4; ++i) v[i] = hn::LoadU(d, kPack ? quad(i) : lane(i));
      transpose<U32>(v);
      for (int32_t i = 0; i < 4; ++i) hn::StoreU(v[i], d, kPack ? lane(i) : quad(i));
    }
  }
  if (words & 2) {
    for (int32_t g = 0; g < 8; ++g) {
      uint8_t *first = quads->at[w][g], *second = quads->at[w + 1][g];
      uint8_t *low = tile + 128 * w + 32 * g, *high = low + 16;
      const auto a = hn::BitCast(d32, hn::LoadU(d, kPack ? first : low));
      const auto b = hn::BitCast(d32, hn::LoadU(d, kPack ? second : high));
      if (kPack) {
        hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d32, a, b)), d, low);
        hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d32, a, b)), d, high);
      } else {
        hn::StoreU(hn::BitCast(d, hn::ConcatEven(d32, b, a)), d, first);
        hn::StoreU(hn::BitCast(d, hn::ConcatOdd(d32, b, a)), d, second);
      }
    }
    w += 2;
  }
  if ((words & 1) == 0) return;
  if (kPack) {
    memcpy(tile + 128 * w, quads->at[w], 128);
  } else {
    memcpy(quads->at[w], tile + 128 * w, 128);
    memset(quads->at[w + 1], 0, 128);  // the partner of an odd last word
  }
}

template <bool kPack>
HWY_INLINE void move_units(TileLayout layout, Component component, UnitRows* rows, Quads* quads) {
  if (layout.type.bits() >= 8) return move_wide<kPack>(layout, component, rows, quads);
  if (component == Component::kKey) {
    return move_byte_keys<kPack>(layout.words_per_lane(), rows, quads);
  }
  move_byte_values<kPack>(layout.words_per_lane(), rows, quads);
}

HWY_INLINE void pack_tile(UnitRows* rows, TileLayout layout, Component component, uint8_t* tile) {
  Quads quads;
  move_units<true>(layout, component, rows, &quads);
  move_tile<true>(layout.words_per_lane(), &quads, tile);
}
HWY_INLINE void unpack_tile(uint8_t* tile, TileLayout layout, Component component, UnitRows* rows) {
  Quads quads;
  move_tile<false>(layout.words_per_lane(), &quads, tile);
  move_units<false>(layout, component, rows, &quads);
}

// codes [head_dim], one byte each, to and from a unit row.
HWY_INLINE void fold_codes(const uint8_t* codes, TileLayout tile, uint8_t* row) {
  const U8 d;
  for (int32_t dim = 0; dim < tile.head_dim; dim += kDimBlock) {
    const Bytes a = hn::LoadU(d, codes + dim), a_high = hn::ShiftRightBytes<8>(d, a);
    if (tile.type == kCodes8) {
      hn::StoreU(hn::InterleaveLower(d, a, a_high), d, row + dim);
    } else if (tile.type == kCodes4) {
      store_lower(hn::Or(a, hn::ShiftLeft<4>(a_high)), row + dim / 2);
    } else {
      const Bytes b = hn::LoadU(d, codes + dim + kDimBlock), b_high = hn::ShiftRightBytes<8>(d, b);
      const Bytes even = hn::Or(a, hn::ShiftLeft<2>(a_high));
      const Bytes odd = hn::Or(hn::ShiftLeft<4>(b), hn::ShiftLeft<6>(b_high));
      store_lower(hn::Or(even, odd), row + dim / 4);
      dim += kDimBlock;
    }
  }
}
HWY_INLINE void unfold_codes(const uint8_t* row, TileLayout tile, uint8_t* codes) {
  const U8 d;
  const Bytes low2 = hn::Set(d, 3), low4 = hn::Set(d, 15);
  for (int32_t dim = 0; dim < tile.head_dim; dim += kDimBlock) {
    if (tile.type == kCodes8) {
      const Bytes v = hn::LoadU(d, row + dim);
      store_lower(hn::ConcatEven(d, v, v), codes + dim);
      store_lower(hn::ConcatOdd(d, v, v), codes + dim + 8);
    } else if (tile.type == kCodes4) {
      const Bytes v = load_lower(row + dim / 2);
      store_lower(hn::And(v, low4), codes + dim);
      store_lower(hn::ShiftRight<4>(v), codes + dim + 8);
    } else {
      const Bytes v = load_lower(row + dim / 4);
      store_lower(hn::And(v, low2), codes + dim);
      store_lower(hn::And(hn::ShiftRight<2>(v), low2), codes + dim + 8);
      store_lower(hn::And(hn::ShiftRight<4>(v), low2), codes + dim + 16);
      store_lower(hn::ShiftRight<6>(v), codes + dim + 24);
      dim += kDimBlock;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tierkv
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET != HWY_SCALAR

#endif  // TIERKV_CODEC_PAGE_TILE_INL_H_

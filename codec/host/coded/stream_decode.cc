// SPDX-License-Identifier: Apache-2.0
// The fast steps of stream_decode.h, compiled for AVX2 and for what every processor has, and chosen
// at run time. AVX2 comes with BMI2, whose shifts by a register make the lookup loop. No vector
// here is longer than 256 bits, so AVX-512 has no version of its own.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/host/coded/stream_decode.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "codec/host/coded/stream_decode.h"

HWY_BEFORE_NAMESPACE();
namespace tierkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Streams at a time: the latencies of their lookups overlap, and their bits stay in registers.
constexpr int32_t kStreamsAtOnce = 8;
// A window has at least this many bits, which hold these symbols whatever they are.
constexpr int32_t kWindowBits = 56;
constexpr int32_t kSafeSymbols = kWindowBits / kMaxCodeLength;

// bits != 0.
HWY_INLINE uint32_t leading_zeros(uint64_t bits) {
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX2
  // Every processor with AVX2 has it, but Highway's target does not name it, and then the compiler
  // takes an instruction that is many times slower on some of them.
  uint64_t n;
  asm("lzcnt %1, %0" : "=r"(n) : "r"(bits) : "cc");
  return static_cast<uint32_t>(n);
#else
  return static_cast<uint32_t>(std::countl_zero(bits));
#endif
}

struct Lookup {
  const uint16_t* table;
  uint64_t index_mask;

  // The next symbol of a window, which moves on. An entry's low six bits are its length, and a
  // shift looks at nothing else.
  HWY_INLINE uint64_t take(uint64_t bits, uint16_t* entry) const {
    const uint64_t found = table[bits & index_mask];
    *entry = static_cast<uint16_t>(found);
    return bits >> (found & 63);
  }
};

// The table of a stream's symbol i.
struct OneTable {
  Lookup lookup;
  HWY_INLINE Lookup at(int32_t) const { return lookup; }
};
struct TableOfSymbol {
  const Lookup* of;  // [symbols]
  HWY_INLINE Lookup at(int32_t i) const { return of[i]; }
};

// Where the windows of neighbouring streams begin. A window is the bits of a stream from there on
// in its low end, above them a one and zeros: so its leading zeros count the bits that have left
// it since byte `at`, and a window from which more was taken than it had is 0.
struct Group {
  const uint8_t* at[kStreamsAtOnce];
  uint8_t skip[kStreamsAtOnce];  // bits

  HWY_INLINE void advance(int32_t k, uint32_t bits) {
    at[k] += bits >> 3;
    skip[k] = bits & 7;
  }
  HWY_INLINE uint64_t window(int32_t k) const {
    uint64_t bits;
    memcpy(&bits, at[k], sizeof(bits));
    return (bits | uint64_t{1} << 63) >> skip[k];
  }
};

// Symbols `from` and following of one stream with windows that hold them whatever they are.
template <int32_t kStreams, class Tables>
HWY_NOINLINE void take_safely(const Tables& tables, int32_t from, int32_t symbols, int32_t k,
                              Group* group, uint16_t* entries) {
  for (int32_t i = 0; i < symbols;) {
    uint64_t bits = group->window(k);
    const int32_t end = std::min(symbols, i + kSafeSymbols);
    for (; i < end; ++i) bits = tables.at(from + i).take(bits, entries + i * kStreams);
    group->advance(k, leading_zeros(bits));
  }
}

// kCount symbols of every stream of the group, from symbol `from` on, from one window each, and new
// windows. Where a window was too short they are taken again, safely. entries: of symbol `from`.
template <int32_t kCount, int32_t kStreams, class Tables>
HWY_INLINE void take_windows(const Tables& tables, int32_t from, Group* group, uint16_t* entries,
                             uint64_t (&bits)[kStreamsAtOnce]) {
#pragma GCC unroll 16
  for (int32_t i = 0; i < kCount; ++i) {
    const Lookup lookup = tables.at(from + i);
#pragma GCC unroll 8
    for (int32_t k = 0; k < kStreamsAtOnce; ++k) {
      bits[k] = lookup.take(bits[k], entries + i * kStreams + k);
    }
  }
#pragma GCC unroll 8
  for (int32_t k = 0; k < kStreamsAtOnce; ++k) {
    if (HWY_UNLIKELY(bits[k] == 0)) {
      take_safely<kStreams>(tables, from, kCount, k, group, entries + k);
    } else {
      group->advance(k, leading_zeros(bits[k]));
    }
    bits[k] = group->window(k);
  }
}

template <int32_t kCount, int32_t kStreams, class Tables>
bool decode_group(const Tables& tables, const StreamSet& set, int32_t first, uint16_t* entries) {
  Group group;
  uint64_t bits[kStreamsAtOnce];
  for (int32_t k = 0; k < kStreamsAtOnce; ++k) {
    group.at[k] = set.payload;
    group.advance(k, set.bounds[first + k]);
    bits[k] = group.window(k);
  }
  uint16_t* const to = entries + first;
  const int32_t n = set.symbols;
  int32_t i = 0;
  // Some windows take one symbol more, so that none is left for a last short one.
  for (; (n - i) % kCount != 0 && n - i > kCount; i += kCount + 1) {
    take_windows<kCount + 1, kStreams>(tables, i, &group, to + i * kStreams, bits);
  }
  for (; n - i >= kCount; i += kCount) {
    take_windows<kCount, kStreams>(tables, i, &group, to + i * kStreams, bits);
  }
  for (; i < n; ++i) take_windows<1, kStreams>(tables, i, &group, to + i * kStreams, bits);
  bool whole = true;
  for (int32_t k = 0; k < kStreamsAtOnce; ++k) {
    whole &= 8 * (group.at[k] - set.payload) + group.skip[k] == set.bounds[first + k + 1];
  }
  return whole;
}

template <int32_t kCount, int32_t kStreams, class Tables>
bool decode_groups(const Tables& tables, const StreamSet& set, uint16_t* entries) {
  bool whole = true;
  for (int32_t first = 0; first < kStreams; first += kStreamsAtOnce) {
    whole &= decode_group<kCount, kStreams>(tables, set, first, entries);
  }
  return whole;
}

// As many symbols a window as it will seldom be too short for: at the block's mean they take
// kUsualBits.
constexpr int32_t kUsualBits = 46;
template <int32_t kStreams, class Tables>
bool decode_with(const Tables& tables, const StreamSet& set, uint16_t* entries) {
  const auto bits = static_cast<int32_t>(set.bounds[kStreams]);
  const int32_t symbols = kStreams * set.symbols;
  if (8 * bits <= kUsualBits * symbols) return decode_groups<8, kStreams>(tables, set, entries);
  if (7 * bits <= kUsualBits * symbols) return decode_groups<7, kStreams>(tables, set, entries);
  if (6 * bits <= kUsualBits * symbols) return decode_groups<6, kStreams>(tables, set, entries);
  return decode_groups<kSafeSymbols, kStreams>(tables, set, entries);
}

template <class Tables>
bool decode_all(const Tables& tables, const StreamSet& set, uint16_t* entries) {
  return set.streams == kWarpLanes ? decode_with<kWarpLanes>(tables, set, entries)
                                   : decode_with<2 * kWarpLanes>(tables, set, entries);
}

bool decode(const SliceBooks& books, const StreamSet& set, uint16_t* entries) {
  const auto lookup = [&](int32_t f) {
    return Lookup{books.of[f]->table.data(), books.of[f]->table.size() - 1};
  };
  if (books.single()) return decode_all(OneTable{lookup(0)}, set, entries);
  Lookup of_symbol[kMaxBlockCodes / kWarpLanes];
  const int32_t per_fragment = books.symbols_per_fragment();
  for (int32_t i = 0; i < set.symbols;) {
    for (int32_t n = 0; n < set.dim_blocks; ++n, i += per_fragment) {
      std::fill_n(of_symbol + i, per_fragment,
                  lookup(dim_block_at(books.first().component, set.dim_blocks, n)));
    }
  }
  return decode_all(TableOfSymbol{of_symbol}, set, entries);
}

#if HWY_TARGET != HWY_SCALAR
// Eight lanes are two rows of a fragment's quarter. A vector of two blocks holds those of both
// quarters of a dim block.
constexpr int32_t kQuarterDims = 8;
using D8 = hn::FixedTag<uint16_t, 8>;
#if HWY_MAX_BYTES >= 32
using D16 = hn::FixedTag<uint16_t, 16>;
constexpr int32_t kDimsAtOnce = 16;
HWY_INLINE hn::Vec<D16> load_eights(const uint16_t* lower, const uint16_t* upper) {
  return hn::Combine(D16(), hn::Load(D8(), upper), hn::Load(D8(), lower));
}
#else
using D16 = D8;
constexpr int32_t kDimsAtOnce = 8;
HWY_INLINE hn::Vec<D16> load_eights(const uint16_t* lower, const uint16_t*) {
  return hn::Load(D16(), lower);
}
#endif
using V16 = hn::Vec<D16>;

struct Pairs {
  V16 first, second;
};

// The entries of a dim block.
struct Fragment {
  const uint16_t* entries;
  uint16_t base;

  // The codes of the eight lanes from `at` on, and of those `apart` further.
  HWY_INLINE Pairs load(int32_t at, int32_t apart) const {
    const D16 d;
    const V16 entry = load_eights(entries + at, entries + at + apart);
    const V16 offset = hn::Set(d, base);
    const V16 first = hn::And(hn::ShiftRight<6>(entry), hn::Set(d, 31));
    return {hn::Add(first, offset), hn::Add(hn::ShiftRight<11>(entry), offset)};
  }
};

// Keys: the four lanes of a row hold eight neighbouring channels of one token. r and r + 2 lie in
// the same tokens.
HWY_INLINE void scatter_keys(const Fragment& from, int32_t at, uint16_t* to, int64_t stride) {
  const D16 d;
  for (int32_t q = 0; q < 4; ++q, to += 2 * stride) {
    const Pairs p = from.load(at + q * 8, 2 * kWarpLanes);
    hn::StoreU(hn::InterleaveLower(d, p.first, p.second), d, to);
    hn::StoreU(hn::InterleaveUpper(d, p.first, p.second), d, to + stride);
  }
}

// Row t of v gets lanes t, 4 + t, 8 + t, ... of the 32 in v: a transpose of 8 x 4 in each block.
HWY_INLINE void transpose(V16 (&v)[4]) {
  const D16 d;
  const hn::Repartition<uint64_t, D16> d64;
  const V16 a = hn::InterleaveLower(d, v[0], v[1]), b = hn::InterleaveUpper(d, v[0], v[1]);
  const V16 c = hn::InterleaveLower(d, v[2], v[3]), e = hn::InterleaveUpper(d, v[2], v[3]);
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, a, b));
  const auto low23 = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
  const auto high01 = hn::BitCast(d64, hn::InterleaveLower(d, c, e));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, c, e));
  v[0] = hn::BitCast(d, hn::InterleaveLower(d64, low01, high01));
  v[1] = hn::BitCast(d, hn::InterleaveUpper(d64, low01, high01));
  v[2] = hn::BitCast(d, hn::InterleaveLower(d64, low23, high23));
  v[3] = hn::BitCast(d, hn::InterleaveUpper(d64, low23, high23));
}

// Values: the eight lanes of equal t hold eight neighbouring channels of two tokens. r and r + 1
// lie in the same tokens.
HWY_INLINE void scatter_values(const Fragment& from, int32_t at, uint16_t* to, int64_t stride) {
  const D16 d;
  V16 first[4], second[4];
  for (int32_t q = 0; q < 4; ++q) {
    const Pairs p = from.load(at + q * 8, kWarpLanes);
    first[q] = p.first;
    second[q] = p.second;
  }
  transpose(first);
  transpose(second);
  for (int32_t t = 0; t < 4; ++t, to += 2 * stride) {
    hn::StoreU(first[t], d, to);
    hn::StoreU(second[t], d, to + stride);
  }
}

void scatter_tile(const SliceBooks& books, const uint16_t* entries, const SliceCodes& out) {
  const bool whole = out.tokens == kTileTokens && out.dims % kDimBlock == 0;
  alignas(64) int16_t padded[kTileTokens * kSliceDims];
  auto* const rows = reinterpret_cast<uint16_t*>(whole ? out.codes : padded);
  const int64_t stride = whole ? out.stride : kSliceDims, half = 8 * stride;
  const int32_t blocks = dim_block_count(out.dims);
  for (int32_t i = 0; i < blocks; ++i, entries += kPairsPerFragment * kWarpLanes) {
    const int32_t f = dim_block_at(books.first().component, blocks, i);
    const Fragment from{entries, static_cast<uint16_t>(books.of[f]->base)};
    for (int32_t dim = 0; dim < kDimBlock; dim += kDimsAtOnce) {
      const int32_t quarter = dim / kQuarterDims;
      uint16_t* const to = rows + f * kDimBlock + dim;
      if (books.first().component == Component::kKey) {
        scatter_keys(from, 2 * quarter * kWarpLanes, to, stride);
        scatter_keys(from, (2 * quarter + 1) * kWarpLanes, to + half, stride);
      } else {
        scatter_values(from, quarter * kWarpLanes, to, stride);
        scatter_values(from, (quarter + 2) * kWarpLanes, to + half, stride);
      }
    }
  }
  if (whole) return;
  for (int32_t t = 0; t < out.tokens; ++t) {
    std::copy_n(padded + t * kSliceDims, out.dims, out.codes + t * out.stride);
  }
}
#else
void scatter_tile(const SliceBooks& books, const uint16_t* entries, const SliceCodes& out) {
  scatter_entries(books, entries, out);
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace tierkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tierkv {

HWY_EXPORT(decode);
HWY_EXPORT(scatter_tile);

bool decode_streams(const SliceBooks& books, const StreamSet& set, uint16_t* entries) {
  return HWY_DYNAMIC_DISPATCH(decode)(books, set, entries);
}
void scatter_pairs(const SliceBooks& books, const uint16_t* entries, const SliceCodes& out) {
  HWY_DYNAMIC_DISPATCH(scatter_tile)(books, entries, out);
}

}  // namespace tierkv
#endif
